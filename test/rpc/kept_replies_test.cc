// Replies that a server keeps for clients that may ask again. They take no memory without end, and
// only their own bytes go on the wire: no earlier contents of their buffer.
#include "rpc/kept_replies.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "rpc/bare_engine.h"
#include "rpc/server_session.h"

namespace rpc_kept_replies_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::wire::RpcHeader;
using spinwire::wire::RpcKind;
namespace control = spinwire::control;
namespace memory = spinwire::memory;
namespace rpc = spinwire::rpc;

/// More than the payload of any direct datagram.
constexpr std::size_t kBehind = 32;

TEST(RpcKeptReplies, NobodySeesWhereALongerPayloadLay) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "what lies behind a datagram";
  if (over_connections() || by_work_requests()) GTEST_SKIP() << "datagrams without work requests";
  Node server(rpc_config()), client(rpc_config());
  server.listen();
  Bytes asked, answered;
  ASSERT_TRUE(server.engine.serve(kEcho, [&](Request& r) {
    asked.assign(r.bytes().data(), r.bytes().data() + kBehind);
    EXPECT_EQ(r.reply(r.bytes()), Status::ok);
  }));
  SessionOptions options;
  options.window = 1;  // one slot for all
  Session s = client.engine.open_session(server.listener.address(), options).value();
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return s.ready(); }));
  for (const std::size_t size : {std::size_t{0}, 4 * kSlotPayloadBytes, std::size_t{0}}) {
    const Buffer request = client.buffer(4 * kSlotPayloadBytes);
    bool over = false;
    ASSERT_EQ(s.call(kEcho, request.slice(0, size),
                     [&](Reply& r) {
                       EXPECT_EQ(r.status(), Status::ok);
                       answered.assign(r.bytes().data(), r.bytes().data() + kBehind);
                       over = true;
                     }),
              Status::ok);
    ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return over; }));
  }
  EXPECT_EQ(asked, Bytes(kBehind));
  EXPECT_EQ(Bytes(answered.begin() + 8, answered.end()), Bytes(kBehind - 8));  // after a tick
  EXPECT_EQ(s.close(), Status::ok);
}

/// A server with a small send pool; a client; and a host whose requests the test sends, and which
/// never says which replies it has.
class RpcDroppedReplies : public testing::Test {
 protected:
  static constexpr std::size_t kLong = 4000;  ///< 504 blocks of this size are in the pool
  static constexpr std::uint32_t kWindow = 64;

  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
    if (over_connections()) GTEST_SKIP() << "datagrams";
    Config config = rpc_config();
    config.memory.send_bytes = 2u << 20;
    config.rpc.call_timeout = 5s;
    server_ = std::make_unique<Bare>(config, &now_);
    honest_ = std::make_unique<Bare>(rpc_config(), &now_);
    hostile_ = std::make_unique<Bare>(rpc_config(), &now_);
    listener_ = server_->core->listen("127.0.0.1:0", {}).value();
    ASSERT_TRUE(server_->core->serve(kCount, [this](Request& r) {
      ++runs_;
      answered_ = r.reply(filled(kLong, 1));
      if (answered_ != Status::ok) ++unanswered_;
    }));
    ASSERT_TRUE(hostile_->core->open_calls());
    to_server_ = rpc::acquire_peer_address(*hostile_->core->calls,
                                           rpc::local_session_end(calls(), 1, kWindow, 0))
                     .value();
  }
  [[nodiscard]] rpc::Rpc& calls() const { return *server_->core->calls; }
  [[nodiscard]] std::uint64_t used() const {
    return server_->core->context.arena->stats(memory::PoolId::send).blocks_used;
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({}, [&] {
      now_ += 1000;
      for (const auto* each : {&server_, &honest_, &hostile_}) (void)(*each)->core->poll();
      return done();
    });
  }
  void rest(Nanoseconds time) {
    const std::uint64_t end = now_ + static_cast<std::uint64_t>(time.count());
    (void)until([&] { return (now_ += 1'000'000) >= end; });
  }
  /// A session of a host at another address than the client's.
  rpc::ServerSession& accept(std::uint32_t window = kWindow) {
    const auto end = rpc::local_session_end(*hostile_->core->calls, ++name_, window, 0);
    const auto made = calls().dialogues.accept({}, *control::Address::parse("10.0.0.1:5"), end, {});
    EXPECT_TRUE(made) << made.error().message();
    return *rpc::find_server(calls(), static_cast<std::uint32_t>(made->subject));
  }
  void send(const RpcHeader& header) {
    static const std::byte nothing[kSlotPayloadBytes]{};
    hostile_->core->calls->port->send(to_server_->destination, spinwire::wire::pack(header), 0,
                                      nothing);
    hostile_->core->calls->port->flush();
  }
  /// Sends the first request of a slot, whose handler runs.
  void request(const rpc::ServerSession& s, std::uint32_t slot) {
    const int before = runs_;
    send({s.name, kWindow + slot, kCount, RpcKind::request, 0, 0, 0});
    ASSERT_TRUE(until([&] { return runs_ == before + 1; }));
  }
  Session open() {
    Session s = honest_->core->open_session(listener_.address(), {}).value();
    EXPECT_TRUE(until([&] { return s.ready(); }));
    return s;
  }
  static constexpr int kPoolOfSessions = 9;  ///< whose windows are more than the pool

  std::uint64_t now_ = 1'000'000'000;
  std::unique_ptr<Bare> server_, honest_, hostile_;
  Listener listener_;
  rpc::PeerAddress* to_server_ = nullptr;
  std::uint32_t name_ = 0;
  int runs_ = 0, unanswered_ = 0;
  Status answered_ = Status::ok;
};

TEST_F(RpcDroppedReplies, AHostThatPinsTheSendPoolLosesItsOwn) {
  Session honest = open();
  std::vector<std::size_t> sizes;
  const auto call = [&] {
    const std::size_t before = sizes.size();
    EXPECT_EQ(honest.call(kCount, Bytes(),
                          [&](Reply& r) {
                            sizes.push_back(r.status() == Status::ok ? r.bytes().size() : 0);
                          }),
              Status::ok);
    ASSERT_TRUE(until([&] { return sizes.size() == before + 1; }));
  };
  call();
  std::vector<rpc::ServerSession*> theirs;
  for (int i = 0; i < kPoolOfSessions; ++i) {
    theirs.push_back(&accept());
    for (std::uint32_t slot = 0; slot < kWindow; ++slot) request(*theirs.back(), slot);
  }
  EXPECT_EQ(unanswered_, 0);
  const std::uint64_t dropped = rpc::stats(calls()).dropped_replies;
  EXPECT_GT(dropped, 0u);
  const rpc::ServerSession* ours = nullptr;
  calls().servers.for_each([&](const rpc::ServerSession& s) {
    if (s.source != theirs.front()->source) ours = &s;
  });
  ASSERT_NE(ours, nullptr);
  EXPECT_EQ(std::count_if(ours->slots, ours->slots + ours->window,
                          [](const rpc::ServerSlot& v) { return v.payload.block != nullptr; }),
            1)
      << "the client's only reply was dropped";
  for (int i = 0; i < 20; ++i) call();
  EXPECT_EQ(sizes, std::vector<std::size_t>(21, kLong));
  // The oldest ones went first, and none of the client's.
  EXPECT_EQ(theirs.front()->slots[0].payload.block, nullptr);
  EXPECT_NE(theirs.back()->slots[kWindow - 1].payload.block, nullptr);
  for (std::uint32_t slot = 0; slot < ours->window; ++slot) {
    const rpc::ServerSlot& v = ours->slots[slot];
    EXPECT_TRUE(v.state != rpc::ServerSlotState::answered || v.status == 0);
  }
  server_->expect_clean();
}

TEST_F(RpcDroppedReplies, ACallWhoseReplyIsGoneEndsWithAnErrorAndDoesNotRunAgain) {
  Session s = open();
  Status ended = Status::ok;
  std::string text;
  spinwire::softverbs::FaultPlan losses;
  losses.drop = 1;
  server_->set(losses);
  CallOptions options;
  options.timeout = 60s;
  EXPECT_EQ(s.call(
                kCount, Bytes(),
                [&](Reply& r) {
                  ended = r.status();
                  text = std::string(r.text());
                },
                options),
            Status::ok);
  ASSERT_TRUE(until([&] { return runs_ == 1; }));
  ASSERT_TRUE(calls().reply_reclaimer.reclaim());
  EXPECT_FALSE(calls().reply_reclaimer.reclaim()) << "nothing else is kept";
  server_->set({});
  ASSERT_TRUE(until([&] { return ended != Status::ok; }));
  EXPECT_EQ(ended, Status::limit);
  EXPECT_NE(text.find("dropped the reply"), std::string::npos) << text;
  EXPECT_EQ(runs_, 1);
  server_->expect_clean();
}

// With many sessions, a search of all slots would take milliseconds.
TEST_F(RpcDroppedReplies, OnlySlotsOfSessionsThatWereUsedAreSearched) {
  const rpc::ServerSession& quiet = accept();
  const rpc::ServerSession& busy = accept();
  rest(1s);
  EXPECT_FALSE(calls().reply_reclaimer.reclaim()) << "nothing is kept";
  rest(1s);
  rpc::ServerSlot& unsearched = quiet.slots[0];
  unsearched.payload.block =
      server_->core->context.arena->allocate(memory::PoolId::send, 2 * kSlotPayloadBytes);
  ASSERT_NE(unsearched.payload.block, nullptr);
  EXPECT_FALSE(calls().reply_reclaimer.reclaim()) << "it has had no request since";
  if (auto* const block = std::exchange(unsearched.payload.block, nullptr))
    spinwire::detail::release(block);
  rest(1s);
  for (const rpc::ServerSession* const s : {&busy, &quiet}) {
    request(*s, 1);
    EXPECT_NE(s->slots[1].payload.block, nullptr);
    while (calls().reply_reclaimer.reclaim()) {
    }
    EXPECT_EQ(s->slots[1].payload.block, nullptr);
    rest(1s);
  }
  server_->expect_clean();
}

TEST_F(RpcDroppedReplies, AReplyThatComesLateIsFound) {
  std::optional<PendingCall> pending;
  ASSERT_TRUE(server_->core->serve(kLater, [&](Request& r) { pending = r.defer(); }));
  const rpc::ServerSession& s = accept();
  send({s.name, kWindow, kLater, RpcKind::request, 0, 0, 0});
  ASSERT_TRUE(until([&] { return pending.has_value(); }));
  rest(1s);
  EXPECT_FALSE(calls().reply_reclaimer.reclaim()) << "the call is in progress";
  rest(1s);
  EXPECT_EQ(pending->reply(filled(kLong, 1)), Status::ok);
  EXPECT_NE(s.slots[0].payload.block, nullptr);
  while (calls().reply_reclaimer.reclaim()) {
  }
  EXPECT_EQ(s.slots[0].payload.block, nullptr);
  server_->expect_clean();
}

TEST_F(RpcDroppedReplies, AClientThatOnlyPingsKeepsNoneForLong) {
  const std::uint64_t before = used();
  const rpc::ServerSession& s = accept();
  request(s, 0);
  EXPECT_EQ(used(), before + 1);
  const auto ping_for = [&](int seconds) {
    for (int i = 0; i < seconds; ++i) {
      send(spinwire::wire::session_header(s.name, spinwire::wire::kNoCallsOver, RpcKind::ping,
                                          spinwire::wire::session_proof(s.token)));
      rest(1s);
    }
  };
  ping_for(9);
  EXPECT_EQ(used(), before + 1);
  ping_for(3);
  EXPECT_EQ(used(), before);
  EXPECT_EQ(rpc::stats(calls()).served_sessions, 1u);
  const std::uint64_t again = rpc::stats(calls()).retransmitted_replies;
  send({s.name, kWindow, kCount, RpcKind::request, 0, 0, 0});
  ASSERT_TRUE(until([&] { return rpc::stats(calls()).retransmitted_replies == again + 1; }));
  EXPECT_EQ(runs_, 1);
}

TEST_F(RpcDroppedReplies, ASessionIsUsedWithItsFirstRequest) {
  for (const std::uint32_t window : {1u, 8u}) {
    const rpc::ServerSession& s = accept(window);
    EXPECT_TRUE(s.in_never_used_list);
    request(s, 0);
    EXPECT_FALSE(s.in_never_used_list) << window;
    request(s, 1);
  }
  server_->expect_clean();
}

// Over a connection, a reply waits for the credit of a client that does not poll.
TEST(RpcDroppedLongReplies, AReplyThatWaitsForCreditBecomesAnError) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a client without credit";
  constexpr std::size_t kCalls = 32;
  Config config = over(RpcTransport::connection);
  config.connections.credits = 8;
  Calls t(config, nullptr, kCalls);
  EngineCore& core = *spinwire::detail::core_of(t.server.engine);
  for (std::size_t i = 0; i < kCalls; ++i)
    ASSERT_EQ(t.begin(kLater, filled(8, static_cast<std::uint32_t>(i))), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == kCalls; }));
  const auto used = [&] { return core.context.arena->stats(memory::PoolId::send).blocks_used; };
  const std::uint64_t before = used();
  for (const auto& each : t.later) EXPECT_EQ(each.call.reply(filled(2000, 2)), Status::ok);
  for (int i = 0; i < 100; ++i) (void)t.server.poll();
  const std::uint64_t waiting = used() - before;
  ASSERT_GT(waiting, kCalls / 4);
  EXPECT_TRUE(core.calls->reply_reclaimer.reclaim());
  for (int i = 0; i < 100; ++i) (void)t.server.poll();
  EXPECT_LE(used(), before + 8) << "what the connection has taken";
  EXPECT_TRUE(core.audit());
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  std::size_t lost = 0;
  for (const Ended& each : t.ended) {
    EXPECT_TRUE(each.status == Status::ok || each.status == Status::limit);
    lost += each.status == Status::limit ? 1 : 0;
  }
  EXPECT_GE(lost, kCalls / 4);
  EXPECT_EQ(core.calls->stats.dropped_replies, lost);
  t.finish();
}

}  // namespace
}  // namespace rpc_kept_replies_test
