// Sends and writes of several parts, and writes with a notice.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/harness.h"

namespace gathered_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::OperationId;

/// How the operations travel.
enum class Way : std::uint8_t { as_configured, by_work_requests, own_domain };

std::string name_of(const testing::TestParamInfo<Way>& info) {
  constexpr std::array<const char*, 3> kNames = {"AsConfigured", "ByWorkRequests", "OwnDomain"};
  return kNames[static_cast<std::size_t>(info.param)];
}

Config gathered_config(Way way) {
  Config c = small_config();
  c.memory.send_bytes = 32u << 20;
  c.memory.rendezvous_bytes = 8u << 20;
  c.memory.windows = way == Way::own_domain ? 0 : 32;
  c.connections.max_message_bytes = 2u << 20;
  if (way == Way::own_domain) {
    c.connections.own_domains = 2;
    c.memory.receive_bytes = 8u << 20;
  }
  return way == Way::by_work_requests ? without_direct_messages(c) : c;
}

/// A pair, memory of the server that the client may write, and memory to gather from.
struct Gathering : Pair {
  explicit Gathering(Way way = Way::as_configured, const std::uint64_t* ticks = nullptr)
      : Gathering(gathered_config(way), way, ticks) {}
  explicit Gathering(const Config& config, Way way = Way::as_configured,
                     const std::uint64_t* ticks = nullptr)
      : Pair(config, ticks), own_(way == Way::own_domain) {
    if (own_) use_own_domains(*this);
    target = server.buffer(kTarget, Pool::lease);
    region = ends.server.expose(target, Access::remote_write).value();
    private_.resize(kPrivate);
    registered = ends.client.register_memory(private_, Access::local).value();
    server.on_message = [this](Connection, Message& m) {
      came.emplace_back(m.bytes().begin(), m.bytes().end());
    };
  }
  Connection& c() { return ends.client; }

  /// Divides `bytes` of pattern(seed) into `count` parts in different kinds of memory.
  std::vector<BufferSlice> parts_of(std::size_t bytes, std::size_t count, std::uint32_t seed) {
    std::vector<BufferSlice> parts;
    std::size_t at = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t size =
          i + 1 == count ? bytes - at : std::max<std::size_t>(bytes / count, 1);
      const std::size_t skip = i % 3 == 0 ? 0 : 5 * i;
      const BufferSlice part =
          i % 3 == 2 ? own_memory(size) : client.buffer(size + skip).slice(skip, size);
      for (std::size_t k = 0; k < size; ++k) part.data()[k] = Node::pattern(seed, at + k);
      at += size;
      parts.push_back(part);
    }
    return parts;
  }
  /// The next bytes of the registered memory, which has room for all that is in flight.
  BufferSlice own_memory(std::size_t size) {
    if (next_ + size > kPrivate) next_ = 0;
    next_ += size + 3;
    return registered.slice(next_ - size - 3, size);
  }
  /// Starts an operation once there is room for it.
  template <typename Call>
  Status accept(Call&& call) {
    Status status = Status::would_block;
    EXPECT_TRUE(until([&] {
      status = client.tally.run(call);
      return status != Status::would_block;
    }));
    return status;
  }
  bool target_holds(std::size_t bytes, std::uint32_t seed) const {
    return Node::holds({target.data(), bytes}, seed);
  }
  void ended() {
    ASSERT_TRUE(until([&] { return client.tally.idle() && c().stats().outstanding == 0; }));
  }
  void finish() {
    while (ends.server.revoke(region) == Status::would_block) settle(1);
    target.reset();
    registered = {};
    Pair::finish();
  }

  static constexpr std::size_t kTarget = 1u << 20;
  static constexpr std::size_t kPrivate = 4u << 20;
  Buffer target;
  RemoteRegion region;
  std::vector<std::byte> private_;
  MemoryRegion registered;
  std::vector<std::vector<std::byte>> came;

 private:
  bool own_;
  std::size_t next_ = 0;
};

class EngineGathered : public testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, EngineGathered,
                         testing::Values(Way::as_configured, Way::by_work_requests,
                                         Way::own_domain),
                         name_of);

constexpr std::array<std::size_t, 19> kSizes = {2,    7,    24,     55,     56,     57,   64,
                                                120,  1000, 1087,   1088,   4000,   4095, 4096,
                                                4097, 9000, 32'768, 70'000, 300'000};

TEST_P(EngineGathered, MessagesOfEverySizeArriveWholeAndInOrder) {
  Gathering t(GetParam());
  std::uint32_t seed = 0;
  std::vector<std::size_t> sizes;
  for (const std::size_t size : kSizes) {
    for (std::size_t count = 1; count <= std::min(t.c().max_send_sge(), size); ++count) {
      std::vector<BufferSlice> parts = t.parts_of(size, count, ++seed);
      const Status status = t.accept([&](auto done) {
        // Without a callback, too.
        const std::span<const BufferSlice> list(parts);
        if (seed % 4 != 0) return t.c().send(list, done);
        const Status accepted = t.c().send(list);
        if (accepted == Status::ok) done({});
        return accepted;
      });
      ASSERT_EQ(status, Status::ok) << size << " bytes in " << count << ": " << to_string(status);
      parts.clear();
      sizes.push_back(size);
      // One that goes another way keeps its place behind it.
      const Buffer single = t.client.filled(3, ++seed);
      ASSERT_TRUE(t.until([&] { return t.c().send(single) == Status::ok; }));
      sizes.push_back(3);
    }
  }
  ASSERT_TRUE(t.until([&] { return t.came.size() == sizes.size(); }));
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(t.came[i].size(), sizes[i]) << "message " << i;
    EXPECT_TRUE(Node::holds(t.came[i], static_cast<std::uint32_t>(i + 1))) << "message " << i;
  }
  t.ended();
  EXPECT_EQ(t.c().stats().messages_sent, sizes.size());
  t.finish();
}

TEST_P(EngineGathered, AnEmptyListIsAMessageWithoutBytes) {
  Gathering t(GetParam());
  ASSERT_TRUE(t.until([&] { return t.c().send(std::span<const BufferSlice>()) == Status::ok; }));
  EXPECT_EQ(t.accept([&](auto done) { return t.c().send(std::span<const BufferSlice>(), done); }),
            Status::ok);
  ASSERT_TRUE(t.until([&] { return t.came.size() == 2; }));
  EXPECT_TRUE(t.came[0].empty() && t.came[1].empty());
  t.ended();
  t.finish();
}

TEST_P(EngineGathered, WritesOfEverySizeLieInOrder) {
  Gathering t(GetParam());
  std::uint32_t seed = 0;
  std::uint64_t bytes = 0;
  for (const std::size_t size : kSizes) {
    for (std::size_t count = 1; count <= std::min(t.c().max_send_sge(), size); ++count) {
      std::vector<BufferSlice> parts = t.parts_of(size, count, ++seed);
      t.target.data()[size] = std::byte{77};
      ASSERT_EQ(t.client.tally.run([&](auto done) { return t.c().write(parts, t.region, done); }),
                Status::ok);
      parts.clear();
      t.ended();
      EXPECT_TRUE(t.target_holds(size, seed)) << size << " bytes in " << count;
      EXPECT_EQ(t.target.data()[size], std::byte{77});
      bytes += size;
    }
  }
  EXPECT_EQ(t.client.tally.ended(Status::ok), t.client.tally.completed);
  EXPECT_EQ(t.client.tally.bytes, bytes);
  EXPECT_EQ(t.c().stats().writes, t.client.tally.completed);
  EXPECT_EQ(t.c().stats().bytes_written, bytes);
  EXPECT_TRUE(t.came.empty());
  t.finish();
}

TEST_P(EngineGathered, ANoticeFindsTheDataInPlace) {
  Gathering t(GetParam());
  std::uint32_t seen = 0;
  std::size_t wrong = 0;
  const std::array<std::size_t, 6> notices = {0, 4, 56, 57, 1000, 4096};
  const std::array<std::size_t, 5> data = {1, 60, 1100, 5000, 100'000};
  t.server.on_message = [&](Connection, Message& m) {
    ++seen;
    wrong += m.size() == notices[seen % notices.size()] ? 0 : 1;
    wrong += Node::holds(m.bytes(), seen) ? 0 : 1;
    wrong += t.target_holds(data[seen % data.size()], seen * 7) ? 0 : 1;
  };
  const std::uint32_t rounds = amount(300);
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    const std::size_t size = data[i % data.size()];
    const std::vector<BufferSlice> parts =
        t.parts_of(size, 1 + i % std::min(t.c().max_send_sge(), size), i * 7);
    const Buffer notice = t.client.filled(notices[i % notices.size()], i);
    const auto start = [&](auto done) {
      return parts.size() == 1 ? t.c().write_and_send(parts[0], t.region, notice.bytes(), done)
                               : t.c().write_and_send(parts, t.region, notice.bytes(), done);
    };
    ASSERT_EQ(t.accept(start), Status::ok);
    // The next one may overwrite the data.
    ASSERT_TRUE(t.until([&] { return seen == i; }));
    t.ended();
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(t.client.tally.ended(Status::ok), rounds);
  EXPECT_EQ(t.c().stats().writes, rounds);
  EXPECT_EQ(t.c().stats().messages_sent, rounds);
  EXPECT_EQ(t.client.tally.bytes, t.c().stats().bytes_written + t.c().stats().bytes_sent);
  t.finish();
}

TEST_P(EngineGathered, NoticesKeepTheirPlaceAmongMessages) {
  Gathering t(GetParam());
  BufferSlice word = t.client.buffer(8);
  const std::size_t rounds = amount(500);
  std::size_t sent = 0;
  ASSERT_TRUE(t.until([&] {
    for (Status status = Status::ok; sent < rounds && status == Status::ok;
         sent += status == Status::ok ? 1 : 0) {
      const std::span<const std::byte> bytes = std::as_bytes(std::span(&sent, 1));
      status = sent % 3 == 0 ? t.c().write_and_send(word, t.region, bytes, {}, Post::defer)
                             : t.c().send_copy(bytes, {}, sent % 2 == 0 ? Post::defer : Post::now);
    }
    (void)t.c().flush();
    return t.came.size() == rounds;
  }));
  for (std::size_t i = 0; i < rounds; ++i) {
    std::size_t number = 0;
    ASSERT_EQ(t.came[i].size(), sizeof number);
    std::memcpy(&number, t.came[i].data(), sizeof number);
    ASSERT_EQ(number, i);
  }
  t.ended();
  word = {};
  t.finish();
}

TEST_P(EngineGathered, ARefusalTakesNothing) {
  Gathering t(GetParam());
  Node stranger(gathered_config(Way::as_configured));
  Buffer mine = t.client.filled(4000, 1);
  Buffer foreign = stranger.filled(100, 1);
  Buffer longest = t.client.buffer(3u << 20);
  const RemoteRegion unreadable = {t.region.address, t.region.length, t.region.rkey,
                                   Access::remote_read};
  {
    const std::vector<BufferSlice> good = {mine.slice(0, 8), mine.slice(8, 8)};
    const std::vector<BufferSlice> hole = {mine.slice(0, 8), BufferSlice()};
    const std::vector<BufferSlice> nothing = {mine.slice(0, 8), mine.slice(8, 0)};
    const std::vector<BufferSlice> strange = {mine.slice(0, 8), foreign.slice()};
    const std::vector<BufferSlice> large = {longest.slice(0, 1u << 20), longest.slice()};
    const std::vector<BufferSlice> many(t.c().max_send_sge() + 1, mine.slice(0, 8));
    const std::vector<std::byte> notice(4097);
    const std::span<const std::byte> few(notice.data(), 4);
    EXPECT_EQ(t.c().send(hole), Status::out_of_bounds);
    EXPECT_EQ(t.c().send(nothing), Status::out_of_bounds);
    EXPECT_EQ(t.c().send(strange), Status::invalid_argument);
    EXPECT_EQ(t.c().send(large), Status::message_too_long);
    EXPECT_EQ(t.c().send(many), Status::limit);
    EXPECT_EQ(t.c().write(hole, t.region), Status::out_of_bounds);
    EXPECT_EQ(t.c().write(std::span<const BufferSlice>(), t.region), Status::out_of_bounds);
    EXPECT_EQ(t.c().write(strange, t.region), Status::invalid_argument);
    EXPECT_EQ(t.c().write(large, t.region), Status::out_of_bounds);
    EXPECT_EQ(t.c().write(many, t.region), Status::limit);
    EXPECT_EQ(t.c().write(good, unreadable), Status::remote_access);
    EXPECT_EQ(t.c().write(good, RemoteRegion()), Status::out_of_bounds);
    EXPECT_EQ(t.c().write_and_send(strange, t.region, few), Status::invalid_argument);
    EXPECT_EQ(t.c().write_and_send(BufferSlice(), t.region, few), Status::out_of_bounds);
    EXPECT_EQ(t.c().write_and_send(large, t.region, few), Status::out_of_bounds);
    EXPECT_EQ(t.c().write_and_send(many, t.region, few), Status::limit);
    EXPECT_EQ(t.c().write_and_send(good, unreadable, few), Status::remote_access);
    EXPECT_EQ(t.c().write_and_send(good, t.region, notice), Status::message_too_long);
    EXPECT_EQ(t.c().stats().outstanding, 0u);
  }
  EXPECT_TRUE(mine.unique() && foreign.unique() && longest.unique());
  t.settle();
  EXPECT_TRUE(t.came.empty());
  mine.reset();
  longest.reset();
  t.finish();
}

TEST_P(EngineGathered, ACancelledOneLeavesNothingBehind) {
  Gathering t(GetParam());
  Buffer mine = t.client.filled(6000, 1);
  std::vector<BufferSlice> parts = {mine.slice(0, 100), mine.slice(200, 100),
                                    mine.slice(500, 1000)};
  const auto credits = t.c().stats().send_credits;
  const std::vector<std::byte> notice(500);
  using Start = std::function<Status(const CompletionCallback&, OperationId*)>;
  const std::vector<Start> starts = {
      [&](const CompletionCallback& done, OperationId* id) {
        return t.c().send(parts, done, Post::defer, id);
      },
      [&](const CompletionCallback& done, OperationId* id) {
        return t.c().write(parts, t.region, done, Post::defer, id);
      },
      [&](const CompletionCallback& done, OperationId* id) {
        return t.c().write_and_send(parts, t.region, notice, done, Post::defer, id);
      },
  };
  // One after the other, because there may be credit for one only; behind another operation.
  for (const Start& start : starts) {
    std::array<OperationId, 2> ids;
    const BufferSlice word = mine.slice(0, 8);
    ASSERT_EQ(t.client.tally.run([&](auto done) {
      return t.c().write(word, t.region, done, Post::defer, &ids[0]);
    }),
              Status::ok);
    ASSERT_EQ(t.client.tally.run([&](auto done) { return start(done, &ids[1]); }), Status::ok);
    const auto audit = t.client.engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
    EXPECT_EQ(t.c().last_operation(), ids[1]);
    EXPECT_EQ(t.c().cancel(ids[1]), Status::ok);
    EXPECT_EQ(t.c().last_operation(), ids[0]) << "more is left than the first";
    EXPECT_EQ(t.c().cancel(ids[0]), Status::ok);
  }
  EXPECT_EQ(t.client.tally.completed, 0u);
  t.ended();
  EXPECT_EQ(t.client.tally.ended(Status::cancelled), 6u);
  EXPECT_GE(t.c().stats().send_credits, credits);
  EXPECT_EQ(t.c().stats().writes, 0u);
  t.settle();
  EXPECT_TRUE(t.came.empty());
  parts.clear();
  EXPECT_TRUE(mine.unique());
  mine.reset();
  t.finish();
}

TEST_P(EngineGathered, AreFlushedOnceWhenTheConnectionEnds) {
  Gathering t(GetParam());
  Buffer mine = t.client.filled(6000, 1);
  {
    const std::array<BufferSlice, 2> parts = {mine.slice(0, 100), mine.slice(500, 1000)};
    const std::byte notice[80] = {};
    int accepted = 0;
    for (int i = 0; i < 4; ++i) {
      accepted += t.client.tally.run([&](auto done) {
        return t.c().write(parts, t.region, done, Post::defer);
      }) == Status::ok;
      accepted += t.client.tally.run([&](auto done) {
        return t.c().write_and_send(parts, t.region, notice, done, Post::defer);
      }) == Status::ok;
      accepted += t.client.tally.run([&](auto done) {
        return t.c().send(parts, done, Post::defer);
      }) == Status::ok;
    }
    EXPECT_GE(accepted, 5);
  }
  EXPECT_FALSE(mine.unique());
  t.client.engine = Engine();
  EXPECT_TRUE(mine.unique());
  t.client.tally.expect_exact();
  // The engine posts what is deferred, so the device may have some of them.
  EXPECT_EQ(t.client.tally.ended(Status::flushed) + t.client.tally.ended(Status::ok),
            t.client.tally.completed);
  // An adapter may end all of them before.
  if (on_softverbs()) {
    EXPECT_GT(t.client.tally.ended(Status::flushed), 2u);
  }
}

TEST_P(EngineGathered, AFailedWriteKeepsItsNoticeBack) {
  Gathering t(GetParam());
  Buffer mine = t.client.filled(100, 1);
  const std::array<BufferSlice, 2> parts = {mine.slice(0, 50), mine.slice(50, 50)};
  while (t.ends.server.revoke(t.region) == Status::would_block) t.settle(1);
  const std::byte notice[8] = {};
  ASSERT_EQ(t.client.tally.run(
                [&](auto done) { return t.c().write_and_send(parts, t.region, notice, done); }),
            Status::ok);
  ASSERT_TRUE(t.until([&] { return !t.client.closed.empty() && !t.server.closed.empty(); }));
  EXPECT_EQ(t.client.closed[0].status, Status::remote_access) << t.client.closed[0].message();
  EXPECT_EQ(t.client.tally.ended(Status::remote_access), 1u);
  EXPECT_EQ(t.client.tally.completed, 1u);
  EXPECT_TRUE(t.came.empty());
  EXPECT_TRUE(Node::holds(mine.bytes(), 1));
}

TEST(EngineGatheredRoom, AWriteAndItsNoticeAreAcceptedTogetherOrNotAtAll) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "writes may end while others are posted";
  const Config c = gathered_config(Way::by_work_requests);
  Gathering t(c);
  int writable = 0;
  spinwire::ConnectionHandlers handlers = t.client.handlers();
  handlers.on_writable = [&writable](Connection) { ++writable; };
  ASSERT_EQ(t.c().set_handlers(handlers), Status::ok);
  // A SEND that the peer has not taken holds up the WRITEs behind it.
  Buffer first = t.client.filled(8, 1);
  ASSERT_TRUE(t.until([&] {
    (void)t.c().send(first);
    return t.c().stats().send_credits > 8;
  }));
  ASSERT_TRUE(t.until([&] { return t.c().stats().outstanding == 0; }));
  t.settle();
  writable = 0;
  ASSERT_EQ(t.c().send(first), Status::ok);
  const BufferSlice word = t.client.buffer(8);
  const std::uint32_t before = t.c().stats().outstanding;
  std::uint32_t free = 0;
  while (t.c().write(word, t.region) == Status::ok) ++free;
  ASSERT_EQ(t.c().stats().outstanding, before + free);
  ASSERT_TRUE(t.until([&] { return writable == 1 && t.c().stats().outstanding == 0; }));
  // Once more, to one place from the end.
  ASSERT_EQ(t.c().send(first), Status::ok);
  for (std::uint32_t i = 1; i < free; ++i) ASSERT_EQ(t.c().write(word, t.region), Status::ok);
  const auto outstanding = t.c().stats().outstanding;
  const std::byte notice[8] = {};
  const auto came = t.came.size();
  EXPECT_EQ(t.c().write_and_send(word, t.region, notice), Status::would_block);
  EXPECT_EQ(t.c().stats().outstanding, outstanding);
  // One place is not enough to call back for.
  for (int i = 0; i < 4; ++i) (void)t.client.poll();
  EXPECT_EQ(writable, 1);
  EXPECT_EQ(t.c().write(word, t.region), Status::ok) << "there was one place";
  ASSERT_TRUE(t.until([&] { return writable == 2; }));
  EXPECT_EQ(t.c().write_and_send(word, t.region, notice), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.came.size() == came + 2; }));
  first.reset();
  t.ended();
}

TEST(EngineGatheredLimits, GoUpToTheDevices) {
  Gathering t;
  const std::uint32_t device = t.client.engine.device().max_sge;
  const std::uint32_t most = std::min(device - 1, 13u);  // of adapters with inline data
  EXPECT_EQ(t.c().max_send_sge(), t.client.engine.config().queues.max_send_sge);
  ConnectOptions options;
  options.handlers = t.client.handlers();
  options.settings.max_send_sge = device;
  const auto refused = t.client.engine.connect(t.server.listener.address(), options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::limit);
  EXPECT_NE(refused.error().message().find("max_send_sge"), std::string::npos)
      << refused.error().message();
  options.settings.max_send_sge = most;
  auto made = t.client.engine.connect(t.server.listener.address(), options);
  ASSERT_TRUE(made) << made.error().message();
  EXPECT_EQ(made->max_send_sge(), 0u);
  ASSERT_TRUE(t.until([&] { return made->ready() && t.server.ready.size() == 2; }));
  EXPECT_EQ(made->max_send_sge(), most);
  std::swap(t.c(), *made);
  for (const std::size_t size : {100u, 2000u, 4096u, 9000u}) {
    const auto came = t.came.size();
    const std::vector<BufferSlice> parts = t.parts_of(size, most, 5);
    ASSERT_TRUE(t.until([&] { return t.c().send(parts) == Status::ok; }));
    ASSERT_EQ(t.client.tally.run([&](auto done) { return t.c().write(parts, t.region, done); }),
              Status::ok);
    ASSERT_TRUE(t.until([&] { return t.came.size() == came + 1; }));
    EXPECT_TRUE(Node::holds(t.came.back(), 5));
    t.ended();
    EXPECT_TRUE(t.target_holds(size, 5));
  }
  static std::deque<std::string> log;
  log.clear();
  spinwire::set_log([](spinwire::LogLevel, std::string_view text) { log.emplace_back(text); },
                    spinwire::LogLevel::warning);
  const std::vector<BufferSlice> many = t.parts_of(100, most + 1, 5);
  EXPECT_EQ(t.c().send(many), Status::limit);
  EXPECT_EQ(t.c().write(many, t.region), Status::limit);
  spinwire::set_log({});
  ASSERT_EQ(log.size(), 1u);
  for (const std::string& part :
       {std::to_string(most + 1) + " parts", "gathers " + std::to_string(most),
        std::string("queues.max_send_sge"), "up to " + std::to_string(device - 1)})
    EXPECT_NE(log[0].find(part), std::string::npos) << log[0] << " lacks " << part;
}

TEST(EngineGatheredLimits, ALongMessageNeedsABlockToBeCopiedInto) {
  Config c = gathered_config(Way::by_work_requests);
  c.memory.send_bytes = 4u << 20;
  Gathering t(c);
  ASSERT_TRUE(t.until([&] {
    (void)t.c().send(std::span<const BufferSlice>());
    return t.c().stats().send_credits > 4;
  }));
  std::vector<Buffer> all;
  for (Buffer b; (b = t.client.engine.allocate(300'000));) all.push_back(std::move(b));
  ASSERT_FALSE(all.empty());
  {
    const std::array<BufferSlice, 2> parts = {all[0].slice(0, 1000), all[0].slice(1000, 200'000)};
    EXPECT_EQ(t.c().send(parts), Status::no_buffer);
    all.resize(1);
    ASSERT_TRUE(t.until([&] { return t.c().send(parts) == Status::ok; }));
  }
  ASSERT_TRUE(t.until([&] { return !t.came.empty() && t.came.back().size() == 201'000; }));
  all.clear();
  t.ended();
}

TEST(EngineGatheredRaw, ARawConnectionWritesButHasItsOwnSend) {
  const Config config = gathered_config(Way::as_configured);
  Node server(config);
  Node client(config);
  ListenOptions listen;
  listen.settings.raw.emplace();
  listen.settings.raw->max_send_sge = 3;
  listen.handlers = server.handlers();
  auto listener = server.engine.listen("127.0.0.1:0", listen);
  ASSERT_TRUE(listener);
  ConnectOptions options;
  options.settings = listen.settings;
  options.handlers = client.handlers();
  auto c = client.engine.connect(listener->address(), options);
  ASSERT_TRUE(c);
  ASSERT_TRUE(until({&client, &server}, [&] { return c->ready() && server.ready.size() == 1; }));
  EXPECT_EQ(c->max_send_sge(), 3u);
  Buffer target = server.buffer(4096, Pool::lease);
  const RemoteRegion region = server.engine.expose(target, Access::remote_write).value();
  Buffer mine = client.filled(300, 9);
  {
    const std::vector<BufferSlice> parts = {mine.slice(0, 100), mine.slice(100, 100),
                                            mine.slice(200, 100)};
    EXPECT_EQ(c->send(parts), Status::unsupported);
    EXPECT_EQ(c->write_and_send(parts, region, {}), Status::unsupported);
    EXPECT_EQ(client.tally.run([&](auto done) { return c->write(parts, region, done); }),
              Status::ok);
  }
  ASSERT_TRUE(until({&client, &server}, [&] { return client.tally.idle(); }));
  EXPECT_TRUE(Node::holds({target.data(), 300}, 9));
  ASSERT_TRUE(until({&client, &server}, [&] { return mine.unique(); }));
}

}  // namespace
}  // namespace gathered_test
