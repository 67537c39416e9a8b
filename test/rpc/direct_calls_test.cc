// Direct datagrams, which need no work request and are read in place, and datagrams that use work
// requests instead.
#include "rpc/direct_calls.h"

#include <algorithm>
#include <array>

#include "base/internals.h"
#include "engine/rerun_tests.h"
#include "rpc/server_session.h"
#include "softverbs/direct_groups.h"

namespace rpc_direct_calls_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::DirectPath;
using spinwire::Post;

Config going(DirectPath datagrams) {
  Config c = rpc_config();
  c.rpc.direct_datagrams = datagrams;
  return c;
}

Bytes numbered(std::size_t size, std::uint32_t number) {
  Bytes bytes = filled(size, 1);
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

/// Counts the sends posted as work requests on given devices.
class Posted {
 public:
  void watch(const Node& node) {
    ibv_context& device = *spinwire::detail::core_of(node.engine)->context.device->context();
    real = device.ops.post_send;
    device.ops.post_send = [](ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
      for (const ibv_send_wr* each = wr; each != nullptr; each = each->next)
        sends += qp->qp_type == IBV_QPT_UD ? 1 : 0;
      return real(qp, wr, bad);
    };
    sends = 0;
  }
  static inline int (*real)(ibv_qp*, ibv_send_wr*, ibv_send_wr**) = nullptr;
  static inline int sends = 0;
};

TEST_F(RpcDirect, CallsTakeNoWorkRequests) {
  for (const DirectPath how : {DirectPath::automatic, DirectPath::off}) {
    const bool direct = how == DirectPath::automatic;
    Calls t(going(how));
    EXPECT_EQ(port_of(t.client).sends_directly(), direct);
    EXPECT_EQ(port_of(t.client).spare() != nullptr, direct);
    EXPECT_EQ(queue_pair_of(t.client).direct != nullptr, direct);
    Posted posted;
    posted.watch(t.client);
    posted.watch(t.server);
    for (int i = 0; i < 200; ++i)
      (void)(t.client.poll() + t.server.poll());  // the reply to the session's first ping
    Posted::sends = 0;
    for (std::size_t size = 0; size <= 32; ++size)
      EXPECT_EQ(t.call(kEcho, filled(size, 3)).bytes, filled(size, 3));
    EXPECT_EQ(Posted::sends, direct ? 0 : 66);
    Posted::sends = 0;
    for (const std::size_t size : {33, 48, 49, 500, 4000})
      EXPECT_EQ(t.call(kEcho, filled(size, 3)).bytes, filled(size, 3));
    EXPECT_EQ(Posted::sends, direct ? 0 : 10);  // each call and its reply
    t.finish();
  }
}

TEST_F(RpcDirect, EnginesWithAndWithoutCallEachOther) {
  Node with(going(DirectPath::automatic)), without(going(DirectPath::off));
  std::map<Bytes, int> runs;
  std::vector<Session> sessions;
  for (Node* node : {&with, &without}) {
    node->listen();
    ASSERT_TRUE(node->engine.serve(kCount, [&runs](Request& r) {
      ++runs[bytes_of(r.bytes())];
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    }));
  }
  sessions.push_back(with.engine.open_session(without.listener.address(), {}).value());
  sessions.push_back(without.engine.open_session(with.listener.address(), {}).value());
  std::uint32_t begun = 0, ended = 0;
  ASSERT_TRUE(until({&with, &without}, [&] {
    while (begun != 4000 && sessions[begun % 2].ready()) {
      const Bytes bytes = numbered(4 + begun % 45, begun);
      const auto done = [&ended, size = bytes.size()](Reply& r) {
        EXPECT_EQ(r.bytes().size(), size);
        ++ended;
      };
      if (sessions[begun % 2].call(kCount, std::span<const std::byte>(bytes), done) != Status::ok)
        break;
      ++begun;
    }
    return ended == 4000;
  }));
  for (const auto& [bytes, times] : runs) EXPECT_EQ(times, 1);
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(until({&with, &without}, [&] {
    return with.engine.rpc_stats().sessions + without.engine.rpc_stats().sessions == 0;
  }));
  for (Node* node : {&with, &without}) {
    EXPECT_EQ(node->engine.rpc_stats().bad_datagrams, 0u);
    node->expect_clean();
  }
}

TEST_F(RpcDirect, CallsGoOutWhenTheirPostSays) {
  Calls t;
  CallOptions options;
  const auto served = [&t] {
    for (int i = 0; i < 4; ++i) (void)t.server.poll();
    return t.server.engine.rpc_stats().served;
  };
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);  // from now on the whole window is granted
  // Outside a poll: at once, or with flush().
  ASSERT_EQ(t.begin(kEcho, filled(5, 1), options), Status::ok);
  EXPECT_EQ(served(), 2u);
  options.post = Post::defer;
  for (int i = 0; i < 2; ++i) ASSERT_EQ(t.begin(kEcho, filled(5, 2), options), Status::ok);
  EXPECT_EQ(served(), 3u);  // the first is a group
  EXPECT_EQ(t.client.engine.flush(), Status::ok);
  EXPECT_EQ(served(), 4u);
  // The next one posted at once also sends the deferred ones.
  for (int i = 0; i < 2; ++i) ASSERT_EQ(t.begin(kEcho, filled(5, 3), options), Status::ok);
  options.post = Post::automatic;
  ASSERT_EQ(t.begin(kEcho, filled(5, 4), options), Status::ok);
  EXPECT_EQ(served(), 7u);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  // In a callback: at the end of the poll, or at once.
  for (const Post post : {Post::automatic, Post::defer, Post::now}) {
    std::uint64_t then = 0;
    const std::uint64_t before = served();
    options.post = post;
    const auto next = [&](Reply&) {
      for (int i = 0; i < 2; ++i) ASSERT_EQ(t.begin(kEcho, filled(5, 6), options), Status::ok);
      then = served();
    };
    const Bytes bytes = filled(5, 5);
    ASSERT_EQ(t.session.call(kEcho, std::span<const std::byte>(bytes), next), Status::ok);
    ASSERT_TRUE(t.until([&] { return then != 0; }));
    EXPECT_EQ(then, before + (post == Post::now ? 3 : 2));
    ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
    EXPECT_EQ(served(), before + 3);
  }
  t.finish();
}

TEST_F(RpcDirect, AGroupThatIsCompleteGoesOutByItself) {
  Calls t(rpc_config(), nullptr, 16);
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);  // from now on the whole window is granted
  CallOptions options;
  options.post = Post::defer;
  for (std::uint32_t i = 1; i <= 16; ++i) {
    ASSERT_EQ(t.begin(kEcho, filled(5, i), options), Status::ok);
    for (int polls = 0; polls < 4; ++polls) (void)t.server.poll();
    EXPECT_EQ(t.server.engine.rpc_stats().served, 1 + softverbs_test::in_whole_groups(i));
  }
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  t.finish();
}

/// A connection to the same peer shares the lane. Its deferred messages do not hold back a call.
TEST_F(RpcDirect, ACallDoesNotWaitForADeferredMessage) {
  Calls t;
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);
  Connection c = t.client.engine.connect(t.server.listener.address(), {}).value();
  ASSERT_TRUE(t.until([&] { return c.ready(); }));
  const Bytes bytes = filled(5, 1);
  // The first message is a work request, since the peer is not known to receive yet. Credit grows
  // with use.
  for (int i = 0; i < 40; ++i)
    ASSERT_TRUE(t.until([&] { return c.send_copy(bytes) == Status::ok; }));
  ASSERT_TRUE(t.until([&] { return t.client.engine.stats().operations == 0; }));
  for (int round = 0; round < 3; ++round) {
    // Groups of 1 and 2, and the first of the next: the call does not complete it.
    for (int i = 0; i < 4; ++i) ASSERT_EQ(c.send_copy(bytes, {}, Post::defer), Status::ok);
    const std::uint64_t before = t.server.engine.rpc_stats().served;
    ASSERT_EQ(t.begin(kEcho, bytes), Status::ok);
    for (int polls = 0; polls < 4; ++polls) (void)t.server.poll();
    EXPECT_EQ(t.server.engine.rpc_stats().served, before + 1) << round;
    ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  }
  EXPECT_EQ(c.close(), Status::ok);
  t.finish();
}

/// Datagrams without a direct way use work requests instead.
TEST_F(RpcDirect, WhatAPeerThatStandsStillTakesIsNotLost) {
  Calls t;
  std::vector<Session> sessions;
  for (int i = 0; i < 40; ++i) {
    sessions.push_back(t.open(8));
    ASSERT_TRUE(t.until([&] { return sessions.back().ready(); }));
  }
  // More than a lane holds, while the server does not poll.
  std::uint32_t ended = 0;
  const auto done = [&ended](Reply& r) { ended += r.status() == Status::ok ? 1 : 0; };
  std::uint32_t begun = 0;
  for (Session& s : sessions) {
    for (int i = 0; i < 8; ++i, ++begun) {
      const Bytes bytes = numbered(4, begun);
      ASSERT_EQ(s.call(kCount, std::span<const std::byte>(bytes), done), Status::ok);
      (void)t.client.poll();
    }
  }
  ASSERT_TRUE(t.until([&] { return ended == begun; }));
  EXPECT_EQ(t.runs.size(), begun);
  for (const auto& [bytes, times] : t.runs) EXPECT_EQ(times, 1);
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.client.engine.rpc_stats().sessions == 1; }));
  t.bad_allowed = true;  // a descheduled client sends its close twice
  t.finish();
}

// ---- kept buffers -------------------------------------------------------------------------------

/// Keeps requests and replies, and the bytes that they must have.
struct Keeper {
  static constexpr spinwire::Method kKept = 9;
  explicit Keeper(Calls& calls) : t(calls) {
    EXPECT_TRUE(t.server.engine.serve(kKept, [this](Request& r) {
      requests.push_back(r.keep());
      EXPECT_EQ(bytes_of(requests.back().bytes()), bytes_of(r.bytes()));
      const BufferSlice again = r.keep();
      EXPECT_EQ(again.bytes().data(), requests.back().bytes().data());
      EXPECT_EQ(again.size(), requests.back().size());
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    }));
  }
  /// Makes one call and keeps its request and its reply.
  void call(std::size_t size, std::uint32_t seed) {
    bool over = false;
    const auto done = [this, &over](Reply& r) {
      EXPECT_EQ(r.status(), Status::ok);
      replies.push_back(r.keep());
      EXPECT_EQ(r.keep().bytes().data(), replies.back().bytes().data());
      over = true;
    };
    const Bytes bytes = filled(size, seed);
    ASSERT_EQ(t.session.call(kKept, std::span<const std::byte>(bytes), done), Status::ok);
    ASSERT_TRUE(t.until([&over] { return over; }));
    expected.push_back(bytes);
  }
  void check() const {
    ASSERT_EQ(requests.size(), expected.size());
    ASSERT_EQ(replies.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(bytes_of(requests[i].bytes()), expected[i]) << i;
      EXPECT_EQ(bytes_of(replies[i].bytes()), expected[i]) << i;
    }
  }
  Calls& t;
  std::vector<BufferSlice> requests, replies;
  std::vector<Bytes> expected;
};

TEST_F(RpcDirect, WhatIsKeptStaysAsItWas) {
  Calls t;
  Keeper keeper(t);
  for (std::uint32_t size = 0; size <= 32; ++size) ASSERT_NO_FATAL_FAILURE(keeper.call(size, size));
  for (const std::uint32_t size : {33u, 48u}) ASSERT_NO_FATAL_FAILURE(keeper.call(size, size));
  EXPECT_TRUE(keeper.requests[0].bytes().empty());
  EXPECT_TRUE(keeper.replies[0].bytes().empty());
  keeper.check();
  std::uint32_t ended = 0, begun = 0;
  const auto done = [&ended](Reply& r) {
    EXPECT_EQ(r.status(), Status::ok);
    ++ended;
  };
  ASSERT_TRUE(t.until([&] {
    while (begun != 8000) {
      const Bytes bytes = numbered(4 + begun % 29, begun);
      const std::span<const std::byte> all(bytes);
      if (t.session.call(kEcho, all, done) != Status::ok) break;
      ++begun;
    }
    return ended == 8000;
  }));
  keeper.check();
  EXPECT_NE(port_of(t.server).spare(), nullptr);
  EXPECT_EQ(port_of(t.server).receive_shortage() + port_of(t.client).receive_shortage(), 0u);
  t.server.expect_clean();
  t.client.expect_clean();
  keeper.requests.clear();
  keeper.replies.clear();
  t.finish();
}

TEST_F(RpcDirect, WhatIsKeptIsCopiedOnce) {
  Calls t;
  // The application's changes to its slice stay, whatever else it does.
  const auto keep_twice = [](auto& r) {
    const BufferSlice first = r.keep();
    first.data()[0] = std::byte{77};
    const BufferSlice second = r.keep();
    EXPECT_EQ(second.data(), first.data());
    EXPECT_EQ(first.data()[0], std::byte{77});
    EXPECT_EQ(r.bytes().data(), first.data());
  };
  ASSERT_TRUE(t.server.engine.serve(9, [&](Request& r) {
    keep_twice(r);
    EXPECT_EQ(r.reply(r.bytes()), Status::ok);
  }));
  for (const std::size_t size : {1, 32, 48}) {
    bool over = false;
    const auto done = [&](Reply& r) {
      ASSERT_EQ(r.bytes().size(), size);
      EXPECT_EQ(r.bytes()[0], std::byte{77});
      keep_twice(r);
      over = true;
    };
    const Bytes bytes = filled(size, 5);
    ASSERT_EQ(t.session.call(9, std::span<const std::byte>(bytes), done), Status::ok);
    ASSERT_TRUE(t.until([&over] { return over; }));
  }
  t.finish();
}

TEST_F(RpcDirect, SeveralOfARunAreKeptAtOnce) {
  Calls t;
  std::vector<BufferSlice> requests, replies;
  ASSERT_TRUE(t.server.engine.serve(9, [&requests](Request& r) {
    if (requests.size() % 3 != 2)
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    else
      EXPECT_EQ(r.refuse("thirds"), Status::ok);
    requests.push_back(r.keep());
  }));
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);  // from now on the whole window is granted
  const spinwire::detail::Block* const before = port_of(t.server).spare();
  CallOptions options;
  options.post = Post::defer;
  for (std::uint32_t i = 0; i < 8; ++i) {
    const Bytes bytes = numbered(20, i);
    const auto done = [&replies](Reply& r) { replies.push_back(r.keep()); };
    const std::span<const std::byte> all(bytes);
    ASSERT_EQ(t.session.call(9, all, done, options), Status::ok);
  }
  ASSERT_EQ(t.client.engine.flush(), Status::ok);
  ASSERT_TRUE(t.until([&] { return replies.size() == 8; }));
  EXPECT_NE(port_of(t.server).spare(), before);
  for (std::uint32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(bytes_of(requests[i].bytes()), numbered(20, i));
    const Bytes said = bytes_of(replies[i].bytes());
    if (i % 3 != 2)
      EXPECT_EQ(said, numbered(20, i));
    else
      EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(said.data()), said.size()),
                "thirds");
  }
  requests.clear();
  replies.clear();
  t.finish();
}

TEST_F(RpcDirect, WhatCameByAReceiveIsKeptWhereItLies) {
  Calls t;
  std::vector<BufferSlice> kept;
  const auto keep = [&kept](auto& r) {
    kept.push_back(r.keep());
    EXPECT_EQ(kept.back().bytes().data(), r.bytes().data());
  };
  ASSERT_TRUE(t.server.engine.serve(9, [&keep](Request& r) {
    EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    keep(r);
  }));
  for (const std::size_t size : {33, 100, 1000}) {
    Buffer b = t.client.buffer(size);
    const Bytes bytes = filled(size, 1);
    std::copy(bytes.begin(), bytes.end(), b.data());
    const std::size_t before = kept.size();
    ASSERT_EQ(t.session.call(9, b.slice(), [&keep](Reply& r) { keep(r); }), Status::ok);
    ASSERT_TRUE(t.until([&] { return kept.size() == before + 2; }));
    EXPECT_EQ(bytes_of(kept[before].bytes()), bytes);
    EXPECT_EQ(bytes_of(kept[before + 1].bytes()), bytes);
  }
  kept.clear();
  t.finish();
}

TEST_F(RpcDirect, WithADryPoolCallsComeByReceivesUntilThereIsABlock) {
  Config c = rpc_config();
  c.memory.receive_bytes = 4u << 20;
  Calls t(c);
  Keeper keeper(t);
  const spinwire::rpc::DatagramPort& port = port_of(t.server);
  const spinwire::softverbs::ReceiveQueue& receives = *queue_pair_of(t.server).receives;
  EXPECT_EQ(receives.head, 0u);
  for (std::uint32_t i = 0; port.spare() != nullptr; ++i)
    ASSERT_NO_FATAL_FAILURE(keeper.call(20, i));
  EXPECT_EQ(queue_pair_of(t.server).direct, nullptr);
  EXPECT_EQ(receives.head, 0u);
  for (std::uint32_t i = 1; i <= 100; ++i) {  // by receives, none of which is missing yet
    ASSERT_EQ(t.call(kEcho, filled(20, i)).bytes, filled(20, i));
    ASSERT_GE(receives.head, i);  // more if the client retransmits on a busy machine
  }
  EXPECT_EQ(port.receive_shortage(), 0u);
  for (std::uint32_t i = 0; port.receive_shortage() < 20; ++i)
    ASSERT_NO_FATAL_FAILURE(keeper.call(20, i));
  EXPECT_EQ(port.spare(), nullptr);
  EXPECT_EQ(t.call(kEcho, filled(20, 1)).bytes, filled(20, 1));
  keeper.check();
  t.server.expect_clean();
  keeper.requests.clear();
  ASSERT_TRUE(t.until([&] { return port.receive_shortage() == 0 && port.spare() != nullptr; }));
  const std::uint32_t head = receives.head;
  for (std::uint32_t i = 0; i < 100; ++i)
    ASSERT_EQ(t.call(kEcho, filled(20, i)).bytes, filled(20, i));
  EXPECT_EQ(receives.head, head);
  keeper.replies.clear();
  const spinwire::rpc::DatagramPort& own = port_of(t.client);
  ASSERT_TRUE(t.until([&] { return own.receive_shortage() == 0 && own.spare() != nullptr; }));
  t.finish();
}

TEST_F(RpcDirect, ARunIsLeftWhereTheLastBlockIsKept) {
  // The rest of the same run arrives in receives.
  Config c = rpc_config();
  c.memory.receive_bytes = 4u << 20;
  Calls t(c);
  Keeper keeper(t);
  const spinwire::rpc::DatagramPort& port = port_of(t.server);
  std::vector<BufferSlice> taken;
  auto& arena = *spinwire::detail::core_of(t.server.engine)->context.arena;
  for (;;) {
    spinwire::detail::Block* const block = arena.allocate(spinwire::memory::PoolId::receive, 4096);
    if (block == nullptr) break;
    taken.push_back(spinwire::detail::make<BufferSlice>(block, block->payload, 1u));
    spinwire::detail::release(block);
  }
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);
  ASSERT_NE(port.spare(), nullptr);
  const std::uint32_t head = queue_pair_of(t.server).receives->head;
  CallOptions options;
  options.post = Post::defer;
  std::vector<Bytes> replies;
  for (std::uint32_t i = 0; i < 6; ++i) {
    const Bytes bytes = numbered(20, i);
    const auto done = [&replies](Reply& r) { replies.push_back(bytes_of(r.bytes())); };
    const std::span<const std::byte> all(bytes);
    ASSERT_EQ(t.session.call(static_cast<spinwire::Method>(i == 2 ? Keeper::kKept : +kEcho), all,
                             done, options),
              Status::ok);
  }
  ASSERT_EQ(t.client.engine.flush(), Status::ok);
  ASSERT_TRUE(t.until([&] { return replies.size() == 6; }));
  for (std::uint32_t i = 0; i < 6; ++i) EXPECT_EQ(replies[i], numbered(20, i));
  EXPECT_EQ(queue_pair_of(t.server).receives->head, head + 3);
  EXPECT_EQ(port.spare(), nullptr);
  EXPECT_EQ(bytes_of(keeper.requests[0].bytes()), numbered(20, 2));
  keeper.requests.clear();
  taken.clear();
  ASSERT_TRUE(t.until([&] { return port.spare() != nullptr; }));
  t.finish();
}

TEST_F(RpcDirect, APortThatEndsGivesItsBlocksBack) {
  const Bare bare(rpc_config());
  auto& context = bare.core->context;
  const auto used = [&context] {
    return context.arena->stats(spinwire::memory::PoolId::receive).blocks_used;
  };
  const std::uint64_t before = used();
  {
    const auto port = spinwire::rpc::DatagramPort::open(context, {16, 8}).value();
    ASSERT_NE(port->spare(), nullptr);
    EXPECT_GT(used(), before);
    ASSERT_TRUE(port->renew_spare());
  }
  EXPECT_EQ(used(), before);
  bare.expect_clean();
}

TEST_F(RpcDirect, APollTakesATurnOfWhatLiesInALane) {
  constexpr std::uint64_t kTurn = 64;
  Config c = rpc_config();
  c.rpc.min_rto = 1s;  // no retransmissions
  Calls t(c);
  std::vector<Session> sessions;
  for (int i = 0; i < 20; ++i) {
    sessions.push_back(t.open(8));
    ASSERT_TRUE(t.until([&] { return sessions.back().ready(); }));
  }
  std::uint32_t ended = 0, begun = 0;
  const auto done = [&ended](Reply&) { ++ended; };
  const auto call_all = [&](std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      for (Session& s : sessions) {
        const Bytes bytes = numbered(4, begun++);
        ASSERT_EQ(s.call(kCount, std::span<const std::byte>(bytes), done), Status::ok);
      }
    }
  };
  ASSERT_NO_FATAL_FAILURE(call_all(1));  // from now on the whole windows are granted
  ASSERT_TRUE(t.until([&] { return ended == begun; }));
  ASSERT_NO_FATAL_FAILURE(call_all(8));
  const auto served = [&t] { return t.server.engine.rpc_stats().served; };
  std::uint64_t longest = 0;
  for (std::uint64_t turn = 1; turn != 0; longest = std::max(longest, turn)) {
    const std::uint64_t before = served();
    (void)t.server.engine.poll();
    turn = served() - before;
  }
  EXPECT_EQ(longest, kTurn);
  ASSERT_TRUE(t.until([&] { return ended == begun; }));
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.client.engine.rpc_stats().sessions == 1; }));
  t.finish();
}

TEST_F(RpcDirect, WhatTheDeviceCallsASourceIsLearntFromTheFirst) {
  Calls t;
  auto& client = *spinwire::detail::core_of(t.client.engine)->calls;
  auto& server = *spinwire::detail::core_of(t.server.engine)->calls;
  const spinwire::rpc::ClientSession& c = *client.clients.find(0);
  const spinwire::rpc::ServerSession& s = *spinwire::rpc::find_server(server, c.peer_session);
  const std::uint64_t unknown = spinwire::rpc::PeerAddress().direct_source;
  EXPECT_EQ(c.peer_address->direct_source, unknown);
  EXPECT_EQ(s.peer_address->direct_source, unknown);
  for (std::uint32_t i = 0; i < 3; ++i) {
    ASSERT_EQ(t.call(kEcho, filled(4, i)).status, Status::ok);
    EXPECT_EQ(c.peer_address->direct_source & 0xffffff, server.port->qp_num());
    EXPECT_EQ(s.peer_address->direct_source & 0xffffff, client.port->qp_num());
    EXPECT_NE(c.peer_address->direct_source, unknown);
    EXPECT_NE(s.peer_address->direct_source, unknown);
  }
  t.finish();
}

TEST_F(RpcDirect, ThereIsNoLaneToWhatIsNoNumberOfAQueuePair) {
  Calls t;
  ASSERT_EQ(t.call(kEcho, filled(4, 1)).status, Status::ok);
  auto& calls = *spinwire::detail::core_of(t.client.engine)->calls;
  spinwire::verbs::DatagramAddress to = calls.clients.find(0)->peer_address->destination;
  const auto& direct =
      *spinwire::detail::core_of(t.client.engine)->context.device->provider().direct;
  EXPECT_EQ(to.lane, direct.lane(to.ah));
  to.qp_num |= 1u << 24;  // would change the datagram's source
  calls.port->resolve(to);
  EXPECT_NE(to.lane, direct.lane(to.ah));
  EXPECT_FALSE(calls.port->send_direct(to, {}, 0, spinwire::rpc::Payload()));
  EXPECT_FALSE(calls.port->send_direct(to, {}, kSlotPayloadBytes, spinwire::rpc::Payload()));
  to.qp_num &= 0xffffff;
  calls.port->resolve(to);
  EXPECT_EQ(to.lane, direct.lane(to.ah));
  t.finish();
}

TEST_F(RpcDirect, AnAnswerWithinThePollIsNoRoundTrip) {
  // A message sent at once in a callback may be answered while the rest of the run is read.
  struct Chain {
    std::uint64_t now = 1'000'000'000;
    Calls calls{rpc_config(), &now};
    Session other = calls.open(8);
    bool polling = false, within = false;
  } t;
  ASSERT_TRUE(t.calls.until([&t] {
    t.now += 1000;
    return t.other.ready();
  }));
  const auto next = [&t](Reply&) {
    CallOptions options;
    options.post = Post::now;
    const auto done = [&t](Reply& r) { t.within = t.polling && r.status() == Status::ok; };
    EXPECT_EQ(t.other.call(kEcho, std::span<const std::byte>{}, done, options), Status::ok);
    (void)t.calls.server.poll();
  };
  ASSERT_EQ(t.calls.session.call(kEcho, std::span<const std::byte>{}, next), Status::ok);
  t.now += 1000;
  (void)t.calls.server.poll();
  t.polling = true;
  (void)t.calls.client.poll();
  t.polling = false;
  EXPECT_TRUE(t.within);
  auto& clients = spinwire::detail::core_of(t.calls.client.engine)->calls->clients;
  EXPECT_EQ(clients.find(0)->min_rtt, 1000u);
  EXPECT_EQ(clients.find(1)->min_rtt, ~std::uint64_t{0});
  EXPECT_EQ(t.other.close(), Status::ok);
  ASSERT_TRUE(t.calls.until([&t] {
    t.now += 1000;
    return t.other.state() == SessionState::closed;
  }));
  t.calls.finish();
}

TEST(SlowRpcByWorkRequests, PassTheSuitesOfCalls) {
  if (device_name() != "softverbs" || by_work_requests() || over_connections())
    GTEST_SKIP() << "this is what the others do";
  const std::string text = engine_test::run_again(
      "SPINWIRE_TEST_DATAGRAMS", "verbs",
      "RpcCalls.*:RpcCallBuffers.*:RpcSharedListeners.*:RpcZeroCost.*:RpcSessionSurvival.*:RpcLoss."
      "*:"
      "RpcBacklog.*:RpcIdleSessions.*:RpcReservedReceives.*:RpcHostile.*:RpcTombstones.*:"
      "RpcSessionOpening.*:RpcLongCalls.*");
  EXPECT_GE(engine_test::passed(text), 60) << text << "too many were skipped";
}

}  // namespace
}  // namespace rpc_direct_calls_test
