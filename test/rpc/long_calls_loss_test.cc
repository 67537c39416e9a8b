// Long calls that are cancelled, time out, or are lost with their connection, session, engine or
// peer. Each ends once, and only when its memory is free.
#include "agent/agent.h"
#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/long_calls.h"

namespace rpc_long_calls_loss_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::ReplyCallback;

constexpr std::size_t kLong = 1u << 20;

/// Gives up early.
Config hasty() {
  Config c = long_call_config();
  c.connections.close_timeout = 30ms * slowness();
  return c;
}

void settle(LongCalls& t, int rounds = 200) {
  for (int i = 0; i < rounds; ++i) (void)(t.client.poll() + t.server.poll());
}

TEST(RpcLongCallsLoss, OneThatWaitsIsCancelledAtOnce) {
  LongCalls t;
  ASSERT_EQ(t.begin(kFold, filled(40000, 1)), Status::ok);  // for a connection
  const CallId id = t.session.last_call();
  EXPECT_EQ(t.session.cancel(id), Status::ok);
  EXPECT_EQ(t.ended[0].times, 0);
  (void)t.client.poll();
  EXPECT_EQ(t.ended[0].status, Status::cancelled);
  EXPECT_EQ(t.session.cancel(id), Status::invalid_argument);
  EXPECT_EQ(t.call(kFold, filled(40000, 2)).bytes, fold_of(filled(40000, 2)));
  EXPECT_EQ(t.server.engine.rpc_stats().served, 1u);
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, OneWhoseMemoryNobodyUsesIsCancelledAtOnce) {
  LongCalls t;
  ASSERT_EQ(t.begin(kLater, filled(kLong, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  settle(t);
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  EXPECT_EQ(t.ended[0].times, 0);
  (void)t.client.poll();
  EXPECT_EQ(t.ended[0].status, Status::cancelled);
  // Its reply is dropped and does not end the next call in its slot.
  for (std::uint32_t i = 0; i < 8; ++i) ASSERT_EQ(t.begin(kLater, filled(40000, i)), Status::ok);
  EXPECT_EQ(t.later[0].call.reply(filled(9, 9)), Status::ok);  // not yet told of the cancellation
  ASSERT_TRUE(t.until([&] { return t.later.size() == 9; }));
  EXPECT_EQ(t.client.engine.rpc_stats().late_replies, 1u);
  for (std::size_t i = 1; i < 9; ++i) {
    EXPECT_EQ(t.ended[i].times, 0);
    EXPECT_EQ(t.later[i].call.reply(filled(3, static_cast<std::uint32_t>(i))), Status::ok);
  }
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  for (std::uint32_t i = 1; i < 9; ++i) EXPECT_EQ(t.ended[i].bytes, filled(3, i));
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, ACancelledCallEndsWhenTheServerHasStoppedPulling) {
  LongCalls t;
  EXPECT_EQ(t.call(kFold, filled(40000, 1)).status, Status::ok);
  ASSERT_EQ(t.begin(kLater, filled(kLong, 1)), Status::ok);
  for (int i = 0; i < 3; ++i) (void)(t.client.poll() + t.server.poll());
  if (!t.later.empty()) {  // control steps come by time, so a slow machine takes more of them
    EXPECT_EQ(t.later[0].call.reply(filled(9, 9)), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
    t.finish_long_calls();
    GTEST_SKIP() << "the transfer was over before the call could be cancelled";
  }
  const CallId id = t.session.last_call();
  EXPECT_EQ(t.session.cancel(id), Status::ok);
  EXPECT_EQ(t.session.cancel(id), Status::invalid_argument);
  EXPECT_EQ(t.ended[1].times, 0);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[1].status, Status::cancelled);
  settle(t);
  for (const auto& each : t.later) {
    EXPECT_EQ(each.call.max_reply(), 0u);
    EXPECT_EQ(each.call.reply(filled(9, 9)), Status::not_connected);
  }
  EXPECT_EQ(t.call(kFold, filled(kLong, 2)).bytes, fold_of(filled(kLong, 2)));
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, OneWithRoomForItsReplyIsCancelledWhenTheServerHasLetGo) {
  LongCalls t(with_reply_keys(long_call_config()));
  Buffer b = t.room(kLong);
  ASSERT_EQ(t.begin(kLater, filled(9, 1), t.into(b)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  EXPECT_EQ(t.ended[0].times, 0);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[0].status, Status::cancelled);
  EXPECT_EQ(t.later[0].call.reply(filled(9, 9)), Status::not_connected);
  settle(t);
  EXPECT_EQ(b.data()[0], std::byte{0xee});
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  b.reset();
  t.finish_long_calls();
}

// Nobody but the client itself writes there.
TEST(RpcLongCallsLoss, TheMemoryOfACancelledCallIsFreeAtOnceWithoutAKey) {
  LongCalls t;
  if (!spinwire::agent::reads_local_offers(spinwire::detail::core_of(t.client.engine)->context))
    GTEST_SKIP() << "the device opens the memory of replies";
  Buffer b = t.room(kLong);
  ASSERT_EQ(t.begin(kLater, filled(9, 1), t.into(b)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  ASSERT_TRUE(until({&t.client}, [&] { return t.all_ended(); })) << "without the server";
  EXPECT_EQ(t.ended[0].status, Status::cancelled);
  EXPECT_EQ(spinwire::detail::block_of(b)->refs, 1u);
  EXPECT_EQ(t.later[0].call.reply(filled(kLong, 9)), Status::ok) << "the server does not know";
  settle(t);
  EXPECT_EQ(b.data()[0], std::byte{0xee});
  EXPECT_EQ(t.call(kFold, filled(kLong, 2)).bytes, fold_of(filled(kLong, 2)));
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  b.reset();
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, AReplyThatCrossesTheCancelChangesNothing) {
  LongCalls t;
  Buffer b = t.room(kLong);
  ASSERT_EQ(t.begin(kLater, filled(9, 1), t.into(b)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  const Buffer answer = t.server.filled(kLong, 3);
  EXPECT_EQ(t.later[0].call.reply(answer.slice()), Status::ok);  // in flight
  EXPECT_EQ(t.session.cancel(t.session.last_call()), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[0].status, Status::cancelled);
  std::fill(b.data(), b.data() + kLong, std::byte{0x11});
  settle(t);
  EXPECT_TRUE(
      std::all_of(b.data(), b.data() + kLong, [](std::byte x) { return x == std::byte{0x11}; }));
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  b.reset();
  const_cast<Buffer&>(answer).reset();
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, ADeadlineIsACancel) {
  std::uint64_t now = 1'000'000'000;
  LongCalls t(long_call_config(), &now);
  Buffer b = t.room(100);
  CallOptions late = t.into(b);
  late.timeout = 5ms;
  for (const std::size_t arrived : {1u, 2u}) {
    ASSERT_EQ(t.begin(kLater, filled(40000, 1), late), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.later.size() == arrived; }));
    EXPECT_EQ(t.ended.back().times, 0);
    now += 6'000'000;
    ASSERT_TRUE(t.until([&] { return t.ended.back().times != 0; }));
    EXPECT_EQ(t.ended.back().status, Status::timed_out);
    late.reply_into = {};
  }
  settle(t);
  EXPECT_EQ(t.later[0].call.reply(filled(9, 9)), Status::not_connected);
  EXPECT_EQ(t.client.engine.stats().connected, 1u);
  late.timeout = Nanoseconds(0);
  b.reset();
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, WithoutAnAnswerTheConnectionIsReplaced) {
  LongCalls t(with_reply_keys(hasty()));
  Buffer b = t.room(100);
  ASSERT_EQ(t.begin(kLater, filled(9, 1), t.into(b)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  ASSERT_EQ(t.begin(kLater, filled(40000, 2)), Status::ok);
  const auto begun = std::chrono::steady_clock::now();
  ASSERT_EQ(t.session.cancel({1}), Status::ok);
  // The server does not poll, so the client cannot know whether it writes.
  ASSERT_TRUE(until({&t.client}, [&] { return t.all_ended(); }));
  EXPECT_GE(std::chrono::steady_clock::now() - begun, 25ms);
  EXPECT_EQ(t.ended[0].status, Status::cancelled);
  EXPECT_EQ(t.ended[1].status, Status::peer_lost);
  (void)t.later[0].call.reply(filled(9, 9));
  EXPECT_EQ(t.call(kFold, filled(kLong, 2)).bytes, fold_of(filled(kLong, 2)));
  EXPECT_EQ(t.client.engine.stats().connected, 2u);
  EXPECT_EQ(b.data()[0], std::byte{0xee});
  b.reset();
  t.server.stale_allowed = t.client.stale_allowed = true;
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, ASessionThatClosesEndsItsCallsAndItsConnection) {
  LongCalls t;
  Buffer b = t.room(kLong);
  for (int i = 0; i < 12; ++i)
    ASSERT_EQ(t.begin(kLater, filled(i % 2 == 0 ? 9 : 70000, 1), t.into(b)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() >= 3; }));
  EXPECT_EQ(t.session.close(), Status::ok);
  EXPECT_EQ(t.begin(kFold, filled(40000, 1)), Status::not_connected);
  ASSERT_TRUE(t.until([&] { return t.closed.size() == 1; }));
  EXPECT_EQ(t.closed[0].status, Status::ok) << t.closed[0].message();
  for (const Ended& e : t.ended) EXPECT_EQ(e.status, Status::flushed);
  b.reset();
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, EnginesEndInTheMidstOfCalls) {
  for (const bool server : {true, false}) {
    LongCalls t;
    Buffer b = t.room(kLong);
    for (int i = 0; i < 10; ++i)
      ASSERT_EQ(t.begin(kLater, filled(i % 2 == 0 ? 9 : 70000, 1), t.into(b)), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.later.size() >= 3; }));
    (server ? t.server : t.client).engine = Engine();
    Node& left = server ? t.client : t.server;
    ASSERT_TRUE(until({&left}, [&] {
      return left.engine.rpc_stats().sessions + left.engine.rpc_stats().served_sessions == 0;
    }));
    EXPECT_TRUE(t.all_ended());
    for (const Ended& e : t.ended) {
      EXPECT_EQ(e.times, 1);
      EXPECT_TRUE(e.status == Status::flushed || e.status == Status::peer_lost)
          << to_string(e.status);
    }
    EXPECT_EQ(t.closed.size(), 1u);
    b.reset();
    t.later.clear();
    ASSERT_TRUE(until({&left}, [&] { return left.engine.stats().connections == 0; }));
    for (int i = 0; i < 8; ++i) (void)left.poll();
    left.expect_clean();
  }
}

/// Calls of all lengths, many of which are cancelled at some time.
class Whims {
 public:
  explicit Whims(std::uint64_t seed) : random_(seed), t_(config()) {
    EXPECT_TRUE(t_.server.engine.serve(20, [this](Request& r) { serve(r); }));
    for (Room& each : rooms_) each.memory = t_.room(200000);
  }
  void run(std::uint32_t calls) {
    ended_.resize(calls);
    runs_.resize(calls);
    ASSERT_TRUE(t_.until([&] {
      step(calls);
      return begun_ == calls && over_ == calls;
    }));
    for (std::uint32_t id = 0; id < calls; ++id) {
      EXPECT_EQ(ended_[id], 1) << id;
      EXPECT_LE(runs_[id], 1) << id;
    }
    EXPECT_GT(by_status_[static_cast<std::size_t>(Status::ok)], calls / 10);
    EXPECT_GT(by_status_[static_cast<std::size_t>(Status::cancelled)], calls / 20);
    EXPECT_EQ(by_status_[static_cast<std::size_t>(Status::peer_lost)], 0u);
    for (Room& each : rooms_) each.memory.reset();
    later_.clear();
    t_.finish_long_calls();
  }

 private:
  struct Room {
    Buffer memory;
    bool used = false;
  };
  static Config config() {
    Config c = long_call_config();
    c.memory.send_bytes = 16u << 20;
    return c;
  }
  void step(std::uint32_t calls) {
    if (begun_ != calls && random_.below(3) == 0) begin();
    if (begun_ != 0 && random_.below(4) == 0) {
      const auto last = static_cast<std::uint32_t>(last_.value);
      (void)t_.session.cancel({last - static_cast<std::uint32_t>(random_.below(8))});
    }
    if (!later_.empty() && random_.below(3) == 0) {
      const PendingCall call = later_.front();
      later_.pop_front();
      const std::size_t room = call.max_reply();
      const Bytes reply(room < 40000 ? room : random_.below(room), std::byte{0x33});
      const Status status = call.reply(reply);
      EXPECT_TRUE(status == Status::ok || (room == 0 && status == Status::not_connected));
    }
  }
  void begin() {
    const std::uint32_t id = begun_;
    const std::size_t size = random_.below(4) == 0 ? 4 : 4 + random_.below(300000);
    Buffer request = t_.client.engine.allocate(size);
    if (!request) return;
    std::memcpy(request.data(), &id, sizeof id);
    CallOptions options;
    Room* room = &rooms_[random_.below(rooms_.size())];
    if (room->used || random_.below(2) == 0) room = nullptr;
    if (room != nullptr) options.reply_into = room->memory.slice();
    if (random_.below(8) == 0) options.timeout = std::chrono::microseconds(random_.below(3000) + 1);
    const auto done = [this, id, room](Reply& r) { end(id, room, r); };
    if (t_.session.call(20, request.slice(), done, options, &last_) != Status::ok) return;
    if (room != nullptr) room->used = true;
    ++begun_;
  }
  void end(std::uint32_t id, Room* room, Reply& r) {
    ++ended_[id];
    ++over_;
    ++by_status_[static_cast<std::size_t>(r.status())];
    const auto bytes = r.bytes();
    EXPECT_TRUE(
        r.status() != Status::ok ||
        std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0x33}; }));
    if (room == nullptr) return;
    room->used = false;  // and available for another call at once
    std::memset(room->memory.data(), 0xee, 40000);
  }
  void serve(Request& r) {
    std::uint32_t id = 0;
    std::memcpy(&id, r.bytes().data(), sizeof id);
    ASSERT_LT(id, runs_.size());
    ++runs_[id];
    later_.push_back(r.defer());
  }

  spinwire::base::Random random_;
  LongCalls t_;
  std::array<Room, 6> rooms_;
  std::deque<PendingCall> later_;
  std::vector<int> ended_, runs_;
  std::array<std::uint64_t, spinwire::kStatusCount> by_status_{};
  std::uint32_t begun_ = 0, over_ = 0;
  CallId last_;
};

TEST(RpcLongCallsLoss, WhateverIsGivenUpEachCallEndsOnce) { Whims(7).run(600); }

TEST(SlowRpcLongCallsLoss, WhateverIsGivenUpEachCallEndsOnce) {
  for (std::uint64_t seed = 1; seed <= 20 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Whims(seed).run(amount(3000));
  }
}

TEST(RpcLongCallsLoss, CallsGoOutThoughTheyHaveAllOfTheirPool) {
  LongCalls t;
  Buffer reply = t.room(kLong);
  ASSERT_EQ(t.call_into(kFold, filled(40000, 1), reply).status, Status::ok);
  std::vector<Buffer> all;
  for (std::size_t size = kLong; size != 0; size /= 2) {
    for (Buffer b = t.client.engine.allocate(size); b; b = t.client.engine.allocate(size))
      all.push_back(std::move(b));
  }
  ASSERT_FALSE(t.client.engine.allocate(1));
  ASSERT_GE(all.size(), 2u);
  std::vector<Status> ended;
  const auto done = [&ended](Reply& r) { ended.push_back(r.status()); };
  CallOptions options;
  options.reply_into = reply.slice();
  ASSERT_EQ(t.session.call(kFold, all.front().slice(), done), Status::ok);  // pulled
  ASSERT_EQ(t.session.call(kFold, all.back().slice(), done, options), Status::ok);
  const Bytes few = filled(9, 1);
  ASSERT_EQ(t.session.call(kFold, std::span<const std::byte>(few), done, options), Status::ok);
  ASSERT_TRUE(t.until([&] { return ended.size() == 3; }));
  EXPECT_EQ(ended, std::vector<Status>(3, Status::ok));
  all.clear();
  options.reply_into = {};
  reply.reset();
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, AServerWithoutRoomRefusesTheCall) {
  Config small = long_call_config();
  small.memory.rendezvous_bytes = 2u << 20;
  small.connections.rendezvous_timeout = 20ms * slowness();
  LongCalls t(small);
  std::vector<BufferSlice> kept;
  ASSERT_TRUE(t.server.engine.serve(20, [&](Request& r) {
    kept.push_back(r.keep());
    (void)r.reply(std::span<const std::byte>());
  }));
  Buffer b = t.room(10);
  Status last = Status::ok;
  for (int i = 0; i < 6 && last == Status::ok; ++i)
    last = t.call_into(20, filled(kLong, 1), b).status;
  EXPECT_EQ(last, Status::no_buffer);
  EXPECT_FALSE(kept.empty());
  kept.clear();
  EXPECT_EQ(t.call_into(20, filled(kLong, 1), b).status, Status::ok);
  kept.clear();
  b.reset();
  t.finish_long_calls();
}

TEST(RpcLongCallsLoss, AConnectionThatCannotBeMadeEndsItsCalls) {
  Config few = long_call_config();
  few.connections.maximum = 1;
  LongCalls t(few);
  Node other(long_call_config());
  const Connection taken = other.begin(t.server);
  ASSERT_TRUE(until({&t.server, &other}, [&] { return taken.ready(); }));
  EXPECT_EQ(t.call(kFold, filled(40000, 1)).status, Status::not_connected);
  EXPECT_EQ(t.call(kEcho, filled(50, 1)).status, Status::ok);
  EXPECT_EQ(Connection(taken).close(), Status::ok);
  ASSERT_TRUE(until({&t.server, &other}, [&] { return t.server.engine.stats().connections == 0; }));
  EXPECT_EQ(t.call(kFold, filled(40000, 1)).status, Status::ok);
  t.finish_long_calls();
}

/// For an engine whose clock hardly moves while its peers live, however long they are off their
/// processors, and fast when they are dead. The embedded device has the engine's clock: what waits
/// for receives is sent again by it.
Config watchful() {
  Config c = long_call_config();
  c.connections.keepalive_interval = 1s;
  c.connections.peer_timeout = 60s;
  c.rpc.min_rto = 100ms;
  c.queue_pair.ack_timeout = 8;
  c.memory.send_bytes = 24u << 20;
  return c;
}
/// For the processes that die: they end nothing by themselves.
Config dying() {
  Config c = watchful();
  c.connections.peer_timeout = 1h;
  return c;
}
constexpr std::uint64_t kStep = 5'000'000;  // ns, at each turn
constexpr std::uint64_t kSlowStep = 1'000;

/// Serves until killed.
int serve_long(int in, int out) {
  Node node(dying());
  node.listen();
  std::vector<PendingCall> held;
  serve_long_calls(node.engine);
  EXPECT_TRUE(node.engine.serve(kLater, [&held](Request& r) { held.push_back(r.defer()); }));
  write_line(out, node.listener.address());
  while (command(in) != 'q') {
    for (int i = 0; i < 100; ++i) (void)node.poll();
  }
  return 0;
}

/// Calls in both directions without end. Each ends exactly once.
struct Traffic {
  Traffic(Node& node, const std::string& address) : client(node) {
    SessionOptions options;
    options.on_closed = [this](Session, const Error&) { ++closed; };
    session = client.engine.open_session(address, options).value();
    request = client.filled(kLong, 1);
    for (Buffer& each : replies) each = client.buffer(kLong);
  }
  void call() {
    CallOptions options;
    const std::uint32_t slot = begun % 4;
    options.reply_into = replies[slot].slice();
    if (busy[slot]) return;
    const auto done = [this, slot](Reply& r) {
      EXPECT_TRUE(busy[slot]);
      busy[slot] = false;
      ++ended;
      ++by_status[static_cast<std::size_t>(r.status())];
    };
    const Status status = session.call(kBack, request.slice(), done, options);
    if (status != Status::ok) return;
    busy[slot] = true;
    ++begun;
  }
  std::uint64_t with(Status status) const { return by_status[static_cast<std::size_t>(status)]; }

  Node& client;
  Session session;
  Buffer request;
  std::array<Buffer, 4> replies;
  std::array<bool, 4> busy{};
  std::array<std::uint64_t, spinwire::kStatusCount> by_status{};
  std::uint64_t begun = 0, ended = 0;
  int closed = 0;
};

TEST(RpcLongCallsLoss, AServerThatIsKilledEndsItsCallsAlone) {
  Child victim(serve_long);
  const std::string address = victim.line();
  std::uint64_t now = 1'000'000'000;
  LongCalls other(watchful(), &now);
  other.each_turn = [&now] { now += kSlowStep; };
  {
    Traffic traffic(other.client, address);
    ASSERT_TRUE(other.until([&] { return traffic.session.ready(); }));
    ASSERT_TRUE(other.until([&] {
      traffic.call();
      return traffic.with(Status::ok) >= 20;
    }));
    while (traffic.begun - traffic.ended < 3) {
      now += kSlowStep;
      traffic.call();
      (void)other.client.poll();
    }
    const std::uint64_t before = traffic.begun;
    victim.kill(SIGKILL);
    ASSERT_TRUE(other.until([&] {
      now += kStep;
      return traffic.closed == 1;
    }));
    EXPECT_EQ(traffic.ended, before);
    EXPECT_GT(traffic.with(Status::peer_lost), 0u);
    EXPECT_EQ(traffic.with(Status::peer_lost) + traffic.with(Status::ok), before);
    EXPECT_EQ(other.call(kFold, filled(kLong, 2)).bytes, fold_of(filled(kLong, 2)));
  }
  other.client.stale_allowed = true;
  other.finish_long_calls();
}

TEST(RpcLongCallsLoss, AClientThatIsKilledCostsTheServerNothing) {
  std::uint64_t now = 1'000'000'000;
  LongCalls t(watchful(), &now);
  t.each_turn = [&now] { now += kSlowStep; };
  const std::string address = t.server.listener.address();
  Child victim([&](int, int) {
    Node client(dying());
    Traffic traffic(client, address);
    for (;;) {
      traffic.call();
      (void)client.poll();
    }
    return 0;
  });
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().served > 20; }));
  EXPECT_EQ(t.server.engine.rpc_stats().served_sessions, 2u);
  victim.kill(SIGKILL);
  EXPECT_EQ(t.call(kFold, filled(kLong, 2)).bytes, fold_of(filled(kLong, 2)));
  ASSERT_TRUE(t.until([&] {
    now += kStep;
    return t.server.engine.rpc_stats().served_sessions == 1 &&
           t.server.engine.stats().connections == 1;
  }));
  EXPECT_EQ(t.server.engine.rpc_stats().bad_long_calls, 0u);
  t.server.stale_allowed = true;
  t.finish_long_calls();
}

}  // namespace
}  // namespace rpc_long_calls_loss_test
