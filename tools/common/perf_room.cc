#include "common/perf_room.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string_view>

#include "common/perf_calls.h"
#include "common/perf_protocol.h"

namespace spinwire::tools {
namespace {

/// Pools are cut into chunks, which blocks of up to a quarter share.
constexpr std::uint64_t kChunk = 2u << 20;
constexpr std::uint64_t kSmallestBlock = 256;
constexpr std::uint64_t kControlWords = 64;  ///< before each block

/// Bytes of a pool for so many blocks, and a few for others.
std::uint64_t pool_bytes(std::uint64_t size, std::uint64_t count) {
  std::uint64_t chunks = 0;
  if (size <= kChunk / 4) {
    const std::uint64_t block = std::max(kSmallestBlock, std::bit_ceil(size)) + kControlWords;
    const std::uint64_t per_chunk = kChunk / block;
    chunks = (count + per_chunk - 1) / per_chunk;
  } else {
    chunks = count * ((size + kControlWords + kChunk - 1) / kChunk);
  }
  return (chunks + 2) * kChunk;
}

class Room {
 public:
  Room(Config& config, const PerfOptions& options, const GivenSettings& given)
      : config_(config),
        given_(given),
        size_(options.size),
        reply_size_(options.reply_size),
        window_(options.window),
        sessions_(options.sessions),
        one_thread_(options.one_thread) {}

  void for_messages() {
    raise_queues();
    raise_receives();
    // An echo may come before the completion of its message, so each end has twice the window.
    raise("memory.send_bytes", config_.memory.send_bytes, pool_bytes(size_, 2 * window_));
    if (size_ <= config_.connections.eager_bytes) return;
    raise("memory.rendezvous_bytes", config_.memory.rendezvous_bytes, pool_bytes(size_, window_));
    raise("memory.windows", config_.memory.windows, std::min(2 * window_, kMostWindows));
  }
  void for_one_sided(bool is_server) {
    raise_queues();
    // One block with a place for each operation.
    const std::uint64_t bytes = (window_ * perf_stride(size_) / kChunk + 3) * kChunk;
    raise("memory.send_bytes", config_.memory.send_bytes, bytes);
    if (is_server) raise("memory.lease_bytes", config_.memory.lease_bytes, bytes);
  }
  void for_calls() {
    raise("rpc.sessions", config_.rpc.sessions, sessions_);
    // One client has them all.
    raise("rpc.sessions_per_source", config_.rpc.sessions_per_source, config_.rpc.sessions);
    raise("connections.maximum_per_source", config_.connections.maximum_per_source,
          config_.connections.maximum);
    std::uint64_t send_bytes = pool_bytes(size_, window_);
    if (reply_size_ > kPerfShort) {
      send_bytes += pool_bytes(reply_size_, window_);
      raise("memory.lease_bytes", config_.memory.lease_bytes, pool_bytes(reply_size_, window_));
    }
    if (size_ > kPerfShort)
      raise("memory.rendezvous_bytes", config_.memory.rendezvous_bytes, pool_bytes(size_, window_));
    raise("memory.send_bytes", config_.memory.send_bytes, send_bytes);
  }

  /// A message that is too long is refused, whatever room there is.
  [[nodiscard]] bool is_too_long() const { return size_ > config_.connections.max_message_bytes; }
  [[nodiscard]] bool one_thread() const { return one_thread_; }

 private:
  static constexpr std::uint64_t kMostWindows = 65536;
  static constexpr std::uint64_t kDeepestQueue = 32768;

  /// Answers by how much it was raised.
  template <typename Value>
  std::uint64_t raise(std::string_view setting, Value& value, std::uint64_t least) {
    if (value >= least || given_.has(setting)) return 0;
    const std::uint64_t before = value;
    value = static_cast<Value>(least);
    return least - before;
  }
  /// All operations of the window can be in flight.
  void raise_queues() {
    raise("queues.send_depth", config_.queues.send_depth, std::min(window_, kDeepestQueue));
    const std::uint64_t more =
        raise("queues.operations", config_.queues.operations, 2 * window_ + 64);
    raise("queues.completion_depth", config_.queues.completion_depth,
          config_.queues.completion_depth + more);
  }
  /// The peer may send a whole window of messages at once.
  void raise_receives() {
    const std::uint64_t credits = std::min(window_, kDeepestQueue / 2);
    const std::uint64_t more =
        raise("queues.receive_depth", config_.queues.receive_depth, credits + credits / 2);
    raise("queues.completion_depth", config_.queues.completion_depth,
          config_.queues.completion_depth + more);
    raise("connections.credits", config_.connections.credits,
          std::min<std::uint64_t>(credits, config_.queues.receive_depth));
    if (more == 0) return;
    raise("memory.receive_bytes", config_.memory.receive_bytes,
          2 * pool_bytes(config_.connections.eager_bytes, config_.queues.receive_depth));
  }

  Config& config_;
  const GivenSettings& given_;
  std::uint64_t size_;
  std::uint64_t reply_size_;
  std::uint64_t window_;
  std::uint64_t sessions_;
  bool one_thread_;
};

}  // namespace

void make_room(Config& config, const PerfOptions& options, const GivenSettings& given) {
  Room room(config, options, given);
  switch (options.op) {
    case PerfOp::send:
      if (!room.is_too_long()) room.for_messages();
      break;
    case PerfOp::call:
      if (!room.is_too_long()) room.for_calls();
      break;
    default:
      room.for_one_sided(room.one_thread());
  }
}

void make_room_for_all(Config& config, const PerfOptions& options, const GivenSettings& given) {
  Room room(config, options, given);
  if (room.is_too_long()) return;
  room.for_messages();
  room.for_one_sided(/*is_server=*/true);
  room.for_calls();
}

}  // namespace spinwire::tools
