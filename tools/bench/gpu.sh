#!/usr/bin/env bash
# On a machine with a GPU: builds the native module in place, runs tests/gpu and the GPU benchmark
# (gpu.py), and writes one JSON file with both and the machine. Takes less than 8 minutes.
#
#   tools/bench/gpu.sh [--fake] [arguments of gpu.py: see tools/bench/gpu.py --help]
#
# --fake tries all of it but the tests where there is no GPU: on the fake CUDA driver of tests/native, at
# a tiny size. Its numbers mean nothing, and go to build/bench.
#
# Results go to $OUT if that is set (with the output of parts that failed), else to tools/bench/results.
# PYTHON names the Python (python3). Needs no network and no installation of this package: only a Python
# with torch, numpy, psutil, pytest, pytest-timeout, setuptools, cmake and ninja, and a C++ compiler.
#
# What such a machine may lack (Megatron, msgspec, a new nanobind: see gpu-wheels.txt) is taken from
# wheels in .whl/, or in the folder $WHEELS, which git ignores and which has to travel along. It is made,
# where there is a network, in the repository's root, for Linux on x86-64 and Python 3.12, by
#
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux_2_39_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux2014_x86_64 -d .whl -r tools/bench/gpu-wheels.txt
#
# Without Megatron the comparison with it is left out, and said to be. A native module that is there
# already serves where it cannot be built.
#
# Ends with 3 where there is no GPU, with 1 where the build, a test or a part of the benchmark fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
wheels=${WHEELS:-.whl}
fake=
for argument in "$@"; do
  case $argument in
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --fake) fake=1 ;;
  esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' TERM INT

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -d "$wheels" ]; then
  for wheel in "$wheels"/*.whl; do # one by one: a wheel that is not for this machine loses no other
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
      --disable-pip-version-check --root-user-action ignore --target "$work/site" "$wheel" ||
      echo "gpu.sh: $wheel was not installed" >&2
  done
  export PYTHONPATH=$PWD:$work/site${PYTHONPATH#"$PWD"}
fi

if [ -z "$fake" ] &&
  ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>"$work/torch"; then
  tail -n 3 "$work/torch" >&2
  echo "gpu.sh: $python finds no GPU here (or no torch); nothing was measured." >&2
  exit 3
fi

native="as found"
if [ -z "$fake" ]; then
  echo "gpu.sh: building"
  if timeout 150 "$python" setup.py -q build_ext --inplace >"$work/build" 2>&1; then
    native="built here"
  else
    tail -n 40 "$work/build" >&2
    native="as found: it could not be built here"
    echo "gpu.sh: the native module was not built" >&2
  fi
fi
"$python" -c 'import megatron_datastates.pipeline.saver' || {
  echo "gpu.sh: this package does not import with $python; see --help for what it needs" >&2
  exit 1
}

"$python" tools/bench/gpu.py --budget $((455 - SECONDS)) --native "$native" "$@" &
child=$!
trap 'kill -TERM $child 2>/dev/null; wait $child; exit 1' TERM INT
wait $child
