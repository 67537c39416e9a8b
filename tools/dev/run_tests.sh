#!/usr/bin/env bash
# `make test`: installs what is missing, builds, and runs the unit tests, the acceptance tests of the
# programs, the conformance cases and a short simulation. Stops at the first stage that fails. The last
# line is "N passed, N failed". `make verify` runs everything else.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
# shellcheck source=tools/dev/stages.sh
source tools/dev/stages.sh

stage dependencies tools/install-deps.sh
stage build "${make[@]}" test-build
test_stage tests "${make[@]}" check-tests SHARDS=2
test_stage conformance "${make[@]}" conformance-run
stage sim "${make[@]}" sim RUNS=100 JOBS=2
