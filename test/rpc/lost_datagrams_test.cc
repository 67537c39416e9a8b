// Lost, duplicated, late and reordered datagrams, and peers that die.
#include <sys/wait.h>

#include "base/internals.h"
#include "rpc/bare_engine.h"

namespace rpc_loss_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::ReplyCallback;
using spinwire::softverbs::FaultPlan;

/// Many sessions of a client that calls as fast as it may, over a faulty network.
class Storm {
 public:
  Storm(std::uint64_t seed, std::uint32_t sessions, std::uint32_t calls)
      : server_(rpc_config()), client_(rpc_config()), most_(calls), answers_(calls), runs_(calls) {
    auto made = server_.core->listen("127.0.0.1:0", {});
    EXPECT_TRUE(made);
    listener_ = std::move(*made);
    EXPECT_TRUE(server_.core->serve(kEcho, [this](Request& r) { serve(r); }));
    for (std::uint32_t i = 0; i < sessions; ++i)
      sessions_.push_back(client_.core->open_session(listener_.address(), {}).value());
    EXPECT_TRUE(run([&] {
      return std::all_of(sessions_.begin(), sessions_.end(),
                         [](const Session& s) { return s.ready(); });
    }));
    FaultPlan plan;
    plan.seed = seed;
    plan.drop = plan.duplicate = 0.03;
    plan.reorder = 0.1;
    plan.datagram_delay_max = std::chrono::microseconds(30);
    server_.set(plan);
    plan.seed = ~seed;
    client_.set(plan);
  }
  bool run_all() {
    return run([&] {
      for (Session& s : sessions_) {
        while (next_ < most_ && call(s)) ++next_;
      }
      return ended_ == most_;
    });
  }
  void expect_exact() {
    for (std::uint32_t id = 0; id < most_; ++id) {
      ASSERT_EQ(answers_[id], 1u) << id;
      ASSERT_EQ(runs_[id], 1u) << id;
    }
    const auto c = spinwire::rpc::stats(*client_.core->calls);
    const auto s = spinwire::rpc::stats(*server_.core->calls);
    if (!over_connections()) {  // over connections the device retransmits
      EXPECT_GT(c.retransmitted_requests, most_ / 50);
      EXPECT_GT(s.retransmitted_replies + s.duplicates, most_ / 50);
      EXPECT_GT(c.late_replies, 0u);
    }
    EXPECT_EQ(s.served, most_);
    EXPECT_EQ(c.bad_datagrams + s.bad_datagrams, 0u);
    client_.expect_clean();
    server_.expect_clean();
  }

 private:
  static Bytes content(std::uint32_t id) {
    Bytes bytes = filled(4 + id % 300, id);
    std::memcpy(bytes.data(), &id, sizeof id);
    return bytes;
  }
  bool call(Session& s) {
    const std::uint32_t id = next_;
    const Bytes bytes = content(id);
    const ReplyCallback done = [this, id](Reply& r) {
      ++ended_;
      ++answers_[id];
      EXPECT_EQ(r.status(), Status::ok) << id << " " << to_string(r.status());
      EXPECT_EQ(bytes_of(r.bytes()), content(id)) << id;
    };
    if (bytes.size() <= kSlotPayloadBytes) return s.call(kEcho, bytes, done) == Status::ok;
    auto* const block =
        client_.core->context.arena->allocate(spinwire::memory::PoolId::send, bytes.size());
    if (block == nullptr) return false;
    const Buffer b = spinwire::detail::make<Buffer>(block, bytes.size());
    std::copy(bytes.begin(), bytes.end(), b.data());
    return s.call(kEcho, b.slice(), done) == Status::ok;
  }
  void serve(Request& r) {
    std::uint32_t id = 0;
    std::memcpy(&id, r.bytes().data(), sizeof id);
    ASSERT_LT(id, most_);
    ++runs_[id];
    if (id % 5 != 0) {
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    } else {
      later_.push_back({r.defer(), bytes_of(r.bytes())});
    }
  }
  template <typename Done>
  bool run(Done&& done) {
    return until({}, [&, i = 0u]() mutable {
      (void)client_.core->poll();
      (void)server_.core->poll();
      if (i++ % 3 == 0 && !later_.empty()) {
        (void)later_.front().call.reply(later_.front().bytes);
        later_.pop_front();
      }
      return done();
    });
  }

  Bare server_, client_;
  Listener listener_;
  std::vector<Session> sessions_;
  std::uint32_t most_, next_ = 0, ended_ = 0;
  std::vector<std::uint32_t> answers_, runs_;
  std::deque<Calls::Later> later_;
};

TEST(RpcLoss, EachCallRunsOnceAndIsAnsweredOnce) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "faults are injected";
  Storm storm(1, 4, 5000);
  ASSERT_TRUE(storm.run_all());
  storm.expect_exact();
}

/// For an engine whose clock hardly moves while its peers live, however long they are off their
/// processors, and fast when they are dead or stopped.
Config watchful() {
  Config c = rpc_config();
  c.connections.keepalive_interval = 1s;
  c.connections.peer_timeout = 60s;
  c.connections.handshake_timeout = 10s;
  c.rpc.call_timeout = 1h;
  return c;
}
constexpr std::uint64_t kBegin = 1'000'000'000;
constexpr std::uint64_t kStep = 5'000'000;  // ns, at each turn
constexpr std::uint64_t kSlowStep = 1'000;  // what is lost is sent again

/// For the processes that die: they end nothing by themselves.
Config dying() {
  Config c = rpc_config();
  c.connections.peer_timeout = 1h;
  return c;
}

/// Serves an echo until killed.
int serve_echo(int in, int out) {
  Node node(dying());
  node.listen();
  std::vector<PendingCall> held;
  EXPECT_TRUE(node.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  EXPECT_TRUE(node.engine.serve(kLater, [&held](Request& r) { held.push_back(r.defer()); }));
  write_line(out, node.listener.address());
  while (command(in) != 'q') {
    for (int i = 0; i < 100; ++i) (void)node.poll();
  }
  return 0;
}

TEST(RpcLoss, AServerThatDiesEndsItsSessionsAlone) {
  Child victim(serve_echo);
  const std::string address = victim.line();
  std::uint64_t now = kBegin;
  Calls other(watchful(), &now);
  other.each_turn = [&now] { now += kSlowStep; };
  std::vector<Error> closed;
  SessionOptions options;
  options.on_closed = [&closed](Session, const Error& e) { closed.push_back(e); };
  Session session = other.client.engine.open_session(address, options).value();
  ASSERT_TRUE(other.until([&] { return session.ready(); }));
  int ended = 0;
  Status status = Status::ok;
  const ReplyCallback done = [&](Reply& r) {
    ++ended;
    status = r.status();
  };
  ASSERT_EQ(session.call(kEcho, filled(5, 1), done), Status::ok);
  ASSERT_TRUE(other.until([&] { return ended == 1; }));
  EXPECT_EQ(status, Status::ok);
  for (int i = 0; i < 12; ++i) ASSERT_EQ(session.call(kLater, filled(5, 1), done), Status::ok);
  victim.kill(SIGKILL);
  const std::uint64_t killed = now;
  ASSERT_TRUE(other.until([&] {
    now += kStep;
    return closed.size() == 1;
  }));
  // After the time-out, and a question to the control port of a process that is gone.
  EXPECT_LT(now - killed, 80'000'000'000u);
  EXPECT_EQ(ended, 13);
  EXPECT_EQ(status, Status::peer_lost);
  EXPECT_EQ(closed[0].status, Status::peer_lost) << closed[0].message();
  EXPECT_EQ(session.state(), SessionState::closed);
  EXPECT_EQ(session.call(kEcho, Bytes(), done), Status::not_connected);
  EXPECT_EQ(other.call(kEcho, filled(9, 9)).bytes, filled(9, 9));
  other.finish();
}

TEST(RpcLoss, AnIdleServerThatDiesIsNoticed) {
  Child victim(serve_echo);
  std::uint64_t now = kBegin;
  Node client(watchful(), &now);
  std::vector<Error> closed;
  SessionOptions options;
  options.on_closed = [&closed](Session, const Error& e) { closed.push_back(e); };
  Session session = client.engine.open_session(victim.line(), options).value();
  ASSERT_TRUE(until({&client}, [&] {
    now += kSlowStep;
    return session.ready();
  }));
  victim.kill(SIGKILL);
  ASSERT_TRUE(until({&client}, [&] {
    now += kStep;
    return closed.size() == 1;
  }));
  EXPECT_EQ(closed[0].status, Status::peer_lost) << closed[0].message();
  client.expect_clean();
}

TEST(RpcLoss, AClientThatDiesIsForgotten) {
  std::uint64_t now = kBegin;
  Node server(watchful(), &now);
  server.stale_allowed = over_connections();  // what it was being told
  server.listen();
  ASSERT_TRUE(server.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  const std::string address = server.listener.address();
  Child victim([&](int, int) {
    Node client(dying());
    Session s = client.engine.open_session(address, {}).value();
    for (;;) {
      (void)client.poll();
      (void)s.call(kEcho, Bytes(), [](Reply&) {});
    }
    return 0;
  });
  ASSERT_TRUE(until({&server}, [&] {
    now += kSlowStep;
    return server.engine.rpc_stats().served > 100;
  }));
  EXPECT_EQ(server.engine.rpc_stats().served_sessions, 1u);
  victim.kill(SIGKILL);
  ASSERT_TRUE(until({&server}, [&] {
    now += kStep;
    return server.engine.rpc_stats().served_sessions == 0;
  }));
  server.expect_clean();
}

TEST(RpcLoss, AServerThatHangsAndOneThatDiesAreToldApart) {
  if (over_connections()) GTEST_SKIP() << "a connection finds that out by itself";
  const auto serve = [&](int, int out) {
    Node server(dying());
    server.listen();
    (void)server.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); });
    const std::string line = server.listener.address() + "\n";
    if (::write(out, line.data(), line.size()) < 0) return 1;
    for (;;) (void)server.poll();
    return 0;
  };
  Child hung(serve), dead(serve);
  std::uint64_t now = kBegin;
  const Config config = watchful();
  Node client(config, &now);
  std::vector<std::string> ended(2);
  std::uint64_t hung_ended = 0;
  int ready = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    SessionOptions options;
    options.on_ready = [&](Session) { ++ready; };
    options.on_closed = [&, i](Session, const Error& e) {
      EXPECT_EQ(e.status, Status::peer_lost);
      ended[i] = e.message();
      if (i == 0) hung_ended = now;
    };
    ASSERT_TRUE(client.engine.open_session((i == 0 ? hung : dead).line(), options));
  }
  ASSERT_TRUE(until({&client}, [&] {
    now += kSlowStep;
    return ready == 2;
  }));
  hung.signal(SIGSTOP);
  int stopped = 0;
  ASSERT_EQ(::waitpid(hung.pid(), &stopped, WUNTRACED), hung.pid());
  ASSERT_TRUE(WIFSTOPPED(stopped));
  const std::uint64_t hangs_since = now;
  dead.kill(SIGKILL);
  ASSERT_TRUE(until({&client}, [&] {
    now += kStep;
    return !ended[0].empty() && !ended[1].empty();
  }));
  EXPECT_NE(ended[0].find("process hangs, was stopped"), std::string::npos) << ended[0];
  // An interval until the silence begins to count, and one until the last check. A network may
  // bring the server's last datagrams late.
  if (on_softverbs()) {
    const Nanoseconds most =
        config.connections.peer_timeout + 2 * config.connections.keepalive_interval;
    EXPECT_LE(hung_ended - hangs_since, static_cast<std::uint64_t>(most.count()) + 20 * kStep);
  }
  // Direct datagrams need the peer's process; other clients ask at the server's address.
  const bool knows = on_softverbs() && !by_work_requests();
  const char* const found = knows ? "process has ended" : "process is gone";
  EXPECT_NE(ended[1].find(found), std::string::npos) << ended[1];
  hung.kill(SIGKILL);
}

TEST(RpcLoss, AnEngineThatEndsTellsItsPeers) {
  Calls t;
  ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  t.server.engine = Engine();
  ASSERT_TRUE(until({&t.client}, [&] { return t.closed.size() == 1; }));
  EXPECT_EQ(t.closed[0].status, Status::ok) << t.closed[0].message();
  EXPECT_EQ(t.ended[0].status, Status::flushed);
  t.client.expect_clean();
  // In the other direction.
  Calls u;
  ASSERT_EQ(u.begin(kLater, filled(5, 1)), Status::ok);
  u.client.engine = Engine();
  EXPECT_EQ(u.ended[0].status, Status::flushed);
  EXPECT_EQ(u.closed.size(), 1u);
  ASSERT_TRUE(until({&u.server}, [&] { return u.server.engine.rpc_stats().served_sessions == 0; }));
  u.server.expect_clean();
}

}  // namespace
}  // namespace rpc_loss_test
