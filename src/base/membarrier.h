// Memory barriers on other processors, so that the hot side of a protocol needs none.
#pragma once

namespace spinwire::base {

/// Registers this process for the barriers that it and other processes issue; false if the kernel
/// has none. Every process that shares memory under a lane's or a key's protocol must have called
/// it and got true. A forked child must call it itself. Set-up; any thread.
[[nodiscard]] bool membarrier_available() noexcept;

/// Makes every running thread of every registered process execute a full memory barrier before the
/// call returns. A thread that is not running executes one before it runs again. False if the
/// kernel refused, which cannot happen after membarrier_available() has returned true. Control step
/// only: a system call that interrupts other processors.
bool membarrier() noexcept;

}  // namespace spinwire::base
