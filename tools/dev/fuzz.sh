#!/usr/bin/env bash
# Runs the fuzzers, one per processor at a time, or reports their coverage.
#
#   tools/dev/fuzz.sh FOLDER TARGET...     each for FUZZ_SECONDS, `agent` for FUZZ_AGENT_SECONDS;
#                                          with FUZZ_RUNS for that many inputs, `agent`, `config`
#                                          and `control_port` for a tenth of them, however
#                                          long that takes
#   tools/dev/fuzz.sh --coverage FOLDER SOURCE...
#
# FOLDER/bin has the targets. FOLDER/corpus keeps interesting inputs, with which each run begins.
# FOLDER/findings has the inputs that failed. --coverage fails if the last runs executed less than
# FUZZ_COVERAGE percent of the sources' lines. The last lines of output are those of a GoogleTest
# program.
set -euo pipefail

seconds=${FUZZ_SECONDS:-12}
runs=${FUZZ_RUNS:-}
agent_seconds=${FUZZ_AGENT_SECONDS:-$((5 * seconds))}
wanted=${FUZZ_COVERAGE:-90}

# Runs one target; fails if it found a defect.
run() {
  local folder=$1 name=$2 time=$seconds length=(-max_len=2048) start=$SECONDS code=0 log corpus ran
  local extent
  log=$folder/log/$name.log
  corpus=$folder/corpus/$name
  if [[ $name == agent ]]; then
    time=$agent_seconds
    length=(-max_len=400 -len_control=0)  # one act alone shows little, so inputs are long at once
  fi
  extent=-max_total_time=$time
  [[ $name != control_port ]] || length=(-max_len=600 -len_control=0)
  [[ $name != observe ]] || length=(-max_len=20000)  # twice a file with two histograms
  if [[ -n "$runs" ]]; then
    time=600
    extent=-runs=$runs
    [[ $name != agent && $name != config && $name != control_port ]] || extent=-runs=$((runs / 10))
  fi
  mkdir -p "$corpus"
  {
    LLVM_PROFILE_FILE=/dev/null "$folder/bin/$name" --seeds "$corpus" &&
      LLVM_PROFILE_FILE=$folder/profile/$name.profraw timeout -k 10 $((time + 120)) \
        "$folder/bin/$name" "$extent" "${length[@]}" -timeout=20 -rss_limit_mb=1536 \
        -malloc_limit_mb=256 -reload=0 -print_final_stats=1 \
        -artifact_prefix="$folder/findings/$name-" "$corpus"
  } >"$log" 2>&1 || code=$?
  if [[ $code -ne 0 ]]; then
    tail -n 60 "$log"
    echo "[  FAILED  ] fuzz.$name ($(((SECONDS - start) * 1000)) ms)"
    return 1
  fi
  ran=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  echo "  $name: $ran inputs in $((SECONDS - start)) s"
  echo "[       OK ] fuzz.$name ($(((SECONDS - start) * 1000)) ms)"
}

run_all() {
  local folder=$1 name failed=0 at_once
  shift
  at_once=$(nproc)
  rm -rf "$folder/profile"
  mkdir -p "$folder"/{log,findings,profile}
  local running=0
  for name in "$@"; do
    if [[ $running -ge $at_once ]]; then
      wait -n || failed=$((failed + 1))
      running=$((running - 1))
    fi
    run "$folder" "$name" &
    running=$((running + 1))
  done
  for (( ; running > 0; --running)); do wait -n || failed=$((failed + 1)); done
  echo "[  PASSED  ] $(($# - failed)) tests."
  [[ $failed -eq 0 ]] || echo "[  FAILED  ] $failed tests."
  return $((failed != 0))
}

coverage() {
  local folder=$1 programs objects=()
  shift
  llvm-profdata-14 merge -sparse "$folder"/profile/*.profraw -o "$folder/profile/all.profdata"
  programs=("$folder"/bin/*)
  mapfile -t objects < <(printf -- '-object\n%s\n' "${programs[@]:1}")
  llvm-cov-14 report "${programs[0]}" "${objects[@]}" -instr-profile "$folder/profile/all.profdata" "$@" |
    awk -v wanted="$wanted" '
      /%/ && $1 != "TOTAL" { printf "  %6s of %4d lines  %s\n", $10, $8, $1; ++files }
      /%/ && $1 == "TOTAL" {
        printf "  %6s of %4d lines  in all\n", $10, $8
        enough = $10 + 0 >= wanted
        if (!enough) print "less than " wanted "% of the lines were executed"
      }
      END { exit files == 0 || !enough }'
}

case "${1:-}" in
  --coverage) shift && coverage "$@" ;;
  '' | -*) sed -n '2,14s/^# \{0,1\}//p' "$0" && exit 2 ;;
  *) run_all "$@" ;;
esac
