#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "base/internals.h"
#include "base/unique_fd.h"
#include "control/loopback.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "engine/zero_cost.h"

namespace reconnect_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Nanoseconds;
using spinwire::Reconnect;
using spinwire::control::Address;
using spinwire::control::ListenSocket;

constexpr Reconnect kManyAttempts{20, 1ms, 8ms};

/// A client that records its interruptions.
struct Client : Node {
  using Node::Node;
  Connection begin_again(const std::string& address, const Reconnect& reconnect = kManyAttempts,
                         const std::vector<std::string>& alternatives = {}) {
    ConnectOptions options;
    options.handlers = handlers();
    options.handlers.on_interrupted = [this](Connection c, const Error& e) {
      EXPECT_EQ(c.state(), ConnectionState::resolving);
      interruptions.push_back(e);
      if (on_interrupted) on_interrupted(c);
    };
    options.reconnect = reconnect;
    options.alternatives = alternatives;
    auto made = engine.connect(address, options);
    EXPECT_TRUE(made) << made.error().message();
    return made ? *made : Connection();
  }
  std::function<void(Connection)> on_interrupted;
  std::vector<Error> interruptions;
};

/// Breaks a connection from the server's side without a goodbye, by a forbidden READ.
void break_from(Node& server, Connection end) {
  const Buffer here = server.buffer(64, Pool::lease);
  const RemoteRegion nowhere{0x1000, 64, 0x7777, Access::remote_read};
  EXPECT_EQ(server.tally.run([&](auto done) { return end.read(here.slice(), nowhere, done); }),
            Status::ok);
}

/// An address without a listener.
std::string deserted_address() {
  Node node;
  node.listen();
  return node.listener.address();
}

TEST(EngineReconnect, ALostConnectionIsMadeAgainUnderTheSameHandle) {
  Node server(watchful_config());
  server.listen();
  Client client(watchful_config());
  const Connection c = client.begin_again(server.listener.address());
  for (std::uint32_t round = 1; round <= 3; ++round) {
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.ready.size() == round && server.ready.size() == round;
    }));
    EXPECT_EQ(client.ready.back(), c);
    {
      const Buffer data = client.filled(32, round);
      ASSERT_EQ(client.tally.run([&](auto done) { return client.ready[0].send(data, done); }),
                Status::ok);
    }
    ASSERT_TRUE(
        until({&client, &server}, [&] { return server.messages == round && client.tally.idle(); }));
    EXPECT_EQ(c.stats().messages_sent, round);
    if (round == 3) break;
    break_from(server, server.ready.back());
    ASSERT_TRUE(until({&client, &server}, [&] { return client.interruptions.size() == round; }));
    // Without a device event, the engine only knows that its queue pair failed.
    const Status why = client.interruptions.back().status;
    const bool unsaid = !on_softverbs() && why == Status::local_error;
    EXPECT_EQ(why, unsaid ? why : Status::remote_error);
  }
  EXPECT_TRUE(client.closed.empty());
  EXPECT_EQ(client.engine.stats().connections, 1u);
  client.ready = {c};
  server.stale_allowed = client.stale_allowed = true;
  finish(client, server);
  ASSERT_EQ(client.closed.size(), 1u);
  EXPECT_EQ(client.closed[0].status, Status::ok);
  EXPECT_EQ(client.engine.stats().messages_sent, 3u);
}

TEST(EngineReconnect, OperationsOfALostConnectionEndOnceAndBeforeItIsTold) {
  Node server(watchful_config());
  server.listen();
  Client client(watchful_config());
  Connection c = client.begin_again(server.listener.address());
  ASSERT_TRUE(until({&client, &server}, [&] { return server.ready.size() == 1 && c.ready(); }));
  break_from(server, server.ready.back());
  client.on_interrupted = [&](Connection) { EXPECT_TRUE(client.tally.idle()); };
  // Before on_interrupted, accepted operations end in some way. Between it and the reconnect, none
  // is accepted.
  while (client.interruptions.empty()) {
    (void)client.tally.run(
        [&](auto done) { return c.send_copy(std::as_bytes(std::span("hello", 5)), done); });
    (void)(server.poll() + client.poll());
  }
  EXPECT_EQ(c.send_copy(std::as_bytes(std::span("hello", 5))), Status::not_connected);
  client.tally.expect_exact();
  ASSERT_TRUE(until({&client, &server}, [&] { return client.ready.size() == 2; }));
  client.ready = {c};
  server.stale_allowed = client.stale_allowed = true;
  finish(client, server);
}

/// A server that closes each connection.
class Unwelcoming {
 public:
  Unwelcoming() : socket_(*ListenSocket::open(*Address::parse("127.0.0.1:0"), 4)) {}
  std::string address() { return socket_.local().str(); }
  /// The number of connections so far.
  int guests() {
    for (;;) {
      auto guest = socket_.accept();
      EXPECT_TRUE(guest);
      if (!guest || !*guest) return guests_;
      ++guests_;
    }
  }

 private:
  ListenSocket socket_;
  int guests_ = 0;
};

TEST(EngineReconnect, PausesDoubleUpToTheMaximumAndTheFirstCauseIsTold) {
  std::uint64_t now = 1'000'000'000;
  Client client(small_config(), &now);
  Unwelcoming server;
  const Connection c = client.begin_again(server.address(), {6, 100ms, 400ms});
  int guests = 1;
  for (const std::uint64_t longest : {100u, 200u, 400u, 400u, 400u, 400u}) {
    // The attempt fails by itself, which takes real time but not the engine's.
    ASSERT_TRUE(until({&client}, [&] {
      return server.guests() == guests && client.engine.stats().reserved_receives == 0;
    }));
    EXPECT_EQ(c.state(), ConnectionState::resolving);
    const std::uint64_t begun = now;
    while (client.engine.stats().reserved_receives == 0 && now - begun < 1'000'000'000) {
      now += 1'000'000;
      (void)client.poll();
    }
    const std::uint64_t pause = (now - begun) / 1'000'000;
    EXPECT_GE(pause, longest / 2);
    EXPECT_LE(pause, longest + 1);  // the timer wheel's resolution
    ++guests;
  }
  ASSERT_TRUE(until({&client}, [&] { return server.guests() == 7 && !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::peer_lost);
  EXPECT_NE(client.closed[0].message().find("6 attempts to reconnect failed"), std::string::npos)
      << client.closed[0].message();
  EXPECT_TRUE(client.interruptions.empty());  // it was never ready
  client.expect_clean();
}

TEST(EngineReconnect, PausesDiffer) {
  std::uint64_t now = 1'000'000'000;
  Client client(small_config(), &now);
  const std::string nobody = deserted_address();
  for (int i = 0; i < 16; ++i) (void)client.begin_again(nobody, {1, 1s, 1s});
  ASSERT_TRUE(until({&client}, [&] { return client.engine.stats().reserved_receives == 0; }));
  // If all retried at once, there would be no moment with only some of them connecting.
  bool some = false;
  for (int ms = 0; ms < 1100 && client.closed.size() < 16; ++ms) {
    now += 1'000'000;
    for (int i = 0; i < 4; ++i) (void)client.poll();
    some = some || (client.closed.size() > 2 && client.closed.size() < 14);
  }
  EXPECT_TRUE(some);
  ASSERT_TRUE(until({&client}, [&] { return client.closed.size() == 16; }));
}

TEST(EngineReconnect, AServerThatComesLaterIsFound) {
  const std::string address = deserted_address();
  Client client;
  const Connection c = client.begin_again(address, {200, 1ms, 10ms});
  ASSERT_TRUE(until({&client}, [&] { return client.engine.stats().reserved_receives == 0; }));
  Node server;
  server.listen(address);
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
  EXPECT_TRUE(client.interruptions.empty());
  finish(client, server);
}

TEST(EngineReconnect, APeerThatRefusesIsNotAskedAgain) {
  Node server;
  server.on_accept = [](Connection c) { EXPECT_EQ(c.close(), Status::ok); };
  server.listen();
  Client client;
  (void)client.begin_again(server.listener.address());
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::refused);
  EXPECT_EQ(client.closed[0].code, 0u);
  EXPECT_EQ(server.accepts, 1u);
}

TEST(EngineReconnect, APeerThatIsFullIsAskedAgain) {
  Config one = small_config();
  one.connections.maximum = 1;
  Node server(one);
  server.listen();
  Client client;
  Connection first = client.begin(server);
  ASSERT_TRUE(until({&client, &server}, [&] { return first.ready() && server.ready.size() == 1; }));
  const Connection second = client.begin_again(server.listener.address(), {1000, 1ms, 4ms});
  ASSERT_TRUE(
      until({&client, &server}, [&] { return server.engine.stats().handshakes_refused >= 2; }));
  EXPECT_EQ(first.close(), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return second.ready(); }));
  client.ready = {second};
  finish(client, server);
}

TEST(EngineReconnect, AForeignServiceIsNotAskedAgain) {
  auto socket = ListenSocket::open(*Address::parse("127.0.0.1:0"), 4);
  ASSERT_TRUE(socket);
  Client client;
  (void)client.begin_again(socket->local().str());
  std::vector<spinwire::base::UniqueFd> guests;
  ASSERT_TRUE(until({&client}, [&] {
    auto guest = socket->accept();
    if (guest && *guest) {
      const std::string_view text = "SSH-2.0-OpenSSH_9.2\r\n";
      EXPECT_EQ(::send((*guest)->fd.get(), text.data(), text.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(text.size()));
      guests.push_back(std::move((*guest)->fd));
    }
    return !client.closed.empty();
  }));
  EXPECT_EQ(client.closed[0].status, Status::protocol);
  EXPECT_EQ(guests.size(), 1u);
}

TEST(EngineReconnect, AGoodbyeEndsIt) {
  Node server;
  server.listen();
  Client client;
  const Connection c = client.begin_again(server.listener.address());
  ASSERT_TRUE(until({&client, &server}, [&] { return c.ready() && server.ready.size() == 1; }));
  EXPECT_EQ(server.ready[0].close(), Status::ok);
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::ok);
  EXPECT_TRUE(client.interruptions.empty());
  client.expect_clean();
}

TEST(EngineReconnect, ClosedWhileItRests) {
  std::uint64_t now = 1'000'000'000;
  Client client(small_config(), &now);
  Connection c = client.begin_again(deserted_address(), {3, 1s, 1s});
  ASSERT_TRUE(until({&client}, [&] { return client.engine.stats().reserved_receives == 0; }));
  EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::ok);
  now += 10'000'000'000;
  for (int i = 0; i < 100; ++i) (void)client.poll();
  EXPECT_EQ(client.closed.size(), 1u);
  client.expect_clean();
}

TEST(EngineReconnect, AnEngineGoesWhileConnectionsRest) {
  std::uint64_t now = 1'000'000'000;
  int closed = 0;
  {
    Client client(small_config(), &now);
    client.on_closed = [&](Connection, const Error&) { ++closed; };
    (void)client.begin_again(deserted_address(), {3, 1s, 1s});
    ASSERT_TRUE(until({&client}, [&] { return client.engine.stats().reserved_receives == 0; }));
    client.engine = Engine();
  }
  EXPECT_EQ(closed, 1);
}

TEST(EngineReconnect, AlternativesAreTriedInTurn) {
  std::uint64_t now = 1'000'000'000;
  std::optional<Node> first, second;
  first.emplace(small_config(), &now).listen();
  second.emplace(small_config(), &now).listen();
  const std::string addresses[] = {first->listener.address(), second->listener.address()};
  Client client(small_config(), &now);
  const Connection c = client.begin_again(addresses[0], kManyAttempts, {addresses[1]});
  const auto poll = [&] {
    now += 100'000;
    for (auto* node : {&first, &second}) {
      if (*node) (void)(*node)->poll();
    }
  };
  for (std::size_t round = 1; round <= 4; ++round) {
    ASSERT_TRUE(until({&client}, [&] { return poll(), client.ready.size() == round; }));
    EXPECT_EQ(c.peer(), addresses[(round - 1) % 2]);
    if (round == 4) break;
    auto& now_connected = round % 2 == 1 ? first : second;
    ASSERT_TRUE(
        until({&client}, [&] { return poll(), !now_connected->ready.empty() && c.ready(); }));
    break_from(*now_connected, now_connected->ready.back());
    now_connected->stale_allowed = true;
    ASSERT_TRUE(until({&client}, [&] { return poll(), client.interruptions.size() == round; }));
  }
  EXPECT_TRUE(client.closed.empty());
}

TEST(EngineReconnect, AnAlternativeIsTriedAtOnceAndWithoutReconnecting) {
  std::uint64_t now = 1'000'000'000;
  Node server(small_config(), &now);
  server.listen();
  Client client(small_config(), &now);
  const Connection c =
      client.begin_again(deserted_address(), {}, {deserted_address(), server.listener.address()});
  ASSERT_TRUE(until({&client, &server}, [&] {
    now += 1000;
    return client.ready.size() == 1;
  }));
  EXPECT_EQ(c.peer(), server.listener.address());
  ASSERT_TRUE(until({&client, &server}, [&] { return server.ready.size() == 1; }));
  break_from(server, server.ready.back());
  server.stale_allowed = client.stale_allowed = true;
  // An adapter reports nothing: the client has to miss the peer's signs of life.
  ASSERT_TRUE(until({&client, &server}, [&] {
    now += 100'000;
    return client.closed.size() == 1;
  }));
  // All of a round that fail are reported once.
  const Connection none = client.begin_again(deserted_address(), {}, {deserted_address()});
  if (none.state() != ConnectionState::closed) {
    ASSERT_TRUE(until({&client, &server}, [&] {
      now += 1000;
      return client.closed.size() == 2;
    }));
    EXPECT_EQ(client.closed[1].status, Status::refused) << client.closed[1].message();
  }
}

TEST(EngineReconnect, AlternativesAreChecked) {
  Node client;
  ConnectOptions options;
  options.alternatives = {"127.0.0.1:1", "somewhere"};
  const auto made = client.engine.connect("127.0.0.1:1", options);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().status, Status::invalid_argument);
}

TEST(EngineReconnect, DelaysAreChecked) {
  Node client;
  for (const Reconnect& wrong :
       {Reconnect{1, 0ns, 1s}, Reconnect{1, 2s, 1s}, Reconnect{1, 1s, 2h}}) {
    const auto made = client.engine.connect("127.0.0.1:1", {{}, wrong});
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().status, Status::invalid_argument);
  }
}

TEST(EngineReconnect, AKilledServerIsFoundAgainAfterItsRestart) {
  const std::string address = deserted_address();
  const auto serve = [&address](int in, int out) {
    Node node(watchful_config());
    node.on_message = [](Connection c, Message& m) { (void)c.send(m.take()); };
    node.listen(address);
    write_line(out, "up");
    for (unsigned i = 0;; ++i) {
      (void)node.poll();
      if (i % 1024 == 0 && command(in) == 'q') return 0;
    }
  };
  Child first(serve);
  ASSERT_EQ(first.line(), "up");
  Client client(watchful_config());
  Connection c = client.begin_again(address, {100, 5ms, 100ms});
  const auto echo = [&](std::uint64_t expected) {
    ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
    ASSERT_EQ(c.send_copy(std::as_bytes(std::span("ping", 4))), Status::ok);
    ASSERT_TRUE(until({&client}, [&] { return client.messages == expected; }));
  };
  ASSERT_NO_FATAL_FAILURE(echo(1));
  first.kill(SIGKILL);
  ASSERT_TRUE(until({&client}, [&] { return client.interruptions.size() == 1; }));
  EXPECT_EQ(client.interruptions[0].status, Status::peer_lost);
  Child second(serve);
  ASSERT_EQ(second.line(), "up");
  ASSERT_NO_FATAL_FAILURE(echo(2));
  EXPECT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::ok);
  client.expect_clean();
  second.tell('q');
  EXPECT_EQ(second.wait(), 0);
}

TEST(EngineReconnect, AnAttemptThatFindsNoMemoryLeavesNoHandshake) {
#if SPINWIRE_TEST_COUNTS_HEAP
  Node server, client;
  server.listen();
  const std::string address = server.listener.address();
  const auto& port = spinwire::detail::core_of(client.engine)->control;
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect = kManyAttempts;
  std::size_t failed = 0;
  for (std::uint32_t round = 0; round < 400; ++round) {
    zero_cost_test::fail_every = 1 + round % 20;  // so each allocation is hit
    auto made = client.engine.connect(address, options);
    zero_cost_test::fail_every = 0;
    if (made) {
      EXPECT_EQ(made->close(), Status::ok);
      ASSERT_TRUE(until({&client, &server}, [&] { return port.handshakes() == 0; }));
    } else {
      ++failed;
      EXPECT_EQ(made.error().status, Status::no_memory) << made.error().message();
    }
    ASSERT_EQ(port.handshakes(), 0u) << round;
  }
  EXPECT_GT(failed, 20u);
  EXPECT_LT(failed, 400u);
  client.expect_clean();
#else
  GTEST_SKIP() << "a sanitizer's heap does not fail";
#endif
}

}  // namespace
}  // namespace reconnect_test
