// Situations of sessions and their calls.
#include <gtest/gtest.h>

#include "engine/engine_core.h"
#include "rpc/rpc_ends.h"
#include "softverbs/faults/fault_plan.h"
#include "tools/situations.h"

namespace call_situations_test {
namespace {

using namespace situations;  // NOLINT: the names of a test namespace

using rpc_test::kEcho;
using rpc_test::kLater;
using spinwire::CallOptions;
using spinwire::PendingCall;
using spinwire::Reply;
using spinwire::Request;
using spinwire::Session;
using spinwire::softverbs::FaultPlan;

constexpr std::span<const std::byte> kNothing;

/// Calls travel as datagrams, and nobody is lost.
Config call_config() {
  Config c = without_loss(rpc_test::over(spinwire::RpcTransport::datagram));
  c.rpc.call_timeout = 1h;
  return c;
}

/// A client with a session, whose window the server knows.
struct Calling {
  Calling(const Scene& scene, const Config& servers, const Config& clients)
      : server(Scene::hidden(servers)), client(scene.shown(clients)) {
    server.listen();
    EXPECT_TRUE(
        server.engine.serve(kEcho, [](Request& r) { EXPECT_EQ(r.reply(kNothing), Status::ok); }));
    EXPECT_TRUE(server.engine.serve(kLater, [this](Request& r) { deferred.push_back(r.defer()); }));
    session = open();
  }
  explicit Calling(const Scene& scene, const Config& config = call_config())
      : Calling(scene, config, config) {}
  Session open() {
    auto made = client.engine.open_session(server.listener.address(), {});
    EXPECT_TRUE(made) << made.error().message();
    if (!made) return {};
    EXPECT_TRUE(until({&client, &server}, [&] { return made->ready(); }));
    bool ended = false;
    EXPECT_EQ(made->call(kEcho, kNothing, [&](Reply&) { ended = true; }), Status::ok);
    EXPECT_TRUE(until({&client, &server}, [&] { return ended; }));
    return *made;
  }
  /// Calls that the server does not answer.
  static void call(Session& on, std::uint32_t count, const CallOptions& options = {}) {
    for (std::uint32_t i = 0; i < count; ++i)
      EXPECT_EQ(on.call(
                    kLater, kNothing, [](Reply&) {}, options),
                Status::ok);
  }
  void set_faults(const FaultPlan& plan) {
    auto* const device = spinwire::detail::core_of(client.engine)->context.device->context();
    EXPECT_TRUE(spinwire::softverbs::set_faults(device, plan));
  }
  [[noreturn]] void play(const std::function<void()>& each_turn = {}) {
    situations::play({&client, &server}, each_turn);
  }
  [[nodiscard]] std::uint32_t window() const { return client.engine.config().rpc.window; }

  std::vector<PendingCall> deferred;
  Node server, client;
  Session session;
};

void wait_for_slow_handlers(const Scene& scene) {
  Calling t(scene);
  Calling::call(t.session, t.window());
  t.play();
}

void fill_backlog(const Scene& scene) {
  Calling t(scene);
  Calling::call(t.session, t.window() + t.client.engine.config().rpc.backlog);
  t.play();
}

void drop_datagrams(const Scene& scene) {
  Calling t(scene);
  FaultPlan plan;
  plan.drop = 0.3;
  t.set_faults(plan);
  t.play([&] {
    if (t.session.snapshot().in_flight < 4) (void)t.session.call(kEcho, kNothing, [](Reply&) {});
  });
}

/// Requests stay in the lane of a server that does not poll.
void call_hung_server(const Scene& scene) {
  Calling t(scene);
  Calling::call(t.session, 1);
  play({&t.client});
}

void run_out_of_time(const Scene& scene) {
  Calling t(scene);
  CallOptions options;
  options.timeout = 1ms;
  Calling::call(t.session, 1, options);
  t.play();
}

/// Sessions whose windows are more than the receives for their replies.
void lack_receives(const Scene& scene) {
  Config clients = call_config();
  clients.rpc.receive_depth = 64;
  Calling t(scene, call_config(), clients);
  std::vector<Session> sessions{t.session};
  for (std::uint32_t left = 64 / t.window() + 1; left != 0; --left) sessions.push_back(t.open());
  for (Session& each : sessions) {
    while (each.snapshot().blocked_by == spinwire::SessionBlocker::nothing) Calling::call(each, 1);
  }
  t.play();
}

/// A server with fewer receives than the session's window.
void narrow_server_window(const Scene& scene) {
  Config servers = call_config();
  servers.rpc.receive_depth = 64;
  servers.rpc.sessions = 64;
  Config clients = call_config();
  clients.rpc.window = 64;
  Calling t(scene, servers, clients);
  while (t.session.snapshot().blocked_by == spinwire::SessionBlocker::nothing)
    Calling::call(t.session, 1);
  t.play();
}

/// Round trips of 2 ms, where 1 us is expected.
void congest(const Scene& scene) {
  Config config = call_config();
  config.rpc.target_rtt = 1us;
  Calling t(scene, config);
  FaultPlan plan;
  plan.datagram_delay_min = plan.datagram_delay_max = 2ms;
  t.set_faults(plan);
  t.play([&] {
    if (t.session.snapshot().backlog < 4) (void)t.session.call(kEcho, kNothing, [](Reply&) {});
  });
}

INSTANTIATE_TEST_SUITE_P(Calls, ToolsStatSituations,
                         testing::ValuesIn(std::vector<Situation>{
                             {"slow peer", wait_for_slow_handlers},
                             {"backlog full", fill_backlog},
                             {"lost datagrams", drop_datagrams},
                             {"hung server", call_hung_server},
                             {"calls out of time", run_out_of_time},
                             {"receive shortage", lack_receives},
                             {"server short of receives", narrow_server_window},
                             {"congestion", congest},
                         }),
                         test_name);

}  // namespace
}  // namespace call_situations_test
