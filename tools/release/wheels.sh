#!/usr/bin/env bash
# Builds a source distribution and, from it, wheels for manylinux_2_28 on x86-64 and aarch64, into dist/. Needs no
# container and no second machine: zig brings clang, the symbols of glibc 2.28 for both processors, and a C++ library
# that is linked statically, so that a wheel needs no C++ runtime. auditwheel checks what it needs and sets its tag.
# With a container engine, cibuildwheel does the same natively (pyproject.toml).
#
# Arguments: Pythons, for example python3.11 python3.12 python3.13 python3.14: a wheel for each. ARCHS selects processors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

glibc=2.28
work=$PWD/build/release
(($#)) || { echo "usage: $0 PYTHON..." >&2; exit 2; }

say() { printf '[release] %s\n' "$*"; }

rm -rf "$work/wheels" "$work/source" dist
mkdir -p "$work/wheels" "$work/source"
[[ -e $work/tools/bin/complete ]] || {
  "$1" -m venv --clear "$work/tools"
  "$work/tools/bin/python" -m pip install -q -r requirements/release.txt
  touch "$work/tools/bin/complete"
}
PATH=$work/tools/bin:$PATH
export ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig

# From what git has: files of the working tree that nobody committed are in no release.
git archive HEAD | tar -x -C "$work/source"
python -m build -q --sdist --outdir dist "$work/source"
sdist=$(echo dist/*.tar.gz)

# Python's headers are the same for both processors, but for pyconfig.h, in nothing that a module sees.
wheel() { # ENVIRONMENT ARCH: without isolation, as pip would look for build tools that run on ARCH
  local suffix
  suffix=.$("$1/bin/python" -c 'import sys; print(sys.implementation.cache_tag)')-$2-linux-gnu.so
  env "CXX=python-zig c++ -target $2-linux-gnu.$glibc" "_PYTHON_HOST_PLATFORM=linux-$2" \
    "SETUPTOOLS_EXT_SUFFIX=$suffix" \
    "CMAKE_ARGS=-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$2 -DNB_SUFFIX=$suffix" \
    "$1/bin/python" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$work/wheels" "$sdist"
}

for python in "$@"; do
  "$python" -m venv --clear "$work/env"
  "$work/env/bin/python" -m pip install -q wheel -r <(grep -E '^(cmake|nanobind|ninja|setuptools)==' requirements/test.txt)
  for arch in ${ARCHS:-x86_64 aarch64}; do
    wheel "$work/env" "$arch"
    say "built for $("$python" -V), $arch, after $SECONDS s"
  done
done
for arch in ${ARCHS:-x86_64 aarch64}; do
  auditwheel repair --plat auto --only-plat --wheel-dir dist "$work/wheels/"*"_$arch.whl" >&2
  ls dist/*"manylinux_${glibc/./_}_$arch.whl" >/dev/null # or glibc 2.28 is not enough
done
twine check --strict dist/*
say "dist/ has $(ls dist | wc -l) files after $SECONDS s; try each wheel with tools/release/check.sh"
