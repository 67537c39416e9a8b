#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/harness.h"

namespace messages_test {
namespace {

using namespace engine_test;  // the names of a test namespace

std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  return x * 0x846ca68bu;
}

/// Sends numbered messages of many sizes as credit and queues allow, and checks the received ones.
class Stream {
 public:
  Stream(Node& node, std::uint32_t salt, std::uint32_t peers_salt, std::uint32_t total)
      : node_(node), salt_(salt), peers_salt_(peers_salt), total_(total) {
    node.on_message = [this](Connection, Message& m) { take(m); };
  }
  static std::size_t size_of(std::uint32_t salt, std::uint32_t i) {
    constexpr std::size_t kEdges[] = {0,  1,   39,  40,   41,   47,   48,
                                      49, 440, 441, 1080, 1081, 4095, 4096};
    const std::uint32_t r = mix(salt + i);
    return r % 4 == 0    ? kEdges[(r >> 8) % std::size(kEdges)]
           : r % 64 == 1 ? r >> 20
                         : (r >> 8) % 96;
  }
  void push(Connection c) {
    for (int burst = 0; sent < total_ && burst < 32; ++burst) {
      const std::size_t size = size_of(salt_, sent);
      Buffer b = node_.engine.allocate(std::max<std::size_t>(size, 1));
      if (!b) return;
      (void)b.resize(size);
      for (std::size_t i = 0; i < size; ++i) b.data()[i] = Node::pattern(salt_ + sent, i);
      const Post post = burst % 3 == 0 ? Post::now : Post::defer;
      const Status s = node_.tally.run([&](CompletionCallback done) {
        if (sent % 5 == 0) return c.send_with_imm(b.slice(), salt_ ^ sent, done, post);
        return c.send(b, done, post);
      });
      if (s == Status::would_block) break;
      ASSERT_EQ(s, Status::ok);
      ++sent;
    }
    ASSERT_EQ(c.flush(), Status::ok);
  }
  void take(Message& m) {
    const std::uint32_t i = received++;
    good = good && m.size() == size_of(peers_salt_, i) && Node::holds(m.bytes(), peers_salt_ + i) &&
           !m.is_write() && m.immediate().has_value() == (i % 5 == 0) &&
           m.immediate().value_or(peers_salt_ ^ i) == (peers_salt_ ^ i);
  }

  std::uint32_t sent = 0;
  std::uint32_t received = 0;
  bool good = true;

 private:
  Node& node_;
  std::uint32_t salt_;
  std::uint32_t peers_salt_;
  std::uint32_t total_;
};

TEST(EngineMessages, ArriveWholeOnceAndInOrderBothWays) {
  Pair p;
  const std::uint32_t kTotal = amount(60000);
  Stream up(p.client, 1000, 77000000, kTotal);
  Stream down(p.server, 77000000, 1000, kTotal);
  ASSERT_TRUE(p.until([&] {
    up.push(p.ends.client);
    down.push(p.ends.server);
    return (up.received == kTotal && down.received == kTotal) || !up.good || !down.good;
  })) << up.sent
      << " " << up.received << " " << down.sent << " " << down.received;
  EXPECT_TRUE(up.good);
  EXPECT_TRUE(down.good);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle() && p.server.tally.idle(); }));
  EXPECT_EQ(p.client.tally.ended(Status::ok), kTotal);
  const auto s = p.ends.client.stats();
  EXPECT_EQ(s.messages_sent, kTotal);
  EXPECT_EQ(s.messages_received, kTotal);
  EXPECT_EQ(s.bytes_sent, p.client.tally.bytes);
  EXPECT_EQ(s.outstanding, 0u);
  EXPECT_EQ(p.server.engine.stats().messages_received, kTotal);
  p.finish();
  EXPECT_EQ(p.server.engine.stats().messages_received, kTotal);
}

TEST(EngineMessages, EverySizeAtTheEdges) {
  Pair p;
  EXPECT_EQ(p.ends.client.max_message(), 4096u);
  std::vector<std::size_t> sizes;
  bool good = true;
  p.server.on_message = [&](Connection, Message& m) {
    good = good && Node::holds(m.bytes(), static_cast<std::uint32_t>(m.size()));
    sizes.push_back(m.size());
  };
  const std::vector<std::size_t> wanted = {0, 1, 39, 40, 41, 55, 56, 57, 440, 441, 4095, 4096};
  for (const std::size_t size : wanted) {
    Buffer b = p.client.filled(size, static_cast<std::uint32_t>(size));
    ASSERT_TRUE(p.until([&] {
      return p.client.tally.run([&](CompletionCallback done) {
        return p.ends.client.send(b, done);
      }) == Status::ok;
    }));
    b.reset();  // the operation holds the block
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  }
  EXPECT_EQ(sizes, wanted);
  EXPECT_TRUE(good);
  // An empty part of a longer buffer, not at its beginning.
  Buffer b = p.client.filled(100, 5);
  ASSERT_EQ(p.ends.client.send(b.slice(50, 0)), Status::ok);
  ASSERT_TRUE(p.until([&] { return sizes.size() == wanted.size() + 1; }));
  EXPECT_EQ(sizes.back(), 0u);
  b.reset();
  p.finish();
}

TEST(EngineMessages, CopyOfUnregisteredBytes) {
  Pair p;
  std::vector<std::byte> seen;
  p.server.on_message = [&](Connection, Message& m) {
    seen.assign(m.bytes().begin(), m.bytes().end());
  };
  for (const std::size_t size : {0u, 1u, 300u, 4096u}) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = Node::pattern(9, i);
    const std::vector<std::byte> wanted = bytes;
    const std::uint64_t before = p.server.messages;
    ASSERT_TRUE(p.until([&] {
      return p.client.tally.run([&](CompletionCallback done) {
        return p.ends.client.send_copy(bytes, done);
      }) == Status::ok;
    }));
    std::fill(bytes.begin(), bytes.end(), std::byte{0xee});
    ASSERT_TRUE(p.until([&] { return p.server.messages == before + 1; }));
    EXPECT_EQ(seen, wanted);
  }
  p.finish();
}

TEST(EngineMessages, OneBufferOnTwoConnectionsAndTwiceOnOne) {
  Pair p;
  const Ends second = connect(p.client, p.server);
  std::vector<std::uint32_t> from(2);
  bool good = true;
  p.server.on_message = [&](Connection c, Message& m) {
    good = good && m.size() == 3000 && Node::holds(m.bytes(), 42);
    ++from[c == second.server ? 1 : 0];
  };
  Buffer b = p.client.filled(3000, 42);
  const auto send = [&](Connection c, Post post) {
    return p.client.tally.run([&](CompletionCallback done) { return c.send(b, done, post); });
  };
  // Gathers the credit for two in a row.
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(p.until([&] { return send(p.ends.client, Post::now) == Status::ok; }));
  }
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  ASSERT_TRUE(p.until([&] {
    return p.ends.client.stats().send_credits >= 2 || send(p.ends.client, Post::now) != Status::ok;
  }));
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  const std::uint32_t before = from[0];
  ASSERT_EQ(send(p.ends.client, Post::defer), Status::ok);
  ASSERT_EQ(send(second.client, Post::defer), Status::ok);
  ASSERT_EQ(send(p.ends.client, Post::defer), Status::ok);
  b.reset();
  ASSERT_TRUE(p.until([&] { return from[0] == before + 2 && from[1] == 1; }));
  EXPECT_TRUE(good);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  p.finish();
}

TEST(EngineMessages, TakenBuffersAreForwarded) {
  // client -> server -> client, in the received buffers.
  Pair p;
  std::vector<Buffer> kept;
  bool good = true;
  std::uint32_t back = 0;
  p.server.on_message = [&](Connection c, Message& m) {
    Buffer b = m.take();
    EXPECT_FALSE(m.take());  // taken once
    EXPECT_EQ(p.server.tally.run([&](CompletionCallback done) { return c.send(b, done); }),
              Status::ok);
    if (kept.size() < 20) kept.push_back(std::move(b));
  };
  p.client.on_message = [&](Connection, Message& m) {
    good = good && Node::holds(m.bytes(), back);
    ++back;
  };
  for (std::uint32_t i = 0; i < 300; ++i) {
    Buffer b = p.client.filled(i % 2 == 0 ? 24 : 1000, i);
    ASSERT_TRUE(p.until([&] { return p.ends.client.send(b) == Status::ok; }));
    ASSERT_TRUE(p.until([&] { return back == i + 1; }));
  }
  EXPECT_TRUE(good);
  for (std::uint32_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(Node::holds(kept[i].bytes(), i));
  kept.clear();
  p.finish();
}

/// A pair whose server has exposed one buffer.
struct Exposed : Pair {
  Exposed() {
    memory = server.buffer(8192, Pool::lease);
    auto made = server.engine.expose(memory.slice(), Access::remote_read_write);
    EXPECT_TRUE(made) << made.error().message();
    region = made.value_or(RemoteRegion{});
  }
  void finish() {
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    memory.reset();
    Pair::finish();
  }
  Buffer memory;
  RemoteRegion region;
};

TEST(EngineMessages, WritesAndReadsOfSlices) {
  Exposed p;
  std::memset(p.memory.data(), 0x11, 8192);
  Buffer local = p.client.filled(2000, 3);
  for (const std::size_t size : {1u, 64u, 65u, 2000u}) {
    std::memset(p.memory.data(), 0x11, 8192);
    const RemoteRegion target = p.region.slice(100, size);
    ASSERT_EQ(p.client.tally.run([&](CompletionCallback done) {
      return p.ends.client.write(local.slice(0, size), target, done);
    }),
              Status::ok);
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    EXPECT_EQ(p.memory.data()[99], std::byte{0x11});
    EXPECT_EQ(p.memory.data()[100 + size], std::byte{0x11});
    EXPECT_TRUE(Node::holds({p.memory.data() + 100, size}, 3));
    Buffer read = p.client.filled(2000, 200);
    ASSERT_EQ(p.client.tally.run([&](CompletionCallback done) {
      return p.ends.client.read(read.slice(0, size), target, done);
    }),
              Status::ok);
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    EXPECT_TRUE(Node::holds(read.slice(0, size).bytes(), 3));
    EXPECT_EQ(read.data()[size == 2000 ? 0 : size],
              Node::pattern(size == 2000 ? 3 : 200, size == 2000 ? 0 : size));
  }
  EXPECT_EQ(p.client.tally.ended(Status::ok), 8u);
  EXPECT_EQ(p.ends.client.stats().writes, 4u);
  EXPECT_EQ(p.ends.client.stats().bytes_read, 2130u);
  EXPECT_EQ(p.server.messages, 0u);  // the peer's CPU took no part
  local.reset();
  p.finish();
}

TEST(EngineMessages, WritesWithImmediateKeepTheirPlaceAmongMessages) {
  Exposed p;
  std::vector<std::uint32_t> order;
  bool good = true;
  p.server.on_message = [&](Connection, Message& m) {
    if (m.is_write()) {
      good = good && m.data() == nullptr && !m.take() && m.size() == 500 &&
             Node::holds({p.memory.data(), 500}, *m.immediate());
      order.push_back(*m.immediate());
    } else {
      std::uint32_t number = 0;
      std::memcpy(&number, m.data(), sizeof number);
      order.push_back(number);
    }
  };
  constexpr std::uint32_t kTotal = 3000;
  for (std::uint32_t i = 0; i < kTotal; ++i) {
    Buffer b = p.client.filled(500, i);
    if (i % 3 != 0) {
      (void)b.resize(4);
      std::memcpy(b.data(), &i, sizeof i);
    }
    ASSERT_TRUE(p.until([&] {
      return p.client.tally.run([&](CompletionCallback done) {
        return i % 3 == 0 ? p.ends.client.write_with_imm(b.slice(), p.region, i, done)
                          : p.ends.client.send(b, done);
      }) == Status::ok;
    }));
    // A write must keep its place in the order; its target is used again.
    if (i % 3 == 0) {
      ASSERT_TRUE(p.until([&] { return order.size() == i + 1; }));
    }
  }
  ASSERT_TRUE(p.until([&] { return order.size() == kTotal && p.client.tally.idle(); }));
  for (std::uint32_t i = 0; i < kTotal; ++i) ASSERT_EQ(order[i], i);
  EXPECT_TRUE(good);
  EXPECT_EQ(p.client.tally.ended(Status::ok), kTotal);
  p.finish();
}

/// Lets the client's credit grow to at least `wanted`.
void warm_up(Pair& p, std::uint32_t wanted) {
  Buffer b = p.client.filled(16, 1);
  ASSERT_TRUE(p.until([&] {
    (void)p.ends.client.send(b);
    return p.ends.client.stats().send_credits >= wanted;
  }));
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().outstanding == 0; }));
  p.settle();
}

TEST(EngineDoorbells, NowRingsOnceEachDeferOnceForAll) {
  Pair p;
  warm_up(p, 40);
  Buffer b = p.client.filled(16, 1);
  const auto bells = [&] { return p.client.engine.stats().doorbells; };
  std::uint64_t before = bells();
  for (int i = 0; i < 4; ++i) ASSERT_EQ(p.ends.client.send(b), Status::ok);
  EXPECT_EQ(bells(), before + 4);
  // Deferred operations ring when they are flushed.
  before = bells();
  for (int i = 0; i < 4; ++i) ASSERT_EQ(p.ends.client.send(b, {}, Post::defer), Status::ok);
  EXPECT_EQ(bells(), before);
  ASSERT_EQ(p.ends.client.flush(), Status::ok);
  EXPECT_EQ(bells(), before + 1);
  ASSERT_EQ(p.ends.client.flush(), Status::ok);
  EXPECT_EQ(bells(), before + 1);  // nothing was deferred
  for (int i = 0; i < 3; ++i) ASSERT_EQ(p.ends.client.send(b, {}, Post::defer), Status::ok);
  ASSERT_EQ(p.client.engine.flush(), Status::ok);
  EXPECT_EQ(bells(), before + 2);
  // A poll also flushes.
  for (int i = 0; i < 3; ++i) ASSERT_EQ(p.ends.client.send(b, {}, Post::defer), Status::ok);
  (void)p.client.engine.poll();
  EXPECT_EQ(bells(), before + 3);
  // `now` also posts earlier deferred operations, in order.
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().outstanding == 0; }));
  p.settle();
  before = bells();
  std::vector<std::size_t> sizes;
  p.server.on_message = [&](Connection, Message& m) { sizes.push_back(m.size()); };
  ASSERT_EQ(p.ends.client.send(b.slice(0, 1), {}, Post::defer), Status::ok);
  ASSERT_EQ(p.ends.client.send(b.slice(0, 2), {}, Post::defer), Status::ok);
  ASSERT_EQ(p.ends.client.send(b.slice(0, 3), {}, Post::now), Status::ok);
  EXPECT_EQ(bells(), before + 1);
  ASSERT_TRUE(p.until([&] { return sizes.size() == 3; }));
  EXPECT_EQ(sizes, (std::vector<std::size_t>{1, 2, 3}));
  b.reset();
  p.finish();
}

TEST(EngineDoorbells, CallbacksDeferUnlessTold) {
  Pair p;
  warm_up(p, 40);
  p.settle(2000);
  Buffer b = p.client.filled(16, 1);
  std::uint64_t inside = 0;
  std::uint64_t at_callback = 0;
  Post how = Post::automatic;
  std::uint64_t ended = 0;
  p.client.on_message = [&](Connection c, Message&) {
    at_callback = p.client.engine.stats().doorbells;
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(p.client.tally.run([&](CompletionCallback done) { return c.send(b, done, how); }),
                Status::ok);
    }
    inside = p.client.engine.stats().doorbells - at_callback;
    ++ended;
  };
  Buffer ping = p.server.filled(8, 1);
  for (const Post post : {Post::automatic, Post::now}) {
    how = post;
    const std::uint64_t before = ended;
    ASSERT_TRUE(p.until([&] { return p.ends.server.send(ping) == Status::ok; }));
    ASSERT_TRUE(p.until([&] { return ended == before + 1; }));
    EXPECT_EQ(inside, post == Post::now ? 3u : 0u);
    // Deferred by the callback, posted at the end of the same poll.
    EXPECT_GE(p.client.engine.stats().doorbells, at_callback + (post == Post::now ? 3 : 1));
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  }
  b.reset();
  ping.reset();
  p.finish();
}

TEST(EnginePoll, AnswersTheNumberOfEventsAndZeroWhenIdle) {
  Config c = small_config();
  c.engine.control = ControlMode::manual;
  Pair p(c);
  warm_up(p, 40);
  Buffer b = p.client.filled(16, 1);
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().outstanding == 0; }));
  p.settle(2000);
  EXPECT_EQ(p.server.engine.poll(), 0);
  EXPECT_EQ(p.client.engine.poll(), 0);
  for (int i = 0; i < 5; ++i)
    ASSERT_EQ(p.ends.client.send(b, [](const Completion&) {}), Status::ok);
  EXPECT_EQ(p.server.engine.poll(), 5);
  EXPECT_EQ(p.server.engine.poll(), 0);
  // Each operation with a callback ends in a later poll, and is an event.
  int ended = 0;
  ASSERT_TRUE(until({}, [&] { return (ended += p.client.engine.poll()) >= 5; }));
  EXPECT_EQ(p.ends.client.stats().outstanding, 0u);
  const std::uint64_t polls = p.client.engine.stats().polls;
  EXPECT_EQ(p.client.engine.poll(), 0);
  EXPECT_EQ(p.client.engine.stats().polls, polls + 1);
  b.reset();
  p.finish();
}

TEST(EngineHandlers, AHandlerMayReplaceItself) {
  Pair p;
  struct Seen {
    int first = 0, second = 0;
    std::uint64_t word = 0;
  } seen;
  spinwire::ConnectionHandlers next = p.server.handlers();
  next.on_message = [s = &seen, a = 3ul, b = 4ul](Connection, Message&) {
    ++s->second;
    s->word += a + b;
  };
  struct Context {
    Seen* seen;
    spinwire::ConnectionHandlers* next;
  } context{&seen, &next};
  spinwire::ConnectionHandlers self = p.server.handlers();
  self.on_message = [c = &context, a = 11ul, b = 22ul](Connection conn, Message&) {
    EXPECT_EQ(conn.set_handlers(*c->next), Status::ok);
    ++c->seen->first;
    c->seen->word = a * 100 + b;  // its captures are intact
  };
  ASSERT_EQ(p.ends.server.set_handlers(self), Status::ok);
  Buffer b = p.client.filled(8, 1);
  ASSERT_EQ(p.ends.client.send(b), Status::ok);
  ASSERT_TRUE(p.until([&] { return seen.first == 1; }));
  EXPECT_EQ(seen.word, 1122u);
  ASSERT_TRUE(p.until([&] { return p.ends.client.send(b) == Status::ok; }));
  ASSERT_TRUE(p.until([&] { return seen.second == 1; }));
  EXPECT_EQ(seen.word, 1129u);
  b.reset();
  p.finish();
  EXPECT_EQ(p.server.closed.size(), 1u);
}

}  // namespace
}  // namespace messages_test
