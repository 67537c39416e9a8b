// Datagrams that go without work requests, and are read where they lie, where the device can do
// that; and what goes by them.
#include <array>

#include "engine/run_again.h"
#include "rpc/bare.h"
#include "rpc/calling.h"
#include "softverbs/objects.h"

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

const spinwire::rpc::Port& port_of(const Node& node) { return *node.engine.core()->calls->port; }
const spinwire::softverbs::Qp& queue_pair_of(const Node& node) {
  return *static_cast<const spinwire::softverbs::Qp*>(port_of(node).queue_pair());
}

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
    EXPECT_EQ(port_of(t.client).sends_directly(), direct);
    EXPECT_EQ(port_of(t.client).spare() != nullptr, direct);
    EXPECT_EQ(queue_pair_of(t.client).direct != nullptr, direct);
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

// ---- what is kept -------------------------------------------------------------------------------

/// Keeps requests and replies, with the bytes that they should have.
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
  /// One call, of whose reply and request both are kept.
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
  EXPECT_EQ(port_of(t.server).missing() + port_of(t.client).missing(), 0u);
  t.server.expect_clean();
  t.client.expect_clean();
  keeper.requests.clear();
  keeper.replies.clear();
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
  ASSERT_EQ(t.call(kEcho, {}).status, Status::ok);  // from now on the window is whole
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

TEST_F(RpcDirect, WithADryPoolCallsComeByReceivesUntilThereIsABlock) {
  Config c = rpc_config();
  c.memory.receive_bytes = 4u << 20;
  Calls t(c);
  Keeper keeper(t);
  const spinwire::rpc::Port& port = port_of(t.server);
  const spinwire::softverbs::ReceiveQueue& receives = *queue_pair_of(t.server).receives;
  EXPECT_EQ(receives.head, 0u);
  for (std::uint32_t i = 0; port.spare() != nullptr; ++i)
    ASSERT_NO_FATAL_FAILURE(keeper.call(20, i));
  EXPECT_EQ(queue_pair_of(t.server).direct, nullptr);
  EXPECT_EQ(receives.head, 0u);
  for (std::uint32_t i = 1; i <= 100; ++i) {  // by receives, of which none is missing so far
    ASSERT_EQ(t.call(kEcho, filled(20, i)).bytes, filled(20, i));
    ASSERT_EQ(receives.head, i);
  }
  EXPECT_EQ(port.missing(), 0u);
  for (std::uint32_t i = 0; port.missing() < 20; ++i) ASSERT_NO_FATAL_FAILURE(keeper.call(20, i));
  EXPECT_EQ(port.spare(), nullptr);
  EXPECT_EQ(t.call(kEcho, filled(20, 1)).bytes, filled(20, 1));
  keeper.check();
  t.server.expect_clean();
  keeper.requests.clear();
  ASSERT_TRUE(t.until([&] { return port.missing() == 0 && port.spare() != nullptr; }));
  const std::uint32_t head = receives.head;
  for (std::uint32_t i = 0; i < 100; ++i)
    ASSERT_EQ(t.call(kEcho, filled(20, i)).bytes, filled(20, i));
  EXPECT_EQ(receives.head, head);
  keeper.replies.clear();
  t.finish();
}

TEST_F(RpcDirect, ARunIsLeftWhereTheLastBlockIsKept) {
  // What lies behind in the same run comes by receives.
  Config c = rpc_config();
  c.memory.receive_bytes = 4u << 20;
  Calls t(c);
  Keeper keeper(t);
  const spinwire::rpc::Port& port = port_of(t.server);
  std::vector<BufferSlice> taken;
  auto& arena = *t.server.engine.core()->shared.arena;
  for (;;) {
    spinwire::detail::Block* const block = arena.allocate(spinwire::memory::PoolId::receive, 4096);
    if (block == nullptr) break;
    taken.emplace_back(block, block->payload, 1);
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

// ---- what nobody should have sent ---------------------------------------------------------------

/// Datagrams in runs that say what a test likes: of the client's own queue pair, which the server
/// knows, or of another of its device, which come over the same lane.
class RpcDirectHostile : public RpcDirect {
 protected:
  using RpcKind = spinwire::wire::RpcKind;
  std::optional<Calls> t_;
  ibv_qp* stranger_ = nullptr;

  void SetUp() override {
    RpcDirect::SetUp();
    if (IsSkipped()) return;
    t_.emplace();
    EXPECT_EQ(t_->call(kCount, filled(4, 1)).status, Status::ok);
    spinwire::verbs::DatagramOptions options;
    options.send_depth = options.receive_depth = 8;
    options.inline_bytes = 64;
    options.qkey = 5;
    stranger_ = device().create_datagram_qp(options).value();
  }
  void TearDown() override {
    if (!t_) return;
    device().destroy_qp(stranger_);
    EXPECT_EQ(t_->call(kCount, filled(4, 2)).status, Status::ok);
    EXPECT_EQ(t_->runs[filled(4, 1)], 1);
    t_->bad_allowed = true;
    t_->finish();
  }
  [[nodiscard]] spinwire::verbs::Device& device() const {
    return *t_->client.engine.core()->shared.device;
  }
  [[nodiscard]] ibv_qp* known() const {
    return const_cast<ibv_qp*>(port_of(t_->client).queue_pair());
  }
  [[nodiscard]] const spinwire::rpc::ClientSession& session() const {
    return *t_->client.engine.core()->calls->clients.find(0);
  }
  /// A good request; its slot was not used so far.
  [[nodiscard]] spinwire::wire::RpcHeader request() const {
    return {session().peer, session().calls[1].number, kCount, RpcKind::request, 0, 4, 0};
  }
  void send(ibv_qp* by, const spinwire::wire::RpcHeader& header, std::uint64_t length) const {
    const auto& direct = *device().provider().direct;
    const auto words = spinwire::wire::pack(header);
    const std::array<std::byte, 32> payload{};
    ASSERT_TRUE(spinwire::base::send(direct, by, *direct.sender(by), session().route->to, words.low,
                                     words.high, payload.data(), length));
    direct.publish(by);
  }
  /// By the verbs: a direct one has a header in any case.
  void send_short(ibv_qp* by, std::uint32_t length) const {
    std::array<std::byte, 16> bytes{};
    const auto words = spinwire::wire::pack(request());
    std::memcpy(bytes.data(), &words, sizeof words);
    ibv_sge sge{reinterpret_cast<std::uint64_t>(bytes.data()), length, 0};
    ibv_send_wr wr{};
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_INLINE;
    wr.wr.ud.ah = session().route->to.ah;
    wr.wr.ud.remote_qpn = session().route->to.qp_num;
    wr.wr.ud.remote_qkey = session().route->to.qkey;
    ibv_send_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_send(by, &wr, &bad), 0);
  }
  /// One more bad one was counted, nobody was served, and no receive was taken.
  void expect_bad() {
    const std::uint64_t bad = ++bad_;
    EXPECT_TRUE(t_->until([&] { return t_->server.engine.rpc_stats().bad_datagrams >= bad; }));
    for (int i = 0; i < 8; ++i) (void)t_->server.poll();
    EXPECT_EQ(t_->server.engine.rpc_stats().bad_datagrams, bad);
    EXPECT_EQ(t_->server.engine.rpc_stats().served, 1u);
    EXPECT_EQ(queue_pair_of(t_->server).receives->head, 0u);
  }

 private:
  std::uint64_t bad_ = 0;
};

TEST_F(RpcDirectHostile, AStrangerOnTheSameDeviceIsNotTheClient) {
  EXPECT_NE(port_of(t_->client).qp_num(), stranger_->qp_num);
  spinwire::wire::RpcHeader header = request();
  for (int i = 0; i < 3; ++i) {
    ASSERT_NO_FATAL_FAILURE(send(stranger_, header, 4));
    expect_bad();
  }
  header.kind = RpcKind::ping;
  header.length = header.method = 0;
  ASSERT_NO_FATAL_FAILURE(send(stranger_, header, 0));
  expect_bad();
}

TEST_F(RpcDirectHostile, MalformedHeadersAreCounted) {
  const spinwire::wire::RpcHeader good = request();
  for (ibv_qp* by : {known(), stranger_}) {
    for (int what = 0; what < 7; ++what) {
      SCOPED_TRACE(what);
      spinwire::wire::RpcHeader header = good;
      if (what == 0) header.length = 5;
      if (what == 1) header.length = 3;
      if (what == 2) header.kind = RpcKind{0};
      if (what == 3) header.kind = RpcKind{8};
      if (what == 4) header.status = 1;
      if (what == 5) header.window = 1;
      if (what == 6) header.kind = RpcKind::reply;  // that grants nothing
      ASSERT_NO_FATAL_FAILURE(send(by, header, 4));
      expect_bad();
    }
  }
}

TEST_F(RpcDirectHostile, WhatIsShorterThanAHeaderIsCounted) {
  for (ibv_qp* by : {known(), stranger_}) {
    for (const std::uint32_t length : {0, 1, 8, 15}) {
      ASSERT_NO_FATAL_FAILURE(send_short(by, length));
      expect_bad();
    }
  }
}

TEST_F(RpcDirectHostile, AReplyOfAStrangerEndsNoCall) {
  // To the client, of another queue pair of the server's device.
  ASSERT_EQ(t_->begin(kLater, filled(9, 3)), Status::ok);
  ASSERT_TRUE(t_->until([&] { return t_->later.size() == 1; }));
  spinwire::verbs::DatagramOptions options;
  options.send_depth = options.receive_depth = 8;
  options.inline_bytes = 64;
  options.qkey = 5;
  spinwire::verbs::Device& device = *t_->server.engine.core()->shared.device;
  ibv_qp* const other = device.create_datagram_qp(options).value();
  const auto& s = *spinwire::rpc::find_server(*t_->server.engine.core()->calls, session().peer);
  const auto words =
      spinwire::wire::pack({s.peer, session().calls[0].number, 0, RpcKind::reply, 0, 4, 8});
  const auto& direct = *device.provider().direct;
  const std::array<std::byte, 32> payload{};
  ASSERT_TRUE(spinwire::base::send(direct, other, *direct.sender(other), s.route->to, words.low,
                                   words.high, payload.data(), 4));
  direct.publish(other);
  ASSERT_TRUE(t_->until([&] { return t_->client.engine.rpc_stats().bad_datagrams == 1; }));
  EXPECT_FALSE(t_->all_ended());
  EXPECT_EQ(t_->later[0].call.reply(filled(5, 5)), Status::ok);
  ASSERT_TRUE(t_->until([&] { return t_->all_ended(); }));
  EXPECT_EQ(t_->ended.back().bytes, filled(5, 5));
  device.destroy_qp(other);
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
