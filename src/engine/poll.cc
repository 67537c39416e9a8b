// The whole hot path of a poll.
#include "engine/core.h"

namespace spinwire::detail {

std::uint32_t EngineCore::drain_completions() noexcept {
  const int batch = static_cast<int>(shared.config.queues.poll_batch);
  std::uint32_t events = 0;
  for (int round = 0; round < 4; ++round) {
    const int n = ibv_poll_cq(shared.device->cq(), batch, completions.data());
    if (n <= 0) break;
    events += agent::take_completions(shared, completions.data(), n);
    shared.stats.completions += static_cast<std::uint64_t>(n);
    if (n < batch) break;
  }
  return events;
}

int EngineCore::poll() noexcept {
  if (!guard.enter()) [[unlikely]]
    return -static_cast<int>(guard.diagnose());
  shared.now = shared.clock.now();
  std::uint32_t events = drain_completions();
  if (agent::has_work(shared)) agent::finish_poll(shared);
  if (shared.now >= next_control) [[unlikely]]
    events += control_step(shared.now);
  ++polls;
  guard.leave();
  return static_cast<int>(events);
}

Status EngineCore::flush() noexcept {
  if (!guard.owned()) [[unlikely]]
    return guard.diagnose();
  agent::flush_all(shared);
  return Status::ok;
}

}  // namespace spinwire::detail
