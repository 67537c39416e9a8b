// Two engines on one thread with many sessions between them, and calls of 32 bytes spread over the
// sessions at random.
#pragma once

#include <cstdint>
#include <vector>

#include "common/random.h"
#include "common/setup.h"

namespace spinwire::bench {

class ManySessions {
 public:
  /// Opens the sessions and then keeps `window` calls in flight.
  ManySessions(Config config, std::uint32_t sessions, std::uint32_t window);
  ManySessions(const ManySessions&) = delete;
  ManySessions& operator=(const ManySessions&) = delete;
  ~ManySessions();

  void poll() noexcept {
    (void)client_.poll();
    (void)server_.poll();
  }
  [[nodiscard]] std::uint64_t done() const noexcept { return done_; }

 private:
  void open(std::uint32_t sessions);
  void call_next() noexcept;
  void take(const Reply& reply) noexcept;
  [[nodiscard]] std::uint32_t pick() noexcept { return random_.below(sessions_.size()); }

  bool ending_ = false;
  std::uint64_t done_ = 0;
  Random random_;
  std::vector<Session> sessions_;
  Session next_;  ///< called next; prefetched one call ahead
  std::uint32_t ready_ = 0;
  Config config_;
  Engine server_;
  Engine client_;
  Listener listener_;
};

}  // namespace spinwire::bench
