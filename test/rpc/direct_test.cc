// Datagrams that go without work requests where the device can do that, and what goes by them.
#include <array>

#include "engine/run_again.h"
#include "rpc/bare.h"
#include "rpc/calling.h"

namespace rpc_direct_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::Post;
using spinwire::RpcDatagrams;

Config going(RpcDatagrams datagrams) {
  Config c = rpc_config();
  c.rpc.datagrams = datagrams;
  return c;
}

Bytes numbered(std::size_t size, std::uint32_t number) {
  Bytes bytes = filled(size, 1);
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

/// Counts the sends that are posted as work requests to devices that were given to it.
class Posted {
 public:
  void watch(const Node& node) {
    ibv_context& device = *node.engine.core()->shared.device->context();
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

class RpcDirect : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "it has such a way";
  }
};

TEST_F(RpcDirect, ShortCallsTakeNoWorkRequests) {
  for (const RpcDatagrams how : {RpcDatagrams::direct, RpcDatagrams::verbs}) {
    const bool direct = how == RpcDatagrams::direct;
    Calls t(going(how));
    EXPECT_EQ(t.client.engine.core()->calls->port->direct() != nullptr, direct);
    Posted posted;
    posted.watch(t.client);
    posted.watch(t.server);
    for (std::size_t size = 0; size <= 32; ++size)
      EXPECT_EQ(t.call(kEcho, filled(size, 3)).bytes, filled(size, 3));
    EXPECT_EQ(Posted::sends, direct ? 0 : 66);
    Posted::sends = 0;
    for (const std::size_t size : {33, 48, 49, 500, 4000})
      EXPECT_EQ(t.call(kEcho, filled(size, 3)).bytes, filled(size, 3));
    EXPECT_EQ(Posted::sends, 10);  // each, and its reply
    t.finish();
  }
}

TEST_F(RpcDirect, EnginesWithAndWithoutCallEachOther) {
  Node with(going(RpcDatagrams::direct)), without(going(RpcDatagrams::verbs));
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
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);  // from now on the window is whole
  // Outside of a poll: at once, or with flush().
  ASSERT_EQ(t.begin(kEcho, filled(5, 1), options), Status::ok);
  EXPECT_EQ(served(), 2u);
  options.post = Post::defer;
  ASSERT_EQ(t.begin(kEcho, filled(5, 2), options), Status::ok);
  EXPECT_EQ(served(), 2u);
  EXPECT_EQ(t.client.engine.flush(), Status::ok);
  EXPECT_EQ(served(), 3u);
  // The next that goes at once takes along what waits.
  ASSERT_EQ(t.begin(kEcho, filled(5, 3), options), Status::ok);
  options.post = Post::automatic;
  ASSERT_EQ(t.begin(kEcho, filled(5, 4), options), Status::ok);
  EXPECT_EQ(served(), 5u);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  // In a callback: with the poll's end, or at once.
  for (const Post post : {Post::automatic, Post::defer, Post::now}) {
    std::uint64_t then = 0;
    const std::uint64_t before = served();
    options.post = post;
    const auto next = [&](Reply&) {
      ASSERT_EQ(t.begin(kEcho, filled(5, 6), options), Status::ok);
      then = served();
    };
    const Bytes bytes = filled(5, 5);
    ASSERT_EQ(t.session.call(kEcho, std::span<const std::byte>(bytes), next), Status::ok);
    ASSERT_TRUE(t.until([&] { return then != 0; }));
    EXPECT_EQ(then, before + (post == Post::now ? 2 : 1));
    ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
    EXPECT_EQ(served(), before + 2);
  }
  t.finish();
}

/// In the midst of it goes by the verbs what no direct way is there for.
TEST_F(RpcDirect, WhatAPeerThatStandsStillTakesIsNotLost) {
  Calls t;
  std::vector<Session> sessions;
  for (int i = 0; i < 40; ++i) {
    sessions.push_back(t.open(8));
    ASSERT_TRUE(t.until([&] { return sessions.back().ready(); }));
  }
  // More than a lane holds, and the server does not poll.
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
  t.finish();
}

TEST_F(RpcDirect, ReceivesWhoseBlocksAreKeptGetOthersOrWaitForThem) {
  Config c = rpc_config();
  c.memory.receive_bytes = 4u << 20;
  Calls t(c);
  std::vector<BufferSlice> kept;
  ASSERT_TRUE(t.server.engine.serve(9, [&kept](Request& r) {
    kept.push_back(r.keep());
    EXPECT_EQ(r.reply(r.bytes()), Status::ok);
  }));
  const spinwire::rpc::DirectReceives& receives = *t.server.engine.core()->calls->port->direct();
  std::uint32_t calls = 0;
  for (; receives.missing() < 20; ++calls)
    ASSERT_EQ(t.call(9, filled(20, calls)).bytes, filled(20, calls));
  t.server.expect_clean();
  for (std::uint32_t i = 0; i < calls; ++i) EXPECT_EQ(bytes_of(kept[i].bytes()), filled(20, i));
  kept.clear();
  ASSERT_TRUE(t.until([&] { return receives.missing() == 0; }));
  EXPECT_EQ(t.call(kEcho, filled(20, 1)).status, Status::ok);
  t.finish();
}

/// Another queue pair of the client's own device, whose datagrams come over the same lane.
TEST_F(RpcDirect, AStrangerOnTheSameDeviceIsNotTheClient) {
  Calls t;
  EXPECT_EQ(t.call(kCount, filled(4, 1)).status, Status::ok);
  const std::uint64_t served = t.server.engine.rpc_stats().served;
  spinwire::agent::Shared& s = t.client.engine.core()->shared;
  const auto& ours = *t.client.engine.core()->calls;
  spinwire::verbs::DatagramOptions options;
  options.send_depth = options.receive_depth = 8;
  options.inline_bytes = 64;
  options.qkey = 5;
  ibv_qp* const stranger = s.device->create_datagram_qp(options).value();
  const spinwire::rpc::ClientSession& c = *t.client.engine.core()->calls->clients.find(0);
  const std::array<std::byte, 32> payload{};
  const auto words = spinwire::wire::pack(
      {c.peer, c.calls[0].number, kCount, spinwire::wire::RpcKind::request, 0, 4, 0});
  const auto& direct = *s.device->provider().direct;
  ASSERT_TRUE(direct.send(stranger, c.route->to, words.low, words.high, payload.data(), 4));
  direct.publish(stranger);
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().bad_datagrams == 1; }));
  EXPECT_EQ(t.server.engine.rpc_stats().served, served);
  EXPECT_NE(ours.port->qp_num(), stranger->qp_num);
  s.device->destroy_qp(stranger);
  EXPECT_EQ(t.call(kCount, filled(4, 2)).status, Status::ok);
  t.bad_allowed = true;
  t.finish();
}

TEST(RpcDirectAgain, PassesTheSuitesByWorkRequests) {
  if (device_name() != "softverbs" || by_work_requests() || over_connections())
    GTEST_SKIP() << "this is what the others do";
  const std::string text = engine_test::run_again(
      "SPINWIRE_TEST_DATAGRAMS", "verbs",
      "RpcCalls.*:RpcFeatures.*:RpcZeroCost.*:RpcEndures.*:RpcLoss.*:RpcWaiting.*:RpcIdle.*:"
      "RpcShares.*:RpcHostile.*:RpcForgotten.*:RpcOpening.*:RpcBulk.*");
  EXPECT_GE(engine_test::passed(text), 60) << text;  // so that the names are still right
}

}  // namespace
}  // namespace rpc_direct_test
