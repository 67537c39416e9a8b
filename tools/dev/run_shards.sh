#!/usr/bin/env bash
# Runs a GoogleTest program as N processes at once, each with a share of the tests. There are more shares
# than processes, so that all end at about the same time. Prints the output of one share after another.
# Exits with a code other than 0 if one of them does.
#
#   tools/dev/run_shards.sh N COMMAND...
set -uo pipefail
count=$1
shift

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

shares=$((count == 1 ? 1 : 8 * count))
running=0
for ((i = 0; i < shares; i++)); do
  if ((running == count)); then wait -n && :; else running=$((running + 1)); fi
  (
    code=0
    GTEST_TOTAL_SHARDS=$shares GTEST_SHARD_INDEX=$i "$@" >"$work/$i" 2>&1 || code=$?
    echo "$code" >"$work/$i.code"
  ) &
done
wait

code=0
for ((i = 0; i < shares; i++)); do
  cat "$work/$i"
  one=$(cat "$work/$i.code" 2>/dev/null)
  ((${one:-1} == 0)) || code=${one:-1}
done
exit "$code"
