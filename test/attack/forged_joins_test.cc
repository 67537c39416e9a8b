// An attacker joins another client's session, to take over its long calls or to end them.
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <vector>

#include "attack/victim.h"
#include "base/internals.h"
#include "engine/engine_core.h"
#include "rpc/long_calls.h"

namespace attack_test {
namespace {

/// With each transport of the session's calls.
class AttackByJoin : public testing::TestWithParam<spinwire::RpcTransport> {};

TEST_P(AttackByJoin, TheSessionsNameAloneOpensNothing) {
  Config config = rpc_test::over(GetParam(), rpc_test::long_call_config());
  Victim victim(config);
  std::vector<spinwire::Error> closed;  // used by the client's callbacks to its end
  Node client(config);
  spinwire::SessionOptions options;
  options.on_closed = [&](spinwire::Session, const spinwire::Error& why) { closed.push_back(why); };
  auto session = client.engine.open_session(victim.address(), options);
  ASSERT_TRUE(session) << session.error().message();
  ASSERT_TRUE(until({&client}, [&] { return session->ready(); }));
  const Buffer request = client.filled(100'000, 3);  // longer than a datagram
  const auto call = [&](spinwire::Method method) {
    Status ended = Status::system;
    EXPECT_EQ(session->call(method, request.slice(),
                            [&](const spinwire::Reply& r) { ended = r.status(); }),
              Status::ok);
    EXPECT_TRUE(until({&client}, [&] { return ended != Status::system; }));
    return ended;
  };
  ASSERT_EQ(call(kEcho), Status::ok);
  std::optional<Status> held;  // of a long call that is in flight throughout
  ASSERT_EQ(
      session->call(kHold, request.slice(), [&](const spinwire::Reply& r) { held = r.status(); }),
      Status::ok);
  // More than an attacker can know: the name given by the server, and the client's GID.
  auto& calls = *spinwire::detail::core_of(client.engine)->calls;
  const std::uint32_t name = calls.clients.find(0)->peer_session;
  auto prepared = client.engine.prepare({});
  ASSERT_TRUE(prepared) << prepared.error().message();
  ASSERT_TRUE(until({&client}, [&] { return prepared->endpoint().has_value(); }));
  std::mt19937_64 random(5);
  for (int i = 0; i < 200; ++i) {
    const Stream forged(victim.address());
    forged.send(wire::encode(wire::JoinSession{*prepared->endpoint(), name, random() | 1}));
    const auto answer = forged.receive();
    ASSERT_TRUE(answer);
    EXPECT_NE(std::get_if<wire::Refuse>(&answer->body), nullptr);
    if (i % 20 == 0) {
      EXPECT_EQ(call(kEcho), Status::ok) << "after " << i;
    }
  }
  EXPECT_FALSE(held) << "it ended early";
  EXPECT_EQ(call(kRelease), Status::ok);
  EXPECT_TRUE(until({&client}, [&] { return held.has_value(); }));
  EXPECT_EQ(held, Status::ok);
  EXPECT_TRUE(session->ready());
  EXPECT_TRUE(closed.empty());
  (void)victim.stop();
}

INSTANTIATE_TEST_SUITE_P(Over, AttackByJoin,
                         testing::Values(spinwire::RpcTransport::datagram,
                                         spinwire::RpcTransport::connection),
                         [](const auto& way) {
                           return way.param == spinwire::RpcTransport::datagram ? "Datagram"
                                                                                : "Connection";
                         });

}  // namespace
}  // namespace attack_test
