#!/usr/bin/env bash
# Counts the instructions of one operation and compares them with bench/instructions.txt, which describes
# its format. On a shared machine a time is noise; a count is not.
#
# Each command runs under callgrind with N operations, after as many that do not count: only code inside
# bench::counted does. Two commands run at a time, which changes no count.
#
#   tools/dev/check_counts.sh [BIN]            compare, with programs from BIN (build/bin) and BIN/../unobserved/bin
#   tools/dev/check_counts.sh --record [BIN]   write what was counted into the file
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

record=no
if [[ "${1:-}" == --record ]]; then
  record=yes
  shift
fi
bin=${1:-build/bin}
unobserved_bin=$(dirname "$bin")/unobserved/bin
table=bench/instructions.txt
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# Prints the number of instructions that the given command executes.
count() {
  local log total
  log=$(mktemp "$tmp/log.XXXXXX")
  if ! timeout -k 5 300 valgrind --tool=callgrind --callgrind-out-file=/dev/null \
    --collect-atstart=no --toggle-collect='*spinwire::bench::counted*' "$bin/$1" "${@:2}" \
    >"$log.out" 2>"$log"; then
    echo "check_counts: '$*' failed under callgrind:" >&2
    tail -n 20 "$log.out" "$log" >&2
    return 1
  fi
  total=$(sed -n 's/.*Collected : \([0-9]*\).*/\1/p' "$log" | tail -n 1)
  if [[ -z "$total" || "$total" == 0 ]]; then
    echo "check_counts: '$*': bench::counted did not run" >&2
    return 1
  fi
  echo "$total"
}

# Prints the instructions of one operation, with one decimal; of `cost`, the difference to the program that does
# not observe the hot path, for each of SHARES equal parts; of `few`, with so many times fewer operations.
count_one() {
  local total observed unobserved shares
  if [[ "$1" == cost ]]; then
    shares=$2
    shift 2
    observed=$(count_one "$@") && unobserved=$(bin=$unobserved_bin count_one "$@") || return 1
    awk -v a="$observed" -v b="$unobserved" -v n="$shares" 'BEGIN { printf "%.1f", (a - b) / n }'
    return
  fi
  local operations=$operations
  if [[ "$1" == few ]]; then
    operations=$((operations / $2))
    shift 2
  fi
  total=$(count "$@" "$operations") || return 1
  awk -v total="$total" -v n="$operations" 'BEGIN { printf "%.1f", total / n }'
}

# Fails for a program without a line in the table: its count would never be checked.
check_listed() {
  local program bad=0
  for program in bench/count/*.cc; do
    [[ -e "$program" ]] || continue
    program=count-$(basename "$program" .cc | tr _ -)
    if ! grep -qE "^[^#]*[[:space:]]$program([[:space:]]|\$)" "$table"; then
      echo "check_counts: $program has no line in $table" >&2
      bad=1
    fi
  done
  return $bad
}

# Prints how one count compares with the table; fails when it is too high.
judge() {
  local name=$1 got=$2 recorded=$3 limit=$4
  awk -v name="$name" -v got="$got" -v rec="$recorded" -v limit="$limit" -v tol="$tolerance" '
    BEGIN {
      verdict = "ok"
      slack = rec * tol / 100
      if (slack < 0.5) slack = 0.5  # less than half an instruction is rounding
      if (rec == "-") verdict = "not recorded yet: run make count-record"
      else if (got > rec + slack) verdict = "TOO MANY: grew by more than " tol "%"
      else if (got < rec - slack) verdict = "fewer than recorded: run make count-record"
      if (limit != "-" && got > limit) verdict = "TOO MANY: over its limit"
      printf "  %-32s %10.1f  recorded %8s  limit %8s  %s\n", name, got, rec, limit, verdict
      exit verdict ~ /^TOO MANY/
    }'
}

# Prints what having slept costs an engine that is awake: the difference of a count "NAME_after_sleep" from the
# count NAME. Fails when it is above the limit of the table, or when there is no such count.
judge_sleep() {
  local name=$1 partner=${1%_after_sleep} slept awake
  slept=$(<"$tmp/got.$name")
  awake=$(cat "$tmp/got.$partner" 2>/dev/null) || true
  if [[ -z "$slept" || -z "$awake" ]]; then
    echo "check_counts: $name has no count of $partner to be compared with" >&2
    return 1
  fi
  awk -v name="$name" -v slept="$slept" -v awake="$awake" -v limit="$after_sleep" '
    BEGIN {
      more = slept - awake
      verdict = more > limit ? "TOO MANY: the sleep costs more than its limit" : "ok"
      printf "  %-32s %+10.1f  than awake         limit %8s  %s\n", name, more, limit, verdict
      exit more > limit
    }'
}

# Counts each line of the table, two at a time. Results are in $tmp/got.NAME, empty after a failure.
count_all() {
  local name command
  while read -r name _ _ command <&4; do
    [[ "$name" =~ ^(#|$|tolerance$|operations$|after_sleep$) ]] && continue
    while [[ $(jobs -rp | wc -l) -ge 2 ]]; do wait -n || true; done
    # shellcheck disable=SC2086  # the command is words
    (count_one $command >"$tmp/got.$name" || : >"$tmp/got.$name") &
  done 4<"$table"
  wait
}

main() {
  local tolerance operations after_sleep bad=0 lines=0 line
  tolerance=$(awk '$1 == "tolerance" { print $2 }' "$table")
  operations=$(awk '$1 == "operations" { print $2 }' "$table")
  after_sleep=$(awk '$1 == "after_sleep" { print $2 }' "$table")
  [[ -n "$tolerance" && -n "$operations" && -n "$after_sleep" ]] || {
    echo "check_counts: $table needs a 'tolerance', an 'operations' and an 'after_sleep' line" >&2
    exit 1
  }
  check_listed || bad=1
  count_all

  # shellcheck disable=SC2034
  local name recorded limit command got
  while IFS= read -r line <&3; do
    if [[ "$line" =~ ^[[:space:]]*(#|$|(tolerance|operations|after_sleep)[[:space:]]) ]]; then
      echo "$line" >>"$tmp/table"
      continue
    fi
    read -r name recorded limit command <<<"$line"
    lines=$((lines + 1))
    got=$(<"$tmp/got.$name")
    if [[ -z "$got" ]]; then
      bad=1
      got=$recorded
    elif ! judge "$name" "$got" "$recorded" "$limit"; then
      bad=1
    fi
    [[ "$name" != *_after_sleep ]] || judge_sleep "$name" || bad=1
    printf '%-32s %10s %8s  %s\n' "$name" "$got" "$limit" "$command" >>"$tmp/table"
  done 3<"$table"

  if [[ $lines -eq 0 ]]; then
    echo "check_counts: $table lists no instruction counts" >&2
    exit 1
  fi
  if [[ $record == yes ]]; then
    cp "$tmp/table" "$table"
    exit 0
  fi
  exit $bad
}

main
