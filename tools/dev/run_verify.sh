#!/usr/bin/env bash
# `make verify`: every check that `make test` leaves out: the demonstration, formatting, layers and
# clang-tidy, the slow tests, the planted defects, Soft-RoCE, the other compiler, the sanitizers, the
# fuzzers, the instruction counts, a short report, the install test and the Debian packages. Stops at
# the first stage that fails. The last line is "N passed, N failed".
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
# shellcheck source=tools/dev/stages.sh
source tools/dev/stages.sh

declare -A beside=() began=() # process groups of tests in the background, and when they began

on_exit() {
  local group
  for group in "${beside[@]}" ${builds:-}; do kill -- "-$group" 2>/dev/null; done
}

# begin_test NAME COMMAND...: begins a test_stage that runs beside the next stages.
begin_test() {
  echo "== $1, in the background"
  began[$1]=$SECONDS
  set -m
  "${@:2}" </dev/null >"$log_dir/$1.log" 2>&1 &
  beside[$1]=$!
  set +m
}

# end_test NAME: waits for it, and counts its tests.
end_test() {
  local code=0
  wait "${beside[$1]}" || code=$?
  unset "beside[$1]"
  judge "$1" "$code" "${began[$1]}"
}

# Builds for the later stages, both sanitizers side by side.
later_builds() {
  local other code=0
  "${make[@]}" VARIANT=asan tests &
  other=$!
  "${make[@]}" VARIANT=tsan tests && "${make[@]}" fuzzers || code=$?
  wait "$other" && "${make[@]}" clang-others && return "$code"
}

# Starts later_builds in a process group of its own, at the lowest priority.
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

# Installs the Debian packages in a root of their own, with what this machine has for it.
test_packages() {
  tools/install-deps.sh --packages || echo 'packages: goes on with what is there'
  if ! command -v dh >/dev/null; then
    echo 'packages: left out: debhelper is missing'
    return 0
  fi
  "${make[@]}" deb || return
  test/install/packages_test.sh build/deb || [[ $? -eq 77 ]] # 77: left out, it has said why
}

if has_softroce; then
  stage dependencies tools/install-deps.sh --bench --docs --gdb --softroce
else
  stage dependencies tools/install-deps.sh --bench --docs --gdb
fi
stage build "${make[@]}" everything
stage demo "${make[@]}" check-demo
stage layers-self-test tools/dev/check_layers.sh --self-test
stage words-self-test tools/dev/check_words.sh --self-test
stage secrets-self-test tools/dev/check_secrets.sh --self-test
stage documented-self-test tools/dev/check_documented.py --self-test
stage abi-self-test tools/dev/check_abi.sh --self-test
stage tidy "${make[@]}" tidy
stage documentation "${make[@]}" check-man docs check-abi check-metrics
# It uses one processor, and the slow tests wait at times.
begin_test conformance-proof "${make[@]}" conformance-proof
# Two victims of each kind in each phase and at each end; nightly kills more.
SPINWIRE_TEST_KILLS=${SPINWIRE_TEST_KILLS:-72} test_stage slow-tests "${make[@]}" check-tests FILTER=slow SHARDS=2
end_test conformance-proof
stage sim "${make[@]}" sim RUNS=600 JOBS=2
begin_builds
if has_softroce; then
  test_stage softroce "${make[@]}" test-softroce
else
  echo '== softroce: left out (SOFTROCE=off)'
fi
end_builds
# The longest of these runs beside the others, which leave a processor idle at times.
begin_test asan "${make[@]}" asan SHARDS=2
test_stage tsan "${make[@]}" tsan
# A fixed number of inputs; `make fuzz` alone runs for a fixed time.
FUZZ_RUNS=50000 test_stage fuzz "${make[@]}" fuzz-coverage
stage counts "${make[@]}" count
stage report "${make[@]}" check-report
stage install test/install/install_test.sh
end_test asan
# Alone: it compares the system's folders before and after.
stage packages test_packages
