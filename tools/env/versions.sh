#!/usr/bin/env bash
# Runs the conformance tests (pytest's marker of that name) against other releases of megatron-core, each laid
# over .venv in a folder of its own: no dependencies, whatever Python the wheel claims. Arguments: releases
# (default: the newest of each minor version that is supported). ARGS is passed on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=.venv/bin/python
releases=("$@")
((${#releases[@]})) || releases=(0.16.1 0.17.1 0.18.2)

overlay() { # RELEASE: makes its folder, once, and prints it
  local folder=.venv/versions/$1
  if [[ ! -e $folder/complete ]]; then
    rm -rf "$folder"
    # PyYAML: releases before 0.19 import it and do not bring it.
    "$python" -m pip install -q --no-deps --ignore-requires-python --target "$folder" \
      "megatron-core==$1" pyyaml >&2
    touch "$folder/complete"
  fi
  echo "$PWD/$folder"
}

failed=()
for release in "${releases[@]}"; do
  folder=$(overlay "$release")
  echo "[versions] megatron-core $release"
  found=$(PYTHONPATH=$folder "$python" -W ignore -c 'import megatron.core; print(megatron.core.__version__)')
  [[ $found == "$release"* ]] || { echo "[versions] $found was imported instead of $release" >&2; exit 1; }
  # shellcheck disable=SC2086  # ARGS holds several words
  PYTHONPATH=$folder "$python" -m pytest -q -p no:cacheprovider -m conformance ${ARGS:-} || failed+=("$release")
done
((${#failed[@]} == 0)) || { echo "[versions] failed: ${failed[*]}" >&2; exit 1; }
