#!/usr/bin/env bash
# Installs the Debian packages into a folder of their own, with dpkg and a copy of this machine's
# records of installed packages, so that dpkg checks the dependencies. Builds an example against them,
# runs it and the tools, and removes the packages. Nothing may be left.
#
#   test/install/packages_test.sh FOLDER OF THE PACKAGES
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
packages=$1
cxx=${CXX:-g++}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
lib=$root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)
names=(libspinwire0 libspinwire-dev spinwire-tools)

die() {
  echo "packages test: $*" >&2
  exit 1
}
ok() { echo "  ok: $*"; }

# ---- lintian ------------------------------------------------------------------------------------

lintian --fail-on error --allow-root "$packages"/*.deb || die 'lintian finds errors'
ok 'lintian finds no errors'

# ---- installing ---------------------------------------------------------------------------------

as_root=()
[[ $(id -u) -eq 0 ]] || as_root=(fakeroot)
dpkg_in() {
  "${as_root[@]}" dpkg --root="$root" --log="$work/history" --force-script-chrootless,bad-path "$@" >"$work/dpkg.log" 2>&1 ||
    die "dpkg $1 fails: $(cat "$work/dpkg.log")"
}
files() { (cd "$root" && find . -path ./var/lib/dpkg -prune -o -path ./var/log -prune -o -print | sort); }

mkdir -p "$root/var/lib/dpkg/"{info,updates,triggers} "$root/var/log"
awk -v RS= -v ORS='\n\n' '!/^Package: (libspinwire|spinwire-)/' /var/lib/dpkg/status \
  >"$root/var/lib/dpkg/status"
cp /var/lib/dpkg/info/format "$root/var/lib/dpkg/info"
cp /var/lib/dpkg/info/*.list "$root/var/lib/dpkg/info"
files >"$work/before"
dpkg_in -i "$packages"/*.deb
for name in "${names[@]}"; do
  [[ $(dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${db:Status-Status}' "$name") == installed ]] ||
    die "$name is not installed"
done
ok 'dpkg installs the packages; their dependencies are met'

# ---- dependencies of the headers ----------------------------------------------------------------

# Each header that ours include, besides the compiler's, comes from a package that -dev depends on.
depends=$(dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${Depends}' libspinwire-dev)
"$cxx" -std=c++20 -M -I"$root/usr/include" -x c++ "$root/usr/include/spinwire/spinwire.h" |
  tr -d '\\' | tr ' ' '\n' | grep '^/usr' | xargs realpath | sort -u >"$work/headers"
grep -q tl/expected.hpp "$work/headers" || die 'the list of included headers lacks tl/expected.hpp'
while read -r owner; do
  case "$owner" in
    libstdc++-* | libc6-dev | linux-libc-dev | libgcc-* | libclang-*) continue ;;
  esac
  grep -qF "$owner" <<<"$depends" ||
    die "the headers include some of $owner, on which libspinwire-dev does not depend"
done < <(xargs dpkg -S <"$work/headers" | sed 's/[:,].*//' | sort -u)
ok 'libspinwire-dev depends on what its headers include'

# ---- building against them ----------------------------------------------------------------------

export PKG_CONFIG_SYSROOT_DIR=$root PKG_CONFIG_LIBDIR=$lib/pkgconfig \
  PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1
awk '/^```cpp$/ { inside = 1; next } /^```$/ && inside { exit } inside' README.md >"$work/hello.cc"
# compile NAME SOURCE PKG-CONFIG-WORDS...
compile() {
  local flags
  flags=$(pkg-config "${@:3}")
  # shellcheck disable=SC2086  # pkg-config answers words
  "$cxx" -std=c++20 "$2" -o "$work/$1" $flags || die "$1 does not compile"
}
loads() { readelf -d "$work/$1" | grep -q 'NEEDED.*libspinwire'; }
export SPINWIRE_MEMORY_HUGEPAGES=off LD_LIBRARY_PATH=$lib
compile shared "$work/hello.cc" --cflags --libs spinwire
loads shared || die 'pkg-config --libs does not link the shared library'
[[ $("$work/shared" 2>"$work/err") == hello ]] || die "README's program fails with the shared library"
compile static "$work/hello.cc" --cflags --libs --static spinwire
! loads static || die 'pkg-config --static links the shared library'
[[ $("$work/static" 2>"$work/err") == hello ]] || die "README's program fails with the static library"
compile sim "$root/usr/share/doc/libspinwire-dev/examples/sim_test.cc" --cflags --libs spinwire-sim
"$work/sim" 1 >/dev/null || die 'the example sim_test fails'
ok 'a program runs with the shared and the static library, and an example with the simulator'

# ---- tools --------------------------------------------------------------------------------------

bin=$root/usr/bin
"$bin/spinwire-perf" lat --one-thread -n 1000 >/dev/null || die 'spinwire-perf fails'
"$bin/softverbs-preload" ibv_devices | grep -q softverbs || die 'softverbs-preload shows no device'
for program in "$bin"/*; do
  gzip -t "$root/usr/share/man/man1/$(basename "$program").1.gz" || die "$program has no page"
done
for page in man5/spinwire.toml.5 man7/spinwire.7 man7/softverbs.7; do
  gzip -t "$root/usr/share/man/$page.gz" || die "$page is missing"
done
completions=$(
  # shellcheck disable=SC1091
  source "$root/usr/share/bash-completion/completions/spinwire-perf"
  COMP_WORDS=(spinwire-perf --one-t) COMP_CWORD=1 COMPREPLY=()
  _spinwire "$bin/spinwire-perf" --one-t spinwire-perf
  echo "${COMPREPLY[*]}"
)
[[ "$completions" == --one-thread ]] || die "bash completes --one-t to '$completions'"
ok 'the tools run, have pages, and complete'

# ---- removing -----------------------------------------------------------------------------------

dpkg_in --purge "${names[@]}"
files | diff "$work/before" - || die 'the packages leave the files above'
ok 'dpkg removes the packages, and nothing is left'
