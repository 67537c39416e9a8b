#!/usr/bin/env bash
# Installs the Debian packages, uses them as a user would, and removes them again, in a root of its own.
#
#   test/install/packages_test.sh FOLDER      FOLDER has the packages of `make deb`
#
# Exit codes: 0 all is well; 1 a check failed; 77 left out, because root or overlayfs is missing.
#
# Nothing outside changes. The script enters a private mount namespace, and makes an overlay whose lower
# layer is the machine's root, which an overlay only reads. Its upper layer is a tmpfs that exists in the
# namespace alone. Before dpkg runs, the script leaves the machine's root altogether (pivot_root), so no
# path leads there any more. All mounts end with the script, so it deletes nothing outside.
#
# A machine that builds Spinwire has every -dev package, which would hide a dependency that is missing. So in
# the overlay all packages go that neither the packages of Spinwire nor a user's tools depend on.
set -euo pipefail
script=$(readlink -f "${BASH_SOURCE[0]}")
marker=/etc/spinwire-packages-test
packages=(libspinwire0 libspinwire-dev spinwire-tools)
# What a user who compiles has besides, what the examples need (recommended), and what this test runs.
users_packages=(apt bash-completion binutils cmake g++ libcli11-dev make man-db pkg-config pkgconf python3-minimal
  util-linux)

die() {
  echo "packages test: $*" >&2
  exit 1
}

skip_test() {
  echo "packages test: left out: $*"
  exit 77
}

# The namespace of the mounts that this process sees.
namespace() { readlink /proc/self/ns/mnt; }

# ---- in the machine's root --------------------------------------------------------------------

outside() {
  local folder code=0
  folder=$(realpath "${1:?the folder of the packages}")
  [[ "$(id -u)" -eq 0 ]] || skip_test 'it needs root'
  grep -qw overlay /proc/filesystems || skip_test 'this kernel has no overlayfs'
  unshare --mount --pid --fork --kill-child true 2>/dev/null || skip_test 'namespaces are not permitted'
  for name in "${packages[@]}"; do
    compgen -G "$folder/${name}_*.deb" >/dev/null || die "$folder has no package $name: run make deb"
  done
  [[ ! -e "$marker" ]] || die "$marker exists: this is no clean machine"
  unshare --mount --pid --ipc --fork --kill-child --propagation private \
    "$script" --inside "$(namespace)" "$folder" || code=$?
  [[ ! -e "$marker" ]] || die 'a write has left the overlay'
  exit "$code"
}

# ---- in a mount namespace of its own ----------------------------------------------------------

inside() {
  local outer=$1 folder=$2 root=/mnt/root
  [[ "$(namespace)" != "$outer" ]] || die 'this is the mount namespace of the machine'
  mount --make-rprivate /
  mount -t tmpfs -o size=3g,mode=755 packages-test /mnt
  mkdir /mnt/upper /mnt/work "$root"
  mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay "$root" 2>/dev/null ||
    skip_test 'overlayfs does not take this root as its lower layer'

  # The proof that writes stay in the overlay, before anything else is written.
  chroot "$root" /bin/sh -c "echo here >$marker"
  [[ -e "/mnt/upper$marker" ]] || die 'the marker is not in the upper layer'
  [[ ! -e "$marker" ]] || die 'a write in the overlay appears outside'

  mkdir "$root/packages-test"
  cp "$script" "$root/packages-test/packages_test.sh"
  cp "$(dirname "$script")/check_links.py" "$root/packages-test"
  cp "$folder"/*.deb "$root/packages-test"
  mkdir -p "$root/run" "$root/tmp" "$root/dev" "$root/sys" "$root/proc"
  mount -t proc proc "$root/proc"
  mount -t sysfs -o ro sysfs "$root/sys"
  mount -t tmpfs -o mode=755 run "$root/run"
  mount -t tmpfs -o mode=1777 tmp "$root/tmp"
  # Devices that lead nowhere.
  mount -t tmpfs -o mode=755 dev "$root/dev"
  mknod -m 666 "$root/dev/null" c 1 3
  mknod -m 666 "$root/dev/zero" c 1 5
  mknod -m 666 "$root/dev/full" c 1 7
  mknod -m 666 "$root/dev/random" c 1 8
  mknod -m 666 "$root/dev/urandom" c 1 9
  ln -s /proc/self/fd "$root/dev/fd"
  mkdir -m 1777 "$root/dev/shm"
  mount -t tmpfs -o mode=1777 shm "$root/dev/shm"

  mkdir "$root/packages-test/old-root"
  cd "$root"
  pivot_root . packages-test/old-root
  cd /
  umount --lazy /packages-test/old-root
  exec /bin/bash /packages-test/packages_test.sh --in-overlay
}

# ---- in the overlay ---------------------------------------------------------------------------

step() { echo "  ok: $*"; }

check_root() {
  [[ "$(findmnt -n -o FSTYPE /)" == overlay ]] || die 'the root is no overlay'
  [[ -e "$marker" ]] || die 'this is not the overlay of this test'
  [[ -z "$(ls -A /packages-test/old-root)" ]] || die "the machine's root is still there"
  # Everything else that is mounted belongs to this namespace.
  local other
  other=$(findmnt -rn -o TARGET,FSTYPE | grep -vE '^/ overlay$|^/(proc proc|sys sysfs)$|^/(run|tmp|dev|dev/shm) tmpfs$' ||
    true)
  [[ -z "$other" ]] || die "these mounts do not belong here: $other"
}

# All files of the system, except what belongs to dpkg and other programs' caches and logs.
list_files() {
  find /etc /usr /opt /srv /var -xdev \
    \( -path /var/cache -o -path /var/log -o -path /var/lib/dpkg \) -prune -o -print | sort
}

run_user() { # as a program of a user would run: no terminal, no variables of the build
  env -i PATH=/usr/bin:/bin:/usr/sbin HOME=/tmp SPINWIRE_MEMORY_HUGEPAGES=off "$@" </dev/null
}

check_installed() {
  local name tool
  for name in "${packages[@]}"; do
    [[ "$(dpkg-query -W -f '${db:Status-Status}' "$name")" == installed ]] || die "$name is not installed"
  done
  grep -q libspinwire.so.0 <<<"$(ldconfig -p)" || die 'the linker does not know the library'
  for tool in $(dpkg -L spinwire-tools | sed -n 's|^/usr/bin/||p'); do
    run_user "$tool" --help >/dev/null || die "$tool --help failed"
    [[ -e /usr/share/man/man1/$tool.1.gz ]] || die "$tool has no manual page"
    run_user bash -c "source /usr/share/bash-completion/completions/$tool && complete -p $tool" >/dev/null 2>&1 ||
      die "$tool has no completion"
  done
  step 'tools, with manual pages and completion'
  # Without /etc/manpath.config, which a small system may lack.
  for name in spinwire spinwire.toml softverbs; do
    run_user man -C /dev/null -M /usr/share/man "$name" >/packages-test/page 2>/packages-test/log || true
    grep -q '^DESCRIPTION' /packages-test/page || die "man $name shows no page: $(cat /packages-test/log)"
  done
  step 'man spinwire'
  [[ -n "$(run_user spinwire-stat --list)" ]] || die 'spinwire-stat --list shows nothing'
  run_user spinwire-perf lat --one-thread -n 100 >/dev/null || die 'spinwire-perf failed'
  local code=0
  run_user spinwire-doctor >/packages-test/doctor 2>&1 || code=$?
  [[ $code -le 2 ]] || die "spinwire-doctor could not work: $(cat /packages-test/doctor)"
  step 'spinwire-stat, spinwire-perf, spinwire-doctor'
}

# Compiles only against the installed packages, and runs what is compiled.
check_development() {
  run_user spinwire-new-project /tmp/first >/dev/null
  run_user make -C /tmp/first >/dev/null || die 'make of the new project failed'
  grep -q 'the call answered: 42' <<<"$(run_user /tmp/first/first)" || die 'the new project failed'
  grep -q 'NEEDED.*libspinwire.so.0' <<<"$(readelf -d /tmp/first/first)" || die 'it does not load the library'
  step 'a new project'
  # shellcheck disable=SC2046  # pkg-config answers words
  run_user g++ -std=c++20 /tmp/first/main.cc -o /tmp/static $(pkg-config --cflags --libs --static spinwire) ||
    die 'the static library does not link'
  ! grep -q 'NEEDED.*libspinwire' <<<"$(readelf -d /tmp/static)" || die '--static links the shared library'
  run_user /tmp/static >/dev/null || die 'the static program failed'
  step 'the static library'
  if command -v cmake >/dev/null; then
    { run_user cmake -S /tmp/first -B /tmp/first-cmake && run_user cmake --build /tmp/first-cmake; } \
      >/packages-test/log 2>&1 || die "CMake failed: $(cat /packages-test/log)"
    run_user /tmp/first-cmake/first >/dev/null || die 'the project that CMake built failed'
    step 'the new project, by CMake'
  fi
}

check_guide() {
  command -v python3 >/dev/null || {
    echo '  left out: the links of the guide: python3 is not installed'
    return 0
  }
  run_user python3 /packages-test/check_links.py /usr/share/doc/libspinwire-dev /usr/share/spinwire || die 'the guide has dead links'
  step 'the links of the guide'
}

check_example() {
  cp -r /usr/share/doc/libspinwire-dev/examples/echo /tmp/echo
  local command
  command=$(sed -nE 's|^//   (g\+\+ .*) -O2 (.*)|cd /tmp/echo \&\& \1 \2|p' /tmp/echo/echo.cc)
  run_user sh -c "${command:?no command in the head of echo.cc}" || die 'the example echo does not build'
  run_user /tmp/echo/echo both --count 100 >/dev/null || die 'the example echo failed'
  step 'an example'
}

check_lintian() {
  command -v lintian >/dev/null || {
    echo '  left out: lintian is not installed (tools/install-deps.sh --packages)'
    return 0
  }
  run_user lintian --allow-root --profile debian/main --fail-on error /packages-test/*.deb || die 'lintian found errors'
  step lintian
}

install_packages() {
  dpkg --force-unsafe-io -i /packages-test/*.deb >/packages-test/log 2>&1 ||
    die "dpkg -i failed: $(cat /packages-test/log)"
}

remove_packages() {
  dpkg --force-unsafe-io -r "${packages[@]}" >/packages-test/log 2>&1 ||
    die "dpkg -r failed: $(cat /packages-test/log)"
  dpkg --force-unsafe-io --purge "${packages[@]}" >/packages-test/log 2>&1 ||
    die "dpkg --purge failed: $(cat /packages-test/log)"
}

# Removes what only a machine that builds Spinwire has. Only the fields Depends count, not Recommends.
keep_dependencies() {
  local count
  count=$(dpkg-query -W | wc -l)
  # shellcheck disable=SC2046  # names of packages
  {
    apt-mark auto $(apt-mark showmanual)
    apt-mark manual "${packages[@]}" $(dpkg-query -W -f '${Package}\n' "${users_packages[@]}" 2>/dev/null)
    apt-get -y --no-download -o Dpkg::Options::=--force-unsafe-io -o APT::AutoRemove::RecommendsImportant=false \
      -o APT::AutoRemove::SuggestsImportant=false autoremove --purge
  } >/packages-test/log 2>&1 || die "apt failed: $(tail -n 20 /packages-test/log)"
  [[ "$(dpkg-query -W | wc -l)" -lt $count ]] || die "apt removed nothing: $(tail -n 20 /packages-test/log)"
  step "$(dpkg-query -W | wc -l) of $count packages of this machine are left"
}

in_overlay() {
  check_root
  export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
  for name in "${packages[@]}"; do
    ! dpkg-query -W "$name" >/dev/null 2>&1 || die "$name is known to this machine: this is no clean root"
  done
  check_lintian

  # Overrides of other packages may name users and groups that this machine does not have.
  : >/var/lib/dpkg/statoverride
  install_packages
  keep_dependencies
  remove_packages
  list_files >/packages-test/before
  install_packages
  for name in "${packages[@]}"; do
    dpkg -L "$name" | while read -r file; do [[ -d "$file" ]] || echo "$file"; done
  done >/packages-test/files
  [[ -s /packages-test/files ]] || die 'the packages have no files'
  [[ -z "$(dpkg --verify "${packages[@]}")" ]] || die "dpkg --verify: $(dpkg --verify "${packages[@]}")"
  step "installed, $(wc -l </packages-test/files) files"
  check_installed
  check_development
  check_guide
  check_example

  ! dpkg -r libspinwire0 >/dev/null 2>&1 || die 'the library can be removed below the development package'
  remove_packages
  while read -r file; do
    [[ ! -e "$file" && ! -L "$file" ]] || die "$file is still there"
  done </packages-test/files
  list_files >/packages-test/after
  diff /packages-test/before /packages-test/after || die 'the removal left or took the files above'
  step 'removed, and nothing is left'
}

case "${1:-}" in
  --inside) inside "${@:2}" ;;
  --in-overlay) in_overlay ;;
  *) outside "$@" ;;
esac
