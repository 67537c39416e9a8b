// Checks of the library's own invariants, in every build. A fault of a peer, a device, the
// environment or the application returns a Status or an Error instead.
#pragma once

namespace spinwire::base {

/// Logs the broken invariant at level error and traps. Cold.
[[noreturn]] __attribute__((cold, noinline)) void check_failed(const char* condition,
                                                               const char* why, const char* file,
                                                               int line) noexcept;

}  // namespace spinwire::base

/// Traps unless `condition` holds; `why` is a sentence that states the invariant. Hot: one
/// predicted branch.
#define SPINWIRE_CHECK(condition, why)               \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? static_cast<void>(0)                        \
       : ::spinwire::base::check_failed(#condition, why, __FILE__, __LINE__))
