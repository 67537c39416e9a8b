# shellcheck shell=bash disable=SC2034,SC2154
# The tests of the tool itself, and the project's suites that run in its machines.

tool_tests=(
  PassesOutputStatusAndSurroundings RunsBothEndsOnOneMachine RunsPairsOverADisturbedNetwork
  TellsAFailingServerFromAFailingClient EndsAtTheTimeLimit LeavesNothingWhenItIsEnded
  TellsAPanicFromAFailure RunsForAnOrdinaryUser RefusesWhatMakesNoSense
)
suite_tests=(
  IsTriedByTheSpecification IsCertified IsCertifiedBetweenHosts RunsTheTools ExchangesOverALossyNetwork CallsOverALossyNetwork
  CallsWithoutDatagrams StrangersHoldNoPoll SurvivesUnplugging NoticesLostPeers LeavesNoObjectsBehind
  SurvivesKills
)

PassesOutputStatusAndSurroundings() {
  mkdir "$dir/results"
  local status=0
  # shellcheck disable=SC2016  # for the shell in the machine
  timeout 100 "$vm" --timeout 90 --write "$dir/results" --env "WORD=two  words'" -- bash -c '
    head -c 10000000 /dev/urandom | tee "$1/bytes"
    {
      echo "word $WORD"; echo "folder $PWD"; echo "lock $(ulimit -l)"; echo "to $SOFTROCE_PEER"
      touch /usr/x 2>&1; touch /tmp/x /dev/shm/x && echo "scratch written"
      grep HugePages_Free /proc/meminfo | tr -s " "
      ls /dev/infiniband
    } >/dev/stderr
    sleep 1000 &
    exit 255' - "$dir/results" >"$dir/out" 2>"$dir/err" || status=$?
  expect_equal 'exit status' $status 255
  check 'ten million bytes come through as they are' cmp "$dir/out" "$dir/results/bytes"
  expect_equal 'bytes' "$(stat -c %s "$dir/out")" 10000000
  local text
  for text in "word two  words'" "folder $PWD" 'lock unlimited' 'to 10.77.0.1' 'Read-only file' \
    'scratch written' 'HugePages_Free: 16' uverbs0 rdma_cm; do
    expect_text 'standard error' "$text" "$dir/err"
  done
}

RunsBothEndsOnOneMachine() {
  local status=0
  timeout 100 "$vm" --timeout 90 -- bash -c '
    set -e
    ibv_devinfo
    listens() { until grep -q ":4853 .* 0A " /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done; }
    ibv_rc_pingpong -d rxe0 -g 1 -n 200 >/dev/null & listens
    ibv_rc_pingpong -d rxe0 -g 1 -n 200 localhost
    wait $!
    ib_send_lat -d rxe0 -x 1 -s 2 -n 1000 >/dev/null & listens
    ib_send_lat -d rxe0 -x 1 -s 2 -n 1000 localhost
    wait $!' >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output PORT_ACTIVE "$dir/out"
  expect_text output '200 iters in' "$dir/out"
  expect_text output 't_typical' "$dir/out"
}

RunsPairsOverADisturbedNetwork() {
  local status=0
  # The packets with which rping ends may be lost: its server may then wait longer than this test. So the
  # server is ended with the client, and its lines are written as they come.
  # shellcheck disable=SC2016
  timeout 100 "$vm" --timeout 90 --pair --stop-server --ready-port 7471 \
    --delay 2ms --reorder 25% --loss 1% \
    'exec stdbuf -oL rping -s -a $SOFTROCE_ADDRESS -p 7471 -C 20 -v' \
    'tc qdisc show dev eth0
     rping -c -a $SOFTROCE_PEER -p 7471 -C 20 -v && echo said to $SOFTROCE_PEER' \
    >"$dir/out" 2>"$dir/err" || status=$?
  expect_equal 'exit status' $status 0
  expect_text output 'server: server ping data: rdma-ping-19' "$dir/out"
  expect_text output 'client: ping data: rdma-ping-19' "$dir/out"
  expect_text output 'client: said to 10.77.0.1' "$dir/out"
  expect_text output 'delay 2ms' "$dir/out"
  expect_text output 'loss 1%' "$dir/out"
  expect_text output 'reorder 25%' "$dir/out"
}

TellsAFailingServerFromAFailingClient() {
  local status=0
  timeout 100 "$vm" --no-rxe --timeout 90 --ready-line 'come in' --pair \
    'echo come in; exec sleep 1000' 'exit 7' >"$dir/out" 2>"$dir/err" || status=$?
  expect_equal 'status of the client' $status 7
  expect_text 'standard error' 'the server did not end by itself' "$dir/err"
  status=0
  timeout 100 "$vm" --no-rxe --timeout 90 --pair 'exit 9' 'exit 7' >"$dir/out" 2>&1 || status=$?
  expect_equal 'status of the server' $status 9
}

EndsAtTheTimeLimit() {
  mkdir "$dir/folder"
  local status=0
  TMPDIR=$dir/folder timeout 100 "$vm" --no-rxe --timeout 10 -- \
    bash -c 'echo before; exec sleep 1000' >"$dir/out" 2>"$dir/err" || status=$?
  expect_equal 'exit status' $status 124
  expect_text output before "$dir/out"
  expect_text 'standard error' 'the time limit of 10 s is over' "$dir/err"
  expect_nothing_left "$dir/folder"
}

# Three at once: one is ended by a signal, one is killed, and the third is not disturbed.
LeavesNothingWhenItIsEnded() {
  mkdir "$dir/folder"
  export TMPDIR=$dir/folder
  local name status pids=()
  for name in ended killed undisturbed; do
    # shellcheck disable=SC2016
    "$vm" --no-rxe --timeout 90 -- bash -c 'echo "$0 started"; sleep 12; echo over' $name \
      >"$dir/$name" 2>&1 &
    pids+=($!)
  done
  check 'the first starts' wait_for_text 'ended started' "$dir/ended"
  kill -TERM "${pids[0]}"
  status=0
  wait "${pids[0]}" || status=$?
  expect_equal 'status after a signal' $status 143
  check 'the second starts' wait_for_text 'killed started' "$dir/killed"
  kill -KILL "${pids[1]}"
  wait "${pids[1]}" 2>/dev/null
  status=0
  wait "${pids[2]}" || status=$?
  expect_equal 'status of the third' $status 0
  expect_text 'output of the third' over "$dir/undisturbed"
  # The next run removes the folder of the killed one.
  "$vm" --no-rxe --timeout 90 true || status=$?
  expect_equal 'status of the next' $status 0
  expect_nothing_left "$dir/folder"
}

TellsAPanicFromAFailure() {
  local status=0
  timeout 100 "$vm" --no-rxe --timeout 90 -- bash -c 'echo c >/proc/sysrq-trigger; sleep 10' \
    >"$dir/out" 2>"$dir/err" || status=$?
  expect_equal 'exit status' $status 125
  expect_text 'standard error' 'it ended while the command ran' "$dir/err"
  expect_text 'standard error' 'Kernel panic' "$dir/err"
}

# A user with installed files only, and a cache owned by another user.
RunsForAnOrdinaryUser() {
  if [[ "$(id -u)" -ne 0 ]]; then
    "$vm" --no-rxe --timeout 90 true # the current user is an ordinary one
    return
  fi
  local status=0 cache
  cache=$(timeout 60 "$vm" --print-cache)
  mkdir -m 755 "$dir/cache"
  cp -a --reflink=auto "$cache"/image-* "$cache"/kvm-* "$dir/cache" 2>/dev/null
  mkdir -m 777 "$dir/folder" "$dir/results"
  chmod 755 "$work" "$dir"
  # shellcheck disable=SC2016
  (cd / && TMPDIR=$dir/folder SOFTROCE_CACHE=$dir/cache timeout 100 setpriv --reuid nobody \
    --regid nogroup --clear-groups bash "$vm" --timeout 90 --write "$dir/results" -- \
    bash -c 'ibv_devinfo -l && echo done >"$0/file" && ibv_devinfo | grep PORT_ACTIVE' \
    "$dir/results") >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output PORT_ACTIVE "$dir/out"
  expect_equal 'owner of the result' "$(stat -c %U "$dir/results/file")" nobody
  expect_equal 'folders left' "$(ls "$dir/folder")" ''
}

# refused TEXT ARGUMENT...: checks an error before any machine starts.
refused() {
  local status=0
  timeout 20 "$vm" "${@:2}" >"$dir/out" 2>"$dir/err" || status=$?
  expect_equal "status of: ${*:2}" $status 125
  expect_text "what is said to: ${*:2}" "$1" "$dir/err"
}

RefusesWhatMakesNoSense() {
  refused 'no command'
  refused 'option --nonsense is unknown' --nonsense 1 true
  refused 'lacks its value' --timeout
  refused "--timeout is 'soon'" --timeout soon true
  refused 'two commands' --pair one
  refused 'without --pair' --loss 1% true
  refused '--reorder needs --delay' --reorder 25% --pair a b
  refused "--loss is '1% limit 0'" --loss '1% limit 0' --pair a b
  refused 'no folder' --write /nowhere true
  refused 'NAME=VALUE' --env 1X=2 true
  check 'it helps' grep -q 'tools/softroce-vm ' <("$vm" --help)
}

# ---- the project's programs -------------------------------------------------------------------

# The suite fails if the device departs from the specification in an unknown way.
IsTriedByTheSpecification() {
  local status=0
  timeout 300 "$vm" --timeout 240 -- "$bin/verbs-conformance" --device rxe0 --gtest_color=no \
    >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output '[  PASSED  ]' "$dir/out"
  check 'departures are told' grep -q '^known departure, ' "$dir/out"
  grep '^known departure, ' "$dir/out"
  ((status == 0)) || show_failed_tests "$dir/out"
}

# figures_are_reported: each comparison with perftest has a ratio, or is named as not measured.
figures_are_reported() {
  local part
  for part in 'send, round trip of' 'write, round trip of' 'rate of messages of' 'read of 32' 'atomic of 8' \
    'messages of 64 KiB' 'messages of 1 MiB' 'writes of 64 KiB' 'writes of 1 MiB' 'reads of 64 KiB' 'reads of 1 MiB'; do
    check "figures of $part" grep -qE "perftest +$part.*(, ratio [0-9.]+|: not measured)" "$dir/out"
  done
}

# The doctor's certification: all cases and some suites, whose only departures are the known ones. A machine that
# has other work does not always measure in time; the report then names the figure that is missing. At least one
# must have been compared with perftest, if that is installed: the machines have the files of this host.
# CERTIFY_MINUTES=N: all tests that run on Soft-RoCE, in so many minutes, and every figure must be measured.
IsCertified() {
  local status=0 part minutes=${CERTIFY_MINUTES:-12} tests='EngineClose.*:RdmaCm.*:RpcCalls.*'
  [[ -z "${CERTIFY_MINUTES:-}" ]] || tests="*-$(planned left-out | paste -sd :)"
  timeout $((60 * minutes + 180)) "$vm" --timeout $((60 * minutes + 120)) --env SPINWIRE_SECURITY_OPEN=true -- "$bin/spinwire-doctor" certify \
    --device rxe0 --port 1 --gid 1 --address 10.77.0.1 --config conf/softroce.toml --slowness 20 --minutes "$minutes" \
    --tests "$tests" >"$dir/out" 2>&1 || status=$?
  check 'it has reported' test $status -le 2
  expect_text output 'a known departure: ' "$dir/out"
  for part in conformance engine calls; do
    check "tests of $part passed" grep -qE "^ok +$part +passed: [0-9]+ tests" "$dir/out"
  done
  figures_are_reported
  ! command -v ib_send_lat >/dev/null ||
    check 'a figure is compared with perftest' grep -qE 'perftest +.* of .*, ratio [0-9.]+' "$dir/out"
  [[ -z "${CERTIFY_MINUTES:-}" ]] || ! command -v ib_send_lat >/dev/null ||
    expect_equal 'figures that were not measured' "$(grep -E 'perftest .*: not measured' "$dir/out")" ''
  expect_equal 'errors of tests' "$(grep -E '^error +(device|conformance|engine|calls)' "$dir/out")" ''
  grep -E '^(warning|note|ok|error)' "$dir/out"
}

# The same between two machines, in short: what there was no time for is named. The engines find each other, both hosts
# report on each part, and no test failed on either.
IsCertifiedBetweenHosts() {
  local status=0 part options reasons
  options="certify --device rxe0 --port 1 --gid 1 --config conf/softroce.toml --slowness 100 --minutes 1.2 --tests EngineClose.*:RpcCalls.An*"
  timeout 310 "$vm" --timeout 240 --pair --ready-line 'listening on' --stop-server --env SPINWIRE_SECURITY_OPEN=true \
    "exec $bin/spinwire-doctor $options --address 10.77.0.1 --serve \$SOFTROCE_ADDRESS" \
    "$bin/spinwire-doctor $options --address 10.77.0.2 \$SOFTROCE_PEER; echo status \$?" >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status of the machines' $status 0
  check 'it has reported' grep -qE '^client: status [0-2]' "$dir/out"
  expect_text output 'client: device rxe0: ' "$dir/out"
  expect_text output 'client: ok       connection' "$dir/out"
  for part in rdma_cm datagrams; do
    check "$part is named" grep -qE "^client: (ok|warning|error) +$part" "$dir/out"
  done
  figures_are_reported
  for part in conformance engine calls; do
    check "tests of $part here" grep -qE "^client: (ok|error) +$part +passed: [0-9]+ test" "$dir/out"
    check "tests of $part there" grep -qE "^client: (ok|error) +$part there +passed: [0-9]+ test" "$dir/out"
    for part in "$part" "$part there"; do
      ! grep -qE "^client: error +$part +passed: 0 tests" "$dir/out" ||
        check "why no tests of $part" grep -qE "^client: warning +$part +not run: .*; the time is over" "$dir/out"
    done
  done
  reasons='the time is over|it takes too long|(there: )?it does not listen'
  expect_equal 'reasons of missing figures' "$(grep -A 1 -E '^client: .*: not measured' "$dir/out" |
    grep -E '^client: +read: ' | grep -vE "read: ($reasons)")" ''
  expect_equal 'failed tests' "$(grep -E '^client: error .* failed$' "$dir/out")" ''
  grep -E '^client: (warning|note|ok|error)' "$dir/out"
}

RunsTheTools() {
  local status=0
  # shellcheck disable=SC2016
  timeout 200 "$vm" --timeout 150 --env SPINWIRE_DEVICE_NAME=rxe0 \
    --env SPINWIRE_SECURITY_OPEN=true -- bash -c '
    set -e
    "$0/spinwire-devices"
    "$0/echo" both --count 200
    "$0/spinwire-perf" --bind 10.77.0.1 --once &
    "$0/spinwire-perf" lat 10.77.0.1 --count 500
    wait $!
    "$0/spinwire-perf" --bind 10.77.0.1 --once &
    "$0/spinwire-perf" bw 10.77.0.1 --size 65536 --count 100
    wait $!
    echo all ran' "$bin" >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output rxe0 "$dir/out"
  expect_text output 'all ran' "$dir/out"
}

# Runs in a machine whose program failed: whether packets still reach the other one, what the driver has
# counted, and the kernel's last words.
link_report='{
  code=$?
  busybox ping -c 5 -W 2 $SOFTROCE_PEER >/dev/null || echo "the link is dead: its host does not answer"
  (cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep -v "^0$" *)
  dmesg | tail -n 5
  exit $code
}'

# over_lossy_link SECONDS OPTION VALUE SERVER CLIENT: a pair of machines whose output goes to $dir/out. Sets
# `status`. The link between the machines sometimes stops for good, and TCP does not get through either; that
# says nothing about the programs, which run again.
over_lossy_link() {
  local limit=$1 try
  for try in 1 2 3; do
    status=0
    timeout $((limit + 70)) "$vm" --timeout "$limit" --pair --ready-line serving "$2" "$3" \
      "$4 || $link_report" "{ $5; } || $link_report" >"$dir/out" 2>&1 || status=$?
    grep -q 'its host does not answer' "$dir/out" || return 0
    echo "try $try: the link between the machines stopped"
  done
}

ExchangesOverALossyNetwork() {
  local status
  over_lossy_link 240 --loss 1% \
    "$bin/softroce-two-way-exchange serve \$SOFTROCE_ADDRESS" \
    "$bin/softroce-two-way-exchange connect \$SOFTROCE_PEER && tc -s qdisc show dev eth0"
  expect_equal 'exit status' $status 0
  expect_text output 'all exchanged by tcp' "$dir/out"
  expect_text output 'all exchanged by rdma_cm' "$dir/out"
  check 'something was lost' grep -qE 'dropped [1-9]' "$dir/out"
}

CallsOverALossyNetwork() {
  local status calls=${SOFTROCE_CALLS:-5000}
  over_lossy_link $((200 + calls / 50)) --loss 2% \
    "$bin/softroce-calls serve \$SOFTROCE_ADDRESS" \
    "$bin/softroce-calls call \$SOFTROCE_PEER $calls"
  expect_equal 'exit status' $status 0
  expect_text output "$calls calls ran and were answered once each" "$dir/out"
  grep -hE 'once each|sent again' "$dir/out"
}

# Calls without datagrams, and a client without datagrams with a server that has them.
CallsWithoutDatagrams() {
  local status=0 calls=2000 suites not_these
  suites='RpcCalls*:RpcLongCalls.*:RpcSessionSurvival*:RpcTransport.*'
  not_these='RpcTransport.Passes*:RpcSessionSurvival.AHandler*:RpcLongCalls.RequestsOfAny*'
  not_these+=':RpcLongCalls.WhatIsWrong*:RpcLongCalls.AWindow*'
  timeout 300 "$vm" --timeout 240 --env SPINWIRE_TEST_DEVICE=rxe0 \
    --env SPINWIRE_TEST_TRANSPORT=connections --env SPINWIRE_TEST_SLOWNESS=20 -- \
    "$bin/spinwire-tests" --gtest_color=no \
    --gtest_filter="$suites:-$not_these" \
    >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output '[  PASSED  ]' "$dir/out"
  ((status == 0)) || show_failed_tests "$dir/out"
  over_lossy_link 200 --loss 1% \
    "$bin/softroce-calls serve \$SOFTROCE_ADDRESS" \
    "$bin/softroce-calls call \$SOFTROCE_PEER $calls connections"
  expect_equal 'exit status over a lossy network' $status 0
  expect_text output "$calls calls ran and were answered once each" "$dir/out"
}

# Strangers give addresses that answer no ARP. The verbs that need ARP would block poll(). Threads resolve
# where rdma_cm cannot: without it, and from a GID of a connection's own.
strangers_hold_no_poll() {
  local where=$1 serve=$2 status=0
  # shellcheck disable=SC2016
  timeout 300 "$vm" --timeout 240 --pair --ready-line serving "$serve" \
    "$bin/softroce-unresolved-addresses attack \$SOFTROCE_PEER" >"$dir/out" 2>&1 || status=$?
  expect_equal "exit status $where" $status 0
  expect_text output 'afterwards: connected and answered' "$dir/out"
  echo "$where:"
  grep -hE 'longest poll|answered after' "$dir/out"
}

StrangersHoldNoPoll() {
  local serve="exec $bin/softroce-unresolved-addresses serve \$SOFTROCE_ADDRESS"
  strangers_hold_no_poll 'through rdma_cm' "$serve"
  strangers_hold_no_poll 'without rdma_cm' "rm /dev/infiniband/rdma_cm && $serve"
  strangers_hold_no_poll 'from another GID' "ip address add 10.77.0.3/24 dev eth0 && $serve 10.77.0.3"
}

# The peer's machine dies as well, which the tool reports as a failure of its own. Our machine may also
# crash, from a bug in rxe of Linux 6.1: packets in the network card's ring at shutdown are freed at the
# next open, after the queue pair that counts them. Then the test has no verdict.
SurvivesUnplugging() {
  local status tries=3
  while ((tries-- > 0)); do
    status=0
    # shellcheck disable=SC2016
    timeout 300 "$vm" --timeout 240 --grace 100 --pair --ready-line serving \
      "$bin/softroce-unplug serve \$SOFTROCE_ADDRESS" \
      "$bin/softroce-unplug client \$SOFTROCE_PEER eth0" >"$dir/out" 2>&1 || status=$?
    grep -q 'RIP: 0010:rxe_skb_tx_dtor' "$dir/out" || break
    echo "  the kernel's rxe failed where it frees packets, $tries tries are left"
  done
  expect_equal 'exit status' $status 125
  expect_text output 'event: port_error' "$dir/out"
  expect_text output 'event: device_failed' "$dir/out"
  expect_text output 'client: all survived' "$dir/out"
}

# A peer is stopped, one is killed, one restarts, and one is cut off from the network. Each error must
# name the cause.
NoticesLostPeers() {
  local status=0 what
  # shellcheck disable=SC2016
  timeout 300 "$vm" --timeout 240 --pair --ready-line 'all serve' \
    "$bin/softroce-lost-peers serve \$SOFTROCE_ADDRESS" \
    "$bin/softroce-lost-peers client \$SOFTROCE_PEER eth0" >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  for what in stopped killed restarted 'cut off'; do
    expect_text output "client: $what, its connection: peer_lost after" "$dir/out"
    expect_text output "client: $what, its session: peer_lost after" "$dir/out"
  done
  expect_text output 'server: its client: peer_lost after' "$dir/out"
  grep -oE '(client|server): .*: peer_lost after [0-9]+ ms' "$dir/out"
}

# The programs compare while they run; afterwards the system must have no objects of theirs left.
LeavesNoObjectsBehind() {
  local status=0
  # shellcheck disable=SC2016
  timeout 400 "$vm" --timeout 330 -- bash -c '
    rdma resource show >/tmp/before
    for way in tcp cm hand; do "$0/softroce-connection-cycles" $way 1000 10.77.0.1 || exit; done
    rdma resource show | diff /tmp/before - && echo nothing left' "$bin" >"$dir/out" 2>&1 ||
    status=$?
  expect_equal 'exit status' $status 0
  expect_text output 'cm: 1000 connections' "$dir/out"
  expect_text output 'hand: 1000 connections' "$dir/out"
  expect_text output 'nothing left' "$dir/out"
}

# Peers that are killed in every phase, SOFTROCE_KILLS of them: each operation of the survivor ends once,
# the traffic of an unrelated connection goes on, and neither the survivor nor the system keeps anything
# of the dead. On an emulated machine a victim's life takes seconds.
SurvivesKills() {
  local status=0 kills=${SOFTROCE_KILLS:-6}
  local limit=$((600 + 20 * kills))
  # shellcheck disable=SC2016
  timeout $((limit + 70)) "$vm" --timeout $limit -- bash -c '
    rdma resource show >/tmp/before
    SPINWIRE_TEST_DEVICE=rxe0 SPINWIRE_TEST_KILLS=$1 "$0/spinwire-tests" --gtest_color=no \
      --gtest_filter=SlowKill.TwoHundredVictims || exit
    rdma resource show | diff /tmp/before - && echo nothing left' "$bin" "$kills" \
    >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output '[  PASSED  ] 1 test' "$dir/out"
  expect_text output 'nothing left' "$dir/out"
  grep -E '^(phase|handshake|idle|sending|receiving|one-sided|closing|operations)| s; echo' "$dir/out"
}
