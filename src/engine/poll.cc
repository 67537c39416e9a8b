// The part of a poll that found something: completions, then the end of the poll. A poll that
// finds nothing ends in EngineCore::poll_owned().
#include "engine/engine_core.h"
#include "rpc/transport/datagram_receive.h"

namespace spinwire::detail {

inline std::uint32_t EngineCore::handle_batch(int count) noexcept {
  context.stats.completions += static_cast<std::uint64_t>(count);
  if (count == 1 && rpc::is_batch_completion(completions[0].wr_id))
    return rpc::process_batches(*calls);
  if (rpc_qp_num == 0) return agent::process_completions(context, completions.data(), count);
  return handle_mixed_batch(count);
}

/// Separates the completions of remote calls from those of connections, run by run. Messages that
/// are read in place are released when all have been read.
std::uint32_t EngineCore::handle_mixed_batch(int count) noexcept {
  std::uint32_t events = 0;
  const ibv_wc* const end = completions.data() + count;
  for (const ibv_wc* wc = completions.data(); wc != end;) {
    if (wc->qp_num == rpc_qp_num) {
      wc = rpc::process_completions(*calls, wc, end, events);
      continue;
    }
    const ibv_wc* const first = wc;
    while (++wc != end && wc->qp_num != rpc_qp_num) {
    }
    const int length = static_cast<int>(wc - first);
    if (length == count) return agent::process_completions(context, first, count);
    events += agent::process_part(context, first, length);
  }
  agent::release_what_was_read(context);
  return events;
}

/// A full batch may be followed by more completions.
std::uint32_t EngineCore::handle_further_batches() noexcept {
  constexpr int kMost = 3;
  std::uint32_t events = 0;
  for (int i = 0, count = poll_batch; i < kMost && count == poll_batch; ++i) {
    count = ibv_poll_cq(cq, poll_batch, completions.data());
    if (count > 0) events += handle_batch(count);
  }
  return events;
}

/// The end of a poll in which a callback destroyed the engine.
int EngineCore::finish_destruction(std::uint32_t events) noexcept {
  guard.leave();
  delete this;
  return static_cast<int>(events);
}

/// The rest of a poll with work. `count` completions were already polled.
int EngineCore::poll_busy(int count) noexcept {
  guard.enter_checked();  // callbacks find the engine polling
  if (calls != nullptr) rpc::begin_poll(*calls, schedule.last_poll_before(context.now));
  std::uint32_t events = count > 0 ? handle_batch(count) : 0;
  if (count == poll_batch) [[unlikely]]
    events += handle_further_batches();
  events += agent::end_poll(context);
  if (context.now >= schedule.next_control) [[unlikely]] {
    events += control_step(context.now);
    if (destroyed) return finish_destruction(events);
  }
  schedule.next_wakeup = schedule.next_control;
  if (calls != nullptr) {
    if (rpc::finish_poll(*calls)) [[unlikely]] {
      if (destroyed) return finish_destruction(events);
      schedule.wake_soon();
    }
    rpc::flush(*calls);
  }
  guard.leave();
  return static_cast<int>(events);
}

int EngineCore::poll_after_gap(std::uint64_t now) noexcept {
  if (now < context.now) now = context.clock.now_from(context.now);  // the clock has stepped back
  if (!schedule.is_armed) stalls.on_gap(*this, now);  // else the application has slept
  context.now = now;
  const int n = ibv_poll_cq(cq, poll_batch, completions.data());
  const bool found = (static_cast<std::uint64_t>(n) | agent::listed_work(context)) != 0;
  if (!found && now < schedule.next_wakeup) return 0;
  const EngineSlot& slot = guard.slot();
  const int events = poll_busy(n);
  // A callback may have destroyed the engine: then `this` is gone.
  if (slot.target != nullptr && stalls.is_watching())
    stalls.on_poll_end(*this, context.clock.now());
  return events;
}

int EngineCore::poll() noexcept {
  if (!guard.may_enter()) [[unlikely]]
    return -static_cast<int>(guard.diagnose());
  return poll_owned();
}

Status EngineCore::flush() noexcept {
  if (!guard.owned()) [[unlikely]]
    return guard.diagnose();
  agent::flush_application(context);
  if (calls != nullptr) rpc::post_deferred_calls(*calls);
  return Status::ok;
}

}  // namespace spinwire::detail
