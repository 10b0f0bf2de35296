#!/usr/bin/env bash
# Builds Transformer Engine for the torch in .venv, once (about 25 minutes on 2 cores), into a folder of its own, and
# runs tests/te with it: no GPU is needed to import it, to make its layers, and to save and load them.
# Needs the headers of the CUDA toolkit 13 (CUDA_HOME, or where nvcc is). ARGS is passed to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

release=2.15.0
# Its library needs functions that the cuBLAS of torch 2.11 lacks; a newer one is compatible.
cublas=13.10.0.20
folder=$PWD/.venv/te
python=$PWD/.venv/bin/python
nvidia=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia

find_toolkit() { # prints the folder of a toolkit with headers
  local home
  for home in "${CUDA_HOME:-}" "$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /)")")")" /usr/local/cuda \
    /usr/local/cuda-13*; do
    [[ -e $home/include/crt/host_defines.h ]] && { echo "$home"; return; }
  done
  echo "[te] no CUDA toolkit with headers was found: set CUDA_HOME" >&2
  return 1
}

if [[ ! -e $folder/complete ]]; then
  echo "[te] building transformer_engine_torch $release"
  rm -rf "$folder" "$folder.wheel"
  toolkit=$(find_toolkit)
  CUDA_HOME=$toolkit CPATH=$toolkit/include:$nvidia/cu13/include:$nvidia/cudnn/include:$nvidia/nccl/include \
    NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-2} PATH=$PWD/.venv/bin:$PATH \
    "$python" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$folder.wheel" \
    "transformer_engine_torch==$release"
  # All at once: a second `pip install --target` would replace the folder that three of these share, or leave it alone.
  "$python" -m pip install -q --no-deps --target "$folder" "$folder.wheel"/*.whl \
    "transformer_engine==$release" "transformer_engine_cu13==$release" "nvidia-cublas==$cublas" \
    onnxscript==0.7.2 onnx==1.23.2 onnx-ir==1.1.0 ml_dtypes==0.6.0 einops==0.8.2 pydantic==2.14.3 \
    pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 protobuf==7.36.2 nvdlfw-inspect==0.2.2
  touch "$folder/complete"
fi

libraries=$folder/nvidia/cu13/lib
# shellcheck disable=SC2086  # ARGS holds several words
LD_PRELOAD=$libraries/libcublasLt.so.13:$libraries/libcublas.so.13 PYTHONPATH=$PWD:$folder \
  "$python" -m pytest -q -p no:cacheprovider tests/te ${ARGS:-}
