#!/bin/sh
# Runs an unmodified program for libibverbs with the softverbs device in addition to the real
# devices.
#
#   softverbs-preload ibv_rc_pingpong -g 0               a server
#   softverbs-preload ibv_rc_pingpong -g 0 localhost     its client
set -eu

here=$(dirname "$(readlink -f "$0")")
library=$here/@TO_LIB@/libsoftverbs-preload.so

case "${1:-}" in
  '')
    echo "usage: softverbs-preload PROGRAM [ARGUMENT]..." >&2
    exit 2
    ;;
  -h | --help)
    sed -n '2,6s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac
if [ ! -r "$library" ]; then
  echo "softverbs-preload: $library is missing; 'make preload' builds it" >&2
  exit 1
fi
LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}
export LD_PRELOAD
exec "$@"
