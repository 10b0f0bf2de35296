#!/usr/bin/env bash
# Creates or updates .venv: a Python environment with the pinned packages and this package (editable).
#
# An interrupted run does no harm, because:
#   1. .venv/incomplete exists while pip changes the environment. A run that finds it starts over, since a
#      half-installed package can look complete to pip.
#   2. .venv/packages and .venv/project hold the digest of the files that each part was installed from. They
#      are written last, so a stale or missing one only repeats work.
#   3. The native module is always built by ninja, which rebuilds only what changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

env=.venv
python=$env/bin/python
log=$env/bootstrap.log

say() { printf '[env] %s\n' "$*"; }

# Runs a command with its output in the log. Every 10 s, prints the size of .venv and the log's last line; if
# the command fails, the log's tail.
logged() {
  local status=0 parent=$$ watcher
  echo "+ $*" >>"$log"
  (
    while sleep 10 >/dev/null && kill -0 "$parent" 2>/dev/null; do
      printf '[env] %5d s  %5s  %.70s\n' "$SECONDS" "$(du -sh "$env" 2>/dev/null | cut -f 1)" \
        "$(tail -n 1 "$log" | sed 's/^ *//')"
    done
  ) &
  watcher=$!
  "$@" >>"$log" 2>&1 || status=$?
  kill "$watcher" 2>/dev/null || true
  wait "$watcher" 2>/dev/null || true
  if ((status)); then
    tail -n 60 "$log" >&2
    say "FAILED (exit $status): $*" >&2
    say "The complete output is in $log" >&2
    exit 1
  fi
}

hash_of() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

is_current() { [[ -f $env/$1 && $(<"$env/$1") == "$2" ]]; }

need_compiler() {
  local compiler
  for compiler in ${CXX:-c++ g++ clang++}; do
    command -v "$compiler" >/dev/null && return
  done
  say "No C++ compiler: tried ${CXX:-c++, g++, clang++}. Install one (Debian, Ubuntu: g++) or set CXX." >&2
  exit 1
}

make_environment() {
  local found
  # The scripts of an environment contain its path: a moved or copied one would run the original's code.
  if [[ ! -e $env/incomplete ]] && $python -m pip --version >/dev/null 2>&1 &&
    grep -qF "$(pwd -P)/$env/" "$env/bin/pip" &&
    [[ -z "${PYTHON:-}" || $("$PYTHON" -V 2>&1) == "$($python -V)" ]]; then
    [[ $($python -V) =~ \ 3\.1[234]\. ]] && return
    say "$env has $($python -V), expected 3.12, 3.13 or 3.14: remove it, or let it be replaced:" >&2
    say "make env PYTHON=path/to/python3.12" >&2
    exit 1
  fi
  found=$(tools/env/find_python.sh)
  say "making $env with $("$found" -V) ($found)"
  if [[ -L $env ]]; then
    rm "$env" # a link to the environment of another tree, which stays as it is
  else
    rm -rf "$env/bin" # first, so that an interrupted removal leaves an environment that is recognized as broken
    rm -rf "$env"
  fi
  mkdir "$env"
  touch "$env/incomplete"
  "$found" -m venv "$env"
}

install_packages() {
  local wanted
  wanted=$(hash_of requirements/*.txt)
  is_current packages "$wanted" && return
  say "installing pinned packages: about 5.5 GB in all the first time, since torch brings CUDA (log: $log)"
  touch "$env/incomplete"
  # First pip itself: the bundled version may be too old to resume a broken download.
  logged "$python" -m pip install --progress-bar off -c requirements/lock.txt pip
  logged "$python" -m pip install --progress-bar off -r requirements/test.txt
  rm "$env/incomplete"
  echo "$wanted" >"$env/packages"
}

build_native() {
  say "bringing the native module up to date"
  logged "$python" setup.py build_ext --inplace
}

install_project() {
  local wanted
  wanted=$(hash_of setup.cfg setup.py pyproject.toml megatron_datastates/__init__.py tools/env/bootstrap.sh)
  is_current project "$wanted" && return
  say "installing megatron_datastates, editable"
  touch "$env/incomplete"
  # The pinned dependencies are installed already; without build isolation none is downloaded again.
  # compat: a plain path file. The default installs an import finder, whose own import costs every start of
  # Python in this environment several milliseconds.
  logged "$python" -m pip install --progress-bar off --no-build-isolation --no-deps \
    --config-settings editable_mode=compat --editable .
  rm "$env/incomplete"
  echo "$wanted" >"$env/project"
}

need_compiler
make_environment
: >"$log"
install_packages
build_native
install_project
say "ready after $SECONDS s: $env ($($python -V))"
