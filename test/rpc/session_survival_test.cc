// Situations that break other RPC engines: servers slower than the timeout, lost set-up replies,
// refused sessions, more requests than receives, devices that send late.
#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/client_call.h"

namespace rpc_session_survival_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcSessionSurvival, AHandlerThatIsSlowerThanTheTimeOut) {
  std::uint64_t now = 1'000'000'000;
  Calls t(rpc_config(), &now);
  ASSERT_EQ(t.begin(kLater, filled(30, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] {
    now += 1'000'000;
    return t.client.engine.rpc_stats().retransmitted_requests >= 4;
  }));
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().duplicates >= 4; }));
  ASSERT_EQ(t.later.size(), 1u);
  EXPECT_EQ(t.later[0].call.reply(filled(40, 2)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[0].bytes, filled(40, 2));
  EXPECT_EQ(t.server.engine.rpc_stats().served, 1u);
  EXPECT_EQ(t.call(kEcho, filled(20, 3)).bytes, filled(20, 3));
  t.finish();
}

TEST(RpcSessionSurvival, ASessionThatIsRefused) {
  Config c = rpc_config();
  c.rpc.sessions = 1;
  Calls t(c);
  Node other(rpc_config());
  std::vector<Error> closed;
  SessionOptions options;
  options.on_closed = [&closed](Session, const Error& e) { closed.push_back(e); };
  auto second = other.engine.open_session(t.server.listener.address(), options);
  ASSERT_TRUE(second) << second.error().message();
  ASSERT_TRUE(engine_test::until({&t.client, &t.server, &other}, [&] { return !closed.empty(); }));
  EXPECT_EQ(closed[0].status, Status::limit) << closed[0].message();
  EXPECT_NE(closed[0].message().find("rpc.sessions"), std::string::npos) << closed[0].message();
  EXPECT_EQ(second->state(), SessionState::closed);
  EXPECT_EQ(other.engine.rpc_stats().sessions, 0u);
  EXPECT_EQ(t.call(kEcho, filled(20, 3)).bytes, filled(20, 3));
  other.expect_clean();
  t.finish();
}

TEST(RpcSessionSurvival, AnAnswerToTheSetUpThatIsLost) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  std::uint64_t now = 1'000'000'000;
  Config c = rpc_config();
  c.connections.keepalive_interval = 100ms;
  c.connections.peer_timeout = 1s;
  Bare server(c, &now);
  auto listener = server.core->listen("127.0.0.1:0", {});
  ASSERT_TRUE(listener);
  ASSERT_TRUE(server.core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  const auto served = [&] { return spinwire::rpc::stats(*server.core->calls).served_sessions; };
  {
    Bare client(c, &now);
    ASSERT_TRUE(client.core->open_session(listener->address(), {}));
    for (int i = 0; i < 100'000 && served() == 0; ++i) {
      now += 1000;
      (void)client.core->poll();
      (void)server.core->poll();
    }
    ASSERT_EQ(served(), 1u);
  }  // has not read the reply
  for (int i = 0; i < 10'000 && served() != 0; ++i) {
    now += 1'000'000;
    (void)server.core->poll();
  }
  EXPECT_EQ(served(), 0u);
  server.expect_clean();
}

TEST(RpcSessionSurvival, MoreRequestsThanThereAreReceivesFor) {
  Config few = rpc_config();
  few.rpc.receive_depth = 64;
  Config slow = rpc_config();
  slow.rpc.min_rto = 10s;  // a thread that is off its processor for a while loses none
  Node server(few), client(slow);
  server.listen();
  ASSERT_TRUE(server.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  std::vector<Session> sessions;
  for (int i = 0; i < 16; ++i) {
    sessions.push_back(client.engine.open_session(server.listener.address(), {}).value());
    ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return sessions.back().ready(); }));
  }
  std::uint32_t begun = 0, ended = 0;
  const auto done = [&ended](Reply& r) { ended += r.status() == Status::ok ? 1 : 0; };
  const Bytes bytes = filled(32, 1);
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    for (Session& s : sessions) {
      while (begun < 20'000 && s.call(kEcho, std::span<const std::byte>(bytes), done) == Status::ok)
        ++begun;
    }
    return ended == 20'000;
  }));
  if (device_name() == "softverbs") {
    EXPECT_EQ(client.engine.rpc_stats().retransmitted_requests, 0u);
  }
  EXPECT_EQ(server.engine.rpc_stats().served, 20'000u);
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(engine_test::until({&client, &server}, [&] {
    return client.engine.rpc_stats().sessions + server.engine.rpc_stats().served_sessions == 0;
  }));
  client.expect_clean();
  server.expect_clean();
}

/// Sessions without reserved receives, each with one call: more than can arrive at once.
struct Crowd {
  static constexpr std::uint32_t kSessions = 160, kReceives = 64, kTogether = 32;
  static Config config(std::uint32_t receives) {
    Config c = rpc_config();
    c.rpc.transport = RpcTransport::datagram;
    c.rpc.sessions = kSessions;
    c.rpc.receive_depth = receives;
    c.queues.receive_postlist = kTogether;
    c.queues.poll_batch = 64;
    return c;
  }
  Crowd() : server(config(kReceives), &now), client(config(512), &now), ended(kSessions) {
    server.listen();
    EXPECT_TRUE(server.engine.serve(kCount, [this](Request& r) {
      ++runs[bytes_of(r.bytes())];
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    }));
    EXPECT_TRUE(server.engine.serve(kEcho, [this](Request& r) {
      (void)r.reply(r.bytes());
      if (sends_directly()) kept.push_back(r.keep());
    }));
    for (std::uint32_t i = 0; i < kSessions; ++i) {
      sessions.push_back(client.engine.open_session(server.listener.address(), {}).value());
      EXPECT_TRUE(until({&client, &server}, [this] { return sessions.back().ready(); }));
    }
  }
  [[nodiscard]] const spinwire::rpc::DatagramPort& port() const {
    return *spinwire::detail::core_of(server.engine)->calls->port;
  }
  [[nodiscard]] bool sends_directly() const { return port().sends_directly(); }
  /// Takes `count` receives from the device. Without a control step they are not posted again: they
  /// wait for a list or, if direct datagrams take receives only from an empty pool, for blocks that
  /// the application keeps.
  void take_receives(std::uint32_t count) {
    const Bytes one = filled(1, 1);
    for (std::uint32_t i = 0; sends_directly() ? port().receive_shortage() < count : i < count;
         ++i) {
      bool done = false;
      const auto set = [&done](Reply&) { done = true; };
      ASSERT_EQ(sessions[0].call(kEcho, std::span<const std::byte>(one), set), Status::ok);
      for (int k = 0; k < 1000 && !done; ++k) (void)(client.poll() + server.engine.poll());
      ASSERT_TRUE(done);
    }
  }
  /// Makes a call on each session while the server takes none.
  void call_all(std::uint32_t wave) {
    for (std::uint32_t i = 0; i < kSessions; ++i) {
      const Bytes bytes = filled(12, wave * kSessions + i);
      const auto done = [this, i, seed = bytes[0]](Reply& r) {
        ++ended[i];
        EXPECT_EQ(r.status(), Status::ok);
        EXPECT_TRUE(r.bytes().size() == 12 && r.bytes()[0] == seed);
      };
      ASSERT_EQ(sessions[i].call(kCount, std::span<const std::byte>(bytes), done), Status::ok);
      (void)client.poll();
    }
  }
  void poll_some() {
    for (int i = 0; i < 200; ++i) (void)(client.poll() + server.poll());
  }

  std::uint64_t now = 1'000'000'000;
  Node server, client;
  std::vector<Session> sessions;
  std::vector<std::uint32_t> ended;
  std::map<Bytes, int> runs;
  std::vector<BufferSlice> kept;
};

TEST(RpcSessionSurvival, RequestsThatFindNoReceiveEndOnceAllTheSame) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  Crowd t;
  for (std::uint32_t wave = 0; wave < 3; ++wave) {
    t.runs.clear();
    t.poll_some();
    t.take_receives(Crowd::kTogether - 1);
    const std::uint64_t before = t.client.engine.rpc_stats().retransmitted_requests;
    t.call_all(wave);
    t.poll_some();
    // Time stands still, so calls that have not run found no receive.
    const std::size_t ran = t.runs.size();
    EXPECT_LT(ran, Crowd::kSessions);
    const std::vector<std::uint32_t> all(Crowd::kSessions, wave + 1);
    for (int i = 0; i < 400 && t.ended != all; ++i) {
      t.now += 5'000'000;
      t.poll_some();
    }
    EXPECT_EQ(t.ended, all);
    t.kept.clear();
    EXPECT_EQ(t.runs.size(), Crowd::kSessions);
    for (const auto& [bytes, times] : t.runs) EXPECT_EQ(times, 1);
    EXPECT_GE(t.client.engine.rpc_stats().retransmitted_requests - before, Crowd::kSessions - ran);
  }
  for (Session& s : t.sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] {
    t.now += 1'000'000;
    return t.client.engine.rpc_stats().sessions + t.server.engine.rpc_stats().served_sessions == 0;
  }));
  t.client.expect_clean();
  t.server.expect_clean();
}

/// A device that accepts long datagrams but does not send them yet.
class HeldBack {
 public:
  explicit HeldBack(ibv_context* context) : ops_(context->ops) {
    real_ = ops_.post_send;
    all.clear();
    ops_.post_send = [](ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
      for (ibv_send_wr* each = wr; each != nullptr; each = each->next) {
        One one{qp, *each, {}};
        one.wr.next = nullptr;
        std::copy(each->sg_list, each->sg_list + each->num_sge, one.sges.begin());
        if ((each->send_flags & IBV_SEND_INLINE) == 0) {
          all.push_back(one);
        } else if (const int failed = post(one, bad); failed != 0) {
          return failed;
        }
      }
      return 0;
    };
  }
  HeldBack(const HeldBack&) = delete;
  HeldBack& operator=(const HeldBack&) = delete;
  ~HeldBack() { ops_.post_send = real_; }
  static void let_go() {
    ibv_send_wr* bad = nullptr;
    for (One& one : all) EXPECT_EQ(post(one, &bad), 0);
  }

  struct One {
    ibv_qp* qp;
    ibv_send_wr wr;
    std::array<ibv_sge, 2> sges;
  };
  static inline std::vector<One> all;

 private:
  static int post(One& one, ibv_send_wr** bad) {
    one.wr.sg_list = one.sges.data();
    return real_(one.qp, &one.wr, bad);
  }
  static inline int (*real_)(ibv_qp*, ibv_send_wr*, ibv_send_wr**);
  ibv_context_ops& ops_;
};

TEST(RpcSessionSurvival, ARequestThatIsSentAgainBeforeItHasLeft) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  std::uint64_t now = 1'000'000'000;
  Config c = rpc_config();
  c.rpc.transport = RpcTransport::datagram;
  c.rpc.direct_datagrams = spinwire::DirectPath::off;  // direct datagrams leave at once
  Bare server(c, &now), client(c, &now);
  auto listener = server.core->listen("127.0.0.1:0", {});
  ASSERT_TRUE(listener);
  std::map<spinwire::Method, std::vector<Bytes>> seen;
  for (const spinwire::Method method : {spinwire::Method{1}, spinwire::Method{2}}) {
    ASSERT_TRUE(server.core->serve(method, [&seen](Request& r) {
      seen[r.method()].push_back(bytes_of(r.bytes()));
      EXPECT_EQ(r.reply(r.bytes().first(3)), Status::ok);
    }));
  }
  const auto run = [&](std::uint64_t step, auto&& done) {
    for (int i = 0; i < 100'000 && !done(); ++i) {
      now += step;
      (void)client.core->poll();
      (void)server.core->poll();
    }
    return done();
  };
  Session session = client.core->open_session(listener->address(), {}).value();
  ASSERT_TRUE(run(1000, [&] { return session.ready(); }));
  const auto stats = [](const Bare& of) { return spinwire::rpc::stats(*of.core->calls); };
  std::vector<Status> ended;
  const auto done = [&ended](Reply& r) { ended.push_back(r.status()); };
  const Bytes bytes = filled(300, 1);
  auto* const block = client.core->context.arena->allocate(spinwire::memory::PoolId::send, 300);
  ASSERT_NE(block, nullptr);
  Buffer b = spinwire::detail::make<Buffer>(block, bytes.size());
  std::copy(bytes.begin(), bytes.end(), b.data());
  {
    const HeldBack held(client.core->context.device->context());
    ASSERT_EQ(session.call(1, b.slice(), done), Status::ok);
    ASSERT_TRUE(run(100'000, [&] { return stats(client).retransmitted_requests == 1; }));
    // Another call with the same bytes.
    EXPECT_EQ(session.cancel(session.last_call()), Status::ok);
    (void)client.core->poll();
    ASSERT_EQ(session.call(2, b.slice(), done), Status::ok);
    // The first has its header in the headroom, so the others must have staged ones.
    ASSERT_EQ(HeldBack::all.size(), 3u);
    EXPECT_EQ(HeldBack::all[0].wr.num_sge, 1);
    const std::uint64_t at = HeldBack::all[0].sges[0].addr + spinwire::wire::kRpcHeaderBytes;
    for (int i = 1; i < 3; ++i) {
      EXPECT_EQ(HeldBack::all[i].wr.num_sge, 2);
      EXPECT_EQ(HeldBack::all[i].sges[1].addr, at);
    }
    EXPECT_TRUE(seen.empty());
    HeldBack::let_go();
  }
  ASSERT_TRUE(run(1000, [&] { return ended.size() == 2; }));
  EXPECT_EQ(ended, (std::vector<Status>{Status::cancelled, Status::ok}));
  EXPECT_EQ(seen[1], std::vector<Bytes>(1, bytes));
  EXPECT_EQ(seen[2], std::vector<Bytes>(1, bytes));
  EXPECT_EQ(stats(server).retransmitted_replies + stats(server).duplicates, 1u);
  EXPECT_EQ(stats(server).bad_datagrams, 0u);
  EXPECT_EQ(stats(client).late_replies, 2u);
  // None of its calls is in flight.
  EXPECT_EQ(block->header_in_use, 0u);
  EXPECT_TRUE(b.unique());
  b.reset();
  client.expect_clean();
  server.expect_clean();
}

TEST(RpcSessionSurvival, OneRequestThatGoesToMany) {
  Node client(rpc_config());
  std::deque<Node> servers;
  std::vector<Session> sessions;
  std::vector<Bytes> seen;
  for (int i = 0; i < 3; ++i) {
    Node& server = servers.emplace_back(rpc_config());
    server.listen();
    ASSERT_TRUE(server.engine.serve(kEcho, [&seen](Request& r) {
      seen.push_back(bytes_of(r.bytes()));
      (void)r.reply(r.bytes().first(1));
    }));
    sessions.push_back(client.engine.open_session(server.listener.address(), {}).value());
    ASSERT_TRUE(engine_test::until({&client, &server}, [&] { return sessions.back().ready(); }));
  }
  const Bytes bytes = filled(700, 5);
  int ended = 0;
  {
    Buffer b = client.buffer(bytes.size());
    std::copy(bytes.begin(), bytes.end(), b.data());
    for (Session& s : sessions) {
      const auto done = [&ended](Reply& r) { ended += r.status() == Status::ok ? 1 : 0; };
      ASSERT_EQ(s.call(kEcho, b.slice(), done), Status::ok);
    }
  }  // dropped: the calls hold it
  ASSERT_TRUE(engine_test::until({&client, &servers[0], &servers[1], &servers[2]},
                                 [&] { return ended == 3; }));
  EXPECT_EQ(seen, std::vector<Bytes>(3, bytes));
  for (Session& s : sessions) EXPECT_EQ(s.close(), Status::ok);
  ASSERT_TRUE(engine_test::until({&client, &servers[0], &servers[1], &servers[2]}, [&] {
    std::uint32_t left = client.engine.rpc_stats().sessions + client.engine.stats().connections;
    for (const Node& each : servers) left += each.engine.stats().connections;
    return left == 0;
  }));
  client.expect_clean();
  for (Node& server : servers) server.expect_clean();
}

}  // namespace
}  // namespace rpc_session_survival_test
