// Checks of our own invariants, in every build. What a peer, a device, the environment or the
// application did is never checked this way: that gets a Status or an Error.
#pragma once

namespace spinwire::base {

/// Logs the broken invariant at level error and traps. Cold.
[[noreturn]] __attribute__((cold, noinline)) void check_failed(const char* condition,
                                                               const char* why, const char* file,
                                                               int line) noexcept;

}  // namespace spinwire::base

/// Traps unless `condition` holds; `why` is a sentence that says what it would break. Hot: one
/// predicted branch.
#define SPINWIRE_CHECK(condition, why)               \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? static_cast<void>(0)                        \
       : ::spinwire::base::check_failed(#condition, why, __FILE__, __LINE__))
