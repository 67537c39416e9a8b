// The system's limits on locked memory, their use, and errors that report both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "spinwire/status.h"

namespace spinwire::base {

/// The limit on locked memory and the memory that counts against it.
struct LockLimits {
  static constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};

  std::uint64_t soft = kUnlimited;  ///< RLIMIT_MEMLOCK, bytes
  std::uint64_t hard = kUnlimited;
  std::uint64_t locked = 0;  ///< bytes locked already (VmLck)
  std::uint64_t pinned = 0;  ///< bytes pinned for devices already (VmPin); counted apart
  bool privileged = false;   ///< CAP_IPC_LOCK: the limit does not apply

  /// Whether `already` and `bytes` together exceed the limit.
  [[nodiscard]] bool exceeded(std::uint64_t bytes, std::uint64_t already) const noexcept {
    if (privileged || soft == kUnlimited) return false;
    return already > soft || bytes > soft - already;
  }
};

/// Reads the limits and their use. Set-up.
[[nodiscard]] LockLimits lock_limits() noexcept;

/// The kind of call that failed for want of lockable memory.
enum class LockUse : std::uint8_t {
  lock,  ///< mlock: counts against VmLck
  pin,   ///< registration with a device: counts against VmPin
};

/// Makes an Error of status no_memory for `call`, which failed with `error` on `bytes`. The text
/// names the limits, their use and the fix; if the limit is not exceeded, it names the limit as a
/// possible cause. May throw std::bad_alloc. Set-up.
[[nodiscard]] Error lock_error(std::string asked, std::string_view call, int error,
                               std::uint64_t bytes, LockUse use, const LockLimits& limits);

}  // namespace spinwire::base
