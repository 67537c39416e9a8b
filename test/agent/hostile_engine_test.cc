// An engine that violates the protocol: each violation ends its connection, with a reason at both
// ends.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "agent/agent.h"
#include "agent/rendezvous.h"
#include "base/internals.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "wire/lease_messages.h"

namespace hostile_engine_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::agent::Agent;
using spinwire::agent::ControlMessage;
using spinwire::agent::make_control_message;
using spinwire::detail::EngineCore;
namespace wire = spinwire::wire;
using wire::MessageKind;

Config hostile_config() {
  Config c = small_config();
  c.memory.rendezvous_bytes = 4u << 20;
  c.memory.windows = 16;
  c.connections.max_message_bytes = 1u << 20;
  c.leases.maximum = 64;
  c.queues.completion_depth = 8192;
  return c;
}

/// A server with two connections to one engine, whose internals the test can reach.
struct Inside {
  Inside()
      : server(hostile_config()),
        core(hostile_config(), Clock::real(), std::move(*spinwire::base::OwnerGuard::create())) {
    EXPECT_TRUE(core.open());
    server.listen();
    server.on_message = [](Connection c, Message& m) { (void)c.send(m.take()); };
    ConnectOptions options;
    options.handlers.on_message = [this](Connection, Message&) { ++echoed; };
    honest = core.connect(server.listener.address(), options).value();
    EXPECT_TRUE(until([&] { return honest.ready() && !server.ready.empty(); }));
    talk();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() { core.end(); }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&server}, [&] {
      (void)core.poll();
      return done();
    });
  }
  void talk() {
    const std::uint64_t before = echoed;
    const std::byte data[100]{};
    ASSERT_TRUE(until([&] { return honest.send_copy(data) == Status::ok; }));
    ASSERT_TRUE(until([&] { return echoed == before + 1; }));
  }
  void begin() {
    const std::size_t before = server.ready.size();
    ConnectOptions options;
    options.handlers.on_closed = [this](Connection, const Error& e) {
      ended = true;
      cause = e;
    };
    hostile = core.connect(server.listener.address(), options).value();
    ASSERT_TRUE(until([&] { return hostile.ready() && server.ready.size() > before; }));
    ended = false;
    server.closed.clear();
  }
  void tell(const ControlMessage& message) {
    Agent* const a = core.find(hostile.index(), spinwire::detail::Internals::generation(hostile));
    ASSERT_NE(a, nullptr);
    spinwire::agent::queue_control_message(core.context, *a, message);
  }
  void expect_refused(const char* words, std::uint64_t counted) {
    ASSERT_TRUE(until([&] { return !server.closed.empty(); }));
    EXPECT_EQ(server.closed[0].status, Status::protocol) << server.closed[0].message();
    EXPECT_NE(server.closed[0].message().find(words), std::string::npos)
        << server.closed[0].message();
    EXPECT_EQ(server.engine.stats().bad_messages, counted);
    talk();
    EXPECT_EQ(server.engine.stats().connections, 1u);
    for (const auto& audit : {server.engine.audit(), core.audit()})
      EXPECT_TRUE(audit) << audit.error().message();
  }

  Node server;
  EngineCore core;
  Connection honest, hostile;
  std::uint64_t echoed = 0;
  bool ended = false;
  Error cause;
};

TEST(HostileEngine, EachControlMessageThatIsNoneEndsItsConnection) {
  Inside t;
  const wire::LeaseCall took{0, 65537, 1, wire::LeaseAction::took, wire::LeaseVerdict::granted};
  wire::LeaseGrant grant;
  grant.bytes = grant.address = 4096;
  grant.time = 10'000'000;
  grant.rkey = 1;
  grant.access = 3;
  const struct {
    ControlMessage message;
    const char* words;
  } cases[] = {
      {make_control_message(MessageKind::rendezvous_answer,
                            wire::encode(wire::RendezvousAnswer{65536})),
       "none that is outstanding"},
      {make_control_message(MessageKind::rendezvous_answer, wire::encode(wire::RendezvousOffer{})),
       "no valid header"},
      {make_control_message(MessageKind::rendezvous_offer, wire::encode(wire::RendezvousOffer{})),
       "malformed"},
      {make_control_message(MessageKind::rendezvous_offer,
                            wire::encode(wire::RendezvousOffer{4096, 2u << 20, 1, 1, false})),
       "max_message_bytes"},
      {make_control_message(MessageKind::lease_request, wire::encode(wire::LeaseRequest{})),
       "malformed"},
      {make_control_message(MessageKind::lease_grant, wire::encode(grant)), "answers no request"},
      {make_control_message(MessageKind::lease_call, wire::encode(took)), "not leased to it"},
      {make_control_message(MessageKind::goodbye, wire::encode(took)), "no valid header"},
      {make_control_message(static_cast<MessageKind>(77), wire::encode(took)), "no valid header"},
  };
  std::uint64_t counted = 0;
  for (const auto& one : cases) {
    SCOPED_TRACE(one.words);
    t.begin();
    t.tell(one.message);
    t.expect_refused(one.words, ++counted);
  }
}

TEST(HostileEngine, OffersThatNobodyCouldHaveSentEndItsConnection) {
  Inside t;
  t.begin();
  // The right address, but the key of other memory of that engine: of the credit cell.
  const Agent& a =
      *t.core.find(t.hostile.index(), spinwire::detail::Internals::generation(t.hostile));
  wire::RendezvousOffer offer{reinterpret_cast<std::uint64_t>(t.core.context.staging), 5000,
                              a.own_cell.region.rkey, 1, false};
  t.tell(make_control_message(MessageKind::rendezvous_offer, wire::encode(offer)));
  ASSERT_TRUE(t.until([&] { return !t.server.closed.empty() && t.ended; }));
  EXPECT_EQ(t.server.closed[0].status, Status::remote_access) << t.server.closed[0].message();
  EXPECT_EQ(t.server.engine.stats().bad_messages, 1u);
  EXPECT_NE(t.cause.status, Status::ok);
  t.talk();
  const auto audit = t.server.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
  EXPECT_EQ(t.server.engine.memory_stats(Pool::rendezvous).blocks_used, 0u);
}

}  // namespace
}  // namespace hostile_engine_test
