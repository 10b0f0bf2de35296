#!/usr/bin/env bash
# Runs the tests that depend most on the file system in a directory, such as one of Lustre, GPFS or NFS.
# Arguments: DIR, and DIR2, the same directory through another mount: then a training on two ranks, each with a mount of
# its own, is killed and resumed, which needs root. ARGS is passed to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

(($# >= 1)) || { echo "usage: $0 DIR [DIR2]" >&2; exit 2; }
python=$PWD/.venv/bin/python
work=$(mktemp -d "$(realpath "$1")/datastates-tests-XXXXXX")
trap 'rm -rf "$work"' EXIT
tests=(tests/golden)
for name in writes reader milestones lazy_copies; do tests+=("tests/native/test_$name.py"); done
for name in atomic_files links save_and_load saving_again failing_saves shared_files publishing tracker_and_retention \
  prune repair verify fallback near_tier near_replicas near_branches dcp convert_command export hostile_files; do
  tests+=("tests/unit/test_$name.py")
done
stat -f -c '[filesystem] %n: %T' "$1"
options=(-q -p no:cacheprovider --basetemp="$work/tests" -o tmp_path_retention_policy=failed -m "not long")
# shellcheck disable=SC2086  # ARGS holds several words
"$python" -m pytest "${options[@]}" "${tests[@]}" ${ARGS:-}
(($# < 2)) || "$python" tests/filesystem/two_mounts.py "$1" "$2"
