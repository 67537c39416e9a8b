// Finds out why a peer was lost. A real adapter cannot distinguish a dead process, a restarted
// process and an unreachable host: none of them acknowledges. So the engine probes the peer's
// control port before it reports the end of such a connection. Cold.
#pragma once

#include <cstdint>
#include <vector>

#include "agent/engine_context.h"
#include "control/control_port.h"

namespace spinwire::engine {

class LossProbes final : public control::ProbeOwner {
 public:
  LossProbes(agent::EngineContext& context, control::ControlPort& port) noexcept
      : context_(context), port_(port) {}

  /// Whether the end of an agent, whose last stage is over, must wait for a probe. Starts the probe
  /// unless one of the peer is under way. Only the end that connected knows an address to probe.
  [[nodiscard]] bool holds(agent::Agent& a) noexcept;

  // control::ProbeOwner
  void on_probe_ended(const control::ProbedEngine& probed, control::ProbeOutcome outcome) override;

 private:
  /// Starts a probe. Returns false if that is not possible.
  [[nodiscard]] bool begin(const agent::Agent& a) noexcept;

  agent::EngineContext& context_;
  control::ControlPort& port_;
  /// All connections to a peer that dialled one address share a probe.
  std::vector<control::ProbedEngine> under_way_;
};

}  // namespace spinwire::engine
