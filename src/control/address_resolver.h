// Resolves the address in a peer's frame before a verb uses it. On RoCE, ibv_create_ah() and the
// step to RTR wait inside the kernel for ARP or neighbour discovery, a second if there is no answer
// (rdma_core: ib_resolve_eth_dmac). The kernel's rdma_cm does the same work without blocking its
// caller; where it cannot, a thread waits. Afterwards the kernel knows the neighbour, and the verbs
// find it at once. Cold.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "control/owners.h"
#include "control/resolution_limits.h"
#include "spinwire/device.h"
#include "verbs/opened_device.h"

namespace spinwire::control {

class ControlPort;

/// The purpose of a resolution: a handshake, or without one, a connection's subject.
struct Resolution {
  HandshakeId handshake;
  std::uint64_t subject = 0;
  std::optional<Source> source{};  ///< an inbound peer's; none: an outbound connection's
  friend bool operator==(const Resolution& a, const Resolution& b) noexcept {
    return a.handshake == b.handshake && a.subject == b.subject;
  }
};

/// The error for an address that was not resolved; with an errno value, for its reason.
Error unreachable(const Gid& gid, ErrorText found) noexcept;
Error unreachable(const Gid& gid, int error) noexcept;

class AddressResolver {
 public:
  virtual ~AddressResolver() = default;
  /// Begins a resolution. True: a verb may use the address now. False: ControlPort::on_resolved()
  /// reports the outcome. `type`: unknown for that of our device. `from`: the port and GID that are
  /// used; null: the engine's. Its GID index is below 0 if only the GID is known. Errors: peer_lost
  /// if there is no route; limit, no_memory, system.
  virtual Result<bool> begin(const Resolution& what, const Gid& gid, GidType type,
                             const verbs::Place* from) = 0;
  /// Drops a resolution whose outcome is not needed any more.
  virtual void cancel(const Resolution& what) noexcept = 0;
};

}  // namespace spinwire::control
