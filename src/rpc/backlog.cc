// Short calls that wait for their session's window, or for receives and send entries of the engine.
#include "rpc/backlog.h"

#include <new>
#include <type_traits>

#include "rpc/room_for_calls.h"

namespace spinwire::rpc {
namespace {

void list_blocked_session(Rpc& r, ClientSession& c) noexcept {
  if (!std::exchange(c.is_blocked, true)) r.blocked_sessions.push_back(c);
  r.may_have_deferred_work = true;
}

std::size_t bytes_of_backlog(const ClientSession& c) noexcept {
  return c.backlog_room * sizeof(BackloggedCall);
}

/// Moves the waiting call `w`, which is entry `i`, into a free slot.
std::uint32_t occupy_slot(ClientSession& c, const BackloggedCall& w, std::uint32_t i) noexcept {
  const std::uint32_t slot = free_slot(c);
  ClientSlot& k = c.slots[slot];
  k.method = w.method;
  k.size = static_cast<std::uint16_t>(w.size);
  k.id = w.id;
  k.deadline = w.deadline;
  k.done = w.done;
  k.payload = w.payload;
  erase_from_backlog(c, i);
  return slot;
}

}  // namespace

bool allocate_backlog(Rpc& r, ClientSession& c) noexcept {
  static_assert(std::is_trivially_destructible_v<BackloggedCall>);
  c.backlog_block = r.context.arena->allocate(memory::PoolId::send, bytes_of_backlog(c));
  if (c.backlog_block == nullptr) return false;
  c.backlog = reinterpret_cast<BackloggedCall*>(c.backlog_block->payload);
  return true;
}

void release_backlog(ClientSession& c) noexcept {
  c.backlog = nullptr;
  detail::release(std::exchange(c.backlog_block, nullptr));
}

Status enqueue_call(Rpc& r, ClientSession& c, CallRequest call, const ReplyCallback& done,
                    bool waits_until_ready) noexcept {
  if (is_backlog_full(r, c, c.backlog_count))
    return refuse_for_backlog(r, c, Backlog::inline_calls);
  if (c.backlog == nullptr && !allocate_backlog(r, c))
    return refuse_for_block(r, c, bytes_of_backlog(c));
  BackloggedCall& w = *new (&backlog_at(c, c.backlog_count)) BackloggedCall;
  if (!store_call(r, c, call, done, w)) {
    if (c.backlog_count == 0) release_backlog(c);
    return refuse_for_block(r, c, call.size);
  }
  w.waits_until_ready = waits_until_ready;
  schedule_check(r, c, call.deadline);
  ++c.backlog_count;
  // The session's own window has room: the call waits for receives or send entries of the engine.
  if (c.in_flight < c.send_window) list_blocked_session(r, c);
  return Status::ok;
}

void send_backlog(Rpc& r, ClientSession& c) noexcept {
  const bool waits = waits_until_ready(c, {});
  for (std::uint32_t i = 0; i < c.backlog_count && c.state == SessionState::ready;) {
    const BackloggedCall& w = backlog_at(c, i);
    if (w.outcome) {
      ++i;
      continue;
    }
    if (!can_send(r, c)) break;
    const bool overrides_session = w.waits_until_ready != waits;
    const std::uint32_t slot = occupy_slot(c, w, i);
    ClientSlot& k = c.slots[slot];
    send_request(r, c, k, slot, header_of(c, k), r.context.now);
    if (overrides_session) [[unlikely]]
      k.flags |= kOverridesSession;
  }
  if (c.backlog_count != 0 && c.in_flight < c.send_window) list_blocked_session(r, c);
}

/// Each blocked session has a turn while the engine has receives and room to send. Sessions that
/// still have waiting calls are blocked again.
void resume_blocked_sessions(Rpc& r) noexcept {
  if (r.blocked_sessions.empty()) return;
  const ClientSession* const last = &r.blocked_sessions.back();
  while (r.reserved_receives < r.receive_budget && !r.port->full()) {
    ClientSession& c = r.blocked_sessions.pop_front();
    c.is_blocked = false;
    send_backlog(r, c);
    if (&c == last) break;
  }
}

}  // namespace spinwire::rpc
