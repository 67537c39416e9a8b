// What the ends of peer-spinwire have in common: an engine with pools for the measurement, a
// listener and the buffers of the requests. Only Spinwire's public API is used.
#pragma once

#include <bit>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/setup.h"
#include "peers/harness/measure.h"
#include "peers/harness/window.h"
#include "spinwire/spinwire.h"

namespace spinwire::bench {

/// Bytes of a pool that has room for so many blocks, and some to spare.
inline std::uint64_t pool_bytes_for(std::size_t size, std::uint64_t count) {
  // Pools are cut into chunks; a block is a power of two, or whole chunks, with its control words.
  constexpr std::uint64_t kChunk = 2u << 20;
  const std::uint64_t block =
      size + 64 <= kChunk ? std::bit_ceil(size + 64) : (size + 64 + kChunk - 1) / kChunk * kChunk;
  return (block * count + kChunk - 1) / kChunk * kChunk + 4 * kChunk;
}

/// The configuration of the environment, with pools for the measurement and no larger: to fill them
/// takes longer than to measure.
inline Config config_for(const Options& o) {
  Config config = must(Config::load());
  const std::size_t longest = std::max(o.size, o.reply_size);
  // An end may be client and server, with requests and replies of a whole window.
  const std::uint64_t both = pool_bytes_for(longest, 2 * std::uint64_t{o.window});
  config.memory.send_bytes = std::max(config.memory.send_bytes, both);
  config.memory.rendezvous_bytes = longest > config.connections.eager_bytes ? both : 0;
  config.memory.lease_bytes = o.is_one_sided() ? pool_bytes_for(o.window * stride_of(o.size), 1)
                                               : pool_bytes_for(o.reply_size, o.window);
  config.connections.max_message_bytes =
      std::max(config.connections.eager_bytes, static_cast<std::uint32_t>(longest));
  return config;
}

class SpinwireEnd : public PeerNodeBase {
 public:
  [[nodiscard]] std::uint64_t done() const { return window_.done(); }
  [[nodiscard]] std::uint64_t bad() const { return window_.bad(); }

 protected:
  SpinwireEnd(const Options& options, Role role)
      : options_(options),
        role_(role),
        window_(options),
        engine_(must(Engine::open(config_for(options)))) {
    for (std::uint32_t i = 0; role.is_client && i < options.window; ++i)
      requests_.push_back(allocate(options.size));
  }

  Buffer allocate(std::size_t size, Pool pool = Pool::send) {
    Buffer buffer = engine_.allocate(std::max<std::size_t>(size, kSlotPayloadBytes), pool);
    if (!buffer) give_up("a pool has no room for " + std::to_string(size) + " bytes");
    std::memset(buffer.data(), 3, buffer.size());
    (void)buffer.resize(size);
    return buffer;
  }
  void poll() {
    if (engine_.poll() < 0) give_up("an engine refuses to be polled");
  }
  /// Hands each request that may go out to `send` and rings one doorbell for all that it accepted.
  template <typename Send>
  void send_requests(Send&& send) {
    if (!window_.has_unsent()) return;
    const std::uint32_t first = window_.next();
    bool sent_any = false;
    // A slot that waits again within this loop has its turn in the next step.
    do {
      const std::uint32_t slot = window_.next();
      window_.stamp(slot, requests_[slot].data());
      const Status status = send(slot);
      if (status == Status::would_block) break;
      if (status != Status::ok) give_up(to_string(status));
      window_.pop();
      sent_any = true;
    } while (window_.has_unsent() && window_.next() != first);
    if (sent_any) (void)engine_.flush();
  }
  static void give_up_on(const Error& why) {
    if (why.status != Status::ok) give_up(why.message());
  }

  Options options_;
  Role role_;
  Window window_;
  Engine engine_;
  Listener listener_;
  bool ready_ = false;
  std::vector<Buffer> requests_;
};

}  // namespace spinwire::bench
