// A client whose session reconnects, and servers that die.
#pragma once

#include "rpc/bare_engine.h"
#include "rpc/client_session.h"
#include "rpc/long_calls.h"
#include "rpc/transport/connection_transport.h"

namespace rpc_session_reconnect_test {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::is_retryable;
using spinwire::Reconnect;
using spinwire::WhenNotReady;

constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr Reconnect kManyAttempts{1000, 10ms, 100ms};

inline Config reconnect_config() {
  Config c = long_call_config();
  c.connections.keepalive_interval = 100ms;
  c.connections.peer_timeout = 10s;
  c.connections.connect_timeout = 5s;
  c.rpc.min_rto = 10ms;
  c.rpc.backlog = 16;
  return c;
}

/// A server that can die without a word, and one that stands in for it.
struct Server {
  explicit Server(const std::string& address, std::map<Bytes, int>& ran, const std::uint64_t* now,
                  const Config& config = reconnect_config())
      : Server(ran, now, config) {
    listener = engine.core->listen(address, {}).value();
  }
  /// Adopts a listening socket.
  Server(int socket, std::map<Bytes, int>& ran, const std::uint64_t* now,
         const Config& config = reconnect_config())
      : Server(ran, now, config) {
    listener = engine.core->adopt_listener(socket, {}).value();
  }
  Server(std::map<Bytes, int>& ran, const std::uint64_t* now, const Config& config)
      : engine(config, now), runs(ran) {
    EXPECT_TRUE(engine.core->serve(kCount, [this](Request& r) {
      ++runs[bytes_of(r.bytes())];
      order.push_back(bytes_of(r.bytes()));
      EXPECT_EQ(r.reply(r.bytes().first(std::min<std::size_t>(r.bytes().size(), 2000))),
                Status::ok);
    }));
    EXPECT_TRUE(engine.core->serve(kLater, [this](Request& r) {
      ++runs[bytes_of(r.bytes())];
      later.push_back(r.defer());
    }));
  }
  /// Drops all that it sends from now on, as if it was killed.
  void silence() const {
    spinwire::softverbs::FaultPlan plan;
    plan.drop = 1;
    engine.set(plan);
    engine.core->abort();
  }
  Bare engine;
  Listener listener;
  std::map<Bytes, int>& runs;
  std::vector<Bytes> order;
  std::vector<PendingCall> later;
};

/// A client with the test's clock, whose session reconnects.
class RpcSessionReconnect : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
    client_ = std::make_unique<Bare>(reconnect_config(), &now_);
  }
  void start(const std::string& address = "127.0.0.1:0",
             const Config& config = reconnect_config()) {
    server_ = std::make_unique<Server>(address, runs_, &now_, config);
    address_ = server_->listener.address();
  }
  [[nodiscard]] spinwire::rpc::ClientSession& record() const {
    return *spinwire::rpc::find_client(*client_->core->calls,
                                       spinwire::detail::Internals::name(session_));
  }
  void kill() {
    server_->silence();
    // The end of an engine in this process says goodbye on its connections.
    spinwire::rpc::Rpc& calls = *client_->core->calls;
    if (const auto& connection = record().connection; connection != nullptr) {
      spinwire::agent::Agent* const a = spinwire::rpc::agent_of(calls, *connection);
      if (a != nullptr)
        spinwire::agent::fail(calls.context, *a, {Status::peer_lost, "test", "cut", "none"});
    }
    server_.reset();
  }
  [[nodiscard]] SessionOptions options(const Reconnect& reconnect = kManyAttempts) {
    SessionOptions options;
    options.reconnect = reconnect;
    options.on_ready = [this](Session s) {
      ++ready_;
      if (on_ready) on_ready(s);
    };
    options.on_closed = [this](Session, const Error& e) { closed_.push_back(e); };
    options.on_interrupted = [this](Session s, const Error& e) {
      EXPECT_EQ(s.state(), SessionState::opening);
      interrupted_.push_back(e);
      if (on_interrupted) on_interrupted(s);
    };
    return options;
  }
  void open(const SessionOptions& how) {
    session_ = client_->core->open_session(address_, how).value();
    ASSERT_TRUE(until([&] { return session_.ready(); }));
  }
  void open(WhenNotReady meanwhile, const Reconnect& reconnect = kManyAttempts) {
    SessionOptions how = options(reconnect);
    how.when_not_ready = meanwhile;
    ASSERT_NO_FATAL_FAILURE(open(how));
    // The first reply opens the whole window.
    ASSERT_EQ(begin(kCount, filled(20, 1000 + static_cast<std::uint32_t>(opened_++))), Status::ok);
    ASSERT_TRUE(until([&] { return all_ended(); }));
    ended_.clear();
    runs_.clear();
  }
  void turn(std::uint64_t step) {
    now_ += step;
    (void)client_->core->poll();
    if (server_ != nullptr) (void)server_->engine.core->poll();
    if (second_ != nullptr) (void)second_->engine.core->poll();
  }
  template <typename Done>
  bool until(Done&& done, std::uint64_t step = 10'000) {
    return engine_test::until({}, [&] {
      if (done()) return true;
      turn(step);
      return done();
    });
  }
  /// Begins a call with this request.
  Status begin(spinwire::Method method, const Bytes& bytes, CallOptions how = {},
               CallId* id = nullptr) {
    const std::size_t number = ended_.size();
    ended_.emplace_back();
    const auto done = [this, number](Reply& r) {
      ++ended_[number].times;
      ended_[number].status = r.status();
      ended_[number].bytes = bytes_of(r.bytes());
    };
    const Status status = session_.call(method, std::span<const std::byte>(bytes), done, how, id);
    if (status != Status::ok) ended_.pop_back();
    return status;
  }
  [[nodiscard]] static CallOptions waiting() {
    CallOptions options;
    options.when_not_ready = WhenNotReady::wait;
    return options;
  }
  [[nodiscard]] bool all_ended() const {
    return std::all_of(ended_.begin(), ended_.end(), [](const Ended& e) { return e.times != 0; });
  }
  void answer_all() const {
    for (const PendingCall& call : server_->later) EXPECT_EQ(call.reply(Bytes()), Status::ok);
    server_->later.clear();
  }
  void interrupt() {
    const std::size_t before = interrupted_.size();
    kill();
    ASSERT_TRUE(until([&] { return interrupted_.size() > before; }, kMillisecond));
    EXPECT_EQ(interrupted_.back().status, Status::peer_lost) << interrupted_.back().message();
    EXPECT_FALSE(session_.ready());
  }
  void finish() {
    EXPECT_EQ(session_.close(), Status::ok);
    ASSERT_TRUE(until([&] { return closed_.size() == 1; }, kMillisecond));
    EXPECT_EQ(closed_[0].status, Status::ok) << closed_[0].message();
    for (const Ended& e : ended_) EXPECT_EQ(e.times, 1);
    ASSERT_TRUE(until([&] { return client_->core->context.agents.size() == 0; }, kMillisecond));
    client_->expect_clean();
    for (const auto& [bytes, times] : runs_) EXPECT_EQ(times, 1);
  }

  std::uint64_t now_ = 1'000'000'000;
  // Used by the engines' destructors, too.
  std::map<Bytes, int> runs_;
  std::deque<Ended> ended_;
  std::vector<Error> closed_, interrupted_;
  int ready_ = 0, opened_ = 0;
  std::function<void(Session)> on_ready, on_interrupted;
  std::string address_;
  std::unique_ptr<Server> server_, second_;
  std::unique_ptr<Bare> client_;
  Session session_;
};

}  // namespace rpc_session_reconnect_test
