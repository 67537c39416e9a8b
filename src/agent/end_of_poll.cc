// The end of a poll, and the agents' part of the control step. Hot.
#include "agent/agent.h"
#include "agent/connecting.h"
#include "agent/credit.h"
#include "agent/in_place.h"
#include "agent/raw_queue.h"
#include "agent/receive_slots.h"
#include "agent/rendezvous.h"
#include "agent/room_waiters.h"

namespace spinwire::agent {

std::uint32_t run_deferred_work(EngineContext& ctx) noexcept {
  if (ctx.receive_shortage != 0) [[unlikely]]
    fill_empty_slots(ctx);
  // Post receives first: credit is advertised for them.
  if (ctx.receives.count() >= ctx.list_length) post_receives(ctx);
  if (ctx.queued_agents != 0) [[unlikely]] {
    if (ctx.raw != nullptr) post_queued_raw_receives(ctx);
    post_rendezvous_reads(ctx);
  }
  flush_in_poll(ctx);
  std::uint32_t ended = 0;
  if (!ctx.ran_agents.empty()) {
    ended = end_ran_operations(ctx);
    // A READ that has ended is followed by the next of a long message.
    if (ctx.queued_agents != 0) [[unlikely]]
      post_rendezvous_reads(ctx);
    flush_in_poll(ctx);
  }
  if (ctx.end_of_poll_list.count() != 0) {
    visit_listed_agents(ctx);
    // Run callbacks last, so that operations that they cancel are listed for the next poll.
    if (!ctx.cancellations.empty()) run_cancel_callbacks(ctx);
    if (ctx.raw != nullptr) run_posted_callbacks(ctx);
    flush_in_poll(ctx);
  }
  if (!ctx.room_waiters.empty()) [[unlikely]] {
    run_room_callbacks(ctx);
  }
  await_ran_operations(ctx);
  return ended;
}

bool awaits_unannounced(const EngineContext& ctx) noexcept {
  return ctx.sleeps_for_credit != 0 || has_deferred_work(ctx) || ctx.receive_shortage != 0 ||
         !ctx.credit_waiters.empty() || !ctx.room_waiters.empty() ||
         !ctx.rendezvous->buffer_waiters.empty() || has_setup_work(ctx) || has_lease_work(ctx);
}

std::uint32_t run_upkeep(EngineContext& ctx) noexcept {
  const bool has_work = ctx.receive_shortage != 0 || !ctx.room_waiters.empty();
  const std::uint32_t ended = has_work ? run_deferred_work(ctx) : 0;
  renew_spare_blocks(ctx);
  end_lost_connections(ctx);
  return ended;
}

}  // namespace spinwire::agent
