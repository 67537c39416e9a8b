// Echo: the smallest useful pair of Spinwire programs. The server sends every message back; the
// client measures the round trip.
//
//   echo server [ADDRESS]     serves until interrupted
//   echo client ADDRESS       sends --count messages of --size bytes, one at a time
//   echo both                 runs both in two processes
//
// Note that an Engine does nothing by itself. Both ends have a loop that calls poll(), and every
// event arrives in a callback inside poll().
//
// CMake builds it, and so does this command. A copy of this folder of a clone needs `cp -rL`.
//
//   g++ -std=c++20 -O2 *.cc -o echo $(pkg-config --cflags --libs spinwire fmt CLI11)
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "histogram.h"
#include "program.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using program::fail;

Result<Config> load_config() {
  // Configuration: defaults, then the environment (e.g. SPINWIRE_MEMORY_HUGEPAGES=off), then this
  // code. We never call poll_control(), so poll() has to handle sockets and timers, too.
  auto config = Config::load();
  if (config) config->engine.control = ControlMode::automatic;
  return config;
}

// ---- the server -------------------------------------------------------------------------------

int serve(const std::string& address, bool once, int announce) {
  auto config = load_config();
  if (!config) return fail(config.error());
  // Declared before the engine, because the engine's destructor still calls on_closed.
  bool left = false;
  auto engine = Engine::open(*config);
  if (!engine) return fail(engine.error());

  ListenOptions options;
  options.handlers.on_message = [](Connection client, Message& message) {
    // take() keeps the message and send() sends it back: on an adapter, nothing is copied. If a
    // client does not take its replies, our credit runs out and send() returns would_block. This
    // server then disconnects the client. close() fails only if the connection is closing already.
    if (client.send(message.take()) != Status::ok) (void)client.close();
  };
  options.handlers.on_closed = [&left](Connection, const Error& error) {
    if (error.status != Status::ok) fail(error);
    left = true;
  };
  auto listener = engine->listen(address, options);
  if (!listener) return fail(listener.error());
  program::announce_address(announce, listener->address());

  // A server that waits for clients sleeps; one that is measured yields.
  Idler idler(once ? IdleStrategy::yield : IdleStrategy::wait);
  while (!program::stop_requested()) {
    if (idler.idle(*engine, engine->poll()) != Status::ok) return fail("poll() was misused");
    if (left && once && engine->stats().accepted != 0) break;
  }
  return program::kDone;
}

// ---- the client -------------------------------------------------------------------------------

struct Client {
  Connection connection;
  Clock clock;
  std::vector<std::byte> payload;  // the message, with its number in front
  std::uint64_t number = 0;        // of the message in flight
  std::uint64_t count = 0;         // messages to send
  std::uint64_t sent_at = 0;       // ticks
  bool due = false;                // a message has to be sent
  bool wrong = false;              // a reply differed from its message
  bool closed = false;
  Error reason;                 // why the connection closed
  Status refusal = Status::ok;  // why send_copy() failed
  tools::Histogram round_trips;

  void send_next() {
    std::memcpy(payload.data(), &number, std::min(sizeof number, payload.size()));
    sent_at = clock.now();
    // Copies into registered memory. After would_block, poll and try again.
    const Status status = connection.send_copy(payload);
    due = status == Status::would_block || status == Status::no_buffer;
    if (status == Status::ok || due) return;
    refusal = status;
    (void)connection.close();  // not_connected: it is already closing
  }

  void on_message(const Message& answer) {
    round_trips.record(clock.now() - sent_at);
    wrong = answer.size() != payload.size() ||
            std::memcmp(answer.data(), payload.data(), payload.size()) != 0;
    due = ++number < count && !wrong;
    if (!due) (void)connection.close();
  }
};

void print(const Client& client, double seconds) {
  const auto us = [&client](std::uint64_t ticks) {
    return static_cast<double>(ticks) / client.clock.ticks_per_ns() / 1000.0;
  };
  const tools::Histogram& h = client.round_trips;
  fmt::print("{} round trips of {} bytes in {:.3f} s\n", h.count(), client.payload.size(), seconds);
  fmt::print(
      "  min {:.3f} us  p50 {:.3f} us  p90 {:.3f} us  p99 {:.3f} us  p99.9 {:.3f} us  max {:.3f} "
      "us\n",
      us(h.min()), us(h.percentile(50)), us(h.percentile(90)), us(h.percentile(99)),
      us(h.percentile(99.9)), us(h.max()));
}

int run_client(const std::string& address, std::uint64_t count, std::size_t size) {
  auto config = load_config();
  if (!config) return fail(config.error());
  // A callback holds at most 32 bytes of captures, so it captures a pointer to its state.
  const auto state = std::make_unique<Client>();
  Client* client = state.get();
  auto engine = Engine::open(*config);
  if (!engine) return fail(engine.error());

  client->clock = engine->clock();
  client->payload.resize(size, std::byte{0x5a});
  client->count = count;

  ConnectOptions options;
  options.handlers.on_ready = [client](Connection c) {
    client->connection = c;
    client->due = true;
  };
  options.handlers.on_message = [client](Connection, Message& m) { client->on_message(m); };
  options.handlers.on_closed = [client](Connection, const Error& error) {
    client->closed = true;
    client->reason = error;
  };
  auto connection = engine->connect(address, options);
  if (!connection) return fail(connection.error());

  const std::uint64_t begin = client->clock.now();
  Idler idler(IdleStrategy::yield);
  while (!client->closed && !program::stop_requested()) {
    if (idler.idle(*engine, engine->poll()) != Status::ok) return fail("poll() was misused");
    if (client->due) client->send_next();
  }
  const auto took = client->clock.duration(client->clock.now() - begin);
  if (client->wrong) return fail("a reply differs from what was sent");
  if (client->refusal != Status::ok) {
    return fail(fmt::format("cannot send {} bytes: {}", size, to_string(client->refusal)));
  }
  if (program::stop_requested()) return fail("interrupted");
  if (client->reason.status != Status::ok) return fail(client->reason);
  if (client->number != count) {
    return fail(fmt::format("{} ended after {} of {} round trips", address, client->number, count));
  }
  print(*client, std::chrono::duration<double>(took).count());
  return program::kDone;
}

// ---- both -------------------------------------------------------------------------------------

int run_both(std::uint64_t count, std::size_t size) {
  // Fork first, open engines after: an engine belongs to the process and thread that opened it.
  program::ServerChild child(
      [](int announce) { return serve("127.0.0.1:0", /*once=*/true, announce); });
  const int code = run_client(child.address(), count, size);
  if (code != program::kDone) return code;
  return child.wait() == 0 ? program::kDone : fail("the server failed");
}

}  // namespace

int main(int argc, char** argv) {
  program::name = "echo";
  program::log_to_stderr();
  program::catch_stop_signals();

  CLI::App app("Sends messages back and forth and measures the round trip.", "echo");
  app.require_subcommand(1);
  std::string address = program::kDefaultAddress;
  std::uint64_t count = 100'000;
  std::size_t size = 32;
  bool once = false;

  CLI::App* server = app.add_subcommand("server", "send every message back, until interrupted");
  server->add_option("address", address, "a.b.c.d:port or [v6]:port")->capture_default_str();
  server->add_flag("--once", once, "end when the first client is gone");
  CLI::App* client = app.add_subcommand("client", "send messages to a server, one at a time");
  client->add_option("address", address, "a.b.c.d:port or [v6]:port")->capture_default_str();
  CLI::App* both = app.add_subcommand("both", "run a server and a client in two processes");
  for (CLI::App* sender : {client, both}) {
    sender->add_option("-n,--count", count, "messages")
        ->check(CLI::Range(program::kOne, program::kMostCount))
        ->capture_default_str();
    sender->add_option("-s,--size", size, "bytes per message")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
  }
  int code = 0;
  if (!program::parse_arguments(app, argc, argv, code)) return code;
  if (*server) return serve(address, once, -1);
  if (*client) return run_client(address, count, size);
  try {
    return run_both(count, size);
  } catch (const program::Failure& failure) {
    return fail(failure.what());
  }
}
