// What both ends of a measurement know.
#pragma once

#include <cstddef>

#include "spinwire/rpc.h"

namespace spinwire::doctor {

/// Memory that the server's engine exposes. Its first message on a connection is the RemoteRegion.
inline constexpr std::size_t kRegionBytes = std::size_t{256} << 10;
/// Answers a call with its request.
inline constexpr Method kEchoMethod = 1;

}  // namespace spinwire::doctor
