#include "engine/pool_sizes.h"

#include <algorithm>

#include "agent/own_receives.h"
#include "agent/receive_slots.h"
#include "config/queue_sizing.h"
#include "rpc/receive_reservation.h"
#include "rpc/transport/datagram_port.h"
#include "spinwire/footprint.h"

namespace spinwire {
namespace engine {
namespace {

constexpr std::uint64_t whole_chunks(std::uint64_t bytes) noexcept {
  return bytes / memory::kChunkBytes * memory::kChunkBytes +
         (bytes % memory::kChunkBytes != 0 ? memory::kChunkBytes : 0);
}

bool shares_receives(const Config& config) noexcept {
  return config.queues.shared_receive_queue == SharedReceiveQueue::automatic;
}

void add_pools(Footprint& sizes, const Config& config) noexcept {
  std::array<std::uint64_t, memory::kPoolCount> pools = pool_bytes(config);
  for (std::uint64_t& bytes : pools) sizes.pool_bytes += bytes = whole_chunks(bytes);
  const auto of = [&](memory::PoolId pool) { return pools[static_cast<std::size_t>(pool)]; };
  sizes.send_bytes = of(memory::PoolId::send);
  sizes.receive_bytes = of(memory::PoolId::receive);
  sizes.lease_bytes = of(memory::PoolId::lease);
  sizes.rendezvous_bytes = of(memory::PoolId::rendezvous);
  sizes.control_bytes = of(memory::PoolId::control);
}

/// A class of blocks takes whole chunks.
std::uint64_t datagram_bytes(const Config& config) noexcept {
  const std::uint64_t per_chunk = memory::kChunkBytes / rpc::kReceiveBlockBytes;
  return (config.rpc.receive_depth + per_chunk - 1) / per_chunk * memory::kChunkBytes;
}

void add_limits(Footprint& sizes, const Config& config) noexcept {
  const Config::Connections& connections = config.connections;
  sizes.connections = connections.maximum;
  std::uint32_t full = 0;
  if (shares_receives(config)) {
    full = config::reservable_receives(config) / connections.credits;
  } else {
    const std::uint32_t slots = agent::own_slots(config);
    sizes.connections = std::min(config.queues.receive_depth / slots, connections.maximum);
    if (agent::own_share(config, slots).credits == connections.credits) full = sizes.connections;
  }
  sizes.connections_with_all_credits = std::min(full, sizes.connections);
  sizes.sessions_with_whole_window = std::min(
      rpc::served_receive_budget(config::datagram_receive_budget(config)) / config.rpc.window,
      config.rpc.sessions);
  if (sizes.longest_message_bytes != 0)
    sizes.longest_messages = sizes.rendezvous_bytes / sizes.longest_message_bytes;
}

}  // namespace

std::array<std::uint64_t, memory::kPoolCount> pool_bytes(const Config& config) noexcept {
  // The control pool: a credit cell per connection, the staging room of each operation and of each
  // datagram of remote calls. The rest is for messages about long calls when the send pool is
  // empty.
  const std::uint64_t control =
      kCellBytes * config.connections.maximum + 2 * agent::staging_bytes(config) +
      2 * config.rpc.send_depth * rpc::kLineBytes + 3 * memory::kChunkBytes;
  return {config.memory.send_bytes, config.memory.receive_bytes, config.memory.lease_bytes,
          config.memory.rendezvous_bytes, control};
}

}  // namespace engine

Footprint footprint(const Config& config) noexcept {
  Footprint sizes;
  engine::add_pools(sizes, config);
  sizes.completion_entries = config::completions_needed(config);
  sizes.completion_entries_with_calls = config::completions_needed_with_calls(config);
  sizes.receive_entries = config.queues.receive_depth + config::own_domain_receives(config);
  sizes.send_entries = config.queues.send_depth;
  sizes.receive_bytes_needed = config::receive_pool_needed(config);
  sizes.receive_bytes_needed_with_calls =
      sizes.receive_bytes_needed + engine::datagram_bytes(config);
  sizes.connection_bytes =
      config.connections.credits * config::receive_block_bytes(config) + engine::kCellBytes;
  sizes.longest_message_bytes = config::longest_message_bytes(config);
  engine::add_limits(sizes, config);
  return sizes;
}

}  // namespace spinwire
