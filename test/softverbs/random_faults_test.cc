// All faults at once, on several queue pairs in both directions, with links that go down and up.
// Each work request completes exactly once, each message arrives whole and in order, and a seed
// repeats its run.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>

#include "softverbs/fault_link.h"

namespace softverbs_test::faults_random {

using spinwire::base::Random;
using std::chrono::nanoseconds;

constexpr std::size_t kPairs = 4;
constexpr std::uint64_t kSlots = 4096;  // of 1 KiB, for sends
constexpr std::size_t kReceives = std::size_t{kSlots} * 1024;
constexpr std::uint64_t kReceiveSlots = 512;
// Beside the slots and the receives, so that no operation changes the bytes of a message.
constexpr std::size_t kWritten = std::size_t{6} << 20;
constexpr std::size_t kDatagram = std::size_t{7} << 20;
static_assert(kReceives + kReceiveSlots * 2048 <= kWritten && kWritten + kSlots * 16 <= kDatagram);

sv::FaultPlan all_faults(std::uint64_t seed) {
  return {.seed = seed,
          .drop = 0.05,
          .duplicate = 0.05,
          .reorder = 0.1,
          .datagram_delay_max = nanoseconds(3000),
          .rnr = 0.01,
          .rnr_in_a_row = 2,
          .delay_max = nanoseconds(2000),
          .packet_loss = 0.01,
          .round_trip = nanoseconds(3000),
          .bytes_per_second = 2'000'000'000,
          .burst_bytes = 4096};
}

/// The head of each message.
struct Tag {
  std::uint64_t sequence;  ///< on its queue pair
  std::uint64_t id;
};

struct Connection {
  ibv_qp* qp = nullptr;
  std::uint64_t sent = 0;      ///< messages
  std::uint64_t received = 0;  ///< the next sequence number
  std::set<std::uint64_t> outstanding;
};

struct End {
  Node node;
  ibv_qp* ud;
  std::array<Connection, kPairs> connections;
  std::map<std::uint64_t, std::uint64_t> posted_to;  ///< work request to queue pair
  explicit End(const NodeOptions& o) : node(o), ud(ready_ud(node, true, kQkey, 256)) {
    for (std::uint64_t i = 0; i < kReceiveSlots; ++i) receive(i);
  }
  void receive(std::uint64_t slot) {
    must(node.post_recv(slot, kReceives + slot * 2048, 2048) == 0, "recv");
  }
  Connection* find(std::uint32_t qpn) {
    for (Connection& c : connections) {
      if (c.qp->qp_num == qpn) return &c;
    }
    return nullptr;
  }
};

class Storm {
 public:
  explicit Storm(std::uint64_t seed)
      : random_(seed),
        plans_{all_faults(seed), all_faults(seed + 1)},
        ends_{End(options(&plans_[0])), End(options(&plans_[1]))},
        ways_{Handle(ends_[0].node, ends_[1].node), Handle(ends_[1].node, ends_[0].node)} {
    for (std::size_t i = 0; i < kPairs; ++i) join(i);
  }

  void work(std::uint64_t requests) {
    while (next_id_ < requests) {
      post(random_.below(2), random_.below(kPairs));
      post_datagram(random_.below(2));
      if (random_.below(200) == 0) toggle();
      step(random_.below(2000));
    }
    for (std::size_t side = 0; side < 2; ++side)
      must(sv::set_links(ends_[side].node.context, sv::LinkState::up) == 0, "up");
    for (int i = 0; i < 4000 && outstanding() != 0; ++i) step(200'000);
  }

  [[nodiscard]] std::size_t outstanding() const {
    std::size_t count = 0;
    for (const End& end : ends_) {
      for (const Connection& c : end.connections) count += c.outstanding.size();
    }
    return count + datagrams_out_;
  }
  [[nodiscard]] sv::FaultStatistics statistics(std::size_t side) const {
    return sv::fault_statistics(ends_[side].node.context);
  }

  std::uint64_t trace = 0;
  std::uint64_t messages = 0;  ///< received
  std::map<int, std::uint64_t> statuses;

 private:
  NodeOptions options(const sv::FaultPlan* plan) {
    NodeOptions o = timed(&now_, plan);
    o.memory = std::size_t{8} << 20;
    o.cq_entries = 8192;
    o.send_depth = 64;
    return o;
  }
  void join(std::size_t pair) {
    for (End& end : ends_) {
      Connection& c = end.connections[pair];
      if (c.qp != nullptr) {
        ASSERT_TRUE(c.outstanding.empty());
        end.node.destroy(c.qp);
      }
      c = {};
      c.qp = end.node.make_qp();
    }
    ConnectOptions how{.rnr_timer = 1, .timeout = 3, .retries = 3, .rnr_retry = 3};
    connect(ends_[0].node, ends_[0].connections[pair].qp, ends_[1].node,
            ends_[1].connections[pair].qp, how);
  }

  void post(std::size_t side, std::size_t pair) {
    Node& node = ends_[side].node;
    Connection& c = ends_[side].connections[pair];
    if (c.outstanding.size() == 64) return;
    const std::uint64_t id = next_id_++;
    const std::size_t at = id % kSlots * 1024;
    constexpr ibv_wr_opcode kOpcodes[] = {IBV_WR_SEND,          IBV_WR_SEND,
                                          IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM,
                                          IBV_WR_RDMA_WRITE,    IBV_WR_RDMA_READ};
    const ibv_wr_opcode opcode = kOpcodes[random_.below(6)];
    const auto length = static_cast<std::uint32_t>(sizeof(Tag) + random_.below(900));
    const bool message = opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM ||
                         opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    const Tag tag{c.sent, id};
    if (message) ++c.sent;
    fill(node.bytes(at, length), id);
    std::memcpy(&node.memory[at], &tag, sizeof tag);
    Send send(id, node.sge(at, length), opcode);
    if (length <= 256 && opcode == IBV_WR_SEND) send.wr.send_flags |= IBV_SEND_INLINE;
    send.wr.imm_data = static_cast<std::uint32_t>(id);
    // Its own slot, which nothing else writes.
    Node& other = ends_[1 - side].node;
    send.to(other.address(kWritten + id % kSlots * 16), other.mr->rkey);
    if (opcode == IBV_WR_RDMA_WRITE_WITH_IMM || opcode == IBV_WR_RDMA_WRITE) send.sge.length = 16;
    ASSERT_EQ(send.post(c.qp), 0);
    c.outstanding.insert(id);
  }

  void post_datagram(std::size_t side) {
    Node& node = ends_[side].node;
    std::memset(node.memory.data() + kDatagram, 0x5a, 64);
    ASSERT_EQ(Datagram(~next_datagram_++, node.sge(kDatagram, 64), ways_[side],
                       ends_[1 - side].ud->qp_num)
                  .post(ends_[side].ud),
              0);
    ++datagrams_out_;
  }

  void toggle() {
    const auto state = random_.below(2) == 0 ? sv::LinkState::down : sv::LinkState::up;
    Node& node = ends_[random_.below(2)].node;
    ibv_qp* qp = ends_[0].connections[random_.below(kPairs)].qp;
    if (random_.below(3) != 0) {
      ASSERT_EQ(sv::set_links(node.context, state), 0);
    } else if (qp->state == IBV_QPS_RTS) {
      ASSERT_EQ(sv::set_link(qp, state), 0);
    }
  }

  void step(std::uint64_t ns) {
    now_ += ns;
    for (std::size_t side = 0; side < 2; ++side) {
      for (int i = 0; i < 12; ++i) poll(side);
    }
    for (std::size_t pair = 0; pair < kPairs; ++pair) restart(pair);
  }

  /// Reconnects a failed connection when all of its work has completed.
  void restart(std::size_t pair) {
    bool failed = false;
    for (const End& end : ends_) failed |= end.connections[pair].qp->state == IBV_QPS_ERR;
    if (!failed) return;
    for (End& end : ends_) {
      if (end.connections[pair].qp->state != IBV_QPS_ERR) end.node.fail(end.connections[pair].qp);
    }
    for (std::size_t side = 0; side < 2; ++side) {
      while (poll(side)) {
      }
    }
    join(pair);
    ++restarts;
  }

  bool poll(std::size_t side) {
    ibv_wc wc[16];
    const int n = ibv_poll_cq(ends_[side].node.cq, 16, wc);
    for (int i = 0; i < n; ++i) take(side, wc[i]);
    return n != 0;
  }

  void take(std::size_t side, const ibv_wc& wc) {
    End& end = ends_[side];
    trace = Random::mix(trace ^ wc.wr_id ^ std::uint64_t{wc.status} << 56 ^ now_ << 8 ^ side);
    ++statuses[wc.status];
    if (wc.qp_num == end.ud->qp_num) return receive_datagram(end, wc);
    Connection* c = end.find(wc.qp_num);
    ASSERT_NE(c, nullptr);
    if (wc.status == IBV_WC_SUCCESS &&
        (wc.opcode == IBV_WC_RECV || wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM)) {
      return on_message(end, *c, wc);
    }
    EXPECT_EQ(c->outstanding.erase(wc.wr_id), 1u) << "completed twice, or never posted";
  }

  void receive_datagram(End& end, const ibv_wc& wc) {
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    if (wc.opcode == IBV_WC_SEND) {
      --datagrams_out_;
      return;
    }
    EXPECT_TRUE(all_are(end.node.bytes(kReceives + wc.wr_id * 2048 + kGrh, 64), 0x5a));
    end.receive(wc.wr_id);
  }

  void on_message(End& end, Connection& c, const ibv_wc& wc) {
    ++messages;
    if (wc.opcode == IBV_WC_RECV) {
      const std::span<std::byte> bytes = end.node.bytes(kReceives + wc.wr_id * 2048, wc.byte_len);
      Tag tag{};
      std::memcpy(&tag, bytes.data(), sizeof tag);
      EXPECT_EQ(tag.sequence, c.received);
      std::vector<std::byte> expected(wc.byte_len);
      fill(expected, tag.id);
      EXPECT_EQ(std::memcmp(&expected[sizeof tag], &bytes[sizeof tag], wc.byte_len - sizeof tag),
                0);
    }
    ++c.received;
    end.receive(wc.wr_id);
  }

  std::uint64_t now_ = 1'000'000'000;
  Random random_;
  std::array<sv::FaultPlan, 2> plans_;
  std::array<End, 2> ends_;
  std::array<Handle, 2> ways_;
  std::uint64_t next_id_ = 0;
  std::uint64_t next_datagram_ = 0;
  std::size_t datagrams_out_ = 0;

 public:
  std::uint64_t restarts = 0;
};

TEST(SoftverbsFaultsAtOnce, EachRequestCompletesOnceInOrder) {
  Storm run(1);
  run.work(20'000);
  EXPECT_EQ(run.outstanding(), 0u);
  EXPECT_GT(run.messages, 5'000u);
  EXPECT_GT(run.restarts, 2u);
  EXPECT_GT(run.statuses[IBV_WC_SUCCESS], 15'000u);
  EXPECT_GT(run.statuses[IBV_WC_RETRY_EXC_ERR], 0u);
  EXPECT_GT(run.statuses[IBV_WC_WR_FLUSH_ERR], 0u);
  for (std::size_t side = 0; side < 2; ++side) {
    const sv::FaultStatistics s = run.statistics(side);
    for (const std::uint64_t count :
         {s.dropped, s.duplicated, s.reordered, s.datagrams_delayed, s.cut, s.rnr, s.delayed,
          s.timeouts, s.bytes, s.packets_lost, s.packets_retransmitted})
      EXPECT_GT(count, 0u);
  }
}

TEST(SoftverbsFaultsAtOnce, TheSeedTellsEverything) {
  const auto trace = [](std::uint64_t seed) {
    Storm run(seed);
    run.work(3000);
    EXPECT_EQ(run.outstanding(), 0u);
    return run.trace;
  };
  const std::uint64_t first = trace(7);
  EXPECT_EQ(trace(7), first);
  EXPECT_NE(trace(8), first);
}

TEST(SlowSoftverbsFaultsAtOnce, ManySeeds) {
  for (std::uint64_t seed = 100; seed < 200; ++seed) {
    Storm run(seed);
    run.work(4000);
    ASSERT_EQ(run.outstanding(), 0u) << "seed " << seed;
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed;
  }
}

}  // namespace softverbs_test::faults_random
