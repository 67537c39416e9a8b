#include "common/setup.h"

#include <fmt/core.h>

#include <cstdio>
#include <cstdlib>

namespace spinwire::bench {

void give_up(std::string_view why) {
  fmt::print(stderr, "cannot measure: {}\n", why);
  std::_Exit(1);
}

Config hot_path_config() {
  Config config;
  config.engine.control = ControlMode::manual;
  return config;
}

namespace {
bool time_is_stepped = false;
}

Config many_connections_config(std::uint32_t connections) {
  Config config = hot_path_config();
  config.connections.maximum = connections;
  config.queues.send_depth = 16;  // the completion queue must fit all connections
  config.queues.completion_depth = 1u << 20;
  config.queues.receive_depth = 16384;  // one at least for each connection
  config.memory.receive_bytes = 96u << 20;
  return config;
}

Engine open_engine(const Config& config) {
  return must(Engine::open(config, time_is_stepped ? Clock::manual(&stepped_time) : Clock::real()));
}

void step_time() { time_is_stepped = true; }

void drive(Engine& engine) {
  advance_time();
  if (engine.poll() < 0) give_up("poll() failed");
  if (engine.config().engine.control == ControlMode::manual) engine.poll_control();
}

WaitLimit::WaitLimit() noexcept
    : clock_(Clock::real()), end_(clock_.now() + clock_.ticks(std::chrono::minutes(1))) {}

bool WaitLimit::over() const noexcept { return clock_.now() > end_; }

Pair::Pair(const Config& config, std::uint32_t count)
    : near(open_engine(config)), far(open_engine(config)) {
  ListenOptions listening;
  listening.handlers.on_ready = [this](Connection accepted) { accepted_ = accepted; };
  listening.handlers.on_message = [this](Connection, Message&) { ++arrived; };
  listener_ = must(far.listen("127.0.0.1:0", listening));
  ConnectOptions options;
  options.handlers.on_ready = [this](Connection) { ++ready_; };
  options.handlers.on_message = [this](Connection, Message&) { ++answered_; };
  options.handlers.on_closed = [](Connection, const Error& why) {
    if (why.status != Status::ok) give_up(why.message());
  };
  // Opens a few at a time: the server limits concurrent handshakes.
  constexpr std::uint32_t kAtOnce = 16;
  const auto step = [this] {
    drive(near);
    drive(far);
  };
  while (connections.size() < count) {
    connections.push_back(must(near.connect(listener_.address(), options)));
    run_until("connections are being made", step,
              [&] { return connections.size() - ready_ < kAtOnce; });
  }
  run_until("connections are being made", step,
            [&] { return ready_ == count && far.stats().accepted == count; });
  for (int i = 0; i < 1000; ++i) step();  // lets work after the handshakes finish
}

void Pair::send_back() {
  Buffer buffer = far.allocate(8);
  const std::uint64_t before = answered_;
  if (const Status status = accepted_.send(buffer.slice(), {}); status != Status::ok)
    give_up(to_string(status));
  const auto step = [this] {
    drive(near);
    drive(far);
  };
  run_until("a message goes from far to near", step, [&] { return answered_ != before; });
  for (int i = 0; i < 1000; ++i) step();  // lets its acknowledgement come back
}

std::uint64_t operations_asked(int argc, char** argv) {
  const std::uint64_t asked = argc < 2 ? 0 : std::strtoull(argv[argc - 1], nullptr, 10);
  if (asked == 0) give_up("the last argument is the number of operations");
  return asked;
}

}  // namespace spinwire::bench
