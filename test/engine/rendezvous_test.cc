// Messages longer than one receive: offered, pulled, and delivered in order with other messages.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "engine/harness.h"

namespace long_messages_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Offer;

constexpr std::uint32_t kMiB = 1u << 20;

Config long_config() {
  Config c = small_config();
  c.memory.send_bytes = 24u << 20;
  c.memory.rendezvous_bytes = 8u << 20;
  c.memory.windows = 32;
  c.connections.max_message_bytes = 4 * kMiB;
  c.connections.rendezvous_timeout = 20s * slowness();  // nothing expires unless a test moves time
  c.connections.credit_idle_timeout = 1s * slowness();
  return c;
}
/// As on a device without windows: each message has a registration.
Config without_windows() {
  Config c = long_config();
  c.memory.windows = 0;
  return c;
}

/// A received message: its length, whether its bytes were right, its immediate.
struct Came {
  std::size_t size;
  bool right;
  std::optional<std::uint32_t> immediate;
  bool is_write;
};

struct Long : Pair {
  explicit Long(const Config& c = long_config(), const std::uint64_t* ticks = nullptr)
      : Pair(c, ticks) {
    listen_to(server);
  }
  Long(const Config& servers, const Config& clients) : Pair(servers, clients) { listen_to(server); }
  void listen_to(Node& node) {
    node.on_message = [this](Connection, Message& m) {
      came.push_back({m.size(), m.is_write() || Node::holds(m.bytes(), seed(m.size())),
                      m.immediate(), m.is_write()});
      if (keep) kept.push_back(m.take());
    };
  }
  static std::uint32_t seed(std::size_t size) { return static_cast<std::uint32_t>(size % 251); }
  Status send(std::size_t size) {
    const Buffer b = client.filled(size, seed(size));
    return client.tally.run(
        [&](const CompletionCallback& done) { return ends.client.send(b, done); });
  }
  /// Waits until the peer grants credit for several at once.
  void warm_up() {
    const Buffer b = client.filled(8, Long::seed(8));
    ASSERT_TRUE(until([&] {
      (void)ends.client.send(b);
      return ends.client.stats().send_credits > 24;
    }));
    ASSERT_TRUE(until([&] { return ends.client.stats().outstanding == 0; }));
    settle(20);
    came.clear();
    kept.clear();
  }
  void finish() {
    kept.clear();
    Pair::finish();
  }
  std::vector<Came> came;
  std::vector<Buffer> kept;
  bool keep = false;
};

/// How the sender's memory is opened.
enum class By { window, registration, own_domain };

Config config_by(By by, std::uint64_t send_bytes) {
  Config c = by == By::window ? long_config() : without_windows();
  c.memory.send_bytes = send_bytes;
  if (by == By::own_domain) {
    c.connections.own_domains = 2;
    c.memory.receive_bytes = 4u << 20;
  }
  return c;
}

/// With own protection domains at both ends, if requested.
struct LongBy : Long {
  explicit LongBy(By by, std::uint64_t send_bytes = 24u << 20) : Long(config_by(by, send_bytes)) {
    if (by == By::own_domain) use_own_domains(*this);
  }
};

class EngineLongMessages : public testing::TestWithParam<By> {};
INSTANTIATE_TEST_SUITE_P(By, EngineLongMessages,
                         testing::Values(By::window, By::registration, By::own_domain),
                         [](const auto& by) {
                           return by.param == By::window         ? "Window"
                                  : by.param == By::registration ? "Registration"
                                                                 : "OwnDomain";
                         });

TEST_P(EngineLongMessages, ArriveWholeOnceInOrder) {
  LongBy t(GetParam());
  t.warm_up();
  const auto sent_before = t.ends.client.stats().messages_sent;
  EXPECT_EQ(t.ends.client.max_message(), 4 * kMiB);
  const std::size_t sizes[] = {
      0,      511,  512,          513,      4096, 4097, 8191, 100000, 128 * 1024, 128 * 1024 + 1,
      300000, kMiB, 4 * kMiB - 1, 4 * kMiB, 1,    5000};
  for (const std::size_t size : sizes) {
    ASSERT_EQ(t.send(size), Status::ok) << size;
    ASSERT_TRUE(t.until([&] { return t.client.tally.outstanding() < 3; }));
  }
  ASSERT_TRUE(t.until([&] { return t.came.size() == std::size(sizes); }));
  for (std::size_t i = 0; i < std::size(sizes); ++i) {
    EXPECT_EQ(t.came[i].size, sizes[i]);
    EXPECT_TRUE(t.came[i].right) << sizes[i];
    EXPECT_FALSE(t.came[i].immediate);
  }
  ASSERT_TRUE(t.until([&] { return t.client.tally.outstanding() == 0; }));
  EXPECT_EQ(t.client.tally.bytes,
            std::accumulate(std::begin(sizes), std::end(sizes), std::size_t{0}));
  EXPECT_EQ(t.ends.client.stats().messages_sent - sent_before, std::size(sizes));
  EXPECT_EQ(t.ends.server.stats().messages_received, t.ends.client.stats().messages_sent);
  t.finish();
}

TEST_P(EngineLongMessages, TakeTurnsWithEverythingElseThatIsOrdered) {
  LongBy t(GetParam());
  Buffer target = t.server.buffer(64, Pool::lease);
  const auto region = t.ends.server.expose(target.slice(), Access::remote_write);
  ASSERT_TRUE(region);
  Buffer small = t.client.filled(40, Long::seed(40));
  Buffer large = t.client.filled(200000, Long::seed(200000));
  std::uint32_t sent = 0;
  std::mt19937 random(7);
  std::vector<std::uint32_t> kinds;
  const std::uint32_t many = amount(5000);
  ASSERT_TRUE(t.until([&] {
    for (int burst = 0; burst < 8 && sent < many; ++burst) {
      const std::uint32_t kind = random() % 16;
      const auto post = random() % 2 == 0 ? Post::now : Post::defer;
      const Status status =
          kind == 0  ? t.ends.client.send_with_imm(large.slice(), sent, {}, post)
          : kind < 8 ? t.ends.client.send_with_imm(small.slice(), sent, {}, post)
                     : t.ends.client.write_with_imm(small.slice(), *region, sent, {}, post);
      if (status != Status::ok) {
        EXPECT_EQ(status, Status::would_block);
        break;
      }
      kinds.push_back(kind);
      ++sent;
    }
    (void)t.client.engine.flush();
    return t.came.size() == many || !t.client.closed.empty();
  }));
  ASSERT_TRUE(t.client.closed.empty()) << t.client.closed.front().message();
  for (std::uint32_t i = 0; i < many; ++i) {
    ASSERT_EQ(t.came[i].immediate, i);
    ASSERT_EQ(t.came[i].is_write, kinds[i] >= 8);
    ASSERT_TRUE(t.came[i].right);
  }
  EXPECT_EQ(t.server.engine.revoke(*region), Status::ok);
  for (Buffer* each : {&target, &small, &large}) each->reset();
  t.finish();
}

TEST_P(EngineLongMessages, GoBothWaysAtOnce) {
  LongBy t(GetParam());
  t.listen_to(t.client);
  std::uint32_t back = 0;
  for (std::uint32_t sent = 0; sent < 20 || back < 20;) {
    const Buffer there = t.client.filled(70000, Long::seed(70000));
    const Buffer here = t.server.filled(90000, Long::seed(90000));
    if (sent < 20 && t.ends.client.send(there) == Status::ok) ++sent;
    if (back < 20 && t.ends.server.send(here) == Status::ok) ++back;
    (void)(t.client.poll() + t.server.poll());
    ASSERT_TRUE(t.client.closed.empty()) << t.client.closed.front().message();
  }
  ASSERT_TRUE(t.until([&] { return t.came.size() == 40; }));
  for (const Came& c : t.came) EXPECT_TRUE(c.right);
  t.finish();
}

TEST_P(EngineLongMessages, EndWithTheirConnection) {
  // Closed by either end, or broken, at each stage of a transfer.
  for (int steps = 0; steps<12; steps += slowness()> 1 ? 3 : 1) {
    LongBy t(GetParam(), 10u << 20);
    t.warm_up();
    for (int i = 0; i < 4; ++i) ASSERT_EQ(t.send(600000), Status::ok);
    for (int i = 0; i < steps; ++i) (void)(t.server.poll() + t.client.poll());
    EXPECT_EQ((steps % 2 == 0 ? t.ends.client : t.ends.server).close(), Status::ok);
    ASSERT_TRUE(t.until([&] {
      return t.client.engine.stats().connections + t.server.engine.stats().connections == 0;
    }));
    EXPECT_EQ(t.client.tally.outstanding(), 0u);
    EXPECT_EQ(t.client.tally.ended(Status::ok) + t.client.tally.ended(Status::flushed), 4u);
    // A normal close at the sender's end waits for accepted messages.
    if (steps % 2 == 0) {
      EXPECT_EQ(t.client.tally.ended(Status::ok), 4u) << steps;
      EXPECT_EQ(t.came.size(), 4u);
    }
    // Windows that were in use are allocated again.
    ASSERT_TRUE(t.until([&] {
      return t.client.engine.stats().windows_free == (t.client.engine.device().memory_windows
                                                          ? t.client.engine.config().memory.windows
                                                          : 0);
    }));
    t.finish();
  }
}

TEST_P(EngineLongMessages, EndWithTheirEngine) {
  LongBy t(GetParam());
  t.warm_up();
  for (int i = 0; i < 4; ++i) ASSERT_EQ(t.send(600000), Status::ok);
  for (int i = 0; i < 3; ++i) (void)(t.server.poll() + t.client.poll());
  t.client.ready.clear();
  t.client.engine = spinwire::Engine();
  EXPECT_EQ(t.client.tally.outstanding(), 0u);
  ASSERT_TRUE(until({&t.server}, [&] { return t.server.engine.stats().connections == 0; }));
  t.server.expect_clean();
}

TEST(EngineLongMessages, ArriveWhereTheApplicationWants) {
  Long t;
  Buffer own = t.server.buffer(300000, Pool::lease);
  Buffer theirs = t.client.buffer(300000, Pool::lease);
  std::size_t offered = 0;
  t.server.on_offer = [&](Connection, Offer& o) {
    ++offered;
    EXPECT_EQ(o.size(), 200000u);
    EXPECT_EQ(o.immediate(), 99u);
    EXPECT_EQ(o.place(own.slice(0, 199999)), Status::out_of_bounds);
    EXPECT_EQ(o.place({}), Status::out_of_bounds);
    EXPECT_EQ(o.place(theirs), Status::invalid_argument);
    EXPECT_EQ(o.place(own.slice(1000, 200001)), Status::ok);
    EXPECT_EQ(o.place(theirs), Status::invalid_argument) << "the first place stays";
  };
  Buffer b = t.client.filled(200000, Long::seed(200000));
  ASSERT_EQ(t.ends.client.send_with_imm(b.slice(), 99), Status::ok);
  const std::byte* at = nullptr;
  bool taken = true;
  t.server.on_message = [&](Connection, Message& m) {
    at = m.data();
    taken = static_cast<bool>(m.take());
    t.came.push_back(
        {m.size(), Node::holds(m.bytes(), Long::seed(m.size())), m.immediate(), false});
  };
  ASSERT_TRUE(t.until([&] { return !t.came.empty(); }));
  EXPECT_EQ(offered, 1u);
  EXPECT_EQ(at, own.data() + 1000);
  EXPECT_TRUE(t.came[0].right);
  EXPECT_EQ(t.came[0].immediate, 99u);
  EXPECT_FALSE(taken) << "it is the application's already";
  EXPECT_EQ(t.server.engine.memory_stats(Pool::rendezvous).blocks_used, 0u);
  own.reset();
  theirs.reset();
  b.reset();
  t.finish();
}

TEST(EngineLongMessages, AreRefusedByTheApplication) {
  Long t;
  t.warm_up();
  int offers = 0;
  t.server.on_offer = [&](Connection, Offer& o) {
    if (++offers % 2 == 1) o.refuse();
  };
  for (int i = 0; i < 6; ++i) {
    ASSERT_EQ(t.send(50000 + static_cast<std::size_t>(i)), Status::ok);
    ASSERT_EQ(t.send(10), Status::ok);
  }
  ASSERT_TRUE(t.until([&] { return t.client.tally.outstanding() == 0; }));
  EXPECT_EQ(t.client.tally.ended(Status::refused), 3u);
  EXPECT_EQ(t.client.tally.ended(Status::ok), 9u);
  std::vector<std::size_t> sizes;
  for (const Came& c : t.came) sizes.push_back(c.size);
  EXPECT_EQ(sizes, (std::vector<std::size_t>{10, 50001, 10, 10, 50003, 10, 10, 50005, 10}));
  t.finish();
}

TEST(EngineLongMessages, WaitForABlockAndAreRefusedInTime) {
  std::uint64_t now = 1'000'000'000;
  Config config = long_config();
  config.connections.rendezvous_timeout = 50ms;
  Long t(config, &now);  // the pool has four chunks of 2 MiB, each for one of a MiB and more
  t.warm_up();
  t.keep = true;
  for (int i = 0; i < 4; ++i) ASSERT_EQ(t.send(3 * kMiB / 2), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.came.size() == 4 && t.client.tally.outstanding() == 0; }));
  // Two wait; the returned block serves the first, and no message overtakes.
  ASSERT_EQ(t.send(3 * kMiB / 2), Status::ok);
  ASSERT_EQ(t.send(kMiB + 1), Status::ok);
  ASSERT_EQ(t.send(7), Status::ok);
  t.settle(50);
  EXPECT_EQ(t.came.size(), 4u);
  t.kept.pop_back();
  ASSERT_TRUE(t.until([&] { return t.came.size() >= 5; }));
  t.settle(50);
  EXPECT_EQ(t.came.size(), 5u) << "the second waits";
  ASSERT_TRUE(t.until([&] {
    now += 1'000'000;
    return t.came.size() >= 6;
  }));
  EXPECT_EQ(t.came[4].size, 3 * kMiB / 2);
  EXPECT_TRUE(t.came[4].right);
  EXPECT_EQ(t.came[5].size, 7u);
  ASSERT_TRUE(t.until([&] { return t.client.tally.outstanding() == 0; }));
  EXPECT_EQ(t.client.tally.ended(Status::no_buffer), 1u);
  t.finish();
}

TEST(EngineLongMessages, LongerThanThePoolAreRefusedAtOnceButMayBePlaced) {
  Config receiver = long_config();
  Long t(receiver, long_config());
  // As if the receiver's pool were smaller than its handshake said.
  Buffer own = t.server.buffer(kMiB, Pool::send);
  t.server.on_offer = [&](Connection, Offer& o) { EXPECT_EQ(o.place(own), Status::ok); };
  ASSERT_EQ(t.send(kMiB), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
  EXPECT_TRUE(t.came[0].right);
  own.reset();
  t.finish();
}

TEST(EngineLongMessages, RefusalsTakeNothing) {
  Config config = long_config();
  config.connections.direct_messages = spinwire::DirectPath::off;  // so that windows are used
  Long t(config);
  EXPECT_EQ(t.send(4 * kMiB + 1), Status::message_too_long);
  t.warm_up();
  Buffer b = t.client.filled(8192, Long::seed(8192));
  // Either all 32 windows or the credit is used up; the rest is refused and sent later.
  int accepted = 0;
  while (t.ends.client.send(b) == Status::ok) ++accepted;
  EXPECT_GT(accepted, 0);
  EXPECT_LE(accepted, t.client.engine.device().memory_windows ? 32 : 256);
  const auto before = t.ends.client.stats();
  EXPECT_EQ(t.ends.client.send(b), Status::would_block);
  EXPECT_EQ(t.ends.client.stats().send_credits, before.send_credits);
  EXPECT_EQ(before.outstanding, static_cast<std::uint32_t>(accepted));
  EXPECT_EQ(t.ends.client.stats().outstanding, before.outstanding);
  ASSERT_TRUE(t.until([&] { return t.came.size() == static_cast<std::size_t>(accepted); }));
  while (accepted < 200) {
    if (t.ends.client.send(b) == Status::ok) ++accepted;
    (void)(t.client.poll() + t.server.poll());
  }
  ASSERT_TRUE(t.until([&] { return t.came.size() == 200; }));
  b.reset();
  t.finish();
}

TEST(EngineLongMessages, OneThatHoldsItsLineUpStopsNoOther) {
  Long t;
  t.warm_up();
  Ends other = connect(t.client, t.server);
  std::uint64_t arrived = 0;
  t.server.on_message = [&](Connection c, Message& m) {
    if (c == other.server) return void(++arrived);
    t.kept.push_back(m.take());
  };
  // Four are kept and the fifth waits; later messages of the first connection are held back.
  for (int i = 0; i < 4; ++i) ASSERT_EQ(t.send(3 * kMiB / 2), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.kept.size() == 4; }));
  ASSERT_EQ(t.send(3 * kMiB / 2), Status::ok);
  Buffer b = t.client.filled(100, 1);
  std::uint64_t behind = 0, sent = 0;
  ASSERT_TRUE(t.until([&] {
    while (t.ends.client.send(b) == Status::ok) ++behind;
    while (other.client.send(b) == Status::ok) ++sent;
    return arrived > 1000;
  }));
  EXPECT_LE(behind, 64u) << "no more than the credit that it had";
  t.kept.clear();
  ASSERT_TRUE(t.until([&] { return arrived == sent && t.client.tally.outstanding() == 0; }));
  ASSERT_TRUE(t.until([&] { return t.kept.size() == behind + 1 || t.kept.size() == behind; }));
  b.reset();
  t.finish();
}

TEST(EngineLongMessages, ThatAreThereEndWellThoughTheReceiverCloses) {
  Long t;
  t.warm_up();
  t.server.on_message = [&](Connection c, Message& m) {
    t.came.push_back({m.size(), Node::holds(m.bytes(), Long::seed(m.size())), {}, false});
    EXPECT_EQ(c.close(), Status::ok);
  };
  ASSERT_EQ(t.send(100000), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.client.engine.stats().connections == 0; }));
  EXPECT_EQ(t.came.size(), 1u);
  EXPECT_EQ(t.client.tally.ended(Status::ok), 1u);
  t.finish();
}

TEST(EngineLongMessages, OfTwoEndsThatCloseAtOnceDoNotWaitForEachOther) {
  Config c = long_config();
  c.connections.close_timeout = 200s;  // more than until() waits
  Long t(c);
  t.warm_up();
  t.came.clear();
  // Credit for the other direction, too.
  const Buffer small = t.server.filled(8, 1);
  ASSERT_TRUE(t.until([&] {
    (void)t.ends.server.send(small);
    return t.ends.server.stats().send_credits > 8;
  }));
  const Buffer b = t.server.filled(600000, Long::seed(600000));
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(t.send(600000), Status::ok);
    ASSERT_EQ(t.server.tally.run([&](auto done) { return t.ends.server.send(b, done); }),
              Status::ok);
  }
  EXPECT_EQ(t.ends.client.close(), Status::ok);
  EXPECT_EQ(t.ends.server.close(), Status::ok);
  ASSERT_TRUE(t.until([&] {
    return t.client.engine.stats().connections + t.server.engine.stats().connections == 0;
  }));
  EXPECT_TRUE(t.client.tally.idle() && t.server.tally.idle());
  for (const Node* n : {&t.client, &t.server}) {
    ASSERT_EQ(n->closed.size(), 1u);
    EXPECT_EQ(n->closed[0].status, Status::ok) << n->closed[0].message();
  }
}

TEST(EngineLongMessages, OneThatClosesInTheLineForABlockIsPassedOver) {
  std::uint64_t now = 1'000'000'000;
  Config config = long_config();
  config.connections.rendezvous_timeout = 200ms;
  Long t(config, &now);
  t.warm_up();
  t.keep = true;
  Ends other = connect(t.client, t.server);
  // The pool is used up; the first connection waits for a block, then the second, which closes.
  for (int i = 0; i < 4; ++i) ASSERT_EQ(t.send(3 * kMiB / 2), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.came.size() == 4 && t.client.tally.idle(); }));
  ASSERT_EQ(t.send(3 * kMiB / 2), Status::ok);
  t.settle(20);
  Buffer b = t.client.filled(3 * kMiB / 2, 1);
  Status ended = Status::ok;
  ASSERT_EQ(other.client.send(b, [&](const Completion& c) { ended = c.status; }), Status::ok);
  t.settle(20);
  // It cannot end before the first one's time limit: the peer does not answer.
  EXPECT_EQ(other.server.close(), Status::ok);
  for (int ms = 0; ms < 300; ++ms) {
    now += 1'000'000;
    (void)t.server.poll();
  }
  ASSERT_TRUE(t.until(
      [&] { return t.client.tally.idle() && other.client.state() == ConnectionState::closed; }));
  EXPECT_EQ(t.client.tally.ended(Status::no_buffer), 1u);
  EXPECT_EQ(ended, Status::flushed);
  b.reset();
  t.finish();
}

TEST(EngineLongMessages, ShortOnesDoNotTakeTheBlocksThatALongOneWaitsFor) {
  Long t;
  t.warm_up();
  t.keep = true;
  Ends other = connect(t.client, t.server);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(t.send(3 * kMiB / 2), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.came.size() == 4 && t.client.tally.idle(); }));
  // One connection needs two adjacent chunks, the other only one.
  ASSERT_EQ(t.send(3 * kMiB), Status::ok);
  t.settle(20);
  Buffer b = t.client.filled(kMiB, Long::seed(kMiB));
  ASSERT_EQ(other.client.send(b), Status::ok);
  t.settle(20);
  t.kept.erase(t.kept.begin());
  t.settle(200);
  EXPECT_EQ(t.came.size(), 4u) << "one chunk is free, and kept for who was first";
  t.kept.clear();
  ASSERT_TRUE(t.until([&] { return t.came.size() == 6; }));
  EXPECT_EQ(t.came[4].size + t.came[5].size, 4 * kMiB);
  EXPECT_TRUE(t.came[4].right && t.came[5].right);
  ASSERT_TRUE(t.until([&] { return t.client.tally.idle(); }));
  b.reset();
  t.finish();
}

TEST(EngineLongMessages, RefusedAndClosedInOneCallbackAreAnsweredOnce) {
  Long t;
  t.warm_up();
  t.server.on_offer = [](Connection c, Offer& o) {
    EXPECT_EQ(c.close(), Status::ok);
    o.refuse();
  };
  ASSERT_EQ(t.send(50000), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.client.engine.stats().connections == 0; }));
  EXPECT_TRUE(t.client.tally.idle());
  for (const Error& e : t.client.closed) EXPECT_EQ(e.status, Status::ok) << e.message();
  EXPECT_EQ(t.client.engine.stats().bad_messages, 0u);
  t.finish();
}

TEST(EngineLongMessages, NeedTheRightToRead) {
  Long t(without_direct_messages(long_config()));
  spinwire::ConnectOptions options;
  options.handlers = t.client.handlers();
  options.settings.access = Access::remote_write;
  auto blind = t.client.engine.connect(t.server.listener.address(), options);
  ASSERT_TRUE(blind);
  ASSERT_TRUE(t.until([&] { return blind->ready(); }));
  EXPECT_EQ(blind->max_message(), 4096u);
  Buffer b = t.client.filled(5000, Long::seed(5000));
  EXPECT_EQ(blind->send(b), Status::message_too_long);
  EXPECT_EQ(t.ends.client.send(b), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.came.size() == 1; }));
  b.reset();
  t.finish();
}

// A sender that never rests keeps answers waiting. They leave the application credit.
TEST(EngineLongMessages, AStreamOfThemDoesNotStopWhatTheReceiverSends) {
  Long t;
  Buffer own = t.server.filled(8, 1);
  std::uint32_t came = 0, echoed = 0;
  t.server.on_message = [&](Connection c, Message&) {
    ++came;
    echoed += c.send(own) == Status::ok ? 1 : 0;
  };
  Buffer bytes = t.client.filled(200'000, 1);
  // Answers lack credit at times, and wait all the time.
  ASSERT_TRUE(t.until([&] {
    for (const std::size_t size : {8u, 200'000u, 8u, 200'000u})
      (void)t.ends.client.send(bytes.slice(0, size));
    return came >= amount(40'000);
  }));
  EXPECT_GT(echoed, came / 8);
  ASSERT_TRUE(t.until([&] { return t.ends.client.stats().outstanding == 0; }));
  own = Buffer();
  bytes = Buffer();
  t.finish();
}

TEST(EngineLongMessages, ManyConnectionsAreServedInTurn) {
  Config c = long_config();
  c.memory.send_bytes = 40u << 20;
  c.memory.rendezvous_bytes = 24u << 20;
  Node server(c), client(c);
  server.listen();
  std::vector<std::uint32_t> order;
  server.on_message = [&](Connection conn, Message& m) {
    EXPECT_TRUE(Node::holds(m.bytes(), 1));
    order.push_back(conn.index());
  };
  std::vector<Ends> all;
  for (int i = 0; i < 8; ++i) all.push_back(connect(client, server));
  Buffer b = client.filled(2 * kMiB - 64, 1);
  for (Ends& e : all) ASSERT_EQ(e.client.send(b), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return !order.empty(); }));
  // Alone each takes eight polls or more; when the first arrives, the others are nearly done.
  for (int i = 0; i < 8; ++i) (void)(client.poll() + server.poll());
  EXPECT_EQ(order.size(), all.size());
  ASSERT_TRUE(until({&client, &server}, [&] { return order.size() == all.size(); }));
  b.reset();
  finish(client, server);
}

TEST(SlowEngineLongMessages, OfAThousandConnectionsNoneStarves) {
  const std::uint32_t many = amount(1000);
  Config c = small_config();
  c.memory.send_bytes = 8u << 20;
  c.memory.rendezvous_bytes = 64u << 20;
  c.memory.receive_bytes = 16u << 20;
  c.memory.windows = many;
  c.connections.max_message_bytes = 2 * kMiB;
  c.connections.rendezvous_timeout = 20s;
  c.connections.maximum = many;
  c.queues.send_depth = 16;
  c.queues.receive_depth = 2048;
  c.queues.operations = 4096;
  c.queues.completion_depth = 16384;
  Node server(c), client(c);
  server.listen();
  std::vector<Ends> all;
  for (std::uint32_t i = 0; i < many; ++i) all.push_back(connect(client, server));
  std::uint64_t turns = 0;  // in polls, so that a busy machine does not count
  std::vector<std::uint64_t> ended;
  server.on_message = [&](Connection, Message& m) {
    EXPECT_EQ(m.size(), kMiB);
    const bool is_checked = ended.size() % 64 == 0;
    EXPECT_TRUE(!is_checked || Node::holds(m.bytes(), 1));
    ended.push_back(turns);
  };
  Buffer b = client.filled(kMiB, 1);
  for (Ends& e : all) ASSERT_EQ(e.client.send(b), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return ++turns, ended.size() == many; }));
  EXPECT_LT(ended.back(), 3 * ended[many / 2]);
  RecordProperty("turns", std::to_string(ended.back()));
  b.reset();
  finish(client, server);
}

}  // namespace
}  // namespace long_messages_test
