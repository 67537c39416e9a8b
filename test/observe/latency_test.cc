// Latencies of sampled operations and calls.
#include "observe/latency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "engine/raw_ends.h"
#include "observe/engine_folder.h"
#include "rpc/rpc_ends.h"

namespace observe_test {
namespace {

using engine_test::Pair;
using observe::bucket_of;
using observe::Latencies;
using observe::TimedStage;
using observe::TimedWork;
using rpc_test::Calls;
using spinwire::Access;
using spinwire::BufferSlice;
using spinwire::Pool;

Config sampled(const EngineFolder& folder, std::uint32_t sample,
               Config c = engine_test::small_config()) {
  c.observability.directory = folder.path();
  c.observability.sample = sample;
  return c;
}

/// Histograms with this name ("call.total") of all engines in the folder.
std::vector<LatencyHistogram> find(const EngineFolder& folder, std::string_view work,
                                   std::string_view stage,
                                   std::optional<spinwire::Method> method = std::nullopt) {
  std::vector<LatencyHistogram> found;
  for (const EngineFile& file : folder.engines()) {
    const auto reading = read_engine(file);
    EXPECT_TRUE(reading) << reading.error().message();
    if (!reading) continue;
    for (const LatencyHistogram& each : reading->latencies) {
      if (each.work == work && each.stage == stage && each.method == method) found.push_back(each);
    }
  }
  return found;
}
std::uint64_t samples(const std::vector<LatencyHistogram>& found) {
  std::uint64_t all = 0;
  for (const LatencyHistogram& each : found) all += each.samples;
  return all;
}

class ObserveLatency : public WithEngineFolder {};

TEST_F(ObserveLatency, BucketsAreSixteenForEachPowerOfTwo) {
  std::uint32_t last = 0;
  for (std::uint64_t ns = 0; ns < 100'000; ++ns) {
    const std::uint32_t bucket = bucket_of(ns);
    ASSERT_LE(bucket, last + 1);
    ASSERT_GE(bucket, last);
    last = bucket;
  }
  for (int power = 5; power < 35; ++power) {
    const std::uint64_t ns = std::uint64_t{1} << power;
    EXPECT_EQ(bucket_of(2 * ns), bucket_of(ns) + 16);
    EXPECT_EQ(bucket_of(ns + (ns >> 4) - 1), bucket_of(ns));
    EXPECT_EQ(bucket_of(ns + (ns >> 4)), bucket_of(ns) + 1);
  }
}

TEST_F(ObserveLatency, PercentilesAreAsExactAsTheBuckets) {
  const EngineFolder folder;
  auto file = PageFile::create(options_in(folder));
  ASSERT_TRUE(file);
  Latencies latencies;
  latencies.record(TimedWork::call, TimedStage::total, Nanoseconds(1));  // not open yet
  latencies.open();
  EXPECT_EQ(latencies.next_changed(0), observe::kLatencyRows);
  for (int i = 1; i <= 1000; ++i)
    latencies.record(TimedWork::call, TimedStage::total, std::chrono::microseconds(i));
  const std::uint32_t row = latencies.next_changed(0);
  ASSERT_LT(row, file->latencies());
  file->write(row, latencies.publish(row));
  EXPECT_EQ(latencies.next_changed(0), observe::kLatencyRows);
  const auto found = find(folder, "call", "total");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].samples, 1000u);
  EXPECT_TRUE(found[0].is_consistent);
  EXPECT_NEAR(found[0].sum_seconds, 0.5005, 1e-6);
  EXPECT_EQ(found[0].longest, std::chrono::milliseconds(1));
  for (const double share : {0.01, 0.5, 0.9, 0.99, 0.999}) {
    const double exact = share * 1e6;
    EXPECT_GE(static_cast<double>(found[0].quantile(share).count()), exact * 0.999) << share;
    EXPECT_LE(static_cast<double>(found[0].quantile(share).count()), exact * 1.063) << share;
  }
  EXPECT_EQ(found[0].quantile(1), found[0].longest);
  EXPECT_EQ(found[0].quantile(7), found[0].longest);
}

TEST_F(ObserveLatency, MethodsBeyondTheTableCountOnlyTogether) {
  Latencies latencies;
  latencies.open();
  for (spinwire::Method method = 0; method < 3 * observe::kTimedMethods; ++method) {
    latencies.record(TimedWork::handler, TimedStage::total, Nanoseconds(5));
    latencies.record(TimedWork::handler, method, Nanoseconds(5));
    latencies.record(TimedWork::call, method, Nanoseconds(5));
  }
  std::uint32_t rows = 0;
  for (std::uint32_t i = latencies.next_changed(0); i < observe::kLatencyRows;
       i = latencies.next_changed(i + 1))
    ++rows;
  EXPECT_EQ(rows, 2 * observe::kTimedMethods + 1);
}

TEST_F(ObserveLatency, EachOperationIsMeasuredWithAnIntervalOfOne) {
  const EngineFolder folder;
  Pair p(sampled(folder, 1, engine_test::without_direct_messages()));
  const Buffer b = p.client.filled(64, 1);
  int ended = 0;
  for (int i = 0; i < 10; ++i) {
    const auto done = [&ended](const engine_test::Completion& c) {
      EXPECT_EQ(c.status, Status::ok);
      ++ended;
    };
    ASSERT_TRUE(p.until([&] { return p.ends.client.send(b, done) == Status::ok; }));
    ASSERT_TRUE(p.until([&] { return p.ends.client.send(b) == Status::ok; }));
    ASSERT_TRUE(p.until([&] { return ended == i + 1; }));
  }
  for (const char* const stage : {"total", "posting", "transfer", "delivery"}) {
    ASSERT_TRUE(p.until([&] { return samples(find(folder, "message", stage)) == 20; })) << stage;
    for (const LatencyHistogram& each : find(folder, "message", stage)) {
      EXPECT_LE(each.quantile(0.5), each.longest);
      EXPECT_GE(each.longest.count(), 0);
    }
  }
  EXPECT_EQ(samples(find(folder, "write", "total")), 0u);
}

TEST_F(ObserveLatency, OneOfManyIsMeasured) {
  const EngineFolder folder;
  Pair p(sampled(folder, 8, engine_test::without_direct_messages()));
  const Buffer b = p.client.filled(64, 1);
  constexpr int kMessages = 4000;
  for (int i = 0; i < kMessages; ++i)
    ASSERT_TRUE(p.until([&] { return p.ends.client.send(b) == Status::ok; }));
  ASSERT_TRUE(p.until([&] { return p.server.messages == kMessages; }));
  p.settle(2000);
  ASSERT_TRUE(p.until([&] {
    const auto measured = samples(find(folder, "message", "total"));
    return measured > kMessages / 8 / 2 && measured < kMessages / 8 * 2;
  }));
}

TEST_F(ObserveLatency, CallsAndHandlersAreMeasuredByMethod) {
  const EngineFolder folder;
  Calls calls(sampled(folder, 1, rpc_test::rpc_config()));
  for (int i = 0; i < 5; ++i) (void)calls.call(rpc_test::kEcho, {});
  (void)calls.call(rpc_test::kCount, {});
  ASSERT_TRUE(calls.until([&] {
    return samples(find(folder, "call", "total")) == 6 &&
           samples(find(folder, "call", "delivery")) == 6 &&
           samples(find(folder, "call", "total", rpc_test::kEcho)) == 5 &&
           samples(find(folder, "call", "total", rpc_test::kCount)) == 1 &&
           samples(find(folder, "handler", "total")) == 6 &&
           samples(find(folder, "handler", "total", rpc_test::kEcho)) == 5;
  }));
  calls.finish();
}

TEST_F(ObserveLatency, CallsOverConnectionsAndTheirHandlersAreMeasuredByMethod) {
  const EngineFolder folder;
  Calls calls(sampled(folder, 1, rpc_test::over(spinwire::RpcTransport::connection)));
  const auto request = rpc_test::filled(1000, 1);
  for (int i = 0; i < 3; ++i) {
    const auto ended = calls.call(rpc_test::kEcho, request);
    ASSERT_EQ(ended.status, Status::ok) << ended.text;
    EXPECT_EQ(ended.bytes, request);
  }
  ASSERT_TRUE(calls.until([&] {
    return samples(find(folder, "call", "total", rpc_test::kEcho)) == 3 &&
           samples(find(folder, "handler", "total")) == 3 &&
           samples(find(folder, "handler", "total", rpc_test::kEcho)) == 3;
  }));
  calls.finish();
}

/// A pair whose operations are all measured, and memory of the server that the client may access.
struct Measured : Pair {
  Measured(const EngineFolder& folder, const Config& config)
      : Pair(sampled(folder, 1, config)), folder_(folder) {
    target = server.buffer(4096, Pool::lease);
    const bool atomics = server.engine.device().atomics;
    region = server.engine
                 .expose(target.slice(), atomics ? Access::remote_all : Access::remote_read_write)
                 .value();
  }
  /// Runs an operation to its end.
  template <typename Call>
  void run(Call&& call) {
    Status status = Status::would_block;
    ASSERT_TRUE(until([&] {
      status = client.tally.run(call);
      return status != Status::would_block;
    }));
    ASSERT_EQ(status, Status::ok);
    ASSERT_TRUE(until([&] { return client.tally.idle(); }));
    ASSERT_EQ(client.tally.ended(Status::ok), client.tally.accepted);
  }
  /// Waits until so many operations of the kind were measured, with all their stages.
  void expect(const std::string& work, std::uint64_t count) {
    for (const char* const stage : {"total", "posting", "transfer", "delivery"}) {
      ASSERT_TRUE(until([&] { return samples(find(folder_, work, stage)) >= count; }))
          << work << '.' << stage << ": " << samples(find(folder_, work, stage));
    }
    for (const LatencyHistogram& each : find(folder_, work, "total")) {
      EXPECT_EQ(each.samples, count) << work;
    }
  }
  void finish() {
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    target.reset();
    Pair::finish();
  }
  Buffer target;
  spinwire::RemoteRegion region;

 private:
  const EngineFolder& folder_;
};

Config with_long_messages(bool direct, std::uint32_t windows) {
  Config c = direct ? engine_test::small_config() : engine_test::without_direct_messages();
  c.memory.send_bytes = 16u << 20;
  c.memory.rendezvous_bytes = 8u << 20;
  c.memory.windows = windows;
  c.connections.max_message_bytes = 2u << 20;
  return c;
}

TEST_F(ObserveLatency, LongMessagesAreMeasuredWhateverWayTheyTake) {
  const struct {
    bool direct;
    std::uint32_t windows;
  } ways[] = {{true, 16}, {false, 16}, {false, 0}};
  for (const auto& way : ways) {
    const EngineFolder folder;
    Measured p(folder, with_long_messages(way.direct, way.windows));
    for (const bool takes_directly : {false, true}) {
      p.server.has_on_offer = !takes_directly;
      p.ends = engine_test::connect(p.client, p.server);
      for (const std::size_t size : {std::size_t{70'000}, std::size_t{1} << 20}) {
        const Buffer b = p.client.filled(size, 1);
        p.run([&](auto done) { return p.ends.client.send(b, done); });
        const std::vector<BufferSlice> parts{b.slice(0, 100), b.slice(200, 69'800)};
        p.run([&](auto done) { return p.ends.client.send(parts, done); });
      }
    }
    p.expect("long_message", 8);
    EXPECT_EQ(samples(find(folder, "message", "total")), 0u);
    p.finish();
  }
}

TEST_F(ObserveLatency, OperationsOfSeveralPartsAreMeasuredByTheirKind) {
  for (const bool direct : {false, true}) {
    const EngineFolder folder;
    Measured p(folder, with_long_messages(direct, 16));
    Buffer b = p.client.filled(4096, 1);
    std::vector<BufferSlice> parts{b.slice(0, 1000), b.slice(1500, 1000), b.slice(3000, 7)};
    spinwire::Connection& c = p.ends.client;
    for (int i = 0; i < 3; ++i)
      p.run([&](auto done) { return c.write_and_send(parts, p.region, b.bytes().first(9), done); });
    for (int i = 0; i < 2; ++i) p.run([&](auto done) { return c.write(parts, p.region, done); });
    p.run([&](auto done) { return c.send(parts, done); });
    p.expect("write_and_send", 3);
    p.expect("write", 2);
    p.expect("message", 1);
    parts.clear();
    b.reset();
    p.finish();
  }
}

TEST_F(ObserveLatency, OneSidedOperationsAreMeasuredByTheirKind) {
  const EngineFolder folder;
  Measured p(folder, engine_test::small_config());
  Buffer b = p.client.filled(8, 1);
  spinwire::Connection& c = p.ends.client;
  const spinwire::RemoteRegion& region = p.region;
  const bool atomics = p.client.engine.device().atomics;
  p.run([&](auto done) { return c.write(b.slice(), region, done); });
  p.run([&](auto done) { return c.write_with_imm(b.slice(), region, 1, done); });
  for (int i = 0; i < 3; ++i) p.run([&](auto done) { return c.read(b.slice(), region, done); });
  if (atomics) {
    const spinwire::RemoteRegion word = region.slice(0, 8);
    for (int i = 0; i < 2; ++i) p.run([&](auto done) { return c.compare_swap(word, 0, 1, done); });
    for (int i = 0; i < 2; ++i) p.run([&](auto done) { return c.fetch_add(word, 1, done); });
  }
  p.expect("write", 2);
  p.expect("read", 3);
  p.expect("atomic", atomics ? 4 : 0);
  b.reset();
  p.finish();
}

TEST_F(ObserveLatency, OperationsOfRawConnectionsAreMeasuredByTheirKind) {
  const EngineFolder folder;
  raw_test::RawPair p({}, sampled(folder, 1));
  const Buffer& data = p.data(100, 1);
  const Buffer& target = p.at_server(256);
  const auto region = p.server.engine.expose(target.slice(0, 100), Access::remote_write).value();
  for (int i = 0; i < 3; ++i) {
    const Buffer& into = p.at_server(256);
    ASSERT_EQ(p.at_b.post(p.b, into.slice()), Status::ok);
    ASSERT_EQ(p.client.tally.run([&](auto done) {
      return i == 0   ? p.a.send_raw(data.slice(), done)
             : i == 1 ? p.a.send_raw_with_imm(data.slice(), 7, done)
                      : p.a.write_with_imm(data.slice(), region, 7, done);
    }),
              Status::ok);
    ASSERT_TRUE(
        p.until([&] { return p.at_b.ended == p.at_b.accepted() && p.client.tally.idle(); }));
  }
  for (const char* const stage : {"total", "posting", "transfer", "delivery"}) {
    ASSERT_TRUE(p.until([&] {
      return samples(find(folder, "raw_send", stage)) == 2 &&
             samples(find(folder, "write", stage)) == 1;
    })) << stage;
  }
  EXPECT_EQ(p.server.engine.revoke(region), Status::ok);
  p.finish();
}

TEST_F(ObserveLatency, ManyRefusedCallsLeaveRoomForOthers) {
  const EngineFolder folder;
  Calls calls(sampled(folder, 1, rpc_test::rpc_config()), nullptr, 4);
  // The first call makes the server reserve receives for the whole window.
  (void)calls.call(rpc_test::kEcho, {});
  for (int i = 0; i < 4; ++i) ASSERT_EQ(calls.begin(rpc_test::kLater, {}), Status::ok);
  while (calls.begin(rpc_test::kEcho, {}) == Status::ok) {
  }
  for (int i = 0; i < 100; ++i) EXPECT_EQ(calls.begin(rpc_test::kEcho, {}), Status::would_block);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 4; }));
  for (auto& each : calls.later)
    EXPECT_EQ(each.call.reply(std::span<const std::byte>()), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.all_ended(); }));
  const auto before = samples(find(folder, "call", "total"));
  (void)calls.call(rpc_test::kEcho, {});
  ASSERT_TRUE(calls.until([&] { return samples(find(folder, "call", "total")) > before; }));
  calls.finish();
}

TEST_F(ObserveLatency, NothingIsMeasuredWithAnIntervalOfZero) {
  const EngineFolder folder;
  Calls calls(sampled(folder, 0, rpc_test::rpc_config()));
  for (int i = 0; i < 20; ++i) (void)calls.call(rpc_test::kEcho, {});
  for (const EngineFile& file : folder.engines()) EXPECT_TRUE(read_engine(file)->latencies.empty());
}

}  // namespace
}  // namespace observe_test
