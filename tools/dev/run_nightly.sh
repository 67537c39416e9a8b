#!/usr/bin/env bash
# `make nightly`: what takes hours. Each stage prints its figures; the first that fails ends the run.
# The last line is "N passed, N failed". Shorter, for a try: `make nightly SIM_RUNS=1000 FUZZ_SECONDS=10
# KILLS=50 SOAK_SECONDS=60 REPEATS=1`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
# shellcheck source=tools/dev/stages.sh
source tools/dev/stages.sh

on_exit() { end_load; }

# Two processes that take all they get of the processors, for tests that must not depend on load.
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

stage dependencies tools/install-deps.sh
stage build "${make[@]}" everything fuzzers
stage sim "${make[@]}" sim RUNS="${SIM_RUNS:-200000}" JOBS=2
SPINWIRE_TEST_KILLS=${KILLS:-1000} test_stage kills \
  "${make[@]}" check-tests FILTER='SlowKill*' TEST_TIMEOUT=7200
SPINWIRE_TEST_SOAK=${SOAK_SECONDS:-7200} test_stage soak \
  "${make[@]}" check-tests FILTER='SlowSoak.*' TEST_TIMEOUT=$((2 * ${SOAK_SECONDS:-7200} + 600))
FUZZ_SECONDS=${FUZZ_SECONDS:-1800} test_stage fuzz "${make[@]}" fuzz-coverage
begin_load
for ((i = 1; i <= ${REPEATS:-10}; ++i)); do
  test_stage "beside-load-$i" "${make[@]}" check SHARDS=2
done
end_load
