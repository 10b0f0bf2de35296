#!/usr/bin/env bash
# Runs the tests marked `conformance` with other releases of megatron-core. Each is installed into a folder of its
# own that precedes .venv on the path, without dependencies and whatever Python versions its wheel declares.
# Arguments: releases (default: the last of each supported older minor version), or folders with a checkout of
# Megatron-LM, where copies are lazy all the same. ARGS is passed to pytest.
set -euo pipefail
shopt -s inherit_errexit # in $(overlay ...): a folder that pip could not fill is not complete
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=.venv/bin/python
releases=("$@")
((${#releases[@]})) || releases=(0.16.1 0.17.1 0.18.2)

overlay() { # RELEASE or CHECKOUT: prints its folder, which is made once for a release
  if [[ -d $1/megatron/core ]]; then
    mkdir -p build/checkout # a folder with this package alone: a checkout has a package `tests`, too
    ln -sfn "$(realpath "$1")/megatron" build/checkout/megatron
    echo "$PWD/build/checkout"
    return
  fi
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
  lazy=() # copies are eager with what is no tested release
  [[ ! -d $release/megatron/core ]] || lazy=(MEGATRON_DATASTATES_LAZY=on)
  found=$(PYTHONPATH=$folder "$python" -W ignore -c 'import megatron.core; print(megatron.core.__file__)' | tail -n 1)
  [[ $found == "$folder/"* ]] || { echo "[versions] expected megatron-core in $folder, found $found" >&2; exit 1; }
  # shellcheck disable=SC2086  # ARGS holds several words
  env "${lazy[@]}" PYTHONPATH="$folder" "$python" -m pytest -q -p no:cacheprovider -m conformance ${ARGS:-} || failed+=("$release")
done
((${#failed[@]} == 0)) || { echo "[versions] failed: ${failed[*]}" >&2; exit 1; }
