// Sessions that have no calls for a while: what they give back, and what comes late all the same.
#include "rpc/bare.h"
#include "rpc/calling.h"

namespace rpc_idle_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::RpcCarrier;
using spinwire::rpc::ClientSession;
using spinwire::rpc::ServerSession;

/// Two engines whose time goes on by a microsecond a poll, or faster where nothing happens.
struct Idle {
  explicit Idle(const Config& c = rpc_config()) : server(c, &now), client(c, &now) {
    listener = server.core->listen("127.0.0.1:0", {}).value();
    serve(kEcho, [](Request& r) { EXPECT_EQ(r.reply(r.bytes()), Status::ok); });
    session = client.core->open_session(listener.address(), {}).value();
    EXPECT_TRUE(until([&] { return session.ready(); }));
  }
  void serve(spinwire::Method method, const spinwire::MethodHandler& handler) const {
    EXPECT_TRUE(server.core->serve(method, handler));
  }
  void poll() const {
    (void)client.core->poll();
    (void)server.core->poll();
  }
  template <typename Done>
  bool until(Done&& done) {
    for (int i = 0; i < 1'000'000 && !done(); ++i) {
      now += 1000;
      poll();
    }
    return done();
  }
  void rest(std::chrono::milliseconds time) {
    for (std::int64_t i = 0; i < time.count(); ++i) {
      now += 1'000'000;
      poll();
    }
  }
  Status begin(spinwire::Method method, const Bytes& bytes = {}) {
    return session.call(method, std::span<const std::byte>(bytes), [this](Reply& r) {
      ended.push_back(r.status());
      replies.push_back(bytes_of(r.bytes()));
    });
  }
  [[nodiscard]] ClientSession& ours() const {
    return *spinwire::rpc::find_client(*client.core->calls, session.name());
  }
  [[nodiscard]] ServerSession& theirs() const {
    return *spinwire::rpc::find_server(*server.core->calls, ours().peer);
  }
  [[nodiscard]] RpcStats stats(const Bare& of) const {
    return spinwire::rpc::stats(*of.core->calls);
  }

  std::uint64_t now = 1'000'000'000;
  Bare server, client;
  Listener listener;
  Session session;
  std::vector<Status> ended;
  std::vector<Bytes> replies;
};

TEST(RpcIdle, ReceivesGoBackWhateverPingsAreSentMeanwhile) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a clock of its own";
  for (const auto keepalive : {20ms, 400ms, 1000ms}) {
    Config c = rpc_config();
    c.rpc.carrier = RpcCarrier::datagrams;
    c.connections.keepalive = keepalive;
    c.connections.credit_idle = 1s;
    Idle t(c);
    ASSERT_EQ(t.begin(kEcho), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.ended.size() == 1; }));
    const std::uint32_t window = t.ours().window;
    EXPECT_EQ(t.server.core->calls->promised, window);
    EXPECT_EQ(t.ours().allowed, window);
    t.rest(900ms);
    EXPECT_EQ(t.server.core->calls->promised, window) << "it may call again";
    t.rest(20s);
    EXPECT_EQ(t.server.core->calls->promised, 0u) << keepalive.count() << " ms";
    EXPECT_TRUE(t.session.ready());
    EXPECT_EQ(t.stats(t.server).served_sessions, 1u);
    // The client knows.
    for (int i = 0; i < 2; ++i) ASSERT_EQ(t.begin(kEcho), Status::ok);
    EXPECT_EQ(t.ours().under_way, 1u);
    ASSERT_TRUE(t.until([&] { return t.ended.size() == 3; }));
    EXPECT_EQ(t.ended, std::vector<Status>(3, Status::ok));
    EXPECT_EQ(t.server.core->calls->promised, window);
    t.client.expect_clean();
    t.server.expect_clean();
  }
}

}  // namespace
}  // namespace rpc_idle_test
