#!/usr/bin/env bash
# Tests tools/softroce-vm, and what needs a real RDMA device in it. Reports like GoogleTest, and
# closes with "N passed, N failed".
#
#   test/softroce/run.sh [FOLDER OF THE PROGRAMS]       default: build/bin
#
# FILTER='Name*' runs some of them. SOFTROCE=off leaves all out; where it cannot run it fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
vm=$PWD/tools/softroce-vm
bin=${1:-build/bin}

if [[ "${SOFTROCE:-on}" == off ]]; then
  echo 'softroce: left out, as SOFTROCE=off asks'
  exit 0
fi

# shellcheck source=test/softroce/checks.sh
source test/softroce/checks.sh
# shellcheck source=test/softroce/suites.sh
source test/softroce/suites.sh
# shellcheck source=test/softroce/engine_tests.sh
source test/softroce/engine_tests.sh

work=$(mktemp -d) || exit
export TMPDIR=$work # where the tool has its folders: nothing may be left there
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

if ! timeout 900 "$vm" --prepare; then
  echo 'softroce: the machine with Soft-RoCE cannot be made here. SOFTROCE=off leaves it out.'
  failed_tests+=(Softroce.Prepares)
  finish
fi

# Booting leaves a processor idle now and then, so two at a time.
plan_engine_tests >"$work/plan" 2>/dev/null
chosen=()
for name in "${engine_tests[@]}" "${suite_tests[@]}" "${tool_tests[@]}"; do
  # shellcheck disable=SC2053  # a pattern
  [[ "$name" != ${FILTER:-*} ]] || chosen+=("$name")
done
run_tests 2 "${chosen[@]}"
print_engine_table
finish
