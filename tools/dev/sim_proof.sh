#!/usr/bin/env bash
# Proves that simulations find defects: breaks the library on purpose, in one way after another, and
# expects spinwire-sim to notice each. The defects are test/sim/defects/*.patch, each a sentence and a
# change of a few lines.
#
#   sim_proof.sh BUILD [NAME...]   tries all defects or the named ones, with the objects of BUILD
#   sim_proof.sh --check           only checks that all patches apply
#   sim_proof.sh --record NAME     writes the uncommitted changes under src/ into NAME's patch, and
#                                  keeps its sentence: for a new patch, or one that no longer applies
#
# Only the units that a patch changes are compiled again. RUNS: most runs per defect, beginning with seed
# SEED. COMPILE: the command line of the compiler. LINK: the libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
defects=test/sim/defects

if [[ "${1:-}" == --record ]]; then
  file=$defects/${2:?--record NAME}.patch
  said=$(sed '/^--- /,$d' "$file" 2>/dev/null || true)
  change=$(git diff -U1 --no-color -- 'src/*.cc' 'src/*.h' | grep -v '^\(diff\|index\) ')
  [[ -n "$change" ]] || { echo "sim_proof: nothing under src/ is changed" >&2; exit 2; }
  printf '%s\n\n%s\n' "${said:-What the change breaks, in a sentence.}" "$change" >"$file"
  echo "$file is written; 'git checkout src' reverts the change"
  exit 0
fi

build=${1:?sim_proof.sh BUILD [NAME...], --check, or --record NAME}
shift
runs=${RUNS:-500}
seed=${SEED:-1}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Units whose objects depend on one of the files.
units_of() {
  local file
  for file in "$@"; do
    grep -lE "(^| )$file( |\$)" "$build"/obj/src/*.d || true
  done | xargs -rn1 basename -s .d | sort -u
}

# Compiles the units in $scratch/tree and links the program with them, ahead of the library.
compile() {
  local unit objects=()
  for unit in "$@"; do
    # shellcheck disable=SC2086  # words of a command line
    $COMPILE -O1 -g0 -w -I"$scratch/tree/include" -I"$scratch/tree/src" \
      -c "$build/gen/src/$unit.cc" -o "$scratch/$unit.o" || return 1
    objects+=("$scratch/$unit.o")
  done
  # shellcheck disable=SC2086
  $COMPILE "$build/obj/tools/spinwire_sim.o" "${objects[@]}" "$build/obj/tools/libsim.a" \
    "$build/obj/tools/libcommon.a" "$build/lib/libspinwire-sim.a" "$build/lib/libspinwire.a" -Wl,--as-needed $LINK -o "$scratch/spinwire-sim"
}

# Whether all runs pass; their output is in $scratch/out. A run that hangs counts as a failure.
simulate() {
  timeout -k 5 300 "$scratch/spinwire-sim" --seed "$seed" --runs "$runs" \
    >"$scratch/out" 2>&1
}

fresh_tree() {
  rm -rf "$scratch/tree"
  mkdir "$scratch/tree"
  cp -r include src "$scratch/tree"
}

# Prints which run failed, and why.
told() {
  local at what
  at=$(sed -n 's/^seed \([0-9]*\) is the first that failed.*/\1/p' "$scratch/out")
  what=$(sed -n "s/^seed ${at:-0}: //p" "$scratch/out" | head -n 1)
  if [[ -n "$at" ]]; then
    printf 'run %d: %s\n' $((at - seed + 1)) "$what"
  else
    printf 'a run did not end, or: %s\n' "$(tail -n 1 "$scratch/out")"
  fi
}

# Checks all patches before any is tried, since the check is quick.
check_patches() {
  local name stale=0
  fresh_tree
  for name in "$@"; do
    patch -d "$scratch/tree" -p1 -s -F0 --dry-run <"$defects/$name.patch" >"$scratch/said" 2>&1 &&
      continue
    cat "$scratch/said" >&2
    echo "sim_proof: $defects/$name.patch no longer applies: make its change in src/," \
      "then 'tools/dev/sim_proof.sh --record $name'" >&2
    stale=1
  done
  [[ $stale == 0 ]]
}

# Tries the library without a defect, compiled in the same way: its failures are no defect's.
try_sound() {
  fresh_tree
  compile rpc
  if ! simulate; then
    echo "sim_proof: the library fails without a defect: $(told)" >&2
    return 1
  fi
  printf '%-40s %s\n' 'no defect' "$runs runs passed"
}

# Whether the runs catch the defect.
try_defect() {
  local changed units
  fresh_tree
  patch -d "$scratch/tree" -p1 -s -F0 --no-backup-if-mismatch <"$defects/$1.patch"
  mapfile -t changed < <(sed -n 's|^+++ b/||p' "$defects/$1.patch")
  mapfile -t units < <(units_of "${changed[@]}")
  compile "${units[@]}" || exit 1
  if simulate; then
    printf '%-40s %s\n' "$1" "NOT CAUGHT in $runs runs"
    return 1
  fi
  printf '%-40s %s\n' "$1" "$(told)"
}

names=("$@")
if [[ ${#names[@]} == 0 ]]; then
  for file in "$defects"/*.patch; do names+=("$(basename "$file" .patch)"); done
fi
check_patches "${names[@]}"
[[ "$build" != --check ]] || exit 0
[[ $# != 0 ]] || try_sound
missed=0
for name in "${names[@]}"; do
  try_defect "$name" || missed=$((missed + 1))
done
echo "$((${#names[@]} - missed)) defects caught, $missed not"
[[ $missed == 0 ]]
