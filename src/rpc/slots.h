// A call takes a slot of its session, and releases it for the next call. Hot.
#pragma once

#include <cstring>
#include <utility>

#include "base/copy.h"
#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Releases the block of a payload, if it has one.
inline void release_payload(Payload& payload) noexcept {
  if (payload.block == nullptr) [[likely]]
    return;
  detail::release(std::exchange(payload.block, nullptr));
  payload.in = {};
}
/// Ends a payload; the block of a copy serves later copies.
[[gnu::always_inline]] inline void end_payload(Rpc& r, Payload& payload) noexcept {
  if (payload.block == nullptr) [[likely]]
    return;
  detail::Block* const block = std::exchange(payload.block, nullptr);
  std::exchange(payload.in, {}).is_copy != 0 ? r.copy_blocks.give(block) : detail::release(block);
}

/// Fills an empty payload: copies a short one, else references its block. Returns false if the send
/// pool is empty.
[[gnu::always_inline]] inline bool store_payload(Rpc& r, Payload& payload, const std::byte* data,
                                                 std::size_t size, Block* block) noexcept {
  if (size <= kSlotPayloadBytes) [[likely]] {
    base::copy_small(payload.text, data, size);
    return true;
  }
  payload.in.is_copy = block == nullptr ? 1 : 0;
  if (block != nullptr) {
    detail::retain(block);
  } else {
    block = r.copy_blocks.take(size);
    if (block == nullptr && (block = allocate_to_send(r, size)) == nullptr) [[unlikely]]
      return false;
    if (size <= base::kLongestLine) {
      base::copy_line(block->payload, data, size);
    } else {
      std::memcpy(block->payload, data, size);
    }
    data = block->payload;
  }
  payload.block = block;
  payload.in.data = data;
  return true;
}

inline std::uint64_t bit(std::uint32_t slot) noexcept { return std::uint64_t{1} << slot; }

/// Whether a call uses the slot.
inline bool is_busy(const ClientSession& c, std::uint32_t slot) noexcept {
  return (c.free_slots & bit(slot)) == 0;
}

/// A free slot of a session that may send one more call.
inline std::uint32_t free_slot(const ClientSession& c) noexcept {
  return static_cast<unsigned>(__builtin_ctzll(c.free_slots));
}

/// Stores a call in its slot or backlog entry. Returns false, and stores nothing, if the send pool
/// is empty.
template <typename Kept>
[[gnu::always_inline]] inline bool store_call(Rpc& r, ClientSession& c, const CallRequest& call,
                                              const ReplyCallback& done, Kept& k) noexcept {
  if (!store_payload(r, k.payload, call.data, call.size, call.block)) [[unlikely]]
    return false;
  k.method = call.method;
  k.size = static_cast<decltype(k.size)>(call.size);
  k.id = ++c.last_call_id;
  k.deadline = call.deadline;
  k.done = done;
  ++r.stats.calls;
  return true;
}

/// Releases the slot for the next call, whose number is higher by the window. A reply to the
/// released call is late from now on.
inline void release_slot(Rpc& r, ClientSession& c, ClientSlot& call, std::uint32_t slot) noexcept {
  c.free_slots |= bit(slot);
  if (--c.in_flight == 0) [[unlikely]]
    r.retransmission_queue.end(c.retransmission_place);
  --r.reserved_receives;
  end_payload(r, call.payload);
  call.number += c.window;
}

}  // namespace spinwire::rpc
