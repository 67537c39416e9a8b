// Strangers take handshakes, connections and sessions and give nothing back, without end. Honest
// peers must still come through, and soon.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "attack/victim.h"
#include "base/internals.h"
#include "rpc/raw_datagrams.h"

namespace attack_test {
namespace {

/// Where attackers come from: another source than the honest client's 127.0.0.1.
constexpr const char* kAttacker = "127.0.0.2:0";

/// Streams of a flood, on both sides of this machine.
void raise_descriptor_limit() {
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  files.rlim_cur = files.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
}

Config victim_config() {
  Config c = rpc_test::rpc_config();
  // A slow machine makes a smaller flood, which uses up less.
  c.connections.maximum = slowness() == 1 ? 256 : 32;
  c.connections.handshakes = c.connections.maximum / 4;
  c.queues.receive_depth = 1024;
  c.queues.completion_depth = 16384;
  c.memory.receive_bytes = 16u << 20;
  return c;
}

/// As many handshakes as connections, and few of them, as with the limits of conf/low_latency.toml.
Config few_connections() {
  Config c = victim_config();
  c.connections.maximum = 64;
  c.connections.handshakes = 64;
  return c;
}

/// How long something took, each time. On a busy machine either of the two ends may have no
/// processor, and no time of a clock says anything of the library then. So what counts is the time
/// in which both ran: each time that the victim shows how long it has run, the lesser of what both
/// have run since. On a machine with a processor for each, that is the time that passes.
class Latencies {
 public:
  Latencies(const Victim& victim, Node& client) : victim_(victim), client_(client) {}
  /// From `begin()` until `is_over()`.
  template <typename Begin, typename IsOver>
  void measure(Begin&& begin, IsOver&& is_over) {
    const std::uint64_t next = victim_.control_steps() + kStepsBetween;
    (void)until({&client_}, [&] { return victim_.control_steps() >= next; });
    const auto begun = std::chrono::steady_clock::now();
    Ran seen = now();
    std::chrono::nanoseconds both{0};
    begin();
    (void)until({&client_}, [&] {
      const Ran after = now();
      if (after.victim != seen.victim) {
        both += std::min(after.victim - seen.victim, after.client - seen.client);
        seen = after;
      }
      return is_over();
    });
    both_ms_.push_back(std::chrono::duration<double, std::milli>(both).count());
    passed_ms_.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun)
            .count());
  }
  /// Prints a line, and fails if the 99th percentile is not below `most`.
  void expect_below(const char* what, std::chrono::milliseconds most) {
    ASSERT_FALSE(both_ms_.empty());
    std::sort(both_ms_.begin(), both_ms_.end());
    std::sort(passed_ms_.begin(), passed_ms_.end());
    const std::size_t middle = both_ms_.size() / 2, at = (both_ms_.size() - 1) * 99 / 100;
    std::printf(
        "%zu %s under attack: both ends ran for %.2f ms, p99 %.2f ms, longest %.2f ms; passed: "
        "%.2f ms, p99 %.2f ms\n",
        both_ms_.size(), what, both_ms_[middle], both_ms_[at], both_ms_.back(), passed_ms_[middle],
        passed_ms_[at]);
    std::fflush(stdout);
    EXPECT_LT(both_ms_[at], static_cast<double>(most.count())) << what;
  }

 private:
  struct Ran {
    std::chrono::nanoseconds client, victim;
  };
  /// In which strangers take the place of those that gave way to the last time's client.
  static constexpr std::uint64_t kStepsBetween = 64;
  [[nodiscard]] Ran now() const { return {thread_time(), victim_.processor_time()}; }

  const Victim& victim_;
  Node& client_;
  std::vector<double> passed_ms_, both_ms_;
};

/// Also when the TCP backlog is full as the honest client begins.
const std::chrono::milliseconds kMost = 100ms * slowness();

/// The honest client: connects, or opens sessions and calls, so many times.
class HonestClient {
 public:
  explicit HonestClient(const Victim& victim)
      : victim_(victim), child_([this](int in, int out) { return run(in, out); }) {}

  void begin(char what) { child_.tell(what); }
  /// Whether it has done what it was told, by now.
  [[nodiscard]] bool is_done() const {
    pollfd waiting{child_.from(), POLLIN, 0};
    return ::poll(&waiting, 1, 0) == 1;
  }
  void end() {
    EXPECT_EQ(child_.line(), "done");
    child_.tell('q');
    EXPECT_EQ(child_.wait(), 0) << "see what it has written";
  }

 private:
  /// Few on a slow machine, where each takes half a second.
  static std::uint32_t count() { return slowness() == 1 ? 200 : 5; }

  int run(int in, int out) {
    Node client(rpc_test::rpc_config());
    for (char told = 0; told != 'q'; told = command(in)) {
      if (told == 'c') connect(client, count());
      if (told == 's') open_sessions(client, count());
      if (told != 0) write_line(out, "done");
    }
    return 0;
  }
  void connect(Node& client, std::uint32_t count) {
    Latencies latencies(victim_, client);
    for (std::uint32_t i = 0; i < count; ++i) {
      Connection c;
      latencies.measure([&] { c = client.begin(victim_.address()); },
                        [&] { return c.ready() || !client.closed.empty(); });
      ASSERT_TRUE(c.ready()) << "connect " << i << ": "
                             << (client.closed.empty() ? "" : client.closed.back().message());
      EXPECT_EQ(c.close(), Status::ok);
      ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
      client.closed.clear();
    }
    latencies.expect_below("connects", kMost);
  }
  void open_sessions(Node& client, std::uint32_t count) {
    Latencies latencies(victim_, client);
    for (std::uint32_t i = 0; i < count; ++i) {
      spinwire::Session session;
      why_.clear();
      const auto begin = [&] {
        spinwire::SessionOptions options;
        options.on_closed = [this](spinwire::Session, const Error& e) { why_ = e.message(); };
        auto made = client.engine.open_session(victim_.address(), options);
        ASSERT_TRUE(made) << made.error().message();
        session = *made;
      };
      latencies.measure(begin, [&] { return session.state() != spinwire::SessionState::opening; });
      ASSERT_TRUE(session.ready()) << "session " << i << ": " << why_;
      Status ended = Status::system;
      const auto word = std::byte{7};
      EXPECT_EQ(
          session.call(kEcho, {&word, 1}, [&](const spinwire::Reply& r) { ended = r.status(); }),
          Status::ok);
      EXPECT_TRUE(until({&client}, [&] { return ended != Status::system; }));
      EXPECT_EQ(ended, Status::ok);
      EXPECT_EQ(session.close(), Status::ok);
    }
    latencies.expect_below("sessions", kMost);
  }

  const Victim& victim_;
  std::string why_;  ///< of the last session; written until the client's engine is destroyed
  Child child_;
};

class AttackByFlood : public testing::Test {
 protected:
  void SetUp() override { start(victim_config()); }
  void start(const Config& config) {
    honest_.reset();
    datagrams_.reset();
    attacker_.reset();
    raise_descriptor_limit();
    victim_ = std::make_unique<Victim>(config);
    honest_ = std::make_unique<HonestClient>(*victim_);
    attacker_ = std::make_unique<Node>(small_config());
    auto made = attacker_->engine.prepare({});
    ASSERT_TRUE(made) << made.error().message();
    ASSERT_TRUE(until({attacker_.get()}, [&] { return made->endpoint().has_value(); }));
    // A device that is there, so that the victim has no reason to refuse.
    mine_ = *made->endpoint();
    datagrams_ =
        std::make_unique<rpc_test::RawDatagrams>(*spinwire::detail::core_of(attacker_->engine));
  }
  void TearDown() override {
    streams_.clear();
    datagrams_.reset();
    (void)victim_->stop();
  }

  [[nodiscard]] wire::Frame hello() const { return wire::encode(wire::Hello{mine_}); }
  [[nodiscard]] wire::Frame open_session(std::uint32_t name) const {
    return wire::encode(wire::OpenSession{datagrams_->end(name)});
  }
  const Stream& stream() { return streams_.emplace_back(attacking_stream()); }
  /// Its end leaves no port in TIME_WAIT, of which a long attack would use up all.
  [[nodiscard]] Stream attacking_stream() const {
    Stream s(victim_->address(), kAttacker);
    const linger hard{1, 0};
    EXPECT_EQ(setsockopt(s.fd(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard), 0);
    return s;
  }

  /// Attacks `first` times, and on until the honest client has done what it is told then.
  void attack(char what, std::uint32_t first, const std::function<void(std::uint32_t)>& strike) {
    constexpr std::uint64_t kStepsPerStrike = 4;
    constexpr std::size_t kMostStreams = 4000;
    const auto one = [&](std::uint32_t i) {
      strike(i);
      if (streams_.size() > kMostStreams) streams_.pop_front();
    };
    std::uint32_t i = 0;
    for (; i < amount(first); ++i) one(i);
    honest_->begin(what);
    // No faster than the victim can take: the kernel makes others wait for seconds once the TCP
    // backlog has overflowed, which no poll can prevent.
    for (std::uint64_t next = 0; !honest_->is_done() && !HasFailure();) {
      if (victim_->control_steps() < next) {
        (void)sched_yield();
        continue;
      }
      one(i++);
      next = victim_->control_steps() + kStepsPerStrike;
    }
    honest_->end();
    std::printf("%u strikes\n", i);
    std::fflush(stdout);  // or children print it once more
  }

  /// Of the attacker's streams, those whose hello was accepted, so that they held a connection.
  [[nodiscard]] std::size_t accepted() const {
    return static_cast<std::size_t>(std::count_if(streams_.begin(), streams_.end(),
                                                  [](const Stream& s) { return s.is_accepted(); }));
  }

  std::unique_ptr<Victim> victim_;
  std::unique_ptr<HonestClient> honest_;
  std::unique_ptr<Node> attacker_;
  spinwire::Endpoint mine_;
  std::unique_ptr<rpc_test::RawDatagrams> datagrams_;
  std::deque<Stream> streams_;
};

TEST_F(AttackByFlood, HellosAndThenSilence) {
  attack('c', 600, [&](std::uint32_t) { stream().send(hello()); });
  EXPECT_GT(accepted(), victim_config().connections.handshakes);
}

TEST_F(AttackByFlood, HandshakesInEveryState) {
  attack('c', 2000, [&](std::uint32_t i) {
    const Stream& s = stream();
    if (i % 4 == 1) s.send_part(hello(), 1 + i % 70);
    if (i % 4 == 2) s.send(hello());
    if (i % 4 == 3) s.send(open_session(i));
  });
  EXPECT_GT(accepted(), victim_config().connections.handshakes / 4);
}

// Each handshake gets one more byte at each strike, so that no peer is silent.
TEST_F(AttackByFlood, HellosByteByByte) {
  const wire::Frame frame = hello();
  const std::size_t held = victim_config().connections.handshakes;
  ASSERT_LT(held, frame.bytes().size()) << "or hellos would be whole";
  attack('c', 600, [&](std::uint32_t) {
    (void)stream();
    for (std::size_t i = 0; i < std::min(held, streams_.size()); ++i)
      streams_[streams_.size() - 1 - i].send_byte(frame, i);
  });
  EXPECT_GT(std::count_if(streams_.begin(), streams_.end(), [](auto& s) { return s.is_over(); }),
            static_cast<long>(amount(400)))
      << "no attack: the handshakes were not used up";
}

TEST_F(AttackByFlood, HandshakesInEveryStateKeepNoSessionOut) {
  attack('s', 2000, [&](std::uint32_t i) {
    const Stream& s = stream();
    if (i % 4 == 1) s.send_part(hello(), 1 + i % 70);
    if (i % 4 == 2) s.send(hello());
    if (i % 4 == 3) s.send(open_session(i));
  });
  EXPECT_GT(accepted(), victim_config().connections.handshakes / 4);
}

// With as many handshakes as connections, and one honest connection: none is left for others if all
// are half-open, though one more handshake is.
TEST_F(AttackByFlood, AsManyHellosAsThereAreConnections) {
  (void)victim_->stop();
  start(few_connections());
  Node other(rpc_test::rpc_config());
  const Connection honest = other.begin(victim_->address());
  ASSERT_TRUE(until({&other}, [&] { return honest.ready(); }));
  attack('c', 63, [&](std::uint32_t i) {
    if (i < 63) stream().send(hello());
  });
  EXPECT_GT(accepted(), few_connections().connections.maximum / 4);
}

TEST_F(AttackByFlood, MoreHellosThanThereAreConnectionsWithoutEnd) {
  (void)victim_->stop();
  start(few_connections());
  attack('c', 600, [&](std::uint32_t) { stream().send(hello()); });
  EXPECT_GT(accepted(), few_connections().connections.maximum);
}

TEST_F(AttackByFlood, SessionsThatAreConfirmedAndNeverUsed) {
  std::uint32_t confirmed = 0;
  attack('s', 4 * victim_config().rpc.sessions, [&](std::uint32_t i) {
    const Stream s = attacking_stream();
    s.send(open_session(i + 1));
    std::uint64_t token = 0;
    if (!until(
            {}, [&] { return (token = datagrams_->challenge(i + 1)) != 0; }, 2000ms))
      return;
    s.send(wire::encode(wire::PathResponse{token}));
    const auto opened = s.receive();
    const auto* answer = opened ? std::get_if<wire::SessionOpened>(&opened->body) : nullptr;
    if (answer == nullptr) return;
    s.send(wire::encode(wire::Ready{answer->end.incarnation}));
    ++confirmed;
  });
  EXPECT_GT(confirmed, victim_config().rpc.sessions);
}

}  // namespace
}  // namespace attack_test
