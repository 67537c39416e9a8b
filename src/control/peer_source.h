// What a peer's connections, sessions and receives are counted for. Cold.
//
// A peer of another host is counted for its address. All processes of this host have one address,
// so a peer here is counted for the process that owns the softverbs device in its GID. The peer
// names its GID itself. A session has to receive datagrams there before it is used, and a
// connection that names another process's device is soon lost. A peer of our own process has no
// share, and neither has a peer on this host that names an adapter: only its address is known.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "control/address.h"
#include "spinwire/gid_type.h"

namespace spinwire::control {

/// The source that a peer at this address is counted for. A process has an address of its own that
/// is no address of a host. `gid`, `type`: of the peer's endpoint.
Address source_of(const Address& peer, const std::array<std::uint8_t, 16>& gid,
                  GidType type) noexcept;
/// The source of a peer's events for the flight recorder. All peers without a share are one there:
/// they have all addresses of the loopback interface. `source`: from source_of(), or the address of
/// a peer that the application has chosen.
Source event_source(const Address& source) noexcept;
/// The same for a peer of which only the endpoint is known, by the GID that it names: its process,
/// its address as in control/address.h, or the whole GID.
Source event_source(const std::array<std::uint8_t, 16>& gid, GidType type) noexcept;
/// For texts: "10.0.0.1:7", or "process 4711 of this host".
std::string source_text(const Address& source);

}  // namespace spinwire::control
