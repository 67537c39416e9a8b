#!/usr/bin/env bash
# Runs a GoogleTest program as N processes at once, each with its share of the tests. Prints their output
# one after another. Exits with a code other than 0 if one of them does.
#
#   tools/dev/run_shards.sh N COMMAND...
set -uo pipefail
count=$1
shift

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pids=()
for ((i = 0; i < count; i++)); do
  GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$i "$@" >"$work/$i" 2>&1 &
  pids+=($!)
done

code=0
for ((i = 0; i < count; i++)); do
  wait "${pids[i]}" || code=$?
  cat "$work/$i"
done
exit "$code"
