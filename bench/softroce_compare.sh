#!/usr/bin/env bash
# Compares spinwire-perf with perftest on the kernel's Soft-RoCE device. Both run in turn, in one
# virtual machine, with two processes each and messages of the same size.
#
#   bench/softroce_compare.sh [FOLDER OF THE PROGRAMS]       default: build/bin
#
#   RUNS=15        runs of each program and test; the machine's speed varies over seconds
#   LATENCY=40000, RATE=40000       operations per run
#   COMPARE='send write rate'       tests; SIZE bytes instead of those below: send:4096
#   COMPARE=sizes                   send, write and rate for sizes from 8 bytes to 1 MiB
#   CONF=          configuration of spinwire-perf (conf/softroce.toml)
#
# Tests:
#   send    Round trips of 32-byte messages. ib_send_lat reports half of a round trip (typical, its
#           median), so it is doubled. spinwire-perf lat --op send: p50; its header adds 8 bytes.
#   write   Round trips of 32-byte writes, detected by polling memory: ib_write_lat, doubled as
#           well, and spinwire-perf lat --op pong.
#   rate    Messages of 64 bytes in one direction, 128 outstanding, in million/s: ib_send_bw and
#           spinwire-perf rate with a window of 128.
# Runs with longer messages have fewer operations, and above 4 KiB 16 messages outstanding. perftest
# posts receives for the whole message. So does spinwire-perf here, where connections.eager_bytes
# may be as large: else the receiver fetches the message, which takes two more trips.
# spinwire-perf checks all data, perftest none. Each run is compared with the run of perftest right
# before or after it. The median of the ratios decides: latency at most 1.05, rate at least 0.95.
# Exit status 1: a limit is missed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${1:-build/bin}
runs=${RUNS:-15}
latency=${LATENCY:-40000}
rate=${RATE:-40000}
conf=${CONF:-conf/softroce.toml}
tests=${COMPARE:-send write rate}
if [[ "$tests" == sizes ]]; then
  tests=
  for size in 8 64 512 1024 4096 16384 65536 1048576; do
    tests+="${tests:+ }send:$size write:$size rate:$size"
  done
fi

# ---- in the machine -----------------------------------------------------------------------------

# Waits until a process listens on the TCP port.
wait_for_port() {
  local hex _
  hex=$(printf %04X "$1")
  for _ in $(seq 600); do
    grep -qE "^ *[0-9]+: [0-9A-F]+:$hex [0-9A-F]+:0000 0A " /proc/net/tcp /proc/net/tcp6 && return
    sleep 0.05
  done
  echo "no process listens on port $1" >&2
  return 1
}

# perftest PROGRAM ARGUMENT...: prints the last line of the client's table.
perftest() {
  local server
  timeout 60 taskset -c 1 "$@" -d rxe0 -x 1 -F >/dev/null &
  server=$!
  wait_for_port 18515
  timeout 60 taskset -c 0 "$@" -d rxe0 -x 1 -F localhost | awk '$1 ~ /^[0-9]+$/ && NF > 3' | tail -n 1
  wait "$server"
}

# spinwire ARGUMENT...: prints the client's JSON.
spinwire() {
  local server
  timeout 60 "$bin/spinwire-perf" -c "$conf" --once -p 18516 --cpu 1 >/dev/null 2>/tmp/server &
  server=$!
  wait_for_port 18516
  if ! timeout 60 "$bin/spinwire-perf" "$1" 127.0.0.1 -c "$conf" -p 18516 --cpu 0 --json "${@:2}" \
    2>/tmp/client || ! wait "$server"; then
    cat /tmp/client /tmp/server >&2
    return 1
  fi
}

field() {
  sed -E "s/.*\"$1\": ?([0-9.e+-]+).*/\1/"
}

# both THEIRS OURS: sets `theirs` and `ours`. The order alternates from run to run.
# shellcheck disable=SC2034,SC2086
both() {
  ((run % 2)) || theirs=$(perftest $1)
  ours=$(spinwire $2)
  ((run % 2 == 0)) || theirs=$(perftest $1)
}

# operations COUNT SIZE: about as many bytes as COUNT operations of 2 KiB, but not fewer than 50.
operations() {
  local count=$(($1 * 2048 / (2048 + $2)))
  echo $((count > 50 ? count : 50))
}

# Receives for messages of SIZE bytes, where that can be.
receive_whole() {
  export SPINWIRE_CONNECTIONS_EAGER_BYTES=4096
  (($1 <= 4096 || $1 > 1048512)) || SPINWIRE_CONNECTIONS_EAGER_BYTES=$1
}

# compare_latency TEST PROGRAM OP SIZE: prints TEST THEIRS OURS and the minima of both, in us per
# round trip.
compare_latency() {
  local test=$1 theirs ours typical least count
  count=$(operations "$latency" "$4")
  receive_whole "$4"
  # Few receives, so that a receive is still in the cache when it is used again.
  export SPINWIRE_QUEUES_RECEIVE_DEPTH=64 SPINWIRE_CONNECTIONS_CREDITS=32
  both "$2 -s $4 -n $count" "lat --op $3 -s $4 -n $count"
  read -r typical least < <(awk '{print 2 * $5, 2 * $3}' <<<"$theirs")
  awk -v t="$test" -v a="$typical" -v b="$(field p50_ns <<<"$ours")" -v c="$least" \
    -v d="$(field min_ns <<<"$ours")" 'BEGIN {print t, a, b / 1e3, c, d / 1e3}'
}

# compare_rate TEST SIZE
compare_rate() {
  local theirs ours count window=128
  count=$(operations "$rate" "$2")
  (($2 <= 4096)) || window=16
  receive_whole "$2"
  # perftest posts 512 receives for its one peer, so that bursts do not wait for credit. Of long
  # messages few are outstanding.
  export SPINWIRE_QUEUES_RECEIVE_DEPTH=$((4 * window)) SPINWIRE_CONNECTIONS_CREDITS=$((2 * window))
  both "ib_send_bw -s $2 -n $count -t $window" "rate --op send -s $2 -w $window -n $count"
  # Of long messages perftest's table shows too few digits of the rate, but enough of the MiB/s.
  echo "$1 $(awk -v size="$2" '{print $4 * 1.048576 / size}' <<<"$theirs") $(field rate_mops <<<"$ours")"
}

one_run() {
  local test size
  for test in $tests; do
    size=${test#*:}
    [[ "$size" != "$test" ]] || size=$([[ "$test" == rate ]] && echo 64 || echo 32)
    case "$test" in
      send | send:*) compare_latency "$test" ib_send_lat send "$size" ;;
      write | write:*) compare_latency "$test" ib_write_lat pong "$size" ;;
      rate | rate:*) compare_rate "$test" "$size" ;;
      *) echo "no such test: $test" >&2 && return 1 ;;
    esac
  done
}

if [[ "${1:-}" == --inside ]]; then
  bin=$2
  for run in $(seq "$runs"); do one_run; done
  exit
fi

# ---- outside ------------------------------------------------------------------------------------

echo "load before: $(cut -d ' ' -f 1-3 /proc/loadavg)"
tools/softroce-vm --pin --timeout $((120 + runs * 120)) --env "RUNS=$runs" \
  --env "LATENCY=$latency" --env "RATE=$rate" --env "CONF=$conf" --env "COMPARE=$tests" -- \
  bash bench/softroce_compare.sh --inside "$bin" |
  tee >(cat >&2) | awk -v runs="$runs" -v tests="$tests" '
  function median(list, n,   i, j, t) {
    for (i = 2; i <= n; ++i)
      for (j = i; j > 1 && list[j - 1] > list[j]; --j) {
        t = list[j]; list[j] = list[j - 1]; list[j - 1] = t
      }
    return n % 2 ? list[(n + 1) / 2] : (list[n / 2] + list[n / 2 + 1]) / 2
  }
  function column(test, which,   i) {
    for (i = 1; i <= n[test]; ++i) work[i] = value[test, which, i]
    return median(work, n[test])
  }
  function line(test, what, unit, theirs, ours, ratio,   middle) {
    middle = column(test, ratio)
    printf "%-13s %-18s %9.4g %9.4g %-9s ratio %.3f (%.3f to %.3f)", test, what,
      column(test, theirs), column(test, ours), unit, middle, work[1], work[n[test]]
    return middle
  }
  NF >= 3 {
    i = ++n[$1]
    for (k = 2; k <= NF; ++k) value[$1, k, i] = $k
    value[$1, "ratio", i] = $3 / $2
    if (NF > 4) value[$1, "least", i] = $5 / $4
  }
  END {
    printf "\n%-32s %9s %9s\n", "medians of " runs " runs", "perftest", "spinwire"
    count = split(tests, test)
    for (t = 1; t <= count; ++t) {
      if (n[test[t]] < runs) {
        print "runs of " test[t] " are missing"
        exit 1
      }
      if (test[t] ~ /^rate/) {
        good = line(test[t], "messages", "million/s", 2, 3, "ratio") >= 0.95
        print good ? "  as wanted (0.95)" : "  LESS than 0.95"
      } else {
        good = line(test[t], "typical round trip", "us", 2, 3, "ratio") <= 1.05
        print good ? "  as wanted (1.05)" : "  MORE than 1.05"
        line(test[t], "shortest", "us", 4, 5, "least")
        print ""
      }
      bad += !good
    }
    exit bad > 0
  }' && status=0 || status=$?
echo "load after: $(cut -d ' ' -f 1-3 /proc/loadavg)"
exit "$status"
