#!/usr/bin/env bash
# Prints the path of a Python that can build and test this project, or says why there is none.
#
# Each candidate is run to see whether it works: version managers put shims on PATH that fail when run. If
# $PYTHON is set, it is the only candidate, so that a typing error in it does not go unnoticed.
set -uo pipefail

versions="3.12 3.13 3.14" # in order of preference; requirements/ pins packages for these only

# Prints the interpreter's path, or on standard error what it lacks. For a candidate in a virtual environment
# that is the path of its *base* interpreter: the environment may be our own .venv, which is about to be removed.
probe='
import importlib.util, os, sys, sysconfig
if not (3, 12) <= sys.version_info[:2] <= (3, 14):
    sys.exit("it is Python %d.%d" % sys.version_info[:2])
lacks = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    lacks.append("the C headers (Python.h)")
if lacks:
    sys.exit("it lacks " + " and ".join(lacks))
print(getattr(sys, "_base_executable", "") or sys.executable)
'

candidates() {
  if [[ -n "${PYTHON:-}" ]]; then
    echo "$PYTHON"
    return
  fi
  local version
  for version in $versions; do type -aP "python$version"; done
  type -aP python3
  for version in $versions; do
    compgen -G "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version*/bin/python$version"
    compgen -G "${UV_PYTHON_INSTALL_DIR:-${HOME:-}/.local/share/uv/python}/*/bin/python$version"
  done
  command -v uv >/dev/null && uv python find --no-project '>=3.12,<3.15' 2>/dev/null
}

tried=""
while read -r candidate; do
  if answer=$("$candidate" -c "$probe" 2>&1 </dev/null); then
    echo "${answer##*$'\n'}" # the last line: warnings may precede it
    exit 0
  fi
  answer=${answer%%$'\n'*} # the first line; of a message of the shell only its end
  tried+="  $candidate: ${answer#*sh: line *: }"$'\n'
done < <(candidates)

cat >&2 <<MESSAGE
No usable Python 3.12, 3.13 or 3.14 was found. Tried:
${tried:-  nothing: there is no python3 on PATH
}Install one with its venv module and headers (Debian, Ubuntu: python3.12 python3.12-venv
python3.12-dev; elsewhere: pyenv install 3.12, or uv python install 3.12),
or name one: make env PYTHON=path/to/python3.12
MESSAGE
exit 1
