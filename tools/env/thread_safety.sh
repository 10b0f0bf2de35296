#!/usr/bin/env bash
# Checks the annotations of locks in cuda/ (os/mutex.h) by clang's thread-safety analysis. Without a clang it
# says so and checks nothing: no compiler but clang has that analysis. CLANG names a clang++.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

clang=${CLANG:-}
for version in "" -{20..14}; do
  [[ -n $clang ]] || clang=$(command -v "clang++$version" || true)
done
if [[ -z $clang ]]; then
  echo "[lint] no clang++ here: the locks of cuda/ are not checked"
  exit 0
fi
find cuda -name '*.cc' ! -path '*/bindings/*' -print0 |
  xargs -0 -n 1 -P "$(nproc)" "$clang" -std=c++17 -fsyntax-only -Icuda -Wall -Wextra -Wthread-safety -Wthread-safety-beta -Werror
