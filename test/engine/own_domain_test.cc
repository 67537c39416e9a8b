// Connections with their own protection domains: data moves as usual, their keys open nothing
// elsewhere, and all their resources end with the connection.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "engine/own_domain_config.h"

namespace own_domain_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using own_domains::domain_config;
using own_domains::own;
using spinwire::Endpoint;
using spinwire::PrepareOptions;
using spinwire::Via;

enum class Way { tcp, out_of_band, rdma_cm };

std::string name_of(const testing::TestParamInfo<Way>& info) {
  constexpr const char* kNames[] = {"Tcp", "ByHand", "RdmaCm"};
  return kNames[static_cast<int>(info.param)];
}

/// Prepares one end out-of-band.
Connection prepare(Node& node, bool own_domain, Endpoint& endpoint, bool& told) {
  PrepareOptions options;
  options.handlers = node.handlers();
  options.settings = own(own_domain);
  options.on_endpoint = [&](Connection, const Endpoint& e) {
    endpoint = e;
    told = true;
  };
  auto made = node.engine.prepare(options);
  EXPECT_TRUE(made) << made.error().message();
  return made ? *made : Connection();
}

Ends connect_out_of_band(Node& client, Node& server, bool at_client, bool at_server) {
  Endpoint here, there;
  bool told_here = false, told_there = false;
  Ends ends{prepare(client, at_client, here, told_here),
            prepare(server, at_server, there, told_there)};
  EXPECT_TRUE(until({&client, &server}, [&] { return told_here && told_there; }));
  EXPECT_TRUE(ends.client.join(there));
  EXPECT_TRUE(ends.server.join(here));
  EXPECT_TRUE(
      until({&client, &server}, [&] { return ends.client.ready() && ends.server.ready(); }));
  return ends;
}

/// Connects with own domains at the given ends.
Ends connect(Node& client, Node& server, bool at_client, bool at_server, Way way = Way::tcp) {
  if (way == Way::out_of_band) return connect_out_of_band(client, server, at_client, at_server);
  const Via via = way == Way::rdma_cm ? Via::rdma_cm : Via::tcp;
  ListenOptions listen;
  listen.handlers = server.handlers();
  listen.settings = own(at_server);
  listen.via = via;
  const char* address = way == Way::rdma_cm ? std::getenv("SPINWIRE_TEST_ADDRESS") : "127.0.0.1";
  const auto listener = server.engine.listen(std::string(address) + ":0", listen);
  EXPECT_TRUE(listener) << listener.error().message();
  if (!listener) return {};
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = own(at_client);
  options.via = via;
  const std::size_t before = server.ready.size();
  const auto made = client.engine.connect(listener->address(), options);
  EXPECT_TRUE(made) << made.error().message();
  if (!made) return {};
  EXPECT_TRUE(until({&client, &server}, [&] {
    return !client.closed.empty() || (made->ready() && server.ready.size() > before);
  }));
  for (const Error& e : client.closed) ADD_FAILURE() << e.message();
  return {*made, server.ready.size() > before ? server.ready.back() : Connection()};
}

/// Runs one operation of `from` to its end. Returns its completion.
template <typename Call>
Status outcome(Node& from, Node& to, Call&& call) {
  Status ended = Status::would_block;
  bool over = false;
  const Status taken = call(CompletionCallback([&](const Completion& c) {
    ended = c.status;
    over = true;
  }));
  if (taken != Status::ok) return taken;
  EXPECT_TRUE(until({&from, &to}, [&] { return over; }));
  return ended;
}

/// Sends `count` messages of all shapes one way, more than the first credit.
void send_many(Node& from, Connection end, Node& to, std::uint32_t count) {
  const std::uint64_t before = to.messages;
  std::uint32_t wrong = 0, arrived = 0;
  const auto size_of = [](std::uint32_t i) -> std::size_t {
    constexpr std::size_t kSizes[] = {0, 8, 47, 48, 49, 100, 1000, 4096};
    return kSizes[i % 8];
  };
  std::vector<Buffer> kept;
  to.on_message = [&](Connection, Message& m) {
    const std::uint32_t i = arrived++;
    wrong += m.size() == size_of(i) && Node::holds(m.bytes(), i) ? 0 : 1;
    // Some buffers are kept, and their receives get other memory.
    if (i % 16 == 3) kept.push_back(m.take());
  };
  std::uint32_t sent = 0;
  Status status = Status::ok;
  const auto push = [&] {
    while (sent < count) {
      const Buffer data = from.filled(size_of(sent), sent);
      Buffer apart = from.buffer(size_of(sent) + 64);
      std::copy_n(data.data(), data.size(), apart.data() + 64);
      // The header in a separate element, and with an immediate.
      status = from.tally.run([&](auto done) {
        if (sent % 3 == 0) return end.send(data, done);
        if (sent % 3 == 1) return end.send(apart.slice(64, data.size()), done);
        return end.send_with_imm(data.slice(), sent, done);
      });
      if (status != Status::ok) return;
      ++sent;
    }
  };
  EXPECT_TRUE(until({&from, &to},
                    [&] {
                      push();
                      if (status != Status::ok && status != Status::would_block) return true;
                      return to.messages == before + count && from.tally.idle();
                    }))
      << to.messages - before << " of " << count;
  EXPECT_EQ(status, Status::ok);
  EXPECT_EQ(arrived, count);
  EXPECT_EQ(wrong, 0u);
  to.on_message = {};
}

/// READs and WRITEs of memory that `owner` exposes, from and to pools and application memory.
void read_and_write(Node& from, Connection end, Node& owner, Connection owners) {
  const Buffer theirs = owner.filled(2000, 1);
  const auto region = owners.expose(theirs.slice(), Access::remote_read_write);
  ASSERT_TRUE(region) << region.error().message();
  std::vector<std::byte> far(2000), near(2000);
  const auto registered = owners.register_memory(far, Access::remote_read_write);
  const auto local = end.register_memory(near, Access::local);
  ASSERT_TRUE(registered && local);
  const Buffer got = from.buffer(2000);
  const auto run = [&](auto&& call) { return outcome(from, owner, call); };
  EXPECT_EQ(run([&](auto done) { return end.read(got.slice(), *region, done); }), Status::ok);
  EXPECT_TRUE(Node::holds(got.bytes(), 1));
  EXPECT_EQ(run([&](auto done) { return end.read(local->slice(), *region, done); }), Status::ok);
  EXPECT_TRUE(Node::holds(near, 1));
  const Buffer ours = from.filled(2000, 2);
  EXPECT_EQ(run([&](auto done) { return end.write(ours.slice(), registered->remote(), done); }),
            Status::ok);
  EXPECT_TRUE(Node::holds(far, 2));
  const std::uint64_t before = owner.messages;
  EXPECT_EQ(run([&](auto done) {
              return end.write_with_imm(local->slice(), registered->remote(), 7, done);
            }),
            Status::ok);
  EXPECT_TRUE(Node::holds(far, 1));
  EXPECT_TRUE(until({&from, &owner}, [&] { return owner.messages == before + 1; }));
  // A message from such memory, longer than inline data.
  bool right = false;
  owner.on_message = [&](Connection, Message& m) { right = Node::holds(m.bytes(), 1); };
  EXPECT_EQ(run([&](auto done) { return end.send(local->slice(), done); }), Status::ok);
  EXPECT_TRUE(until({&from, &owner}, [&] { return owner.messages == before + 2; }));
  EXPECT_TRUE(right);
  owner.on_message = {};
  EXPECT_EQ(owner.engine.revoke(*region), Status::ok);
}

/// Checks that all registrations and domains end with the connections.
void end_all(Node& a, Node& b) {
  for (Connection c : b.ready) (void)c.close();
  engine_test::finish(a, b);
  EXPECT_TRUE(until(
      {&a, &b}, [&] { return a.engine.stats().own_domains + b.engine.stats().own_domains == 0; }));
  EXPECT_EQ(a.engine.stats().registrations, 0u);
  EXPECT_EQ(b.engine.stats().registrations, 0u);
}

class Ways : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (GetParam() == Way::rdma_cm && std::getenv("SPINWIRE_TEST_ADDRESS") == nullptr)
      GTEST_SKIP() << "needs SPINWIRE_TEST_ADDRESS: a device of rdma_cm's";
  }
};

TEST_P(Ways, MovesDataBothWaysWhicheverEndHasIt) {
  constexpr struct { bool client, server; } kWhere[] = {{true, false}, {false, true}, {true, true}};
  for (const auto where : kWhere) {
    Node server(domain_config()), client(domain_config());
    // Other connections share the engines' domain.
    Ends shared = connect(client, server, false, false, GetParam());
    Ends e = connect(client, server, where.client, where.server, GetParam());
    EXPECT_EQ(client.engine.stats().own_domains, where.client ? 1u : 0u);
    EXPECT_EQ(server.engine.stats().own_domains, where.server ? 1u : 0u);
    for (const Ends& ends : {e, shared}) {
      send_many(client, ends.client, server, amount(400));
      send_many(server, ends.server, client, amount(400));
      read_and_write(client, ends.client, server, ends.server);
      read_and_write(server, ends.server, client, ends.client);
    }
    EXPECT_TRUE(client.closed.empty() && server.closed.empty());
    end_all(client, server);
  }
}

INSTANTIATE_TEST_SUITE_P(EngineOwnDomain, Ways,
                         testing::Values(Way::tcp, Way::out_of_band, Way::rdma_cm), name_of);

TEST(EngineOwnDomain, KeysOfAnotherDomainAreRefusedByTheDevice) {
  // Pairs of a key's owner and the connection that uses it; the engine's own keys are those of
  // sharing connections.
  constexpr struct {
    bool of_own, over_own;
  } kCases[] = {{true, false}, {false, true}, {true, true}};
  for (const auto c : kCases) {
    for (const bool write : {false, true}) {
      Node server(domain_config()), client(domain_config());
      Ends of = connect(client, server, false, c.of_own);
      Ends over = connect(client, server, false, c.over_own);
      Buffer secret = server.filled(64, 1);
      auto region = of.server.expose(secret.slice(), Access::remote_read_write);
      ASSERT_TRUE(region);
      Buffer here = client.filled(64, 2);
      const auto use = [&](Connection end) {
        return outcome(client, server, [&](auto done) {
          return write ? end.write(here.slice(), *region, done)
                       : end.read(here.slice(), *region, done);
        });
      };
      EXPECT_EQ(use(over.client), Status::remote_access);
      EXPECT_TRUE(Node::holds(secret.bytes(), 1));
      EXPECT_TRUE(Node::holds(here.bytes(), 2));
      ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 1; }));
      EXPECT_NE(client.closed[0].remedy.find("own_domain"), std::string::npos)
          << client.closed[0].message();
      // On its own connection the key still works.
      EXPECT_EQ(use(of.client), Status::ok);
      EXPECT_EQ(Node::holds(secret.bytes(), 2), write);
      EXPECT_EQ(Node::holds(here.bytes(), 1), !write);
      EXPECT_EQ(server.engine.revoke(*region), Status::ok);
      secret.reset();
      here.reset();
      client.stale_allowed = server.stale_allowed = true;
      end_all(client, server);
    }
  }
}

TEST(EngineOwnDomain, MemoryRegisteredElsewhereIsNotTaken) {
  Node server(domain_config()), client(domain_config());
  Ends first = connect(client, server, true, false);
  Ends second = connect(client, server, true, false);
  std::vector<std::byte> engines(512), anothers(512);
  const auto shared = client.engine.register_memory(engines, Access::local);
  const auto other = second.client.register_memory(anothers, Access::local);
  ASSERT_TRUE(shared && other);
  const Buffer theirs = server.filled(512, 1);
  const auto region = first.server.expose(theirs.slice(), Access::remote_read_write);
  ASSERT_TRUE(region);
  for (const MemoryRegion* memory : {&*shared, &*other}) {
    const BufferSlice slice = memory->slice();
    EXPECT_EQ(first.client.send(slice), Status::invalid_argument);
    EXPECT_EQ(first.client.send_with_imm(slice, 1), Status::invalid_argument);
    EXPECT_EQ(first.client.write(slice, *region), Status::invalid_argument);
    EXPECT_EQ(first.client.write_with_imm(slice, *region, 1), Status::invalid_argument);
    EXPECT_EQ(first.client.read(slice, *region), Status::invalid_argument);
  }
  EXPECT_EQ(first.client.stats().outstanding, 0u);
  send_many(client, first.client, server, 50);
  // In the other direction only the device checks.
  Ends sharing = connect(client, server, false, false);
  EXPECT_EQ(outcome(client, server,
                    [&](auto done) { return sharing.client.write(other->slice(), *region, done); }),
            Status::local_error);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 1; }));
  EXPECT_TRUE(first.client.ready() && second.client.ready());
  EXPECT_EQ(server.engine.revoke(*region), Status::ok);
  client.stale_allowed = server.stale_allowed = true;
  for (Connection c : {first.client, second.client}) EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.engine.stats().connections == 0; }));
  EXPECT_EQ(client.engine.stats().registrations, 1u);  // the engine's
}

TEST(EngineOwnDomain, ALongMessageArrivesOnlyInMemoryOfTheDomain) {
  Config c = domain_config();
  c.memory.rendezvous_bytes = 4u << 20;
  c.connections.max_message_bytes = 1u << 16;
  Node server(c), client(c);
  Ends e = connect(client, server, false, true);
  constexpr std::size_t kBytes = 20000;
  std::vector<std::byte> elsewhere(kBytes), here(kBytes);
  auto shared = server.engine.register_memory(elsewhere, Access::local);
  auto own_memory = e.server.register_memory(here, Access::local);
  ASSERT_TRUE(shared && own_memory);
  std::vector<Status> answers;
  server.on_offer = [&](Connection, spinwire::Offer& o) {
    answers = {o.place(own_memory->slice()), o.place(shared->slice())};
  };
  const std::byte* at = nullptr;
  server.on_message = [&at](Connection, Message& m) { at = m.data(); };
  Buffer b = client.filled(kBytes, 5);
  ASSERT_EQ(e.client.send(b), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return at != nullptr && b.unique(); }));
  EXPECT_EQ(answers, (std::vector{Status::ok, Status::invalid_argument}));
  EXPECT_EQ(at, here.data()) << "the refused place changes nothing";
  EXPECT_TRUE(Node::holds(here, 5));
  b.reset();
  *shared = *own_memory = MemoryRegion();
  end_all(client, server);
}

TEST(EngineOwnDomain, WhatItOpenedGoesWithIt) {
  Node server(domain_config()), client(domain_config());
  std::vector<std::byte> bytes(4096);
  MemoryRegion kept;
  std::vector<RemoteRegion> regions;
  {
    Ends e = connect(client, server, true, true);
    const Buffer data = server.filled(4096, 3);
    for (std::size_t i = 0; i < 100; ++i)
      regions.push_back(e.server.expose(data.slice(i, 1), Access::remote_read).value());
    kept = e.server.register_memory(bytes, Access::remote_write).value();
    // Two end earlier, each in its way.
    EXPECT_EQ(server.engine.revoke(regions[50]), Status::ok);
    (void)e.server.register_memory(std::span(bytes).first(100), Access::local).value();
    EXPECT_EQ(server.engine.stats().registrations, 101u);
    EXPECT_EQ(e.client.close(), Status::ok);
  }
  ASSERT_TRUE(until({&client, &server}, [&] { return server.engine.stats().connections == 0; }));
  // The blocks are freed, and a late revoke() succeeds.
  EXPECT_EQ(server.engine.memory_stats(Pool::send).blocks_used, 0u);
  EXPECT_EQ(server.engine.revoke(regions[0]), Status::ok);
  EXPECT_EQ(server.engine.revoke(regions[0]), Status::invalid_argument);
  kept.slice().data()[0] = std::byte{1};
  EXPECT_EQ(bytes[0], std::byte{1});
  end_all(client, server);
  kept = {};
  EXPECT_EQ(server.engine.stats().registrations, 0u);
}

TEST(EngineOwnDomain, AnEngineEndsWithAllThatIsOpen) {
  std::vector<std::byte> bytes(4096);
  MemoryRegion kept;
  {
    Node client(domain_config());
    Node server(domain_config());
    Ends e = connect(client, server, true, true);
    const Buffer data = server.filled(4096, 3);
    for (std::size_t i = 0; i < 300; ++i)
      (void)e.server.expose(data.slice(i, 1), Access::remote_read).value();
    kept = e.server.register_memory(bytes, Access::remote_write).value();
    for (int i = 0; i < 8; ++i) (void)e.client.send(client.filled(100, 1));
  }
  EXPECT_EQ(kept.slice().size(), 4096u);
}

TEST(EngineOwnDomain, HundredsComeAndGo) {
  Node server(domain_config(2)), client(domain_config(2));
  std::size_t descriptors = 0;
  for (std::uint32_t i = 0; i < amount(400); ++i) {
    Ends e = connect(client, server, i % 2 == 0, i % 3 != 0);
    ASSERT_TRUE(e.client.ready());
    send_many(client, e.client, server, 3);
    send_many(server, e.server, client, 3);
    EXPECT_EQ((i % 5 == 0 ? e.server : e.client).close(), Status::ok);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.engine.stats().connections + server.engine.stats().connections == 0;
    }));
    ASSERT_EQ(client.engine.stats().own_domains + server.engine.stats().own_domains, 0u);
    ASSERT_EQ(client.engine.stats().registrations + server.engine.stats().registrations, 0u);
    if (i == 0) descriptors = open_descriptors();
    client.closed.clear();
  }
  EXPECT_EQ(open_descriptors(), descriptors);
  end_all(client, server);
}

TEST(EngineOwnDomain, OneMoreThanIsAllowedIsRefusedWithTheNumbers) {
  Node server(domain_config(2)), client(domain_config(1)), none(domain_config(0));
  ConnectOptions options;
  options.settings = own();
  server.listen();
  const auto at_once = none.engine.connect(server.listener.address(), options);
  ASSERT_FALSE(at_once);
  EXPECT_EQ(at_once.error().status, Status::limit);
  EXPECT_NE(at_once.error().message().find("connections.own_domains = 0"), std::string::npos);
  Ends first = connect(client, server, true, true);
  // At this end, and at the other.
  options.handlers = client.handlers();
  ASSERT_TRUE(client.engine.connect(server.listener.address(), options));
  ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 1; }));
  Ends second = connect_out_of_band(client, server, false, true);
  ListenOptions listen;
  listen.settings = own();
  const Listener listener = server.engine.listen("127.0.0.1:0", listen).value();
  options.settings = {};
  ASSERT_TRUE(client.engine.connect(listener.address(), options));
  ASSERT_TRUE(until({&client, &server}, [&] { return client.closed.size() == 2; }));
  for (const Error& e : client.closed) {
    EXPECT_EQ(e.status, Status::limit) << e.message();
    const bool here = &e == client.closed.data();
    EXPECT_NE(e.message().find(here ? "1 connections have one, connections.own_domains = 1"
                                    : "2 connections have one, connections.own_domains = 2"),
              std::string::npos)
        << e.message();
  }
  send_many(client, first.client, server, 50);
  send_many(server, second.server, client, 50);
  client.closed.clear();
  // When one is gone, another fits.
  EXPECT_EQ(first.client.close(), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] {
    return server.engine.stats().connections == 1 && client.engine.stats().connections == 1;
  }));
  client.closed.clear();
  Ends again = connect(client, server, true, true);
  send_many(server, again.server, client, 50);
  end_all(client, server);
}

TEST(EngineOwnDomain, IsSettledInOnAcceptAndNotLater) {
  Node server(domain_config()), client(domain_config());
  Buffer data = server.filled(64, 1);
  server.on_accept = [&](Connection c) {
    const auto configured = c.configure(own());
    EXPECT_TRUE(configured) << configured.error().message();
    const auto exposed = c.expose(data.slice(), Access::remote_read);
    ASSERT_FALSE(exposed);
    EXPECT_EQ(exposed.error().status, Status::not_connected) << exposed.error().message();
  };
  server.listen();
  Ends e = engine_test::connect(client, server);
  EXPECT_EQ(server.engine.stats().own_domains, 1u);
  send_many(client, e.client, server, 100);
  send_many(server, e.server, client, 100);
  const auto late = e.server.configure({});
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().status, Status::invalid_argument);
  // While connecting, the same endpoint may be joined again, but no other.
  server.on_accept = {};
  Connection made = client.begin(server);
  const auto ask = [&] {
    if (made.ready()) return true;
    const auto said = made.configure(own());
    EXPECT_TRUE(said || said.error().status == Status::invalid_argument) << said.error().message();
    return false;
  };
  ASSERT_TRUE(until({&client, &server}, ask));
  data.reset();
  end_all(client, server);
}

TEST(EngineOwnDomain, IsMadeAnewWithItsConnection) {
  Node server(domain_config()), client(domain_config());
  server.listen();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.settings = own();
  options.reconnect = {20, 1ms, 8ms};
  std::size_t interruptions = 0;
  Buffer opened = client.filled(64, 1);
  options.handlers.on_interrupted = [&](Connection c, const Error&) {
    ++interruptions;
    EXPECT_EQ(client.engine.stats().own_domains, 0u);
    const auto exposed = c.expose(opened.slice(), Access::remote_read);
    ASSERT_FALSE(exposed);
    EXPECT_EQ(exposed.error().status, Status::not_connected);
  };
  Connection c = client.engine.connect(server.listener.address(), options).value();
  RemoteRegion first;
  for (std::size_t round = 1; round <= 3; ++round) {
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.ready.size() == round && server.ready.size() == round;
    }));
    EXPECT_EQ(client.engine.stats().own_domains, 1u);
    Connection end = server.ready.back();
    send_many(client, c, server, 60);
    send_many(server, end, client, 60);
    const auto region = c.expose(opened.slice(), Access::remote_read);
    ASSERT_TRUE(region);
    const Buffer here = server.buffer(64);
    const auto read = [&](const RemoteRegion& from) {
      return outcome(server, client, [&](auto done) { return end.read(here.slice(), from, done); });
    };
    EXPECT_EQ(read(*region), Status::ok);
    EXPECT_TRUE(Node::holds(here.bytes(), 1));
    if (round == 1) first = *region;
    // An unknown or closed key ends the connection; the last round has no next one.
    RemoteRegion wrong = round == 2 ? first : RemoteRegion{0x1000, 64, 0x7777, Access::remote_read};
    if (round == 3) break;
    EXPECT_EQ(read(wrong), Status::remote_access);
    ASSERT_TRUE(until({&client, &server}, [&] { return interruptions == round; }));
  }
  client.stale_allowed = server.stale_allowed = true;
  server.ready = {server.ready.back()};
  opened.reset();
  end_all(client, server);
}

}  // namespace
}  // namespace own_domain_test
