// One client host must not take all sessions of a server.
#include "rpc/bare_engine.h"
#include "rpc/receive_reservation.h"
#include "rpc/server_session.h"
#include "rpc/session_liveness.h"

namespace rpc_share_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
namespace control = spinwire::control;
namespace rpc = spinwire::rpc;
namespace wire = spinwire::wire;

class RpcSessionShare : public testing::Test {
 protected:
  static constexpr std::uint32_t kSessions = 8, kShare = 6;

  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
    open(0);
  }
  void open(std::uint32_t share) {
    Config c = rpc_config();
    c.rpc.sessions = kSessions;
    c.rpc.sessions_per_source = share;
    server_.reset();
    client_.reset();
    server_ = std::make_unique<Bare>(c, &now_);
    client_ = std::make_unique<Bare>(rpc_config(), &now_);
    EXPECT_TRUE(server_->core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
    EXPECT_TRUE(client_->core->open_calls());
  }
  [[nodiscard]] rpc::Rpc& calls() const { return *server_->core->calls; }
  /// Accepts a session from that host; null if it is refused.
  rpc::ServerSession* accept(const char* from) {
    const auto end = rpc::local_session_end(*client_->core->calls, ++name_, 8, 0);
    const auto made = calls().dialogues.accept({}, *control::Address::parse(from), end, {});
    if (made) return rpc::find_server(calls(), static_cast<std::uint32_t>(made->subject));
    error_ = made.error();
    return nullptr;
  }
  /// Also marks the session as used.
  rpc::ServerSession* accept_and_use(const char* from) {
    rpc::ServerSession* const s = accept(from);
    ++now_;
    if (s != nullptr) rpc::mark_used(calls(), *s);
    return s;
  }

  std::uint64_t now_ = 1'000'000'000;
  std::unique_ptr<Bare> server_, client_;
  std::uint32_t name_ = 0;
  Error error_;
};

TEST_F(RpcSessionShare, AHostThatUsesItsShareGetsNoMoreAndOthersDo) {
  for (std::uint32_t i = 0; i < kShare; ++i) ASSERT_NE(accept_and_use("10.0.0.1:5"), nullptr) << i;
  EXPECT_EQ(accept("10.0.0.1:6"), nullptr);
  EXPECT_EQ(error_.status, Status::limit);
  EXPECT_NE(error_.message().find("rpc.sessions_per_source"), std::string::npos);
  EXPECT_NE(error_.message().find("6 of rpc.sessions = 8"), std::string::npos) << error_.message();
  EXPECT_NE(accept("10.0.0.2:5"), nullptr);
  EXPECT_NE(accept("[2001:db8::1]:5"), nullptr);
}

TEST_F(RpcSessionShare, TwoHostsThatTakeWhatTheyCanLeaveRoomForOthers) {
  for (int i = 0; i < 8; ++i) {
    (void)accept_and_use("10.0.0.1:5");
    (void)accept_and_use("10.0.0.2:5");
  }
  EXPECT_EQ(rpc::stats(calls()).served_sessions, 7u);
  EXPECT_NE(accept_and_use("10.0.0.3:5"), nullptr);
}

TEST_F(RpcSessionShare, TwoHostsThatUseTheirSessionsLaterLeaveRoomForOthers) {
  std::vector<std::uint32_t> names;
  for (int i = 0; i < 8; ++i) {
    for (const char* from : {"10.0.0.1:5", "10.0.0.2:5"}) {
      ++now_;
      if (const rpc::ServerSession* const s = accept(from); s != nullptr) names.push_back(s->name);
    }
  }
  std::uint32_t used = 0;
  for (const std::uint32_t name : names) {
    rpc::ServerSession* const s = rpc::find_server(calls(), name);
    if (s == nullptr) continue;  // it gave way
    rpc::mark_used(calls(), *s);
    ++used;
  }
  EXPECT_GE(used, kShare);
  EXPECT_NE(accept_and_use("10.0.0.3:5"), nullptr) << error_.message();
}

TEST_F(RpcSessionShare, ASessionThatEndsGivesItsPlaceBack) {
  rpc::ServerSession* first = accept_and_use("10.0.0.1:5");
  for (std::uint32_t i = 1; i < kShare; ++i) ASSERT_NE(accept_and_use("10.0.0.1:5"), nullptr);
  ASSERT_EQ(accept("10.0.0.1:5"), nullptr);
  rpc::release_server_session(calls(), *first, Status::ok);
  EXPECT_NE(accept_and_use("10.0.0.1:5"), nullptr);
  EXPECT_EQ(accept("10.0.0.1:5"), nullptr);
}

TEST_F(RpcSessionShare, OneThatWasNeverUsedIsReplacedByAnotherOfItsHost) {
  ASSERT_NE(accept("10.0.0.2:5"), nullptr);
  const std::uint32_t other = rpc::stats(calls()).served_sessions;
  rpc::ServerSession* const unused = accept("10.0.0.1:5");
  ASSERT_NE(unused, nullptr);
  const std::uint32_t name = unused->name;
  for (std::uint32_t i = 1; i < kShare; ++i) ASSERT_NE(accept_and_use("10.0.0.1:5"), nullptr);
  EXPECT_NE(accept_and_use("10.0.0.1:5"), nullptr);
  EXPECT_EQ(rpc::find_server(calls(), name), nullptr);
  EXPECT_EQ(rpc::stats(calls()).served_sessions, other + kShare);  // not the other host's
  EXPECT_EQ(accept("10.0.0.1:5"), nullptr);
}

TEST_F(RpcSessionShare, ClientsOnThisHostHaveNoShare) {
  for (std::uint32_t i = 0; i < kSessions; ++i) {
    const char* const from = i % 2 == 0 ? "127.0.0.1:5" : "[::1]:5";
    ASSERT_NE(accept_and_use(from), nullptr) << i;
  }
  EXPECT_EQ(accept("127.0.0.1:5"), nullptr);
  EXPECT_NE(error_.message().find("rpc.sessions = 8 are served"), std::string::npos);
}

TEST_F(RpcSessionShare, TheShareIsASetting) {
  open(2);
  EXPECT_NE(accept_and_use("10.0.0.1:5"), nullptr);
  EXPECT_NE(accept_and_use("10.0.0.1:5"), nullptr);
  EXPECT_EQ(accept("10.0.0.1:5"), nullptr);
  EXPECT_NE(error_.message().find("2 of rpc.sessions = 8"), std::string::npos) << error_.message();
}

// So a flood of requests does not look through all sessions for one that nobody has used.
TEST_F(RpcSessionShare, TheListOfUnusedSessionsHasNoOther) {
  rpc::ServerSession* const first = accept("10.0.0.1:5");
  rpc::ServerSession* const second = accept("10.0.0.1:5");
  rpc::SessionSource& source = *first->source;
  EXPECT_EQ(source.unused, 2u);
  rpc::reserve_window_receives(calls(), *first);  // its first request
  EXPECT_EQ(source.never_used.front(), second);
  EXPECT_EQ(calls().never_used, 1u);
  rpc::release_server_session(calls(), *second, Status::ok);
  EXPECT_EQ(source.never_used.front(), nullptr);
  EXPECT_EQ(calls().never_used, 0u);
  server_->expect_clean();
}

/// Sessions that reserve receives with their first requests. 36 of 64 can be reserved for them.
class RpcReceiveShare : public RpcSessionShare {
 protected:
  static constexpr std::uint32_t kWindow = 8;

  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
    if (over_connections()) GTEST_SKIP() << "datagrams";
    Config c = rpc_config();
    c.rpc.sessions = 64;
    c.rpc.receive_depth = 64;
    server_ = std::make_unique<Bare>(c, &now_);
    client_ = std::make_unique<Bare>(rpc_config(), &now_);
    ASSERT_TRUE(server_->core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
    ASSERT_TRUE(client_->core->open_calls());
    ASSERT_EQ(rpc::served_receive_budget(calls().receive_budget), 36u);
  }
  /// Opens a session that calls once.
  rpc::ServerSession& call_once(const char* from) {
    rpc::ServerSession* const s = accept(from);
    EXPECT_NE(s, nullptr) << error_.message();
    rpc::reserve_window_receives(calls(), *s);
    return *s;
  }
};

TEST_F(RpcReceiveShare, AHostWithManySessionsLeavesAWindowToAnother) {
  for (int i = 0; i < 20; ++i) (void)call_once("10.0.0.1:5");
  EXPECT_EQ(call_once("10.0.0.2:5").advertised_window, kWindow);
  EXPECT_GE(call_once("10.0.0.3:5").advertised_window, 1u);
  server_->expect_clean();
}

TEST_F(RpcReceiveShare, ASessionHasAPartOfItsWindowUntilMoreIsFree) {
  std::vector<rpc::ServerSession*> all;
  for (int i = 0; i < 5; ++i) all.push_back(&call_once("10.0.0.1:5"));
  EXPECT_EQ(all[2]->advertised_window, kWindow);
  EXPECT_EQ(all[3]->advertised_window, 2u);
  EXPECT_EQ(all[4]->advertised_window, 1u) << "one call at a time";
  server_->expect_clean();
  rpc::return_receives(calls(), *all[0]);
  EXPECT_EQ(all[0]->advertised_window, 1u);
  rpc::reserve_window_receives(calls(), *all[3]);  // its next request
  EXPECT_EQ(all[3]->advertised_window, kWindow);
  EXPECT_EQ(all[3]->source->reserved_receives, 3 * kWindow);
  server_->expect_clean();
  for (rpc::ServerSession* each : all) rpc::return_receives(calls(), *each);
  EXPECT_EQ(calls().server_reserved_receives, 0u);
  EXPECT_EQ(all[0]->source->reserved_receives, 0u);
  server_->expect_clean();
}

TEST_F(RpcReceiveShare, ClientsOfOurProcessHaveNoShare) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(call_once("127.0.0.1:5").advertised_window, kWindow) << i;
  EXPECT_EQ(call_once("127.0.0.1:5").advertised_window, 4u);
  server_->expect_clean();
}

TEST(RpcPeerAddresses, AreFoundByAHashThatPeersCannotForesee) {
  const rpc::PeerKeyHash hash, of_another_engine;
  const rpc::PeerKey key{{1, 2}, 3, 4, 5, 6};
  EXPECT_EQ(hash(key), hash(rpc::PeerKey(key)));
  EXPECT_NE(hash(key), of_another_engine(key));
  for (int field = 0; field < 6; ++field) {
    rpc::PeerKey other = key;
    if (field == 0) other.gid[0] = 9;
    if (field == 1) other.gid[15] = 9;
    if (field == 2) other.lid = 9;
    if (field == 3) other.qp_num = 9;
    if (field == 4) other.qkey = 9;
    if (field == 5) other.incarnation = 9;
    EXPECT_NE(hash(key), hash(other)) << field;
    EXPECT_FALSE(key == other);
  }
}

class RpcUnusedSessions : public RpcSessionShare {
 protected:
  static constexpr const char* kCrowd = "127.0.0.9:5";  // without a share of its own

  [[nodiscard]] bool is_served(std::uint32_t name) const {
    return rpc::find_server(calls(), name) != nullptr;
  }
  std::uint32_t open_unused(const char* from) {
    ++now_;
    const rpc::ServerSession* const s = accept(from);
    return s != nullptr ? s->name : 0;
  }
};

TEST_F(RpcUnusedSessions, AHostThatOpensManyReplacesItsOwn) {
  const std::uint32_t honest = open_unused("10.0.0.2:5");  // the oldest of all
  for (int i = 0; i < 50; ++i) {
    ASSERT_NE(open_unused(kCrowd), 0u);
    ASSERT_TRUE(is_served(honest)) << i;
  }
}

TEST_F(RpcUnusedSessions, ManyHostsFindRoomBesideACrowd) {
  for (int i = 0; i < 8; ++i) ASSERT_NE(open_unused(kCrowd), 0u);
  std::vector<std::uint32_t> honest;
  for (const char* from : {"10.0.0.2:5", "10.0.0.3:5", "10.0.0.2:6", "[2001:db8::1]:5"})
    honest.push_back(open_unused(from));
  for (int i = 0; i < 20; ++i) ASSERT_NE(open_unused(kCrowd), 0u);
  for (const std::uint32_t name : honest) EXPECT_TRUE(is_served(name));
}

TEST_F(RpcUnusedSessions, AmongHostsWithAsManyTheOldestGoes) {
  std::vector<std::uint32_t> names;
  for (const char* from : {"10.0.0.9:5", "10.0.0.1:5", "10.0.0.8:5", "10.0.0.2:5", "10.0.0.7:5",
                           "10.0.0.3:5", "10.0.0.6:5", "10.0.0.4:5"})
    names.push_back(open_unused(from));
  ASSERT_NE(open_unused("10.0.0.5:5"), 0u);
  EXPECT_FALSE(is_served(names[0]));
  for (std::size_t i = 1; i < names.size(); ++i) EXPECT_TRUE(is_served(names[i])) << i;
}

TEST_F(RpcUnusedSessions, ThoseThatAreUsedDoNotCount) {
  for (int i = 0; i < 5; ++i) ASSERT_NE(accept_and_use("10.0.0.1:5"), nullptr);
  const std::uint32_t first = open_unused(kCrowd);
  for (int i = 0; i < 2; ++i) ASSERT_NE(open_unused(kCrowd), 0u);
  ASSERT_NE(open_unused("10.0.0.2:5"), 0u);
  EXPECT_FALSE(is_served(first));
  EXPECT_EQ(rpc::stats(calls()).served_sessions, kSessions);
  for (std::uint32_t i = 0; i < kSessions; ++i) (void)accept_and_use("10.0.0.3:5");
  EXPECT_EQ(open_unused("10.0.0.4:5"), 0u) << "all are used";
}

}  // namespace
}  // namespace rpc_share_test
