#!/usr/bin/env bash
# Installs into a temporary DESTDIR and uses the result as an outside user would. A consumer, a new
# project and the examples are compiled by pkg-config and by CMake, and run.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."

# shellcheck source=test/install/examples.sh
source "$here/examples.sh"

make=${MAKE:-make}
cxx=${CXX:-g++}
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
prefix=/opt/spinwire
root=$stage$prefix

die() {
  echo "install test: $*" >&2
  exit 1
}

$make --no-print-directory install DESTDIR="$stage" PREFIX=$prefix LIBDIR=$prefix/lib

for file in lib/libspinwire.a lib/libspinwire.so lib/libspinwire-sim.a \
  lib/pkgconfig/spinwire.pc lib/pkgconfig/spinwire-sim.pc \
  lib/cmake/Spinwire/SpinwireConfig.cmake lib/cmake/Spinwire/SpinwireConfigVersion.cmake; do
  [[ -e "$root/$file" ]] || die "$file was not installed"
done
for file in include/spinwire/*.h; do
  [[ -e "$root/$file" ]] || die "$file was not installed"
done
for page in build/man/*.[157]; do
  [[ -e "$root/share/man/man${page##*.}/$(basename "$page")" ]] || die "$page was not installed"
done
for file in conf/*; do
  [[ ! -e "$file" || -e "$root/share/spinwire/$file" ]] || die "$file was not installed"
done
test/install/check_links.py "$root/share" || die 'installed pages have dead links, see above'
if grep -rlF "$stage" "$root/lib/pkgconfig" "$root/lib/cmake"; then
  die "DESTDIR leaked into the files above"
fi

# The shared library may export Spinwire's own names only.
foreign=$(nm -DC --defined-only "$root/lib/libspinwire.so" |
  awk '{ $1 = $2 = ""; print }' | grep -vE '^ +((vtable|typeinfo|typeinfo name) for )?spinwire::' ||
  true)
[[ -z "$foreign" ]] || die "the shared library exports foreign symbols: $foreign"

export PKG_CONFIG_PATH=$root/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$stage
version=$(pkg-config --modversion spinwire)

# run_consumer NAME PROGRAM: runs it and compares its version with that of pkg-config.
run_consumer() {
  local said
  said=$(LD_LIBRARY_PATH=$root/lib "$2") || die "$1: the consumer failed"
  [[ "$said" == "$version" ]] || die "$1: the consumer says '$said', pkg-config '$version'"
  echo "  ok: $1"
}

# shellcheck disable=SC2046  # pkg-config answers words
compile() {
  local out=$1 source=${SOURCE:-consumer.cc}
  shift
  "$cxx" -std=c++20 -Wall -Werror "$here/$source" -o "$out" "$@"
}
# shellcheck disable=SC2046
compile "$stage/shared" $(pkg-config --cflags --libs spinwire)
readelf -d "$stage/shared" | grep -q 'libspinwire\.so\.' ||
  die 'pkg-config: the consumer does not load the shared library'
run_consumer 'pkg-config, shared' "$stage/shared"

# Only Spinwire itself is linked statically: its dependencies may lack archives.
# shellcheck disable=SC2046
compile "$stage/static" $(pkg-config --cflags --libs --static spinwire)
readelf -d "$stage/static" | grep -q 'libspinwire' &&
  die 'pkg-config: the static consumer loads the shared library'
run_consumer 'pkg-config, static' "$stage/static"
if nm -C "$stage/static" | grep -q 'spinwire::Simulation'; then
  die 'a program that does not simulate carries the simulator'
fi
# shellcheck disable=SC2046
SOURCE=consumer_sim.cc compile "$stage/sim" $(pkg-config --cflags --libs spinwire-sim)
run_consumer 'pkg-config, simulator' "$stage/sim"

# gdb loads the printers with the library. Its folder has the path of the installed library.
if command -v gdb >/dev/null; then
  mkdir -p "$stage/auto-load$root"
  cp -r "$root/share/gdb/auto-load$prefix/lib" "$stage/auto-load$root"
  LD_LIBRARY_PATH=$root/lib gdb -nx -batch -iex "set auto-load safe-path $stage" \
    -iex "set auto-load scripts-directory $stage/auto-load" -ex 'set disable-randomization off' \
    -ex 'break main' -ex run -ex 'info pretty-printer global' "$stage/shared" >"$stage/gdb.log" 2>&1 ||
    { cat "$stage/gdb.log" >&2 && die 'gdb failed'; }
  grep -qx '  spinwire' "$stage/gdb.log" || { cat "$stage/gdb.log" >&2 && die 'gdb has not loaded the printers'; }
  [[ -e "$root/share/gdb/spinwire.py" ]] || die 'share/gdb/spinwire.py was not installed'
  echo '  ok: gdb loads the printers'
else
  echo '  skipped: gdb is not installed'
fi

if command -v cmake >/dev/null; then
  cmake_quiet() {
    cmake "$@" >"$stage/cmake.log" 2>&1 || { cat "$stage/cmake.log" >&2 && die 'CMake failed'; }
  }
  cmake_quiet -S "$here" -B "$stage/cmake" -DCMAKE_CXX_COMPILER="$cxx" \
    -DCMAKE_PREFIX_PATH="$root" -DWANTED_VERSION="$version"
  cmake_quiet --build "$stage/cmake"
  run_consumer 'CMake, shared' "$stage/cmake/consumer_shared"
  run_consumer 'CMake, static' "$stage/cmake/consumer_static"
  run_consumer 'CMake, simulator' "$stage/cmake/consumer_sim"
  if cmake -S "$here" -B "$stage/newer" -DCMAKE_PREFIX_PATH="$root" -DWANTED_VERSION=999 \
    >/dev/null 2>&1; then
    die 'CMake: the package claims to be version 999'
  fi
else
  echo '  skipped: CMake is not installed'
fi

# A new project, by its Makefile and by CMake.
"$root/bin/spinwire-new-project" "$stage/first" >/dev/null
run_project() {
  local said
  said=$(LD_LIBRARY_PATH=$root/lib "$2") || die "$1: the new project failed"
  [[ "$said" == *'the call answered: 42'* ]] || die "$1: the new project says '$said'"
  echo "  ok: new project, $1"
}
$make --no-print-directory -C "$stage/first" CXX="$cxx" >"$stage/make.log" 2>&1 ||
  { cat "$stage/make.log" >&2 && die 'make of the new project failed'; }
run_project make "$stage/first/first"
if command -v cmake >/dev/null; then
  cmake_quiet -S "$stage/first" -B "$stage/first/build" -DCMAKE_CXX_COMPILER="$cxx" \
    -DCMAKE_PREFIX_PATH="$root"
  cmake_quiet --build "$stage/first/build"
  run_project CMake "$stage/first/build/first"
fi

test_examples

# Without tl-expected: a message that names it, for both ways to build. The compiler sees all of
# /usr/include but that.
mkdir "$stage/include"
for entry in /usr/include/*; do
  [[ "$entry" == */tl ]] || ln -s "$entry" "$stage/include"
done
folders=()
while read -r folder; do
  [[ "$folder" != /usr/include ]] || folder=$stage/include
  folders+=(-isystem "$folder")
done < <("$cxx" -E -v -x c++ /dev/null 2>&1 | sed -n '/^#include </,/^End/s|^ \(/.*\)|\1|p')
# shellcheck disable=SC2046
if SOURCE=consumer_sim.cc compile "$stage/none" -nostdinc "${folders[@]}" $(pkg-config --cflags spinwire) \
  2>"$stage/none.log"; then
  die 'the headers compile without tl-expected'
fi
grep -m 1 'error' "$stage/none.log" | grep -q 'install libexpected-dev' ||
  die "the first error without tl-expected does not name it: $(head -n 5 "$stage/none.log")"
if command -v cmake >/dev/null; then
  if cmake -S "$here" -B "$stage/none-cmake" -DCMAKE_PREFIX_PATH="$root" -DWANTED_VERSION="$version" \
    -DCMAKE_DISABLE_FIND_PACKAGE_tl-expected=ON >"$stage/none.log" 2>&1; then
    die 'CMake finds Spinwire without tl-expected'
  fi
  grep -q 'tl-expected' "$stage/none.log" || die 'CMake does not name tl-expected, which is missing'
fi
echo '  ok: a missing tl-expected is named'

for tool in "$root"/bin/*; do
  [[ -e "$tool" ]] || continue
  "$tool" --help >/dev/null || die "$(basename "$tool") --help failed"
done
