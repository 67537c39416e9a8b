// What the system lets us lock: limits, use, and errors that tell them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "spinwire/status.h"

namespace spinwire::base {

/// The limit on locked memory and what counts against it.
struct LockLimits {
  static constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};

  std::uint64_t soft = kUnlimited;  ///< RLIMIT_MEMLOCK, bytes
  std::uint64_t hard = kUnlimited;
  std::uint64_t locked = 0;  ///< bytes locked already (VmLck)
  std::uint64_t pinned = 0;  ///< bytes pinned for devices already (VmPin); counted apart
  bool privileged = false;   ///< CAP_IPC_LOCK: the limit does not apply

  /// Whether `bytes` more, counted on top of `already`, go beyond the limit.
  [[nodiscard]] bool exceeded(std::uint64_t bytes, std::uint64_t already) const noexcept {
    if (privileged || soft == kUnlimited) return false;
    return already > soft || bytes > soft - already;
  }
};

/// Reads them. Set-up.
[[nodiscard]] LockLimits lock_limits() noexcept;

/// What failed for want of memory that can be locked.
enum class LockUse : std::uint8_t {
  lock,  ///< mlock: counts against VmLck
  pin,   ///< registration with a device: counts against VmPin
};

/// Error of status no_memory for `call`, which failed with `error` on `bytes`. It names the limits,
/// the use and the fix, and speaks of a possible cause where the limit is not exceeded. Set-up; may
/// throw std::bad_alloc.
[[nodiscard]] Error lock_error(std::string asked, std::string_view call, int error,
                               std::uint64_t bytes, LockUse use, const LockLimits& limits);

}  // namespace spinwire::base
