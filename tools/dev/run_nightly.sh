#!/usr/bin/env bash
# `make nightly`: what takes hours. Each stage prints its figures; the first that fails ends the run.
# The last line is "N passed, N failed". Shorter, for a try: `make nightly SIM_RUNS=1000 FUZZ_SECONDS=10
# KILLS=50 RESTARTS=5 SOFTROCE_KILLS=10 CERTIFY_MINUTES=15 SOAK_SECONDS=60 REPEATS=1 VERIFIES=0`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
# shellcheck source=tools/dev/stages.sh
source tools/dev/stages.sh

on_exit() { end_load; }

# Starts two processes that use all the CPU time they get, for tests that must not depend on load.
begin_load() {
  load=()
  for _ in 1 2; do
    (while :; do :; done) &
    load+=($!)
  done
}
end_load() {
  [[ -z "${load[*]:-}" ]] || kill "${load[@]}" 2>/dev/null
  load=()
}

# whole_stage NAME COMMAND...: COMMAND is `make test` or `make verify`, whose last line has the counts.
whole_stage() {
  local name=$1 start=$SECONDS log=$log_dir/$1.log code=0 ok=0 bad=1
  echo "== $name"
  "${@:2}" >"$log" 2>&1 || code=$?
  read -r ok bad < <(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
  passed=$((passed + ${ok:-0}))
  failed=$((failed + ${bad:-1}))
  if [[ $code -ne 0 || "${bad:-1}" -ne 0 ]]; then
    tail -n 200 "$log"
    echo "== $name FAILED after $((SECONDS - start)) s (log: $log)"
    exit 1
  fi
  echo "== $name: $ok passed, $((SECONDS - start)) s"
}

stage dependencies tools/install-deps.sh
stage build "${make[@]}" everything fuzzers
stage sim "${make[@]}" sim RUNS="${SIM_RUNS:-200000}" JOBS=2
stage sim-proof "${make[@]}" sim-proof
SPINWIRE_TEST_KILLS=${KILLS:-1000} test_stage kills \
  "${make[@]}" check-tests FILTER='SlowKill*' TEST_TIMEOUT=7200
SPINWIRE_TEST_LONG=1 test_stage races \
  "${make[@]}" check-tests FILTER='SlowWaiting.*:SlowSoftverbsWake.*:SlowSoftverbsRevoked.*' TEST_TIMEOUT=7200
SPINWIRE_TEST_RESTARTS=${RESTARTS:-100} test_stage restarts \
  "${make[@]}" check-tests FILTER='SlowRollingRestart.*' TEST_TIMEOUT=7200
if has_softroce; then
  SOFTROCE_KILLS=${SOFTROCE_KILLS:-200} test_stage softroce-kills \
    "${make[@]}" test-softroce FILTER=SurvivesKills SOFTROCE_TIMEOUT=7200
fi
# As an owner of new hardware does it: all tests, and all figures beside perftest's.
if has_softroce; then
  CERTIFY_MINUTES=${CERTIFY_MINUTES:-120} test_stage softroce-certify \
    "${make[@]}" test-softroce FILTER=IsCertified SOFTROCE_TIMEOUT=$((60 * ${CERTIFY_MINUTES:-120} + 600))
fi
SPINWIRE_TEST_SOAK=${SOAK_SECONDS:-7200} test_stage soak \
  "${make[@]}" check-tests FILTER='SlowSoak.*' TEST_TIMEOUT=$((2 * ${SOAK_SECONDS:-7200} + 600))
FUZZ_SECONDS=${FUZZ_SECONDS:-1800} test_stage fuzz "${make[@]}" fuzz-coverage
# Neither may depend on what else the machine does. A stage has as much time as a slow machine needs.
begin_load
for ((i = 1; i <= ${REPEATS:-10}; ++i)); do
  whole_stage "test-beside-load-$i" "${make[@]}" test TEST_TIMEOUT=7200
done
for ((i = 1; i <= ${VERIFIES:-3}; ++i)); do
  whole_stage "verify-beside-load-$i" "${make[@]}" verify TEST_TIMEOUT=14400 SOFTROCE_TIMEOUT=14400
done
end_load
