// Times after which operations of the application end. A timer belongs to a record, and is not
// touched when the operation ends: it then finds another name in the record. So operations without
// a time-out cost nothing. Cold.
#pragma once

#include <cstdint>

#include "base/large_memory.h"
#include "base/timer_wheel.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;

/// See TimerKind.
inline constexpr std::uint16_t kOperationTimer = 6;

/// One timer for each record of an operation, and for each of a rendezvous message.
class OperationTimers {
 public:
  /// May throw std::bad_alloc.
  OperationTimers(base::TimerWheel& wheel, std::uint32_t operations, std::uint32_t messages);
  OperationTimers(const OperationTimers&) = delete;
  OperationTimers& operator=(const OperationTimers&) = delete;
  ~OperationTimers();

  /// Starts the timer of the record that `name` belongs to, again if it runs.
  void start(std::uint64_t name, std::uint64_t deadline) noexcept;
  /// The operation that a timer was started for.
  [[nodiscard]] std::uint64_t name_of(const base::Timer& timer) const noexcept {
    return records_[timer.index].name;
  }

 private:
  struct Record {
    base::Timer timer;
    std::uint64_t name = 0;
  };

  base::TimerWheel& wheel_;
  std::uint32_t operations_;
  std::uint32_t count_;
  base::LargeArray<Record> records_;
};

/// Ends the operation with timed_out at `deadline`, in ticks. False: the agent has no such
/// operation. The first call allocates: may throw std::bad_alloc.
bool set_deadline(EngineContext& ctx, Agent& a, std::uint64_t name, std::uint64_t deadline);
/// Handles a timer of kOperationTimer.
void on_operation_timer(EngineContext& ctx, const base::Timer& timer) noexcept;

}  // namespace spinwire::agent
