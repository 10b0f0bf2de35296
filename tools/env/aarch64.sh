#!/usr/bin/env bash
# Builds the native core for aarch64 (GH200, GB200), with warnings as errors, by g++ and by clang, and runs
# tests/native/portable under qemu. The bindings are left out: they need a Python for aarch64.
#
# Debian: apt-get install --no-install-recommends g++-aarch64-linux-gnu qemu-user clang-14
# CLANG selects another clang++. A missing compiler is an error: no check is skipped silently.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

triple=aarch64-linux-gnu
gcc=$triple-g++
clang=${CLANG:-clang++-14}
emulator=qemu-aarch64
PATH=$PWD/.venv/bin:$PATH # cmake, ninja

say() { printf '[aarch64] %s\n' "$*"; }

for program in "$gcc" "$clang" "$emulator" cmake ninja; do
  command -v "$program" >/dev/null || { say "$program is missing: install the packages named at the top of $0" >&2; exit 1; }
done

build() { # NAME OPTION...
  local log=build/aarch64/$1.log
  mkdir -p build/aarch64
  {
    cmake -S cuda -B "build/aarch64/$1" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
      -DMDS_WERROR=ON -DMDS_PORTABLE_TESTS=ON "${@:2}" && cmake --build "build/aarch64/$1"
  } >"$log" 2>&1 || { cat "$log" >&2; say "$1: FAILED" >&2; exit 1; }
  say "$1: built without a warning after $SECONDS s"
}

build g++ "-DCMAKE_CXX_COMPILER=$gcc"
build clang "-DCMAKE_CXX_COMPILER=$clang" "-DCMAKE_CXX_COMPILER_TARGET=$triple"
for name in g++ clang; do
  for cpu in cortex-a57 neoverse-n1 max; do
    "$emulator" -cpu "$cpu" -L "/usr/$triple" "build/aarch64/$name/portable_tests" >/dev/null ||
      { say "tests built by $name fail on $cpu" >&2; exit 1; }
  done
done
say "tests pass under $emulator after $SECONDS s"
