#!/usr/bin/env bash
# Plants faults one after the other and runs spinwire-doctor after each, in the machine where doctor_tests.sh
# starts it. The doctor must find the fault and nothing else, and print the command that mends it; that command
# is run. So what it finds next shows that the fault before is mended.
#
#   test/softroce/doctor_faults.sh one DOCTOR              this machine alone
#   test/softroce/doctor_faults.sh two DOCTOR              against the doctor that serves at $SOFTROCE_PEER
#
# Ends with "N faults were found, M of them mended by the printed command".
set -uo pipefail
# Faults change MTUs, addresses and limits of the system. The first process of such a machine has this folder.
if ! [[ -d /proc/1/root/modules ]]; then
  echo "$0: plants faults in this system; run it in a machine: make test-softroce FILTER='TheDoctor*'" >&2
  exit 2
fi
doctor=$2
PATH=$PATH:$(dirname "$doctor") # printed commands name programs of ours
work=$(mktemp -d)
report=$work/report
count=0
mended=0

# What this machine lacks: then the doctor has to say so each time, in these words. An emulated machine has no
# invariant time-stamp counter.
lacking=()
if ! { grep -qw constant_tsc /proc/cpuinfo && grep -qw nonstop_tsc /proc/cpuinfo; }; then
  lacking+=('clock +the time-stamp counter may stop or change its rate')
fi
if [[ "$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)" != tsc ]]; then
  lacking+=('clock +the kernel does not trust the time-stamp counter')
fi

fail() {
  echo "fault '$fault': $*"
  cat "$report"
  exit 1
}

# The machine has its modules, but not in the folder where modprobe looks. Printed commands call it.
modprobe() {
  local file
  file=$(compgen -G "/proc/1/root/modules/*/[0-9]*-$1.ko") && insmod "$file" 2>/dev/null
}

# examine ARGUMENT...: runs the doctor. Sets `faults` to the severities and checks above a note.
examine() {
  "$doctor" --all "$@" >"$report" 2>&1 || (($? < 3)) || fail 'the doctor does not work'
  faults=$(faults_in "$report")
}

# examine_host ARGUMENT...: the same for this host, without what the machine lacks.
examine_host() {
  local text
  examine "$@"
  cp "$report" "$work/rest"
  for text in "${lacking[@]}"; do
    grep -qE "^warning +$text" "$report" || fail "it is not found: $text"
    sed -i -E "/^warning +$text/d" "$work/rest"
  done
  faults=$(faults_in "$work/rest")
}

faults_in() {
  grep -E '^(error|warning) ' "$1" | cut -c 1-22 | sed -E 's/ +$//; s/^([a-z]+) +/\1 /' | sort | paste -sd,
}

# examine_pair [ADDRESS]: against the other doctor, with clocks that agree to 4 ms. The machines start with whole
# seconds, so before that they may be a second apart.
examine_pair() {
  set_clock
  examine "${1:-$SOFTROCE_PEER}"
}

set_clock() {
  "$(dirname "$doctor")/softroce-clock-ahead" "$SOFTROCE_PEER" >"$report" 2>&1 || fail 'the clock cannot be set'
}

# expect FAULTS CHECK TEXT EVIDENCE COMMAND: the doctor has found just these FAULTS (a pattern; none: a note), and
# of CHECK these texts. Sets `remedy` to the command.
expect() {
  local found
  found=$(grep -E -A 2 "^[a-z]+ +$2 .*$3" "$report" | head -n 3) || fail "it is not found: $2, $3"
  [[ "$faults" =~ ^($1)$ ]] || fail "found are '$faults', not '$1'"
  grep -qE "^ +read: .*$4" <<<"$found" || fail "its evidence lacks '$4'"
  remedy=$(sed -n 's/^ *run: *//p' <<<"$found")
  [[ "$remedy" == "$5"* ]] || fail "its command is '$remedy', not '$5'"
  count=$((count + 1))
  echo "found: $fault; run: $remedy"
}

# mend [SED]: runs the printed command, with its placeholders replaced.
mend() {
  remedy=$(sed -E "${1:-}" <<<"$remedy")
  eval "$remedy" >/dev/null 2>&1 || fail "the command fails: $remedy"
  mended=$((mended + 1))
}

# The link-local GID of an interface comes some time after it is up, and a host without it is not yet as before.
until_gids() {
  local _
  for _ in $(seq 100); do
    (($(grep -vlE '^[0:]+$' /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null | wc -l) >= $1)) && return
    sleep 0.05
  done
  fail "there are no $1 GIDs"
}

# ---- one host ---------------------------------------------------------------------------------

write_settings() {
  "$doctor" plan --connections 4 --sessions 4 >"$work/engine.toml"
  printf '%s\n' '[device]' 'name = "rxe0"' 'gid_index = 1' >>"$work/engine.toml"
  sed 's/gid_index = 1/gid_index = 7/' "$work/engine.toml" >"$work/other_gid.toml"
  sed -E 's/"rxe0"/"auto"/; /^gid_index/d' "$work/engine.toml" >"$work/any_device.toml"
}

find_one_by_one() {
  local config=(--config "$work/engine.toml")
  fault='the port is down'
  ip link set dev rxenet0 down
  examine_host "${config[@]}"
  expect 'error port' port 'rxe0 port 1 is down' 'state: "1: DOWN"' 'ip link set dev rxenet0 up'
  mend
  until_gids 2

  fault='frames are short'
  ip link set dev rxenet0 mtu 1500
  examine_host "${config[@]}"
  expect 'warning mtu' mtu 'limits packets to 1024 bytes' 'rxenet0/mtu: 1500' 'ip link set dev rxenet0 mtu 4200'
  mend

  fault='the interface has no address'
  ip address del 10.77.0.1/24 dev rxenet0
  examine_host "${config[@]}"
  expect 'warning gid' gid 'only link-local GIDs' 'gids: 0: fe80:' 'ip address add ADDRESS/PREFIX dev rxenet0'
  mend 's|ADDRESS/PREFIX|10.77.0.1/24|'
  until_gids 2

  fault='the wrong index of a GID'
  examine_host --config "$work/other_gid.toml"
  expect 'warning gid' gid 'device.gid_index = 7 is an empty entry' '1: 0000:.*RoCE v2' spinwire-devices
  eval "$remedy" | grep -q 'rxe0 port 1 GID 1 ' || fail 'the printed command lists no GID 1'

  fault='no hugepages'
  echo 0 >/proc/sys/vm/nr_hugepages
  examine_host "${config[@]}"
  expect 'warning hugepages' hugepages 'and 0 are free' 'nr_hugepages 0' 'echo '
  mend

  fault='no transparent hugepages'
  echo never >/sys/kernel/mm/transparent_hugepage/enabled
  examine_host "${config[@]}"
  expect 'warning thp' thp 'hugepages are off' '\[never\]' 'echo madvise > /sys/kernel'
  mend

  fault='no connection manager'
  rmmod rdma_ucm
  examine_host "${config[@]}"
  expect '' 'device file' 'rdma_cm is missing' 'No such file' 'modprobe rdma_ucm'
  mend

  fault='no device'
  rdma link delete rxe0
  examine_host --config "$work/any_device.toml"
  expect 'error device' device 'no RDMA device' 'empty or missing' 'modprobe rdma_rxe; rdma link add rxe0'
  mend 's/INTERFACE/rxenet0/'
  until_gids 2

  fault='little lockable memory'
  ulimit -l 64
  examine_host "${config[@]}"
  expect 'error memlock' memlock 'too low' 'Max locked memory 64 KiB' 'ulimit -l '
  mend
}

one() {
  ulimit -n 65536
  write_settings
  fault='none on a good host'
  examine_host --config "$work/engine.toml"
  [[ -z "$faults" ]] || fail "found are '$faults'"
  echo 'nothing is found on a good host'
  find_one_by_one
  fault='none after all'
  examine_host --config "$work/engine.toml"
  [[ -z "$faults" ]] || fail "found are '$faults'"
}

# ---- two hosts --------------------------------------------------------------------------------

two() {
  fault='nobody serves'
  examine_pair "$SOFTROCE_PEER:18599"
  expect 'error tcp' tcp 'cannot be reached' 'Connection refused' 'spinwire-doctor --serve ADDRESS:18599'

  fault='the MTUs differ'
  ip link set dev eth0 mtu 1500
  examine_pair
  expect 'warning mtu,warning mtu' mtu 'port.netdev_mtu differs' '1500 here, 4200 there' \
    'ip link set dev eth0 mtu 4200  # here'
  mend

  fault='datagrams are lost'
  tc qdisc add dev eth0 root netem limit 10000 loss 5% || fail 'tc fails'
  examine_pair
  expect 'warning loss' loss 'datagrams were lost' 'retransmitted_requests: [1-9][0-9]* of [0-9]+ calls' 'ethtool -S INTERFACE'
  tc qdisc del dev eth0 root # the command shows where packets are dropped; nothing else can be printed

  fault='the clocks differ'
  set_clock
  date -s '-90 seconds' >/dev/null || fail 'date has failed'
  examine "$SOFTROCE_PEER"
  expect 'warning clock offset' 'clock offset' ' ms ahead: times in events' \
    'the other clock is (89[89]|90[01])[0-9]{2}\.[0-9]+ ms ahead' 'chronyc makestep'
  # Nothing tells the time here, so the next examination sets the clock.

  fault='none between good hosts'
  examine_pair
  [[ -z "$faults" ]] || fail "found are '$faults'"
  grep -E '^[a-z]+ +(clock offset|connection|rdma_cm|datagrams|latency|bandwidth) ' "$report"
}

trap 'rm -rf "$work"' EXIT
"$1"
echo "$count faults were found, $mended of them mended by the printed command"
