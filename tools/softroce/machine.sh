# shellcheck shell=bash disable=SC2154  # settings are the entry script's
# Starts a machine, streams the output of its command, and reads its status. A machine has a folder:
# files shared with its guest (see guest_init.sh), its console, and QEMU's messages. All processes
# started here die with the script, even if it is killed.

declare -A qemu_pid=()
declare -a stream_pids=()

# Sets `accel` to the arguments for KVM if a machine boots with it, else for emulation. Sets `clock_line`
# to the kernel's clock parameters. Both are determined once per boot of the host.
choose_accelerator() {
  local image=$1 answer boot
  boot=$(cat /proc/sys/kernel/random/boot_id)
  answer=$(dirname "$image")/kvm-$boot
  accel=(-accel kvm -cpu 'host,-arch-capabilities')
  clock_line=
  if [[ -r /dev/kvm && -w /dev/kvm ]]; then
    if ! [[ -e "$answer" ]]; then
      note 'trying KVM'
      if boots "$image"; then echo yes; else echo no; fi 2>/dev/null >"$answer.$$"
      mv "$answer.$$" "$answer"
    fi
    [[ "$(cat "$answer")" == no ]] || return 0
  fi
  # Without these two features the kernel moves and clears memory eight bytes at a time. Emulation goes
  # through such instructions one step after the other: with them it clears 0.25 GiB a second, without
  # 0.5 to 1.
  accel=(-accel 'tcg,thread=multi' -cpu 'max,-erms,-fsrm')
  choose_clock "$(dirname "$image")/tsc-$boot"
}

boots() {
  timeout -k 1 10 qemu-system-x86_64 "${common[@]}" "${accel[@]}" -m 512 \
    -kernel "$1/kernel" -initrd "$1/initramfs" -serial stdio \
    -append "$kernel_line softroce.probe" </dev/null 2>&1 | grep -q 'softroce: probe passed'
}

# An emulated machine has the host's time stamp counter: its fastest clock, if the rate is known.
choose_clock() {
  local answer=$1 program
  if ! [[ -e "$answer" ]]; then
    program=$(mktemp)
    if grep -q ' constant_tsc .*nonstop_tsc ' /proc/cpuinfo &&
      c++ -std=c++20 -O1 "$here/softroce/tsc_khz.cc" -o "$program"; then
      "$program"
    else
      echo unknown
    fi >"$answer.$$"
    rm -f "$program"
    mv "$answer.$$" "$answer"
  fi
  clock_line=" tsc=reliable tsc_early_khz=$(cat "$answer")"
  [[ "$(cat "$answer")" != unknown ]] || clock_line=' tsc=unstable'
}

common=(
  -M 'q35,smm=off,vmport=off,sata=off,smbus=off,usb=off'
  -nodefaults -no-user-config -no-reboot -display none
)
# A kernel error ends the machine at once; the other parameters speed up booting.
kernel_line='console=ttyS0 oops=panic panic=-1 reboot=t no_timer_check'
kernel_line+=' mitigations=off audit=0 cryptomgr.notests i8042.noaux i8042.nokbd hugepages=16 dummy.numdummies=0'

# write_job FILE COMMAND...: writes the script that the machine runs. The machine inherits no
# environment, so variables are passed explicitly.
write_job() {
  local file=$1 name
  shift
  {
    echo 'unset TERM'
    printf 'export PATH=%q HOME=/tmp USER=root\n' "$PATH"
    for name in LANG LANGUAGE "${!LC_@}"; do
      [[ -z "${!name:-}" ]] || printf 'export %s=%q\n' "$name" "${!name}"
    done
    printf 'export SOFTROCE_ADDRESS=%q SOFTROCE_PEER=%q\n' "$address" "$peer"
    ((${#environment[@]} == 0)) || printf 'export %q\n' "${environment[@]}"
    printf 'cd %q || exit 125\n' "$PWD"
    echo 'ulimit -l unlimited; ulimit -c 0'
    printf 'exec'
    printf ' %q' "$@"
    echo
  } >"$file"
}

# Single quotes work in every shell.
quote() {
  printf "'%s'" "${1//\'/\'\\\'\'}"
}

# prepare_machine ROLE COMMAND...: ROLE is single, server or client.
prepare_machine() {
  local role=$1 address=10.77.0.1 peer=10.77.0.2 waits=no port='' line='' netem=''
  case "$role" in
    single) peer=$address ;;
    client) address=10.77.0.2 peer=10.77.0.1 waits=yes ;;
    server) port=$ready_port line=$ready_line ;;
  esac
  [[ "$role" == single ]] || netem="${disturbance[*]}"
  mkdir -p "$run/$role/share"
  write_job "$run/$role/share/job" "${@:2}"
  : >"$run/$role/share/out"
  : >"$run/$role/share/err"
  : >"$run/$role/console"
  printf "%s=%s\n" ROLE "$role" RXE "$rxe" ADDRESS "$address" MTU "$mtu" NETEM "$(quote "$netem")" \
    WRITE "$(quote "$write")" WAITS "$waits" READY_PORT "$port" \
    VERBOSE "$verbose" TC "$(command -v tc)" RDMA "$(command -v rdma)" \
    READY_LINE "$(quote "$line")" >"$run/$role/share/settings"
}

# The link is a socket in the run's folder. Its path is relative, because socket paths must be short.
add_link() {
  args+=(-netdev "stream,id=link,server=$1,addr.type=unix,addr.path=../link")
  args+=(-device "virtio-net-pci,netdev=link,romfile=,host_mtu=$mtu,mac=$2")
}

start_machine() {
  local role=$1 image=$2 line=$kernel_line$clock_line
  local args=(
    "${common[@]}" "${accel[@]}" -m "$memory" -smp "$cpus" -name machine,debug-threads=on
    -kernel "$image/kernel" -initrd "$image/initramfs"
    -chardev 'file,id=console,path=console' -serial chardev:console
    -fsdev 'local,id=root,path=/,security_model=none,readonly=on,multidevs=remap'
    -device 'virtio-9p-pci,fsdev=root,mount_tag=root'
    -fsdev 'local,id=run,path=share,security_model=none'
    -device 'virtio-9p-pci,fsdev=run,mount_tag=run'
  )
  if [[ -n "$write" ]]; then
    args+=(-fsdev "local,id=write,path=${write//,/,,},security_model=none,multidevs=remap")
    args+=(-device 'virtio-9p-pci,fsdev=write,mount_tag=write')
  fi
  case "$role" in
    server) add_link on 52:54:00:77:00:01 ;;
    client) add_link off 52:54:00:77:00:02 ;;
  esac
  [[ "$verbose" == yes ]] || line+=' quiet'
  (
    cd "$run/$role" || exit
    # The script may die before QEMU is tied to it, hence the check of the parent.
    # shellcheck disable=SC2016
    exec setpriv --pdeathsig KILL sh -c '[ "$PPID" = "$0" ] && exec "$@"' $$ \
      qemu-system-x86_64 "${args[@]}" -append "$line"
  ) </dev/null >"$run/$role/qemu" 2>&1 9>&- &
  qemu_pid[$role]=$!
}

# pin_processors ROLE: pins each virtual processor, so that two never share one of the host's.
pin_processors() {
  local task
  for task in "/proc/${qemu_pid[$1]}"/task/*; do
    [[ "$(cat "$task/comm" 2>/dev/null)" =~ ^CPU\ ([0-9]+)/ ]] || continue
    taskset -cp $((BASH_REMATCH[1] % $(nproc))) "${task##*/}" >/dev/null || note 'pinning failed'
  done
}

# Output goes to files until the machine ends, so a slow reader blocks nobody.
# follow FILE PID: prints the file from its start until process PID is gone and all is printed.
follow() {
  exec setpriv --pdeathsig TERM tail -q -c +1 -s 0.1 -f --pid="$2" "$1" 9>&-
}

# stream ROLE: passes single output on unchanged; with two machines, prefixes each line with the role.
stream() {
  local role=$1 pid=${qemu_pid[$1]} share=$run/$1/share
  if [[ "$role" == single ]]; then
    follow "$share/out" "$pid" &
    stream_pids+=($!)
    follow "$share/err" "$pid" >&2 &
    stream_pids+=($!)
  else
    follow "$share/out" "$pid" | sed -u "s/^/$role: /" &
    stream_pids+=($!)
    follow "$share/err" "$pid" | sed -u "s/^/$role: /" >&2 &
    stream_pids+=($!)
  fi
  if [[ "$verbose" == yes ]]; then
    follow "$run/$role/console" "$pid" | sed -u "s/^/$role console: /" >&2 &
    stream_pids+=($!)
  fi
}

is_running() {
  [[ -n "${qemu_pid[$1]:-}" ]] && kill -0 "${qemu_pid[$1]}" 2>/dev/null
}

has_ended() {
  [[ -e "$run/$1/share/status" ]] || ! is_running "$1"
}

# A status shows that the results have reached the host; without one they are not needed.
stop_machine() {
  is_running "$1" || return 0
  kill -KILL "${qemu_pid[$1]}" 2>/dev/null
  wait "${qemu_pid[$1]}" 2>/dev/null || true
}

# Prints the command's status, or 125 with diagnostics if the machine failed.
status_of() {
  local role=$1
  if [[ -e "$run/$role/share/status" ]]; then
    cat "$run/$role/share/status"
    return
  fi
  note "the $role machine failed: $(machine_state "$role"). Its console ends:"
  # The panic's call trace may be longer than the shown end of the console.
  grep -a 'Kernel panic' "$run/$role/console" | tr -d '\r' | sed 's/^/  | /' >&2 || true
  tail -n 45 "$run/$role/console" "$run/$role/qemu" | tr -d '\r' | sed 's/^/  | /' >&2
  echo 125
}

machine_state() {
  if [[ -e "$run/$1/share/up" ]]; then
    echo 'it ended while the command ran'
  elif is_running "$1"; then
    echo 'it did not boot'
  else
    echo 'it ended before the command could start'
  fi
}
