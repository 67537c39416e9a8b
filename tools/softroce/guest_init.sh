#!/bin/sh
# The first program in the machine. It has only busybox and the modules beside it. Its orders are in the
# run's folder, which the host shares with it:
#
#   settings   the machine's settings, as shell variables (read here)
#   job        the command, as a bash script (run below the host's root)
#   up         made here when the command is about to start
#   go         made by the host when a waiting machine may start its command
#   ready      made here when the command is ready for its peer
#   out, err   what the command prints
#   status     its exit status, written last and atomically
#
# Results go through files because a 9p write has reached the host when it returns. Nothing is lost when
# the machine is ended right afterwards.
export PATH=/bin
share=/host/run/softroce
nine=trans=virtio,version=9p2000.L,msize=512000

load() {
  for module in /modules/"$1"/*; do
    insmod "$module" || echo "softroce: $module does not load"
  done
}

# With --verbose, reports progress on the console.
tell() {
  [ "$VERBOSE" = no ] || read -r uptime idle </proc/uptime
  [ "$VERBOSE" = no ] || echo "softroce: ${uptime} s: $* (idle: $idle s)"
}

# Ends the machine without a status, which the host reports as a failure of the machine.
give_up() {
  echo "softroce: $*"
  reboot -f
}

mount_host() {
  mount -t 9p -o "ro,cache=loose,$nine" root /host || give_up 'no root'
  mount -t tmpfs run /host/run
  mkdir -p "$share" /host/run/lock
  mount -t 9p -o "rw,cache=none,$nine" run "$share" || give_up 'no folder of the run'
}

mount_rest() {
  mount -t proc proc /host/proc
  mount -t sysfs sys /host/sys
  mount -t devtmpfs dev /host/dev
  mkdir -p /host/dev/shm /host/dev/pts /host/dev/hugepages
  ln -s /proc/self/fd /host/dev/fd
  ln -s fd/0 /host/dev/stdin
  ln -s fd/1 /host/dev/stdout
  ln -s fd/2 /host/dev/stderr
  mount -t tmpfs -o mode=1777 shm /host/dev/shm
  mount -t devpts pts /host/dev/pts
  mount -t hugetlbfs huge /host/dev/hugepages
  # The host's /tmp stays visible; what is written there is discarded.
  mount -t tmpfs tmp /tmp
  mkdir -m 1777 /tmp/new /tmp/work
  mount -t overlay -o lowerdir=/host/tmp,upperdir=/tmp/new,workdir=/tmp/work tmp /host/tmp
  [ -z "$WRITE" ] || mount_writable
}

mount_writable() {
  mkdir -p "/host$WRITE" 2>/dev/null
  mount -t 9p -o "rw,cache=mmap,$nine" write "/host$WRITE" || give_up "cannot mount $WRITE"
}

# The device of the address: the link to the other machine or, in a single machine, a dummy device. Its
# name is not dummy0, which the module creates itself.
bring_up_network() {
  device=eth0
  ip link set lo up
  if [ "$ROLE" = single ]; then
    device=rxenet0
    ip link add "$device" type dummy
  fi
  ip link set "$device" mtu "$MTU" up || give_up "no network device of MTU $MTU"
  ip addr add "$ADDRESS/24" dev "$device"
  if [ -n "$NETEM" ]; then
    # shellcheck disable=SC2086  # several words
    chroot /host "$TC" qdisc add dev "$device" root netem limit 10000 $NETEM ||
      give_up "netem refused: $NETEM"
  fi
  [ "$RXE" = no ] || chroot /host "$RDMA" link add rxe0 type rxe netdev "$device" ||
    give_up 'no Soft-RoCE device'
}

# Whether a socket or an RDMA connection manager's identifier listens on the port.
listens() {
  hex=$(printf %04X "$READY_PORT")
  grep -qE "^ *[0-9]+: [0-9A-F]+:$hex [0-9A-F]+:0000 0A " /proc/net/tcp /proc/net/tcp6 ||
    chroot /host "$RDMA" resource show cm_id 2>/dev/null |
    grep -qE "state LISTEN .*src-addr [^ ]*:$READY_PORT( |\$)"
}

watch_for_readiness() {
  if [ -n "$READY_PORT" ]; then
    until listens; do sleep 0.1; done
  elif [ -n "$READY_LINE" ]; then
    until grep -qF -e "$READY_LINE" "$share/out" "$share/err"; do sleep 0.1; done
  fi
  : >"$share/ready"
}

# Kills processes that the command left behind, which would keep the pipes open.
end_stragglers() {
  pids=
  for process in /proc/[0-9]*; do
    case "${process#/proc/}" in
      1 | "$1" | "$2") ;;
      *) pids="$pids ${process#/proc/}" ;;
    esac
  done
  # shellcheck disable=SC2086  # several words
  kill -9 $pids 2>/dev/null
}

# Uses pipes rather than the files: a command that opens /dev/stderr again would truncate a file. The
# pipes are first opened for reading and writing, because that never blocks.
start_collecting() {
  mkfifo /out /err
  # shellcheck disable=SC2094  # these are pipes
  exec 5<>/out 6<>/err 7</out 8</err
  cat <&7 >>"$share/out" 5>&- 6>&- 8<&- &
  out=$!
  cat <&8 >>"$share/err" 5>&- 6>&- 7<&- &
  err=$!
  exec 7<&- 8<&-
}

finish_collecting() {
  exec 5>&- 6>&-
  end_stragglers "$out" "$err"
  wait "$out" "$err"
  sync
}

run_job() {
  start_collecting
  : >"$share/up"
  while [ "$WAITS" = yes ] && ! [ -e "$share/go" ]; do sleep 0.05; done
  watch_for_readiness 5>&- 6>&- &
  chroot /host /bin/bash /run/softroce/job </dev/null >&5 2>&6 5>&- 6>&-
  code=$?
  finish_collecting
  echo "$code" >"$share/status.new"
  mv "$share/status.new" "$share/status"
}

mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
mount -t proc proc /proc
# A probe of whether such machines start at all; the host reads the console.
if grep -q softroce.probe /proc/cmdline; then
  give_up 'probe passed'
fi
load base
mount_host
# shellcheck disable=SC1091  # written by the host
. "$share/settings"
tell 'the host is mounted'
[ "$ROLE" = single ] || load pair
[ "$RXE" = no ] || load rxe
tell 'modules are loaded'
mount_rest
tell 'all is mounted'
bring_up_network
tell 'the network is up'
run_job
tell 'the command has ended'
# The host ends the machine when it sees the status.
reboot -f
