// The packet format of a GID.
#pragma once

#include <cstdint>
#include <string_view>

#include "spinwire/export.h"

namespace spinwire {

/// The numbers are part of the protocol.
enum class GidType : std::uint8_t {
  infiniband = 0,  ///< of a port of InfiniBand
  roce_v1 = 1,     ///< RoCE in Ethernet frames, within one link
  roce_v2 = 2,     ///< RoCE in UDP; the GID is an IP address
  embedded = 3,    ///< of softverbs, the device within the library
  unknown = 255,   ///< the device does not say, or says what this release does not know
};
/// "InfiniBand", "RoCEv1", "RoCEv2", "embedded" or "unknown". Any thread; never allocates.
SPINWIRE_API std::string_view to_string(GidType type) noexcept;

}  // namespace spinwire
