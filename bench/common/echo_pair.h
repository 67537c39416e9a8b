// A client that keeps a window of 32-byte requests in flight, and a server that sends each back.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "common/setup.h"

namespace spinwire::bench {

inline constexpr std::uint32_t kMostWindow = 64;

/// Request and reply: a number, which the server increments, and padding.
struct EchoBody {
  std::uint64_t number;
  std::uint64_t ballast[3];
};
static_assert(sizeof(EchoBody) == 32);

class EchoServer {
 public:
  explicit EchoServer(const Config& config);
  EchoServer(const EchoServer&) = delete;
  EchoServer& operator=(const EchoServer&) = delete;

  [[nodiscard]] std::string address() const { return listener_.address(); }
  [[nodiscard]] Engine& engine() noexcept { return engine_; }
  void poll() noexcept {
    engine_.poll();
    if (!unsent_.empty()) [[unlikely]]
      send_unsent();
  }

 private:
  struct Reply {
    Connection to;
    Buffer body;
  };

  static constexpr std::uint32_t kReplies = 256;

  void answer(Connection connection, Message& request);
  void send_unsent();

  Engine engine_;
  Listener listener_;
  std::array<Buffer, kReplies> replies_;
  std::uint32_t next_reply_ = 0;
  std::deque<Reply> unsent_;  ///< while the client grants no credit
};

/// Replies arrive in the order of the requests. Each is checked.
class EchoClient {
 public:
  /// Begins to connect; poll until ready().
  EchoClient(const Config& config, std::string_view address);
  EchoClient(const EchoClient&) = delete;
  EchoClient& operator=(const EchoClient&) = delete;

  [[nodiscard]] bool ready() const noexcept { return connection_.ready(); }
  [[nodiscard]] Engine& engine() noexcept { return engine_; }

  /// Keeps `window` requests in flight from now on. Needs outstanding() to be 0.
  void start(std::uint32_t window) noexcept;
  /// Stops new requests; poll until outstanding() is 0.
  void stop() noexcept { running_ = false; }
  [[nodiscard]] std::uint64_t done() const noexcept { return done_; }
  [[nodiscard]] std::uint64_t outstanding() const noexcept { return sent_ - done_; }
  void poll() noexcept {
    engine_.poll();
    if (unsent_ != 0) [[unlikely]]
      send_unsent();
  }

 private:
  void take(const Message& reply) noexcept;
  bool send_next() noexcept;
  void send_unsent() noexcept;

  Engine engine_;
  Connection connection_;
  std::uint64_t sent_ = 0;
  std::uint64_t done_ = 0;
  std::uint32_t unsent_ = 0;  ///< requests of the window that lack credit
  bool running_ = false;
  std::array<Buffer, kMostWindow> requests_;
};

/// Both ends on one thread.
class EchoPair {
 public:
  explicit EchoPair(const Config& config);

  void poll() noexcept {
    client.poll();
    server.poll();
  }
  /// Starts `window` requests and polls until caches and credits are in a steady state.
  void warm_up(std::uint32_t window);
  /// Stops the requests and polls until none is in flight.
  void settle();

  EchoServer server;
  EchoClient client;
};

}  // namespace spinwire::bench
