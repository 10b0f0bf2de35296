#!/usr/bin/env bash
# Runs the tests marked `conformance` with other releases of megatron-core. Each is installed into a folder of its
# own that precedes .venv on the path, without dependencies and whatever Python versions its wheel declares.
# Arguments: releases (default: the last of each supported older minor version). ARGS is passed to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=.venv/bin/python
releases=("$@")
((${#releases[@]})) || releases=(0.16.1 0.17.1 0.18.2)

overlay() { # RELEASE: makes its folder, once, and prints it
  local folder=.venv/versions/$1
  if [[ ! -e $folder/complete ]]; then
    rm -rf "$folder"
    # PyYAML: releases before 0.19 import it without depending on it.
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
  [[ $found == "$release"* ]] || { echo "[versions] expected to import megatron-core $release, found $found" >&2; exit 1; }
  # shellcheck disable=SC2086  # ARGS holds several words
  PYTHONPATH=$folder "$python" -m pytest -q -p no:cacheprovider -m conformance ${ARGS:-} || failed+=("$release")
done
((${#failed[@]} == 0)) || { echo "[versions] failed: ${failed[*]}" >&2; exit 1; }
