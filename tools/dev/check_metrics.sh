#!/usr/bin/env bash
# Compares the metrics of spinwire-stat with the recorded ones: table, name, kind and unit. Dashboards and alerts
# have these names.
#
#   tools/dev/check_metrics.sh STAT [RECORD]     fails if a metric is renamed, removed, changed or not recorded
#   tools/dev/check_metrics.sh --record STAT     records the present metrics
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

list() {
  "$1" --list | awk '{ print $1, $2, $3, $4 }' | sort
}

if [[ "${1:-}" == --record ]]; then
  list "$2" >tools/dev/metrics.txt
  exit 0
fi
record=${2:-tools/dev/metrics.txt}
metrics=$(list "$1")
if ! diff -u --label recorded "$record" --label 'this tree' - >&2 <<<"$metrics"; then
  cat >&2 <<'END'
check_metrics: the metrics differ from the record, see above.
  A line with "-" is gone: dashboards and alerts that name it find nothing any more. Keep the metric under its
  name, kind and unit; add a new one beside it, and name in include/changelog.md what takes its place.
  A line with "+" is new. When the names are as they shall stay: make metrics-record
END
  exit 1
fi
