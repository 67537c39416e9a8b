#include "softverbs/memory/remote_access.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "softverbs/lane/lane_data.h"
#include "softverbs/memory/peer_file.h"
#include "softverbs/memory/private_memory.h"

namespace spinwire::softverbs {
namespace {

/// Whether the processor must not copy hugepages of peers. A peer can take those away that the
/// context shares itself, so that there is nothing to guard then.
bool guards_hugepages(const Context& c) noexcept {
  return c.page_trust == PageTrust::none ||
         (c.page_trust == PageTrust::usual && !c.shares_hugepages);
}

/// Unmaps what is mapped. False: the kernel refuses.
bool unmap(Peer& peer, MappedObject& mapped) noexcept {
  if (mapped.base == nullptr) return true;
  if (munmap(mapped.base, mapped.size) != 0) return false;
  return_mapping(peer.process->mapped, mapped.size);
  mapped = {};
  return true;
}

/// Opens and maps object `index` of a peer in another process.
[[gnu::cold, gnu::noinline]] MappedObject* map_object(Peer& peer, std::uint32_t index,
                                                      std::uint32_t generation) noexcept {
  const ObjectEntry& entry = peer.segment->objects[index];
  if (entry.generation.load(std::memory_order_acquire) != generation) return nullptr;
  std::uint64_t size = read_once(entry.size);
  const PeerFile file =
      open_peer_file(peer.pid, static_cast<std::uint32_t>(entry.fd), PeerFileKind::any_pages);
  if (!file.fd || file.inode != entry.inode || file.size < size) return nullptr;
  try {
    if (peer.objects.size() <= index) peer.objects.resize(index + 1);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  MappedObject& mapped = peer.objects[index];
  const bool guarded = file.hugepage != 0 && guards_hugepages(*peer.context);
  // Guarded pages are not reserved: the kernel copies, and reports a page that is missing.
  const int flags = MAP_SHARED | (guarded ? MAP_NORESERVE : 0);
  // Hugepages are mapped and unmapped whole.
  if (file.hugepage != 0) size = (size + file.hugepage - 1) & ~(file.hugepage - 1);
  if (!unmap(peer, mapped) || !take_mapping(peer.process->mapped, size)) return nullptr;
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file.fd.get(), 0);
  if (at == MAP_FAILED) return return_mapping(peer.process->mapped, size), nullptr;
  mapped = {static_cast<std::byte*>(at), size, generation, guarded};
  return &mapped;
}

/// The object if it is mapped.
[[gnu::always_inline]] inline const MappedObject* mapped_object(const Peer& peer,
                                                                std::uint32_t index,
                                                                std::uint32_t generation) noexcept {
  const bool is_mapped = index < peer.objects.size() &&
                         peer.objects[index].generation == generation &&
                         peer.objects[index].base != nullptr;
  return is_mapped ? &peer.objects[index] : nullptr;
}

/// Whether a packet may have one more object mapped before the next control step. Programs that
/// trust their peers' pages take control steps seldom.
bool may_map(Context& c) noexcept {
  if (c.page_trust == PageTrust::all) return true;
  if (c.maps_left == 0) return c.waits_to_map = true, false;
  --c.maps_left;
  return true;
}

}  // namespace

const MappedObject* object_of(Peer& peer, std::uint32_t index, std::uint32_t generation) noexcept {
  if (const MappedObject* const mapped = mapped_object(peer, index, generation); mapped != nullptr)
      [[likely]]
    return mapped;
  return index < kMaxObjects ? map_object(peer, index, generation) : nullptr;
}

void unmap_objects(Peer& peer) noexcept {
  for (MappedObject& object : peer.objects) (void)unmap(peer, object);
}

namespace {

std::uint32_t read_key(const RegionEntry& region) noexcept {
  return region.key.load(std::memory_order_seq_cst);
}

/// Whether the key belongs to one queue pair, `qpn`. A window's owner issues no barrier in our
/// thread, so this one issues it before it reads the key.
template <typename Region>
[[gnu::noinline]] bool enter_scope(Peer& peer, const Region& region, std::uint32_t key,
                                   std::uint32_t qpn) noexcept {
  if (region.pd != window_scope(qpn)) return false;
  peer.out.access_serial->exchange(peer.out.own_access_serial, std::memory_order_seq_cst);
  return read_key(region) == key && region.pd == window_scope(qpn);
}

/// Whether the region allows the access that resolve() was asked for.
template <typename Region>
[[gnu::always_inline]] inline bool allows(Peer& peer, const Region& region, std::uint64_t pd,
                                          std::uint64_t address, std::uint64_t length,
                                          std::uint32_t key, std::uint32_t access,
                                          std::uint32_t qpn) noexcept {
  if (read_key(region) != key || key == 0) return false;
  if (region.pd != pd && !enter_scope(peer, region, key, qpn)) [[unlikely]]
    return false;
  const std::uint64_t begin = read_once(region.address);
  const std::uint64_t all = read_once(region.length);
  return (region.access & access) == access && address >= begin && length <= all &&
         address - begin <= all - length;
}

}  // namespace

RemoteBytes resolve(Peer& peer, std::uint64_t pd, std::uint64_t address, std::uint64_t length,
                    std::uint32_t key, std::uint32_t access, std::uint32_t qpn) noexcept {
  if (peer.same_process) {
    // Other processes can write the segment, and the bytes are ours.
    const OwnRegion& own = peer.local.regions[region_index(key)];
    if (!allows(peer, own, pd, address, length, key, access, qpn)) return {};
    return {RemoteBytes::Kind::direct, false, pointer(address), address};
  }
  const RegionEntry& region = peer.segment->regions[region_index(key)];
  if (!allows(peer, region, pd, address, length, key, access, qpn)) return {};
  const std::uint32_t object = read_once(region.object);
  if (object == kNoObject) return {RemoteBytes::Kind::kernel, false, nullptr, address};
  if (object == kSegmentObject) {
    const std::uint64_t at = read_once(region.object_offset + (address - region.address));
    if (at >= sizeof(Segment) || length > sizeof(Segment) - at) return {};
    return {RemoteBytes::Kind::direct, true, reinterpret_cast<std::byte*>(peer.segment) + at,
            address};
  }
  // Locks are no memory of the application. lock_of() may map them anew.
  if (object == kLockObject) return {};
  const std::uint32_t generation = read_once(region.object_generation);
  const MappedObject* mapped = mapped_object(peer, object, generation);
  if (mapped == nullptr) [[unlikely]] {
    // Without a right: for a packet of the peer, not for an operation of ours.
    if (access == 0 && !may_map(*peer.context)) return {};
    mapped = object_of(peer, object, generation);
    if (mapped == nullptr) return {RemoteBytes::Kind::kernel, true, nullptr, address};
  }
  const auto kind = mapped->guarded ? RemoteBytes::Kind::guarded : RemoteBytes::Kind::direct;
  const std::uint64_t offset = read_once(region.object_offset + (address - region.address));
  if (offset > mapped->size || length > mapped->size - offset) return {};
  return {kind, true, mapped->base + offset, address};
}

namespace {

/// Copies between our own mappings through the kernel. It refuses with EFAULT where the processor
/// would raise SIGBUS: the peer may have punched a hole into its hugepages when no other is free.
bool copy_guarded(std::byte* there, const ibv_sge* sges, std::uint32_t count, std::size_t length,
                  Copy direction) noexcept {
  ScatterCursor local(sges, count);
  while (length != 0) {
    const ScatterCursor::Piece piece = local.next(std::min(length, kMostPerCall));
    if (piece.length == 0) return errno = EINVAL, false;
    const iovec ours{piece.data, piece.length};
    const iovec theirs{there, piece.length};
    const ssize_t n = direction == Copy::to_peer
                          ? ::process_vm_writev(::getpid(), &ours, 1, &theirs, 1, 0)
                          : ::process_vm_readv(::getpid(), &ours, 1, &theirs, 1, 0);
    if (n != static_cast<ssize_t>(piece.length)) {
      if (n >= 0) errno = EFAULT;
      return false;
    }
    there += piece.length;
    length -= piece.length;
  }
  return true;
}

/// Copies what the processor must not touch.
[[gnu::noinline]] bool copy_by_kernel(Peer& peer, const RemoteBytes& remote, const ibv_sge* sges,
                                      std::uint32_t count, std::size_t length,
                                      Copy direction) noexcept {
  return remote.kind == RemoteBytes::Kind::guarded
             ? copy_guarded(remote.data, sges, count, length, direction)
             : copy_private_memory(peer, remote.address, sges, count, length, direction);
}

}  // namespace

bool copy_remote(Peer& peer, const RemoteBytes& remote, const ibv_sge* sges, std::uint32_t count,
                 std::size_t length, Copy direction) noexcept {
  if (remote.kind != RemoteBytes::Kind::direct) [[unlikely]]
    return copy_by_kernel(peer, remote, sges, count, length, direction);
  std::byte* there = remote.data;
  ScatterCursor local(sges, count);
  while (length != 0) {
    const ScatterCursor::Piece piece = local.next(length);
    if (piece.length == 0) return errno = EINVAL, false;
    // The ranges may overlap if a context is connected to itself.
    const bool to_peer = direction == Copy::to_peer;
    peer.context->large_copies.copy(to_peer ? there : piece.data, to_peer ? piece.data : there,
                                    piece.length);
    there += piece.length;
    length -= piece.length;
  }
  return true;
}

}  // namespace spinwire::softverbs
