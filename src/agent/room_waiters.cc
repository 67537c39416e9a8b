#include "agent/room_waiters.h"

#include <algorithm>
#include <utility>

#include "agent/agent.h"
#include "agent/control_messages.h"
#include "agent/credit.h"
#include "agent/long_messages.h"
#include "agent/rendezvous.h"
#include "agent/submit.h"

namespace spinwire::agent {
namespace {

/// Connections that one poll looks at.
constexpr int kWaitersPerPoll = 16;

void wait_for_room(EngineContext& ctx, Agent& a) noexcept {
  if (std::exchange(a.room.is_waiting, true)) return;
  ctx.room_waiters.push_back(a);
  queue_flush(ctx, a);  // makes the next poll look
}

bool has_block(EngineContext& ctx, std::size_t size) noexcept {
  if (size == 0) return true;
  Block* const block = ctx.arena->allocate(memory::PoolId::send, size);
  if (block != nullptr) detail::release(block);
  return block != nullptr;
}

/// Whether an operation of the kind that was refused would be accepted.
bool has_room(EngineContext& ctx, Agent& a) noexcept {
  if (a.state != ConnectionState::ready) return false;
  if (a.room.needed == Room::control) return can_queue_control(a);
  if (ctx.operations.empty()) return false;
  // A rendezvous message may need two places.
  const std::uint32_t places = a.room.needed >= Room::notice ? 2 : 1;
  if (a.send_queue.used + places > send_limit_of(a)) return false;
  if (a.room.needed == Room::notice && !ctx.operations.has_two()) return false;
  if (a.room.needed != Room::operation && visible_credits(a) == 0) return false;
  if (a.room.needed == Room::rendezvous && lacks_window(ctx, a)) return false;
  return has_block(ctx, a.room.block_bytes);
}

}  // namespace

Agent*& next_room_waiter(Agent& a) noexcept { return a.room.next; }

Status refuse_for_room(EngineContext& ctx, Agent& a, Room needed) noexcept {
  if (!a.handlers.on_writable) return Status::would_block;
  a.room.needed = a.room.is_waiting ? std::max(a.room.needed, needed) : needed;
  wait_for_room(ctx, a);
  return Status::would_block;
}

Status refuse_for_block(EngineContext& ctx, Agent& a, std::size_t size) noexcept {
  // That this message lacked credit, too, does not concern the next one.
  if (a.rendezvous.direct_pause == kLacksCredit) a.rendezvous.direct_pause = 0;
  if (!a.handlers.on_writable) return Status::no_buffer;
  a.room.needed = a.room.is_waiting ? std::max(a.room.needed, Room::message) : Room::message;
  a.room.block_bytes = std::max(a.room.block_bytes, size);
  wait_for_room(ctx, a);
  return Status::no_buffer;
}

void run_room_callbacks(EngineContext& ctx) noexcept {
  const Agent* const last = ctx.room_waiters.empty() ? nullptr : &ctx.room_waiters.back();
  for (int i = 0; i < kWaitersPerPoll && !ctx.room_waiters.empty(); ++i) {
    Agent& a = ctx.room_waiters.pop_front();
    const bool is_last = &a == last;
    if (!has_room(ctx, a)) {
      ctx.room_waiters.push_back(a);
    } else {
      a.room = {};
      use_next_handlers(a);
      if (a.handlers.on_writable) a.handlers.on_writable(handle(ctx, a));
    }
    if (is_last) break;
  }
  flush_queued_agents(ctx);
  if (!ctx.room_waiters.empty()) queue_flush(ctx, *ctx.room_waiters.front());
}

void stop_waiting_for_room(EngineContext& ctx, Agent& a) noexcept {
  if (a.room.is_waiting) ctx.room_waiters.erase(a);
  a.room = {};
}

}  // namespace spinwire::agent
