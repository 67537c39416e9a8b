// Memory barriers on other processors, so that the hot side of a handshake needs none.
#pragma once

namespace spinwire::base {

/// Makes this process take part in the barriers that other processes and itself issue, and tells
/// whether the kernel has them. Every process that shares memory under the protocol of a lane or of
/// a key must have called it and got true, a forked one itself. Set-up; any thread.
[[nodiscard]] bool membarrier_available() noexcept;

/// When it returns, every running thread of every process that takes part has gone through a full
/// memory barrier since it was called, and those that do not run go through one before they run
/// again. Control step only: a system call that interrupts other processors. False if the kernel
/// refused, which it does not do once membarrier_available() has answered true.
bool membarrier() noexcept;

}  // namespace spinwire::base
