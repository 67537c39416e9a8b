#!/usr/bin/env bash
# Compares the library's binary interface with the recorded one: the symbols of the shared library, the size,
# alignment and members of each public type, and the value of each enumerator. New symbols, types and
# enumerators are allowed.
#
#   tools/dev/check_abi.sh LIBRARY            fails if a symbol has disappeared, or a layout or value has changed
#   tools/dev/check_abi.sh --record LIBRARY   records the present interface
set -euo pipefail
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
symbols=tools/debian/libspinwire0.symbols
layouts=tools/dev/layouts.txt

record=no
if [[ "${1:-}" == --record ]]; then
  record=yes
  shift
fi
library=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Symbols, as dpkg-gensymbols names them.
nm -D --defined-only "$library" | awk '{ print $NF }' | sort -u >"$work/symbols"

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
{
  list_layouts
  list_values
} >"$work/layouts"

soname=$(readelf -d "$library" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
if [[ $record == yes ]]; then
  version=$(dpkg-parsechangelog -l tools/debian/changelog -S Version)
  {
    echo "$soname libspinwire0 #MINVER#"
    sed "s/.*/ &@Base $version/" "$work/symbols"
  } >"$symbols"
  cp "$work/layouts" "$layouts"
  exit 0
fi

bad=0
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
[[ $bad -eq 0 ]] || echo 'check_abi: see tools/debian/README.md; make abi-record records the change' >&2
exit $bad
