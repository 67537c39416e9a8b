// Settings in which a connection differs from its engine: they reach the device, are checked, and
// apply to that connection only.
#include "config/connection_attributes.h"

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <string>
#include <utility>

#include "base/internals.h"
#include "config/local_paths.h"
#include "control/address.h"
#include "control/socket.h"
#include "engine/devices.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "spinwire/connection_settings.h"
#include "verbs/providers.h"

namespace connection_attributes_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::ConnectionSettings;
using spinwire::Endpoint;
using spinwire::PrepareOptions;
using spinwire::verbs::Provider;
using Member = std::optional<std::uint32_t> ConnectionSettings::*;

constexpr std::uint32_t kMost = 0xffff'ffff;

ConnectionSettings only(Member member, std::uint32_t value) {
  ConnectionSettings settings;
  settings.*member = value;
  return settings;
}

/// A connection with `settings` at the client's end.
Ends connect_with(Node& client, Node& server, const ConnectionSettings& settings) {
  const std::size_t before = server.ready.size();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = settings;
  auto made = client.engine.connect(server.listener.address(), options);
  EXPECT_TRUE(made) << made.error().message();
  if (!made) return {};
  EXPECT_TRUE(
      until({&client, &server}, [&] { return made->ready() && server.ready.size() > before; }));
  return {*made, server.ready.size() > before ? server.ready.back() : Connection()};
}

/// Gathers so much credit that only the queue limits sends.
bool gather_credit(Node& from, Node& to, Connection c) {
  const Buffer data = from.filled(8, 1);
  return until({&from, &to}, [&] {
    while (c.stats().send_credits < 16 &&
           from.tally.run([&](auto done) { return c.send(data, done); }) == Status::ok) {
    }
    return c.stats().send_credits >= 16 && from.tally.idle();
  });
}

/// The number of messages that a connection accepts before the peer polls.
std::uint32_t accepted_at_once(Node& node, Connection c) {
  const Buffer data = node.filled(8, 1);
  std::uint32_t n = 0;
  while (n < 1000 &&
         node.tally.run([&](auto done) { return c.send(data, done, Post::defer); }) == Status::ok)
    ++n;
  return n;
}

TEST(ConfigConnectionAttributes, ReachTheDevice) {
  const auto config = small_config();
  auto device =
      spinwire::verbs::Device::open(spinwire::engine::device_options(config, Clock::real()));
  ASSERT_TRUE(device) << device.error().message();
  ConnectionSettings s;
  s.send_depth = 32;
  s.inline_bytes = 32;
  s.mtu = 1024;
  s.initiator_depth = 2;
  s.responder_depth = 3;
  s.ack_timeout = 17;
  s.retry_count = 3;
  s.rnr_retry = 2;
  s.min_rnr_timer = 9;
  s.service_level = 5;
  s.traffic_class = 106;
  s.flow_label = 0xabcde;
  s.hop_limit = 64;
  s.src_path_bits = 3;
  s.static_rate = 7;
  s.access = Access::remote_write;
  const auto settled = spinwire::config::resolve(config, **device, s, false);
  ASSERT_TRUE(settled) << settled.error().message();
  EXPECT_EQ(settled->mtu, 1024u);
  const auto& options = settled->queue_pair;
  auto qp = (*device)->create_qp(options);
  ASSERT_TRUE(qp);
  spinwire::verbs::RemoteQueuePair self;
  self.gid = options.place.gid;
  self.lid = options.place.lid;
  self.qp_num = (*qp)->qp_num;
  self.mtu = 1024;
  self.responder_depth = 100;  // more than we start at once
  ASSERT_TRUE((*device)->to_init(*qp, options));
  const auto rtr = (*device)->to_rtr(*qp, options, self);
  ASSERT_TRUE(rtr) << rtr.error().message();
  ASSERT_TRUE((*device)->to_rts(*qp, options, 77, self));
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  ASSERT_EQ((*device)->provider().query_qp(*qp, &attr, IBV_QP_RATE_LIMIT - 1, &init), 0);
  EXPECT_GE(init.cap.max_send_wr, 32u);
  EXPECT_GE(init.cap.max_inline_data, 32u);
  EXPECT_EQ(attr.path_mtu, IBV_MTU_1024);
  EXPECT_EQ(attr.max_rd_atomic, 2);
  EXPECT_EQ(attr.max_dest_rd_atomic, 3);
  EXPECT_EQ(attr.timeout, 17);
  EXPECT_EQ(attr.retry_cnt, 3);
  EXPECT_EQ(attr.rnr_retry, 2);
  EXPECT_EQ(attr.min_rnr_timer, 9);
  EXPECT_EQ(attr.sq_psn, 77u);
  EXPECT_EQ(attr.ah_attr.grh.traffic_class, 106);
  EXPECT_EQ(attr.ah_attr.grh.flow_label, 0xabcdeu);
  EXPECT_EQ(attr.ah_attr.grh.hop_limit, 64);
  EXPECT_EQ(attr.qp_access_flags & unsigned{IBV_ACCESS_REMOTE_READ}, 0u);
  EXPECT_NE(attr.qp_access_flags & unsigned{IBV_ACCESS_REMOTE_WRITE}, 0u);
  if ((*device)->info().provider == "softverbs") {  // other devices have Ethernet's limit
    EXPECT_EQ(init.cap.max_send_wr, 32u);
    EXPECT_EQ(attr.ah_attr.sl, 5);
    EXPECT_EQ(attr.ah_attr.src_path_bits, 3);
    EXPECT_EQ(attr.ah_attr.static_rate, 7);
  }
  (*device)->destroy_qp(*qp);
}

/// The embedded device as if each port had three GIDs, of which two are readable, and four
/// partition keys. Records what a queue pair is given.
struct Places {
  static const Provider& real() { return spinwire::verbs::softverbs_provider(); }
  static Provider provider() {
    Provider p = real();
    p.query_port = [](ibv_context* context, std::uint8_t port, ibv_port_attr* attr) {
      const int error = real().query_port(context, port, attr);
      attr->gid_tbl_len = 3;
      attr->pkey_tbl_len = 4;
      return error;
    };
    p.gid_table = [](ibv_context* context, std::uint8_t port, int) {
      auto table = real().gid_table(context, port, 1);
      auto another = table.at(0);
      another.index = 2;
      another.gid.raw[15] ^= 1;
      table.push_back(another);
      return table;
    };
    p.modify_qp = [](ibv_qp* qp, ibv_qp_attr* attr, int mask) {
      if ((mask & IBV_QP_PORT) != 0) port = attr->port_num;
      if ((mask & IBV_QP_PKEY_INDEX) != 0) pkey_index = std::exchange(attr->pkey_index, {});
      if ((mask & IBV_QP_AV) != 0) gid_index = std::exchange(attr->ah_attr.grh.sgid_index, {});
      return real().modify_qp(qp, attr, mask);
    };
    return p;
  }
  static inline int port, pkey_index, gid_index;
};

TEST(ConfigConnectionAttributes, PortGidAndPartitionKeyReachTheDevice) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  const Provider provider = Places::provider();
  const Provider* const all[] = {&provider};
  const auto config = small_config();
  auto device =
      spinwire::verbs::Device::open(spinwire::engine::device_options(config, Clock::real()), all);
  ASSERT_TRUE(device) << device.error().message();
  const auto expect_reached = [&](const ConnectionSettings& s, int port, int gid, int pkey) {
    const auto settled = spinwire::config::resolve(config, **device, s, false);
    ASSERT_TRUE(settled) << settled.error().message();
    const auto& options = settled->queue_pair;
    auto qp = (*device)->create_qp(options);
    ASSERT_TRUE(qp);
    spinwire::verbs::RemoteQueuePair self;
    self.gid = options.place.gid;
    if (gid == 2) self.gid.raw[15] ^= 1;  // the real one
    self.qp_num = (*qp)->qp_num;
    self.mtu = 1024;
    Places::port = Places::gid_index = Places::pkey_index = -1;
    ASSERT_TRUE((*device)->to_init(*qp, options));
    const auto rtr = (*device)->to_rtr(*qp, options, self);
    ASSERT_TRUE(rtr) << rtr.error().message();
    EXPECT_EQ(Places::port, port);
    EXPECT_EQ(Places::gid_index, gid);
    EXPECT_EQ(Places::pkey_index, pkey);
    (*device)->destroy_qp(*qp);
  };
  ConnectionSettings s;
  expect_reached(s, 1, 0, 0);
  s.port = 2;
  s.gid_index = 2;
  s.pkey_index = 3;
  expect_reached(s, 2, 2, 3);
  s.gid_index = 1;
  const auto unreadable = spinwire::config::resolve(config, **device, s, false);
  ASSERT_FALSE(unreadable);
  EXPECT_EQ(unreadable.error().status, Status::no_device);
}

/// Port 1 has four partition keys, port 2 has two. The links are down.
struct UnequalPorts {
  static Provider provider() {
    Provider p = spinwire::verbs::softverbs_provider();
    p.query_port = [](ibv_context* context, std::uint8_t port, ibv_port_attr* attr) {
      const int error = spinwire::verbs::softverbs_provider().query_port(context, port, attr);
      attr->pkey_tbl_len = port == 1 ? 4 : 2;
      if (are_down) attr->state = IBV_PORT_DOWN;
      return error;
    };
    return p;
  }
  static inline bool are_down = false;
};

TEST(ConfigConnectionAttributes, EveryLocalPathMustHaveThePartitionKey) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  const Provider provider = UnequalPorts::provider();
  const Provider* const all[] = {&provider};
  UnequalPorts::are_down = false;
  auto device = spinwire::verbs::Device::open(
      spinwire::engine::device_options(small_config(), Clock::real()), all);
  ASSERT_TRUE(device) << device.error().message();
  UnequalPorts::are_down = true;  // which is no reason to refuse a path
  const auto check = [&](std::uint16_t pkey_index) {
    return spinwire::config::check_local_paths(**device, {{1}, {2}}, {}, false, pkey_index);
  };
  EXPECT_TRUE(check(1));
  for (const std::uint16_t index : {std::uint16_t{2}, std::uint16_t{3}}) {
    const auto refused = check(index);
    ASSERT_FALSE(refused) << index;
    EXPECT_EQ(refused.error().status, Status::limit);
    EXPECT_EQ(refused.error().asked, "use the local path port 2");
    EXPECT_EQ(refused.error().found, "pkey_index is " + std::to_string(index) +
                                         ", and the port's table of partition keys has 2 entries");
  }
  const auto neither = check(4);
  ASSERT_FALSE(neither);
  EXPECT_EQ(neither.error().asked, "use the local path port 1");
}

TEST(ConfigConnectionAttributes, AreThoseOfOneConnectionOnly) {
  Pair p;
  ConnectionSettings narrow;
  narrow.send_depth = 16;
  narrow.inline_bytes = 0;
  Ends second = connect_with(p.client, p.server, narrow);
  Ends third = connect_with(p.client, p.server, {});
  for (const Connection c : {second.client, third.client})
    ASSERT_TRUE(gather_credit(p.client, p.server, c));
  // Eight are reserved for the engine's own requests.
  EXPECT_EQ(accepted_at_once(p.client, second.client), 6u);
  EXPECT_GE(accepted_at_once(p.client, third.client), 16u);
  // All messages arrive, inline or not.
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  const std::uint64_t before = p.server.messages;
  bool whole = true;
  p.server.on_message = [&](Connection, Message& m) { whole = whole && Node::holds(m.bytes(), 3); };
  for (const std::size_t size : {0u, 8u, 40u, 100u}) {
    const Buffer data = p.client.filled(size, 3);
    for (const Connection c : {p.ends.client, third.client, second.client}) {
      Connection to = c;
      ASSERT_EQ(p.client.tally.run([&](auto done) { return to.send(data, done); }), Status::ok);
      ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    }
  }
  EXPECT_EQ(p.server.messages, before + 12);
  EXPECT_TRUE(whole);
  p.client.ready.push_back(second.client);
  p.finish();
}

TEST(ConfigConnectionAttributes, OutOfRangeNamesAskedAndAvailable) {
  Pair p;
  const struct {
    Member member;
    std::uint32_t value;
    const char* asked;
    const char* range;
  } cases[] = {
      {&ConnectionSettings::send_depth, kMost, "send_depth = 4294967295", "16 .. 32768"},
      {&ConnectionSettings::send_depth, 7, "send_depth = 7", "16 .. 32768"},
      {&ConnectionSettings::credits, 0, "credits = 0", "1 .. 32768"},
      {&ConnectionSettings::inline_bytes, kMost, "inline_bytes = 4294967295", "1KiB"},
      {&ConnectionSettings::initiator_depth, kMost, "initiator_depth = 4294967295", "1 .. 128"},
      {&ConnectionSettings::responder_depth, 0, "responder_depth = 0", "1 .. 128"},
      {&ConnectionSettings::mtu, kMost, "mtu = 4294967295", "256 .. 4096"},
      {&ConnectionSettings::mtu, 1500, "mtu = 1500", "1024"},
      {&ConnectionSettings::ack_timeout, 0, "ack_timeout = 0", "1 .. 31"},
      {&ConnectionSettings::retry_count, 8, "retry_count = 8", "0 .. 7"},
      {&ConnectionSettings::rnr_retry, 8, "rnr_retry = 8", "0 .. 7"},
      {&ConnectionSettings::min_rnr_timer, 0, "min_rnr_timer = 0", "1 .. 31"},
      {&ConnectionSettings::psn, 0x1000000, "psn = 16777216", "16777215"},
      {&ConnectionSettings::service_level, 16, "service_level = 16", "0 .. 15"},
      {&ConnectionSettings::traffic_class, 256, "traffic_class = 256", "0 .. 255"},
      {&ConnectionSettings::flow_label, 0x100000, "flow_label = 1048576", "0 .. 1048575"},
      {&ConnectionSettings::hop_limit, 0, "hop_limit = 0", "1 .. 255"},
      {&ConnectionSettings::src_path_bits, 128, "src_path_bits = 128", "0 .. 127"},
      {&ConnectionSettings::static_rate, 1, "static_rate = 1", "no such value"},
      {&ConnectionSettings::static_rate, 25, "static_rate = 25", "0 .. 24"},
      {&ConnectionSettings::port, 0, "port = 0", "no such value"},
      {&ConnectionSettings::gid_index, 256, "gid_index = 256", "255"},
      {&ConnectionSettings::pkey_index, 65536, "pkey_index = 65536", "0 .. 65535"},
  };
  for (const auto& c : cases) {
    ConnectOptions connecting;
    connecting.settings = only(c.member, c.value);
    ListenOptions listening;
    listening.settings = connecting.settings;
    PrepareOptions preparing;
    preparing.settings = connecting.settings;
    const auto connected = p.client.engine.connect(p.server.listener.address(), connecting);
    const auto listened = p.client.engine.listen("127.0.0.1:0", listening);
    const auto prepared = p.client.engine.prepare(preparing);
    ASSERT_FALSE(connected || listened || prepared) << c.asked;
    EXPECT_EQ(connected.error().status, Status::invalid_argument) << c.asked;
    EXPECT_EQ(connected.error().asked, c.asked);
    const std::string message = connected.error().message();
    EXPECT_NE(message.find(c.range), std::string::npos) << message;
    EXPECT_EQ(listened.error().message(), message);
    EXPECT_EQ(prepared.error().message(), message);
  }
  ConnectOptions options;
  options.settings.access = static_cast<Access>(8);
  EXPECT_EQ(p.client.engine.connect("127.0.0.1:1", options).error().status,
            Status::invalid_argument);
  options = {};
  options.timeout = std::chrono::hours(2);
  EXPECT_EQ(p.client.engine.connect("127.0.0.1:1", options).error().status,
            Status::invalid_argument);
  // No connection was accepted.
  EXPECT_EQ(p.client.engine.stats().connections, 1u);
  p.finish();
}

TEST(ConfigConnectionAttributes, MoreThanTheDeviceHasIsRefusedWithBoth) {
  Pair p;
  const struct {
    Member member;
    std::uint32_t value;
    const char* asked;
  } cases[] = {
      {&ConnectionSettings::pkey_index, 65535, "pkey_index = 65535"},
      {&ConnectionSettings::port, 255, "port = 255"},
  };
  for (const auto& c : cases) {
    ConnectOptions options;
    options.settings = only(c.member, c.value);
    const auto refused = p.client.engine.connect(p.server.listener.address(), options);
    ASSERT_FALSE(refused) << c.asked;
    EXPECT_EQ(refused.error().status, Status::limit);
    EXPECT_EQ(refused.error().asked, c.asked);
    EXPECT_EQ(
        refused.error().found.rfind("device " + std::string(p.client.engine.device_name()), 0), 0u)
        << refused.error().message();
  }
  ConnectOptions options;
  options.settings = only(&ConnectionSettings::gid_index, 255);
  EXPECT_EQ(p.client.engine.connect("127.0.0.1:1", options).error().status, Status::no_device);
  p.finish();
}

TEST(ConfigConnectionAttributes, CreditsAreTheReceivesOfOnePeer) {
  Config c = small_config();
  c.connections.credits = 8;
  Pair p(c);
  const auto expect_most = [&](std::optional<std::uint32_t> credits, std::uint32_t expected) {
    p.server.on_accept = [credits](Connection made) {
      ConnectionSettings settings;
      settings.credits = credits;
      EXPECT_TRUE(made.configure(settings));
    };
    Ends ends = connect_with(p.client, p.server, {});
    const Buffer data = p.client.filled(8, 1);
    std::uint32_t most = 0;
    const auto send = [&] {
      most = std::max<std::uint32_t>(most, ends.client.stats().send_credits);
      (void)p.client.tally.run([&](auto done) { return ends.client.send(data, done); });
      return most >= expected;
    };
    EXPECT_TRUE(p.until(send)) << most;
    for (int i = 0; i < 300; ++i) {
      (void)send();
      p.settle(4);
    }
    EXPECT_EQ(most, expected);
    EXPECT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  };
  expect_most(2, 2);
  expect_most({}, 8);
  if (p.server.engine.device().shared_receives) expect_most(40, 40);
  ConnectOptions options;
  options.settings.credits = c.queues.receive_depth + 1;
  const auto refused = p.client.engine.connect(p.server.listener.address(), options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::limit);
  EXPECT_EQ(refused.error().asked, "credits = " + std::to_string(c.queues.receive_depth + 1));
  p.finish();
}

TEST(ConfigConnectionAttributes, OfTheEndpoint) {
  Node node;
  Endpoint told;
  PrepareOptions options;
  options.handlers = node.handlers();
  options.on_endpoint = [&](Connection, const Endpoint& e) { told = e; };
  options.settings.psn = 0x123456;
  options.settings.mtu = 512;
  options.settings.responder_depth = 1;
  options.settings.initiator_depth = 7;  // the peer need not know
  options.settings.port = node.engine.device().port;
  options.settings.gid_index = static_cast<std::uint32_t>(node.engine.device().gid_index);
  ASSERT_TRUE(node.engine.prepare(options));
  ASSERT_TRUE(until({&node}, [&] { return told.qp_num != 0; }));
  EXPECT_EQ(told.psn, 0x123456u);
  EXPECT_EQ(told.mtu, 512);
  EXPECT_EQ(told.max_rd_atomic, 1);
  // The default is random: equal values in a row have a chance of 1 in 2^24.
  told = {};
  options.settings = {};
  ASSERT_TRUE(node.engine.prepare(options));
  ASSERT_TRUE(until({&node}, [&] { return told.qp_num != 0; }));
  EXPECT_NE(told.psn, 0x123456u);
  EXPECT_EQ(told.mtu, std::min(4096u, node.engine.device().mtu));
}

/// The depths that the device has for a connection's queue pair.
struct Depths {
  int initiator;
  int responder;
};
Depths depths_of(Node& node, Connection c) {
  auto& core = *spinwire::detail::core_of(node.engine);
  ibv_qp* const qp = core.context.agents.at(c.index()).qp;
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_EQ(core.context.device->provider().query_qp(
                qp, &attr, IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC, &init),
            0);
  return {attr.max_rd_atomic, attr.max_dest_rd_atomic};
}

TEST(ConfigConnectionAttributes, EachEndStartsNoMoreReadsThanTheOtherAccepts) {
  Pair p;
  ConnectionSettings settings;
  settings.initiator_depth = 6;
  settings.responder_depth = 4;
  const Ends ends = connect_with(p.client, p.server, settings);
  const Depths client = depths_of(p.client, ends.client);
  const Depths server = depths_of(p.server, ends.server);
  EXPECT_EQ(client.initiator, 6);
  EXPECT_EQ(client.responder, 4);
  EXPECT_EQ(server.initiator, 4) << "limited by the client's responder_depth";
  EXPECT_GT(server.responder, 6);
  p.client.ready.push_back(ends.client);
  p.finish();
}

TEST(ConfigConnectionAttributes, OfAListenerAndOfOneThatIsAccepted) {
  Node server, client;
  ListenOptions options;
  options.handlers = server.handlers();
  options.settings.send_depth = 17;
  options.settings.access = Access::remote_write;
  Status in_vain = Status::ok, too_late = Status::ok;
  options.on_accept = [&](Connection c) {
    if (++server.accepts == 1) return;
    ConnectionSettings other;
    other.send_depth = 7;
    in_vain = c.configure(other).error().status;
    other.send_depth = 18;
    EXPECT_TRUE(c.configure(other));
  };
  auto listener = server.engine.listen("127.0.0.1:0", options);
  ASSERT_TRUE(listener);
  server.listener = std::move(*listener);
  const Ends first = connect(client, server);
  const Ends second = connect(client, server);
  EXPECT_EQ(in_vain, Status::invalid_argument);
  too_late =
      second.server.ready() ? Connection(second.server).configure({}).error().status : Status::ok;
  EXPECT_EQ(too_late, Status::invalid_argument);
  Buffer data = server.filled(8, 2);
  for (const Connection c : {first.server, second.server})
    ASSERT_TRUE(gather_credit(server, client, c));
  EXPECT_EQ(accepted_at_once(server, first.server), 7u);
  EXPECT_EQ(accepted_at_once(server, second.server), 8u);
  // The second connection has the engine's rights again: configure() replaces, it does not add.
  const auto read = Access::remote_read;
  const auto refused = Connection(first.server).expose(data.slice(), read);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message(),
            "give a peer remote_read: the connection allows remote_write; ask for less, or allow "
            "more with the setting access");
  const auto region = Connection(second.server).expose(data.slice(), read);
  ASSERT_TRUE(region);
  EXPECT_EQ(server.engine.revoke(*region), Status::ok);
  data.reset();
  finish(client, server);
}

TEST(ConfigConnectionAttributes, WithoutTheRightToReadNoKeyReads) {
  Config c = small_config();
  Node server(c), client(c);
  ListenOptions options;
  options.handlers = server.handlers();
  options.settings.access = Access::remote_write;
  auto listener = server.engine.listen("127.0.0.1:0", options);
  ASSERT_TRUE(listener);
  server.listener = std::move(*listener);
  Ends ends = connect(client, server);
  Buffer theirs = server.filled(64, 5);
  const auto region = server.engine.expose(theirs.slice(), Access::remote_read_write);
  ASSERT_TRUE(region);
  Buffer ours = client.filled(64, 6);
  ASSERT_EQ(
      client.tally.run([&](auto done) { return ends.client.write(ours.slice(), *region, done); }),
      Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.tally.idle(); }));
  EXPECT_EQ(client.tally.ended(Status::ok), 1u);
  EXPECT_TRUE(Node::holds(theirs.bytes(), 6));
  ASSERT_EQ(
      client.tally.run([&](auto done) { return ends.client.read(ours.slice(), *region, done); }),
      Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.tally.idle(); }));
  // An operation that a queue pair does not support is an invalid request. Adapters and Soft-RoCE
  // differ in which of two statuses they report.
  const bool invalid_request = !on_softverbs() && client.tally.ended(Status::remote_error) == 1;
  EXPECT_EQ(client.tally.ended(Status::remote_access), invalid_request ? 0u : 1u);
  EXPECT_TRUE(Node::holds(ours.bytes(), 6));
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(server.engine.revoke(*region), Status::ok);
  theirs.reset();
  ours.reset();
  server.stale_allowed = client.stale_allowed = true;
  finish(client, server);
}

TEST(ConfigConnectionAttributes, TheEnginesAccessBoundsEveryKey) {
  Config c = small_config();
  c.queue_pair.access = Access::remote_read;
  Node node(c);
  std::array<std::byte, 4096> own{};
  const Buffer b = node.buffer(64);
  EXPECT_EQ(node.engine.expose(b.slice(), Access::remote_write).error().status,
            Status::invalid_argument);
  EXPECT_EQ(node.engine.register_memory(own, Access::remote_read_write).error().status,
            Status::invalid_argument);
  EXPECT_TRUE(node.engine.register_memory(own, Access::local));
  const auto region = node.engine.expose(b.slice(), Access::remote_read);
  ASSERT_TRUE(region);
  EXPECT_EQ(node.engine.revoke(*region), Status::ok);
}

TEST(ConfigConnectionAttributes, StayWhenTheConnectionIsMadeAgain) {
  Node server, client;
  server.listen();
  const std::string address = server.listener.address();
  server.listener = {};
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect.attempts = 1000;
  options.reconnect.first_delay = 1ms;
  options.reconnect.max_delay = 2ms;
  options.settings.send_depth = 16;
  auto made = client.engine.connect(address, options);
  ASSERT_TRUE(made);
  // Without a listener each attempt fails, with pauses in between.
  for (int i = 0; i < 2000; ++i) (void)client.poll();
  EXPECT_EQ(made->state(), ConnectionState::resolving);
  server.listen(address);
  ASSERT_TRUE(until({&client, &server}, [&] { return made->ready() && !server.ready.empty(); }));
  ASSERT_TRUE(client.closed.empty());
  ASSERT_TRUE(gather_credit(client, server, *made));
  EXPECT_EQ(accepted_at_once(client, *made), 6u);
  finish(client, server);
}

TEST(ConfigConnectionAttributes, ATimeOutOfItsOwn) {
  // A listener that never answers.
  std::uint64_t ticks = 1;
  Node client(small_config(), &ticks);
  auto silent =
      spinwire::control::ListenSocket::open(*spinwire::control::Address::parse("127.0.0.1:0"), 4);
  ASSERT_TRUE(silent);
  ConnectOptions options;
  options.handlers = client.handlers();
  options.timeout = 20ms;
  ASSERT_TRUE(client.engine.connect(silent->local().str(), options));
  ASSERT_TRUE(until({&client}, [&] {
    ticks += 1'000'000;
    return !client.closed.empty();
  }));
  EXPECT_EQ(client.closed[0].status, Status::timed_out);
  EXPECT_NE(client.closed[0].asked.find("within 20 ms"), std::string::npos)
      << client.closed[0].message();
}

}  // namespace
}  // namespace connection_attributes_test
