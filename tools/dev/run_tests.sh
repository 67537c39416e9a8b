#!/usr/bin/env bash
# Everything that `make test` does, stage by stage, stopping at the first that fails. Logs are kept
# in build/log. The last line is always "N passed, N failed": the sum over all runs of the test
# programs, and the planted defects that were seen; a stage that fails without a failed test counts
# as one failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

make=("${MAKE:-make}" --no-print-directory)
log_dir=build/log
passed=0
failed=0
skipped=0

finish() {
  local code=$?
  [[ -z "${asan:-}" ]] || kill "$asan" 2>/dev/null
  [[ -z "${builds:-}" ]] || kill -- "-$builds" 2>/dev/null
  [[ $code -eq 0 || $failed -gt 0 ]] || failed=1
  [[ $skipped -eq 0 ]] || echo "skipped tests: $skipped (named in $log_dir)"
  echo "$passed passed, $failed failed"
}
trap finish EXIT
trap 'exit 130' INT TERM

# stage NAME COMMAND...: runs it in sight.
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

# The sum of the numbers in the lines of log $1 that look like "[ $2 ] N test...", one for each
# program that ran; nothing without one.
reported() {
  sed -n "s/^\[ *$2 *\] \([0-9][0-9]*\) tests\{0,1\}\([.,].*\)\{0,1\}\$/\1/p" "$1" |
    awk '{ sum += $1 } END { if (NR) print sum }'
}

# What the failed tests of log $1 printed, each from its start to its end; without one, the end of
# the log.
failures() {
  awk '
    /^\[ RUN      \] / { text = ""; }
    { text = text $0 "\n" }
    /^\[  FAILED  \] .*\([0-9]+ ms\)$/ { printf "%s", text; found = 1 }
    /^\[(       OK |  FAILED  |  SKIPPED )\] / { text = "" }
    END { exit !found }' "$1" || tail -n 60 "$1"
}

# test_stage NAME COMMAND...: COMMAND runs the test program; its tests are counted from its log.
test_stage() {
  local start=$SECONDS code=0
  echo "== $1"
  "${@:2}" >"$log_dir/$1.log" 2>&1 || code=$?
  judge "$1" "$code" "$start"
}

# judge NAME CODE START: what a run of the test program, begun at START, comes to.
judge() {
  local name=$1 code=$2 start=$3 log=$log_dir/$1.log ok bad skip
  ok=$(reported "$log" PASSED)
  bad=$(reported "$log" FAILED)
  skip=$(reported "$log" SKIPPED)
  if [[ -z "$ok" ]]; then
    # It died before its summary: count what it had done, and its death.
    ok=$(grep -c '\[       OK \]' "$log")
    bad=$(($(grep -cE '^\[  FAILED  \] .*\([0-9]+ ms\)$' "$log") + 1))
  fi
  passed=$((passed + ok))
  failed=$((failed + ${bad:-0}))
  skipped=$((skipped + ${skip:-0}))
  [[ -z "$skip" ]] || grep -E '^\[  SKIPPED \] [^ ]+$' "$log" | sort -u
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
  echo "== $name: $ok passed, $((SECONDS - start)) s"
}

# What the later stages need. The two sanitizers' are one long compilation each and a little more:
# they go together.
later_builds() {
  local other code=0
  "${make[@]}" VARIANT=asan tests &
  other=$!
  "${make[@]}" VARIANT=tsan tests && "${make[@]}" fuzzers || code=$?
  wait "$other" && "${make[@]}" clang-others && return "$code"
}

# In a process group of its own, with what others leave of the processors.
begin_builds() {
  set -m
  (renice -n 19 -p "$BASHPID" >/dev/null && later_builds) >"$log_dir/builds.log" 2>&1 &
  builds=$!
  set +m
}

end_builds() {
  local code=0 start=$SECONDS
  renice -n 0 -g "$builds" >/dev/null || true
  wait "$builds" || code=$?
  builds=
  if [[ $code -ne 0 ]]; then
    tail -n 100 "$log_dir/builds.log"
    echo "== builds FAILED (log: $log_dir/builds.log)"
    exit 1
  fi
  echo "== builds for the other compiler and the sanitizers: $((SECONDS - start)) s more"
}

mkdir -p "$log_dir"
export GTEST_ARGS=--gtest_color=no

if [[ "${SOFTROCE:-on}" == off ]]; then
  stage dependencies tools/install-deps.sh
else
  stage dependencies tools/install-deps.sh --softroce
fi
stage build "${make[@]}" everything
stage layers-self-test tools/dev/check_layers.sh --self-test
stage tidy "${make[@]}" tidy
test_stage tests "${make[@]}" check FILTER='*' SHARDS=2
stage sim "${make[@]}" sim RUNS=100000 SIM_SECONDS=25 JOBS=2
test_stage conformance "${make[@]}" conformance-run
test_stage conformance-proof "${make[@]}" conformance-proof
begin_builds
if [[ "${SOFTROCE:-on}" == off ]]; then
  echo '== softroce: left out, as SOFTROCE=off asks'
else
  test_stage softroce "${make[@]}" test-softroce
fi
end_builds
# One core each: the tests under ASan, and what else is left.
echo '== asan, in the background'
asan_start=$SECONDS
"${make[@]}" asan >"$log_dir/asan.log" 2>&1 &
asan=$!
test_stage tsan "${make[@]}" tsan
# Here only to see that nothing is found at once: `make fuzz` runs them longer.
FUZZ_SECONDS=2 test_stage fuzz "${make[@]}" fuzz-coverage
stage counts "${make[@]}" count
code=0
wait "$asan" || code=$?
asan=
judge asan "$code" "$asan_start"
stage install test/install/run.sh
