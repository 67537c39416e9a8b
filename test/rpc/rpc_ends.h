// Two engines, one of which serves the other's calls, and a record of both ends' callbacks.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/harness.h"

namespace rpc_test {

using namespace engine_test;  // the names of a test namespace
using spinwire::CallId;
using spinwire::CallOptions;
using spinwire::kSlotPayloadBytes;
using spinwire::Nanoseconds;
using spinwire::PendingCall;
using spinwire::Reply;
using spinwire::Request;
using spinwire::RpcStats;
using spinwire::RpcTransport;
using spinwire::Session;
using spinwire::SessionOptions;
using spinwire::SessionState;

/// Whether all calls use connections (SPINWIRE_TEST_TRANSPORT=connections).
inline bool over_connections() {
  const char* transport = std::getenv("SPINWIRE_TEST_TRANSPORT");
  return transport != nullptr && std::string(transport) == "connections";
}

/// Whether all datagrams use work requests (SPINWIRE_TEST_DATAGRAMS=verbs).
inline bool by_work_requests() {
  const char* datagrams = std::getenv("SPINWIRE_TEST_DATAGRAMS");
  return datagrams != nullptr && std::string(datagrams) == "verbs";
}

inline Config rpc_config() {
  Config c = small_config();
  c.memory.receive_bytes = 8u << 20;
  c.queues.completion_depth = 8192;
  c.rpc.sessions = 64;
  c.rpc.send_depth = 128;
  c.rpc.receive_depth = 256;
  c.rpc.min_rto *= slowness();
  c.rpc.call_timeout = 60s * slowness();
  c.rpc.target_rtt = 1s;  // whatever is slow here is no network
  if (by_work_requests()) c.rpc.direct_datagrams = spinwire::DirectPath::off;
  if (over_connections()) {
    c.rpc.transport = RpcTransport::connection;
    c.connections.peer_timeout = 2s;  // bounds how long a server keeps the session of a lost client
  }
  return c;
}

inline Config over(RpcTransport transport, Config c = rpc_config()) {
  c.rpc.transport = transport;
  return c;
}

using Bytes = std::vector<std::byte>;
inline Bytes filled(std::size_t size, std::uint32_t seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = Node::pattern(seed, i);
  return bytes;
}
inline Bytes bytes_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// How a call ended.
struct Ended {
  int times = 0;
  Status status = Status::system;
  Bytes bytes;
  std::string text;
};

enum Methods : spinwire::Method { kEcho = 1, kLater = 2, kRefuse = 3, kSilent = 4, kCount = 5 };

/// A client and a server, with a session between them.
struct Calls {
  explicit Calls(const Config& c = rpc_config(), const std::uint64_t* ticks = nullptr,
                 std::uint32_t window = 0)
      : Calls(c, c, ticks, window) {}
  Calls(const Config& servers, const Config& clients, const std::uint64_t* ticks = nullptr,
        std::uint32_t window = 0)
      : server(servers, ticks), client(clients, ticks) {
    server.listen();
    serve();
    session = open(window);
    EXPECT_TRUE(until([&] { return session.ready(); }));
  }
  void serve() {
    auto& engine = server.engine;
    EXPECT_TRUE(engine.serve(kEcho, [](Request& r) { EXPECT_EQ(r.reply(r.bytes()), Status::ok); }));
    EXPECT_TRUE(engine.serve(kLater, [this](Request& r) {
      later.push_back({r.defer(), bytes_of(r.bytes())});
    }));
    EXPECT_TRUE(engine.serve(
        kRefuse, [](Request& r) { EXPECT_EQ(r.refuse("not on a Sunday"), Status::ok); }));
    EXPECT_TRUE(engine.serve(kSilent, [](Request&) {}));
    EXPECT_TRUE(engine.serve(kCount, [this](Request& r) {
      ++runs[bytes_of(r.bytes())];
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    }));
  }
  Session open(std::uint32_t window = 0) {
    SessionOptions options;
    options.window = window;
    options.on_closed = [this](Session, const Error& e) { closed.push_back(e); };
    auto made = client.engine.open_session(server.listener.address(), options);
    EXPECT_TRUE(made) << made.error().message();
    return made ? *made : Session();
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&client, &server}, [&] {
      if (each_turn) each_turn();
      return done();
    });
  }
  /// Begins a call. Its result is appended to `ended`.
  Status begin(spinwire::Method method, const Bytes& bytes, const CallOptions& options = {}) {
    const std::size_t id = ended.size();
    ended.emplace_back();
    const auto done = [this, id](Reply& r) {
      Ended& e = ended[id];
      ++e.times;
      e.status = r.status();
      e.bytes = bytes_of(r.bytes());
      e.text = std::string(r.text());
    };
    Status status;
    if (bytes.size() <= kSlotPayloadBytes) {
      status = session.call(method, bytes, done, options);
    } else {
      Buffer b = client.buffer(bytes.size());
      std::copy(bytes.begin(), bytes.end(), b.data());
      status = session.call(method, b.slice(), done, options);
    }
    if (status != Status::ok) ended.pop_back();
    return status;
  }
  bool all_ended() const {
    return std::all_of(ended.begin(), ended.end(), [](const Ended& e) { return e.times != 0; });
  }
  /// Calls and waits.
  Ended call(spinwire::Method method, const Bytes& bytes, const CallOptions& options = {}) {
    EXPECT_EQ(begin(method, bytes, options), Status::ok);
    EXPECT_TRUE(until([&] { return ended.back().times != 0; }));
    return ended.back();
  }
  void finish() {
    if (session.ready()) {
      EXPECT_EQ(session.close(), Status::ok);
    }
    EXPECT_TRUE(until([&] {
      return client.engine.rpc_stats().sessions == 0 &&
             server.engine.rpc_stats().served_sessions == 0 &&
             client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
    }));
    later.clear();
    for (int i = 0; i < 8; ++i) (void)(client.poll() + server.poll());
    for (const Ended& e : ended) EXPECT_EQ(e.times, 1);
    for (const Node* node : {&client, &server}) {
      const RpcStats s = node->engine.rpc_stats();
      EXPECT_EQ(s.bad_datagrams, bad_allowed ? s.bad_datagrams : 0u);
    }
    client.expect_clean();
    server.expect_clean();
  }

  std::function<void()> each_turn;  ///< may move a manual clock

  struct Later {
    PendingCall call;
    Bytes bytes;
  };
  std::vector<Later> later;
  std::map<Bytes, int> runs;
  std::deque<Ended> ended;
  std::vector<Error> closed;
  bool bad_allowed = false;
  Node server;
  Node client;
  Session session;
};

}  // namespace rpc_test
