// The serving end of spinwire-perf, for many clients at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/perf_rpc.h"
#include "common/perf_served.h"
#include "common/spin.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

class PerfServer {
 public:
  /// Serves up to `most_clients` at once; others are turned away, and try again. The server must
  /// stay where it is from listen() on.
  PerfServer(Engine engine, std::uint32_t most_clients)
      : engine_(std::move(engine)), most_clients_(most_clients), calls_(engine_, news_) {}
  PerfServer(const PerfServer&) = delete;
  PerfServer& operator=(const PerfServer&) = delete;
  /// Closing the engine runs the callbacks of outstanding operations, so it happens while all
  /// members exist.
  ~PerfServer() {
    listener_ = {};
    engine_ = Engine();
  }

  Result<void> listen(const std::string& address);
  [[nodiscard]] std::string address() const { return listener_.address(); }

  /// Polls and acts on the result. Returns what Engine::poll() returns. Hot while a client
  /// measures.
  int turn();
  [[nodiscard]] Engine& engine() noexcept { return engine_; }
  /// Whether a client is being measured, so that every turn counts.
  [[nodiscard]] bool measuring() const noexcept { return is_measuring_; }
  /// Whether remote calls can be measured, or the reason why not.
  [[nodiscard]] const Result<void>& serves_calls() const noexcept { return serves_calls_; }
  /// Clients that have gone, and how many of them failed.
  [[nodiscard]] std::uint64_t served() const noexcept { return served_ + calls_.served(); }
  [[nodiscard]] std::uint64_t failed() const noexcept { return failed_ + calls_.failed(); }
  /// Lines about clients that begin and end, to print.
  [[nodiscard]] bool has_news() const noexcept { return !news_.empty(); }
  [[nodiscard]] std::string next_news();

 private:
  void on_accept(Connection client);
  void remove_gone();
  [[nodiscard]] bool has_room() const noexcept {
    return clients_.size() + calls_.running() < most_clients_;
  }

  Engine engine_;
  std::uint32_t most_clients_;
  Listener listener_;
  PerfNews news_;
  bool is_measuring_ = false;
  std::uint32_t turns_ = 0;
  std::vector<std::unique_ptr<ServedClient>> clients_;
  IdleCare idle_care_;
  RpcPerfServer calls_;
  Result<void> serves_calls_;
  std::uint64_t served_ = 0;
  std::uint64_t failed_ = 0;
};

}  // namespace spinwire::tools
