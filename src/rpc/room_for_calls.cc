#include "rpc/room_for_calls.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "rpc/client_session.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {
namespace {

/// Sessions that one poll looks at.
constexpr int kWaitersPerPoll = 16;

void wait_for_room(Rpc& r, ClientSession& c) noexcept {
  if (!std::exchange(c.room.is_waiting, true)) r.room_waiters.push_back(c);
  r.may_have_deferred_work = true;
}

/// Whether the send pool has a block. Like an allocation, it has kept replies dropped if it must:
/// their clients may not say for long that they have them. Unlike one, it counts nothing.
bool has_block(Rpc& r, std::size_t size) noexcept {
  constexpr int kMostRounds = 4;
  if (size == 0) return true;
  for (int round = 0; !r.context.arena->has_block(memory::PoolId::send, size); ++round) {
    if (round == kMostRounds || !r.reply_reclaimer.reclaim()) return false;
  }
  return true;
}

/// Whether a call of the kind that was refused would be accepted.
bool has_room(Rpc& r, const ClientSession& c) noexcept {
  if (!may_wait(c, {})) return false;
  if (c.room.inline_calls && is_backlog_full(r, c, c.backlog_count)) return false;
  if (c.room.long_calls && c.connection != nullptr &&
      is_backlog_full(r, c, c.connection->backlog_count))
    return false;
  return has_block(r, c.room.block_bytes);
}

}  // namespace

Status refuse_for_backlog(Rpc& r, ClientSession& c, Backlog which) noexcept {
  if (!c.on_writable) return Status::would_block;
  (which == Backlog::long_calls ? c.room.long_calls : c.room.inline_calls) = true;
  wait_for_room(r, c);
  return Status::would_block;
}

Status refuse_for_block(Rpc& r, ClientSession& c, std::size_t size) noexcept {
  if (!c.on_writable) return Status::no_buffer;
  c.room.block_bytes = std::max(c.room.block_bytes, size);
  wait_for_room(r, c);
  return Status::no_buffer;
}

Status refuse_reply_for_block(Rpc& r, std::size_t size) noexcept {
  RoomForReplies& room = r.room_for_replies;
  if (!room.on_writable) return Status::no_buffer;
  const auto keep_shortest = [size](std::size_t& of) { of = of == 0 ? size : std::min(of, size); };
  keep_shortest(room.block_bytes);
  keep_shortest(room.each_width[static_cast<std::size_t>(std::bit_width(size - 1))]);
  r.may_have_deferred_work = true;
  r.dialogues.wake_soon();
  return Status::no_buffer;
}

void set_reply_writable_handler(Rpc& r, const ReplyWritableCallback& handler) noexcept {
  r.room_for_replies.on_writable = handler;
  if (!handler) r.room_for_replies.wait_for_nothing();
}

namespace {

/// Whether one of the answers finds a block. One that then fails is refused again.
bool has_room_for_reply(Rpc& r) noexcept {
  const RoomForReplies& room = r.room_for_replies;
  for (const std::size_t size : room.each_width) {
    if (size != 0 && r.context.arena->has_block(memory::PoolId::send, size)) return true;
  }
  return has_block(r, room.block_bytes);
}

void run_reply_room_callback(Rpc& r) noexcept {
  RoomForReplies& room = r.room_for_replies;
  if (room.block_bytes == 0 || !has_room_for_reply(r)) return;
  room.wait_for_nothing();
  const ReplyWritableCallback run = room.on_writable;  // the callback may set another one
  run();
}

}  // namespace

void run_room_callbacks(Rpc& r) noexcept {
  run_reply_room_callback(r);
  const ClientSession* const last = r.room_waiters.empty() ? nullptr : &r.room_waiters.back();
  for (int i = 0; i < kWaitersPerPoll && !r.room_waiters.empty(); ++i) {
    ClientSession& c = r.room_waiters.pop_front();
    const bool is_last = &c == last;
    if (!has_room(r, c)) {
      r.room_waiters.push_back(c);
    } else {
      c.room = {};
      c.on_writable(handle(r, c));
    }
    if (is_last) break;
  }
}

void stop_waiting_for_room(Rpc& r, ClientSession& c) noexcept {
  if (c.room.is_waiting) r.room_waiters.erase(c);
  c.room = {};
}

}  // namespace spinwire::rpc
