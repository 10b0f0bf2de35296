#!/usr/bin/env bash
# On a machine with a GPU: builds the native module in place, runs tests/gpu and gpu.py, and writes one
# JSON file with both results and the machine, to $OUT or tools/bench/results. Takes less than 8 minutes.
#
# Needs no network, no Megatron, and no installation of this package: only a Python with torch, numpy,
# pytest, setuptools, cmake, ninja and nanobind, and a C++ compiler. PYTHON names another Python.
# Ends with 3 where there is no GPU, with 1 where the build, a test or the benchmark fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
out=${OUT:-tools/bench/results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>"$work/torch"; then
  tail -n 3 "$work/torch" >&2
  echo "gpu.sh: $python finds no GPU here (or no torch); nothing was measured." >&2
  exit 3
fi

echo "gpu.sh: building"
timeout 180 "$python" setup.py -q build_ext --inplace >"$work/build" 2>&1 || {
  tail -n 40 "$work/build" >&2
  echo "gpu.sh: the native module was not built" >&2
  exit 1
}

# The settings of setup.cfg ask for newer pytest than such a machine may have.
cat >"$work/pytest.ini" <<'INI'
[pytest]
addopts = -ra --import-mode=importlib -p no:cacheprovider
markers =
    gpu: needs a CUDA device
INI
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
tests=0
timeout 150 "$python" -m pytest -c "$work/pytest.ini" --rootdir=. tests/gpu 2>&1 | tee "$work/tests" || tests=1

echo "gpu.sh: measuring"
bench=0
timeout 120 "$python" tools/bench/gpu.py "$@" >"$work/bench.json" || bench=1
cat "$work/bench.json"

mkdir -p "$out"
"$python" - "$work" "$tests" "$out/gpu.json" <<'PY'
import json, pathlib, sys

work, failed, target = pathlib.Path(sys.argv[1]), sys.argv[2] != "0", pathlib.Path(sys.argv[3])
text = (work / "bench.json").read_text()
summary = (work / "tests").read_text().strip().splitlines()[-1].strip("= ")
results = {"tests": {"passed": not failed, "summary": summary}, "benchmark": json.loads(text) if text else None}
target.write_text(json.dumps(results, indent=1) + "\n")
print(f"gpu.sh: {summary}; results are in {target}")
PY
exit $((tests || bench))
