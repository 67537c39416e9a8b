// Long calls over connections that lose packets: each ends once, with every byte right.
#include <xxhash.h>

#include <memory>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "rpc/long_calls.h"
#include "softverbs/faults/fault_plan.h"

namespace rpc_long_calls_packets_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::ReplyCallback;
namespace sv = spinwire::softverbs;

constexpr std::size_t kBytes = std::size_t{8} << 20;
enum Methods : spinwire::Method { kSum = 20, kGive = 21 };
using Answer = std::array<std::uint64_t, 4>;  // 32 bytes

Config roomy() {
  Config c = long_call_config();
  c.memory.send_bytes = 24u << 20;
  c.memory.rendezvous_bytes = 24u << 20;
  c.connections.max_message_bytes = kBytes;
  c.queue_pair.ack_timeout = 8;  // about a millisecond
  return c;
}

void stamp(std::span<std::byte> bytes, std::uint64_t call) {
  for (std::size_t at = 0; at < bytes.size(); at += 1024) {
    const std::uint64_t word = call << 32 | at;
    std::memcpy(&bytes[at], &word, sizeof word);
  }
}
std::uint64_t sum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

struct LossyCalls : LongCalls {
  explicit LossyCalls(double loss) : LongCalls(roomy()) {
    has_ = server.engine.allocate(kBytes);
    from_ = client.engine.allocate(kBytes);
    EXPECT_TRUE(server.engine.serve(kSum, [this](Request& r) {
      ++served;
      const Answer answer{r.bytes().size(), sum_of(r.bytes()), 0, 0};
      EXPECT_EQ(r.reply(std::as_bytes(std::span(answer))), Status::ok);
    }));
    EXPECT_TRUE(server.engine.serve(kGive, [this](Request& r) {
      stamp(has_.bytes(), ++served);
      EXPECT_EQ(r.reply(has_.slice()), Status::ok);
    }));
    for (const Node* node : {&client, &server}) {
      sv::FaultPlan plan;
      plan.seed = node == &client ? 1 : 2;
      plan.drop = plan.packet_loss = loss;
      EXPECT_TRUE(sv::set_faults(device(*node), plan));
    }
  }
  static ibv_context* device(const Node& node) {
    return spinwire::detail::core_of(node.engine)->context.device->context();
  }
  void take(std::uint64_t number) {
    stamp(from_.bytes(), number);
    bool over = false;
    const ReplyCallback done = [&over, this](Reply& r) {
      over = true;
      const Answer answer{kBytes, sum_of(from_.bytes()), 0, 0};
      EXPECT_EQ(r.status(), Status::ok);
      EXPECT_EQ(bytes_of(r.bytes()), bytes_of(std::as_bytes(std::span(answer))));
    };
    ASSERT_EQ(session.call(kSum, from_.slice(), done), Status::ok);
    ASSERT_TRUE(until([&] { return over; }));
  }
  void give() {
    Buffer& to = from_;
    std::fill_n(to.data(), kBytes, std::byte{0});
    bool over = false;
    CallOptions options = into(to);
    const ReplyCallback done = [&over](Reply& r) {
      over = true;
      EXPECT_EQ(r.status(), Status::ok);
      EXPECT_EQ(r.bytes().size(), kBytes);
    };
    ASSERT_EQ(session.call(kGive, std::span<const std::byte>(), done, options), Status::ok);
    ASSERT_TRUE(until([&] { return over; }));
    EXPECT_EQ(sum_of(to.bytes()), sum_of(has_.bytes()));
  }
  [[nodiscard]] std::uint64_t packets_lost() const {
    return sv::fault_statistics(device(client)).packets_lost +
           sv::fault_statistics(device(server)).packets_lost;
  }
  void run(std::uint64_t calls) {
    for (std::uint64_t i = 1; i <= calls; ++i) {
      take(i);
      give();
    }
    EXPECT_EQ(served, 2 * calls);
    EXPECT_EQ(client.engine.stats().connected, 1u) << "it is the first one still";
    const std::uint64_t lost = packets_lost();
    for (const Node* node : {&client, &server}) sv::clear_faults(device(*node));
    from_.reset();
    has_.reset();
    finish_long_calls();
    lost_ = lost;
  }
  [[nodiscard]] std::uint64_t lost() const { return lost_; }

  std::uint64_t served = 0;

 private:
  std::uint64_t lost_ = 0;
  Buffer has_;
  Buffer from_;
};

TEST(RpcLongCallsPackets, OneInAThousandIsLost) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  LossyCalls t(1e-3);
  t.run(5);
  EXPECT_GT(t.lost(), 8u) << "of about 25,000";
}

TEST(RpcLongCallsPackets, OneInTenThousandIsLost) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  LossyCalls t(1e-4);
  t.run(30);
  EXPECT_GT(t.lost(), 0u) << "of about 150,000";
}

TEST(SlowRpcLongCallsPackets, ManyAreLost) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  LossyCalls t(0.02);
  t.run(50);
  EXPECT_GT(t.lost(), 2000u);
}

}  // namespace
}  // namespace rpc_long_calls_packets_test
