#!/usr/bin/env bash
# Runs tests/native with the native module and the fake CUDA driver under sanitizers of g++: address (with
# leaks), thread, undefined. Arguments: which of them (default: all three, in parallel, since tests mostly wait).
# ARGS is passed to pytest. Fails if a test fails, or if a sanitizer reports anything in any process.
#
# Each uses its own copy of the sources and its own build in build/sanitizers/NAME: the module in the source tree
# stays as it is, and the package contains no code for sanitizers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

root=$PWD
python=$root/.venv/bin/python
ours=$root/tools/env/sanitizers
# For thread-local memory. With the default model, glibc allocates and frees it unseen by the thread sanitizer,
# which then reports its reuse as a race.
tls_model=-ftls-model=initial-exec
chosen=("$@")
((${#chosen[@]})) || chosen=(address thread undefined)

declare -A symbols=([address]=__asan_report [thread]=__tsan_read [undefined]=__ubsan_handle)
declare -A planted=([address]="overflow leak" [thread]=race [undefined]="sum misaligned")

say() { printf '[sanitizers] %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

compile() { # SANITIZER: prints the compiler and its flags, of what is built outside of CMake
  # Tests compile, too; the compiler must not run under the sanitizer.
  echo "env -u LD_PRELOAD ${CXX:-c++} -fsanitize=$1 -fno-omit-frame-pointer $tls_model"
}

build() { # SANITIZER, in its folder: a fresh copy of the sources, and what they and planted.cc compile to
  rm -rf cuda megatron_datastates tests
  (cd "$root" && tar -c --exclude='*.so' --exclude=__pycache__ \
    LICENSE README.md setup.cfg setup.py cuda megatron_datastates tests) | tar -x
  # A separate build type: Release strips symbols.
  local arguments="-DMDS_SANITIZE=$1 -DCMAKE_BUILD_TYPE=Sanitized '-DCMAKE_CXX_FLAGS=-O1 -DNDEBUG $tls_model'"
  CMAKE_BUILD_PARALLEL_LEVEL=1 CMAKE_ARGS=$arguments "$python" setup.py -q build_ext --inplace
  nm megatron_datastates/engine/_native*.so | grep "${symbols[$1]}" >/dev/null ||
    fail "the module was built without the $1 sanitizer"
  # -O0: the optimizer may remove a planted fault.
  $(compile "$1") -g -O0 -shared -fPIC -pthread -o planted.so "$ours/planted.cc"
}

under() { # SANITIZER COMMAND...: runs it with the sanitizer loaded first, as Python was built without
  local library options preload=
  options="log_path=$PWD/reports/report:strip_path_prefix=$PWD/"
  if [[ $1 != undefined ]]; then
    for library in "lib${1:0:1}san.so" libstdc++.so.6; do
      library=$(${CXX:-c++} -print-file-name="$library")
      [[ $library == /* ]] || fail "${CXX:-c++} has no $library: g++ is needed"
      preload+="$library "
    done
  fi
  # PYTHONMALLOC: the leak checker does not see pointers in objects that lie in Python's own arenas.
  # abort_on_error: pytest then names the test. die_after_fork: a forked child may start threads.
  # OMP_NUM_THREADS: torch's OpenMP is not built with sanitizers, so they do not see its barriers.
  env "LD_PRELOAD=$preload" OMP_NUM_THREADS=1 "CXX=$(compile "$1")" PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1 \
    "PYTHONPATH=$ours" "MDS_SANITIZER=$1" "MDS_SANITIZER_REPORTS=$PWD/reports" \
    "ASAN_OPTIONS=$options:abort_on_error=1:leak_check_at_exit=0:stack_trace_format='    #%n %p %F %L %M'" \
    "TSAN_OPTIONS=$options:die_after_fork=0" "UBSAN_OPTIONS=$options:print_stacktrace=1" "${@:2}"
}

notices() { # SANITIZER FAULT: whether it reports the planted fault
  rm -rf reports
  mkdir reports
  under "$1" "$python" - "$2" <<<"import ctypes, sys, plugin
ctypes.CDLL('./planted.so')[sys.argv[1]]()
plugin.pytest_sessionfinish()" >planted.log 2>&1 || true
  grep -qrE 'AddressSanitizer: heap-buffer|leak of [0-9]+|ThreadSanitizer: data race|runtime error' reports
}

run() { # SANITIZER
  local fault status=0
  cd "$root/build/sanitizers/$1"
  build "$1"
  for fault in ${planted[$1]}; do
    notices "$1" "$fault" || fail "$1 did not notice the fault '$fault' of planted.cc: $(cat planted.log)"
  done
  rm -rf reports
  mkdir reports
  # shellcheck disable=SC2086  # ARGS holds several words
  # The GPU benchmark is left out: it is a separate program and loads the package's normal build.
  under "$1" "$python" -m pytest -q -p no:cacheprovider -p plugin tests/native \
    --ignore tests/native/test_gpu_benchmark.py ${ARGS:-} || status=$?
  [[ -z $(ls reports) ]] || { cat reports/*; status=1; }
  return $status
}

declare -A jobs
for sanitizer in "${chosen[@]}"; do
  [[ -n ${symbols[$sanitizer]:-} ]] || fail "unknown sanitizer '$sanitizer': expected address, thread or undefined"
  mkdir -p "build/sanitizers/$sanitizer"
  (run "$sanitizer") >"build/sanitizers/$sanitizer/log" 2>&1 &
  jobs[$sanitizer]=$!
done
failed=()
for sanitizer in "${chosen[@]}"; do
  wait "${jobs[$sanitizer]}" || failed+=("$sanitizer")
  say "$sanitizer after $SECONDS s:"
  cat "build/sanitizers/$sanitizer/log"
done
((${#failed[@]} == 0)) || fail "failed: ${failed[*]}"
