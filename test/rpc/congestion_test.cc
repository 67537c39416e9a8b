// Many senders at one receiver's port, and slow servers.
#include <deque>
#include <vector>

#include "base/internals.h"
#include "base/random.h"
#include "rpc/bare_engine.h"
#include "rpc/client_session.h"

namespace rpc_congestion_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
namespace sv = spinwire::softverbs;

constexpr std::uint64_t kLinkRate = 100'000'000;  // bytes per second: 1024 take 10.24 us
constexpr std::size_t kRequest = 1024 - spinwire::wire::kRpcHeaderBytes;
constexpr std::uint64_t kStep = 2000;  // ns

Config flow_config(Nanoseconds target, Nanoseconds timeout = 20ms) {
  Config c = rpc_config();
  c.rpc.target_rtt = target;
  c.rpc.min_rto = timeout;
  c.connections.connect_timeout = 10s;
  return c;
}

/// Eight clients whose requests share one link. Each makes all calls that it may. The test moves
/// the time.
class Incast {
 public:
  static constexpr std::size_t kClients = 8;

  explicit Incast(Nanoseconds target, double drop = 0, Nanoseconds timeout = 20ms)
      : server_(flow_config(target, timeout), &now_) {
    auto listener = server_.core->listen("127.0.0.1:0", {});
    EXPECT_TRUE(listener);
    listener_ = std::move(*listener);
    EXPECT_TRUE(server_.core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes().first(8)); }));
    auto link = sv::make_link(kLinkRate);
    EXPECT_TRUE(link);
    for (std::size_t i = 0; i < kClients; ++i) {
      clients_.emplace_back();
      clients_[i].engine = std::make_unique<Bare>(flow_config(target, timeout), &now_);
      clients_[i].session = clients_[i].engine->core->open_session(listener_.address(), {}).value();
    }
    EXPECT_TRUE(pass(1'000'000'000, [&] {
      return std::all_of(clients_.begin(), clients_.end(),
                         [](const Client& c) { return c.session.ready(); });
    }));
    for (Client& c : clients_) {
      c.engine->set({.drop = drop, .link = *link});
      auto* const block =
          c.engine->core->context.arena->allocate(spinwire::memory::PoolId::send, kRequest);
      c.request = spinwire::detail::make<Buffer>(block, kRequest);
    }
  }
  /// Calls for `duration` and counts from zero.
  void call_for(std::uint64_t duration) {
    for (Client& c : clients_) c.answered = 0;
    const std::uint64_t end = now_ + duration;
    (void)pass(duration, [&] {
      for (Client& c : clients_) {
        while (call(c)) {
        }
        least_ = std::min(least_, session_of(c).congestion.cwnd);
      }
      return now_ >= end;
    });
  }
  [[nodiscard]] std::uint64_t answered() const {
    std::uint64_t sum = 0;
    for (const Client& c : clients_) sum += c.answered;
    return sum;
  }
  /// The fraction of a period in which the link was busy.
  [[nodiscard]] double used(std::uint64_t duration) const {
    return static_cast<double>(answered() * 1024) * 1e9 /
           (static_cast<double>(kLinkRate) * static_cast<double>(duration));
  }
  /// The sessions' current mean round trip in ns. Excludes the backlog.
  [[nodiscard]] std::uint64_t mean_trip() const {
    std::uint64_t sum = 0;
    for (const Client& c : clients_) sum += session_of(c).srtt;
    return sum / kClients;
  }
  /// The least congestion window of any session, in fractions of a call.
  [[nodiscard]] std::uint32_t least_window() const { return least_; }
  [[nodiscard]] std::uint64_t failed() const { return failed_; }
  [[nodiscard]] double spread() const {
    const auto [least, most] = std::minmax_element(
        clients_.begin(), clients_.end(),
        [](const Client& a, const Client& b) { return a.answered < b.answered; });
    return static_cast<double>(most->answered) / static_cast<double>(least->answered);
  }
  [[nodiscard]] std::uint64_t sum_of(std::uint64_t RpcStats::*counter) const {
    std::uint64_t sum = 0;
    for (const Client& c : clients_) sum += spinwire::rpc::stats(*c.engine->core->calls).*counter;
    return sum;
  }
  /// Waits for all calls in flight, and closes.
  void finish() {
    EXPECT_TRUE(pass(5'000'000'000, [&] {
      return std::all_of(clients_.begin(), clients_.end(),
                         [](const Client& c) { return c.open == 0; });
    }));
    for (Client& c : clients_) c.engine->expect_clean();
    server_.expect_clean();
  }

 private:
  struct Client {
    std::unique_ptr<Bare> engine;
    Session session;
    Buffer request;
    std::uint64_t answered = 0;
    std::uint32_t open = 0;
  };
  static spinwire::rpc::ClientSession& session_of(const Client& c) {
    return *spinwire::rpc::find_client(*c.engine->core->calls,
                                       spinwire::detail::Internals::name(c.session));
  }
  bool call(Client& c) {
    const auto done = [this, &c](Reply& r) {
      --c.open;
      ++(r.status() == Status::ok ? c.answered : failed_);
    };
    if (c.open >= 8 || c.session.call(kEcho, c.request.slice(), done) != Status::ok) return false;
    ++c.open;
    return true;
  }
  template <typename Done>
  bool pass(std::uint64_t most, Done&& done) {
    for (std::uint64_t i = 0; i <= most / kStep; ++i) {
      if (done()) return true;
      now_ += kStep;
      // The first sender finds the link free, so the order is random.
      const std::uint64_t first = random_.next();
      for (std::size_t k = 0; k < clients_.size(); ++k)
        (void)clients_[(first + k) % clients_.size()].engine->core->poll();
      (void)server_.core->poll();
    }
    return done();
  }

  std::uint64_t now_ = 1'000'000;
  std::uint64_t failed_ = 0;
  std::uint32_t least_ = ~std::uint32_t{0};
  spinwire::base::Random random_{1};
  Bare server_;
  Listener listener_;
  std::deque<Client> clients_;
};

TEST(RpcCongestion, AnIncastKeepsTheLinkBusyAndItsShareFairAndItsQueueShort) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  constexpr std::uint64_t kDuration = 100'000'000;
  Incast minded(100us);
  minded.call_for(kDuration / 2);
  minded.call_for(kDuration);
  EXPECT_GT(minded.used(kDuration), 0.9);
  EXPECT_LT(minded.spread(), 1.25);
  EXPECT_GT(minded.sum_of(&RpcStats::cwnd_reductions), 0u);
  EXPECT_EQ(minded.sum_of(&RpcStats::retransmitted_requests), 0u);
  EXPECT_LT(minded.mean_trip(), 200'000u);
  EXPECT_GE(minded.least_window(), spinwire::rpc::kCwndPerCall);
  minded.finish();
  EXPECT_EQ(minded.failed(), 0u);

  Incast careless(0ns);
  careless.call_for(kDuration / 5);
  EXPECT_EQ(careless.sum_of(&RpcStats::cwnd_reductions), 0u);
  // 64 requests of 10 us each are queued.
  EXPECT_GT(careless.mean_trip(), 600'000u);
  careless.finish();
  EXPECT_EQ(careless.failed(), 0u);
}

TEST(RpcCongestion, LossesLeadBelowOneCallAtATimeAndNothingIsLost) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  Incast lossy(100us, 0.5, 1ms);
  lossy.call_for(30'000'000);
  EXPECT_LT(lossy.least_window(), spinwire::rpc::kCwndPerCall);
  lossy.finish();
  EXPECT_GT(lossy.answered(), 0u);
  EXPECT_EQ(lossy.failed(), 0u);
}

/// A client that makes all calls that it may, and a server that replies after a time.
class SlowServer {
 public:
  SlowServer(Nanoseconds timeout, std::uint64_t takes)
      : server_(flow_config(50us, timeout), &now_),
        client_(flow_config(50us, timeout), &now_),
        takes_(takes) {
    listener_ = std::move(*server_.core->listen("127.0.0.1:0", {}));
    EXPECT_TRUE(server_.core->serve(
        kLater, [this](Request& r) { later_.emplace_back(now_ + takes_, r.defer()); }));
    session_ = client_.core->open_session(listener_.address(), {}).value();
    for (int i = 0; i < 100'000 && !session_.ready(); ++i) step(kStep);
    EXPECT_TRUE(session_.ready());
  }
  /// Runs until `calls` calls have ended, with up to `most` in flight.
  void call(std::uint32_t calls, std::uint32_t most, std::uint64_t by) {
    const std::uint32_t end = ended_ + calls;
    for (int i = 0; i < 1'000'000 && ended_ != end; ++i) {
      while (open_ < most && open_ + ended_ < end) {
        const auto done = [this](Reply& r) {
          --open_;
          ++ended_;
          failed_ += r.status() == Status::ok ? 0 : 1;
        };
        ASSERT_EQ(session_.call(kLater, std::span<const std::byte>{}, done), Status::ok);
        ++open_;
      }
      step(by);
    }
    EXPECT_EQ(ended_, end);
    EXPECT_EQ(failed_, 0u);
  }
  /// The most calls that the server had at once.
  [[nodiscard]] std::size_t most_served() const { return most_served_; }
  [[nodiscard]] RpcStats stats() const { return spinwire::rpc::stats(*client_.core->calls); }
  void meet(const sv::FaultPlan& plan) const { client_.set(plan); }
  void finish() const {
    client_.expect_clean();
    server_.expect_clean();
  }

 private:
  void step(std::uint64_t by) {
    now_ += by;
    (void)client_.core->poll();
    (void)server_.core->poll();
    most_served_ = std::max(most_served_, later_.size());
    while (!later_.empty() && later_.front().first <= now_) {
      (void)later_.front().second.reply(std::span<const std::byte>{});
      later_.pop_front();
    }
  }

  std::uint64_t now_ = 1'000'000;
  Bare server_, client_;
  std::uint64_t takes_;
  Listener listener_;
  Session session_;
  std::deque<std::pair<std::uint64_t, PendingCall>> later_;
  std::size_t most_served_ = 0;
  std::uint32_t open_ = 0, ended_ = 0, failed_ = 0;
};

TEST(RpcCongestion, AServerThatTakesItsTimeIsNoCongestion) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  SlowServer t(20ms, 1'000'000);  // twenty times the target
  t.call(100, 1, kStep);
  EXPECT_EQ(t.stats().cwnd_reductions, 0u);
  t.finish();
}

TEST(RpcCongestion, NorIsOneThatTakesLongerThanTheTimeout) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  for (const std::uint64_t takes : {10'000'000u, 60'000'000u, 1'000'000'000u}) {
    SCOPED_TRACE(takes);
    SlowServer t(2ms, takes);
    t.call(takes < 1'000'000'000 ? 64 : 16, 8, 20'000);
    EXPECT_GT(t.stats().retransmitted_requests, 0u);
    EXPECT_EQ(t.stats().cwnd_reductions, 0u);
    EXPECT_EQ(t.most_served(), 8u);
    t.finish();
  }
}

TEST(RpcCongestion, ARoundTripLongerThanTheTimeoutIsLearned) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  SlowServer t(2ms, 0);
  t.meet({.datagram_delay_min = 5ms, .datagram_delay_max = 5ms});
  t.call(20, 1, 20'000);
  EXPECT_GT(t.stats().retransmitted_requests, 0u);
  EXPECT_LT(t.stats().retransmitted_requests, 4u);
  t.finish();
}

/// A server that sleeps before each call, and wakes late; or a client that sleeps before each
/// reply.
void sleep_between_calls(bool of_client, std::uint64_t late) {
  std::uint64_t now = 1'000'000;
  const Bare server(flow_config(50us, 2ms), &now);
  const Bare client(flow_config(50us, 2ms), &now);
  const Listener listener = std::move(*server.core->listen("127.0.0.1:0", {}));
  EXPECT_TRUE(server.core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  Session session = client.core->open_session(listener.address(), {}).value();
  const auto step = [&now](const Bare& one, std::uint64_t by = kStep) {
    now += by;
    (void)one.core->poll();
  };
  const auto sleep = [&](const Bare& one) {
    for (int i = 0; i < 1000 && !one.core->arm(); ++i) now += kStep;
  };
  for (int i = 0; i < 100'000 && !session.ready(); ++i) step(client), step(server);
  for (int i = 0; i < 1000; ++i) step(client), step(server);
  const auto before = spinwire::rpc::stats(*client.core->calls);
  for (int i = 0; i < 100; ++i) {
    step(client);
    step(server);
    if (!of_client) sleep(server);
    bool done = false;
    EXPECT_EQ(session.call(kEcho, std::span<const std::byte>{}, [&](Reply&) { done = true; }),
              Status::ok);
    (void)client.core->flush();
    if (of_client) sleep(client);
    for (std::uint64_t t = 0; t < late; t += 50'000) step(of_client ? server : client, 50'000);
    for (int turn = 0; turn < 100 && !done; ++turn) step(server), step(client);
    EXPECT_TRUE(done);
  }
  const auto after = spinwire::rpc::stats(*client.core->calls);
  EXPECT_EQ(after.cwnd_reductions, before.cwnd_reductions);
  server.expect_clean();
  client.expect_clean();
}

TEST(RpcCongestion, TimeAsleepIsNoCongestionAndNoLoss) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  sleep_between_calls(false, 300'000);
  sleep_between_calls(false, 5'000'000);  // longer than the RTO
  sleep_between_calls(true, 300'000);
}

/// A client with a window of 8 and a server that replies at once, with a one-way delay of `way`.
class LongWay {
 public:
  explicit LongWay(Nanoseconds way)
      : server_(flow_config(50us, 2ms), &now_), client_(flow_config(50us, 2ms), &now_) {
    listener_ = std::move(*server_.core->listen("127.0.0.1:0", {}));
    EXPECT_TRUE(server_.core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
    session_ = client_.core->open_session(listener_.address(), {}).value();
    for (int i = 0; i < 100'000 && !session_.ready(); ++i) step();
    EXPECT_TRUE(session_.ready());
    meet(way, 0);
  }
  void meet(Nanoseconds way, double drop) {
    sv::FaultPlan plan;
    plan.drop = drop;
    plan.datagram_delay_min = plan.datagram_delay_max = way;
    plan.held_datagrams = 1024;
    client_.set(plan);
    server_.set(plan);
  }
  /// Keeps the window full. Returns the number of replies within `time`.
  std::uint64_t call_for(Nanoseconds time) {
    const std::uint64_t before = answered_;
    for (const std::uint64_t end = now_ + static_cast<std::uint64_t>(time.count()); now_ < end;) {
      const auto done = [this](Reply& r) {
        --open_;
        ++(r.status() == Status::ok ? answered_ : failed_);
      };
      while (open_ < 8 && session_.call(kEcho, std::span<const std::byte>{}, done) == Status::ok)
        ++open_;
      step();
    }
    return answered_ - before;
  }
  [[nodiscard]] std::uint64_t failed() const { return failed_; }

 private:
  void step() {
    now_ += kStep;
    (void)client_.core->poll();
    (void)server_.core->poll();
  }

  std::uint64_t now_ = 1'000'000;
  std::uint64_t answered_ = 0, failed_ = 0;
  std::uint32_t open_ = 0;
  Bare server_, client_;
  Listener listener_;
  Session session_;
};

TEST(RpcCongestion, AWayThatIsLongByItselfIsNoCongestion) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  LongWay t(40us);  // the round trip exceeds the target
  (void)t.call_for(50ms);
  EXPECT_GT(t.call_for(200ms), 8 * 200'000u / 90);
  // A growing round trip is detected.
  t.meet(150us, 0);
  (void)t.call_for(1500ms);
  EXPECT_GT(t.call_for(200ms), 8 * 200'000u / 320);
  EXPECT_EQ(t.failed(), 0u);
}

TEST(RpcCongestion, AfterLossesCallsGoAsFastAsBefore) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  for (const Nanoseconds way : {10us, 60us}) {
    SCOPED_TRACE(way.count());
    LongWay t(way);
    (void)t.call_for(50ms);
    const std::uint64_t before = t.call_for(200ms);
    t.meet(way, 0.3);
    EXPECT_GT(t.call_for(500ms), 10u);  // half of the datagrams are lost
    t.meet(way, 0);
    (void)t.call_for(100ms);
    EXPECT_GT(t.call_for(200ms), before * 9 / 10);
    t.meet(way, 0.001);
    EXPECT_GT(t.call_for(200ms), before / 3);
    EXPECT_EQ(t.failed(), 0u);
  }
}

}  // namespace
}  // namespace rpc_congestion_test
