// An attacker joins another client's session, to take over its long calls or to end them.
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <vector>

#include "attack/latencies.h"
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

/// A server with few sessions, and strangers without a device who open sessions and join them.
class AttackByUnheardJoins : public testing::TestWithParam<spinwire::RpcTransport> {
 protected:
  static constexpr std::uint32_t kSessions = 8;

  static Config victim_config() {
    Config c = rpc_test::over(GetParam(), rpc_test::rpc_config());
    c.rpc.sessions = kSessions;
    return c;
  }
  void SetUp() override {
    // The victim tells its address in the answer to a hello, and its own process has no share.
    auto made = there_.engine.prepare({});
    ASSERT_TRUE(made) << made.error().message();
    ASSERT_TRUE(until({&there_}, [&] { return made->endpoint().has_value(); }));
    const Stream stream(victim_.address());
    stream.send(wire::encode(wire::Hello{*made->endpoint()}));
    const auto answer = stream.receive();
    ASSERT_TRUE(answer);
    const auto* const accept = std::get_if<wire::Accept>(&answer->body);
    ASSERT_NE(accept, nullptr);
    at_victim_ = accept->endpoint;
    here_ = *made->endpoint();
  }
  /// A client that asks for no datagrams, and says that its queue pair is there.
  void join_and_leave(spinwire::Endpoint there) const {
    there.qp_num ^= 0x8000;
    wire::SessionEnd end = wire_test::valid_session_end();
    end.gid = there.gid;
    end.gid_type = there.gid_type;
    end.qp_num = 0;
    there.incarnation = end.incarnation;
    const Stream opening(victim_.address());
    opening.send(wire::encode(wire::OpenSession{end}));
    const auto answer = opening.receive();
    ASSERT_TRUE(answer);
    const auto* const opened = std::get_if<wire::SessionOpened>(&answer->body);
    ASSERT_NE(opened, nullptr) << "refused";
    opening.send(wire::encode(wire::Ready{opened->end.incarnation}));
    const Stream joining(victim_.address());
    joining.send(wire::encode(wire::JoinSession{there, opened->end.name, opened->end.token}));
    const auto joined = joining.receive();
    ASSERT_TRUE(joined);
    if (const auto* no = std::get_if<wire::Refuse>(&joined->body)) FAIL() << no->message();
    joining.send(wire::encode(wire::Ready{opened->end.incarnation}));
  }

  Node there_{rpc_test::rpc_config()};
  spinwire::Endpoint at_victim_, here_;
  Victim victim_{victim_config()};
};

TEST_P(AttackByUnheardJoins, TheirSessionsGiveWay) {
  for (std::uint32_t i = 0; i < 2 * kSessions; ++i)
    ASSERT_NO_FATAL_FAILURE(join_and_leave(i % 2 == 0 ? at_victim_ : here_)) << i;
  // A process gets its whole share, and keeps it.
  std::string why;  // used by the client's callbacks to its end
  Node client(rpc_test::over(GetParam(), rpc_test::rpc_config()));
  std::vector<spinwire::Session> open;
  Latencies latencies(victim_, client);
  for (std::uint32_t i = 0; i < kSessions * 3 / 4; ++i) {
    spinwire::SessionOptions options;
    options.on_closed = [&why](spinwire::Session, const spinwire::Error& e) { why = e.message(); };
    spinwire::Session& session = open.emplace_back();
    Status ended = Status::system;
    bool has_begun = false;
    const auto call = [&] {
      has_begun = true;
      const auto word = std::byte{7};
      EXPECT_EQ(
          session.call(kEcho, {&word, 1}, [&](const spinwire::Reply& r) { ended = r.status(); }),
          Status::ok);
    };
    latencies.measure([] { return true; },
                      [&] {
                        auto made = client.engine.open_session(victim_.address(), options);
                        ASSERT_TRUE(made) << made.error().message();
                        session = *made;
                      },
                      [&] {
                        if (session.ready() && !has_begun) call();
                        return ended != Status::system || !why.empty();
                      });
    ASSERT_EQ(why, "");
    ASSERT_EQ(ended, Status::ok);
  }
  EXPECT_TRUE(latencies.are_short("sessions"));
  for (const spinwire::Session& each : open) EXPECT_TRUE(each.ready());
  open.clear();
  (void)victim_.stop();
}

INSTANTIATE_TEST_SUITE_P(Over, AttackByUnheardJoins,
                         testing::Values(spinwire::RpcTransport::datagram,
                                         spinwire::RpcTransport::connection),
                         [](const auto& way) {
                           return way.param == spinwire::RpcTransport::datagram ? "Datagram"
                                                                                : "Connection";
                         });

}  // namespace
}  // namespace attack_test
