#!/usr/bin/env bash
# Runs tests of a GoogleTest program. A test that hangs or dies fails alone, with its name, and the rest
# runs on in a new process. Prints the program's output, then the failed tests. Runs in the machine,
# started by engine_tests.sh.
#
#   test/softroce/run_each.sh SECONDS PROGRAM LIST
#
# LIST is a file with one name per line. No test may take longer than SECONDS.
set -uo pipefail
limit=$1 program=$2 list=$3

declare -A verdict=()   # of each ended test
declare -a failed=()
current=                # the running test
deadline=               # of the running test, or of the program's start or end

# Evaluates one line of output.
follow() {
  local name=
  case "$1" in
    '[ RUN      ] '*)
      # Ignores such lines from child processes that are GoogleTest programs, too.
      [[ -z "$current" ]] || return 0
      current=${1#*] }
      deadline=$((SECONDS + limit))
      ;;
    '[       OK ] '* | '[  SKIPPED ] '* | '[  FAILED  ] '*)
      name=${1#*] }
      name=${name%% (*}
      name=${name%%, where*}
      [[ -n "$current" && "$name" == "$current" ]] || return 0
      verdict[$current]=${1%%] *}
      [[ "$1" != *FAILED* ]] || failed+=("$current")
      current=
      deadline=$((SECONDS + limit))
      ;;
  esac
}

# fail TEST WHY
fail() {
  echo "$1 $2"
  echo "[  FAILED  ] $1 ($(((SECONDS - deadline + limit) * 1000)) ms)"
  failed+=("$1")
  verdict[$1]=FAILED
  current=
}

# Runs the tests without a verdict until the program ends or a test takes too long.
run_the_rest() {
  local filter='' name line pid status=0
  while read -r name; do
    [[ -n "${verdict[$name]:-}" ]] || filter+="${filter:+:}$name"
  done <"$list"
  [[ -n "$filter" ]] || return 1
  local before=${#verdict[@]}
  deadline=$((SECONDS + limit))
  # A process group of its own, so that hanging children are killed as well.
  exec {out}< <(exec setsid "$program" --gtest_color=no --gtest_filter="$filter" 2>&1)
  pid=$!
  while ((SECONDS < deadline)); do
    if IFS= read -r -t $((deadline - SECONDS)) line <&"$out"; then
      printf '%s\n' "$line"
      follow "$line"
    elif (($? <= 128)); then
      wait "$pid" || status=$?
      # Status 1 only means failed tests, which have verdicts.
      if ((status > 1)) || [[ -n "$current" ]]; then
        fail "${current:-the program}" "ends the program with status $status"
      fi
      break
    fi
  done
  ((SECONDS < deadline)) || fail "${current:-the program}" "takes longer than $limit s"
  kill -KILL -- "-$pid" 2>/dev/null
  exec {out}<&-
  ((${#verdict[@]} > before))
}

while run_the_rest; do :; done
deadline=$((SECONDS + limit))
while read -r name; do
  [[ -n "${verdict[$name]:-}" ]] || fail "$name" 'does not exist'
done <"$list"
echo "[==========] of these tests ${#failed[@]} failed"
((${#failed[@]} == 0)) || printf '  %s\n' "${failed[@]}"
((${#failed[@]} == 0))
