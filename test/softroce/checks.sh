# shellcheck shell=bash disable=SC2154  # softroce_test.sh has made $work
# A test is a function that calls `check` and `expect_...`, run in its own subshell. It fails if one of
# them fails, but continues to its end.

failed_tests=()
repeated_tests=()
passed_tests=0

# check DESCRIPTION COMMAND...
check() {
  "${@:2}" && return
  echo "  failed: $1"
  echo "    not so: ${*:2}"
  bad=1
}

expect_equal() {
  [[ "$2" == "$3" ]] && return
  echo "  failed: $1: '$2' where '$3' is expected"
  bad=1
}

expect_text() {
  grep -qF -e "$2" "$3" && return
  echo "  failed: '$2' is not in $1"
  bad=1
}

# run_test NAME [FOLDER]: runs the test with its own folder $dir. Prints its report at the end and in one
# piece, as others run beside it. After a failure also prints $dir/out and $dir/err, indented, so that their
# tests are not counted as ours.
run_test() {
  local name=$1 start=$SECONDS dir=$work/${2:-$1} bad=0
  mkdir "$dir"
  "$name" >"$dir/report" 2>&1 || bad=1
  {
    echo "[ RUN      ] Softroce.$name"
    sed 's/^\[/  [/' "$dir/report"
    if ((bad == 0)); then
      echo ok >"$dir/verdict"
      echo "[       OK ] Softroce.$name ($(((SECONDS - start) * 1000)) ms)"
    else
      show_ends
      echo "[  FAILED  ] Softroce.$name ($(((SECONDS - start) * 1000)) ms)"
    fi
  } >"$dir/told"
  cat "$dir/told"
}

show_ends() {
  local file
  for file in "$dir/out" "$dir/err"; do
    [[ -s "$file" ]] || continue
    echo "  the end of what was printed (${file##*/}):"
    tail -n 40 "$file" | tr -d '\r' | cut -c 1-300 | sed 's/^/  | /'
  done
}

# Prints the last lines of each failed test in a GoogleTest program's output.
show_failed_tests() {
  awk '
    /^\[ RUN      \] / { lines = 0 }
    { line[lines++] = $0 }
    /^\[  FAILED  \] .*\([0-9]+ ms\)$/ {
      for (i = lines > 25 ? lines - 25 : 0; i < lines; ++i) print "  | " line[i]
      lines = 0
    }' "$1" | cut -c 1-400 | tail -n 120
}

most_repeated=3

# failed_attacks FOLDER: the names of failed tests of attacks in the output of a GoogleTest program there. They
# may fail once only because an attack succeeds seldom.
failed_attacks() {
  sed -nE 's/^\[  FAILED  \] (([^ /]+\/)?(Attack|Hostile)[^ ,]*).*/\1/p' "$1/out" 2>/dev/null | sort -u
}

# repeat_alone NAME...: the machines are emulated, and the kernel's driver has defects of its own. So a few
# tests that failed beside others run once more, alone. A defect of ours fails again; a test that passes is
# counted as passed and named at the end. Not so if a test of an attack had failed, or is the test itself: then
# the second run only shows whether the other tests made it fail.
repeat_alone() {
  local name attacks
  for name in "$@"; do
    if (($# <= most_repeated)); then
      echo "Softroce.$name failed beside others; it runs again, alone"
      run_test "$name" "$name-again" &
      wait $!
    fi
    attacks=$(failed_attacks "$work/$name")
    [[ "$name" != Attack* && "$name" != Hostile* ]] || attacks=$name
    if [[ -n "$attacks" ]]; then
      echo "Softroce.$name has failed: no second run mends an attack that has succeeded once: ${attacks//$'\n'/ }"
      failed_tests+=("Softroce.$name")
    elif [[ -e "$work/$name-again/verdict" ]]; then
      passed_tests=$((passed_tests + 1))
      repeated_tests+=("Softroce.$name")
    else
      failed_tests+=("Softroce.$name")
    fi
  done
}

# run_tests ABREAST NAME...
run_tests() {
  local abreast=$1 name failed=()
  shift
  for name in "$@"; do
    while (($(jobs -rp | wc -l) >= abreast)); do wait -n; done
    run_test "$name" &
  done
  wait
  for name in "$@"; do
    if [[ -e "$work/$name/verdict" ]]; then
      passed_tests=$((passed_tests + 1))
    else
      failed+=("$name")
    fi
  done
  repeat_alone "${failed[@]}"
}

finish() {
  echo "[  PASSED  ] $passed_tests tests."
  ((${#repeated_tests[@]} == 0)) || echo "passed only when they ran again, alone: ${repeated_tests[*]}"
  if ((${#failed_tests[@]} > 0)); then
    echo "[  FAILED  ] ${#failed_tests[@]} tests, listed below:"
    printf '[  FAILED  ] %s\n' "${failed_tests[@]}"
    # Repeats the reports, because readers look at the end of a log first.
    local name report
    for name in "${failed_tests[@]}"; do
      for report in "$work/${name#Softroce.}"{,-again}/report; do
        if [[ -e "$report" ]]; then echo "$name:" && tail -n 25 "$report"; fi
      done
    done
  fi
  echo "$passed_tests passed, ${#failed_tests[@]} failed"
  exit $((${#failed_tests[@]} > 0))
}

# Waits up to 30 s until a file contains the text.
wait_for_text() {
  local _
  for _ in $(seq 600); do
    grep -qF -e "$1" "$2" 2>/dev/null && return
    sleep 0.05
  done
  return 1
}

# Checks a folder that was a test's TMPDIR: it has no files, and no process has its current folder in it.
expect_nothing_left() {
  local folder=$1 process left=
  for process in /proc/[0-9]*; do
    [[ "$(readlink "$process/cwd" 2>/dev/null)" != "$folder"/* ]] || left+=" ${process#/proc/}"
  done
  expect_equal 'processes left' "$left" ''
  expect_equal 'folders left' "$(ls "$folder")" ''
}
