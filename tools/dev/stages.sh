# shellcheck shell=bash
# Shared by run_tests.sh, run_verify.sh and run_nightly.sh: stages, and the count of tests.
#
# A stage runs one command and ends the script when the command fails. Logs are kept in build/log. The
# last line is always "N passed, N failed": the sum over all test programs that ran. A stage that fails
# without a failed test counts as one failure.

make=("${MAKE:-make}" --no-print-directory)
log_dir=build/log
passed=0
failed=0
skipped=0

finish() {
  local code=$?
  on_exit
  [[ $code -eq 0 || $failed -gt 0 ]] || failed=1
  [[ $skipped -eq 0 ]] || echo "skipped tests: $skipped (named in $log_dir)"
  echo "$passed passed, $failed failed"
}
on_exit() { :; }  # overridden by a script with background processes
trap finish EXIT
trap 'exit 130' INT TERM

# stage NAME COMMAND...: runs the command and shows its output.
stage() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  if ! "$@" 2>&1 | tee "$log_dir/$name.log"; then
    echo "== $name FAILED after $((SECONDS - start)) s (log: $log_dir/$name.log)"
    exit 1
  fi
  echo "== $name: $((SECONDS - start)) s"
}

# Adds up the lines "[ $2 ] N test..." of log $1, one per program. Prints nothing without such a line.
reported() {
  sed -n "s/^\[ *$2 *\] \([0-9][0-9]*\) tests\{0,1\}\([.,].*\)\{0,1\}\$/\1/p" "$1" |
    awk '{ sum += $1 } END { if (NR) print sum }'
}

# Prints the output of each failed test in log $1, or the end of the log if no test failed.
failures() {
  awk '
    /^\[ RUN      \] / { text = ""; }
    { text = text $0 "\n" }
    /^\[  FAILED  \] .*\([0-9]+ ms\)$/ { printf "%s", text; found = 1 }
    /^\[(       OK |  FAILED  |  SKIPPED )\] / { text = "" }
    END { exit !found }' "$1" || tail -n 60 "$1"
}

# test_stage NAME COMMAND...: runs a test program and counts its tests from the log.
test_stage() {
  local start=$SECONDS code=0
  echo "== $1"
  "${@:2}" >"$log_dir/$1.log" 2>&1 || code=$?
  judge "$1" "$code" "$start"
}

# skips LOG: the skipped tests, each with its reason.
skips() {
  awk '/: Skipped$/ { getline reason; next }
       /^\[  SKIPPED \] [^ ]+ \([0-9]+ ms\)$/ { print "[  SKIPPED ] " $4 ": " reason }' "$1"
}

# judge NAME CODE START: counts the tests of a program that began at START and exited with CODE.
judge() {
  local name=$1 code=$2 start=$3 log=$log_dir/$1.log ok bad skip
  ok=$(reported "$log" PASSED)
  bad=$(reported "$log" FAILED)
  skip=$(reported "$log" SKIPPED)
  if [[ -z "$ok" ]]; then
    # The program died before its summary: counts the passed tests, and one failure.
    ok=$(grep -c '\[       OK \]' "$log")
    bad=$(($(grep -cE '^\[  FAILED  \] .*\([0-9]+ ms\)$' "$log") + 1))
  fi
  passed=$((passed + ok))
  failed=$((failed + ${bad:-0}))
  skipped=$((skipped + ${skip:-0}))
  [[ -z "$skip" ]] || skips "$log" | sort -u
  if [[ $code -ne 0 ]]; then
    grep -E '^\[  FAILED  \] |(ERROR|WARNING): .*Sanitizer|runtime error:' "$log" | sort -u
    failures "$log" | tail -n 200
    echo "== $name FAILED after $((SECONDS - start)) s (log: $log)"
    exit 1
  fi
  if [[ $((ok + ${bad:-0})) -eq 0 ]]; then
    echo "== $name FAILED: it ran no test (log: $log)"
    exit 1
  fi
  grep '^passed only when they ran again' "$log" || true
  echo "== $name: $ok passed, $((SECONDS - start)) s"
}

# Soft-RoCE runs in virtual machines; SOFTROCE=off disables it.
has_softroce() { [[ "${SOFTROCE:-on}" != off ]]; }

mkdir -p "$log_dir"
export GTEST_ARGS=--gtest_color=no
