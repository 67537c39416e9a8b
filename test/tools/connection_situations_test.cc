// Situations of connections and engines.
#include <gtest/gtest.h>

#include "control/key_files.h"
#include "control/loopback.h"
#include "engine/engine_core.h"
#include "softverbs/faults/fault_plan.h"
#include "tools/situations.h"

namespace connection_situations_test {
namespace {

using namespace situations;  // NOLINT: the names of a test namespace

using spinwire::Endpoint;
using spinwire::detail::core_of;
using spinwire::softverbs::FaultPlan;

ibv_context* device_of(Node& node) { return core_of(node.engine)->context.device->context(); }

/// Work requests of connections stay in the send queue.
void hold_work(Node& node) {
  FaultPlan plan;
  plan.delay_min = plan.delay_max = 1h;
  ASSERT_TRUE(spinwire::softverbs::set_faults(device_of(node), plan));
}

void write_until_refused(Pair& p) {
  Buffer memory = p.server.buffer(64, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write);
  ASSERT_TRUE(region);
  const Buffer b = p.client.filled(8, 1);
  while (p.ends.client.write(b.slice(), *region, {}, Post::defer) == Status::ok) {
  }
}

/// The server's application polls no more.
void use_up_credit(const Scene& scene) {
  Pair p(Scene::hidden(without_loss()), scene.shown(without_loss()));
  const Buffer b = p.client.filled(8, 1);
  while (p.ends.client.send(b) == Status::ok) {
  }
  play({&p.client});
}

void use_up_pool(const Scene& scene) {
  Node node(scene.shown());
  std::vector<Buffer> all;
  while (Buffer one = node.engine.allocate(4096)) all.push_back(std::move(one));
  play({&node}, [&] { EXPECT_FALSE(node.engine.allocate(4096)); });
}

void hang_peer(const Scene& scene) {
  Config watchful = without_loss();
  watchful.connections.keepalive_interval = 20ms;
  Pair p(Scene::hidden(watchful), scene.shown(watchful));
  play({&p.client});
}

/// An application that takes the connections' endpoints to the other end.
struct OutOfBand {
  OutOfBand(const Config& ours, const Config& theirs) : a(ours), b(theirs) {
    for (Node* node : {&a, &b}) {
      spinwire::PrepareOptions options;
      options.handlers = node->handlers();
      Endpoint& endpoint = node == &a ? of_a : of_b;
      options.on_endpoint = [this, &endpoint](Connection, const Endpoint& e) {
        endpoint = e;
        ++told;
      };
      auto made = node->engine.prepare(options);
      EXPECT_TRUE(made) << made.error().message();
      if (made) (node == &a ? at_a : at_b) = *made;
    }
    EXPECT_TRUE(until({&a, &b}, [&] { return told == 2; }));
  }
  int told = 0;
  Endpoint of_a, of_b;
  Connection at_a, at_b;
  Node a, b;
};

/// The endpoint has a GID that leads to no device, as one of another network does.
void give_wrong_gid(const Scene& scene) {
  OutOfBand ends(scene.shown(), Scene::hidden());
  Endpoint wrong = ends.of_b;
  wrong.gid[15] ^= 1;
  ASSERT_TRUE(ends.at_a.join(wrong));
  play({&ends.a, &ends.b});
}

/// A WRITE of many packets ends as on an adapter behind whose switch they are lost.
void drop_long_packets(const Scene& scene) {
  Pair p(Scene::hidden(), scene.shown());
  const Ends other = connect(p.client, p.server);
  constexpr std::size_t kLong = 64 << 10;
  Buffer memory = p.server.buffer(kLong, Pool::lease);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write);
  ASSERT_TRUE(region);
  FaultPlan plan;
  plan.fail_at = 1;
  plan.fail_queue_pair =
      core_of(p.client.engine)->context.agents.at(p.ends.client.index()).qp->qp_num;
  plan.fail_status = IBV_WC_RETRY_EXC_ERR;
  ASSERT_TRUE(spinwire::softverbs::set_faults(device_of(p.client), plan));
  const Buffer b = p.client.filled(kLong, 1);
  ASSERT_EQ(p.ends.client.write(b.slice(), *region), Status::ok);
  const Buffer little = p.server.filled(8, 2);
  Connection heard = other.server;
  play({&p.client, &p.server}, [&] { (void)heard.send(little); });
}

/// A handler that takes 40 ms, by a clock that it moves.
void run_slow_callback(const Scene& scene) {
  std::uint64_t ticks = 1'000'000'000;
  Config config = scene.shown();
  config.observability.longest_callback = 10ms;
  config.observability.longest_poll = 10ms;
  Pair p(Scene::hidden(), config, &ticks);
  p.client.on_message = [&](Connection, Message&) { ticks += 40'000'000; };
  const Buffer b = p.server.filled(8, 1);
  play({&p.client, &p.server}, [&] {
    (void)p.ends.server.send(b);
    ticks += 1000;
  });
}

/// A handler that takes 40 ms once, by a clock that it moves. No callback runs after it.
void run_one_slow_callback(const Scene& scene) {
  std::uint64_t ticks = 1'000'000'000;
  Config config = scene.shown();
  config.observability.longest_callback = 10ms;
  config.observability.longest_poll = 10ms;
  Pair p(Scene::hidden(), config, &ticks);
  p.client.on_message = [&](Connection, Message&) { ticks += 40'000'000; };
  const Buffer b = p.server.filled(8, 1);
  ASSERT_EQ(p.ends.server.send(b), Status::ok);
  play({&p.client, &p.server}, [&] { ticks += 1000; });
}

void let_lease_expire(const Scene& scene) {
  std::uint64_t ticks = 1'000'000'000;
  Config config = without_loss();
  config.leases.maximum = 16;
  Pair p(scene.shown(config), Scene::hidden(config), &ticks);
  spinwire::LeaseOptions options;
  options.duration = 400ms;
  spinwire::RemoteMemory memory;
  ASSERT_EQ(p.ends.client.request_memory(
                64, options, [&](spinwire::LeaseReply& r) { memory = std::move(r.memory); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return static_cast<bool>(memory); }));
  play({&p.client, &p.server}, [&] { ticks += 1'000'000; });
}

void fill_send_queue(const Scene& scene) {
  Config config = without_loss();
  config.queues.send_depth = 16;
  Pair p(Scene::hidden(config), scene.shown(config));
  hold_work(p.client);
  write_until_refused(p);
  play({&p.client, &p.server});
}

void use_up_operations(const Scene& scene) {
  Config config = without_loss();
  config.queues.operations = 20;
  Pair p(Scene::hidden(config), scene.shown(config));
  hold_work(p.client);
  write_until_refused(p);
  play({&p.client, &p.server});
}

/// The server has no time for the long messages that it is offered.
void use_up_windows(const Scene& scene) {
  Config config = without_loss();
  config.connections.direct_messages = spinwire::DirectPath::off;  // or none is needed
  config.memory.windows = 3;
  config.memory.rendezvous_bytes = 4u << 20;
  config.connections.max_message_bytes = 1u << 20;
  config.queues.completion_depth = 4096;
  Pair p(Scene::hidden(config), scene.shown(config));
  const Buffer little = p.client.filled(8, 1), b = p.client.filled(20'000, 1);
  ASSERT_TRUE(p.until([&] {
    (void)p.ends.client.send(little);
    return p.ends.client.stats().send_credits >= 8;
  }));
  while (p.ends.client.send(b) == Status::ok) {
  }
  play({&p.client});
}

void refuse_handshake(const Scene& scene) {
  Node server(scene.shown()), client(Scene::hidden());
  spinwire::ListenOptions options;
  options.on_connect_request = [](spinwire::PeerRequest& request) {
    request.refuse(7, "not today");
  };
  const auto listener = server.engine.listen("127.0.0.1:0", options);
  ASSERT_TRUE(listener);
  (void)client.begin(listener->address());
  play({&client, &server});
}

void prove_no_key(const Scene& scene) {
  const key_files::KeyFile keys(key_files::line("ours", 'a'));
  Config config = scene.shown();
  config.security.key_file = keys.path();
  config.security.open = false;
  Node server(config), client(Scene::hidden());
  server.listen();
  (void)client.begin(server);
  play({&client, &server});
}

/// Nobody listens any more at the address.
void connect_to_nobody(const Scene& scene) {
  Node client(scene.shown());
  const std::string address = [] {
    Node server(Scene::hidden());
    server.listen();
    return server.listener.address();
  }();
  (void)client.begin(address);
  play({&client});
}

/// The kernel accepts for a program that never does.
void await_handshake(const Scene& scene) {
  Node client(scene.shown());
  const auto silent = loopback::listener();
  (void)client.begin(std::string(silent.local().text().view()));
  play({&client});
}

void connect_raw_to_other(const Scene& scene) {
  Node server(Scene::hidden()), client(scene.shown());
  server.listen();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings.raw.emplace();
  ASSERT_TRUE(client.engine.connect(server.listener.address(), options));
  play({&client, &server});
}

void kill_peer(const Scene& scene) {
  Child server([](int in, int out) { return echo_server(in, out, Scene::hidden()); });
  Node client(scene.shown());
  const Connection c = client.begin(server.line());
  ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
  server.kill(SIGKILL);
  play({&client});
}

void use_revoked_memory(const Scene& scene) {
  Pair p(Scene::hidden(), scene.shown());
  const Buffer memory = p.server.buffer(64, Pool::lease), b = p.client.filled(8, 1);
  const auto region = p.server.engine.expose(memory.slice(), Access::remote_write);
  ASSERT_TRUE(region);
  ASSERT_TRUE(p.until([&] { return p.server.engine.revoke(*region) == Status::ok; }));
  ASSERT_EQ(p.ends.client.write(b.slice(0, 8), *region), Status::ok);
  play({&p.client, &p.server});
}

void stop_polling(const Scene& scene) {
  Node node(scene.shown());
  (void)node.poll();
  for (;;) ::pause();
}

void kill_process(const Scene& scene) {
  const Node node(scene.shown());
  ::raise(SIGKILL);
}

/// The server's connection stays, because its client does not poll.
void drain_engine(const Scene& scene) {
  Pair p(scene.shown(without_loss()), Scene::hidden(without_loss()));
  ASSERT_TRUE(p.server.engine.drain(1h));
  play({&p.server});
}

void fail_port(const Scene& scene) {
  Node node(scene.shown());
  ASSERT_EQ(spinwire::softverbs::set_port(device_of(node), 1, spinwire::softverbs::LinkState::down),
            0);
  play({&node});
}

INSTANTIATE_TEST_SUITE_P(Connections, ToolsStatSituations,
                         testing::ValuesIn(std::vector<Situation>{
                             {"credit used up", use_up_credit},
                             {"pool dry", use_up_pool},
                             {"hung peer", hang_peer},
                             {"wrong GID", give_wrong_gid},
                             {"MTU mismatch", drop_long_packets},
                             {"slow callback", run_slow_callback},
                             {"one slow callback", run_one_slow_callback},
                             {"lease expired", let_lease_expire},
                             {"send queue full", fill_send_queue},
                             {"operations used up", use_up_operations},
                             {"windows used up", use_up_windows},
                             {"handshake refused", refuse_handshake},
                             {"no common key", prove_no_key},
                             {"nobody listens", connect_to_nobody},
                             {"peer answers no handshake", await_handshake},
                             {"peer of another kind", connect_raw_to_other},
                             {"peer died", kill_peer},
                             {"remote memory revoked", use_revoked_memory},
                             {"application does not poll", stop_polling},
                             {"process died", kill_process},
                             {"engine drains", drain_engine},
                             {"port down", fail_port},
                         }),
                         test_name);

}  // namespace
}  // namespace connection_situations_test
