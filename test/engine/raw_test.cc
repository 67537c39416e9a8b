// Raw connections: exactly what the application posts is on the wire.
#include <gtest/gtest.h>

#include <thread>

#include "engine/raw_ends.h"

namespace raw_test {
namespace {

constexpr std::uint64_t kOnes = 0x0101010101010101;

TEST(EngineRaw, BytesArriveWithTheirTrueLengthAndImmediate) {
  RawPair p;
  const struct {
    std::uint32_t bytes;
    std::optional<std::uint32_t> immediate;
  } sent[] = {{8, {}}, {8, 1}, {1, 0xffff'fffe}, {100, {}}, {4096, 0}, {20000, 5}};
  std::uint32_t seed = 0;
  for (const auto& one : sent) {
    const Buffer& data = p.data(one.bytes, ++seed);
    const Buffer& into = p.at_server(32768);
    std::fill_n(into.data(), into.size(), std::byte{0xee});
    const std::size_t n = p.at_b.accepted();
    ASSERT_EQ(p.at_b.post(p.b, into.slice()), Status::ok);
    ASSERT_EQ(p.client.tally.run([&](auto done) {
      return one.immediate ? p.a.send_raw_with_imm(data.slice(), *one.immediate, done)
                           : p.a.send_raw(data.slice(), done);
    }),
              Status::ok);
    ASSERT_TRUE(p.until([&] { return p.at_b[n].ended == 1 && p.client.tally.idle(); }));
    EXPECT_EQ(p.at_b[n].how.status, Status::ok);
    EXPECT_EQ(p.at_b[n].how.bytes, one.bytes);
    EXPECT_EQ(p.at_b[n].how.immediate, one.immediate);
    EXPECT_FALSE(p.at_b[n].how.is_write);
    EXPECT_TRUE(Node::holds(into.bytes().first(one.bytes), seed));
    EXPECT_EQ(into.data()[one.bytes], std::byte{0xee});  // no byte behind it changed
  }
  EXPECT_EQ(p.a.stats().messages_sent, std::size(sent));
  EXPECT_EQ(p.b.stats().messages_received, std::size(sent));
  EXPECT_EQ(p.a.stats().bytes_sent, p.b.stats().bytes_received);
  EXPECT_EQ(p.a.max_message(), p.client.engine.device().max_operation_bytes);
  EXPECT_EQ(p.client.tally.bytes, 8u + 8 + 1 + 100 + 4096 + 20000);
  p.finish();
}

TEST(EngineRaw, ElementsAreGatheredAndScattered) {
  RawSettings sizes;
  {
    Node probe;
    sizes.max_send_sge = sizes.max_recv_sge =
        std::min(probe.engine.device().max_sge, 13u);  // the maximum with inline data
  }
  ASSERT_GE(sizes.max_send_sge, 4u);
  RawPair p(sizes);
  const std::size_t most = sizes.max_send_sge;
  for (const std::size_t from : {std::size_t{1}, std::size_t{2}, most}) {
    for (const std::size_t to : {std::size_t{1}, std::size_t{3}, most}) {
      // Parts of different lengths, in reverse order in one buffer.
      const Buffer source = p.client.filled(4096, static_cast<std::uint32_t>(from + to));
      const Buffer target = p.server.buffer(8192);
      std::vector<BufferSlice> out, in;
      std::vector<std::byte> expected;
      for (std::size_t i = 0; i < from; ++i) {
        out.push_back(source.slice((from - 1 - i) * 200, 10 + i * 13));
        expected.insert(expected.end(), out.back().bytes().begin(), out.back().bytes().end());
      }
      for (std::size_t i = 0; i < to; ++i)
        in.push_back(target.slice((to - 1 - i) * 256, to == 1 ? 4000 : i + 1 == to ? 256 : 3 + i));
      const std::size_t n = p.at_b.accepted();
      std::size_t room = 0;
      for (const BufferSlice& s : in) room += s.size();
      if (room < expected.size()) {  // the last part gets the rest
        in.back() = target.slice(4096, 4096);
      }
      ASSERT_EQ(p.at_b.post(p.b, in), Status::ok);
      ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(out, done); }), Status::ok);
      p.audit();
      ASSERT_TRUE(p.until([&] { return p.at_b[n].ended == 1 && p.client.tally.idle(); }));
      ASSERT_EQ(p.at_b[n].how.status, Status::ok);
      ASSERT_EQ(p.at_b[n].how.bytes, expected.size());
      std::size_t at = 0;
      for (const BufferSlice& s : in) {
        const std::size_t part = std::min(s.size(), expected.size() - at);
        EXPECT_TRUE(std::equal(s.data(), s.data() + part,
                               expected.begin() + static_cast<std::ptrdiff_t>(at)))
            << from << " to " << to << " at " << at;
        at += part;
      }
    }
  }
  p.finish();
}

TEST(EngineRaw, WithoutBytesThereAreNotices) {
  RawPair p;
  for (int i = 0; i < 4; ++i) ASSERT_EQ(p.at_b.post(p.b, Elements{}), Status::ok);
  Buffer memory = p.server.buffer(64, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_read_write);
  ASSERT_TRUE(region);
  const Buffer& data = p.data(40, 3);
  const auto run = [&](auto call) {
    EXPECT_EQ(p.client.tally.run(call), Status::ok);
    EXPECT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  };
  run([&](auto done) { return p.a.send_raw(Elements{}, done); });
  run([&](auto done) { return p.a.send_raw_with_imm(Elements{}, 9, done); });
  run([&](auto done) { return p.a.write_with_imm(data.slice(), *region, 10, done); });
  run([&](auto done) { return p.a.write_with_imm(data.slice(0, 0), *region, 11, done); });
  ASSERT_TRUE(p.until([&] { return p.at_b.ended == 4; }));
  const struct {
    std::size_t bytes;
    std::optional<std::uint32_t> immediate;
    bool is_write;
  } expected[] = {{0, {}, false}, {0, 9, false}, {40, 10, true}, {0, 11, true}};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(p.at_b[i].how.status, Status::ok) << i;
    EXPECT_EQ(p.at_b[i].how.bytes, expected[i].bytes) << i;
    EXPECT_EQ(p.at_b[i].how.immediate, expected[i].immediate) << i;
    EXPECT_EQ(p.at_b[i].how.is_write, expected[i].is_write) << i;
  }
  EXPECT_TRUE(Node::holds(memory.bytes().first(40), 3));
  EXPECT_EQ(p.a.stats().writes, 2u);
  EXPECT_EQ(p.a.stats().bytes_written, 40u);
  EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
  memory.reset();
  p.finish();
}

TEST(EngineRaw, ReadsWritesAndAtomicsAreAsEver) {
  RawPair p;
  Buffer memory = p.server.buffer(64, Pool::lease);
  std::memset(memory.data(), 0, memory.size());
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_all);
  const bool atomics = p.server.engine.device().atomics;
  const auto open =
      atomics ? region : p.server.engine.expose(memory.slice(), Access::remote_read_write);
  ASSERT_TRUE(open);
  {
    const Buffer ours = p.client.filled(64, 4);
    const Buffer back = p.client.buffer(64);
    const auto run = [&](auto call) {
      EXPECT_EQ(p.client.tally.run(call), Status::ok);
      EXPECT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    };
    run([&](auto done) { return p.a.write(ours.slice(), *open, done); });
    EXPECT_TRUE(Node::holds(memory.bytes(), 4));
    run([&](auto done) { return p.a.read(back.slice(), *open, done); });
    EXPECT_TRUE(Node::holds(back.bytes(), 4));
    if (atomics) {
      std::memset(memory.data(), 0, 8);
      run([&](auto done) { return p.a.compare_swap(open->slice(0, 8), 0, kOnes, done); });
      run([&](auto done) { return p.a.fetch_add(open->slice(0, 8), kOnes, done); });
      std::uint64_t word = 0;
      std::memcpy(&word, memory.data(), sizeof word);
      EXPECT_EQ(word, 2 * kOnes);
    }
    EXPECT_EQ(p.client.tally.ended(Status::ok), p.client.tally.accepted);
  }
  EXPECT_EQ(p.server.engine.revoke(*open), Status::ok);
  memory.reset();
  p.finish();
}

TEST(EngineRaw, PostedIsToldAfterThePostAndBeforeTheCompletion) {
  RawPair p;
  const Buffer& data = p.data(64, 1);
  const Buffer& into = p.at_server(64);
  // Posted at once and reported in the next poll.
  ASSERT_EQ(p.at_b.post(p.b, into.slice()), Status::ok);
  EXPECT_EQ(p.at_b[0].posted, 0);
  EXPECT_EQ(p.server.engine.stats().receives_posted % 256, 1u);  // it was posted to the device
  p.audit();
  (void)p.server.engine.poll();
  EXPECT_EQ(p.at_b[0].posted, 1);
  EXPECT_EQ(p.at_b[0].ended, 0);
  // Deferred: neither posted nor reported before the poll.
  const auto before = p.server.engine.stats().receives_posted;
  ASSERT_EQ(p.at_b.post(p.b, into.slice(), Post::defer), Status::ok);
  ASSERT_EQ(p.at_b.post(p.b, into.slice(), Post::defer), Status::ok);
  EXPECT_EQ(p.server.engine.stats().receives_posted, before);
  p.audit();
  (void)p.server.engine.poll();
  EXPECT_EQ(p.server.engine.stats().receives_posted, before + 2);
  EXPECT_EQ(p.at_b[1].posted + p.at_b[2].posted, 2);
  // flush() also posts them, for one connection and for all.
  ASSERT_EQ(p.at_b.post(p.b, into.slice(), Post::defer), Status::ok);
  EXPECT_EQ(p.b.flush(), Status::ok);
  EXPECT_EQ(p.server.engine.stats().receives_posted, before + 3);
  ASSERT_EQ(p.at_b.post(p.b, into.slice(), Post::defer), Status::ok);
  EXPECT_EQ(p.server.engine.flush(), Status::ok);
  EXPECT_EQ(p.server.engine.stats().receives_posted, before + 4);
  // Also if the completion is there by then.
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(data.slice(), done); }),
              Status::ok);
  }
  ASSERT_TRUE(p.until([&] { return p.at_b.ok == 5 && p.client.tally.idle(); }));
  EXPECT_EQ(p.at_b.posted(), 5u);
  p.finish();  // checks that each completed before the end
}

TEST(EngineRaw, CallbacksPostAgainWithOneListAndSendAfterIt) {
  // Ping-pong with a single receive at each end, which the callback of the last one reposts.
  RawPair p(RawSettings{1, 1, 1});
  constexpr std::uint32_t kRounds = 500;
  struct End {
    Connection c;
    Buffer in, out;
    std::uint32_t seen = 0;
    std::uint32_t limit = 0;
    bool right = true;
    void arm() {
      EXPECT_EQ(c.post_receive(in.slice(), [this](const RawReceive& r) { on(r); }), Status::ok);
    }
    void on(const RawReceive& r) {
      if (r.status != Status::ok) return;
      right = right && r.bytes == 16 && r.immediate == seen && in.data()[3] == std::byte{7};
      ++seen;
      if (seen < limit) arm();
      EXPECT_EQ(c.send_raw_with_imm(out.slice(), seen - 1), Status::ok);
    }
  };
  End server{p.b, p.server.buffer(16), p.server.buffer(16)};
  std::fill_n(server.out.data(), 16, std::byte{7});
  server.limit = kRounds;
  server.arm();
  Buffer in = p.client.buffer(16), out = p.client.buffer(16);
  std::fill_n(out.data(), 16, std::byte{7});
  for (std::uint32_t i = 0; i < amount(kRounds); ++i) {
    ASSERT_EQ(p.at_a.post(p.a, in.slice(), Post::defer), Status::ok);
    ASSERT_EQ(p.a.send_raw_with_imm(out.slice(), i), Status::ok);  // posts the receive first
    ASSERT_TRUE(p.until([&] { return p.at_a.ok == i + 1; }));
    EXPECT_EQ(p.at_a[i].how.immediate, i);
  }
  EXPECT_TRUE(server.right);
  EXPECT_EQ(server.seen, amount(kRounds));
  server.in.reset();
  server.out.reset();
  in.reset();
  out.reset();
  p.finish();
}

TEST(EngineRaw, ReceivesOfACallbackArePostedAtThePollsEndInOneList) {
  RawPair p;
  const Buffer& data = p.data(8, 1);
  const Buffer& into = p.at_server(8);
  std::uint64_t during = 0;
  std::uint64_t before = 0;
  const auto on_received = [&](const RawReceive&) {
    before = p.server.engine.stats().receives_posted;
    for (int i = 0; i < 20; ++i) EXPECT_EQ(p.at_b.post(p.b, into.slice()), Status::ok);
    during = p.server.engine.stats().receives_posted;
  };
  ASSERT_EQ(p.b.post_receive(into.slice(), [&on_received](const RawReceive& r) { on_received(r); }),
            Status::ok);
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(data.slice(), done); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return during != 0; }));
  EXPECT_EQ(during, before);
  EXPECT_EQ(p.server.engine.stats().receives_posted, before + 20);
  EXPECT_EQ(p.at_b.posted(), 20u);
  p.finish();
  EXPECT_EQ(p.at_b.flushed, 20u);
}

TEST(EngineRaw, WhatCallbacksOfPostedReceivesDeferIsPostedToo) {
  RawPair p;
  const Buffer& into = p.at_server(8);
  struct Chain {
    Connection c;
    BufferSlice into;
    int told = 0;
    int ended = 0;
    void next() {
      const Status status = c.post_receive(
          into, [this](const RawReceive&) { ++ended; },
          [this] {
            if (++told < 10) next();
          });
      EXPECT_EQ(status, Status::ok);
    }
  } chain{p.b, into.slice()};
  chain.next();
  for (int i = 0; i < 12; ++i) (void)p.server.engine.poll();
  EXPECT_EQ(chain.told, 10);
  EXPECT_EQ(p.b.snapshot().receives, 10u);
  chain.into = {};
  p.finish();
  EXPECT_EQ(chain.ended, 10);
}

TEST(EngineRaw, ASenderWaitsForAReceive) {
  RawPair p;
  const Buffer& data = p.data(64, 5);
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(data.slice(), done); }),
            Status::ok);
  p.settle();
  EXPECT_FALSE(p.client.tally.idle());
  const Buffer& into = p.at_server(64);
  ASSERT_EQ(p.at_b.post(p.b, into.slice()), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.at_b.ok == 1 && p.client.tally.idle(); }));
  EXPECT_EQ(p.client.tally.ended(Status::ok), 1u);
  EXPECT_TRUE(Node::holds(into.bytes(), 5));
  p.finish();
}

TEST(EngineRaw, ReceivesMayBePostedAsSoonAsThereIsAHandle) {
  Receives at_server, at_client;
  Node server, client;
  const Buffer servers = server.buffer(64), clients = client.buffer(64);
  ListenOptions listen;
  listen.settings = raw_settings();
  listen.handlers = server.handlers();
  listen.on_accept = [&](Connection c) {
    EXPECT_EQ(at_server.post(c, servers.slice()), Status::ok);
    EXPECT_EQ(at_server[0].posted, 0);
  };
  server.on_ready = [&](Connection c) {
    EXPECT_EQ(at_server.posted(), 1u);
    const Buffer data = server.filled(64, 1);
    EXPECT_EQ(c.send_raw(data.slice()), Status::ok);
  };
  server.listener = std::move(*server.engine.listen("127.0.0.1:0", listen));
  ConnectOptions options;
  options.settings = raw_settings();
  options.handlers = client.handlers();
  client.on_ready = [&](Connection c) {
    const Buffer data = client.filled(64, 2);
    EXPECT_EQ(c.send_raw(data.slice()), Status::ok);
  };
  Connection c = *client.engine.connect(server.listener.address(), options);
  EXPECT_EQ(at_client.post(c, clients.slice()), Status::ok);
  EXPECT_EQ(c.snapshot().receives, 1u);
  EXPECT_EQ(c.send_raw(clients.slice()), Status::not_connected);
  const auto audit = client.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
  ASSERT_TRUE(until({&server, &client}, [&] { return at_server.ok == 1 && at_client.ok == 1; }));
  EXPECT_TRUE(Node::holds(servers.bytes(), 2));
  EXPECT_TRUE(Node::holds(clients.bytes(), 1));
  at_server.expect_exact();
  at_client.expect_exact();
}

TEST(EngineRaw, RefusedCallsTakeNothing) {
  RawPair p(RawSettings{4, 2, 3});
  const Buffer& data = p.data(64, 1);
  BufferSlice one = data.slice(0, 8);
  std::vector<BufferSlice> many(4, one);
  const auto some = [&](std::size_t n) { return Elements(many).first(n); };
  EXPECT_EQ(p.at_a.post(p.a, some(4)), Status::invalid_argument);
  EXPECT_EQ(p.a.send_raw(some(3)), Status::invalid_argument);
  EXPECT_EQ(p.at_a.post(p.a, BufferSlice()), Status::out_of_bounds);
  EXPECT_EQ(p.at_a.post(p.a, data.slice(60, 8)), Status::out_of_bounds);
  EXPECT_EQ(p.at_a.post(p.a, data.slice(8, 0)), Status::out_of_bounds);
  EXPECT_EQ(p.a.send_raw(data.slice(8, 0)), Status::out_of_bounds);
  EXPECT_EQ(p.a.send_raw_with_imm(BufferSlice(), 1), Status::out_of_bounds);
  for (int i = 0; i < 4; ++i) ASSERT_EQ(p.at_a.post(p.a, some(3)), Status::ok);
  EXPECT_EQ(p.at_a.post(p.a, one), Status::would_block);
  EXPECT_EQ(p.a.snapshot().receives, 4u);
  // Messages with a header need other connections.
  EXPECT_EQ(p.a.send(data), Status::unsupported);
  EXPECT_EQ(p.a.send(one), Status::unsupported);
  EXPECT_EQ(p.a.send(data.slice(0, 0)), Status::unsupported);
  EXPECT_EQ(p.a.send_with_imm(one, 1), Status::unsupported);
  EXPECT_EQ(p.a.send_copy(data.bytes()), Status::unsupported);
  EXPECT_EQ(p.a.snapshot().stats.outstanding, 0u);
  Status elsewhere[2] = {};
  std::thread([&] {
    elsewhere[0] = p.a.post_receive(one);
    elsewhere[1] = p.a.send_raw(one);
  }).join();
  EXPECT_EQ(elsewhere[0], Status::wrong_thread);
  EXPECT_EQ(elsewhere[1], Status::wrong_thread);
  EXPECT_EQ(p.a.configure({}).error().status, Status::invalid_argument);
  p.audit();
  Connection gone = p.a;
  one = {};
  many.clear();
  p.finish();
  EXPECT_EQ(gone.post_receive(Elements{}), Status::not_connected);
  EXPECT_EQ(gone.send_raw(Elements{}), Status::not_connected);
}

TEST(EngineRaw, OrdinaryConnectionsHaveNoneOfIt) {
  Pair p;
  Buffer data = p.client.filled(8, 1);
  EXPECT_EQ(p.ends.client.post_receive(data.slice()), Status::unsupported);
  EXPECT_EQ(p.ends.client.send_raw(data.slice()), Status::unsupported);
  EXPECT_EQ(p.ends.client.send_raw_with_imm(data.slice(), 1), Status::unsupported);
  data.reset();
  p.finish();
}

TEST(EngineRaw, MemoryIsHeldUntilTheCallback) {
  RawPair p;
  Buffer into = p.server.buffer(64);
  Buffer parts[2] = {p.client.filled(10, 1), p.client.filled(20, 2)};
  const std::byte* const where = into.data();
  std::vector<std::byte> seen;
  std::uint64_t held = 0;
  const auto on_received = [&](const RawReceive& r) {
    seen.assign(where, where + r.bytes);
    held = p.server.engine.memory_stats(Pool::send).blocks_used;
  };
  ASSERT_EQ(p.b.post_receive(into.slice(), [&on_received](const RawReceive& r) { on_received(r); }),
            Status::ok);
  into.reset();
  std::vector<BufferSlice> list = {parts[0].slice(), parts[1].slice()};
  ASSERT_EQ(p.client.tally.run([&](auto done) { return p.a.send_raw(list, done, Post::defer); }),
            Status::ok);
  list.clear();
  for (Buffer& b : parts) b.reset();
  EXPECT_EQ(p.client.engine.memory_stats(Pool::send).blocks_used, 2u);
  EXPECT_EQ(p.server.engine.memory_stats(Pool::send).blocks_used, 1u);
  ASSERT_TRUE(p.until([&] { return !seen.empty() && p.client.tally.idle(); }));
  EXPECT_EQ(seen.size(), 30u);
  EXPECT_EQ(held, 1u);
  EXPECT_TRUE(Node::holds(std::span(seen).first(10), 1));
  EXPECT_TRUE(Node::holds(std::span(seen).subspan(10), 2));
  EXPECT_EQ(p.client.engine.memory_stats(Pool::send).blocks_used, 0u);
  EXPECT_EQ(p.server.engine.memory_stats(Pool::send).blocks_used, 0u);
  p.finish();
}

TEST(EngineRaw, TheSendQueueAndItsListsAreUsedUpAndFreeAgain) {
  ConnectionSettings settings = raw_settings({64, 2, 1});
  settings.send_depth = 16;
  RawPair p(settings, settings, small_config());
  const Buffer& data = p.data(64, 1);
  const Buffer& into = p.at_server(64);
  std::vector<BufferSlice> two = {data.slice(0, 5), data.slice(10, 7)};
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 16; ++i) {
      ASSERT_EQ(p.at_b.post(p.b, into.slice()), Status::ok);
      ASSERT_EQ(p.client.tally.run([&](auto done) {
        return i % 4 == 3 ? p.a.send_raw(data.slice(), done, Post::defer)
                          : p.a.send_raw(two, done, Post::defer);
      }),
                Status::ok);
    }
    EXPECT_EQ(p.a.send_raw(two), Status::would_block);
    EXPECT_EQ(p.a.snapshot().blocked_by, spinwire::Blocker::send_queue);
    EXPECT_EQ(p.a.snapshot().messages, 16u);
    p.audit();
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    EXPECT_EQ(p.a.snapshot().blocked_by, spinwire::Blocker::nothing);
  }
  two.clear();
  p.finish();
}

TEST(EngineRaw, SendsAreGivenUp) {
  RawPair p;
  const Buffer& data = p.data(64, 1);
  const Buffer& into = p.at_server(64);
  std::vector<BufferSlice> two = {data.slice(0, 5), data.slice(10, 7)};
  const auto send = [&](Post post) {
    return p.client.tally.run([&](auto done) { return p.a.send_raw(two, done, post); });
  };
  ASSERT_EQ(send(Post::defer), Status::ok);
  EXPECT_EQ(p.a.cancel(p.a.last_operation()), Status::ok);  // never posted
  p.audit();
  ASSERT_EQ(send(Post::now), Status::ok);
  EXPECT_EQ(p.a.cancel(p.a.last_operation()), Status::ok);  // already posted
  p.audit();
  (void)p.client.engine.poll();
  EXPECT_EQ(p.client.tally.ended(Status::cancelled), 2u);
  p.audit();
  ASSERT_EQ(p.at_b.post(p.b, into.slice()), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.at_b.ok == 1 && p.a.snapshot().messages == 0; }));
  EXPECT_EQ(p.at_b[0].how.bytes, 12u);
  two.clear();
  p.finish();
}

}  // namespace
}  // namespace raw_test
