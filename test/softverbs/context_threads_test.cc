// Contexts driven by their own threads: traffic, sleeping lanes and revocation race.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/random.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::threads {

constexpr std::uint32_t kWindow = 32;
constexpr std::size_t kSlot = 1024;
// Offsets in each node's memory.
constexpr std::size_t kSendAt = 0;
constexpr std::size_t kReceiveAt = 256 * 1024;
constexpr std::size_t kWrittenAt = 512 * 1024;  ///< the peer writes here
constexpr std::size_t kConstAt = 768 * 1024;    ///< the peer reads from here
constexpr std::size_t kReadAt = 896 * 1024;     ///< where it puts what it read

/// The head of each message. The rest follows from `number`.
struct Header {
  std::uint64_t number;     ///< of this message
  std::uint64_t processed;  ///< messages processed of the other direction
  std::uint64_t written;    ///< number of the WRITE before this message, or 0
};
constexpr std::uint32_t kLargest = kSlot - sizeof(Header);

enum Kind : std::uint64_t { kMessage, kWrite, kRead };

/// One end of the traffic: sends, and checks what arrives.
struct End {
  Node& node;
  ibv_qp* qp;
  std::uint64_t peer_memory;
  std::uint32_t peer_key;
  std::uint64_t messages;
  std::uint64_t seed;
  std::uint64_t sent = 0, completed = 0, received = 0, peer_processed = 0;
  std::uint64_t written = 0, reads = 0, reads_done = 0;
  std::string error = {};

  void fail(const std::string& what) {
    if (error.empty()) error = what;
  }
  [[nodiscard]] static std::uint64_t id(Kind kind, std::uint64_t number) {
    return kind << 60 | number;
  }

  void post(Kind kind, std::uint64_t number, ibv_sge sge, ibv_wr_opcode opcode,
            std::size_t remote) {
    Send send(id(kind, number), sge, opcode);
    send.to(peer_memory + remote, peer_key);
    if (send.post(qp) != 0) fail("post_send");
  }
  /// Sends the next message, sometimes after a WRITE that it reports or a READ.
  void send_one(spinwire::base::Random& random) {
    const std::uint64_t number = sent + 1;
    const std::size_t slot = sent % kWindow * kSlot;
    Header header{number, received, 0};
    const std::uint64_t what = random.below(8);
    // The earlier write to that slot must have been checked.
    if (what <= 1 && number < peer_processed + kWindow) {
      const std::size_t at = slot + kSlot * kWindow;
      fill(node.bytes(kSendAt + at, kSlot), ~number);
      header.written = number;
      post(kWrite, number, node.sge(kSendAt + at, kSlot), IBV_WR_RDMA_WRITE, kWrittenAt + slot);
      written = number;
    } else if (what == 2 && reads == reads_done) {
      ++reads;
      post(kRead, number, node.sge(kReadAt, kSlot), IBV_WR_RDMA_READ, kConstAt);
    }
    const auto size = static_cast<std::uint32_t>(random.below(3) == 0 ? random.below(kLargest)
                                                                      : random.below(24));
    std::memcpy(&node.memory[kSendAt + slot], &header, sizeof header);
    fill(node.bytes(kSendAt + slot + sizeof header, size), number);
    post(kMessage, number,
         node.sge(kSendAt + slot, size + static_cast<std::uint32_t>(sizeof header)), IBV_WR_SEND,
         0);
    ++sent;
  }
  void on_message(const ibv_wc& wc) {
    const std::size_t slot = kReceiveAt + wc.wr_id * kSlot;
    Header header{};
    std::memcpy(&header, &node.memory[slot], sizeof header);
    if (header.number != received + 1) return fail("message out of order");
    if (!holds(node.bytes(slot + sizeof header, wc.byte_len - sizeof header), header.number))
      return fail("message changed");
    const std::size_t at = kWrittenAt + (header.number - 1) % kWindow * kSlot;
    if (header.written != 0 && !holds(node.bytes(at, kSlot), ~header.number))
      return fail("write changed");
    ++received;
    peer_processed = header.processed;
    if (node.post_recv(wc.wr_id, slot, kSlot) != 0) fail("post_recv");
  }
  void take(const ibv_wc& wc) {
    if (wc.status != IBV_WC_SUCCESS) return fail("status " + std::to_string(wc.status));
    if (wc.opcode == IBV_WC_RECV) return on_message(wc);
    switch (wc.wr_id >> 60) {
      case kRead:
        ++reads_done;
        if (!holds(node.bytes(kReadAt, kSlot), 4711)) fail("read changed");
        break;
      case kMessage:
        if ((wc.wr_id & 0xffffffff) != ++completed) fail("completion out of order");
        break;
      default:
        break;
    }
  }
  [[nodiscard]] bool done() const {
    return !error.empty() || (completed == messages && received == messages);
  }
  void run() {
    spinwire::base::Random random(seed);
    const auto step = [&] {
      if (sent < messages && sent - completed < kWindow) send_one(random);
      ibv_wc wc[16];
      const int n = ibv_poll_cq(node.cq, 16, wc);
      for (int i = 0; i < n; ++i) take(wc[i]);
      if (n == 0) std::this_thread::yield();
    };
    if (!until(
            step, [&] { return done(); }, std::chrono::minutes(10)))
      fail("not done in time");
  }
};

NodeOptions for_traffic(std::uint32_t receives) {
  NodeOptions options;
  options.srq_depth = receives;
  options.send_depth = 4 * kWindow;
  options.memory = 1u << 20;
  return options;
}

void both_ways(std::uint32_t receives, std::uint64_t messages) {
  Link link(for_traffic(receives));
  for (Node* node : {&link.a, &link.b}) {
    fill(node->bytes(kConstAt, kSlot), 4711);
    for (std::uint32_t i = 0; i < receives; ++i)
      ASSERT_EQ(node->post_recv(i, kReceiveAt + i * kSlot, kSlot), 0);
  }
  End a{.node = link.a,
        .qp = link.qa,
        .peer_memory = link.b.address(0),
        .peer_key = link.b.mr->rkey,
        .messages = messages,
        .seed = 1};
  End b{.node = link.b,
        .qp = link.qb,
        .peer_memory = link.a.address(0),
        .peer_key = link.a.mr->rkey,
        .messages = messages,
        .seed = 2};
  std::thread thread([&] { a.run(); });
  b.run();
  thread.join();
  EXPECT_EQ(a.error, "");
  EXPECT_EQ(b.error, "");
  EXPECT_GT(a.written + a.reads, 0u);
  EXPECT_GT(b.written + b.reads, 0u);
}

TEST(ThreadsSoftverbs, TrafficBothWays) { both_ways(64, 20'000); }

TEST(ThreadsSoftverbs, TrafficWithTooFewReceives) {
  // Refusals and retries all the time.
  both_ways(4, 5'000);
}

TEST(ThreadsSoftverbs, SleepingLanesLoseNothing) {
  constexpr std::size_t kPeers = 6;
  constexpr std::uint64_t kNaps = 20'000;
  NodeOptions options;
  options.memory = 1u << 16;
  Node hub(options);
  std::vector<std::unique_ptr<Node>> others;
  std::vector<ibv_qp*> out;
  for (std::size_t i = 0; i < kPeers; ++i) {
    others.push_back(std::make_unique<Node>(options));
    out.push_back(others[i]->make_qp());
    connect(*others[i], out[i], hub, hub.make_qp());
  }
  hub.internals().idle_rounds = 1;
  std::atomic<bool> stop = false, lost = false;
  std::atomic<std::uint64_t> sent = 0;
  std::thread sender([&] {
    // One message at a time, so that a loss shows at once.
    for (std::uint64_t i = 0; !stop.load(); ++i) {
      const Node& node = *others[i % kPeers];
      if (Send(i, node.sge(0, 8)).post(out[i % kPeers]) != 0) lost = true;
      ibv_wc wc{};
      bool done = false;
      int polls = 0;
      const auto poll = [&] {
        done = node.poll(wc);
        if (!done && ++polls % 64 == 0) std::this_thread::yield();
      };
      if (!until(poll, [&] { return done || stop.load(); })) lost = true;
      if (lost) return;
      ++sent;
    }
  });
  std::uint64_t received = 0, idle = 0;
  for (std::uint64_t i = 0; i < 32; ++i) ASSERT_EQ(hub.post_recv(i, 0, 64), 0);
  EXPECT_TRUE(until(
      [&] {
        sv::control_device(hub.context);
        ibv_wc wc{};
        if (!hub.poll(wc)) {
          if (++idle % 64 == 0) std::this_thread::yield();
          return;
        }
        ++received;
        if (hub.post_recv(wc.wr_id, 0, 64) != 0) lost = true;
      },
      [&] { return lost || (hub.internals().lanes_slept >= kNaps && received > 1000); },
      std::chrono::minutes(10)));
  stop = true;
  sender.join();
  EXPECT_FALSE(lost);
  EXPECT_GE(hub.internals().lanes_slept, kNaps);
  EXPECT_GE(received + 1, sent.load());
  EXPECT_GT(received, 1000u);
}

TEST(ThreadsSoftverbs, RevokedMemoryIsNotTouchedAgain) {
  constexpr std::size_t kSize = 4096;
  constexpr int kRounds = 1500;
  Link link;
  std::atomic<std::uint32_t> key = 0;
  std::atomic<bool> stop = false;
  std::atomic<std::uint64_t> good = 0, refused = 0;
  std::fill_n(link.a.memory.begin(), kSize, std::byte{1});
  std::thread initiator([&] {
    while (!stop.load()) {
      const std::uint32_t now = key.load(std::memory_order_relaxed);
      if (now == 0) continue;
      if (Send(1, link.a.sge(0, kSize), IBV_WR_RDMA_WRITE)
              .to(link.b.address(0), now)
              .post(link.qa) != 0)
        return;
      ibv_wc wc{};
      while (!link.a.poll(wc)) {
      }
      ++(wc.status == IBV_WC_SUCCESS ? good : refused);
      if (wc.status == IBV_WC_SUCCESS) continue;
      ibv_qp_attr attr{};
      attr.qp_state = IBV_QPS_RESET;
      must(sv::modify_qp(link.qa, &attr, IBV_QP_STATE) == 0, "RESET");
      must(link.a.init(link.qa) == 0, "INIT");
      must(link.a.rtr(link.qa, link.b.endpoint(link.qb)) == 0, "RTR");
      must(link.a.rts(link.qa) == 0, "RTS");
    }
  });
  bool touched = false;
  // Until both outcomes were seen. On a busy machine the initiator may run late, and each yield
  // costs a time slice.
  const auto begun = std::chrono::steady_clock::now();
  const auto goes_on = [&](int round) {
    const auto took = std::chrono::steady_clock::now() - begun;
    if (good == 0 || refused == 0) return took < std::chrono::minutes(10);
    return round < kRounds && took < std::chrono::seconds(4);
  };
  for (int round = 0; goes_on(round) && !touched; ++round) {
    ibv_mr* mr = sv::reg_mr(link.b.pd, link.b.memory.data(), kSize, Node::kAllAccess);
    key.store(mr->rkey, std::memory_order_relaxed);
    for (int i = 0; i < round % 64; ++i) std::this_thread::yield();
    int result = EBUSY;
    while (result == EBUSY) result = sv::dereg_mr(mr);
    // From now on the memory is ours alone.
    std::fill_n(link.b.memory.begin(), kSize, std::byte{2});
    std::this_thread::yield();
    touched = result != 0 || !all_are(link.b.bytes(0, kSize), 2);
  }
  stop = true;
  initiator.join();
  EXPECT_FALSE(touched);
  EXPECT_GT(good.load(), 0u);
  EXPECT_GT(refused.load(), 0u);
}

TEST(ThreadsSoftverbs, ContextsComeAndGo) {
  // One thread opens, connects, sends and closes; the other end stays and forgets each context.
  NodeOptions options;
  options.memory = 1u << 16;
  Node hub(options);
  for (std::uint64_t i = 0; i < 64; ++i) ASSERT_EQ(hub.post_recv(i, 0, 64), 0);
  constexpr int kRounds = 100;
  std::atomic<std::uint32_t> number = 0;
  std::atomic<bool> stop = false;
  const Endpoint any = [&] {
    Endpoint e{};
    sv::query_gid(hub.context, 1, 0, &e.gid);
    return e;
  }();
  std::thread guest([&] {
    for (int round = 0; round < kRounds; ++round) {
      Node node(options);
      ibv_qp* qp = node.make_qp();
      Endpoint hub_end = any;
      hub_end.qpn = 5000;  // does not exist: each message is refused repeatedly
      must(node.init(qp) == 0 && node.rtr(qp, hub_end) == 0 && node.rts(qp, 1, 2) == 0, "connect");
      must(Send(1, node.sge(0, 8)).post(qp) == 0, "post");
      ibv_wc wc{};
      bool done = false;
      if (until([&] { done = node.poll(wc); }, [&] { return done; }) &&
          wc.status == IBV_WC_RETRY_EXC_ERR)
        ++number;
    }
    stop = true;
  });
  EXPECT_TRUE(until(
      [&] {
        sv::control_device(hub.context);
        ibv_wc wc{};
        (void)hub.poll(wc);
      },
      [&] { return stop && hub.internals().peers.empty(); }, std::chrono::minutes(10)));
  guest.join();
  EXPECT_EQ(number.load(), static_cast<std::uint32_t>(kRounds));
  for (const auto& lane : hub.internals().lanes) EXPECT_EQ(lane, nullptr);
}

}  // namespace softverbs_test::threads
