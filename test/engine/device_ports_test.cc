// Ports of one device: engines and connections that choose one, and what follows when one fails.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/engine_core.h"
#include "engine/harness.h"
#include "softverbs/faults/fault_plan.h"

namespace device_ports_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::ConnectionSettings;
using spinwire::DeviceEvent;
using spinwire::DeviceEventKind;

constexpr std::array<std::uint8_t, 2> kPorts{1, 2};

ConnectionSettings at_port(std::uint32_t port) {
  ConnectionSettings settings;
  settings.port = port;
  return settings;
}

/// What the device has for a connection's queue pair.
ibv_qp_attr attributes_of(Node& node, Connection c) {
  auto& context = spinwire::detail::core_of(node.engine)->context;
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_EQ(context.device->provider().query_qp(context.agents.at(c.index()).qp, &attr,
                                                IBV_QP_PORT | IBV_QP_AV, &init),
            0);
  return attr;
}
ibv_gid gid_at(Node& node, std::uint8_t port) {
  const auto& device = *spinwire::detail::core_of(node.engine)->context.device;
  ibv_gid gid{};
  EXPECT_EQ(device.provider().query_gid(device.context(), port, 0, &gid), 0);
  return gid;
}

class EnginePorts : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a device with two ports";
  }
};

/// A connection from the client's port to the server's.
Ends connect_ports(Node& client, Node& server, std::uint32_t from, std::uint32_t to) {
  server.on_accept = [to](Connection c) { EXPECT_TRUE(c.configure(at_port(to))); };
  const std::size_t before = server.ready.size();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = at_port(from);
  auto made = client.engine.connect(server.listener.address(), options);
  EXPECT_TRUE(made) << made.error().message();
  if (!made) return {};
  EXPECT_TRUE(
      until({&client, &server}, [&] { return made->ready() && server.ready.size() > before; }));
  return {*made, server.ready.size() > before ? server.ready.back() : Connection()};
}

TEST_F(EnginePorts, EachConnectionHasThePortOfItsSettings) {
  Node server, client;
  server.listen();
  for (const std::uint8_t from : kPorts) {
    for (const std::uint8_t to : kPorts) {
      const Ends ends = connect_ports(client, server, from, to);
      const ibv_qp_attr ours = attributes_of(client, ends.client);
      const ibv_qp_attr theirs = attributes_of(server, ends.server);
      EXPECT_EQ(ours.port_num, from);
      EXPECT_EQ(theirs.port_num, to);
      const ibv_gid there = gid_at(server, to);
      const ibv_gid here = gid_at(client, from);
      EXPECT_EQ(std::memcmp(&ours.ah_attr.grh.dgid, &there, sizeof there), 0);
      EXPECT_EQ(std::memcmp(&theirs.ah_attr.grh.dgid, &here, sizeof here), 0);
      const std::uint64_t before = server.messages;
      const Buffer data = client.filled(64, from);
      Connection c = ends.client;
      ASSERT_EQ(c.send(data), Status::ok);
      ASSERT_TRUE(until({&client, &server}, [&] { return server.messages == before + 1; }));
    }
  }
  finish(client, server);
}

TEST_F(EnginePorts, AnEngineMayOpenEither) {
  Config c = small_config();
  Node first(c);
  c.device.port = 2;
  Node second(c);
  EXPECT_EQ(first.engine.device().port, 1);
  EXPECT_EQ(second.engine.device().port, 2);
  EXPECT_TRUE(first.engine.device().datagrams);
  EXPECT_FALSE(second.engine.device().datagrams) << "the second port carries none";
  second.listen();
  Ends ends = connect(first, second);
  Buffer data = first.filled(64, 1);
  ASSERT_EQ(ends.client.send(data), Status::ok);
  ASSERT_TRUE(until({&first, &second}, [&] { return second.messages == 1; }));
  data.reset();
  finish(first, second);
  c.device.port = 3;
  const auto refused = Engine::open(c);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::no_device);
  EXPECT_NE(refused.error().found.find("it has 2 ports"), std::string::npos)
      << refused.error().message();
}

TEST_F(EnginePorts, APortThatFailsTakesItsConnectionsAndOthersTakeOver) {
  Config config = small_config();
  config.queue_pair.ack_timeout = 8;
  Node server(config), client(config);
  server.listen();
  std::vector<DeviceEvent> events;
  const auto watch = [&](const DeviceEvent& e) { events.push_back(e); };
  ASSERT_EQ(client.engine.set_device_event_handler(watch), Status::ok);
  const Ends first = connect_ports(client, server, 1, 1);
  const Ends second = connect_ports(client, server, 2, 1);
  ibv_context* const device = spinwire::detail::core_of(client.engine)->context.device->context();
  ASSERT_EQ(spinwire::softverbs::set_port(device, 2, spinwire::softverbs::LinkState::down), 0);
  Buffer data = client.filled(64, 1);
  std::optional<Status> lost, kept;
  Connection a = first.client, b = second.client;
  ASSERT_EQ(a.send(data, [&](const Completion& c) { kept = c.status; }), Status::ok);
  ASSERT_EQ(b.send(data, [&](const Completion& c) { lost = c.status; }), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] {
    return lost.has_value() && kept.has_value() && !client.closed.empty() && !events.empty();
  }));
  EXPECT_EQ(*lost, Status::peer_lost);
  EXPECT_EQ(*kept, Status::ok);
  EXPECT_TRUE(first.client.ready());
  ASSERT_EQ(client.closed.size(), 1u);
  EXPECT_EQ(events[0].kind, DeviceEventKind::port_error);
  EXPECT_EQ(events[0].port, 2);
  // A new connection cannot have that port, but another.
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = at_port(2);
  const auto refused = client.engine.connect(server.listener.address(), options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::no_device);
  EXPECT_NE(refused.error().found.find("the port is DOWN"), std::string::npos)
      << refused.error().message();
  (void)connect_ports(client, server, 1, 1);
  ASSERT_EQ(spinwire::softverbs::set_port(device, 2, spinwire::softverbs::LinkState::up), 0);
  const Ends again = connect_ports(client, server, 2, 2);
  EXPECT_EQ(attributes_of(client, again.client).port_num, 2);
  ASSERT_TRUE(until({&client, &server}, [&] { return server.closed.size() == 1; }));
  client.closed.clear();
  server.closed.clear();
  data.reset();
  finish(client, server);
}

// ---- addresses that the verbs would wait for ----

/// Records what a control port wants to have resolved, and answers when the test says so. Softverbs
/// resolves nothing itself.
struct Resolutions {
  explicit Resolutions(Node& node) : port(spinwire::detail::core_of(node.engine)->control) {
    port.set_resolver(std::make_unique<Resolver>(*this));
  }
  void end(const Result<void>& outcome) { port.on_resolved(begun.back(), outcome); }

  struct Resolver : spinwire::control::AddressResolver {
    explicit Resolver(Resolutions& to) : all(to) {}
    Result<bool> begin(const spinwire::control::Resolution& what, const spinwire::control::Gid&,
                       spinwire::GidType, const spinwire::verbs::Place* from) override {
      all.begun.push_back(what);
      all.ports.push_back(from != nullptr ? from->port : 0);
      return all.ports.back() == all.known_from;
    }
    void cancel(const spinwire::control::Resolution&) noexcept override {}
    Resolutions& all;
  };
  spinwire::control::ControlPort& port;
  std::vector<spinwire::control::Resolution> begun;
  std::vector<int> ports;  ///< that were to be left by; 0: the engine's
  int known_from = -1;     ///< addresses are known from this port already
};

tl::unexpected<Error> nobody_answers() {
  return tl::unexpected(Error{Status::peer_lost, "reach", "nobody answers there", ""});
}

TEST_F(EnginePorts, AnAddressIsResolvedFromThePortThatIsUsed) {
  Node server, client;
  Resolutions servers(server), clients(client);
  spinwire::ListenOptions terms;
  terms.handlers = server.handlers();
  terms.settings = at_port(2);
  const auto listener = server.engine.listen("127.0.0.1:0", terms);
  ASSERT_TRUE(listener) << listener.error().message();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = at_port(2);
  auto made = client.engine.connect(listener->address(), options);
  ASSERT_TRUE(made) << made.error().message();
  const auto both = [&](auto&& done) { return until({&client, &server}, done); };
  ASSERT_TRUE(both([&] { return servers.begun.size() == 1; }));
  servers.end({});
  ASSERT_TRUE(both([&] { return clients.begun.size() == 1; }));
  clients.end({});
  ASSERT_TRUE(both([&] { return made->ready() && server.ready.size() == 1; }));
  EXPECT_EQ(servers.ports, std::vector<int>{2});
  EXPECT_EQ(clients.ports, std::vector<int>{2});
  finish(client, server);
}

// The address was resolved from the listener's port before.
TEST_F(EnginePorts, AnAddressIsResolvedAgainWhereOnAcceptChoosesAnotherPort) {
  bool moves = true;
  Node server, client;
  server.listen();
  server.on_accept = [&moves](Connection c) {
    if (std::exchange(moves, false)) (void)c.configure(at_port(2));
  };
  Resolutions servers(server);
  servers.known_from = 0;
  for (const bool answers : {true, false}) {
    servers.begun.clear();
    servers.ports.clear();
    ConnectOptions options;
    options.handlers = client.handlers();
    auto made = client.engine.connect(server.listener.address(), options);
    ASSERT_TRUE(made) << made.error().message();
    ASSERT_TRUE(until({&client, &server}, [&] { return servers.begun.size() == 2; }));
    EXPECT_EQ(servers.ports, (std::vector<int>{0, 2}));
    const spinwire::control::Resolution second = servers.begun.back();
    (void)connect(client, server);  // one that came later
    EXPECT_FALSE(made->ready()) << "the server waits for the address";
    servers.begun.push_back(second);
    const std::size_t ready = server.ready.size(), closed = client.closed.size();
    moves = true;
    answers ? servers.end({}) : servers.end(nobody_answers());
    ASSERT_TRUE(until({&client, &server}, [&] {
      return answers ? made->ready() && server.ready.size() == ready + 1
                     : client.closed.size() == closed + 1;
    }));
    if (answers) continue;
    EXPECT_NE(client.closed.back().found.find("nobody answers there"), std::string::npos)
        << client.closed.back().message();
  }
  finish(client, server);
}

TEST_F(EnginePorts, AConnectionWithItsPeersAddressKeepsItsPort) {
  std::optional<spinwire::Endpoint> theirs;
  Node node;
  spinwire::PrepareOptions options;
  options.on_endpoint = [&theirs](Connection, const spinwire::Endpoint& e) { theirs = e; };
  const auto other = node.engine.prepare(options);
  ASSERT_TRUE(other) << other.error().message();
  ASSERT_TRUE(until({&node}, [&] { return theirs.has_value(); }));
  auto made = node.engine.prepare({});
  ASSERT_TRUE(made) << made.error().message();
  ASSERT_TRUE(made->configure(at_port(2)));
  ASSERT_TRUE(made->join(*theirs));
  const auto late = made->configure(at_port(1));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().status, Status::invalid_argument);
  EXPECT_NE(late.error().found.find("former port"), std::string::npos) << late.error().message();
}

TEST_F(EnginePorts, OutOfBandAnAddressIsResolvedFromThePortThatIsUsed) {
  std::optional<spinwire::Endpoint> ours;
  Node node;
  Resolutions resolver(node);
  spinwire::PrepareOptions options;
  options.handlers = node.handlers();
  options.settings = at_port(2);
  options.on_endpoint = [&ours](Connection, const spinwire::Endpoint& e) { ours = e; };
  auto made = node.engine.prepare(options);
  ASSERT_TRUE(made) << made.error().message();
  ASSERT_TRUE(until({&node}, [&] { return ours.has_value(); }));
  spinwire::Endpoint peer = *ours;
  ++peer.qp_num;
  ASSERT_TRUE(made->join(peer));
  EXPECT_EQ(resolver.ports, std::vector<int>{2});
  resolver.end(nobody_answers());
  ASSERT_TRUE(until({&node}, [&] { return node.closed.size() == 1; }));
  EXPECT_NE(node.closed[0].found.find("nobody answers there"), std::string::npos)
      << node.closed[0].message();
}

TEST_F(EnginePorts, AConnectionThatTimesOutSaysThatNobodyAnswersAtItsAddress) {
  std::uint64_t ticks = 1'000'000'000;
  for (const bool has_peer : {true, false}) {
    std::optional<spinwire::Endpoint> ours;
    Node node(small_config(), &ticks);
    const Resolutions resolver(node);
    spinwire::PrepareOptions options;
    options.handlers = node.handlers();
    options.timeout = 50ms;
    options.on_endpoint = [&ours](Connection, const spinwire::Endpoint& e) { ours = e; };
    auto made = node.engine.prepare(options);
    ASSERT_TRUE(made) << made.error().message();
    ASSERT_TRUE(until({&node}, [&] { return ours.has_value(); }));
    ++ours->qp_num;
    if (has_peer) {
      ASSERT_TRUE(made->join(*ours));
    }
    ticks += 60'000'000;
    ASSERT_TRUE(until({&node}, [&] { return node.closed.size() == 1; }));
    EXPECT_EQ(node.closed[0].status, Status::timed_out);
    const bool says_so =
        node.closed[0].found.find("nobody answers at its address") != std::string::npos;
    EXPECT_EQ(says_so, has_peer) << node.closed[0].message();
  }
}

}  // namespace
}  // namespace device_ports_test
