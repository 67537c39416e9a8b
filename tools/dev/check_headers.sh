#!/usr/bin/env bash
# Checks that each public header stands alone. It must compile as the only include of a file, twice in a
# row, with both compilers and all warnings, and include nothing that is not installed. Each public type,
# enumerator, function, variable and member has a comment, which lists the errors of a function that can fail.
#
#   tools/dev/check_headers.sh [WARNING FLAGS...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

warnings=("$@")
[[ $# -gt 0 ]] || warnings=(-Wall -Wextra -Wpedantic -Wconversion -Wshadow)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
bad=0

if grep -rnE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' include |
  grep -v '"spinwire/'; then
  echo 'check_headers: public headers include nothing private; third-party headers go in <>' >&2
  bad=1
fi

# sim.h alone refers to the errors of Engine::open() and audit().
if grep -rnE "(those|errors|answers) of (the other |[A-Za-z:]+\()" include/spinwire --exclude=sim.h; then
  echo 'check_headers: each function lists its errors itself' >&2
  bad=1
fi

tools/dev/check_documented.py include/spinwire/*.h || bad=1

while read -r header; do
  unit="$tmp/${header//\//_}.cc"
  printf '#include <%s>\n#include <%s>\n' "$header" "$header" >"$unit"
  for compiler in g++ clang++-14; do
    printf '%s\0%s\0' "$compiler" "$unit"
  done
done < <(cd include && find spinwire -name '*.h' | sort) >"$tmp/jobs"

# Only include/ is on the path, so a private header is never found.
# shellcheck disable=SC2016  # the inner shell expands
WARNINGS="${warnings[*]}" xargs -0 -r -n 2 -P "$(nproc)" sh -c '
  case $1 in
    clang*) WARNINGS="$WARNINGS -Wno-sign-conversion" ;;  # g++ keeps it apart from -Wconversion
  esac
  "$1" -std=c++20 -Werror $WARNINGS -Iinclude -fsyntax-only "$2"
' check <"$tmp/jobs" || bad=1
exit $bad
