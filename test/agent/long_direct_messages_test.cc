// Messages above the eager limit without work requests: which go so, what is kept, and in which
// order they arrive beside rendezvous messages.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/credit.h"
#include "agent/rendezvous.h"
#include "agent/submit.h"
#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "engine/narrow_lanes.h"
#include "engine/zero_cost.h"
#include "softverbs/lane/line.h"

namespace long_direct_messages_test {
namespace {

namespace agent = spinwire::agent;
using namespace engine_test;  // the names of a test namespace
using spinwire::BufferSlice;
using spinwire::CompletionCallback;
using spinwire::ConnectionHandlers;
using spinwire::DirectPath;
using spinwire::Offer;

constexpr std::size_t kEager = 4096;
constexpr std::size_t kLongest = 32u << 10;
constexpr std::size_t kRendezvous = kLongest + 1;

Config long_config() {
  Config c = small_config();
  c.memory.send_bytes = 24u << 20;
  c.memory.rendezvous_bytes = 8u << 20;
  c.memory.windows = 32;
  c.connections.max_message_bytes = 1u << 20;
  c.connections.credit_idle_timeout = 1s * slowness();
  return c;
}

struct Nodes {
  Node server, client;
  Ends ends;
  std::vector<std::size_t> came;  ///< lengths at the server

  explicit Nodes(const Config& servers = long_config(), const Config& clients = long_config(),
                 bool offers = false)
      : server(servers), client(clients) {
    server.has_on_offer = client.has_on_offer = offers;
    server.on_message = [this](Connection, Message& m) {
      EXPECT_TRUE(Node::holds(m.bytes(), seed(m.size()))) << m.size();
      came.push_back(m.size());
    };
    server.listen();
    ends = connect(client, server);
  }
  static std::uint32_t seed(std::size_t size) { return static_cast<std::uint32_t>(size % 251); }
  Status send(std::size_t size, const CompletionCallback& done = {}) {
    return ends.client.send(client.filled(size, seed(size)), done);
  }
  /// Sends when there is credit.
  void send_all(const std::vector<std::size_t>& sizes) {
    for (const std::size_t size : sizes) {
      ASSERT_TRUE(until([&] {
        const Status status = send(size);
        EXPECT_TRUE(status == Status::ok || status == Status::would_block);
        return status == Status::ok;
      }));
    }
  }
  /// Whether a message has ended when send() returns, as only direct ones have.
  bool goes_directly(std::size_t size) {
    EXPECT_TRUE(until([&] { return ends.client.stats().outstanding == 0; }));
    send_all({size});
    return ends.client.stats().outstanding == 0;
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&client, &server}, std::forward<Done>(done));
  }
  void finish() { engine_test::finish(client, server); }
};

class EngineLongDirectMessages : public testing::Test {
 protected:
  void SetUp() override {
    if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "messages without work requests";
  }
};

TEST_F(EngineLongDirectMessages, OfUpTo32KiBHaveEndedWhenSendReturns) {
  Nodes t;
  const auto receives = t.server.engine.stats().receives_posted;
  std::vector<std::size_t> sent;
  for (const std::size_t size : {kEager, kEager + 1, std::size_t{8192}, std::size_t{20000},
                                 kLongest - 1, kLongest, std::size_t{1}}) {
    EXPECT_TRUE(t.goes_directly(size)) << size;
    sent.push_back(size);
  }
  EXPECT_FALSE(t.goes_directly(kRendezvous));
  sent.push_back(kRendezvous);
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent.size(); }));
  EXPECT_EQ(t.came, sent);
  EXPECT_LE(t.server.engine.stats().receives_posted - receives, 4u) << "the offer took some";
  t.finish();
}

TEST_F(EngineLongDirectMessages, CallTheirCallbackOnce) {
  Nodes t;
  int done = 0;
  ASSERT_TRUE(t.until([&] {
    return t.send(kLongest, [&](const Completion& c) {
      EXPECT_EQ(c.status, Status::ok);
      ++done;
    }) == Status::ok;
  }));
  EXPECT_EQ(done, 0) << "never inside of send()";
  (void)t.client.poll();
  EXPECT_EQ(done, 1) << "the peer has not polled yet";
  ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
  EXPECT_EQ(done, 1);
  t.finish();
}

TEST_F(EngineLongDirectMessages, AreOfferedWhereTheyMayBeRefused) {
  Nodes t(long_config(), long_config(), true);
  std::vector<std::size_t> offered;
  t.server.on_offer = [&](Connection, Offer& o) {
    offered.push_back(o.size());
    if (o.size() == 8192) o.refuse();
  };
  Status refused = Status::ok;
  ASSERT_TRUE(t.until([&] {
    return t.send(8192, [&](const Completion& c) { refused = c.status; }) == Status::ok;
  }));
  t.send_all({kEager + 1});
  ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
  EXPECT_EQ(refused, Status::refused);
  EXPECT_EQ(offered, (std::vector<std::size_t>{8192, kEager + 1}));
  t.finish();
}

TEST_F(EngineLongDirectMessages, AHandlerThatComesLaterMayPlaceThemAndDropThem) {
  Nodes t;
  t.send_all({8192});
  ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
  Buffer place = t.server.engine.allocate(kLongest, Pool::lease);
  ASSERT_TRUE(place);
  const std::byte* found = nullptr;
  ConnectionHandlers handlers = t.server.handlers();
  handlers.on_offer = [&](Connection, Offer& o) {
    if (o.size() == 5000) return o.refuse();
    if (o.size() == 6000) {
      EXPECT_EQ(o.place(place.slice()), Status::ok);
    }
  };
  handlers.on_message = [&](Connection, Message& m) {
    EXPECT_TRUE(Node::holds(m.bytes(), Nodes::seed(m.size())));
    if (m.size() == 6000) {
      found = m.data();
      EXPECT_FALSE(m.take()) << "the application has chosen the memory";
    }
    t.came.push_back(m.size());
  };
  EXPECT_EQ(t.ends.server.set_handlers(handlers), Status::ok);
  t.send_all({5000, 6000, 7000});
  ASSERT_TRUE(t.until([&] { return t.came.size() == 3; }));
  EXPECT_EQ(t.came, (std::vector<std::size_t>{8192, 6000, 7000}));
  EXPECT_EQ(found, place.data());
  EXPECT_TRUE(t.server.engine.audit());
  place = Buffer();
  t.finish();
}

TEST_F(EngineLongDirectMessages, AreOfferedToAHandlerThatOnAcceptHasSet) {
  Node server(long_config()), client(long_config());
  server.has_on_offer = client.has_on_offer = false;
  std::size_t offered = 0;
  server.on_accept = [&](Connection c) {
    ConnectionHandlers handlers = server.handlers();
    handlers.on_offer = [&](Connection, Offer& o) {
      offered = o.size();
      o.refuse();
    };
    EXPECT_EQ(c.set_handlers(handlers), Status::ok);
  };
  server.listen();
  Ends ends = connect(client, server);
  Status ended = Status::ok;
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    return ends.client.send(client.filled(8192, 1),
                            [&](const Completion& c) { ended = c.status; }) == Status::ok;
  }));
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return ended != Status::ok; }));
  EXPECT_EQ(ended, Status::refused);
  EXPECT_EQ(offered, 8192u);
  EXPECT_EQ(server.messages, 0u);
  engine_test::finish(client, server);
}

TEST_F(EngineLongDirectMessages, KeptOnesTakeBlocksOfTheirPoolUntilItIsEmpty) {
  Nodes t;
  std::vector<Buffer> kept;
  bool empty = false;
  t.server.on_message = [&](Connection, Message& m) {
    Buffer taken = m.take();
    ++t.server.messages;
    if (!taken) {
      empty = true;
      EXPECT_TRUE(Node::holds(m.bytes(), Nodes::seed(m.size()))) << "still there to be read";
      return;
    }
    EXPECT_EQ(taken.size(), m.size());
    kept.push_back(std::move(taken));
  };
  for (int i = 0; i < 1000 && !empty; ++i) {
    ASSERT_NO_FATAL_FAILURE(t.send_all({kLongest}));
    ASSERT_TRUE(
        t.until([&] { return t.server.messages >= 2 * (static_cast<std::uint64_t>(i) + 1); }));
  }
  EXPECT_TRUE(empty);
  EXPECT_EQ(t.server.engine.stats().unkept_messages, 1u);
  EXPECT_GT(kept.size(), 64u);
  for (const Buffer& each : kept)
    ASSERT_TRUE(Node::holds({each.data(), each.size()}, Nodes::seed(kLongest)));
  kept.clear();
  empty = false;
  ASSERT_NO_FATAL_FAILURE(t.send_all({kLongest}));
  ASSERT_TRUE(t.until([&] { return !kept.empty(); }));
  EXPECT_FALSE(empty);
  EXPECT_EQ(t.server.engine.stats().unkept_messages, 1u);
  kept.clear();
  EXPECT_TRUE(t.server.engine.audit());
  t.finish();
}

TEST_F(EngineLongDirectMessages, DoNotOvertakeARendezvousMessage) {
  Nodes t;
  const std::vector<std::size_t> sizes = {kRendezvous, 8192, 100, kLongest, kRendezvous, 8193};
  std::vector<std::size_t> sent;
  for (int round = 0; round < 20; ++round) {
    ASSERT_NO_FATAL_FAILURE(t.send_all(sizes));
    sent.insert(sent.end(), sizes.begin(), sizes.end());
  }
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent.size(); }));
  EXPECT_EQ(t.came, sent);
  for (const Node* node : {&t.server, &t.client})
    EXPECT_TRUE(node->engine.audit()) << node->engine.audit().error().message();
  t.finish();
}

TEST_F(EngineLongDirectMessages, AWindowOf32NeedsNoRendezvous) {
  Nodes t;
  for (int i = 0; i < 200; ++i) ASSERT_NO_FATAL_FAILURE(t.send_all({32}));  // warms credit up
  ASSERT_TRUE(t.until([&] { return t.came.size() == 200; }));
  for (int round = 0; round < 3; ++round) {
    t.came.clear();
    for (int i = 0; i < 32; ++i) ASSERT_EQ(t.send(kLongest), Status::ok) << i;
    EXPECT_EQ(t.ends.client.stats().outstanding, 0u) << round;
    ASSERT_TRUE(t.until([&] { return t.came.size() == 32; }));
  }
  t.finish();
}

TEST_F(EngineLongDirectMessages, OneWithoutCreditIsRefusedThoughSomeComesMeanwhile) {
  constexpr std::size_t kSize = kEager + 1;
  Nodes t;
  std::size_t sent = 0;
  while (t.send(kSize) == Status::ok) ++sent;
  auto& context = spinwire::detail::core_of(t.client.engine)->context;
  agent::Agent& a = context.agents.at(0);
  ASSERT_TRUE(agent::is_ready(a));
  Buffer body = t.client.filled(kSize, Nodes::seed(kSize));
  const CompletionCallback none;
  const agent::Request request{
      spinwire::detail::block_of(body), body.data(), kSize, nullptr, 0, none, false};
  ASSERT_FALSE(
      agent::send_long_direct(context, a, request.block, body.data(), kSize, none, false, false));
  ASSERT_TRUE(until({&t.server}, [&] { return agent::visible_credits(a) != 0; }));
  EXPECT_EQ(agent::submit_rendezvous(context, a, request, false), Status::would_block);
  body.reset();
  EXPECT_TRUE(t.goes_directly(kSize));
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent + 1; }));
  t.finish();
}

TEST_F(EngineLongDirectMessages, OneThatLacksCreditAndABlockLeavesTheNextOneAlone) {
  constexpr std::size_t kSize = kEager + 1;
  Nodes t;
  std::size_t sent = 0;
  while (t.send(kSize) == Status::ok) ++sent;
  Buffer next = t.client.filled(kSize, Nodes::seed(kSize));
  std::vector<Buffer> taken;
  for (std::size_t size = 2u << 20; size >= 256; size /= 2) {
    for (;;) {
      auto block = t.client.engine.allocate(size);
      if (!block) break;
      taken.push_back(std::move(block));
    }
  }
  const std::vector<std::byte> bytes(kSize);
  ASSERT_EQ(t.ends.client.send_copy(bytes), Status::no_buffer);
  taken.clear();
  ASSERT_TRUE(t.until([&] { return t.ends.client.stats().send_credits != 0; }));
  EXPECT_EQ(t.ends.client.send_with_imm(next.slice(), 1), Status::ok);
  next.reset();
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent + 1; }));
  t.finish();
}

TEST_F(EngineLongDirectMessages, MoreThanTheLaneHoldsGoByRendezvousForAWhile) {
  Nodes t;
  narrow_lanes(t.client.engine);
  std::vector<std::size_t> sent;
  // Warms credit up.
  for (int i = 0; i < 200; ++i) {
    ASSERT_NO_FATAL_FAILURE(t.send_all({32}));
    sent.push_back(32);
  }
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent.size(); }));
  std::uint32_t burst = 0;
  for (; burst < 20 && t.send(kLongest) == Status::ok; ++burst) sent.push_back(kLongest);
  EXPECT_GT(burst, spinwire::softverbs::kLaneData / kLongest);
  EXPECT_NE(t.ends.client.stats().outstanding, 0u) << "those that found no room";
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent.size(); }));
  EXPECT_FALSE(t.goes_directly(kLongest));
  sent.push_back(kLongest);
  for (int i = 0; i < 256; ++i) {
    ASSERT_NO_FATAL_FAILURE(t.send_all({5000}));
    sent.push_back(5000);
  }
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent.size(); }));
  EXPECT_TRUE(t.goes_directly(kLongest));
  sent.push_back(kLongest);
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent.size(); }));
  EXPECT_EQ(t.came, sent);
  t.finish();
}

TEST_F(EngineLongDirectMessages, NeedBothEndsAndAPoolForThoseThatAreKept) {
  Config without_pool = long_config();
  without_pool.memory.rendezvous_bytes = 0;
  without_pool.connections.max_message_bytes = without_pool.connections.eager_bytes;
  const Config by_work_requests = without_direct_messages(long_config());
  {
    Nodes t(by_work_requests, long_config());
    EXPECT_FALSE(t.goes_directly(8192));
    ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
    t.finish();
  }
  {
    Nodes t(long_config(), by_work_requests);
    EXPECT_FALSE(t.goes_directly(8192));
    ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
    t.finish();
  }
  {
    Nodes t(without_pool, long_config());
    EXPECT_EQ(t.send(8192), Status::message_too_long);
    t.finish();
  }
  {
    Config shorter = long_config();
    shorter.connections.max_message_bytes = 10000;
    Nodes t(shorter, long_config());
    EXPECT_TRUE(t.goes_directly(10000));
    EXPECT_EQ(t.send(10001), Status::message_too_long);
    ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
    t.finish();
  }
}

// Otherwise the same message would be taken or refused, depending on the room in the lane.
TEST_F(EngineLongDirectMessages, OfTheApplicationsOwnMemoryNeedTheRightToRead) {
  constexpr std::size_t kSize = 8192;
  std::vector<std::byte> own(kLongest);
  for (std::size_t i = 0; i < own.size(); ++i)
    own[i] = Node::pattern(Nodes::seed(kSize), static_cast<std::uint32_t>(i));
  Config blind = long_config();
  blind.queue_pair.access = spinwire::Access::remote_write;
  Nodes t(long_config(), blind);
  spinwire::MemoryRegion region = *t.client.engine.register_memory(own, spinwire::Access::local);
  const auto send = [&](std::size_t size) { return t.ends.client.send(region.slice(0, size)); };
  ASSERT_NO_FATAL_FAILURE(t.send_all(std::vector<std::size_t>(200, 32)));  // warms credit up
  ASSERT_TRUE(t.until([&] { return t.came.size() == 200; }));
  EXPECT_TRUE(t.goes_directly(kLongest)) << "memory of the pools";
  for (const std::size_t size : {kEager + 1, kSize, kLongest})
    EXPECT_EQ(send(size), Status::message_too_long) << size;
  narrow_lanes(t.client.engine);
  std::size_t sent = 201;
  for (int i = 0; i < 20 && t.ends.client.stats().outstanding == 0; ++i)
    sent += t.send(kLongest) == Status::ok ? 1u : 0u;
  EXPECT_NE(t.ends.client.stats().outstanding, 0u) << "one by rendezvous";
  EXPECT_EQ(send(kSize), Status::message_too_long) << "the lane is full";
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent; }));
  // These are copied, and these are short.
  const std::array<BufferSlice, 2> parts = {region.slice(0, 4000),
                                            region.slice(4000, kSize - 4000)};
  ASSERT_TRUE(t.until([&] { return t.ends.client.send(parts) == Status::ok; }));
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent + 1; }));
  t.server.on_message = [&](Connection, Message& m) { t.came.push_back(m.size()); };
  ASSERT_TRUE(t.until([&] { return send(kEager) == Status::ok; }));
  ASSERT_TRUE(t.until([&] { return t.came.size() == sent + 2; }));
  EXPECT_EQ(t.came.back(), kEager);
  ASSERT_TRUE(t.until([&] { return t.ends.client.stats().outstanding == 0; }));
  region = {};
  t.finish();
}

TEST_F(EngineLongDirectMessages, AFailedPeerAndAClosedConnectionLoseNone) {
  Nodes t;
  ASSERT_NO_FATAL_FAILURE(t.send_all({kLongest}));
  ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
  ASSERT_TRUE(t.until([&] { return t.send(kLongest) == Status::ok; }));
  EXPECT_EQ(t.ends.client.close(), Status::ok);  // behind the message
  ASSERT_TRUE(t.until([&] { return !t.server.closed.empty(); }));
  EXPECT_EQ(t.came.size(), 2u);
  EXPECT_EQ(t.server.closed.front().status, Status::ok);
}

TEST_F(EngineLongDirectMessages, ThoseThatArriveWhileAConnectionClosesAreDropped) {
  Nodes t;
  ASSERT_NO_FATAL_FAILURE(t.send_all({kLongest}));
  ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
  for (int i = 0; i < 3; ++i) (void)t.send(kLongest);
  EXPECT_EQ(t.ends.server.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return !t.server.closed.empty() && !t.client.closed.empty(); }));
  EXPECT_EQ(t.server.closed.front().status, Status::ok);
  EXPECT_EQ(t.client.closed.front().status, Status::ok);
  EXPECT_TRUE(t.server.engine.audit());
}

// The sender need not know yet that its peer closes, and has refused the message before.
TEST_F(EngineLongDirectMessages, OneBehindARefusedMessageDoesNotEndAnOrderlyClose) {
  Config config = long_config();
  config.connections.close_timeout = 20s * slowness();  // the server waits a second for memory
  Nodes t(config);
  ASSERT_NO_FATAL_FAILURE(t.send_all(std::vector<std::size_t>(50, 32)));  // for more credit
  ASSERT_TRUE(t.until([&] { return t.came.size() == 50; }));
  std::vector<Buffer> used;  // so that the server has no memory for the first message
  while (Buffer b = t.server.engine.allocate(kRendezvous, Pool::rendezvous))
    used.push_back(std::move(b));
  Status first = Status::ok;
  ASSERT_TRUE(t.until([&] {
    return t.send(kRendezvous, [&](const Completion& c) { first = c.status; }) == Status::ok;
  }));
  const auto& receives =
      (*spinwire::detail::core_of(t.server.engine)->context.agents.begin()).rendezvous.receives;
  ASSERT_TRUE(t.until([&] { return !receives.empty(); }));
  // The close waits until the client has this message.
  ASSERT_EQ(t.ends.server.send(t.server.filled(kRendezvous, 1)), Status::ok);
  EXPECT_EQ(t.ends.server.close(), Status::ok);
  ASSERT_TRUE(until({}, [&] {
    (void)t.server.poll();
    (void)t.client.poll();
    return first != Status::ok;
  }));
  EXPECT_TRUE(t.ends.client.ready()) << "the client knows of no close";
  ASSERT_EQ(t.send(kLongest), Status::ok);
  EXPECT_EQ(t.ends.client.stats().outstanding, 0u) << "it has gone directly";
  ASSERT_TRUE(t.until([&] { return !t.server.closed.empty() && !t.client.closed.empty(); }));
  EXPECT_EQ(t.server.closed.front().status, Status::ok);
  EXPECT_EQ(t.client.closed.front().status, Status::ok);
  EXPECT_EQ(t.client.messages, 1u);
  EXPECT_EQ(t.server.engine.stats().bad_messages, 0u);
  used.clear();
  EXPECT_TRUE(t.server.engine.audit());
}

/// Long messages one way, some of which are taken.
class LongDirectLoad {
 public:
  explicit LongDirectLoad(zero_cost_test::Turns turns) : turns_(turns) {
    nodes_.server.on_message = [this](Connection, Message& m) {
      ++seen_;
      if (seen_ % 4 == 0) taken_ = m.take();
    };
  }
  void run(std::uint32_t count) {
    for (std::uint32_t i = 0; i < count / 20; ++i) {
      sent_ += nodes_.ends.client.send(message_.slice()) == Status::ok ? 1 : 0;
      zero_cost_test::turn(turns_, nodes_.server.engine, nodes_.client.engine);
    }
  }
  [[nodiscard]] bool worked() const { return seen_ > 100 && sent_ - seen_ < 16; }

 private:
  zero_cost_test::Turns turns_;
  static Config manual_config() {
    Config c = long_config();
    c.engine.control = ControlMode::manual;
    return c;
  }
  Nodes nodes_{manual_config(), manual_config()};
  Buffer message_ = nodes_.client.filled(kLongest, Nodes::seed(kLongest));
  Buffer taken_;
  std::uint64_t sent_ = 0, seen_ = 0;
};

#if SPINWIRE_TEST_COUNTS_HEAP
TEST_F(EngineLongDirectMessages, TakeNoHeap) { zero_cost_test::expect_no_heap<LongDirectLoad>(); }
#endif

TEST_F(EngineLongDirectMessages, MakeNoSystemCalls) {
  zero_cost_test::expect_no_system_calls<LongDirectLoad>();
}

}  // namespace
}  // namespace long_direct_messages_test
