#!/usr/bin/env bash
# Counts the instructions of one operation and compares them with bench/instructions.txt, whose
# head describes its format. Timing is noise on a shared machine; a count is not.
#
# Each command runs under callgrind with N and with 2N operations. Only what happens inside of
# bench::measured is collected, so set-up, whose length varies, does not count; the difference of
# both runs divided by N is the cost of one operation.
#
#   tools/dev/check_counts.sh [BIN]            compare, with programs from BIN (build/bin)
#   tools/dev/check_counts.sh --record [BIN]   write what was counted into the file
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

record=no
if [[ "${1:-}" == --record ]]; then
  record=yes
  shift
fi
bin=${1:-build/bin}
table=bench/instructions.txt
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

# Prints the instructions that running the given command takes.
count() {
  local log total
  log=$(mktemp "$tmp/log.XXXXXX")
  if ! timeout -k 5 300 valgrind --tool=callgrind --callgrind-out-file=/dev/null \
    --collect-atstart=no --toggle-collect='*spinwire::bench::measured*' "$bin/$1" "${@:2}" \
    >"$log.out" 2>"$log"; then
    echo "check_counts: '$*' failed under callgrind:" >&2
    tail -n 20 "$log.out" "$log" >&2
    return 1
  fi
  total=$(sed -n 's/.*Collected : \([0-9]*\).*/\1/p' "$log" | tail -n 1)
  if [[ -z "$total" || "$total" == 0 ]]; then
    echo "check_counts: '$*': callgrind saw nothing of bench::measured" >&2
    return 1
  fi
  echo "$total"
}

# Prints the instructions of one operation, to one decimal.
count_one() {
  local first second
  first=$(count "$@" "$operations") || return 1
  second=$(count "$@" $((2 * operations))) || return 1
  awk -v a="$first" -v b="$second" -v n="$operations" 'BEGIN { printf "%.1f", (b - a) / n }'
}

# A count that was wanted but never ran would pass for ever.
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

# Says how the count of one line compares; fails when it is too high.
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

main() {
  local tolerance operations bad=0 lines=0 line
  tolerance=$(awk '$1 == "tolerance" { print $2 }' "$table")
  operations=$(awk '$1 == "operations" { print $2 }' "$table")
  [[ -n "$tolerance" && -n "$operations" ]] || {
    echo "check_counts: $table wants a 'tolerance' and an 'operations' line" >&2
    exit 1
  }
  check_listed || bad=1

  # shellcheck disable=SC2034
  local name recorded limit command got
  while IFS= read -r line <&3; do
    if [[ "$line" =~ ^[[:space:]]*(#|$|tolerance|operations) ]]; then
      echo "$line" >>"$tmp/table"
      continue
    fi
    read -r name recorded limit command <<<"$line"
    lines=$((lines + 1))
    # shellcheck disable=SC2086  # the command is words
    if ! got=$(count_one $command); then
      bad=1
      got=$recorded
    elif ! judge "$name" "$got" "$recorded" "$limit"; then
      bad=1
    fi
    printf '%-32s %10s %8s  %s\n' "$name" "$got" "$limit" "$command" >>"$tmp/table"
  done 3<"$table"

  [[ $lines -gt 0 ]] || echo '  skipped: no instruction counts are listed'
  if [[ $record == yes ]]; then
    cp "$tmp/table" "$table"
    exit 0
  fi
  exit $bad
}

main
