// Remote calls of 32 bytes: a client that keeps a window of calls in flight on one session, and a
// server that replies to each. The counterpart of echo_pair.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "common/echo_pair.h"

namespace spinwire::bench {

class CallServer {
 public:
  explicit CallServer(const Config& config);
  CallServer(const CallServer&) = delete;
  CallServer& operator=(const CallServer&) = delete;

  [[nodiscard]] std::string address() const { return listener_.address(); }
  [[nodiscard]] Engine& engine() noexcept { return engine_; }
  void poll() noexcept { engine_.poll(); }

 private:
  Engine engine_;
  Listener listener_;
};

/// Checks each reply against its call.
class CallClient {
 public:
  /// Begins to open the session; poll until ready().
  CallClient(Config config, std::string_view address);
  CallClient(const CallClient&) = delete;
  CallClient& operator=(const CallClient&) = delete;

  [[nodiscard]] bool ready() const noexcept { return session_.ready(); }
  [[nodiscard]] Engine& engine() noexcept { return engine_; }

  /// Keeps `window` calls in flight from now on. Needs outstanding() to be 0.
  void start(std::uint32_t window) noexcept;
  /// Stops new calls; poll until outstanding() is 0.
  void stop() noexcept { running_ = false; }
  [[nodiscard]] std::uint64_t done() const noexcept { return done_; }
  [[nodiscard]] std::uint64_t outstanding() const noexcept { return sent_ - done_; }
  void poll() noexcept { engine_.poll(); }

 private:
  void take(std::uint64_t number, const Reply& reply) noexcept;
  void call_next() noexcept;

  // Declared before the engine, whose destructor ends calls.
  std::uint64_t sent_ = 0;
  std::uint64_t done_ = 0;
  bool running_ = false;
  Session session_;
  Engine engine_;
};

/// Both ends on one thread.
class CallPair {
 public:
  explicit CallPair(const Config& config);

  CallServer server;
  CallClient client;
};

}  // namespace spinwire::bench
