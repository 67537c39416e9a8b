// Remote calls as echo_pair.h sends messages: a client that keeps a window of 32-byte calls under
// way on one session, and a server that answers each.
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

/// Each reply is checked against its call.
class CallClient {
 public:
  /// Begins to open the session; poll until ready().
  CallClient(Config config, std::string_view address);
  CallClient(const CallClient&) = delete;
  CallClient& operator=(const CallClient&) = delete;

  [[nodiscard]] bool ready() const noexcept { return session_.ready(); }
  [[nodiscard]] Engine& engine() noexcept { return engine_; }

  /// From now on `window` calls are under way at any time. None may be at the call.
  void start(std::uint32_t window) noexcept;
  /// No further calls; poll until outstanding() is 0.
  void stop() noexcept { running_ = false; }
  [[nodiscard]] std::uint64_t done() const noexcept { return done_; }
  [[nodiscard]] std::uint64_t outstanding() const noexcept { return sent_ - done_; }
  void poll() noexcept { engine_.poll(); }

 private:
  void take(std::uint64_t number, const Reply& reply) noexcept;
  void call_next() noexcept;

  // Before the engine, which ends calls when it goes.
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
