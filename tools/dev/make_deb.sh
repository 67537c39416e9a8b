#!/usr/bin/env bash
# Builds the Debian packages into a folder, from a tree that is built. Needs no network.
#
#   tools/dev/make_deb.sh FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(realpath -m "${1:?the folder of the packages}")

command -v dh >/dev/null || {
  echo "make_deb: debhelper is missing: run tools/install-deps.sh --packages" >&2
  exit 1
}

version=$(dpkg-parsechangelog -l tools/debian/changelog -S Version)
built=$(awk '$1 == "#define" && $2 ~ /^SPINWIRE_VERSION_[MP]/ { v = v (v == "" ? "" : ".") $3 }
  END { print v }' include/spinwire/version.h)
[[ "$version" == "$built" ]] || {
  echo "make_deb: tools/debian/changelog begins with version $version, version.h has $built" >&2
  exit 1
}

# Packed in a new folder of its own, so nothing that exists is removed but old packages of these names.
mkdir -p "$out"
rm -f "$out"/{libspinwire0,libspinwire-dev,spinwire-tools}_*.deb
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/spinwire"
cp -r tools/debian "$work/spinwire/debian"
rm "$work/spinwire/debian/README.md"
{
  printf '%s\n' 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/' \
    'Upstream-Name: Spinwire' '' 'Files: *' "Copyright: $(sed -n 's/^Copyright (c) //p' LICENSE)" \
    'License: BSD-3-clause'
  sed '1,/^Copyright/d; /./,$!d' LICENSE | sed 's/^$/./; s/^/ /'
} >"$work/spinwire/debian/copyright"

log=$out/build.log
(
  ${MAKE:-make} --no-print-directory install DESTDIR="$work/spinwire/debian/tmp" PREFIX=/usr \
    LIBDIR="/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)" DOCDIR=/usr/share/doc/libspinwire-dev
  cd "$work/spinwire"
  # The flags of this build have nothing to do with how debhelper packs.
  DEB_BUILD_OPTIONS='nocheck noautodbgsym' DH_QUIET=1 MAKEFLAGS='' exec debian/rules binary
) >"$log" 2>&1 || {
  cat "$log" >&2
  exit 1
}
mv "$work"/*.deb "$out"
(cd "$out" && ls ./*.deb)
