// Direct datagrams that are longer than the MTU, up to 32 KiB of payload, and datagrams that wait
// for room in a lane.
#include <algorithm>
#include <bit>
#include <vector>

#include "base/internals.h"
#include "rpc/direct_calls.h"
#include "rpc/unsent.h"
#include "softverbs/lane/line.h"

namespace rpc_long_datagrams_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::DirectPath;
namespace softverbs = spinwire::softverbs;

constexpr std::size_t kMost = std::size_t{32} << 10;
/// More calls of kMost bytes than a lane's data holds.
constexpr std::uint32_t kMany = 2 * softverbs::kLaneData / kMost;

class RpcLongDatagrams : public RpcDirect {
 protected:
  static Config config() {
    Config c = rpc_config();
    c.memory.rendezvous_bytes = 4u << 20;  // where long datagrams are kept
    c.memory.send_bytes = 16u << 20;
    return c;
  }
  /// Nothing is lost here, so nothing must be sent again by the retransmission timer. A round trip
  /// that a busy machine holds up must not shrink the window either.
  static Config long_rto() {
    Config c = config();
    c.rpc.min_rto = 10s;
    c.rpc.target_rtt = 0s;
    return c;
  }
  static const spinwire::rpc::Rpc& core_of_client(const Calls& t) {
    return *spinwire::detail::core_of(t.client.engine)->calls;
  }
  /// Makes a call, so that the server has granted the session's whole window.
  static void open_window(Calls& t) { ASSERT_EQ(t.call(kEcho, {}).status, Status::ok); }
  /// Starts an echo of `size` bytes; the reply counts if its bytes are right.
  static void start(Calls& t, std::size_t size, std::uint32_t seed, std::uint32_t& right,
                    spinwire::Method method = kEcho) {
    const Buffer request = t.client.filled(size, seed);
    const auto done = [&right, size, seed](Reply& r) {
      EXPECT_EQ(r.status(), Status::ok) << to_string(r.status());
      right += r.bytes().size() == size && Node::holds(r.bytes(), seed) ? 1 : 0;
    };
    ASSERT_EQ(t.session.call(method, request.slice(), done), Status::ok);
  }
};

TEST_F(RpcLongDatagrams, CallsOfUpTo16KibUseNoConnection) {
  Calls t(long_rto());
  EXPECT_EQ(t.session.max_inline_call(), kMost);
  std::uint32_t right = 0, calls = 0;
  for (const std::size_t size : {4031, 4032, 4033, 4095, 4096, 8192, 16384, 16385, 32767, 32768}) {
    ASSERT_NO_FATAL_FAILURE(start(t, size, ++calls, right));
    ASSERT_TRUE(t.until([&] { return right == calls; })) << size;
  }
  EXPECT_EQ(t.client.engine.rpc_stats().long_calls, 0u);
  EXPECT_EQ(t.client.engine.stats().connections, 0u);
  ASSERT_NO_FATAL_FAILURE(start(t, kMost, ++calls, right));
  ASSERT_TRUE(t.until([&] { return right == calls; }));
  EXPECT_EQ(t.client.engine.rpc_stats().retransmitted_requests, 0u);
  t.finish();
}

TEST_F(RpcLongDatagrams, WithoutARendezvousPoolAPageGoesAsAWhole) {
  Config c = long_rto();
  c.memory.rendezvous_bytes = 0;
  Calls t(c);
  EXPECT_EQ(t.session.max_inline_call(), 4096u);
  std::uint32_t right = 0;
  ASSERT_NO_FATAL_FAILURE(start(t, 4096, 1, right));
  ASSERT_TRUE(t.until([&] { return right == 1; }));
  // The first datagram from a peer, too; and bytes that are kept.
  Session second = t.open();
  ASSERT_TRUE(t.until([&] { return second.ready(); }));
  BufferSlice kept;
  Buffer request = t.client.filled(4096, 2);
  ASSERT_EQ(second.call(kEcho, request.slice(), [&kept](Reply& r) { kept = r.keep(); }),
            Status::ok);
  ASSERT_TRUE(t.until([&] { return static_cast<bool>(kept); }));
  EXPECT_TRUE(kept.size() == 4096 && Node::holds(kept.bytes(), 2));
  EXPECT_EQ(t.client.engine.rpc_stats().long_calls, 0u);
  kept = {};
  request = Buffer();
  EXPECT_EQ(second.close(), Status::ok);
  t.finish();
}

TEST_F(RpcLongDatagrams, WithoutDirectDatagramsAtOneEndTheMtuIsTheLimit) {
  Config off = long_rto();
  off.rpc.direct_datagrams = DirectPath::off;
  Node with(long_rto()), without(off);
  for (Node* node : {&with, &without}) {
    node->listen();
    ASSERT_TRUE(node->engine.serve(kEcho, [](Request& r) {
      EXPECT_LE(r.max_reply(), 4096u);
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    }));
  }
  Session there = with.engine.open_session(without.listener.address(), {}).value();
  Session back = without.engine.open_session(with.listener.address(), {}).value();
  ASSERT_TRUE(until({&with, &without}, [&] { return there.ready() && back.ready(); }));
  EXPECT_LE(there.max_inline_call(), 4096u);
  EXPECT_LE(back.max_inline_call(), 4096u);
  int ended = 0;
  for (Session* session : {&there, &back}) {
    Node& from = session == &there ? with : without;
    const Buffer request = from.filled(there.max_inline_call(), 1);
    const auto done = [&ended](Reply& r) { ended += Node::holds(r.bytes(), 1) ? 1 : 0; };
    ASSERT_EQ(session->call(kEcho, request.slice(), done), Status::ok);
  }
  EXPECT_TRUE(until({&with, &without}, [&] { return ended == 2; }));
}

/// Makes an engine's datagram port take direct datagrams of up to `longest` bytes from now on.
void take_direct(Node& node, std::uint32_t longest) {
  spinwire::detail::core_of(node.engine)->calls->port->batches().longest = longest;
}

TEST_F(RpcLongDatagrams, AnEarlierReleaseGetsTheMtu) {
  Config c = long_rto();
  c.connections.max_message_bytes = 1u << 20;
  c.queues.completion_depth = 16384;
  for (const bool client_is_earlier : {false, true}) {
    Calls t(c);
    take_direct(client_is_earlier ? t.client : t.server, 0);  // offers none in a handshake
    ASSERT_EQ(t.session.close(), Status::ok);
    t.session = t.open();
    ASSERT_TRUE(t.until([&] { return t.session.ready(); }));
    const std::size_t most = t.session.max_inline_call();
    EXPECT_LT(most, std::size_t{spinwire::wire::kPageDatagramBytes});
    std::uint32_t right = 0, calls = 0;
    for (const std::size_t size : {std::size_t{32}, most}) {
      ASSERT_NO_FATAL_FAILURE(start(t, size, ++calls, right));
      ASSERT_TRUE(t.until([&] { return right == calls; })) << size;
    }
    EXPECT_EQ(t.client.engine.rpc_stats().long_calls, 0u);
    ASSERT_TRUE(t.server.engine.serve(9, [](Request& r) {
      EXPECT_TRUE(r.bytes().size() == kMost && Node::holds(r.bytes(), 7));
      EXPECT_EQ(r.reply(r.bytes().first(r.max_reply())), Status::ok);
    }));
    {
      const Buffer request = t.client.filled(kMost, 7);
      const auto done = [&](Reply& r) { right += r.bytes().size() == most ? 1 : 0; };
      ASSERT_EQ(t.session.call(9, request.slice(), done), Status::ok);
      ASSERT_TRUE(t.until([&] { return right == calls + 1; }));
    }
    EXPECT_EQ(t.client.engine.rpc_stats().long_calls, 1u);
    EXPECT_EQ(t.client.engine.rpc_stats().retransmitted_requests, 0u);
    t.finish();
  }
}

TEST_F(RpcLongDatagrams, APeerThatDoesNotTakeWhatItOfferedHurtsThoseCallsOnly) {
  Calls t(config());
  take_direct(t.server, 0);
  CallOptions options;
  options.timeout = 20ms;
  Buffer request = t.client.filled(kMost, 1);
  std::vector<Status> ends;
  const auto done = [&ends](Reply& r) { ends.push_back(r.status()); };
  ASSERT_EQ(t.session.call(kEcho, request.slice(), done, options), Status::ok);
  request = Buffer();
  std::uint32_t right = 0;
  for (std::uint32_t i = 0; i < 10; ++i) ASSERT_NO_FATAL_FAILURE(start(t, 100, i, right));
  ASSERT_TRUE(t.until([&] { return right == 10 && ends.size() == 1; }));
  EXPECT_EQ(ends[0], Status::timed_out);
  EXPECT_TRUE(t.session.ready());
  take_direct(t.server, spinwire::wire::kBlockDatagramBytes);
  ASSERT_NO_FATAL_FAILURE(start(t, kMost, 2, right));
  ASSERT_TRUE(t.until([&] { return right == 11; }));
  t.finish();
}

TEST_F(RpcLongDatagrams, MoreThanALaneHoldsWaitForRoom) {
  Calls t(long_rto(), nullptr, 64);
  ASSERT_NO_FATAL_FAILURE(open_window(t));
  std::uint32_t right = 0;
  for (int round = 0; round < 3; ++round) {
    right = 0;
    for (std::uint32_t i = 0; i < kMany; ++i) ASSERT_NO_FATAL_FAILURE(start(t, kMost, i, right));
    EXPECT_TRUE(spinwire::rpc::has_unsent(*spinwire::detail::core_of(t.client.engine)->calls));
    ASSERT_TRUE(t.until([&] { return right == kMany; })) << right;
  }
  EXPECT_EQ(t.client.engine.rpc_stats().retransmitted_requests, 0u);
  EXPECT_EQ(t.server.engine.rpc_stats().retransmitted_replies, 0u);
  t.finish();
}

TEST_F(RpcLongDatagrams, RepliesThatFindNoRoomWaitToo) {
  Calls t(long_rto(), nullptr, 64);
  ASSERT_NO_FATAL_FAILURE(open_window(t));
  for (std::uint32_t i = 0; i < kMany; ++i) ASSERT_EQ(t.begin(kLater, {}), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == kMany; }));
  // The client does not poll, so the lane to it fills up.
  Buffer reply = t.server.filled(kMost, 3);
  for (auto& each : t.later) EXPECT_EQ(each.call.reply(reply.slice()), Status::ok);
  EXPECT_TRUE(spinwire::rpc::has_unsent(*spinwire::detail::core_of(t.server.engine)->calls));
  for (int i = 0; i < 1000; ++i) (void)t.server.poll();
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  for (const Ended& each : t.ended) {
    EXPECT_EQ(each.status, Status::ok);
    const bool first = &each == &t.ended.front();
    EXPECT_TRUE(first || (each.bytes.size() == kMost && Node::holds(each.bytes, 3)));
  }
  EXPECT_EQ(t.client.engine.rpc_stats().retransmitted_requests, 0u);
  reply = Buffer();
  t.finish();
}

TEST_F(RpcLongDatagrams, OneFullLaneHoldsUpNoOtherPeer) {
  Calls slow(long_rto(), nullptr, 64);
  ASSERT_NO_FATAL_FAILURE(open_window(slow));
  Node other(long_rto());
  other.listen();
  ASSERT_TRUE(other.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  SessionOptions options;
  options.window = 64;
  Session there = slow.client.engine.open_session(other.listener.address(), options).value();
  ASSERT_TRUE(until({&slow.client, &other}, [&] { return there.ready(); }));
  std::uint32_t right = 0, ended = 0;
  for (std::uint32_t i = 0; i < kMany; ++i) ASSERT_NO_FATAL_FAILURE(start(slow, kMost, i, right));
  // The slow server does not poll. Some calls to the other one wait for room, too.
  const Buffer request = slow.client.filled(kMost, 9);
  const auto done = [&ended](Reply& r) { ended += Node::holds(r.bytes(), 9) ? 1 : 0; };
  for (const std::uint32_t calls : {1u, kMany, kMany, kMany}) {
    ended = 0;
    for (std::uint32_t i = 0; i < calls; ++i)
      ASSERT_EQ(there.call(kEcho, request.slice(), done), Status::ok);
    const auto& waiting = core_of_client(slow).waiting_peers;
    EXPECT_EQ(std::distance(waiting.begin(), waiting.end()), calls == 1 ? 1 : 2);
    ASSERT_TRUE(until({&slow.client, &other}, [&] { return ended == calls; }));
  }
  EXPECT_EQ(right, 0u);
  EXPECT_TRUE(slow.until([&] { return right == kMany; }));
}

TEST_F(RpcLongDatagrams, SessionsEndWhileTheirDatagramsWait) {
  for (const bool client_closes : {true, false}) {
    Calls t(long_rto(), nullptr, 64);
    ASSERT_NO_FATAL_FAILURE(open_window(t));
    for (std::uint32_t i = 0; i < kMany; ++i)
      ASSERT_EQ(t.begin(kEcho, filled(kMost, i)), Status::ok);
    ASSERT_TRUE(spinwire::rpc::has_unsent(*spinwire::detail::core_of(t.client.engine)->calls));
    if (client_closes) {
      EXPECT_EQ(t.session.close(), Status::ok);
    } else {
      t.server.listener = {};
      t.server.engine = Engine();
    }
    const auto ended = [&] { return t.all_ended(); };
    ASSERT_TRUE(client_closes ? t.until(ended) : until({&t.client}, ended));
    EXPECT_FALSE(spinwire::rpc::has_unsent(*spinwire::detail::core_of(t.client.engine)->calls));
    const auto audit = t.client.engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
  }
}

TEST_F(RpcLongDatagrams, CallsAreCancelledWhileTheyWait) {
  Calls t(long_rto(), nullptr, 64);
  ASSERT_NO_FATAL_FAILURE(open_window(t));
  std::vector<CallId> ids;
  std::vector<Status> ends;
  const Buffer request = t.client.filled(kMost, 1);
  for (std::uint32_t i = 0; i < kMany; ++i) {
    const auto done = [&, i](Reply& r) {
      ends.push_back(r.status());
      // The last one, which waits, too, is cancelled by the callback of the one before.
      if (i + 2 != kMany) return;
      EXPECT_EQ(t.session.cancel(ids.back()), Status::ok);
    };
    ids.emplace_back();
    ASSERT_EQ(t.session.call(kEcho, request.slice(), done, {}, &ids.back()), Status::ok);
  }
  ASSERT_TRUE(spinwire::rpc::has_unsent(core_of_client(t)));
  EXPECT_EQ(t.session.cancel(ids[kMany - 2]), Status::ok);
  for (std::size_t ended = 0; ended != 2;) {
    (void)t.client.poll();
    const auto audit = t.client.engine.audit();
    ASSERT_TRUE(audit) << audit.error().message();
    ended = ends.size();
  }
  EXPECT_EQ(ends, (std::vector<Status>{Status::cancelled, Status::cancelled}));
  ASSERT_TRUE(t.until([&] { return ends.size() == kMany; }));
  EXPECT_EQ(std::ranges::count(ends, Status::ok), kMany - 2);
  EXPECT_EQ(t.server.engine.rpc_stats().served, kMany - 2 + 1u);
  EXPECT_EQ(t.session.close(), Status::ok);
}

TEST_F(RpcLongDatagrams, AReplyThatIsBuiltInPlaceTakesWhatItNeeds) {
  Calls t(long_rto());
  const auto& servers = spinwire::detail::core_of(t.server.engine)->calls->servers;
  std::vector<std::size_t> capacities;
  std::size_t size = 0;
  ASSERT_TRUE(t.server.engine.serve(9, [&](Request& r) {
    const std::span<std::byte> reply = r.reserve_reply(size);
    ASSERT_EQ(reply.size(), size);
    std::ranges::fill(reply, std::byte{7});
    EXPECT_EQ(r.commit_reply(size), Status::ok);
    capacities.push_back(servers.at(0).reply_buffers[0].block->capacity);
  }));
  for (const std::size_t each : {std::size_t{100}, kMost, std::size_t{100}}) {
    size = each;
    EXPECT_EQ(t.call(9, {}).bytes, Bytes(each, std::byte{7}));
  }
  ASSERT_EQ(capacities.size(), 3u);
  EXPECT_LT(capacities[0], 1000u);
  EXPECT_GE(capacities[1], kMost);
  t.finish();
}

TEST_F(RpcLongDatagrams, AreKeptLikeShortOnes) {
  Calls t(long_rto());
  std::vector<BufferSlice> requests, replies;
  ASSERT_TRUE(t.server.engine.serve(9, [&requests](Request& r) {
    requests.push_back(r.keep());
    EXPECT_EQ(r.reply(requests.back()), Status::ok);
  }));
  for (std::uint32_t i = 0; i < 20; ++i) {
    const std::size_t size = i % 2 == 0 ? kMost - i : 100 + i;
    const Buffer request = t.client.filled(size, i);
    ASSERT_EQ(
        t.session.call(9, request.slice(), [&replies](Reply& r) { replies.push_back(r.keep()); }),
        Status::ok);
    ASSERT_TRUE(t.until([&] { return replies.size() == i + 1; }));
  }
  for (std::uint32_t i = 0; i < 20; ++i) {
    EXPECT_TRUE(Node::holds(requests[i].bytes(), i)) << i;
    EXPECT_TRUE(Node::holds(replies[i].bytes(), i)) << i;
  }
  requests.clear();
  replies.clear();
  t.finish();
}

TEST_F(RpcLongDatagrams, OneThatFindsNoMemoryToKeepItComesAgain) {
  Config c = config();
  c.rpc.min_rto = 1ms * slowness();
  Calls t(c);
  std::vector<Buffer> all;
  while (Buffer b = t.server.engine.allocate(512u << 10, Pool::rendezvous))
    all.push_back(std::move(b));
  while (Buffer b = t.server.engine.allocate(16u << 10, Pool::rendezvous))
    all.push_back(std::move(b));
  ASSERT_FALSE(all.empty());
  std::uint32_t right = 0;
  ASSERT_NO_FATAL_FAILURE(start(t, kMost, 1, right));
  ASSERT_TRUE(t.until([&] { return t.client.engine.rpc_stats().retransmitted_requests >= 2; }));
  EXPECT_EQ(right, 0u);
  EXPECT_NE(t.server.engine.rpc_stats().unkept_datagrams, 0u);
  EXPECT_EQ(t.server.engine.rpc_stats().bad_datagrams, 0u);
  all.clear();
  EXPECT_TRUE(t.until([&] { return right == 1; }));
  EXPECT_EQ(t.session.close(), Status::ok);
}

TEST_F(RpcLongDatagrams, AreKeptByAHandlerThatHasEmptiedTheSendPool) {
  Config c = long_rto();
  c.memory.send_bytes = 2u << 20;
  Calls t(c);
  std::vector<Buffer> all;
  BufferSlice kept;
  ASSERT_TRUE(t.server.engine.serve(9, [&](Request& r) {
    EXPECT_EQ(r.reply(std::span<const std::byte>()), Status::ok);
    for (const std::size_t size : {512u << 10, 16u << 10, 64u}) {
      while (Buffer b = t.server.engine.allocate(size)) all.push_back(std::move(b));
    }
    kept = r.keep();
    // Somebody else's memory must not be the same.
    while (Buffer b = t.server.engine.allocate(kMost, Pool::rendezvous)) {
      std::memset(b.data(), 0xee, kMost);
      all.push_back(std::move(b));
    }
  }));
  for (std::uint32_t i = 0; i < 3; ++i) {
    const Buffer request = t.client.filled(kMost, i);
    bool ended = false;
    ASSERT_EQ(t.session.call(9, request.slice(), [&ended](Reply&) { ended = true; }), Status::ok);
    ASSERT_TRUE(t.until([&] { return ended; }));
    EXPECT_TRUE(kept.size() == kMost && Node::holds(kept.bytes(), i));
    kept = {};
    all.clear();
  }
  t.finish();
}

/// Calls that begin again when they end, of sizes in turn, until each has ended `least` times.
class ClosedLoop {
 public:
  ClosedLoop(Calls& calls, std::vector<std::size_t> sizes, std::uint32_t window)
      : calls_(calls), sizes_(std::move(sizes)), ended_(window) {
    request_ = calls.client.filled(kMost, 5);
    for (std::uint32_t i = 0; i < window; ++i) begin(i);
  }
  ~ClosedLoop() { stopped_ = true; }
  [[nodiscard]] bool all_ended(std::uint32_t least) const {
    return std::ranges::all_of(ended_, [least](std::uint32_t n) { return n >= least; });
  }
  void stop() {
    stopped_ = true;
    EXPECT_TRUE(calls_.until([this] { return under_way_ == 0; }));
  }

 private:
  void begin(std::uint32_t i) {
    const std::size_t size = sizes_[i % sizes_.size()];
    const auto done = [this, i, size](Reply& r) {
      --under_way_;
      EXPECT_EQ(r.status(), Status::ok) << to_string(r.status());
      EXPECT_EQ(r.bytes().size(), size);
      ++ended_[i];
      if (!stopped_) begin(i);
    };
    const Status status = calls_.session.call(kEcho, request_.slice(0, size), done);
    EXPECT_EQ(status, Status::ok) << to_string(status);
    under_way_ += status == Status::ok ? 1 : 0;
  }
  Calls& calls_;
  const std::vector<std::size_t> sizes_;
  Buffer request_;
  std::vector<std::uint32_t> ended_;
  std::uint32_t under_way_ = 0;
  bool stopped_ = false;
};

TEST_F(RpcLongDatagrams, NoneWaitsForEverWhileOthersComeAndGo) {
  const std::vector<std::vector<std::size_t>> mixes = {
      {kMost}, {8192}, {4096}, {4000, 4000, kMost}, {100, kMost, 4000, 8192}};
  for (const auto& sizes : mixes) {
    Calls t(long_rto(), nullptr, 64);
    ASSERT_NO_FATAL_FAILURE(open_window(t));
    ClosedLoop loop(t, sizes, 64);
    EXPECT_TRUE(t.until([&] { return loop.all_ended(20); })) << sizes[0];
    loop.stop();
    EXPECT_EQ(t.client.engine.rpc_stats().retransmitted_requests, 0u);
  }
}

TEST_F(RpcLongDatagrams, WhatWaitsForRoomIsNotSentByTheRetransmissionTimer) {
  std::uint64_t now = 1'000'000'000;  // ns
  Config c = config();
  c.rpc.min_rto = 1ms;
  Calls t(c, &now, 64);
  t.each_turn = [&now] { now += 1000; };
  ASSERT_NO_FATAL_FAILURE(open_window(t));
  for (std::uint32_t i = 0; i < kMany; ++i) ASSERT_EQ(t.begin(kEcho, filled(kMost, i)), Status::ok);
  const int waiting = std::popcount(core_of_client(t).clients.at(0).unsent.slots);
  ASSERT_GT(waiting, 0);
  // The others are answered just when the timer is due.
  for (int i = 0; i < 100; ++i) (void)t.server.poll();
  now += 20'000'000;
  EXPECT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.client.engine.rpc_stats().retransmitted_requests, 0u);
  EXPECT_EQ(t.server.engine.rpc_stats().duplicates, 0u);
  EXPECT_EQ(t.server.engine.rpc_stats().retransmitted_replies, 0u);
  t.finish();
}

}  // namespace
}  // namespace rpc_long_datagrams_test
