// A session whose server is killed and started again, over and over: it survives under one handle,
// and no call runs twice.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>

#include "rpc/long_calls.h"

namespace session_kill_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::Reconnect;
using spinwire::WhenNotReady;

constexpr std::uint32_t kCalls = 1u << 20;
constexpr std::size_t kLongBytes = 40'000;

/// How often each call has run, in memory that all servers share.
class Runs {
 public:
  Runs()
      : runs_(static_cast<std::atomic<std::uint8_t>*>(
            ::mmap(nullptr, kCalls, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    EXPECT_NE(static_cast<void*>(runs_), MAP_FAILED);
  }
  Runs(const Runs&) = delete;
  Runs& operator=(const Runs&) = delete;
  ~Runs() { ::munmap(runs_, kCalls); }
  std::atomic<std::uint8_t>& operator[](std::uint32_t call) const { return runs_[call]; }

 private:
  std::atomic<std::uint8_t>* runs_;
};

Config kill_config() {
  Config c = long_call_config();
  c.connections.keepalive_interval = 20ms;
  c.queue_pair.ack_timeout = 8;
  c.rpc.min_rto = 2ms;
  return c;
}

std::uint32_t number_of(std::span<const std::byte> bytes) {
  std::uint32_t number = kCalls;
  std::memcpy(&number, bytes.data(), std::min(bytes.size(), sizeof number));
  return number;
}

/// Serves until it is killed, or told to end.
int serve_calls(const std::string& address, const Runs& runs, int in, int out) {
  Node node(kill_config());
  EXPECT_TRUE(node.engine.serve(kCount, [&runs](Request& r) {
    const std::uint32_t number = number_of(r.bytes());
    if (number < kCalls) ++runs[number];
    EXPECT_EQ(r.reply(r.bytes().first(std::min<std::size_t>(r.bytes().size(), 64))), Status::ok);
  }));
  node.listen(address);
  write_line(out, "up");
  for (unsigned i = 0;; ++i) {
    (void)node.poll();
    if (i % 1024 == 0 && command(in) == 'q') return 0;
  }
}

/// Calls without end and without a queue of its own: on_writable goes on.
struct Caller {
  Caller(Node& node, const std::string& address) : client(node) {
    SessionOptions options;
    options.reconnect = {1000, 1ms, 20ms};
    options.when_not_ready = WhenNotReady::wait;
    options.on_writable = [this](Session) { go_on(); };
    options.on_interrupted = [this](Session, const Error& e) {
      ++interrupted;
      EXPECT_TRUE(e.status == Status::peer_lost) << e.message();
    };
    options.on_closed = [this](Session, const Error& e) { closed.emplace(e); };
    session = client.engine.open_session(address, options).value();
    bytes.resize(kLongBytes);
  }
  void go_on() {
    while (!stops && begun < kCalls) {
      const std::uint32_t number = begun;
      std::memcpy(bytes.data(), &number, sizeof number);
      const std::size_t size = number % 64 == 0 ? kLongBytes : 20;
      const auto done = [this, number](Reply& r) { on_reply(number, r); };
      const Status status =
          session.call(kCount, std::span<const std::byte>(bytes).first(size), done);
      if (status != Status::ok) {
        EXPECT_TRUE(status == Status::would_block || status == Status::no_buffer)
            << to_string(status);
        return;
      }
      ++begun;
    }
  }
  void on_reply(std::uint32_t number, Reply& r) {
    ++ended;
    if (r.status() == Status::ok) {
      ++good;
      EXPECT_EQ(number_of(r.bytes()), number);
      EXPECT_EQ((*runs)[number], 1);
    } else {
      ++lost;
      EXPECT_EQ(r.status(), Status::peer_lost);
    }
  }

  Node& client;
  const Runs* runs = nullptr;
  Session session;
  Bytes bytes;
  bool stops = false;
  std::uint32_t begun = 0, ended = 0, good = 0, lost = 0, interrupted = 0;
  std::optional<Error> closed;
};

void kill_servers(std::uint32_t kills) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "an address of its own";
  std::string address;
  {
    Node node;
    node.listen();
    address = node.listener.address();
  }
  const Runs runs;
  const auto serve = [&](int in, int out) { return serve_calls(address, runs, in, out); };
  auto server = std::make_unique<Child>(serve);
  ASSERT_EQ(server->line(), "up");
  Node client(kill_config());
  Caller caller(client, address);
  caller.runs = &runs;
  const Session handle = caller.session;
  caller.go_on();  // before it is ready
  for (std::uint32_t kill = 0; kill < kills; ++kill) {
    const std::uint32_t before = caller.good;
    ASSERT_TRUE(until({&client}, [&] { return caller.good > before + 50 + 37 * (kill % 8); }));
    server->kill(SIGKILL);
    ASSERT_TRUE(until({&client}, [&] { return caller.interrupted == kill + 1; }));
    server = std::make_unique<Child>(serve);
    ASSERT_EQ(server->line(), "up");
  }
  caller.stops = true;
  ASSERT_TRUE(until({&client}, [&] { return caller.ended == caller.begun; }));
  EXPECT_TRUE(caller.session.ready());
  EXPECT_EQ(caller.session, handle);
  EXPECT_FALSE(caller.closed);
  EXPECT_GT(caller.lost, 0u);
  // What was under way at a kill, and no more.
  EXPECT_LE(caller.lost, kills * 2 * client.engine.config().rpc.window);
  for (std::uint32_t call = 0; call < caller.begun; ++call) ASSERT_LE(runs[call], 1) << call;
  EXPECT_EQ(caller.session.close(), Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return caller.closed.has_value(); }));
  EXPECT_EQ(caller.closed->status, Status::ok) << caller.closed->message();
  ASSERT_TRUE(until({&client}, [&] { return client.engine.stats().connections == 0; }));
  client.stale_allowed = true;
  client.expect_clean();
  server->tell('q');
  EXPECT_EQ(server->wait(), 0);
}

TEST(KillSession, ItSurvivesItsServers) { kill_servers(6); }
TEST(SlowKillSession, ItSurvivesItsServers) { kill_servers(100); }

}  // namespace
}  // namespace session_kill_test
