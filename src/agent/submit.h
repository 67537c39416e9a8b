// Acceptance of the application's operations; one copy per kind, so that each has no branch for
// the others. Hot.
#pragma once

#include <cstdint>

#include "agent/agent.h"

namespace spinwire::agent {

constexpr bool uses_credit(OperationKind kind) noexcept {
  return kind == OperationKind::send || kind == OperationKind::send_imm ||
         kind == OperationKind::write_imm || kind == OperationKind::credit_return;
}
constexpr bool has_header(OperationKind kind) noexcept {
  return kind == OperationKind::send || kind == OperationKind::send_imm ||
         kind == OperationKind::credit_return || kind == OperationKind::goodbye;
}

inline constexpr std::uint64_t kLongestTransfer = std::uint64_t{1} << 30;  // of one work request

/// Appends a filled operation to its agent's order.
inline void append(Agent& a, Operation& op) noexcept {
  op.next = nullptr;
  op.agent = &a;
  (a.first == nullptr ? a.first : a.last->next) = &op;
  a.last = &op;
  if (a.unposted == nullptr) a.unposted = &op;
  ++a.sq_used;
}

inline void defer(Shared& s, Agent& a) noexcept {
  if (a.dirty) return;
  a.dirty = true;
  s.dirty.add(a);
}

struct Request {
  detail::Block* block;
  std::byte* data;
  std::size_t size;
  const RemoteRegion* remote;  ///< null for messages
  std::uint32_t immediate;
  const CompletionCallback& done;
  bool defer;  ///< post with the next flush
};

template <OperationKind kind>
inline Status check_request(const Agent& a, const Request& r) noexcept {
  const std::size_t size = r.size;
  if (r.block == nullptr) [[unlikely]]
    return Status::out_of_bounds;
  if constexpr (kind == OperationKind::send || kind == OperationKind::send_imm) {
    return size <= a.max_message ? Status::ok : Status::message_too_long;
  } else {
    if (!*r.remote || size > r.remote->length || size > kLongestTransfer) [[unlikely]]
      return Status::out_of_bounds;
    constexpr Access kNeed =
        kind == OperationKind::read ? Access::remote_read : Access::remote_write;
    return allows(r.remote->access, kNeed) ? Status::ok : Status::remote_access;
  }
}

/// Accepts one of the application's operations, or answers why not and takes nothing.
template <OperationKind kind>
[[gnu::always_inline]] inline Status submit(Shared& s, Agent& a, const Request& r) noexcept {
  if (a.state != ConnectionState::ready) [[unlikely]]
    return Status::not_connected;
  if (const Status status = check_request<kind>(a, r); status != Status::ok) [[unlikely]]
    return status;
  if (a.sq_used >= a.sq_room) [[unlikely]]
    return Status::would_block;
  if (uses_credit(kind) && a.sent == a.send_limit && !find_credit(s, a)) [[unlikely]]
    return Status::would_block;
  Operation* const acquired = s.operations.acquire();
  if (acquired == nullptr) [[unlikely]]
    return Status::would_block;
  Operation& op = *acquired;
  detail::retain(r.block);
  op.kind = kind;
  op.beside = false;
  op.wants_credit = false;
  op.data = r.data;
  op.length = static_cast<std::uint32_t>(r.size);
  op.block = r.block;
  op.lkey = r.block->lkey;
  if constexpr (has_header(kind)) {
    // The header goes beside the payload if the slice begins there and no operation uses the room.
    if (r.block->header_in_use == 0 &&
        r.data == reinterpret_cast<std::byte*>(r.block) + sizeof(Block)) [[likely]] {
      r.block->header_in_use = 1;
      op.beside = true;
    }
  }
  if constexpr (kind == OperationKind::send_imm || kind == OperationKind::write_imm)
    op.immediate = r.immediate;
  if constexpr (kind != OperationKind::send && kind != OperationKind::send_imm) {
    op.remote_address = r.remote->address;
    op.rkey = r.remote->rkey;
  }
  op.done = r.done;
  if constexpr (uses_credit(kind)) {
    if (++a.sent == a.send_limit) [[unlikely]]
      op.wants_credit = !learn_credit(a);
  }
  append(a, op);
  if (r.defer) {
    defer(s, a);
  } else {
    flush(s, a);
  }
  return Status::ok;
}

}  // namespace spinwire::agent
