#include "config/queue_sizing.h"

#include <algorithm>

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

// A work request has at most one completion, so that this many entries always suffice.
std::uint64_t completions_needed(const Config& config) noexcept {
  return std::uint64_t{config.queues.operations} + config.queues.receive_depth +
         own_domain_receives(config) +
         std::uint64_t{kControlRequests} * config.connections.maximum + rendezvous_requests(config);
}

}  // namespace spinwire::config
