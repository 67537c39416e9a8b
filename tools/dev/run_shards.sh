#!/usr/bin/env bash
# Runs a GoogleTest program as N processes at once, each with a share of the tests. There are more shares
# than processes, so that all end at about the same time. Prints the output of one share after another.
# Exits with a code other than 0 if one of them does.
#
#   tools/dev/run_shards.sh N COMMAND...
set -uo pipefail
count=$1
shift

declare -A running=() # processes
work=$(mktemp -d)
on_exit() {
  ((${#running[@]} == 0)) || kill "${!running[@]}" 2>/dev/null
  rm -rf "$work"
}
trap on_exit EXIT
trap 'exit 130' INT TERM

code=0
end_one() {
  local pid='' status=0
  wait -n -p pid || status=$?
  if [[ -z "${pid:-}" ]]; then
    # bash does not report a process again that a signal has ended.
    code=1
    wait "${!running[@]}"
    running=()
    return
  fi
  unset "running[$pid]"
  ((status == 0)) || code=$status
}

shares=$((count == 1 ? 1 : 8 * count))
for ((i = 0; i < shares; i++)); do
  ((${#running[@]} < count)) || end_one
  GTEST_TOTAL_SHARDS=$shares GTEST_SHARD_INDEX=$i "$@" >"$work/$i" 2>&1 &
  running[$!]=1
done
while ((${#running[@]} > 0)); do end_one; done

for ((i = 0; i < shares; i++)); do cat "$work/$i"; done
exit "$code"
