#include "engine/connection_sums.h"

#include <utility>

namespace spinwire::engine {

void ConnectionSums::subtract(const Seen& seen) noexcept {
  if (!seen.is_counted) return;
  messages_sent_ -= seen.messages_sent;
  messages_received_ -= seen.messages_received;
  operations_ -= seen.operations;
  --by_blocker_[static_cast<std::size_t>(seen.blocked_by)];
}

void ConnectionSums::update(const agent::Agent& a, const ConnectionSnapshot& snapshot) noexcept {
  Seen& seen = seen_[agent::id_of(a).index];
  subtract(seen);
  seen = {agent::messages_sent(a), agent::messages_received(a), agent::outstanding(a),
          snapshot.blocked_by, true};
  messages_sent_ += seen.messages_sent;
  messages_received_ += seen.messages_received;
  operations_ += seen.operations;
  ++by_blocker_[static_cast<std::size_t>(seen.blocked_by)];
}

void ConnectionSums::forget(const agent::Agent& a) noexcept {
  subtract(std::exchange(seen_[agent::id_of(a).index], {}));
}

void ConnectionSums::add_to(EngineStats& stats) const noexcept {
  stats.messages_sent += messages_sent_;
  stats.messages_received += messages_received_;
  stats.operations += operations_;
}

}  // namespace spinwire::engine
