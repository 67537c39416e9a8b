#include "config/queue_sizing.h"

#include <algorithm>
#include <bit>

#include "memory/arena.h"

namespace spinwire::config {

std::uint32_t receives_per_own_domain(const Config& config) noexcept {
  return config.connections.credits + config.queues.receive_postlist;
}

std::uint64_t own_domain_receives(const Config& config) noexcept {
  if (config.queues.shared_receive_queue == SharedReceiveQueue::off) return 0;
  return std::uint64_t{config.connections.own_domains} * receives_per_own_domain(config);
}

std::uint64_t rendezvous_requests(const Config& config) noexcept {
  const bool rendezvous = config.connections.max_message_bytes > config.connections.eager_bytes;
  return rendezvous || config.leases.maximum != 0 ? kRendezvousRecords : 0;
}

std::uint32_t half_open_connections(const Config::Connections& config) noexcept {
  return std::max(config.maximum / 4, 1u);
}

std::uint32_t internal_operations(const Config& config) noexcept {
  return kControlRequests * config.connections.maximum + kRendezvousRecords;
}

std::uint32_t reservable_receives(const Config& config) noexcept {
  return config.queues.receive_depth - config.queues.receive_postlist - kUnreservedReceives;
}

std::uint64_t receive_block_bytes(const Config& config) noexcept {
  return memory::small_block_bytes(config.connections.eager_bytes);
}

std::uint64_t receive_pool_needed(const Config& config) noexcept {
  const std::uint64_t blocks =
      (config.queues.receive_depth + own_domain_receives(config)) * receive_block_bytes(config);
  return blocks + blocks / 4;
}

std::uint64_t longest_message_bytes(const Config& config) noexcept {
  const std::uint64_t message = config.connections.max_message_bytes;
  if (message <= config.connections.eager_bytes) return 0;
  return (message + memory::kHeadroom + memory::kChunkBytes - 1) & ~(memory::kChunkBytes - 1);
}

std::uint32_t datagram_receive_budget(const Config& config) noexcept {
  return config.rpc.receive_depth - config.rpc.receive_depth / 4;
}

// A work request has at most one completion, so that this many entries always suffice.
std::uint64_t completions_needed(const Config& config) noexcept {
  return std::uint64_t{config.queues.operations} + config.queues.receive_depth +
         own_domain_receives(config) +
         std::uint64_t{kControlRequests} * config.connections.maximum + rendezvous_requests(config);
}

std::uint64_t completions_needed_with_calls(const Config& config) noexcept {
  return completions_needed(config) + config.rpc.send_depth + config.rpc.receive_depth;
}

}  // namespace spinwire::config
