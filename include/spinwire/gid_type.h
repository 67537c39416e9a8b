// The packet format of a GID.
#pragma once

#include <cstdint>
#include <string_view>

#include "spinwire/export.h"

namespace spinwire {

/// The numbers are part of the protocol.
enum class GidType : std::uint8_t {
  infiniband = 0,
  roce_v1 = 1,
  roce_v2 = 2,
  embedded = 3,
  unknown = 255,
};
/// Any thread; never allocates.
SPINWIRE_API std::string_view to_string(GidType type) noexcept;

}  // namespace spinwire
