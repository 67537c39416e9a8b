// The records of operations in flight, named by index and generation in work-request ids. Hot.
#pragma once

#include <cstdint>
#include <memory>

#include "base/check.h"
#include "spinwire/buffer.h"
#include "spinwire/connection.h"

namespace spinwire::agent {

enum class OperationKind : std::uint8_t {
  send,
  send_imm,
  write,
  write_imm,
  read,
  // The agent's own; the application's come before.
  credit_return,
  goodbye,
  credit_write,
  keepalive,
};
constexpr bool is_users(OperationKind kind) { return kind <= OperationKind::read; }
inline constexpr std::size_t kOperationKinds = 9;

struct Agent;

/// An accepted operation, from acceptance to its completion callback. Two cachelines: what posting
/// needs, and the callback.
struct alignas(64) Operation {
  Operation* next = nullptr;  ///< in its agent's order, or in the free list
  std::uint64_t wr_id = 0;    ///< generation and index: names this use of the record
  Agent* agent = nullptr;
  std::byte* data = nullptr;
  detail::Block* block = nullptr;
  std::uint32_t length = 0;
  std::uint32_t lkey = 0;
  OperationKind kind = OperationKind::send;
  bool beside = false;  ///< header in the block's headroom, one element with the payload
  bool wants_credit = false;
  bool in_use = false;
  std::uint16_t credits = 0;  ///< credit_return
  std::uint32_t immediate = 0;
  std::uint32_t rkey = 0;
  std::uint64_t remote_address = 0;
  CompletionCallback done;
};
static_assert(sizeof(Operation) == 128);

/// Fixed at construction; the record freed last is used first, while it is in the cache. The
/// agents' own operations have records of their own, so that the application's cannot starve them.
class OperationPool {
 public:
  /// May throw std::bad_alloc. Set-up.
  OperationPool(std::uint32_t users, std::uint32_t agents)
      : records_(std::make_unique<Operation[]>(std::size_t{users} + agents)),
        capacity_(users + agents) {
    for (std::uint32_t i = capacity_; i != 0; --i) {
      Operation& op = records_[i - 1];
      op.wr_id = std::uint64_t{i - 1} << 1;
      Operation*& list = i - 1 < users ? users_ : agents_;
      op.next = list;
      list = &op;
    }
  }

  /// A record for the application, or for an agent; null when those are used up.
  [[nodiscard]] Operation* acquire() noexcept { return take(users_); }
  [[nodiscard]] Operation* acquire_for_agent() noexcept { return take(agents_); }

  void release(Operation& op) noexcept {
    SPINWIRE_CHECK(op.in_use, "a record is released once per use");
    op.in_use = false;
    op.wr_id += std::uint64_t{1} << 32;
    Operation*& list = is_users(op.kind) ? users_ : agents_;
    op.next = list;
    list = &op;
  }

  /// The operation of a work-request id; null when that use of the record is over.
  [[nodiscard]] Operation* find(std::uint64_t wr_id) noexcept {
    const std::uint32_t index = static_cast<std::uint32_t>(wr_id) >> 1;
    if (index >= capacity_) [[unlikely]]
      return nullptr;
    Operation& op = records_[index];
    return op.wr_id == wr_id && op.in_use ? &op : nullptr;
  }

  [[nodiscard]] std::uint32_t index_of(const Operation& op) const noexcept {
    return static_cast<std::uint32_t>(op.wr_id) >> 1;
  }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }

 private:
  static Operation* take(Operation*& list) noexcept {
    Operation* op = list;
    if (op == nullptr) [[unlikely]]
      return nullptr;
    list = op->next;
    op->in_use = true;
    return op;
  }

  std::unique_ptr<Operation[]> records_;
  Operation* users_ = nullptr;
  Operation* agents_ = nullptr;
  std::uint32_t capacity_;
};

}  // namespace spinwire::agent
