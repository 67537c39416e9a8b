#!/usr/bin/env bash
# Installs the Debian packages that Spinwire's build and tests need and that are missing. When
# nothing is missing it returns at once and does not run apt.
#
#   tools/install-deps.sh           install what is missing
#   tools/install-deps.sh --check   list what is missing; exit 1 if anything is
#   ... --build                     only what `make all`, `make install` and `make demo` need; without it, also
#                                   what tests, checks and measurements need, such as valgrind
#   ... --bench                     with the libraries that `make report` and `make bench` compare with as well
#   ... --softroce                  with what tools/softroce-vm needs as well
#   ... --docs                      with what `make docs` and `make check-man` need as well
#   ... --gdb                       with gdb, whose printers are tested
#   ... --packages                  with what `make deb` and the test of its packages need as well
set -euo pipefail

# One package per line. "a|b" is satisfied by either; a is installed.
build_packages=(
  g++ make 'pkg-config|pkgconf'
  libibverbs-dev librdmacm-dev ibverbs-providers
  libhugetlbfs-dev libhugetlbfs0
  libsodium-dev libxxhash-dev libfmt-dev libexpected-dev libtomlplusplus-dev libcli11-dev
  nlohmann-json3-dev
  python3
)

# To test, check and measure.
test_packages=(
  googletest libbenchmark-dev valgrind
  clang-14 libclang-rt-14-dev llvm-14 'clang-format-14|clang-format' 'clang-tidy-14|clang-tidy'
  ibverbs-utils perftest ucx-utils
  cmake git patch graphviz ca-certificates
)

# For `make bench-curve`: the libraries that Spinwire is compared with. Neither the library nor its
# tests need them.
bench_packages=(libucx-dev libfabric-dev)

# For the machines with Soft-RoCE: what starts them, and what runs in them. The kernel is fetched
# by tools/softroce-vm, for it needs no installing.
softroce_packages=(
  qemu-system-x86 busybox-static cpio kmod xz-utils
  iproute2 rdma-core ibverbs-utils rdmacm-utils perftest
)

# For `make docs` and `make check-man`. Building the manual pages needs neither.
docs_packages=(doxygen mandoc)

# For the slow tests of the printers of values. Nothing else needs it.
gdb_packages=(gdb)

# For `make deb`, and for the test that installs the packages.
deb_packages=(debhelper dpkg-dev fakeroot lintian man-db)

die() {
  echo "install-deps: $*" >&2
  exit 1
}

is_installed() {
  [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

find_missing() {
  local entry name names
  for entry in "${packages[@]}"; do
    IFS='|' read -ra names <<<"$entry"
    for name in "${names[@]}"; do
      is_installed "$name" && continue 2
    done
    echo "${names[0]}"
  done
}

# Runs apt-get as root and without questions.
apt_get() {
  local as_root=()
  if [[ "$(id -u)" -ne 0 ]]; then
    as_root=(sudo)
    [[ -t 0 ]] || as_root+=(-n)  # without a terminal a password prompt would hang
  fi
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -q -y -o DPkg::Lock::Timeout=120 "$@" </dev/null
}

has_candidates() {
  local name
  for name in "$@"; do
    apt-cache policy "$name" 2>/dev/null | grep -q 'Candidate: [^(]' || return 1
  done
}

main() {
  local check=no option
  packages=("${build_packages[@]}")
  for option in "$@"; do
    case "$option" in
      --check) check=yes ;;
      --build) test_packages=() ;;
      --bench) packages+=("${bench_packages[@]}") ;;
      --softroce) packages+=("${softroce_packages[@]}") ;;
      --docs) packages+=("${docs_packages[@]}") ;;
      --gdb) packages+=("${gdb_packages[@]}") ;;
      --packages) packages+=("${deb_packages[@]}") ;;
      -h | --help)
        sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
      *)
        echo "install-deps: unknown option '$option' (--check, --build, --bench, --softroce, --docs, --gdb and --packages are known)" >&2
        exit 2
        ;;
    esac
  done
  packages+=("${test_packages[@]}")

  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    die "this is not a Debian system. Install the equivalents of: ${packages[*]}"
  fi

  local missing
  mapfile -t missing < <(find_missing)
  if [[ ${#missing[@]} -eq 0 ]]; then
    echo "install-deps: nothing is missing"
    return 0
  fi
  if [[ $check == yes ]]; then
    printf '%s\n' "${missing[@]}"
    exit 1
  fi
  if [[ "$(id -u)" -ne 0 ]] && ! command -v sudo >/dev/null; then
    die "missing: ${missing[*]}. Installing needs root or sudo; neither is available"
  fi

  echo "install-deps: installing ${missing[*]}"
  has_candidates "${missing[@]}" || apt_get update || true  # the retry below updates again
  if ! apt_get install --no-install-recommends "${missing[@]}"; then
    # Old package lists name files that mirrors have removed; new lists usually help.
    echo "install-deps: apt failed; refreshing the package lists and trying once more" >&2
    sleep 5
    apt_get update || true
    apt_get install --no-install-recommends "${missing[@]}" ||
      die "apt could not install: ${missing[*]}"
  fi
}

main "$@"
