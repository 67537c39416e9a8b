# shellcheck shell=bash disable=SC2034,SC2154  # softroce_test.sh has made $work and set $bin
# spinwire-doctor on a real device: the faults of doctor_faults.sh, in one machine and between two.

doctor_tests=(TheDoctorFindsFaultsOfADevice TheDoctorFindsFaultsBetweenHosts)

TheDoctorFindsFaultsOfADevice() {
  local status=0
  timeout 270 "$vm" --timeout 220 -- setpriv --bounding-set -ipc_lock \
    test/softroce/doctor_faults.sh one "$bin/spinwire-doctor" \
    >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output 'nothing is found on a good host' "$dir/out"
  expect_text output '9 faults were found, 8 of them mended by the printed command' "$dir/out"
  grep '^found: ' "$dir/out"
}

TheDoctorFindsFaultsBetweenHosts() {
  local status=0
  timeout 370 "$vm" --timeout 300 --pair --ready-line 'listening on' --stop-server \
    --env SPINWIRE_SECURITY_OPEN=true --env SPINWIRE_DEVICE_NAME=rxe0 \
    --env SPINWIRE_QUEUE_PAIR_ACK_TIMEOUT=16 \
    "exec $bin/spinwire-doctor --serve \$SOFTROCE_ADDRESS" \
    "test/softroce/doctor_faults.sh two $bin/spinwire-doctor" >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output 'client: 4 faults were found, 1 of them mended by the printed command' "$dir/out"
  grep '^client: found: ' "$dir/out"
}
