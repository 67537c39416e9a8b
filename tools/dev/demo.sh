#!/usr/bin/env bash
# Shows what Spinwire does, with the programs that `make` has built: a tour of the library, then an echo,
# a measurement, a file transfer, a key-value store and a trading loop, each between two processes. Fails
# if any of them fails.
#
#   tools/dev/demo.sh [FOLDER OF THE PROGRAMS]      default: build/bin
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=${1:-build/bin}
least=$((20 << 20)) # bytes of the file to push
limit=120 # seconds for each program; on an idle machine one takes a few

work=$(mktemp -d)
server=
cleanup() {
  [[ -z "$server" ]] || kill "$server" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT

die() {
  echo "demo: $*" >&2
  exit 1
}

heading() {
  printf '\n== %s\n   %s\n' "$1" "$2"
}

# Every program prints the same warnings, so one program prints them for all.
explain_hugepages() {
  local hint
  hint=$(timeout 20 "$bin/spinwire-perf" lat --one-thread -n 1 2>&1 >"$work/once") ||
    die "spinwire-perf does not run: $hint"
  [[ -n "$hint" ]] || return 0
  printf 'note: %s\n' "$hint"
  export SPINWIRE_MEMORY_HUGEPAGES=${SPINWIRE_MEMORY_HUGEPAGES:-off}
}

run() {
  local status=0
  printf '$ %s\n' "$*"
  timeout "$limit" "$bin/$1" "${@:2}" || status=$?
  ((status != 124)) || die "not done in $limit s, is the machine busy? $*"
  ((status == 0)) || die "failed: $*"
}

# Waits for the line in which a server prints its address, and prints the address.
address_in() {
  local address=
  for _ in $(seq 200); do
    address=$(sed -n 's/^listening on //p' "$1")
    [[ -z "$address" ]] || break
    kill -0 "$server" 2>/dev/null || die "the server ended: $(cat "$1")"
    sleep 0.05
  done
  echo "$address"
}

measure() {
  local address
  "$bin/spinwire-perf" --port 0 >"$work/server" 2>&1 &
  server=$!
  address=$(address_in "$work/server")
  [[ -n "$address" ]] || die 'the server does not listen'
  echo "\$ spinwire-perf --port 0      # listens on $address"
  run spinwire-perf rate "${address%:*}" --port "${address##*:}"
  kill "$server"
  wait "$server" || die "the server failed: $(cat "$work/server")"
  server=
}

# The compiler's own program is large and real. Without it, takes the largest readable file.
file_to_push() {
  local file
  file=$(g++ -print-prog-name=cc1plus 2>/dev/null || true)
  if [[ ! -r "$file" || $(stat -Lc %s "$file") -lt $least ]]; then
    file=$(find /usr/lib /usr/bin -xdev -type f -readable -printf '%s %p\n' 2>/dev/null |
      sort -rn | sed -n '1s/^[0-9]* //p')
  fi
  [[ -n "$file" && $(stat -Lc %s "$file") -ge $least ]] || die 'no file of 20 MiB to push'
  echo "$file"
}

explain_hugepages

heading 'tour: what engines do, one thing after the other' \
  'Both ends in one thread; tools/examples/tour/tour.cc is meant to be read.'
run tour

heading 'echo: 200,000 round trips between two processes' \
  'Each message of 32 bytes is sent back from the buffer it arrived in; the next one waits for it.'
run echo both --count 200000 --size 32

heading 'spinwire-perf: message rate between two processes' \
  'A stream of small messages, 64 in flight, each checked where it arrives.'
measure

heading 'file-push: a file moved by one-sided writes' \
  'The sender writes into memory that the receiver has opened to it; XXH3 is computed at both ends.'
file=$(file_to_push)
run file-push both "$file" --out "$work/copy"
cmp "$file" "$work/copy" || die 'the copy differs'
echo 'cmp: the copy is equal to the file'

heading 'kv-store: puts by remote calls, gets by one-sided reads' \
  'Readers see by version and checksum when the server is writing what they read, and read again.'
run kv-store demo --count 100000 --puts 50

heading 'market-feed: ticks, and orders that answer them' \
  'An exchange publishes every 5 us; a strategy answers each tick with a remote call.'
run market-feed --count 50000

printf '\ndemo: all done in %d s\n' "$SECONDS"
