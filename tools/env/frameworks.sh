#!/usr/bin/env bash
# Runs tests/frameworks with released frameworks (requirements/frameworks.txt), in an environment of their own that
# also finds what .venv has; then again with the release of megatron-core that NeMo 2 needs. ARGS is passed to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=build/frameworks
python=$folder/bin/python
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if [[ ! -e $folder/complete ]]; then
  rm -rf "$folder"
  .venv/bin/python -m venv "$folder"
  packages .venv/bin/python > "$(packages "$python")/of_venv.pth"
  "$python" -m pip install -q -r requirements/frameworks-imports.txt
  "$python" -m pip install -q --no-deps -r requirements/frameworks.txt
  "$python" -m pip install -q --no-deps --target "$folder/old" megatron-core==0.16.1
  rm -rf "$(packages "$python")/tests" # of verl's wheel, which would hide ours
  touch "$folder/complete"
fi
# shellcheck disable=SC2086  # ARGS holds several words
PYTHONPATH=$PWD "$python" -m pytest -q -p no:cacheprovider tests/frameworks ${ARGS:-}
# shellcheck disable=SC2086
PYTHONPATH=$PWD:$folder/old "$python" -m pytest -q -p no:cacheprovider tests/frameworks/test_frameworks.py ${ARGS:-}
