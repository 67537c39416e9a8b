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

#include "attack/latencies.h"
#include "attack/victim.h"
#include "base/internals.h"
#include "rpc/raw_datagrams.h"

namespace attack_test {
namespace {

/// Where an attacker comes from that has so many addresses, each time: another source than the
/// honest client's 127.0.0.1.
std::string source(std::uint32_t stream, std::uint32_t addresses) {
  const std::uint32_t n = stream % addresses;
  return "127.0." + std::to_string(n / 250) + '.' + std::to_string(2 + n % 250) + ":0";
}

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

/// From which a flood may come.
constexpr std::uint32_t kAddresses = 400;

/// The flood comes from where the honest client does, as that of any process of its host.
constexpr std::uint32_t kOfTheClient = 0;

/// As many handshakes as connections, and few of them, as with the limits of conf/low_latency.toml.
Config few_connections() {
  Config c = victim_config();
  // On an adapter a connection to a stranger ends when retries are used up, so that a slow
  // machine's flood does not hold more than some forty.
  c.connections.maximum = c.connections.handshakes = slowness() == 1 ? 64 : 32;
  return c;
}

/// What the honest client does, and what strangers must hold each time that it begins.
enum class Order : char {
  connect_without_handshakes = 'h',
  open_sessions_without_handshakes = 'o',
  open_sessions_without_sessions = 's',
  // In floods from many addresses or the client's own: a client that did not run for some
  // milliseconds tries again.
  connect_at_last = 'H',
  connect_without_connections = 'c',
  connect_among_few_connections = 'f',
  open_sessions_at_last = 'O',
};
bool is_at_last(Order order) {
  return order == Order::connect_at_last || order == Order::open_sessions_at_last ||
         order == Order::connect_without_connections ||
         order == Order::connect_among_few_connections;
}

/// How many attempts of a client with such an order may give way before one succeeds. A busy
/// machine decides how often: a client that does not run for some milliseconds gives way.
constexpr std::uint32_t kMostGiveWay = 20;
/// The same on average. A slow machine has few successes, which vary more.
const std::uint32_t kMostGiveWayOnAverage = slowness() == 1 ? 1 : 10;

/// The honest client: connects, or opens sessions and calls, so many times.
class HonestClient {
 public:
  /// `config`: of the victim.
  HonestClient(const Victim& victim, const Config& config)
      : victim_(victim),
        config_(config),
        child_([this](int in, int out) { return run(in, out); }) {}

  void begin(Order order) { child_.tell(static_cast<char>(order)); }
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
  /// How many times it does so. A connect takes half a second on a slow machine.
  static std::uint32_t count() { return slowness() == 1 ? 100 : 5; }

  int run(int in, int out) {
    Node client(rpc_test::rpc_config());
    for (char told = 0; told != 'q'; told = command(in)) {
      if (told == 0) continue;
      follow(client, static_cast<Order>(told));
      write_line(out, "done");
    }
    return 0;
  }
  void follow(Node& client, Order order) {
    const bool connects =
        order == Order::connect_without_handshakes || order == Order::connect_without_connections ||
        order == Order::connect_among_few_connections || order == Order::connect_at_last;
    expect_soon(victim_, client, connects ? "connects" : "sessions", [&](Latencies& latencies) {
      all_gave_way_ = most_gave_way_ = 0;
      connects ? connect(client, order, latencies) : open_sessions(client, order, latencies);
      if (!is_at_last(order)) return;
      std::printf("%u attempts gave way, up to %u before a success\n", all_gave_way_,
                  most_gave_way_);
      std::fflush(stdout);
      EXPECT_LE(all_gave_way_, count() * kMostGiveWayOnAverage);
    });
  }
  /// Whether strangers hold what the order wants: the three quarters of all sessions that one
  /// source may have, the quarter of all connections that may be half-open, all connections but
  /// those that have just given way, or seven eighths of them.
  [[nodiscard]] bool is_under_attack(Order order) const {
    if (order == Order::connect_without_connections)
      return victim_.connections() >= config_.connections.maximum - 2;
    if (order == Order::connect_among_few_connections)
      return victim_.connections() >= config_.connections.maximum * 7 / 8;
    if (order == Order::open_sessions_without_sessions)
      return victim_.sessions() >= config_.rpc.sessions - config_.rpc.sessions / 4;
    return victim_.handshakes() >=
           std::min(config_.connections.handshakes, config_.connections.maximum / 4);
  }
  template <typename Begin>
  bool tries_again(Order order, Begin&& begin) {
    if (!is_at_last(order) || gave_way_ == kMostGiveWay) return false;
    most_gave_way_ = std::max(most_gave_way_, ++gave_way_);
    ++all_gave_way_;
    begin();
    return true;
  }
  void connect(Node& client, Order order, Latencies& latencies) {
    for (std::uint32_t i = 0; i < count(); ++i) {
      Connection c;
      gave_way_ = 0;
      const auto begin = [&] {
        client.closed.clear();
        c = client.begin(victim_.address());
      };
      latencies.measure([&] { return is_under_attack(order); }, begin,
                        [&] {
                          const bool is_over = c.ready() || !client.closed.empty();
                          return is_over && (c.ready() || !tries_again(order, begin));
                        });
      if (testing::Test::HasFailure()) return;
      ASSERT_TRUE(c.ready()) << "connect " << i << ", after " << gave_way_ << " that gave way: "
                             << (client.closed.empty() ? "" : client.closed.back().message());
      EXPECT_EQ(c.close(), Status::ok);
      ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
      client.closed.clear();
    }
  }
  void open_sessions(Node& client, Order order, Latencies& latencies) {
    for (std::uint32_t i = 0; i < count(); ++i) {
      spinwire::Session session;
      gave_way_ = 0;
      const auto begin = [&] {
        why_.clear();
        call_ = Call::none;
        spinwire::SessionOptions options;
        options.on_closed = [this](spinwire::Session, const Error& e) { why_ = e.message(); };
        auto made = client.engine.open_session(victim_.address(), options);
        ASSERT_TRUE(made) << made.error().message();
        session = *made;
      };
      latencies.measure(
          [&] { return is_under_attack(order); }, begin,
          [&] {
            if (session.ready() && call_ == Call::none) call(session);
            const bool has_failed =
                call_ == Call::failed ||
                (session.state() != spinwire::SessionState::opening && !session.ready());
            if (has_failed) return !tries_again(order, begin);
            return call_ == Call::done;
          });
      if (testing::Test::HasFailure()) return;
      ASSERT_EQ(call_, Call::done)
          << "session " << i << ", after " << gave_way_ << " that gave way: " << why_;
      EXPECT_EQ(session.close(), Status::ok);
    }
  }
  /// The first call of a session. That of an earlier one does not count any more.
  void call(spinwire::Session session) {
    const auto word = std::byte{7};
    call_ = Call::running;
    const auto done = [this, mine = ++calls_](const spinwire::Reply& r) {
      if (mine == calls_) call_ = r.status() == Status::ok ? Call::done : Call::failed;
    };
    if (session.call(kEcho, {&word, 1}, done) != Status::ok) call_ = Call::failed;
  }

  const Victim& victim_;
  Config config_;
  enum class Call : char { none, running, done, failed };

  // Of the last session. Written until the client's engine is destroyed.
  std::string why_;
  Call call_ = Call::none;
  std::uint32_t calls_ = 0;
  /// Attempts: since the last success, of a round, and the most between two successes of it.
  std::uint32_t gave_way_ = 0, all_gave_way_ = 0, most_gave_way_ = 0;
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
    honest_ = std::make_unique<HonestClient>(*victim_, config);
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
  /// At a device that is there, but no queue pair of it.
  [[nodiscard]] wire::Frame open_session_nowhere(std::uint32_t name) const {
    wire::SessionEnd end = datagrams_->end(name);
    end.qp_num ^= 0x8000;
    return wire::encode(wire::OpenSession{end});
  }
  const Stream& stream() { return streams_.emplace_back(attacking_stream()); }
  /// Its end leaves no port in TIME_WAIT, of which a long attack would use up all.
  [[nodiscard]] Stream attacking_stream() {
    Stream s = addresses_ == kOfTheClient
                   ? Stream(victim_->address())
                   : Stream(victim_->address(), source(made_++, addresses_).c_str());
    const linger hard{1, 0};
    EXPECT_EQ(setsockopt(s.fd(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard), 0);
    return s;
  }

  /// Attacks `first` times, and on until the honest client has done what it is told then.
  void attack(Order order, std::uint32_t first, const std::function<void(std::uint32_t)>& strike) {
    constexpr std::size_t kMostStreams = 4000;
    const auto one = [&](std::uint32_t i) {
      strike(i);
      if (streams_.size() > kMostStreams) streams_.pop_front();
    };
    std::uint32_t i = 0;
    for (; i < amount(first); ++i) one(i);
    honest_->begin(order);
    // No faster than the victim can take: the kernel makes others wait for seconds once the TCP
    // backlog has overflowed, which no poll can prevent. The victim can replace 16 half-open
    // connections every 5 ms. It accepts 8 streams in one poll.
    const std::chrono::nanoseconds per_strike = per_strike_ * slowness();
    auto last = victim_->processor_time();
    while (!honest_->is_done() && !HasFailure()) {
      const auto now = victim_->processor_time();
      if (now - last < per_strike) {
        (void)sched_yield();
        continue;
      }
      for (auto due = std::min<std::int64_t>((now - last) / per_strike, 8); due != 0; --due)
        one(i++);
      last = now;
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
  std::uint32_t addresses_ = 1;  ///< from which the attacker's streams come, in turn
  std::uint32_t made_ = 0;       ///< streams
  std::chrono::nanoseconds per_strike_ = 500us;  ///< of the victim's processor time
};

TEST_F(AttackByFlood, HellosAndThenSilence) {
  attack(Order::connect_without_handshakes, 600, [&](std::uint32_t) { stream().send(hello()); });
  EXPECT_GT(accepted(), victim_config().connections.handshakes);
}

TEST_F(AttackByFlood, HandshakesInEveryState) {
  attack(Order::connect_without_handshakes, 2000, [&](std::uint32_t i) {
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
  attack(Order::connect_without_handshakes, 600, [&](std::uint32_t) {
    (void)stream();
    for (std::size_t i = 0; i < std::min(held, streams_.size()); ++i)
      streams_[streams_.size() - 1 - i].send_byte(frame, i);
  });
  EXPECT_GT(std::count_if(streams_.begin(), streams_.end(), [](auto& s) { return s.is_over(); }),
            static_cast<long>(amount(400)))
      << "no attack: the handshakes were not used up";
}

TEST_F(AttackByFlood, HandshakesInEveryStateKeepNoSessionOut) {
  attack(Order::open_sessions_without_handshakes, 2000, [&](std::uint32_t i) {
    const Stream& s = stream();
    if (i % 4 == 1) s.send_part(hello(), 1 + i % 70);
    if (i % 4 == 2) s.send(hello());
    if (i % 4 == 3) s.send(open_session(i));
  });
  EXPECT_GT(accepted(), victim_config().connections.handshakes / 4);
}

// With as many handshakes as connections, and one honest connection: none is left for others if all
// are half-open, though one more handshake is. A stranger that gives way comes again.
TEST_F(AttackByFlood, AsManyHellosAsThereAreConnections) {
  (void)victim_->stop();
  start(few_connections());
  Node other(rpc_test::rpc_config());
  const Connection honest = other.begin(victim_->address());
  ASSERT_TRUE(until({&other}, [&] { return honest.ready(); }));
  const std::uint32_t others = few_connections().connections.maximum - 1;
  attack(Order::connect_without_handshakes, others, [&](std::uint32_t i) {
    if (i < others) return stream().send(hello());
    const auto ended =
        std::find_if(streams_.begin(), streams_.end(), [](const Stream& s) { return s.is_over(); });
    if (ended == streams_.end()) return;
    streams_.erase(ended);
    stream().send(hello());
  });
  EXPECT_GT(accepted(), few_connections().connections.maximum / 4);
}

TEST_F(AttackByFlood, MoreHellosThanThereAreConnectionsWithoutEnd) {
  (void)victim_->stop();
  start(few_connections());
  attack(Order::connect_without_handshakes, 600, [&](std::uint32_t) { stream().send(hello()); });
  EXPECT_GT(accepted(), few_connections().connections.maximum);
}

// No address holds more than its share, so the time that a silent peer has is short. There are far
// fewer handshakes than addresses, and far fewer half-open connections than handshakes.
TEST_F(AttackByFlood, HellosFromManyAddresses) {
  (void)victim_->stop();
  start(few_connections());
  addresses_ = kAddresses;
  attack(Order::connect_at_last, 2000, [&](std::uint32_t) { stream().send(hello()); });
  EXPECT_GT(accepted(), few_connections().connections.maximum);
}

TEST_F(AttackByFlood, HandshakesInEveryStateFromManyAddresses) {
  addresses_ = kAddresses;
  const auto strike = [&](std::uint32_t i) {
    const Stream& s = stream();
    if (i % 4 == 1) s.send_part(hello(), 1 + i % 70);
    if (i % 4 == 2) s.send(hello());
    if (i % 4 == 3) s.send(open_session(i));
  };
  attack(Order::open_sessions_at_last, 2000, strike);
  EXPECT_GT(accepted(), victim_config().connections.handshakes / 4);
}

// Each has a path challenge under way. The client is one of its source's handshakes, so it gives
// way as the oldest of them if it does not run while the strangers replace all others.
TEST_F(AttackByFlood, RequestsForSessionsFromWhereTheClientIs) {
  addresses_ = kOfTheClient;
  per_strike_ = 250us;
  attack(Order::open_sessions_at_last, 1000,
         [&](std::uint32_t i) { stream().send(open_session_nowhere(i)); });
}

TEST_F(AttackByFlood, RequestsForSessionsFromManyAddresses) {
  addresses_ = kAddresses;
  per_strike_ = 250us;
  attack(Order::open_sessions_at_last, 1000,
         [&](std::uint32_t i) { stream().send(open_session_nowhere(i)); });
}

/// Strangers that say that they are ready, without a device: they name the victim's own, which it
/// tells them.
class AttackByReadiness : public AttackByFlood {
 protected:
  void SetUp() override {
    Config config = few_connections();
    config.connections.peer_timeout = 60s;
    addresses_ = kAddresses;
    start(config);
    const Stream first = attacking_stream();
    first.send(hello());
    const auto told = first.receive();
    const auto* accept = told ? std::get_if<wire::Accept>(&told->body) : nullptr;
    ASSERT_NE(accept, nullptr);
    theirs_ = accept->endpoint;
  }
  void TearDown() override {
    waiting_.clear();
    half_open_.clear();
    AttackByFlood::TearDown();
  }
  void strike() {
    waiting_.push_back(attacking_stream());
    spinwire::Endpoint forged = mine_;
    forged.gid = theirs_.gid;
    forged.qp_num = theirs_.qp_num;
    waiting_.back().send(wire::encode(wire::Hello{forged}));
    if (waiting_.size() > 64) waiting_.pop_front();
    for (std::size_t i = 0; i < waiting_.size();) {
      if (!goes_on(waiting_[i])) {
        ++i;
        continue;
      }
      leaving_.push_back(std::move(waiting_[i]));
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
      if (leaving_.size() > 64) leaving_.pop_front();
    }
  }
  /// Whether the victim has accepted, so that this end says that it is ready, or has closed.
  bool goes_on(const Stream& s) {
    if (!s.is_accepted()) return s.is_over();
    const auto got = s.receive();
    const auto* accept = got ? std::get_if<wire::Accept>(&got->body) : nullptr;
    if (accept == nullptr) return true;
    s.send(wire::encode(wire::Ready{accept->endpoint.incarnation}));
    ++confirmed_;
    return true;
  }

  spinwire::Endpoint theirs_;
  std::deque<Stream> waiting_, leaving_, half_open_;
  std::uint32_t confirmed_ = 0;
};

TEST_F(AttackByReadiness, KeepsNobodyOut) {
  attack(Order::connect_without_connections, 200, [&](std::uint32_t) { strike(); });
  EXPECT_GT(confirmed_, few_connections().connections.maximum);
}

// Some say that they are ready, some stay half-open, and some name another process of this host,
// which has a share then.
TEST_F(AttackByReadiness, OfEveryKindKeepsNobodyOut) {
  const spinwire::Endpoint victims = theirs_;
  attack(Order::connect_among_few_connections, 300, [&](std::uint32_t i) {
    if (i % 4 == 0) {
      half_open_.push_back(attacking_stream());
      half_open_.back().send(hello());
      if (half_open_.size() > 64) half_open_.pop_front();
      return;
    }
    theirs_.gid = i % 4 == 1 ? mine_.gid : victims.gid;
    strike();
  });
  // A slow machine makes a smaller flood.
  EXPECT_GT(confirmed_, few_connections().connections.maximum / (slowness() == 1 ? 1 : 4));
}

TEST_F(AttackByFlood, SessionsThatAreConfirmedAndNeverUsed) {
  std::uint32_t confirmed = 0;
  attack(Order::open_sessions_without_sessions, 4 * victim_config().rpc.sessions,
         [&](std::uint32_t i) {
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
