// Peers must not be able to end a process whose memory is exhausted.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "attack/victim.h"
#include "engine/failed_allocations.h"
#include "engine/zero_cost.h"

namespace attack_test {
namespace {

#if SPINWIRE_TEST_COUNTS_HEAP

/// With rendezvous messages, and with calls that go over a connection.
Config long_config() {
  Config c = rpc_test::rpc_config();
  c.memory.rendezvous_bytes = 6u << 20;
  c.memory.windows = 64;
  c.connections.max_message_bytes = 1u << 20;
  return c;
}

Config hungry_config() {
  Config c = long_config();
  c.connections.keepalive_interval = 50ms;
  c.connections.peer_timeout = 10s;
  c.connections.handshake_timeout = 300ms;  // for half a frame; clients begin again
  return c;
}

/// Serves calls and sends messages back. Commands: a digit N, to fail every N-th allocation (0:
/// none) and, for 0, to say how many have failed; p, to poll many times and say so; q, to end.
int serve(int in, int out) {
  Node node(hungry_config());  // no handlers of its own, which would allocate
  ListenOptions options;
  options.handlers.on_message = [](Connection c, Message& m) { (void)c.send(m.take()); };
  auto listener = node.engine.listen("127.0.0.1:0", options);
  if (!listener ||
      !node.engine.serve(kEcho, [](spinwire::Request& r) { (void)r.reply(r.bytes().first(8)); }))
    return 2;
  write_line(out, listener->address());
  for (char told = 0; told != 'q'; told = command(in)) {
    if (told >= '0' && told <= '9') {
      zero_cost_test::fail_every = static_cast<std::uint32_t>(told - '0');
      if (told == '0') write_line(out, std::to_string(zero_cost_test::failed_allocations));
    }
    if (told == 'p') {
      for (int i = 0; i < 20'000; ++i) (void)node.engine.poll();
      const std::uint32_t failing = std::exchange(zero_cost_test::fail_every, 0u);
      write_line(out, "polled");
      zero_cost_test::fail_every = failing;
    }
    for (int i = 0; i < 64; ++i) (void)node.engine.poll();
  }
  return node.engine.audit().has_value() ? 0 : 5;
}

/// A client that sends and calls for ever, in each form that bytes may travel, and begins again
/// what a busy machine has let expire. It says when it has begun, and when a message of each form
/// has come back and a call of each form was answered.
int use(const std::string& address, int out) {
  Node node(long_config());
  Connection connection = node.begin(address);
  auto session = node.engine.open_session(address, {});
  write_line(out, "begun");
  // Within a line, beside the lines, by reference or by rendezvous.
  const std::array lengths{32u, 3000u, 20'000u, 200'000u};
  const Buffer b = node.filled(lengths.back(), 1);
  std::set<std::size_t> echoed, answered;
  node.on_message = [&](Connection, Message& m) { echoed.insert(m.size()); };
  bool said = false;
  for (std::size_t i = 0;; ++i) {
    (void)node.poll();
    if (connection.state() == ConnectionState::closed) connection = node.begin(address);
    if (!session || session->state() == spinwire::SessionState::closed)
      session = node.engine.open_session(address, {});
    if (!connection.ready() || !session || !session->ready()) continue;
    if (!said && echoed.size() == lengths.size() && answered.size() == lengths.size()) {
      said = true;
      write_line(out, "ready");
    }
    const std::size_t form = i % lengths.size();
    const BufferSlice bytes = b.slice(0, lengths[form]);
    (void)connection.send(bytes);
    (void)session->call(kEcho, bytes, [&answered, form](spinwire::Reply& r) {
      if (r.status() == Status::ok) answered.insert(form);
    });
  }
}

class AttackOnMemory : public testing::TestWithParam<char> {
 protected:
  AttackOnMemory() : victim_(serve), address_(victim_.line()), node_(rpc_test::rpc_config()) {}

  /// Sends each kind of frame, whole and truncated, and bytes of another protocol.
  void attack() {
    auto made = node_.engine.prepare({});
    ASSERT_TRUE(made) << made.error().message();
    ASSERT_TRUE(until({&node_}, [&] { return made->endpoint().has_value(); }));
    wire::SessionEnd end;
    end.name = 7;
    end.window = 8;
    end.mtu = 1024;
    end.incarnation = 5;
    const std::vector<wire::Frame> frames = {
        wire::encode(wire::Hello{*made->endpoint()}),
        wire::encode(wire::OpenSession{end}),
        wire::encode(wire::JoinSession{*made->endpoint(), 1, 2}),
        wire::encode(wire::Ready{3}),
        wire::encode(wire::PathResponse{4}),
        wire::encode(wire::Refuse{})};
    std::vector<Stream> streams;
    for (int i = 0; i < 5; ++i) {
      for (const wire::Frame& frame : frames) {
        streams.emplace_back(address_).send(frame);
        streams.emplace_back(address_).send_part(frame, frame.bytes().size() / 2);
      }
      (void)::send(streams.emplace_back(address_).fd(), "GET / HTTP/1.1", 14, MSG_NOSIGNAL);
      if (i % 2 == 0) streams.clear();
    }
    for (const Stream& stream : streams) {
      pollfd end_of{stream.fd(), POLLIN, 0};
      EXPECT_EQ(::poll(&end_of, 1, 60'000), 1) << "neither answered nor ended";
    }
    (void)made->close();
  }

  Child victim_;
  std::string address_;
  Node node_;
};

TEST_P(AttackOnMemory, EndsNoProcess) {
  Child first([&](int, int out) { return use(address_, out); });
  Child second([&](int, int out) { return use(address_, out); });
  for (Child* each : {&first, &second}) {
    ASSERT_EQ(each->line(), "begun");
    ASSERT_EQ(each->line(), "ready");
  }
  victim_.tell(GetParam());
  first.kill(SIGKILL);
  attack();
  Child third([&](int, int out) { return use(address_, out); });  // may or may not connect
  ASSERT_EQ(third.line(), "begun");
  victim_.tell('p');
  ASSERT_EQ(victim_.line(), "polled") << "it has died";
  second.kill(SIGKILL);
  third.kill(SIGKILL);
  attack();
  victim_.tell('0');
  const std::string failed = victim_.line();
  ASSERT_NE(failed, "") << "it has died";
  std::printf("%s allocations failed\n", failed.c_str());
  std::fflush(stdout);
  EXPECT_GT(std::stoul(failed), 0u) << "no attack: memory never ran out";
  Child last([&](int, int out) { return use(address_, out); });
  EXPECT_EQ(last.line(), "begun");
  EXPECT_EQ(last.line(), "ready");
  last.kill(SIGKILL);
  victim_.tell('q');
  EXPECT_EQ(victim_.wait(), 0);
}

INSTANTIATE_TEST_SUITE_P(OneOf, AttackOnMemory, testing::Range('1', ':'));

#else

TEST(AttackOnMemory, EndsNoProcess) {
  GTEST_SKIP() << "allocations cannot be made to fail under this sanitizer";
}

#endif

}  // namespace
}  // namespace attack_test
