#!/usr/bin/env bash
# On a machine with a GPU: builds the native module in place, runs tests/gpu and the GPU benchmark (python -m
# benchmarks.gpu), and writes one JSON file with the results of both and the machine. In two calls of about
# 6 minutes each, and a third of 2:
#
#   benchmarks/gpu/run.sh --call 1     the machine, tests, training in Megatron's own loop
#   benchmarks/gpu/run.sh --call 2     held time, small copies beside ours, steps, loads, Megatron's ways
#   benchmarks/gpu/run.sh --call 3     rates of copies, held time with one connection, page-locking, until published
#   benchmarks/gpu/run.sh [--fake] [--prebuilt] [other arguments: see python -m benchmarks.gpu --help]
#
# --fake tries all of it but the tests where there is no GPU: on the fake CUDA driver of tests/native, at a tiny size.
# Its numbers mean nothing, and go to build/bench.
#
# Results go to $OUT if that is set, else to benchmarks/results: gpu-NAME-DATE-call1.json and so on, and
# gpu-failed.log with the output of parts that failed. A call that finds files of other calls next to its own merges
# them into gpu-NAME-DATE.json. If each call ran on its own machine, merge their files where both are:
#
#   python3 -m benchmarks.gpu --merge FILE-call1.json FILE-call2.json
#
# If the machine runs one command at a time and returns only the files of $OUT, take what is in .whl (below) along,
# and allow 400 s for each of these commands, which leave 3 files at most:
#
#   bash benchmarks/gpu/run.sh --call 1 --memory 128
#   bash benchmarks/gpu/run.sh --call 2 --memory 128
#
# --memory says how much host memory such a machine has in the end, if its system shows less at first.
#
# $PYTHON is the Python to use (default: python3; after `make env`, .venv/bin/python). Needs no network, and this package need not be installed: only a
# Python with torch, numpy, psutil, pytest, pytest-timeout, setuptools, cmake and ninja, and a C++ compiler.
#
# What such a machine may lack (Megatron, msgspec, a new nanobind: see wheels.txt) is installed from wheels in .whl/, or
# in the folder $WHEELS, which git ignores and which has to be carried along. Make it where there is a network, in the
# repository's root, for Linux on x86-64 and Python 3.12, with
#
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#     --platform manylinux_2_39_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux2014_x86_64 -d .whl -r benchmarks/gpu/wheels.txt
#
# Without Megatron the comparison with it is left out, and the results say so.
#
# A native module that was built elsewhere for the same Python can be carried too: $PREBUILT, or else
# .whl/_native*.so (cp megatron_datastates/engine/_native*.so .whl/). It is used where the module cannot be built, or
# with --prebuilt instead of a build; if there is none, a module that is in place already is used. The results say
# which it was.
#
# Exit status: 3 where there is no GPU, 1 where a test or a part of the benchmark fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
wheels=${WHEELS:-.whl}
fake= prebuilt=
for argument in "$@"; do
  case $argument in
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --fake | --quick) fake=1 ;;
    --prebuilt) prebuilt=1 ;;
  esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' TERM INT

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -d "$wheels" ]; then
  for wheel in "$wheels"/*.whl; do # one by one, so that a wheel that is not for this machine affects no other
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
      --disable-pip-version-check --root-user-action ignore --target "$work/site" "$wheel" ||
      echo "run.sh: $wheel was not installed" >&2
  done
  export PYTHONPATH=$PWD:$work/site${PYTHONPATH#"$PWD"}
fi

if [ -z "$fake" ] &&
  ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>"$work/torch"; then
  tail -n 3 "$work/torch" >&2
  echo "run.sh: $python finds no GPU here (or no torch); nothing was measured." >&2
  exit 3
fi

suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
carried=${PREBUILT:-$(compgen -G "$wheels/_native*$suffix" | head -n 1 || true)}

build() {
  timeout 150 "$python" setup.py -q build_ext --inplace >"$work/build" 2>&1
}

place_carried() { # whole, and as if it were old, so that any later build replaces it
  [ -n "$carried" ] && [ -f "$carried" ] || return 1
  local target=megatron_datastates/engine/_native$suffix
  cp "$carried" "$target.carried" && touch -d 2000-01-01 "$target.carried" && mv "$target.carried" "$target"
}

native="as found"
if [ -n "$prebuilt" ]; then
  place_carried || {
    echo "run.sh: --prebuilt, and there is no \$PREBUILT and no $wheels/_native*$suffix" >&2
    exit 1
  }
  native="carried in, as asked for"
elif [ -z "$fake" ]; then
  echo "run.sh: building"
  if build; then
    native="built here"
  else
    tail -n 40 "$work/build" >&2
    if place_carried; then
      native="carried in: it could not be built here"
    else
      native="as found: it could not be built here"
    fi
    echo "run.sh: the native module was not built: $native" >&2
  fi
fi
"$python" -c 'import megatron_datastates.pipeline.saver' || {
  echo "run.sh: this package does not import with $python; see --help for what it needs" >&2
  exit 1
}

"$python" -m benchmarks.gpu --spent "$SECONDS" --native "$native" "$@" &
child=$!
trap 'kill -TERM $child 2>/dev/null; wait $child; exit 1' TERM INT
wait $child
