// Servers that no longer know a session, or have replaced the server that opened it. Their clients
// are told long before connections.peer_timeout.
#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/client_session.h"
#include "rpc/server_session.h"
#include "rpc/session_liveness.h"

namespace rpc_tombstones_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::wire::RpcKind;
namespace rpc = spinwire::rpc;
namespace wire = spinwire::wire;

constexpr std::uint64_t kMillisecond = 1'000'000;

/// A server and a client with a clock of the test.
class RpcTombstones : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
    start("127.0.0.1:0");
    Config config = rpc_config();
    config.rpc.call_timeout = 5s;
    client_ = std::make_unique<Bare>(config, &now_);
    SessionOptions options;
    options.on_closed = [this](Session, const Error& e) { closed_.push_back(e); };
    session_ = client_->core->open_session(listener_.address(), options).value();
    ASSERT_TRUE(until([&] { return session_.ready(); }));
    begin();
    ASSERT_TRUE(until([&] { return ended_.size() == 1; }));
    EXPECT_EQ(ended_[0], Status::ok);
  }
  void start(const std::string& address) {
    server_ = std::make_unique<Bare>(rpc_config(), &now_);
    listener_ = server_->core->listen(address, {}).value();
    EXPECT_TRUE(server_->core->serve(kEcho, [this](Request& r) {
      ++runs_;
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    }));
  }
  template <typename Done>
  bool until(Done&& done, std::uint64_t step = 10'000) {
    return engine_test::until({}, [&] {
      now_ += step;
      (void)client_->core->poll();
      if (server_ != nullptr) (void)server_->core->poll();
      return done();
    });
  }
  /// Lets the time pass while the client does not run.
  void stop_client(std::uint64_t time) {
    for (const std::uint64_t end = now_ + time; now_ < end; now_ += kMillisecond)
      (void)server_->core->poll();
  }
  void begin() {
    EXPECT_EQ(session_.call(kEcho, std::span<const std::byte>(),
                            [this](Reply& r) { ended_.push_back(r.status()); }),
              Status::ok);
  }
  [[nodiscard]] rpc::ClientSession& ours() const {
    return *rpc::find_client(*client_->core->calls, spinwire::detail::Internals::name(session_));
  }
  [[nodiscard]] std::uint32_t served() const {
    return rpc::stats(*server_->core->calls).served_sessions;
  }
  /// Sends this header from the server's port to the client.
  void say(const spinwire::verbs::DatagramAddress& to, const wire::RpcHeader& header) const {
    static const std::byte nothing[kSlotPayloadBytes]{};
    server_->core->calls->port->send(to, wire::pack(header), 0, nothing);
    server_->core->calls->port->flush();
  }
  /// Drops all datagrams of the server.
  void silence() const {
    spinwire::softverbs::FaultPlan plan;
    plan.drop = 1;
    server_->set(plan);
  }
  void expect_lost(const char* found) {
    ASSERT_EQ(closed_.size(), 1u);
    EXPECT_EQ(closed_[0].status, Status::peer_lost);
    EXPECT_NE(closed_[0].found.find(found), std::string::npos) << closed_[0].message();
    client_->expect_clean();
    server_->expect_clean();
  }

  std::uint64_t now_ = 1'000'000'000;
  // Used by the engines' destructors, too.
  std::vector<Status> ended_;
  std::vector<Error> closed_;
  int runs_ = 0;
  std::unique_ptr<Bare> server_, client_;
  Listener listener_;
  Session session_;
};

TEST_F(RpcTombstones, AClientThatWasStoppedIsToldByTheFirstCall) {
  stop_client(15'000 * kMillisecond);
  ASSERT_EQ(served(), 0u);
  EXPECT_TRUE(session_.ready());
  begin();
  // At once, before a due ping could detect it.
  for (int i = 0; i < 2; ++i) (void)server_->core->poll();
  (void)client_->core->poll();
  ASSERT_EQ(closed_.size(), 1u);
  EXPECT_EQ(ended_, (std::vector<Status>{Status::ok, Status::peer_lost}));
  EXPECT_EQ(runs_, 1);
  expect_lost("dropped the session");
}

TEST_F(RpcTombstones, AClientThatOnlyWaitsIsToldByItsPing) {
  stop_client(15'000 * kMillisecond);
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return !closed_.empty(); }, kMillisecond));
  EXPECT_LT(now_ - from,
            2'000 * kMillisecond);  // connections.keepalive_interval, not peer_timeout
  expect_lost("dropped the session");
}

// The record of a client keeps its process's memory mapped.
TEST_F(RpcTombstones, AClientWhoseProcessHasEndedIsNotRemembered) {
  const auto& addresses = server_->core->calls->peer_addresses;
  for (int i = 0; i < 3; ++i) {
    Child child([address = listener_.address()](int, int) -> int {
      Node node(rpc_config());
      const auto opened = node.engine.open_session(address, {});
      for (;;) (void)node.poll();
    });
    ASSERT_TRUE(until([&] { return served() == 2; }));
    EXPECT_EQ(addresses.size(), 2u);
    child.kill(SIGKILL);
    ASSERT_TRUE(until([&] { return served() == 1; }, kMillisecond)) << "its silence is noticed";
    ASSERT_TRUE(until([&] { return addresses.size() == 1; }));
  }
  begin();
  ASSERT_TRUE(until([&] { return ended_.size() == 2; }));
  EXPECT_EQ(ended_[1], Status::ok);
}

// Else a flood of requests for sessions would fill the memory of those that were forgotten.
TEST_F(RpcTombstones, AClientThatHasNotShownItsAddressLeavesNone) {
  rpc::Rpc& calls = *server_->core->calls;
  const std::size_t before = calls.peer_addresses.size();
  auto end = rpc::local_session_end(*client_->core->calls, 7, 8, 0);
  end.incarnation ^= 1;  // another peer
  const auto from = spinwire::control::Address::parse("10.0.0.1:5");
  const auto made = calls.dialogues.accept({}, *from, end, {});
  ASSERT_TRUE(made) << made.error().message();
  EXPECT_EQ(calls.peer_addresses.size(), before + 1);
  calls.dialogues.on_unconfirmed(made->subject, made->opened_at);
  EXPECT_EQ(calls.peer_addresses.size(), before);
  const auto again = calls.dialogues.accept({}, *from, end, {});
  ASSERT_TRUE(again) << again.error().message();
  calls.dialogues.on_path_validated(again->subject);
  calls.dialogues.on_unconfirmed(again->subject, again->opened_at);
  EXPECT_EQ(calls.peer_addresses.size(), before + 1);
}

TEST_F(RpcTombstones, AreRememberedForTenMinutes) {
  const auto& addresses = server_->core->calls->peer_addresses;
  stop_client(15'000 * kMillisecond);
  ASSERT_EQ(served(), 0u);
  stop_client(580'000 * kMillisecond);
  EXPECT_EQ(addresses.size(), 1u);
  stop_client(30'000 * kMillisecond);
  EXPECT_EQ(addresses.size(), 0u);
  // Then no server answers the call, and it ends when the server has been silent for too long.
  silence();
  begin();
  ASSERT_TRUE(until([&] { return !closed_.empty(); }, kMillisecond));
  EXPECT_EQ(closed_[0].status, Status::peer_lost);
}

TEST_F(RpcTombstones, ClosingWhatTheServerHasForgottenTakesARoundTrip) {
  stop_client(15'000 * kMillisecond);
  const std::uint64_t from = now_;
  EXPECT_EQ(session_.close(), Status::ok);
  ASSERT_TRUE(until([&] { return !closed_.empty(); }));
  EXPECT_LT(now_ - from, 100 * kMillisecond);
  EXPECT_EQ(closed_[0].status, Status::ok) << closed_[0].message();
}

// As on a slow machine: none of these datagrams counts as bad.
TEST_F(RpcTombstones, ARepeatedCloseIsLateAtBothEnds) {
  EXPECT_EQ(session_.close(), Status::ok);
  for (int i = 0; i < 1000; ++i, now_ += kMillisecond) (void)client_->core->poll();
  ASSERT_TRUE(until([&] { return !closed_.empty(); }));
  ASSERT_TRUE(until([&] { return rpc::stats(*server_->core->calls).late_replies > 1; }));
  for (int i = 0; i < 20; ++i) (void)(client_->core->poll() + server_->core->poll());
  EXPECT_EQ(rpc::stats(*server_->core->calls).bad_datagrams, 0u);
  EXPECT_EQ(rpc::stats(*client_->core->calls).bad_datagrams, 0u);
}

TEST_F(RpcTombstones, AServerWhoseAnswerToACloseWasLostAnswersAgain) {
  silence();
  EXPECT_EQ(session_.close(), Status::ok);
  ASSERT_TRUE(until([&] { return served() == 0; }));
  server_->set({});
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return !closed_.empty(); }));
  EXPECT_LT(now_ - from, 200 * kMillisecond);  // not connections.close_timeout
  EXPECT_EQ(closed_[0].status, Status::ok);
}

TEST_F(RpcTombstones, AnswersAreAsRareAsRepeatedRequests) {
  const spinwire::verbs::DatagramAddress to = ours().peer_address->destination;
  const std::uint32_t name = ours().peer_session;
  stop_client(15'000 * kMillisecond);
  const std::uint64_t heard = rpc::stats(*client_->core->calls).bad_datagrams;
  static const std::byte nothing[kSlotPayloadBytes]{};
  for (int i = 0; i < 50; ++i)
    client_->core->calls->port->send(to, wire::pack({name, 9, kEcho, RpcKind::request, 0, 0, 0}), 0,
                                     nothing);
  client_->core->calls->port->flush();
  for (int i = 0; i < 2; ++i) (void)server_->core->poll();
  EXPECT_EQ(rpc::stats(*server_->core->calls).bad_datagrams, 50u);
  (void)client_->core->poll();
  EXPECT_EQ(closed_.size(), 1u);
  // Another one would be for a closed session.
  EXPECT_EQ(rpc::stats(*client_->core->calls).bad_datagrams, heard);
}

TEST_F(RpcTombstones, OnlyTheServerOfASessionHasForgottenIt) {
  const rpc::ServerSession& s = *rpc::find_server(*server_->core->calls, ours().peer_session);
  // A message about an earlier session of that name.
  const std::uint32_t name = spinwire::detail::Internals::name(session_);
  const std::uint32_t proof = wire::session_proof(s.token);
  say(s.peer_address->destination,
      wire::session_header(name, s.name ^ 0x100000, RpcKind::unknown, proof));
  // The same message from another peer that knows all its fields.
  Bare other(rpc_config(), &now_);
  Session theirs = other.core->open_session(listener_.address(), {}).value();
  ASSERT_TRUE(until([&] {
    (void)other.core->poll();
    return theirs.ready();
  }));
  auto route = rpc::acquire_peer_address(*other.core->calls,
                                         rpc::local_session_end(*client_->core->calls, 1, 8, 0));
  ASSERT_TRUE(route);
  static const std::byte nothing[kSlotPayloadBytes]{};
  other.core->calls->port->send(
      (*route)->destination,
      wire::pack(wire::session_header(name, s.name, RpcKind::unknown, proof)), 0, nothing);
  other.core->calls->port->flush();
  ASSERT_TRUE(until([&] { return rpc::stats(*client_->core->calls).bad_datagrams == 1; }));
  begin();
  ASSERT_TRUE(until([&] { return ended_.size() == 2; }));
  EXPECT_EQ(ended_[1], Status::ok);
  EXPECT_TRUE(closed_.empty());
  client_->expect_clean();
}

TEST_F(RpcTombstones, AServerThatLivesAgainIsAnotherOne) {
  const Session second = client_->core->open_session(listener_.address(), {}).value();
  ASSERT_TRUE(until([&] { return second.ready(); }));
  const std::string address(listener_.address());
  silence();  // as if it was killed on another host: the device does not report its end
  listener_ = Listener();
  const std::unique_ptr<Bare> former = std::move(server_);
  start(address);
  const std::uint64_t from = now_;
  begin();
  ASSERT_TRUE(until([&] { return !closed_.empty(); }, kMillisecond));
  EXPECT_LT(now_ - from, 5'000 * kMillisecond);  // connections.peer_timeout is 10 s
  EXPECT_EQ(second.state(), SessionState::closed);
  EXPECT_EQ(ended_, (std::vector<Status>{Status::ok, Status::peer_lost}));
  EXPECT_EQ(runs_, 1);
  expect_lost("next incarnation");
}

TEST_F(RpcTombstones, NewsOfAnotherLifeConcernsSilentSessionsWithTheFirstAlone) {
  rpc::Rpc& calls = *client_->core->calls;
  const std::uint64_t incarnation = ours().peer_address->incarnation;
  const auto address = spinwire::control::Address::parse(ours().address).value();
  const spinwire::control::ProbedEngine probed{address, incarnation};
  constexpr auto kRestarted = spinwire::control::ProbeOutcome::restarted;
  rpc::on_server_probed(calls, probed, kRestarted);
  ASSERT_TRUE(session_.ready()) << "it hears from its server";
  const std::uint64_t keepalive = calls.timeouts.keepalive;
  ours().liveness.silent_ticks = 1;
  ours().liveness.last_check = now_ = rpc::last_heard_from(ours()) + keepalive - 1;
  rpc::on_server_probed(calls, probed, kRestarted);
  ASSERT_TRUE(session_.ready()) << "it has heard from its server within a keepalive interval";
  ours().liveness.last_check = now_ = now_ + 1;
  rpc::on_server_probed(calls, {address, incarnation ^ 1}, kRestarted);
  ASSERT_TRUE(session_.ready()) << "its server is none of them";
  rpc::on_server_probed(calls, probed, kRestarted);
  expect_lost("next incarnation");
}

TEST_F(RpcTombstones, ASilentServerThatIsStillThereIsWaitedFor) {
  silence();
  begin();
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return now_ - from > 8'000 * kMillisecond; }, kMillisecond));
  EXPECT_TRUE(session_.ready());
  EXPECT_EQ(server_->core->control.refusals(), 0u);
  EXPECT_EQ(served(), 1u);
  server_->set({});
  EXPECT_EQ(ended_.size(), 2u);  // the call's timeout was 5 s
  begin();
  ASSERT_TRUE(until([&] { return ended_.size() == 3; }, kMillisecond));
  EXPECT_EQ(ended_[2], Status::ok);
  EXPECT_TRUE(closed_.empty());
  client_->expect_clean();
  server_->expect_clean();
}

TEST_F(RpcTombstones, AServerWhoseProcessHasEndedIsLostAtOnce) {
  if (by_work_requests()) GTEST_SKIP() << "only direct datagrams know the peer's process";
  silence();
  server_.reset();
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return !closed_.empty(); }, kMillisecond));
  EXPECT_LE(now_ - from, 1'100 * kMillisecond);  // connections.keepalive_interval is 1 s
  EXPECT_EQ(closed_[0].status, Status::peer_lost) << closed_[0].message();
  EXPECT_NE(closed_[0].found.find("process has ended"), std::string::npos) << closed_[0].message();
  client_->expect_clean();
}

TEST_F(RpcTombstones, WhereNobodyIsOnlySilenceTells) {
  silence();
  listener_ = Listener();
  const auto descriptors = engine_test::open_descriptors();
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return !closed_.empty(); }, kMillisecond));
  // connections.peer_timeout, and two keepalive intervals: until the silence begins to count, and
  // until the last check.
  EXPECT_GE(now_ - from, 10'000 * kMillisecond);
  EXPECT_LE(now_ - from, (10'000 + 2 * 1'000 + 20) * kMillisecond);
  EXPECT_EQ(closed_[0].status, Status::peer_lost) << closed_[0].message();
  EXPECT_LE(engine_test::open_descriptors(), descriptors);
  client_->expect_clean();
}

}  // namespace
}  // namespace rpc_tombstones_test
