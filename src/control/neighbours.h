// The kernel's routes and its table of neighbours, by rtnetlink. A request is answered within the
// system call. Cold.
#pragma once

#include <array>
#include <cstdint>

#include "spinwire/status.h"

namespace spinwire::control {

/// Whether packets to an address, IPv4 in its mapped form, can leave at once through the interface:
/// the address is this host's, or the kernel knows the Ethernet address of the next hop. Errors:
/// peer_lost (no route leads there), limit, system.
Result<bool> is_next_hop_known(const std::array<std::uint8_t, 16>& to, std::uint32_t interface);

/// Has the kernel ask for the next hop's Ethernet address, and does not wait: sends an empty UDP
/// datagram to the discard port.
void ask_for_next_hop(const std::array<std::uint8_t, 16>& to,
                      const std::array<std::uint8_t, 16>& from, std::uint32_t interface) noexcept;

}  // namespace spinwire::control
