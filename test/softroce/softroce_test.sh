#!/usr/bin/env bash
# Tests tools/softroce-vm, and the suites that need a real RDMA device in it. Reports like GoogleTest and
# ends with "N passed, N failed".
#
#   test/softroce/softroce_test.sh [FOLDER OF THE PROGRAMS]       default: build/bin
#
# FILTER='Name*' runs some of them. SOFTROCE=off skips all. Fails if machines cannot run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
vm=$PWD/tools/softroce-vm
bin=${1:-build/bin}

if [[ "${SOFTROCE:-on}" == off ]]; then
  echo 'softroce: left out (SOFTROCE=off)'
  exit 0
fi

# shellcheck source=test/softroce/checks.sh
source test/softroce/checks.sh
# shellcheck source=test/softroce/suites.sh
source test/softroce/suites.sh
# shellcheck source=test/softroce/engine_tests.sh
source test/softroce/engine_tests.sh
# shellcheck source=test/softroce/doctor_tests.sh
source test/softroce/doctor_tests.sh

chosen=()
for name in "${engine_tests[@]}" "${suite_tests[@]}" "${doctor_tests[@]}" "${tool_tests[@]}"; do
  # shellcheck disable=SC2053  # a pattern
  [[ "$name" != ${FILTER:-*} ]] || chosen+=("$name")
done
if ((${#chosen[@]} == 0)); then
  echo "softroce: no test has a name like FILTER='${FILTER:-}'; names: ${engine_tests[*]} ${suite_tests[*]} ${doctor_tests[*]} ${tool_tests[*]}" >&2
  exit 2
fi

work=$(mktemp -d) || exit
export TMPDIR=$work # the tool's folders; all must be gone at the end
trap 'rm -rf "$work"' EXIT
# Ends the processes below one. Some tests have process groups of their own, so a signal to ours does not
# reach them.
end_below() {
  local child
  for child in $(pgrep -P "$1"); do
    end_below "$child"
    kill "$child" 2>/dev/null
  done
}
trap 'end_below $$; wait; exit 130' INT TERM HUP

timeout 900 "$vm" --prepare & # a trap runs at once only while the shell waits for a job
if ! wait $!; then
  echo 'softroce: the machine with Soft-RoCE cannot be made here. SOFTROCE=off leaves it out.'
  failed_tests+=(Softroce.Prepares)
  finish
fi

# Booting leaves a processor idle at times, so two tests run at a time.
plan_engine_tests >"$work/plan" 2>/dev/null
run_tests 2 "${chosen[@]}"
print_engine_table | tee "$work/table"
check_threat_model
finish
