#!/usr/bin/env bash
# Installs a wheel or a source distribution into a fresh environment and runs tests of this tree against it.
#
# Arguments: PYTHON DISTRIBUTION [REQUIREMENT...], for example
#   tools/release/check.sh python3.11 dist/*cp311*x86_64.whl torch==2.6.0 megatron-core==0.16.1
# TESTS selects other tests. The environment takes several GB, as torch brings CUDA, and is removed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

(($# >= 2)) || { echo "usage: $0 PYTHON DISTRIBUTION [REQUIREMENT...]" >&2; exit 2; }
distribution=$(realpath "$2")
tests=${TESTS:-tests/golden tests/native/test_crc32c.py tests/native/test_digests.py tests/native/test_exports.py
  tests/native/test_interpreter_end.py tests/native/test_structure.py tests/native/test_writes.py
  tests/unit/test_activation.py tests/unit/test_conversion.py tests/unit/test_reader.py
  tests/unit/test_save_and_load.py tests/unit/test_verify.py}

say() { printf '[check] %s\n' "$*"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$1" -m venv "$work/env"
python=$work/env/bin/python
"$python" -m pip install -q "$distribution[megatron,test]" "${@:3}"
say "installed after $SECONDS s, with $("$python" -m pip list --format freeze | grep -E '^(torch|numpy|megatron)' | xargs)"

# The tree without the package: what is imported is what was installed.
mkdir "$work/tree"
git ls-files -z -- . ':!megatron_datastates' | xargs -0 tar -c | tar -x -C "$work/tree"
cd "$work/tree"
PATH=$work/env/bin:$PATH
datastates --help >/dev/null
"$python" - <<'CODE'
import sys

from megatron_datastates.engine import _native

assert _native.__file__.startswith(sys.prefix), _native.__file__
CODE
# shellcheck disable=SC2086  # TESTS holds several words
"$python" -m pytest -q -p no:cacheprovider -m "not long" $tests
say "$(basename "$distribution") works with $("$python" -V)"
