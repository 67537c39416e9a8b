// Hours in the life of a server: clients that connect, send, call, lease, are stopped and are
// killed, without end. What the server holds and how fast it answers must be the same at the end as
// at the beginning. SPINWIRE_TEST_SOAK says how many seconds.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "base/random.h"
#include "kill/resources.h"
#include "rpc/rpc_ends.h"

namespace soak_test {

using namespace rpc_test;  // names of a test namespace of its own
using kill_test::Resources;
using spinwire::Completion;
using spinwire::ConnectionState;
using spinwire::LeaseReply;

constexpr spinwire::Method kEcho = 1;
constexpr std::uint32_t kClients = 6;
constexpr std::uint32_t kIntervals = 8;

Config soak_config() {
  Config c = rpc_config();
  c.memory.send_bytes = 16u << 20;
  c.memory.rendezvous_bytes = 8u << 20;
  c.connections.max_message_bytes = 64u << 10;
  c.connections.keepalive_interval = 50ms;
  c.connections.peer_timeout = 2s;  // some who are stopped are lost, some are not
  c.connections.handshake_timeout = 2s;
  return c;
}

/// What clients tell the server's process, in memory that they share.
struct Told {
  static constexpr std::uint64_t kKept = 1u << 16;
  std::atomic<std::uint64_t> done;                        ///< operations that ended well
  std::atomic<std::uint64_t> wrong;                       ///< that came back with other bytes
  std::atomic<std::uint64_t> calls;                       ///< of the steady client
  std::array<std::atomic<std::uint32_t>, kKept> latency;  ///< ns, of its last calls
};

/// In a forked child: it ends with the server's process, and not before.
void outlive_nobody() {
  alarm(0);
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
}

/// A client that uses everything, for ever, and begins anew what it has lost.
class Client {
 public:
  Client(std::string address, std::uint64_t seed, Told& told)
      : told_(told), node_(soak_config()), address_(std::move(address)), random_(seed) {
    node_.on_message = [this](Connection, Message& m) {
      count(m.bytes().size() == message_bytes_ && Node::holds(m.bytes(), message_seed_));
      message_under_way_ = false;
    };
  }

  [[noreturn]] void live() {
    for (;;) {
      for (int i = 0; i < 16; ++i) (void)node_.poll();
      if (connection_.state() == ConnectionState::closed) {
        message_under_way_ = lease_under_way_ = false;
        connection_ = node_.begin(address_);
      }
      if (!session_ || session_->state() == SessionState::closed) open();
      if (connection_.ready() && !message_under_way_) send();
      if (connection_.ready() && !lease_under_way_) lease();
      if (session_ && session_->state() == SessionState::ready && calls_ < 4) call();
      node_.ready.clear();
      node_.closed.clear();
      node_.closed_connections.clear();
    }
  }

 private:
  void count(bool right) { (right ? told_.done : told_.wrong).fetch_add(1); }

  void open() {
    session_.reset();
    calls_ = 0;
    if (auto opened = node_.engine.open_session(address_, {}); opened)
      session_.emplace(std::move(*opened));
  }

  void send() {
    constexpr std::array<std::uint32_t, 5> kSizes = {0, 40, 700, 4000, 60'000};
    message_bytes_ = kSizes[random_.below(kSizes.size())];
    message_seed_ = static_cast<std::uint32_t>(random_.next());
    message_under_way_ =
        connection_.send(node_.filled(message_bytes_, message_seed_)) == Status::ok;
  }

  void call() {
    constexpr std::array<std::uint32_t, 4> kSizes = {1, 48, 2000, 40'000};
    const std::uint32_t bytes = kSizes[random_.below(kSizes.size())];
    const auto seed = static_cast<std::uint32_t>(random_.next());
    const Buffer request = node_.filled(bytes, seed);
    const Status called = session_->call(kEcho, request.slice(), [this, bytes, seed](Reply& reply) {
      calls_ -= calls_ != 0 ? 1 : 0;
      if (reply.status() == Status::ok)
        count(reply.bytes().size() == bytes && Node::holds(reply.bytes(), seed));
    });
    calls_ += called == Status::ok ? 1 : 0;
  }

  /// Asks for memory, writes to it, reads it back and lets it go.
  void lease() {
    const Status asked = connection_.request_memory(4096, {}, [this](LeaseReply& reply) {
      if (reply.status != Status::ok) return void(lease_under_way_ = false);
      memory_ = std::move(reply.memory);
      lease_seed_ = static_cast<std::uint32_t>(random_.next());
      written_ = node_.filled(4096, lease_seed_);
      read_ = node_.buffer(4096);
      const Status written = connection_.write(written_, memory_.region(), [](auto&) {});
      const Status read = connection_.read(read_, memory_.region(), [this](const Completion& c) {
        if (c.status == Status::ok) count(Node::holds(read_.bytes(), lease_seed_));
        memory_.release();
        lease_under_way_ = false;
      });
      if (written == Status::ok && read == Status::ok) return;
      memory_.release();
      lease_under_way_ = false;
    });
    lease_under_way_ = asked == Status::ok;
  }

  Told& told_;
  Node node_;
  std::string address_;
  spinwire::base::Random random_;
  Connection connection_;
  std::optional<Session> session_;
  spinwire::RemoteMemory memory_;
  Buffer written_, read_;
  std::uint32_t message_bytes_ = 0;
  std::uint32_t message_seed_ = 0;
  std::uint32_t lease_seed_ = 0;
  std::uint32_t calls_ = 0;
  bool message_under_way_ = false;
  bool lease_under_way_ = false;
};

/// A client that nothing happens to, and that measures. Where a busy machine keeps it or the server
/// from a processor for so long that its session ends, it opens another.
[[noreturn]] void call_steadily(const std::string& address, Told& told) {
  Config config = soak_config();
  config.connections.peer_timeout = 1h;
  Node node(config);
  auto session = node.engine.open_session(address, {});
  const Buffer request = node.filled(64, 1);
  for (;;) {
    (void)node.poll();
    if (!session || session->state() == SessionState::closed)
      session = node.engine.open_session(address, {});
    if (!session || session->state() != SessionState::ready) continue;
    std::optional<Status> outcome;
    const auto began = std::chrono::steady_clock::now();
    const auto called =
        session->call(kEcho, request.slice(), [&](Reply& reply) { outcome = reply.status(); });
    while (called == Status::ok && !outcome) (void)node.poll();
    const auto took = std::chrono::steady_clock::now() - began;
    if (outcome != Status::ok) continue;
    told.latency[told.calls.load() % Told::kKept] = static_cast<std::uint32_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
    told.calls.fetch_add(1);
  }
}

/// A client's process and what is being done to it.
struct Victim {
  std::optional<Child> child;
  std::chrono::steady_clock::time_point goes_on;
  bool stopped = false;
};

struct Measured {
  Resources held;
  std::uint64_t heap = 0;      ///< bytes that the server's process has allocated
  std::uint64_t resident = 0;  ///< bytes
  std::uint64_t done = 0;
  std::uint32_t fast = 0;  ///< ns that 1 in 100 calls is faster than; 0: too few calls
  std::uint32_t median = 0;
  std::uint32_t slow = 0;  ///< that 1 in 100 is slower than
};

/// Whether resident memory, in bytes after each interval, grows without end. The first interval
/// warms up. Pages are taken when they are first needed: late, if another program kept the machine
/// busy before. So the end is compared with the most of the three intervals after the first, and a
/// leak takes pages in each of the last three, too.
bool leaks_pages(std::span<const std::uint64_t> resident) {
  constexpr std::uint64_t kSlack = 1u << 20;
  constexpr std::uint64_t kLeastLeak = 16u << 10;
  const std::uint64_t early = std::ranges::max(resident.subspan(1, 3));
  const std::uint64_t late = std::ranges::min(resident.last(2));
  const auto end = resident.last(4);
  bool goes_on = true;
  for (std::size_t i = 1; i < end.size(); ++i)
    goes_on = goes_on && end[i] > end[i - 1] + kLeastLeak;
  return goes_on && late > early + kSlack;
}

/// Whether calls are about as fast in the later half of the intervals as in the earlier half. `ns`:
/// of each interval; 0: too few calls. Another program on the machine slows down single intervals,
/// but not all of them; a leak slows down every later one. The first interval warms up.
bool stays_as_fast(std::span<const std::uint32_t> ns, std::uint64_t most_times) {
  const auto best = [&](std::size_t begin, std::size_t end) {
    std::uint64_t least = std::numeric_limits<std::uint32_t>::max();
    for (const std::uint32_t each : ns.subspan(begin, end - begin))
      if (each != 0) least = std::min<std::uint64_t>(least, each);
    return least;
  };
  return best(ns.size() / 2, ns.size()) <= most_times * best(1, ns.size() / 2);
}

constexpr std::uint64_t kMostTimesOfTheFastest = 4;
constexpr std::uint64_t kMostTimesOfTheMedian = 2;

TEST(SoakLatency, IsTheSameUnlessEachLaterIntervalIsSlower) {
  // Medians of two hours beside programs that took most of the machine at times.
  const std::vector<std::uint32_t> beside_others = {200, 641, 261, 250, 231, 210, 280, 641};
  EXPECT_TRUE(stays_as_fast(beside_others, kMostTimesOfTheMedian));
  std::vector<std::uint32_t> slower = beside_others;
  for (std::size_t i = kIntervals / 2; i < slower.size(); ++i) slower[i] = 501;
  EXPECT_FALSE(stays_as_fast(slower, kMostTimesOfTheMedian));
  slower[5] = 0;  // too few calls say nothing
  EXPECT_FALSE(stays_as_fast(slower, kMostTimesOfTheMedian));
  slower[6] = 500;
  EXPECT_TRUE(stays_as_fast(slower, kMostTimesOfTheMedian));
}

TEST(SoakGrowth, PagesThatAreFirstNeededLateAreNoLeak) {
  // Two hours of a server without a leak, in hundredths of a MiB.
  std::vector<std::uint64_t> resident = {8330, 8420, 8837, 8837, 8841, 8822, 8847, 8848};
  for (std::uint64_t& bytes : resident) bytes = (bytes << 20) / 100;
  EXPECT_FALSE(leaks_pages(resident));
  // The same beside programs that left it a tenth of the machine, until the fifth interval.
  resident = {4960, 5057, 4978, 4992, 5648, 5656, 5680, 5680};
  for (std::uint64_t& bytes : resident) bytes = (bytes << 20) / 100;
  EXPECT_FALSE(leaks_pages(resident));
}

TEST(SoakGrowth, ALeakOfEachIntervalIsFound) {
  std::vector<std::uint64_t> resident;
  for (std::uint64_t i = 0; i < kIntervals; ++i) resident.push_back((80u << 20) + i * (400u << 10));
  EXPECT_TRUE(leaks_pages(resident));
  // It does not hide behind pages that were first needed late.
  for (std::size_t i = 2; i < resident.size(); ++i) resident[i] += 4u << 20;
  EXPECT_TRUE(leaks_pages(resident));
}

class Soak : public testing::Test {
 protected:
  Soak() : server_(soak_config()) {
    void* const at =
        mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    told_ = at != MAP_FAILED ? new (at) Told{} : nullptr;
    server_.on_message = [](Connection c, Message& m) { (void)c.send(m.take()); };
    server_.listen();
    address_ = server_.listener.address();
    EXPECT_TRUE(
        server_.engine.serve(kEcho, [](spinwire::Request& r) { (void)r.reply(r.bytes()); }));
  }
  ~Soak() override {
    for (Victim& each : victims_) each.child.reset();
    steady_.reset();
    munmap(told_, sizeof(Told));
  }

  void turn() {
    for (int i = 0; i < 64; ++i) (void)server_.poll();
    server_.ready.clear();
    server_.closed.clear();
    server_.closed_connections.clear();
  }
  template <typename Done>
  bool turn_until(Done&& done, std::chrono::milliseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!done()) {
      if (std::chrono::steady_clock::now() > end) return false;
      turn();
    }
    return true;
  }

  void begin_life(Victim& victim) {
    const std::uint64_t seed = random_.next();
    victim.stopped = false;
    victim.child.emplace([this, seed](int, int) -> int {
      outlive_nobody();
      Client(address_, seed, *told_).live();
    });
  }

  /// Kills or stops one of the clients; those that were stopped long enough go on.
  void strike() {
    Victim& victim = victims_[random_.below(kClients)];
    if (random_.below(10) < 6) {
      victim.child->kill(SIGKILL);
      ++kills_;
      return begin_life(victim);
    }
    if (victim.stopped) return;
    victim.child->signal(SIGSTOP);
    victim.stopped = true;
    victim.goes_on = std::chrono::steady_clock::now() + (10ms + 1ms * random_.below(3000));
    ++stops_;
  }

  /// For that time at least, and until some operations have ended well.
  void live_for(std::chrono::milliseconds time) {
    const std::uint64_t done = told_->done.load();
    const std::uint64_t calls = told_->calls.load();
    const auto began = std::chrono::steady_clock::now();
    for (Victim& each : victims_) begin_life(each);
    const auto goes_on = [&](auto now) {
      const bool idle = told_->done.load() == done || told_->calls.load() == calls;
      return now - began < time || (idle && now - began < time + kLongestWait);
    };
    auto next = began;
    for (auto now = next; goes_on(now); now = std::chrono::steady_clock::now()) {
      turn();
      for (Victim& each : victims_) {
        if (!each.stopped || now < each.goes_on) continue;
        each.child->signal(SIGCONT);
        each.stopped = false;
      }
      if (now < next) continue;
      strike();
      next = now + (50ms + 1ms * random_.below(250));
    }
    for (Victim& each : victims_) each.child->kill(SIGKILL);
  }

  /// When only the steady client is left. With `expected`, waits until the server holds that again.
  Measured measure(std::uint64_t done_before, std::uint64_t calls_before,
                   const Resources* expected) {
    EXPECT_TRUE(turn_until(
        [&] {
          return server_.engine.stats().connections == 0 &&
                 server_.engine.rpc_stats().served_sessions == 1;
        },
        kLongestWait))
        << server_.engine.stats().connections << " connections, "
        << server_.engine.rpc_stats().served_sessions << " sessions";
    Measured m;
    // Only the steady client's lane and segment are left when upkeep has looked at all who died.
    const auto looks_the_same = [&] {
      const Resources before = m.held;
      (void)turn_until([] { return false; }, 1s);
      m.held = kill_test::count_resources(server_.engine);
      if (m.held != before || m.held.lanes != 1) return false;
      return expected == nullptr || kill_test::back_at(*expected, m.held);
    };
    EXPECT_TRUE(turn_until(looks_the_same, kLongestWait));
    const struct mallinfo2 heap = mallinfo2();
    m.heap = heap.uordblks + heap.hblkhd;
    std::ifstream("/proc/self/statm") >> m.resident >> m.resident;
    m.resident *= static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    m.done = told_->done.load() - done_before;
    const std::uint64_t calls = std::min(told_->calls.load() - calls_before, Told::kKept);
    std::vector<std::uint32_t> latency(calls);
    for (std::uint64_t i = 0; i < calls; ++i) latency[i] = told_->latency[i].load();
    std::ranges::sort(latency);
    if (calls < 100) return m;
    m.fast = latency[calls / 100];
    m.median = latency[calls / 2];
    m.slow = latency[calls - calls / 100];
    return m;
  }

  static constexpr std::chrono::seconds kLongestWait{120};

  Node server_;
  std::string address_;
  Told* told_ = nullptr;
  spinwire::base::Random random_{20261124};
  std::array<Victim, kClients> victims_;
  std::optional<Child> steady_;
  std::uint64_t kills_ = 0;
  std::uint64_t stops_ = 0;
};

using SlowSoak = Soak;

TEST_F(SlowSoak, TheEndIsLikeTheBeginning) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "counts lanes";
  ASSERT_NE(told_, nullptr);
  const char* const asked = std::getenv("SPINWIRE_TEST_SOAK");
  const std::chrono::seconds whole(asked != nullptr ? std::atoi(asked) : 8);
  steady_.emplace([this](int, int) -> int {
    outlive_nobody();
    call_steadily(address_, *told_);
  });
  std::vector<Measured> intervals;
  for (std::uint32_t i = 0; i < kIntervals; ++i) {
    const std::uint64_t done = told_->done.load();
    const std::uint64_t calls = told_->calls.load();
    live_for(std::chrono::milliseconds(whole) / kIntervals);
    // The first interval warms up.
    intervals.push_back(measure(done, calls, i > 1 ? &intervals[1].held : nullptr));
    const Measured& m = intervals.back();
    std::printf("%7" PRIu64
                " operations, heap %.2f MiB, resident %6.2f MiB, calls ns: %6u %8u %10u; %s\n",
                m.done, static_cast<double>(m.heap) / (1 << 20),
                static_cast<double>(m.resident) / (1 << 20), m.fast, m.median, m.slow,
                (std::ostringstream() << m.held).str().c_str());
    std::fflush(stdout);
  }
  std::printf("%" PRIu64 " kills, %" PRIu64 " stops\n", kills_, stops_);
  EXPECT_EQ(told_->wrong.load(), 0u);
  const Measured& first = intervals[1];
  for (std::uint32_t i = 2; i < kIntervals; ++i) {
    const Measured& m = intervals[i];
    EXPECT_GT(m.done, 0u);
    EXPECT_TRUE(kill_test::back_at(first.held, m.held)) << first.held << "\n" << m.held;
    EXPECT_LE(m.heap, first.heap + (256u << 10)) << "interval " << i;
  }
  if (asked == nullptr) return;  // seconds say little about pages and time
  std::vector<std::uint64_t> resident;
  for (const Measured& m : intervals) resident.push_back(m.resident);
  EXPECT_FALSE(leaks_pages(resident));
  std::vector<std::uint32_t> fast, median;
  for (const Measured& m : intervals) {
    fast.push_back(m.fast);
    median.push_back(m.median);
  }
  ASSERT_GT(std::ranges::max(std::span(fast).subspan(1, kIntervals / 2 - 1)), 0u)
      << "too few calls";
  EXPECT_TRUE(stays_as_fast(fast, kMostTimesOfTheFastest));
  EXPECT_TRUE(stays_as_fast(median, kMostTimesOfTheMedian));
}

}  // namespace soak_test
