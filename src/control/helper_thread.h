// Threads that wait for something in place of a poll, and how they wake the poll. Cold.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <memory>

#include "base/unique_fd.h"
#include "control/owners.h"

namespace spinwire::control {

class ControlPort;

/// Starts a thread that takes no signals, which are the application's. If the caller has a
/// real-time priority, the thread has none; if the caller is also bound to one processor, the
/// thread uses the others, because the caller's loop may never let it run. A thread that lands
/// where another such loop runs waits for that one. The caller joins or detaches the thread.
/// `stack_bytes`: 0 for the system's default, which is also taken if thread-local variables leave
/// too little. Errors: limit, no_memory, system.
Result<pthread_t> start_helper_thread(const char* asked, void* (*run)(void*), void* argument,
                                      std::size_t stack_bytes = 0);

/// The descriptor that helper threads write to. They share it, so that it outlives its owner.
using HelperEvent = std::shared_ptr<const base::UniqueFd>;

/// Makes the descriptor, which `port` watches for `owner` until unwatch(). Errors: limit,
/// no_memory, system.
Result<HelperEvent> open_helper_event(const char* asked, ControlPort& port, DescriptorOwner& owner);
/// Any thread.
void raise(const HelperEvent& event) noexcept;
void clear(const HelperEvent& event) noexcept;

}  // namespace spinwire::control
