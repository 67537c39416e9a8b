// Tests that the outcome of a probe ends only connections that dialled the probed address.
#include <gtest/gtest.h>

#include <string>

#include "agent/connecting.h"
#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace loss_probes_test {
namespace {

using engine_test::Node;
using spinwire::Status;
using spinwire::agent::Agent;
using spinwire::agent::LossProbe;
using spinwire::control::Address;
using spinwire::control::ProbeOutcome;

// Any server may claim the incarnation of another one.
TEST(EngineLossProbes, AProbeSpeaksOnlyForConnectionsThatDialledItsAddress) {
  Node server, other, client;
  server.listen();
  other.listen();
  (void)engine_test::connect(client, server);
  (void)engine_test::connect(client, other);
  auto& core = *spinwire::detail::core_of(client.engine);
  Agent *to_server = nullptr, *to_other = nullptr;
  for (Agent& a : core.context.agents)
    (spinwire::agent::peer_name(a) == server.listener.address() ? to_server : to_other) = &a;
  ASSERT_NE(to_server, nullptr);
  ASSERT_NE(to_other, nullptr);
  to_other->peer.incarnation = to_server->peer.incarnation;
  for (Agent* const each : {to_server, to_other}) set_loss_probe(*each, LossProbe::under_way);
  core.loss_probes.on_probe_ended(
      {*Address::parse(other.listener.address()), to_server->peer.incarnation},
      ProbeOutcome::restarted);
  EXPECT_EQ(to_other->setup.probe, LossProbe::over);
  EXPECT_NE(to_other->cause.found.find("next incarnation"), std::string::npos)
      << to_other->cause.found;
  EXPECT_EQ(to_server->setup.probe, LossProbe::under_way) << "it waits for its own probe";
  EXPECT_EQ(to_server->cause.found, "");
  core.loss_probes.on_probe_ended(
      {*Address::parse(server.listener.address()), to_server->peer.incarnation},
      ProbeOutcome::unreachable);
  EXPECT_EQ(to_server->setup.probe, LossProbe::over);
  EXPECT_NE(to_server->cause.found, "");
  for (Agent* const each : {to_server, to_other}) {
    set_loss_probe(*each, LossProbe::none);
    each->cause = {Status::ok, {}, {}, {}};
  }
}

}  // namespace
}  // namespace loss_probes_test
