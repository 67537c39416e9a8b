// Watches the device: its asynchronous events, and whether it is still there. Cold.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "agent/engine_context.h"
#include "control/control_port.h"
#include "spinwire/engine.h"

namespace spinwire::engine {

/// Handles the completions that lie in the queue. Devices forget those of a queue pair that is
/// destroyed or has failed.
class CompletionDrain {
 public:
  virtual ~CompletionDrain() = default;
  virtual void drain() noexcept = 0;
};

class DeviceWatch final : public control::DescriptorOwner {
 public:
  DeviceWatch(agent::EngineContext& context, CompletionDrain& completions) noexcept
      : context_(context), completions_(completions) {}

  /// A device with a descriptor for its events is watched through the port; any other is asked in
  /// each step. Errors: those of ControlPort::watch().
  Result<void> open(control::ControlPort& port);
  void close(control::ControlPort& port) noexcept;

  /// In each control step.
  void step(std::uint64_t now) noexcept;
  void on_readable() override { take_events(); }
  /// Handles one event: the application's handler first, then the connections that it ends.
  void on_event(const ibv_async_event& found) noexcept;

  /// Refuses what needs a device that works. Errors: no_device.
  [[nodiscard]] Result<void> check_present(const char* asked) const;

  DeviceEventCallback handler;  ///< the application's

 private:
  void take_events() noexcept;
  void check_removal(std::uint64_t now) noexcept;
  void fail_all(const char* event) noexcept;

  agent::EngineContext& context_;
  CompletionDrain& completions_;
  std::uint64_t next_check_ = 0;  ///< tick of the next look for the device
  const char* lost_ = nullptr;    ///< the event after which no connection is possible
  bool watched_ = false;          ///< the port tells of events
};

}  // namespace spinwire::engine
