#!/usr/bin/env bash
# Compares the library's binary interface with the recorded one: the symbols of the shared library, the size,
# alignment and members of each public type, and the value of each enumerator. New symbols, types and
# enumerators are allowed.
#
#   tools/dev/check_abi.sh LIBRARY            fails if a symbol has disappeared, or a layout or value has changed
#   tools/dev/check_abi.sh --record LIBRARY   records the present interface. Recorded symbols keep their version, new
#                                             ones get that of the changelog. Refuses what the check above finds,
#                                             unless the library has another soname than the record
#   tools/dev/check_abi.sh --self-test        plants interfaces and records, and checks what becomes of them
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Clang's description of each type in the public headers: its members, without the members of these.
# Clang lays out what is asked for its size.
list_layouts() {
  {
    echo '#include <spinwire/spinwire.h>'
    echo 'using namespace spinwire; using namespace spinwire::detail;'
    awk '/^template/ { skip = 1; next }
      skip { skip = 0; next }
      match($0, /^(class|struct) (SPINWIRE_API )?[A-Z][A-Za-z]*/) && !/;$/ {
        name = substr($0, RSTART, RLENGTH); sub(/.* /, "", name)
        print "static_assert(sizeof(" name ") != 0);" }' include/spinwire/*.h | sort -u
  } >"$work/all.cc"
  clang++-14 -std=c++20 -Iinclude -fsyntax-only -Xclang -fdump-record-layouts "$work/all.cc" |
    awk '/^\*\*\* Dumping/ { first = 1; next }
      first { ours = $0 ~ /\| (class|struct|union) spinwire::[A-Za-z:]+( \(empty\))?$/; first = 0
              type = $4; next }
      ours && /^ +[0-9:-]+ \|   [^ ]/ { sub(/\(anonymous at .*\)/, "(anonymous)"); print type, $0 }
      ours && /\[sizeof=/ { print type, $0 }' |
    sed -E 's/, dsize=[0-9]+//; s/ +/ /g; s/,$/]/' | sort -s -k 1,1
}
# The number of each public enumerator. Programs have these numbers in them.
list_values() {
  {
    printf '#include <spinwire/spinwire.h>\n#include <cstdio>\nint main() {\n'
    tools/dev/check_documented.py --enumerators include/spinwire/*.h | sort |
      sed 's/.*/std::printf("& = %lld\\n", static_cast<long long>(&));/'
    echo '}'
  } >"$work/values.cc"
  clang++-14 -std=c++20 -Iinclude "$work/values.cc" -o "$work/values" -Wl,--unresolved-symbols=ignore-all
  "$work/values"
}

# gather LIBRARY: sets `soname` and `version`, and writes $work/symbols and $work/layouts.
gather() {
  soname=$(readelf -d "$1" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
  version=$(dpkg-parsechangelog -l tools/debian/changelog -S Version)
  # Symbols, as dpkg-gensymbols names them.
  nm -D --defined-only "$1" | awk '{ print $NF }' | sort -u >"$work/symbols"
  {
    list_layouts
    list_values
  } >"$work/layouts"
}

# locate FOLDER FOLDER: the record of this soname, `symbols` and `layouts`, and the soname that it is of.
locate() {
  package=libspinwire${soname##*.}
  symbols=$1/$package.symbols
  layouts=$2/layouts.txt
  [[ -r "$symbols" ]] || {
    echo "check_abi: there is no $symbols for $soname; name the package after the soname, see tools/debian/README.md" >&2
    return 1
  }
  recorded_soname=$(sed -n '1s/ .*//p' "$symbols")
}

# Says what programs that were built with the recorded interface miss. Fails if they miss anything.
compare() {
  local gone bad=0
  gone=$(sed -n 's/^ \(.*\)@Base .*/\1/p' "$symbols" | sort | comm -23 - "$work/symbols")
  if [[ -n "$gone" ]]; then
    echo 'check_abi: these symbols have disappeared:' >&2
    c++filt <<<"$gone" | sed 's/^/  /' >&2
    bad=1
  fi
  # Types and enumerators that are not recorded are new.
  awk 'NR == FNR { recorded[$1] = 1; next } $1 in recorded' "$layouts" "$work/layouts" >"$work/compared"
  if ! diff -u --label recorded "$layouts" --label 'this tree' "$work/compared" >&2; then
    echo 'check_abi: layouts of public types or values of enumerators have changed, see above' >&2
    bad=1
  fi
  return $bad
}

check() {
  if [[ "$soname" != "$recorded_soname" ]]; then
    echo "check_abi: the record is that of $recorded_soname, the library $soname; run make abi-record" >&2
    return 1
  fi
  compare || {
    echo 'check_abi: programs of earlier versions need these; see tools/debian/README.md' >&2
    return 1
  }
}

record() {
  local kept=$symbols
  if [[ "$soname" != "$recorded_soname" ]]; then
    kept=/dev/null # the package is new, and all that it has
    compare || echo "check_abi: recorded, because $soname is another library than $recorded_soname" >&2
  elif ! compare; then
    echo "check_abi: nothing is recorded: programs that were built with $soname need what is named above. Keep it" \
      'beside the new, or raise SPINWIRE_VERSION_MAJOR; see tools/debian/README.md' >&2
    return 1
  fi
  {
    echo "$soname $package #MINVER#"
    awk -v version="$version" -v kept="$kept" '
      BEGIN { while ((getline line <kept) > 0) if (split(line, word, " ") == 2) known[word[1]] = word[2] }
      { name = $1 "@Base"; print " " name, (name in known ? known[name] : version) }' "$work/symbols"
  } >"$work/record"
  cp "$work/record" "$symbols"
  cp "$work/layouts" "$layouts"
}

# plant SONAME VERSION SYMBOLS LAYOUTS: what gather() finds.
plant() {
  soname=$1 version=$2
  printf '%b' "$3" >"$work/symbols"
  printf '%b' "$4" >"$work/layouts"
}

# expect NAME COMMAND WANTED SAID SYMBOLS: runs check or record on a planted record of two symbols of 0.1.0.
# WANTED: pass or fail; SAID: what it says, empty for nothing; SYMBOLS: the record of them afterwards.
expect() {
  local name=$1 command=$2 got=pass said folder=$work/planted
  local before=$'libspinwire.so.0 libspinwire0 #MINVER#\n _Zold@Base 0.1.0\n _Zolder@Base 0.0.9'
  rm -rf "$folder"
  mkdir "$folder"
  echo "$before" >"$folder/libspinwire${soname##*.}.symbols"
  printf 'A 8\nB 4\n' >"$folder/layouts.txt"
  said=$({ locate "$folder" "$folder" && "$command"; } 2>&1) || got=fail
  [[ "$got" == "$3" && (-n "$4" || -z "$said") && "$said" == *"$4"* &&
    "$(<"$folder/libspinwire${soname##*.}.symbols")" == "${5:-$before}" ]] && {
    [[ "$command $got" != 'record pass' ]] || cmp "$folder/layouts.txt" "$work/layouts"
  } && return
  echo "check_abi: self-test: $name: $command: want $3, got $got: $said" >&2
  cat "$folder"/*.symbols "$folder/layouts.txt" >&2
  failed=1
}

self_test() {
  local so=libspinwire.so head='libspinwire.so.0 libspinwire0 #MINVER#' old='_Zold\n_Zolder\n' same='A 8\nB 4\n'
  failed=0
  plant $so.0 0.2.0 "$old" "$same"
  expect 'the recorded interface' check pass ''
  expect 'the recorded interface' record pass '' "$head"$'\n _Zold@Base 0.1.0\n _Zolder@Base 0.0.9'
  plant $so.0 0.2.0 "_Znew\n$old" "${same}C 2\n"
  expect 'something new' check pass ''
  expect 'something new' record pass '' "$head"$'\n _Znew@Base 0.2.0\n _Zold@Base 0.1.0\n _Zolder@Base 0.0.9'
  plant $so.0 0.2.0 '_Znew\n_Zold\n' "$same"
  expect 'a symbol less' check fail _Zolder
  expect 'a symbol less' record fail _Zolder
  expect 'a symbol less' record fail SPINWIRE_VERSION_MAJOR
  plant $so.0 0.2.0 "$old" 'A 16\nB 4\n'
  expect 'another layout' check fail '+A 16'
  expect 'another layout' record fail '+A 16'
  plant $so.0 0.2.0 "$old" 'A 8\n'
  expect 'a type less' record fail '-B 4'
  plant $so.1 1.0.0 '_Znew\n_Zold\n' 'A 16\n'
  expect 'another soname' check fail 'make abi-record'
  expect 'another soname' record pass _Zolder "$so.1 libspinwire1 #MINVER#"$'\n _Znew@Base 1.0.0\n _Zold@Base 1.0.0'
  [[ $failed -ne 0 ]] || echo 'check_abi: self-test passed'
  return $failed
}

command=check
case "${1:-}" in
  --self-test)
    self_test
    exit
    ;;
  --record)
    command=record
    shift
    ;;
esac
gather "$1"
locate tools/debian tools/dev
$command
