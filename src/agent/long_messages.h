// How long messages choose between the device's memory and a rendezvous.
#pragma once

#include <cstdint>

namespace spinwire::agent {

/// In Rendezvous::direct_pause: the message that is being accepted lacks credit to go directly. It
/// is refused then, though the peer may grant credit meanwhile: behind a rendezvous message all
/// long ones go by rendezvous until none is under way, and with a window of them one always is.
inline constexpr std::uint32_t kLacksCredit = ~0u;

}  // namespace spinwire::agent
