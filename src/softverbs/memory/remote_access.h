// Access to a peer's memory: the protection check of a remote key, and the copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// How this process reaches a peer's bytes.
struct RemoteBytes {
  enum class Kind : std::uint8_t {
    refused,
    direct,
    guarded,  ///< mapped, but the peer can take the pages away: the kernel copies
    kernel,   ///< in the peer's private memory: the kernel copies
  } kind = Kind::refused;
  /// Whether all contexts use the processor's atomics on the bytes; else they take a lock. Not for
  /// memory of our own process, see kMapped.
  bool mappable = false;
  std::byte* data = nullptr;  ///< direct, guarded
  std::uint64_t address = 0;  ///< kernel: the peer's virtual address
};

/// Resolves [address, address + length) under `key` of `peer`, with the rights `access`, in the
/// peer's protection domain `pd` or through a window for its queue pair `qpn`. Call it, and access
/// the bytes, between begin_access() and end_access(). Maps the object on first use, which makes
/// system calls; hot after that. With no `access`, for a packet of the peer, refuses to map more
/// than kMapsPerStep between two control steps, and sets Context::waits_to_map.
RemoteBytes resolve(Peer& peer, std::uint64_t pd, std::uint64_t address, std::uint64_t length,
                    std::uint32_t key, std::uint32_t access, std::uint32_t qpn) noexcept;

/// Object `index` of a peer in another process; null if it cannot be mapped. Maps it on first use,
/// which makes system calls; hot after that.
const MappedObject* object_of(Peer& peer, std::uint32_t index, std::uint32_t generation) noexcept;

/// Unmaps all objects of a peer.
void unmap_objects(Peer& peer) noexcept;

/// begin_access() and end_access() mark the initiator busy with plain stores; the revoker's
/// membarrier replaces a fence here.
inline void begin_access(Peer& peer) noexcept {
  peer.out.access_serial->store(++peer.out.own_access_serial, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}
inline void end_access(Peer& peer) noexcept {
  peer.out.access_serial->store(++peer.out.own_access_serial, std::memory_order_release);
}

/// The most bytes that one system call is asked to copy: Linux copies at most 0x7ffff000.
inline constexpr std::size_t kMostPerCall = std::size_t{1} << 30;

enum class Copy : std::uint8_t { to_peer, from_peer };
/// Copies between local elements and the peer's bytes. False and errno on failure (ESRCH: the
/// peer's process is gone).
bool copy_remote(Peer& peer, const RemoteBytes& remote, const ibv_sge* sges, std::uint32_t count,
                 std::size_t length, Copy direction) noexcept;

}  // namespace spinwire::softverbs
