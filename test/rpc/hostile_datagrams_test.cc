// Datagrams that nobody should have sent: dropped and counted, and no session is the worse for it.
#include "base/internals.h"
#include "rpc/bare.h"
#include "rpc/client_session.h"
#include "rpc/server_session.h"

namespace rpc_hostile_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::rpc::ClientSession;
using spinwire::rpc::ServerSession;
using spinwire::wire::RpcHeader;
using spinwire::wire::RpcKind;

/// A server, a client with a call that the server has not answered, and somebody else with a
/// session of his own, whose port says what the test likes.
class RpcHostile : public testing::Test {
 protected:
  RpcHostile() : server_(config()), client_(config()), other_(config()) {
    listener_ = std::move(*server_.core->listen("127.0.0.1:0", {}));
    EXPECT_TRUE(server_.core->serve(kLater, [this](Request& r) { later_.push_back(r.defer()); }));
    session_ = client_.core->open_session(listener_.address(), {}).value();
    theirs_ = other_.core->open_session(listener_.address(), {}).value();
    EXPECT_TRUE(run([&] { return session_.ready() && theirs_.ready(); }));
    EXPECT_EQ(session_.call(kLater, filled(9, 1),
                            [this](Reply& r) {
                              ++ended_;
                              status_ = r.status();
                              bytes_ = bytes_of(r.bytes());
                            }),
              Status::ok);
    EXPECT_TRUE(run([&] { return later_.size() == 1; }));
  }
  static Config config() {
    Config c = rpc_config();
    c.rpc.target_rtt = Nanoseconds(0);  // so that what servers allow counts alone
    return c;
  }
  template <typename Done>
  bool run(Done&& done) {
    const auto deadline = std::chrono::steady_clock::now() + 20s * slowness();
    while (!done()) {
      for (const Bare* each : {&server_, &client_, &other_}) (void)each->core->poll();
      if (std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }
  void poll_some() {
    int left = 200;
    (void)run([&] { return left-- == 0; });
  }
  [[nodiscard]] static std::uint64_t bad(const Bare& node) {
    return spinwire::rpc::stats(*node.core->calls).bad_datagrams;
  }
  /// Sends it from somebody else's port to where one of his routes or ours leads.
  void send(const spinwire::verbs::DatagramAddress& to, const RpcHeader& header) {
    static const std::byte nothing[kShortCall]{};
    other_.core->calls->port->send(to, spinwire::wire::pack(header), header.length, nothing);
    other_.core->calls->port->flush();
  }
  [[nodiscard]] spinwire::verbs::DatagramAddress to_server() {
    return spinwire::rpc::find_client(*other_.core->calls,
                                      spinwire::detail::Internals::name(theirs_))
        ->peer_address->destination;
  }
  /// The server's record of the client's session.
  [[nodiscard]] ServerSession& victim() {
    const ClientSession& c = *spinwire::rpc::find_client(
        *client_.core->calls, spinwire::detail::Internals::name(session_));
    return *spinwire::rpc::find_server(*server_.core->calls, c.peer_session);
  }
  /// The call of the beginning is answered as if nothing had been.
  void expect_unharmed() {
    EXPECT_EQ(ended_, 0);
    EXPECT_EQ(later_.size(), 1u);
    EXPECT_EQ(later_[0].reply(filled(7, 3)), Status::ok);
    EXPECT_TRUE(run([&] { return ended_ == 1; }));
    EXPECT_EQ(status_, Status::ok);
    EXPECT_EQ(bytes_, filled(7, 3));
    for (const Bare* each : {&server_, &client_, &other_}) each->expect_clean();
  }

  Bare server_, client_, other_;
  Listener listener_;
  Session session_, theirs_;
  std::vector<PendingCall> later_;
  int ended_ = 0;
  Status status_ = Status::system;
  Bytes bytes_;
};

TEST_F(RpcHostile, AnotherOnesSessionIsNotHisToUse) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  // The number of his queue pair may well be the same.
  EXPECT_EQ(other_.core->calls->port->qp_num(), client_.core->calls->port->qp_num());
  const std::uint32_t name = victim().name;
  send(to_server(), {name, 8 + 1, kLater, RpcKind::request, 0, 0, 0});
  send(to_server(), {name, 0, 0, RpcKind::close, 0, 0, 0});
  send(to_server(), {name, 0, 0, RpcKind::ping, 0, 0, 0});
  ASSERT_TRUE(run([&] { return bad(server_) == 3; }));
  EXPECT_EQ(spinwire::rpc::stats(*server_.core->calls).served_sessions, 2u);
  poll_some();
  expect_unharmed();
}

TEST_F(RpcHostile, WhatMakesNoSenseIsCounted) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const auto to = to_server();
  const std::uint32_t name =
      spinwire::rpc::find_client(*other_.core->calls, spinwire::detail::Internals::name(theirs_))
          ->peer_session;
  const std::uint32_t first =
      spinwire::rpc::find_server(*server_.core->calls, name)->slots[0].number;
  const std::vector<RpcHeader> nonsense = {
      {0, 9, kLater, RpcKind::request, 0, 0, 0},                // nobody's
      {0xffffffff, 9, kLater, RpcKind::request, 0, 0, 0},       // beyond all
      {name ^ 0x100000, 9, kLater, RpcKind::request, 0, 0, 0},  // an earlier use of the record
      {name, 9, kLater, RpcKind::request, 1, 0, 0},             // with a status
      {name, 9, kLater, RpcKind::request, 0, 0, 3},             // with a window
      {name, 9, 0, RpcKind::reply, 0, 0, 8},                    // a reply to a server
      {name, 9, 0, RpcKind{0}, 0, 0, 0},
      {name, 9, 0, RpcKind{200}, 0, 0, 0},
  };
  for (const RpcHeader& header : nonsense) send(to, header);
  ASSERT_TRUE(run([&] { return bad(server_) == nonsense.size(); }));
  // Like the second answer to a close that was repeated.
  send(to, {name, 9, 0, RpcKind::closed, 0, 0, 0});
  ASSERT_TRUE(run([&] { return spinwire::rpc::stats(*server_.core->calls).late == 1; }));
  // A number from before the first call, and ones from far away: old, or a slot's next call.
  const std::uint64_t before = spinwire::rpc::stats(*server_.core->calls).duplicates;
  for (const std::uint32_t number : {0u, 1u, 0xfffffff8u, 0x80000000u})
    send(to, {name, first + number, kLater, RpcKind::request, 0, 0, 0});
  ASSERT_TRUE(
      run([&] { return spinwire::rpc::stats(*server_.core->calls).duplicates == before + 4; }));
  expect_unharmed();
}

TEST_F(RpcHostile, AReplyThatIsShorterThanItsHeaderSaysNothing) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const ServerSession& s = victim();
  spinwire::rpc::DatagramPort& port = *server_.core->calls->port;
  static const std::byte nothing[kShortCall]{};
  // The lengths that so few bytes less those of the header are, in as many bits as there are.
  for (const std::uint16_t less : {std::uint16_t{1}, std::uint16_t{2}}) {
    const auto length = static_cast<std::uint16_t>(-less);
    const RpcHeader header{s.peer_session, s.slots[0].number, 0, RpcKind::reply, 0, length, 1};
    port.send(s.peer_address->destination, spinwire::wire::pack(header), std::uint32_t{0} - less,
              nothing);
  }
  port.flush();
  ASSERT_TRUE(run([&] { return bad(client_) == 2 || ended_ != 0; }));
  expect_unharmed();
}

TEST_F(RpcHostile, AReplyThatAllowsNoCallsIsNone) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  static const std::byte nothing[kShortCall]{};
  const auto& ours = *spinwire::rpc::find_client(*client_.core->calls,
                                                 spinwire::detail::Internals::name(session_));
  spinwire::rpc::DatagramPort& port = *server_.core->calls->port;
  port.send(victim().peer_address->destination,
            spinwire::wire::pack({ours.name, ours.slots[0].number, 0, RpcKind::reply, 0, 0, 0}), 0,
            nothing);
  port.flush();
  ASSERT_TRUE(run([&] { return ended_ != 0 || bad(client_) == 1; }));
  EXPECT_GE(ours.server_window, 1u);
  expect_unharmed();
}

TEST_F(RpcHostile, NoReplyAllowsMoreCallsThanThereArePlaces) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  static const std::byte nothing[kShortCall]{};
  const auto& ours = *spinwire::rpc::find_client(*client_.core->calls,
                                                 spinwire::detail::Internals::name(session_));
  spinwire::rpc::DatagramPort& port = *server_.core->calls->port;
  port.send(victim().peer_address->destination,
            spinwire::wire::pack({ours.name, ours.slots[0].number, 0, RpcKind::reply, 0, 0, 65535}),
            0, nothing);
  port.flush();
  ASSERT_TRUE(run([&] { return ended_ != 0; }));
  std::uint32_t more = 0;
  const auto done = [](Reply&) {};
  while (session_.call(kLater, Bytes(), done) == Status::ok) ++more;
  EXPECT_EQ(ours.in_flight, ours.window);
  EXPECT_EQ(more, ours.window + client_.core->context.config.rpc.backlog);
  for (const Bare* each : {&server_, &client_, &other_}) each->expect_clean();
}

TEST_F(RpcHostile, AReplyToACallThatIsYetToBeMadeIsLate) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  static const std::byte nothing[kShortCall]{};
  const auto& ours = *spinwire::rpc::find_client(*client_.core->calls,
                                                 spinwire::detail::Internals::name(session_));
  spinwire::rpc::DatagramPort& port = *server_.core->calls->port;
  ASSERT_EQ(ours.free_slots & 3, 2u);
  for (const std::uint32_t number : {ours.slots[1].number, ours.slots[0].number + ours.window}) {
    port.send(victim().peer_address->destination,
              spinwire::wire::pack({ours.name, number, 0, RpcKind::reply, 0, 0, 1}), 0, nothing);
  }
  port.flush();
  ASSERT_TRUE(
      run([&] { return ended_ != 0 || spinwire::rpc::stats(*client_.core->calls).late == 2; }));
  EXPECT_EQ(ours.in_flight, 1u);
  expect_unharmed();
}

TEST_F(RpcHostile, NobodyIsTheServerOfASessionThatIsBeingOpened) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "numbers are known";
  const Session opening = client_.core->open_session(listener_.address(), {}).value();
  static const std::byte nothing[kShortCall]{};
  spinwire::rpc::DatagramPort& port = *server_.core->calls->port;
  for (const RpcKind kind : {RpcKind::reply, RpcKind::pong, RpcKind::closed})
    port.send(
        victim().peer_address->destination,
        spinwire::wire::pack({spinwire::detail::Internals::name(opening), 0, 0, kind, 0, 0, 1}), 0,
        nothing);
  port.flush();
  while (bad(client_) != 3) (void)client_.core->poll();
  EXPECT_EQ(opening.state(), spinwire::SessionState::opening);
  ASSERT_TRUE(run([&] { return opening.ready(); }));
  expect_unharmed();
}

}  // namespace
}  // namespace rpc_hostile_test
