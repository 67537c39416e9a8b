// Watches the device: its asynchronous events, and its removal. Cold.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>

#include "agent/engine_context.h"
#include "control/control_port.h"
#include "spinwire/engine.h"

namespace spinwire::rpc {
struct Rpc;
}

namespace spinwire::engine {

/// Handles the completions in the queue. Devices forget the completions of a queue pair that is
/// destroyed or has failed.
class CompletionProcessor {
 public:
  virtual ~CompletionProcessor() = default;
  virtual void process_all_completions() noexcept = 0;
};

class DeviceWatch final : public control::DescriptorOwner {
 public:
  DeviceWatch(agent::EngineContext& context, CompletionProcessor& completions,
              const std::unique_ptr<rpc::Rpc>& calls) noexcept
      : context_(context), completions_(completions), calls_(calls) {}

  /// Watches a device that has a descriptor for its events through the port. Other devices are
  /// polled in each step. Errors: those of ControlPort::watch().
  Result<void> open(control::ControlPort& port);
  void close(control::ControlPort& port) noexcept;

  /// Polls the device. Each control step.
  void step(std::uint64_t now) noexcept;
  void on_readable() override { drain_events(); }
  /// Handles one event: the application's handler first, then the connections and sessions that it
  /// ends.
  void on_event(const ibv_async_event& found) noexcept;

  /// Checks that the device works. Errors: no_device.
  [[nodiscard]] Result<void> check_present(const char* asked) const;

  DeviceEventCallback handler;  ///< the application's

 private:
  void drain_events() noexcept;
  void check_removal(std::uint64_t now) noexcept;
  void fail_all(const char* event) noexcept;
  void fail_over(std::uint8_t port) noexcept;

  agent::EngineContext& context_;
  CompletionProcessor& completions_;
  const std::unique_ptr<rpc::Rpc>& calls_;  ///< null: no method and no session
  std::uint64_t next_check_ = 0;            ///< tick of the next check for removal
  const char* lost_ = nullptr;              ///< the event after which no connection is possible
  bool watched_ = false;                    ///< the port reports events
};

}  // namespace spinwire::engine
