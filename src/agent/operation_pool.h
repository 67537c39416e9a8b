// The records of operations. A work-request id is a record's index and generation. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/large_memory.h"
#include "spinwire/buffer.h"
#include "spinwire/connection.h"

namespace spinwire::agent {

enum class OperationKind : std::uint8_t {
  send,
  send_imm,
  write,
  write_imm,
  read,  ///< the last plain kind, see is_plain()
  compare_swap,
  fetch_add,
  raw_send,       ///< of a raw connection
  raw_send_imm,   ///< of a raw connection
  raw_write_imm,  ///< of a raw connection: costs no credit
  // Parts of the application's rendezvous messages.
  rendezvous_bind,       ///< binds the window of a rendezvous message, ahead of its offer
  rendezvous_offer,      ///< offers a rendezvous message
  rendezvous_offer_imm,  ///< offers a rendezvous message with an immediate
  // The agent's own.
  credit_return,
  goodbye,
  credit_write,
  rendezvous_read,  ///< fetches part of a rendezvous message
  control_message,
  rendezvous_unbind,  ///< unbinds the window of a rendezvous message
  lease_bind,         ///< binds the window of a lease
  lease_unbind,       ///< unbinds the window of a lease
  credit_message,     ///< stands in for a credit write, or asks for one: see CreditByMessages
  cancelled,          ///< an operation of the application, see Operation::was
  // Kinds without a Tally of their own, see tally_kind().
  send_gathered,   ///< a SEND of several parts: see gathered.h
  write_gathered,  ///< a WRITE of several parts
  notice,          ///< the SEND of write_and_send(), right behind its WRITE
  noticed_write,   ///< the WRITE, which the notice's record answers for
};
constexpr bool is_plain(OperationKind kind) { return kind <= OperationKind::read; }
constexpr bool is_users(OperationKind kind) {
  return kind <= OperationKind::raw_write_imm ||
         (kind >= OperationKind::send_gathered && kind <= OperationKind::notice);
}
/// Whether the agent sends it without an order of the application, also through a rendezvous
/// message.
constexpr bool is_agents_own(OperationKind kind) {
  return kind >= OperationKind::credit_return && kind <= OperationKind::credit_message;
}
constexpr bool is_raw(OperationKind kind) {
  return kind >= OperationKind::raw_send && kind <= OperationKind::raw_write_imm;
}
/// Whether the kind takes one of the application's records.
constexpr bool takes_users_record(OperationKind kind) {
  return kind <= OperationKind::rendezvous_offer_imm || kind >= OperationKind::send_gathered;
}
/// Kinds with a Tally of their own.
inline constexpr std::size_t kOperationKinds = 23;
/// The kind whose Tally counts the operation.
constexpr OperationKind tally_kind(OperationKind kind) {
  if (kind < OperationKind::send_gathered) return kind;
  const bool sends = kind == OperationKind::send_gathered || kind == OperationKind::notice;
  return sends ? OperationKind::send : OperationKind::write;
}

struct Agent;

/// The part of an operation or a rendezvous message whose cancellation is reported later.
struct Cancellation {
  Cancellation* next;
  bool due;       ///< the callback is due: in EngineContext::cancellations
  bool of_send;   ///< of a RendezvousSend
  Status status;  ///< what the callback reports; of a notice, how its WRITE ended
};

/// An accepted operation, until its completion callback. The record holds the work request for the
/// device. Deferred operations are linked by `wr.next` and posted as one list. Posting and ending
/// touch two cachelines; the callback has a third.
struct alignas(64) Operation {
  ibv_send_wr wr;  ///< `wr_id`: generation and index; `next`: the agent's order, or the free list
  ibv_sge sges[2];
  Agent* agent;
  detail::Block* block;
  std::uint32_t length;   ///< payload, bytes; 0 of the agent's own operations
  std::uint32_t subject;  ///< of the agent's own operations: what on_internal_end() needs;
                          ///< of a notice: bytes of its WRITE
  OperationKind kind;
  bool header_in_headroom;  ///< one element holds header and payload
  bool calls_back;          ///< `done` is set
  bool has_run;  ///< without a completion: it only has to end, in EngineContext::ran_agents
  // The rest is valid while `kind` is `cancelled`.
  OperationKind was;
  bool with_device;
  bool succeeded;  ///< at the device
  alignas(64) CompletionCallback done;
  Cancellation cancellation;

  [[nodiscard]] Operation* next() const noexcept { return of(wr.next); }
  /// `wr` is the first member.
  [[nodiscard]] static Operation* of(ibv_send_wr* request) noexcept {
    return reinterpret_cast<Operation*>(request);
  }
  [[nodiscard]] static Operation& of(const Cancellation& cancellation) noexcept;
};
static_assert(std::is_standard_layout_v<Operation> && offsetof(Operation, wr) == 0);
static_assert(offsetof(Operation, done) == 192 && sizeof(Operation) == 256);
inline Operation& Operation::of(const Cancellation& cancellation) noexcept {
  return *reinterpret_cast<Operation*>(reinterpret_cast<std::uintptr_t>(&cancellation) -
                                       offsetof(Operation, cancellation));
}

/// A fixed number of records. The record freed last is used first, while it is in the cache. Agents
/// have their own records, so that the application cannot exhaust them.
class OperationPool {
 public:
  /// May throw std::bad_alloc. Set-up.
  OperationPool(std::uint32_t users, std::uint32_t agents)
      : records_(std::size_t{users} + agents), capacity_(users + agents), users_count_(users) {
    for (std::uint32_t i = capacity_; i != 0; --i) {
      Operation& op = records_[i - 1];
      op.wr.wr_id = std::uint64_t{i - 1} << 1;
      op.wr.sg_list = op.sges;
      put(i - 1 < users ? users_ : agents_, op);
    }
  }

  /// A record for the application, or for an agent; null if all are in use.
  [[nodiscard]] Operation* acquire() noexcept { return take(users_); }
  [[nodiscard]] Operation* acquire_for_agent() noexcept { return take(agents_); }

  /// Whether the application has no free record.
  [[nodiscard]] bool empty() const noexcept { return users_ == nullptr; }
  /// Whether it has two.
  [[nodiscard]] bool has_two() const noexcept {
    return users_ != nullptr && users_->wr.next != nullptr;
  }

  /// Frees the record; its work-request id becomes stale.
  void release(Operation& op) noexcept { release(op, op.kind); }
  /// As release(op), where the caller knows the kind.
  void release(Operation& op, OperationKind kind) noexcept {
    op.wr.wr_id += std::uint64_t{1} << 32;
    op.has_run = false;
    put(takes_users_record(kind) ? users_ : agents_, op);
  }

  /// The operation of a work-request id; null if the id is stale.
  [[nodiscard]] Operation* find(std::uint64_t wr_id) noexcept {
    const std::uint32_t index = static_cast<std::uint32_t>(wr_id) >> 1;
    if (index >= capacity_) [[unlikely]]
      return nullptr;
    Operation& op = records_[index];
    return op.wr.wr_id == wr_id ? &op : nullptr;
  }

  [[nodiscard]] std::uint32_t index_of(const Operation& op) const noexcept {
    return static_cast<std::uint32_t>(op.wr.wr_id) >> 1;
  }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }

  /// Drops all callbacks. Cold.
  void drop_callbacks() noexcept {
    for (std::uint32_t i = 0; i < capacity_; ++i) records_[i].calls_back = false;
  }

  // For audits.
  [[nodiscard]] bool owns(const Operation* op) const noexcept {
    const auto at =
        reinterpret_cast<std::uintptr_t>(op) - reinterpret_cast<std::uintptr_t>(records_.begin());
    return at < capacity_ * sizeof(Operation) && at % sizeof(Operation) == 0;
  }
  /// The first records are the application's.
  [[nodiscard]] std::uint32_t users() const noexcept { return users_count_; }
  /// The first free record of the application, or of the agents.
  [[nodiscard]] const Operation* first_free(bool users) const noexcept {
    return users ? users_ : agents_;
  }

 private:
  static void put(Operation*& list, Operation& op) noexcept {
    op.wr.next = list == nullptr ? nullptr : &list->wr;
    list = &op;
  }
  static Operation* take(Operation*& list) noexcept {
    Operation* op = list;
    if (op == nullptr) [[unlikely]]
      return nullptr;
    list = op->next();
    return op;
  }

  base::LargeArray<Operation> records_;
  Operation* users_ = nullptr;
  Operation* agents_ = nullptr;
  std::uint32_t capacity_;
  std::uint32_t users_count_;
};

}  // namespace spinwire::agent
