#!/usr/bin/env bash
# Runs tests with the lowest releases that setup.cfg allows of what the package needs. They are installed into a
# folder of their own that precedes .venv on the path. Left out: torch, which takes an environment of its own; click,
# as the tests need its newer test runner; and tests of zarr, which needs a newer numpy, and of what commands import,
# as older releases of numpy import more.
# ARGS is passed to pytest: by default all tests of one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=.venv/bin/python
names="msgspec|numpy|rich|zstandard"
if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then
  names="msgspec|rich|zstandard" # there is no wheel of the lowest numpy
fi
mapfile -t lowest < <(sed -nE "s/^    ($names)>=/\1==/p" setup.cfg)

folder=$PWD/.venv/lowest
if [[ ! -e $folder/complete ]] || [[ $(<"$folder/complete") != "${lowest[*]}" ]]; then
  rm -rf "$folder"
  "$python" -m pip install -q --no-deps --target "$folder" "${lowest[@]}"
  mkdir "$folder/zarr" # as if it were not installed
  echo 'raise ModuleNotFoundError("zarr needs a newer numpy")' >"$folder/zarr/__init__.py"
  echo "${lowest[*]}" >"$folder/complete"
fi

echo "[lowest] ${lowest[*]}"
# shellcheck disable=SC2086  # ARGS holds several words
PYTHONPATH=$folder "$python" -m pytest -q -p no:cacheprovider -p no:zarr -m "not long" \
  ${ARGS:--n 2 tests/golden tests/unit} -k "not zarr and not show_and_args_import" \
  --ignore tests/unit/test_zarr_view.py --ignore tests/unit/test_zarr_legacy.py
