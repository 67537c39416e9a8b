#include "engine/loss_probes.h"

#include <algorithm>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "base/error.h"

namespace spinwire::engine {

using agent::Agent;
using agent::LossProbe;
using control::ProbeOutcome;

bool LossProbes::holds(Agent& a) noexcept {
  if (agent::wants_loss_probe(context_, a))
    agent::set_loss_probe(a, begin(a) ? LossProbe::under_way : LossProbe::over);
  return agent::awaits_loss_probe(a);
}

bool LossProbes::begin(const Agent& a) noexcept {
  // The limit is short, because the application waits: an answer takes one round trip, and an
  // unreachable host sends none.
  constexpr int kShare = 8;
  const Nanoseconds limit = context_.config.connections.peer_timeout / kShare;
  const auto begun = base::no_throw("ask for a lost peer", [&]() -> Result<void> {
    const auto to = control::Address::parse(agent::peer_name(a));
    if (!to) return tl::unexpected(to.error());
    const control::ProbedEngine probed{*to, agent::peer_incarnation(a)};
    if (std::find(under_way_.begin(), under_way_.end(), probed) != under_way_.end()) return {};
    under_way_.reserve(under_way_.size() + 1);
    auto dialled = port_.probe(*to, probed.incarnation, *this, limit);
    if (dialled) under_way_.push_back(probed);
    return dialled;
  });
  return begun.has_value();
}

void LossProbes::on_probe_ended(const control::ProbedEngine& probed, ProbeOutcome outcome) {
  std::erase(under_way_, probed);
  const control::ProbeFinding why = control::explain(outcome);
  agent::end_loss_probe(context_, probed, why.found, why.remedy);
}

}  // namespace spinwire::engine
