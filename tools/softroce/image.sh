# shellcheck shell=bash disable=SC2154  # settings are the entry script's
# The image that the machine boots: the kernel, unpacked, and an initramfs of busybox, modules and
# guest_init.sh. Images are kept in the user's cache, outside the tree, so that fresh clones share them.
# A folder is named by kernel version and a checksum of the scripts, and renamed only when complete.

# Modules by load stage; modprobe finds their dependencies.
modules_base=(virtio_pci 9pnet_virtio 9p overlay dummy)
modules_pair=(virtio_net sch_netem)
modules_rxe=(crc32_generic rdma_rxe ib_uverbs rdma_ucm ib_umad) # rxe needs the crc32

# The cache folder: $SOFTROCE_CACHE, else the user's cache, else (for a user without a home) a private
# folder below the temporary folder.
cache_folder() {
  local home=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}
  local folder=${SOFTROCE_CACHE:-$home/spinwire/softroce}
  if ! mkdir -p "$folder" 2>/dev/null && [[ ! -d "$folder" ]]; then
    folder=${TMPDIR:-/tmp}/spinwire-softroce-$(id -u)
    mkdir -m 700 "$folder" 2>/dev/null
    [[ -O "$folder" && -d "$folder" && ! -L "$folder" ]] ||
      fail "no folder for the cache; set SOFTROCE_CACHE"
  fi
  echo "$folder"
}

# Prints the version of an installed kernel that is readable and has the modules, if any.
installed_kernel() {
  local version
  for version in $(cd /lib/modules 2>/dev/null && ls -r --sort=version); do
    if [[ -r /boot/vmlinuz-$version && -r /lib/modules/$version/modules.dep ]] &&
      modprobe -S "$version" --show-depends -a "${modules_base[@]}" "${modules_pair[@]}" \
        "${modules_rxe[@]}" >/dev/null 2>&1; then
      echo "$version"
      return
    fi
  done
}

# Downloads the kernel package that linux-image-amd64 depends on. apt verifies it.
download_kernel() {
  local folder=$1 package
  package=$(apt-cache depends linux-image-amd64 2>/dev/null |
    sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p' | head -n 1)
  [[ -n "$package" ]] || return 1
  note "fetching $package"
  (cd "$folder" && timeout 300 apt-get -q -q -o APT::Sandbox::User="$(id -un)" \
    download "$package" </dev/null >&2)
}

# Tries again with new package lists: old ones name files that mirrors have removed.
fetch_kernel() {
  local folder=$1 as_root=()
  download_kernel "$folder" && return
  [[ "$(id -u)" -eq 0 ]] || as_root=(sudo -n)
  note 'refreshing the package lists'
  timeout 300 "${as_root[@]}" apt-get -q -q update </dev/null >&2 || true
  download_kernel "$folder" || fail 'apt cannot fetch the kernel that linux-image-amd64 stands for'
}

# Unpacks the kernel of a bzImage, which saves seconds of decompression in the machine. If that fails,
# the bzImage itself is used.
unpack_kernel() {
  local image=$1 to=$2 setup offset length
  setup=$(od -An -tu1 -j $((0x1f1)) -N 1 "$image")
  read -r offset length < <(od -An -tu4 -j $((0x248)) -N 8 "$image")
  offset=$(((setup + 1) * 512 + offset))
  local magic
  magic=$(od -An -tx1 -j "$offset" -N 4 "$image" | tr -d ' ')
  local decompress
  case "$magic" in
    fd377a58) decompress=(xz -dc) ;;
    28b52ffd) decompress=(zstd -dc) ;;
    1f8b*) decompress=(gzip -dc) ;;
    *) decompress=(false) ;;
  esac
  # The payload ends with its length, which makes the decompressors report an error.
  tail -c +$((offset + 1)) "$image" | head -c "$length" |
    "${decompress[@]}" >"$to" 2>/dev/null || true
  [[ "$(head -c 4 "$to" | tail -c 3)" == ELF ]] || cp "$image" "$to" ||
    fail 'no room for the kernel'
}

# copy_modules BASE VERSION FOLDER GROUP MODULE...: numbers the modules in load order and skips those of
# earlier groups.
copy_modules() {
  local base=$1 version=$2 folder=$3/modules/$4 verb path name list number=100
  mkdir -p "$folder"
  list=$(modprobe -d "$base" -S "$version" --show-depends -a "${@:5}") ||
    fail "the kernel $version lacks one of: ${*:5}"
  while read -r verb path; do
    name=$(basename "${path%% *}")
    name=${name%%.ko*}.ko
    [[ "$verb" == insmod ]] || continue
    ! compgen -G "$3/modules/*/[0-9]*-$name" >/dev/null || continue
    path=${path%% *}
    case "$path" in
      *.xz) xz -dc "$path" ;;
      *.zst) zstd -q -dc "$path" ;;
      *.gz) gzip -dc "$path" ;;
      *) cat "$path" ;;
    esac >"$folder/$number-$name" || fail "cannot unpack $path"
    number=$((number + 1))
  done <<<"$list"
}

pack_initramfs() {
  local base=$1 version=$2 work=$3 to=$4 name
  mkdir -p "$work"/{bin,dev,proc,sys,tmp,host,modules}
  cp "$(command -v busybox)" "$work/bin/busybox" || fail 'cannot build the initramfs'
  for name in sh cat grep insmod ip kill ln mkdir mkfifo mount mv reboot sleep sync chroot; do
    ln -s busybox "$work/bin/$name"
  done
  install -m 755 "$here/softroce/guest_init.sh" "$work/init"
  copy_modules "$base" "$version" "$work" base "${modules_base[@]}"
  copy_modules "$base" "$version" "$work" pair "${modules_pair[@]}"
  copy_modules "$base" "$version" "$work" rxe "${modules_rxe[@]}"
  (cd "$work" && find . | cpio -o -H newc -R 0:0 --quiet) >"$to" || fail 'cannot pack the initramfs'
}

# build_image CACHE FOLDER: builds in a temporary folder and renames it when complete.
build_image() {
  local cache=$1 folder=$2 version work base=
  work=$(mktemp -d "$cache/building.XXXXXX") || fail "cannot write to $cache"
  mkdir "$work/image"
  version=$(installed_kernel)
  if [[ -n "$version" ]]; then
    unpack_kernel "/boot/vmlinuz-$version" "$work/image/kernel"
  else
    kept_package "$cache" "$work"
    note 'unpacking the kernel'
    base=$work/unpacked
    timeout 300 dpkg -x "$work"/*.deb "$base" || fail 'cannot unpack the kernel'
    version=$(basename "$base"/lib/modules/*)
    depmod -b "$base" "$version" || fail 'cannot tell which modules need which'
    unpack_kernel "$base/boot/vmlinuz-$version" "$work/image/kernel"
  fi
  pack_initramfs "${base:-/}" "$version" "$work/initramfs" "$work/image/initramfs"
  echo "$version" >"$work/image/version"
  mv -T "$work/image" "$folder" || fail "cannot make $folder"
  rm -rf "$work"
}

# The package is kept for other versions of these scripts. It is copied completely before it gets its
# name.
kept_package() {
  local cache=$1 work=$2 kept
  kept=$(compgen -G "$cache/linux-image-*.deb" | sort -V | tail -n 1) || true
  if [[ -n "$kept" ]] && (($(date +%s) - $(stat -c %Y "$kept") < 30 * 86400)); then
    ln "$kept" "$work/"
    return
  fi
  fetch_kernel "$work"
  rm -f "$cache"/linux-image-*.deb
  touch "$work"/*.deb
  ln "$work"/*.deb "$cache/"
}

# Prints the folder of the image and builds it if needed, one process at a time.
provide_image() {
  local cache folder sum
  cache=$(cache_folder)
  sum=$(cat "$here/softroce/image.sh" "$here/softroce/guest_init.sh" "$(command -v busybox)" |
    sha256sum | cut -c 1-16)
  folder=$cache/image-$sum
  if ! [[ -d "$folder" ]]; then
    (
      flock -w 600 9 || fail 'another run has been busy with the cache for ten minutes'
      [[ -d "$folder" ]] && exit
      rm -rf "$cache"/building.*
      find "$cache" -maxdepth 1 -name 'image-*' -mtime +7 -exec rm -rf {} +
      build_image "$cache" "$folder"
    ) 9>"$cache/lock" || return
  fi
  # Marks the folder as in use, so that it is not cleaned up. Another user's cache may be read-only.
  touch -c "$folder" 2>/dev/null || true
  echo "$folder"
}
