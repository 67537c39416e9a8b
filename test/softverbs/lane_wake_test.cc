// A lane goes to sleep at the moment in which its sender publishes. In either order, polls alone
// must find the message, without later traffic.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "base/random.h"
#include "long_run.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc/rc_direct.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::wake {

constexpr std::size_t kLanes = 16;  ///< that race in a round, each on its own
constexpr std::size_t kIdle = 2;    ///< others: the last two lanes never sleep
constexpr std::uint64_t kJitter = 2000;
constexpr std::int64_t kLeadStep = 50;

/// Shared by both sides.
struct Page {
  alignas(64) std::atomic<std::uint32_t> round{0};
  std::atomic<std::uint32_t> stop{0};
  std::atomic<std::uint64_t> timeout{0};            ///< of the sender, before it sends
  alignas(64) std::atomic<std::uint32_t> ready{0};  ///< the sender has seen that round
  std::atomic<std::uint32_t> sent{0};
  std::atomic<std::uint64_t> direct{0};  ///< direct messages sent
};

NodeOptions small() {
  NodeOptions options;
  options.memory = 4096;
  options.srq_depth = 64;
  return options;
}

void wait_a_little(std::uint64_t turns) {
  for (; turns != 0; --turns) std::atomic_signal_fence(std::memory_order_seq_cst);
}
template <typename Done>
void wait_for(Done done) {
  for (std::uint32_t spins = 1; !done(); ++spins) {
    if (spins % 4096 == 0) sched_yield();
  }
}

/// The sending side: its own contexts, each with a lane. It shares only the socket and the page.
class Senders {
 public:
  explicit Senders(int socket) {
    for (std::size_t i = 0; i < kLanes + kIdle; ++i) {
      nodes_.push_back(std::make_unique<Node>(small()));
      meet(*nodes_.back(), nodes_.back()->make_qp(), socket);
    }
  }
  void run(Page& page) {
    spinwire::base::Random random(1);
    for (std::uint32_t round = 1;; ++round) {
      wait_for([&] { return page.round.load(std::memory_order_acquire) == round || page.stop; });
      if (page.stop != 0) return;
      page.ready.store(round, std::memory_order_release);
      wait_a_little(page.timeout.load(std::memory_order_relaxed) + random.below(kJitter));
      for (std::size_t i = 0; i < kLanes; ++i) send((i + round) % kLanes, round);
      for (auto& node : nodes_) drain(*node);
      page.direct.store(direct_, std::memory_order_relaxed);
      page.sent.store(round, std::memory_order_release);
    }
  }

 private:
  /// Every other message is direct: the first of a group, published at once, and the second,
  /// published after it was held.
  void send(std::size_t lane, std::uint32_t round) {
    const Node& node = *nodes_[lane];
    const auto& direct = sv::direct_messages();
    if (round % 2 == 0 &&
        direct.send(node.qps[0], round, nullptr, 0, sv::kNoCompletion) != sv::Sent::refused) {
      if (round % 4 == 0) direct.publish(node.context);
      ++direct_;
      return;
    }
    std::memcpy(&node.memory[0], &round, sizeof round);
    const unsigned flags = IBV_SEND_INLINE | (round % 8 == 1 ? unsigned{IBV_SEND_SIGNALED} : 0u);
    must(Send(round, node.sge(0, sizeof round), IBV_WR_SEND, flags).post(node.qps[0]) == 0, "send");
  }
  static void drain(const Node& node) {
    ibv_wc wc{};
    for (int i = 0; i < 8; ++i) {
      if (node.poll(wc)) must(wc.status == IBV_WC_SUCCESS, "status");
    }
  }
  std::vector<std::unique_ptr<Node>> nodes_;
  std::uint64_t direct_ = 0;
};

/// The receiving side: puts the lanes to sleep while the other side sends.
class Sleeper {
 public:
  explicit Sleeper(int socket) : node_(small()) {
    for (std::size_t i = 0; i < kLanes + kIdle; ++i) meet(node_, node_.make_qp(), socket);
    sv::control_device(node_.context);
    node_.internals().idle_rounds = 2;
  }

  /// Returns false if a message is not found.
  bool round(Page& page, std::uint32_t number, spinwire::base::Random& random) {
    for (std::uint64_t i = 0; i < kLanes; ++i) must(node_.post_recv(i, i * 8, 8) == 0, "post_recv");
    make_tired();
    const std::uint64_t lanes_slept = node_.internals().lanes_slept;
    page.round.store(number, std::memory_order_release);
    // With few processors one side would nearly always be first, unless it is made to wait.
    if (random.below(2) == 0)
      wait_for([&] { return page.ready.load(std::memory_order_acquire) == number; });
    wait_a_little(static_cast<std::uint64_t>(std::max<std::int64_t>(-lead_, 0)) +
                  random.below(kJitter));
    sv::control_device(node_.context);
    const std::uint64_t slept = node_.internals().lanes_slept - lanes_slept;
    slept_ += slept;
    // Relative speeds depend on the machine: the late side starts earlier in the next round.
    lead_ += slept > kLanes / 2 ? -kLeadStep : kLeadStep;
    page.timeout.store(static_cast<std::uint64_t>(std::max<std::int64_t>(lead_, 0)),
                       std::memory_order_relaxed);
    std::size_t got = 0;
    // For lanes that went to sleep, a sender that published rings the doorbell.
    wait_for_messages(page, number, got);
    return got == kLanes;
  }
  [[nodiscard]] std::uint64_t slept() const { return slept_; }
  [[nodiscard]] std::uint64_t stayed() const { return stayed_; }
  [[nodiscard]] std::uint64_t woken() const { return woken_; }

 private:
  /// Brings the racing lanes to the point of sleeping; the others stay awake.
  void make_tired() {
    sv::Context& c = node_.internals();
    for (std::size_t i = 0; i < c.awake_count; ++i) {
      sv::InLane& lane = *c.awake[i];
      lane.control_position = lane.position;
      lane.idle_rounds = lane.head == 0 && number_ != 0 ? 0 : c.idle_rounds;
    }
    ++number_;
  }
  void wait_for_messages(const Page& page, std::uint32_t number, std::size_t& got) {
    const std::uint32_t awake = node_.internals().awake_count;
    stayed_ += awake - std::min<std::uint32_t>(awake, kIdle);
    constexpr int kPollsAfterAll = 1000;  // were sent
    for (int left = kPollsAfterAll; got < kLanes && left > 0;) {
      ibv_wc wc[kLanes];
      const int n = ibv_poll_cq(node_.cq, kLanes, wc);
      for (int i = 0; i < n; ++i) take(wc[i], number);
      got += static_cast<std::size_t>(n);
      if (n != 0) continue;
      if (page.sent.load(std::memory_order_acquire) == number) {
        --left;
      } else if (++idle_ % 1024 == 0) {
        sched_yield();
      }
    }
    woken_ += node_.internals().awake_count - awake;
  }
  void take(const ibv_wc& wc, std::uint32_t number) const {
    std::uint32_t said = 0;
    std::memcpy(&said, &node_.memory[wc.wr_id * 8], sizeof said);
    must(wc.status == IBV_WC_SUCCESS && said == number, "another message");
  }

  Node node_;
  std::int64_t lead_ = 0;  ///< turns that the sender waits longer than we do
  std::uint64_t slept_ = 0, stayed_ = 0, woken_ = 0, number_ = 0, idle_ = 0;
};

/// `side` runs the senders, somewhere. So many rounds at least, and as many more as it takes to see
/// each outcome of the race often: on a busy machine one end may come first nearly always.
void race(int socket, Page& page, std::uint32_t rounds) {
  Sleeper sleeper(socket);
  spinwire::base::Random random(2);
  const std::uint64_t often = rounds / 8;
  const auto all_seen = [&] {
    return std::min({sleeper.slept(), sleeper.stayed(), sleeper.woken()}) > often;
  };
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(10);
  std::uint32_t round = 1;
  bool found = true;
  while (found && (round <= rounds || !all_seen())) {
    if (round > rounds && std::chrono::steady_clock::now() > limit) break;
    found = sleeper.round(page, round, random);
    ++round;
  }
  page.stop = 1;
  EXPECT_TRUE(found) << "a message lay in a sleeping lane and nobody told";
  std::printf("%llu lanes slept, %llu found a packet in time, %llu were woken\n",
              static_cast<unsigned long long>(sleeper.slept()),
              static_cast<unsigned long long>(sleeper.stayed()),
              static_cast<unsigned long long>(sleeper.woken()));
  EXPECT_GT(page.direct.load(), std::uint64_t{round} * kLanes / 4);
  EXPECT_GT(sleeper.slept(), often);
  EXPECT_GT(sleeper.stayed(), often);
  EXPECT_GT(sleeper.woken(), often);
}

TEST(ThreadsSoftverbsWake, NoMessageIsLeftInASleepingLane) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  Page page;
  std::thread sender([&] {
    Senders senders(ends[1]);
    senders.run(page);
  });
  race(ends[0], page, 2000);
  sender.join();
  close(ends[0]);
  close(ends[1]);
}

TEST(SlowSoftverbsWake, RacesBetweenProcesses) {
  void* at = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(at, MAP_FAILED);
  Page& page = *new (at) Page;
  Child child([&](int socket) {
    Senders senders(socket);
    senders.run(page);
  });
  race(child.socket(), page, rounds_of(1'000'000) / kLanes);
  EXPECT_EQ(child.wait(), 0);
  munmap(at, sizeof(Page));
}

}  // namespace softverbs_test::wake
