// Scenarios of an asynchronous framework's users about data, by number:
//
//    3 an immediate beside a message                     here
//    4 messages with and without one, in order           here
//    6 a write with an immediate                         here
//    7 compare-and-swap                                  here
//    8 atomics out of place                              here
//   10 a burst into a receiver that does not look        here
//   11 slices of local memory                            here
//   12 slices of remote memory                           here
//   13 slices that are none                              here
//   14 memory that may only be read                      here
//   18 operations given up in flight                     here, and EngineCancel
//   21 raw messages, with an immediate and without       here, and EngineRaw
//
// Everything runs on the device that SPINWIRE_TEST_DEVICE names.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "engine/harness.h"

namespace async_rdma_data_test {
namespace {

using namespace engine_test;  // names of a test namespace of its own

/// A message as it came.
struct Arrived {
  std::vector<std::byte> bytes;
  std::size_t size = 0;
  std::optional<std::uint32_t> immediate;
  bool is_write = false;
};

/// A pair whose server keeps what comes, and opens memory of `bytes` to the client.
struct Bench : Pair {
  explicit Bench(std::size_t bytes = 64, Access access = Access::remote_read_write)
      : memory(server.buffer(bytes, Pool::lease)) {
    server.on_message = [this](Connection, Message& m) {
      arrived.push_back({{m.bytes().begin(), m.is_write() ? m.bytes().begin() : m.bytes().end()},
                         m.size(),
                         m.immediate(),
                         m.is_write()});
    };
    std::memset(memory.data(), 0, bytes);
    region = server.engine.expose(memory.slice(), access).value();
  }
  /// Starts an operation, again while it would block, and waits for its end.
  template <typename Call>
  Completion run(Call&& call) {
    Completion seen;
    int ended = 0;
    const CompletionCallback done = [&](const Completion& c) {
      seen = c;
      ++ended;
    };
    Status status = Status::would_block;
    EXPECT_TRUE(until([&] { return (status = call(done)) != Status::would_block; }));
    EXPECT_EQ(status, Status::ok);
    EXPECT_TRUE(until([&] { return ended != 0; }));
    EXPECT_EQ(ended, 1);
    return seen;
  }
  [[nodiscard]] Buffer of(std::byte value, std::size_t bytes = 8) {
    Buffer b = client.buffer(bytes);
    std::memset(b.data(), std::to_integer<int>(value), bytes);
    return b;
  }
  void finish() {
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    memory.reset();
    Pair::finish();
  }
  std::vector<Arrived> arrived;
  Buffer memory;
  RemoteRegion region;
};

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int v : values) bytes.push_back(static_cast<std::byte>(v));
  return bytes;
}
std::vector<std::byte> copy(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

TEST(Scenario3, AnImmediateArrivesBesideItsMessage) {
  Bench b;
  Buffer ones = b.of(std::byte{1});
  EXPECT_EQ(
      b.run([&](auto done) { return b.ends.client.send_with_imm(ones.slice(), 1, done); }).status,
      Status::ok);
  ASSERT_TRUE(b.until([&] { return b.arrived.size() == 1; }));
  EXPECT_EQ(b.arrived[0].bytes, bytes_of({1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(b.arrived[0].immediate, 1u);
  EXPECT_FALSE(b.arrived[0].is_write);
  ones.reset();
  b.finish();
}

TEST(Scenario4, EachMessageHasItsImmediateOrNone) {
  Bench b;
  const struct {
    int seed;
    std::optional<std::uint32_t> immediate;
  } sent[] = {{1, 7}, {2, 0xffff'ffff}, {3, {}}, {4, {}}, {5, 0}};
  std::vector<Buffer> buffers;
  for (const auto& one : sent) {
    buffers.push_back(b.client.filled(100, static_cast<std::uint32_t>(one.seed)));
    const BufferSlice data = buffers.back().slice();
    // The next one follows as soon as there is credit, not when the last one has come.
    ASSERT_TRUE(b.until([&] {
      return b.client.tally.run([&](auto done) {
        return one.immediate ? b.ends.client.send_with_imm(data, *one.immediate, done)
                             : b.ends.client.send(data, done);
      }) == Status::ok;
    }));
  }
  ASSERT_TRUE(b.until([&] { return b.arrived.size() == std::size(sent); }));
  for (std::size_t i = 0; i < std::size(sent); ++i) {
    EXPECT_EQ(b.arrived[i].immediate, sent[i].immediate) << i;
    EXPECT_EQ(b.arrived[i].size, 100u);
    EXPECT_TRUE(Node::holds(b.arrived[i].bytes, static_cast<std::uint32_t>(sent[i].seed))) << i;
  }
  ASSERT_TRUE(b.until([&] { return b.client.tally.idle(); }));
  buffers.clear();
  b.finish();
}

TEST(Scenario6, AWriteTellsItsImmediateWhenTheBytesAreThere) {
  Bench b(8);
  std::vector<std::byte> at_notice;
  const auto keep = b.server.on_message;
  b.server.on_message = [&](Connection c, Message& m) {
    at_notice = copy(b.memory.bytes());
    keep(c, m);
  };
  Buffer ones = b.of(std::byte{1}, 4);
  const Completion done = b.run([&](auto d) {
    return b.ends.client.write_with_imm(ones.slice(), b.region.slice(4, 4), 4, d);
  });
  EXPECT_EQ(done.status, Status::ok);
  EXPECT_EQ(done.bytes, 4u);
  ASSERT_TRUE(b.until([&] { return b.arrived.size() == 1; }));
  EXPECT_TRUE(b.arrived[0].is_write);
  EXPECT_EQ(b.arrived[0].size, 4u);
  ASSERT_EQ(b.arrived[0].immediate, 4u);
  EXPECT_EQ(at_notice, bytes_of({0, 0, 0, 0, 1, 1, 1, 1}));
  const std::size_t immediate = *b.arrived[0].immediate;
  EXPECT_NE(at_notice[immediate - 1], at_notice[immediate]);
  // The notice alone, without bytes.
  (void)b.run(
      [&](auto d) { return b.ends.client.write_with_imm(ones.slice(0, 0), b.region, 9, d); });
  ASSERT_TRUE(b.until([&] { return b.arrived.size() == 2; }));
  EXPECT_TRUE(b.arrived[1].is_write);
  EXPECT_EQ(b.arrived[1].size, 0u);
  EXPECT_EQ(b.arrived[1].immediate, 9u);
  EXPECT_EQ(copy(b.memory.bytes()), bytes_of({0, 0, 0, 0, 1, 1, 1, 1}));
  ones.reset();
  b.finish();
}

TEST(Scenario7, CompareAndSwap) {
  Bench b(8, Access::remote_all);
  if (!b.client.engine.device().atomics) GTEST_SKIP() << "the device has no atomics";
  constexpr std::uint64_t kOnes = 0x0101'0101'0101'0101;
  const auto swap = [&](std::uint64_t expected, std::uint64_t desired) {
    return b.run(
        [&](auto done) { return b.ends.client.compare_swap(b.region, expected, desired, done); });
  };
  const Completion first = swap(0, kOnes);
  EXPECT_EQ(first.status, Status::ok);
  EXPECT_EQ(first.value, 0u);
  EXPECT_EQ(copy(b.memory.bytes()), bytes_of({1, 1, 1, 1, 1, 1, 1, 1}));
  // What is not as expected stays, and is told.
  const Completion mismatch = swap(0, 5);
  EXPECT_EQ(mismatch.status, Status::ok);
  EXPECT_EQ(mismatch.value, kOnes);
  EXPECT_EQ(copy(b.memory.bytes()), bytes_of({1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(b.arrived.size(), 0u);
  b.finish();
}

TEST(Scenario8, AtomicsOutOfPlaceAreErrorsAndNothingIsPosted) {
  Bench b(16, Access::remote_all);
  if (!b.client.engine.device().atomics) GTEST_SKIP() << "the device has no atomics";
  Connection c = b.ends.client;
  const auto refused = [&](const RemoteRegion& at) {
    return b.client.tally.run([&](auto done) { return c.compare_swap(at, 0, 1, done); });
  };
  const auto doorbells = b.client.engine.stats().doorbells;
  EXPECT_EQ(refused(b.region.slice(1, 8)), Status::invalid_argument);
  EXPECT_EQ(refused(b.region.slice(0, 4)), Status::out_of_bounds);
  EXPECT_EQ(c.stats().outstanding, 0u);
  EXPECT_EQ(b.client.engine.stats().doorbells, doorbells);
  b.settle();
  EXPECT_EQ(copy(b.memory.bytes()), std::vector<std::byte>(16));
  EXPECT_TRUE(c.ready());
  b.finish();
}

TEST(Scenario10, ABurstWaitsForAReceiverThatDoesNotLook) {
  Bench b;
  // All ten are there before the server polls at all.
  const auto credits = [&] { return b.ends.client.stats().send_credits; };
  const Buffer first = b.of(std::byte{9});
  ASSERT_TRUE(b.until([&] {
    if (credits() < 10) (void)b.ends.client.send(first);
    return credits() >= 10;
  }));
  b.settle();
  ASSERT_GE(credits(), 10u);
  b.arrived.clear();
  constexpr std::int32_t kFive = 5;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 10; ++i) {
    buffers.push_back(b.client.buffer(sizeof kFive));
    std::memcpy(buffers.back().data(), &kFive, sizeof kFive);
    ASSERT_EQ(
        b.client.tally.run([&](auto done) { return b.ends.client.send(buffers.back(), done); }),
        Status::ok);
  }
  EXPECT_TRUE(b.arrived.empty());
  ASSERT_TRUE(b.until([&] { return b.arrived.size() == 10 && b.client.tally.idle(); }));
  for (const Arrived& one : b.arrived) {
    std::int32_t number = 0;
    ASSERT_EQ(one.size, sizeof number);
    std::memcpy(&number, one.bytes.data(), sizeof number);
    EXPECT_EQ(number, kFive);
  }
  b.settle();
  EXPECT_EQ(b.arrived.size(), 10u);
  EXPECT_EQ(b.client.tally.ended(Status::ok), 10u);
}

struct Part {
  std::size_t begin, end;
};
constexpr Part kParts[] = {{0, 4096}, {2048, 4096}, {1000, 4000}, {1234, 1235}};

TEST(Scenario11, SlicesOfLocalMemoryAreExact) {
  Bench b(4096);
  Buffer local = b.client.filled(4096, 3);
  for (const Part& part : kParts) {
    const std::size_t length = part.end - part.begin;
    const BufferSlice slice = local.slice(part.begin, length);
    ASSERT_TRUE(slice);
    EXPECT_EQ(slice.data(), local.data() + part.begin);
    EXPECT_EQ(slice.size(), length);
    // What an operation moves is the slice and nothing beside it.
    std::memset(b.memory.data(), 0xee, 4096);
    ASSERT_EQ(b.run([&](auto done) { return b.ends.client.write(slice, b.region, done); }).bytes,
              length);
    EXPECT_EQ(std::memcmp(b.memory.data(), local.data() + part.begin, length), 0);
    for (std::size_t i = length; i < 4096; ++i) ASSERT_EQ(b.memory.data()[i], std::byte{0xee}) << i;
  }
  const BufferSlice five = local.slice(0, 5);
  std::memcpy(five.data(), "hello", 5);
  EXPECT_EQ(std::memcmp(local.data(), "hello", 5), 0);
  EXPECT_EQ(local.data()[5], Node::pattern(3, 5));
  // A slice of a slice counts from that one's beginning.
  const BufferSlice inner = local.slice(1000, 3000).slice(234, 1);
  EXPECT_EQ(inner.data(), local.data() + 1234);
}

TEST(Scenario12, SlicesOfRemoteMemoryAreExact) {
  Bench b(4096);
  for (const Part& part : kParts) {
    const std::size_t length = part.end - part.begin;
    const RemoteRegion slice = b.region.slice(part.begin, length);
    ASSERT_TRUE(slice);
    EXPECT_EQ(slice.address, b.region.address + part.begin);
    EXPECT_EQ(slice.length, length);
    EXPECT_EQ(slice.rkey, b.region.rkey);
    EXPECT_EQ(slice.access, b.region.access);
    std::memset(b.memory.data(), 0xee, 4096);
    Buffer local = b.client.filled(length, 5);
    (void)b.run([&](auto done) { return b.ends.client.write(local.slice(), slice, done); });
    for (std::size_t i = 0; i < 4096; ++i) {
      const bool inside = i >= part.begin && i < part.end;
      ASSERT_EQ(b.memory.data()[i], inside ? Node::pattern(5, i - part.begin) : std::byte{0xee})
          << i;
    }
    std::memset(local.data(), 0, length);
    (void)b.run([&](auto done) { return b.ends.client.read(local.slice(), slice, done); });
    EXPECT_TRUE(Node::holds(local.bytes(), 5));
  }
  const Buffer hello = b.client.buffer(5);
  std::memcpy(hello.data(), "hello", 5);
  (void)b.run([&](auto d) { return b.ends.client.write(hello.slice(), b.region.slice(0, 5), d); });
  const Buffer back = b.client.buffer(5);
  (void)b.run([&](auto d) { return b.ends.client.read(back.slice(), b.region.slice(0, 5), d); });
  EXPECT_EQ(std::memcmp(back.data(), "hello", 5), 0);
}

TEST(Scenario13, SlicesThatAreNoneAreErrorsAndNothingIsPosted) {
  Bench b(4096);
  Buffer local = b.client.filled(4096, 1);
  constexpr auto kReversed = static_cast<std::size_t>(-2);  // [2, 0)
  EXPECT_FALSE(local.slice(2, kReversed));
  EXPECT_FALSE(local.slice(0, 4097));
  EXPECT_FALSE(local.slice(4097, 0));
  EXPECT_FALSE(local.slice().slice(2, kReversed));
  EXPECT_FALSE(b.region.slice(2, kReversed));
  EXPECT_FALSE(b.region.slice(0, 4097));
  EXPECT_FALSE(b.region.slice(4097, 0));
  Connection c = b.ends.client;
  const auto doorbells = b.client.engine.stats().doorbells;
  const auto refused = [&](const BufferSlice& ours, const RemoteRegion& theirs) {
    return b.client.tally.run([&](auto d) { return c.write(ours, theirs, d); }) ==
               Status::out_of_bounds &&
           b.client.tally.run([&](auto d) { return c.read(ours, theirs, d); }) ==
               Status::out_of_bounds;
  };
  for (const auto& [offset, length] :
       std::vector<std::pair<std::size_t, std::size_t>>{{2, kReversed}, {0, 4097}, {4097, 0}}) {
    EXPECT_TRUE(refused(local.slice(offset, length), b.region)) << offset;
    EXPECT_TRUE(refused(local.slice(0, 4), b.region.slice(offset, length))) << offset;
    EXPECT_EQ(c.send(local.slice(offset, length)), Status::out_of_bounds);
    EXPECT_EQ(c.write_with_imm(local.slice(offset, length), b.region, 1), Status::out_of_bounds);
  }
  // A message may be empty; what is moved between memories may not.
  EXPECT_TRUE(refused(local.slice(0, 0), b.region));
  EXPECT_TRUE(refused(local.slice(0, 0), b.region.slice(0, 0)));
  EXPECT_TRUE(refused(local.slice(0, 1), b.region.slice(0, 0)));
  EXPECT_EQ(b.server.engine.expose(b.memory.slice(0, 0), Access::remote_read).error().status,
            Status::invalid_argument);
  // Longer than what it is to go into.
  EXPECT_TRUE(refused(local.slice(0, 5), b.region.slice(4092, 4)));
  EXPECT_EQ(c.stats().outstanding, 0u);
  EXPECT_EQ(b.client.engine.stats().doorbells, doorbells);
  b.settle();
  EXPECT_EQ(b.memory.data()[0], std::byte{0});
  local.reset();
  b.finish();
}

/// The pool gives the memory of a READ or WRITE that was given up to nobody before it has ended.
TEST(Scenario18, ABufferIsUsableAgainOnlyAfterTheCompletion) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a send waits until the peer polls";
  Bench b;
  std::memset(b.memory.data(), 0x77, 64);
  Connection c = b.ends.client;
  Buffer got = b.client.filled(64, 1);
  Buffer ours = b.client.filled(64, 2);
  const Buffer message = b.client.filled(8, 3);
  const std::byte* const abandoned[] = {got.data(), ours.data()};
  // Behind a message that the server has not taken yet.
  ASSERT_EQ(b.client.tally.run([&](auto done) { return c.send(message, done); }), Status::ok);
  ASSERT_EQ(b.client.tally.run([&](auto done) { return c.read(got.slice(), b.region, done); }),
            Status::ok);
  ASSERT_EQ(c.cancel(c.last_operation()), Status::ok);
  ASSERT_EQ(b.client.tally.run([&](auto done) { return c.write(ours.slice(), b.region, done); }),
            Status::ok);
  ASSERT_EQ(c.cancel(c.last_operation()), Status::ok);
  for (int i = 0; i < 100; ++i) (void)b.client.poll();
  ASSERT_EQ(b.client.tally.ended(Status::cancelled), 2u);
  got.reset();
  ours.reset();
  const auto reused = [&] {
    std::size_t count = 0;
    std::vector<Buffer> all;
    while (Buffer one = b.client.engine.allocate(64)) all.push_back(std::move(one));
    for (const Buffer& one : all)
      count += one.data() == abandoned[0] || one.data() == abandoned[1] ? 1 : 0;
    EXPECT_GT(all.size(), 1000u);
    return count;
  };
  EXPECT_EQ(reused(), 0u);
  EXPECT_EQ(c.stats().outstanding, 3u);
  // The write comes after the read, which finds what was there before.
  ASSERT_TRUE(b.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_EQ(reused(), 2u);
  EXPECT_TRUE(Node::holds(b.memory.bytes(), 2));
  EXPECT_EQ(b.client.tally.completed, 3u);
  EXPECT_EQ(b.arrived.size(), 1u);
  EXPECT_TRUE(c.ready());
}

/// Nor that of a message which its receiver was offered, and may be about to pull.
TEST(Scenario18, ALongMessagesBufferIsUsableAgainOnlyAfterTheAnswer) {
  Config config = small_config();
  config.memory.large_bytes = 2u << 20;
  config.memory.windows = 4;
  config.connections.message_bytes = 1u << 20;
  Pair p(config);
  bool right = false;
  p.server.on_message = [&](Connection, Message& m) { right = Node::holds(m.bytes(), 5); };
  Connection c = p.ends.client;
  Buffer ours = p.client.filled(600'000, 5);
  const std::byte* const abandoned = ours.data();
  ASSERT_EQ(p.client.tally.run([&](auto done) { return c.send(ours, done); }), Status::ok);
  ASSERT_EQ(c.cancel(c.last_operation()), Status::ok);
  for (int i = 0; i < 100; ++i) (void)p.client.poll();
  ASSERT_EQ(p.client.tally.ended(Status::cancelled), 1u);
  ours.reset();
  const auto reused = [&] {
    std::vector<Buffer> all;
    while (Buffer one = p.client.engine.allocate(600'000)) all.push_back(std::move(one));
    EXPECT_GT(all.size(), 1u);
    return std::any_of(all.begin(), all.end(), [&](auto& b) { return b.data() == abandoned; });
  };
  EXPECT_FALSE(reused());
  ASSERT_TRUE(p.until([&] { return c.stats().outstanding == 0; }));
  EXPECT_TRUE(right);
  EXPECT_TRUE(reused());
  EXPECT_EQ(p.client.tally.completed, 1u);
  p.finish();
}

TEST(Scenario14, MemoryThatMayOnlyBeReadCannotBeWritten) {
  Bench b(64, Access::remote_read);
  b.memory.data()[5] = std::byte{42};
  Connection c = b.ends.client;
  const Buffer ours = b.of(std::byte{1}, 64);
  // At the writer, before anything is posted,
  EXPECT_EQ(b.client.tally.run([&](auto d) { return c.write(ours.slice(), b.region, d); }),
            Status::remote_access);
  EXPECT_EQ(c.stats().outstanding, 0u);
  const Buffer got = b.client.buffer(64);
  EXPECT_EQ(b.run([&](auto done) { return c.read(got.slice(), b.region, done); }).status,
            Status::ok);
  EXPECT_EQ(got.data()[5], std::byte{42});
  // and if it claims the right, by the device.
  RemoteRegion forged = b.region;
  forged.access = Access::remote_read_write;
  EXPECT_EQ(b.run([&](auto done) { return c.write(ours.slice(), forged, done); }).status,
            Status::remote_access);
  EXPECT_EQ(b.memory.data()[0], std::byte{0});
  EXPECT_EQ(b.memory.data()[5], std::byte{42});
}

TEST(Scenario21, RawMessagesTellTheirTrueLengthAfterThePost) {
  Node server, client;
  ListenOptions listen;
  listen.handlers = server.handlers();
  listen.settings.raw.emplace();
  server.listener = std::move(*server.engine.listen("127.0.0.1:0", listen));
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = listen.settings;
  Connection from = *client.engine.connect(server.listener.address(), options);
  ASSERT_TRUE(until({&server, &client}, [&] { return from.ready() && server.ready.size() == 1; }));
  Connection to = server.ready[0];
  for (const std::optional<std::uint32_t> immediate :
       {std::optional<std::uint32_t>(), std::optional<std::uint32_t>(1)}) {
    std::vector<int> order;
    spinwire::RawReceive got;
    const Buffer into = server.buffer(64);
    ASSERT_EQ(to.post_receive(
                  into.slice(),
                  [&](const spinwire::RawReceive& r) {
                    order.push_back(2);
                    got = r;
                  },
                  [&] { order.push_back(1); }),
              Status::ok);
    ASSERT_TRUE(until({&server, &client}, [&] { return order.size() == 1; }));
    const Buffer ones = client.buffer(8);
    std::memset(ones.data(), 1, 8);
    ASSERT_EQ(client.tally.run([&](auto done) {
      return immediate ? from.send_raw_with_imm(ones.slice(), *immediate, done)
                       : from.send_raw(ones.slice(), done);
    }),
              Status::ok);
    ASSERT_TRUE(
        until({&server, &client}, [&] { return order.size() == 2 && client.tally.idle(); }));
    EXPECT_EQ(order, (std::vector<int>{1, 2}));
    EXPECT_EQ(got.status, Status::ok);
    EXPECT_EQ(got.bytes, 8u);  // of the 64 that there was room for
    EXPECT_EQ(got.immediate, immediate);
    EXPECT_EQ(copy(into.bytes().first(8)), bytes_of({1, 1, 1, 1, 1, 1, 1, 1}));
  }
  EXPECT_EQ(to.close(), Status::ok);
  finish(client, server);
}

}  // namespace
}  // namespace async_rdma_data_test
