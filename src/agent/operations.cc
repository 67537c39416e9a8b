// Operations: acceptance, posting, completion. Hot.
#include <endian.h>

#include <string>

#include "agent/agent.h"

namespace spinwire::agent {
namespace {

constexpr bool uses_credit(OperationKind kind) noexcept {
  return kind == OperationKind::send || kind == OperationKind::send_imm ||
         kind == OperationKind::write_imm || kind == OperationKind::credit_return;
}
constexpr bool has_header(OperationKind kind) noexcept {
  return kind == OperationKind::send || kind == OperationKind::send_imm ||
         kind == OperationKind::credit_return || kind == OperationKind::goodbye;
}

/// By OperationKind.
constexpr ibv_wr_opcode kOpcodes[] = {
    IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_RDMA_READ, IBV_WR_SEND, IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE};

constexpr std::uint64_t kLongest = std::uint64_t{1} << 30;  // of one work request

Status check_data(const Agent& a, const Request& r) noexcept {
  const std::size_t size = r.data->size();
  if (!*r.data) return Status::out_of_bounds;
  if (r.kind == OperationKind::send || r.kind == OperationKind::send_imm)
    return size <= a.max_message ? Status::ok : Status::message_too_long;
  if (!*r.remote || size > r.remote->length || size > kLongest) return Status::out_of_bounds;
  const Access need =
      r.kind == OperationKind::read ? Access::remote_read : Access::remote_write;
  return allows(r.remote->access, need) ? Status::ok : Status::remote_access;
}

/// Credit for one more message; looks into the cell when what is known is used up.
bool has_credit(Shared& s, Agent& a) noexcept {
  if (send_credits(a) != 0) [[likely]] return true;
  if (!read_credit_cell(a)) {
    fail(s, a, {Status::protocol, "read the credit that the peer granted",
                "a count that no peer of this protocol writes", "the peer is broken or hostile"});
    return false;
  }
  return send_credits(a) != 0;
}

void append(Shared& s, Agent& a, std::uint32_t index) noexcept {
  Operation& op = s.operations.at(index);
  op.next = kNone;
  op.agent = a.index;
  if (a.last == kNone) {
    a.first = index;
    a.waiting_since = s.now;
  } else {
    s.operations.at(a.last).next = index;
  }
  a.last = index;
  if (a.unposted == kNone) a.unposted = index;
  ++a.sq_used;
}

void defer(Shared& s, Agent& a) noexcept {
  if (a.dirty) return;
  a.dirty = true;
  s.dirty.add(a);
}

/// The message header of an operation, made when it is posted so that it tells the latest credit.
void write_header(Agent& a, const Operation& op, std::byte* at) noexcept {
  wire::MessageHeader header{};
  header.kind = op.kind == OperationKind::credit_return ? wire::MessageKind::credit_return
                : op.kind == OperationKind::goodbye     ? wire::MessageKind::goodbye
                                                        : wire::MessageKind::data;
  header.flags = op.wants_credit ? wire::message_flag::kWantCredit : std::uint8_t{0};
  header.granted = static_cast<std::uint16_t>(a.granted);
  header.length = op.kind == OperationKind::credit_return ? op.credits
                                                          : static_cast<std::uint32_t>(op.length);
  wire::encode(header, at);
  a.published = a.granted;
}

/// The elements of an operation, its message header among them; answers their number.
inline int gather(Shared& s, Agent& a, std::uint32_t index, ibv_sge* sges) noexcept {
  Operation& op = s.operations.at(index);
  const auto length = static_cast<std::uint32_t>(op.length);
  if (op.beside) [[likely]] {
    std::byte* header = op.data - wire::kMessageHeaderBytes;
    write_header(a, op, header);
    const auto bytes = static_cast<std::uint32_t>(length + wire::kMessageHeaderBytes);
    sges[0] = {reinterpret_cast<std::uint64_t>(header), bytes, op.lkey};
    return 1;
  }
  int count = 0;
  if (has_header(op.kind)) {
    std::byte* header = s.headers + std::size_t{index} * wire::kMessageHeaderBytes;
    write_header(a, op, header);
    sges[count++] = {reinterpret_cast<std::uint64_t>(header), wire::kMessageHeaderBytes,
                     s.headers_block->lkey};
  }
  if (length != 0) sges[count++] = {reinterpret_cast<std::uint64_t>(op.data), length, op.lkey};
  return count;
}

/// Fills one work request from an operation.
inline void build(Shared& s, Agent& a, std::uint32_t index, ibv_send_wr& wr,
                  ibv_sge* sges) noexcept {
  const Operation& op = s.operations.at(index);
  wr.wr_id = send_id(index, s.operations.generation(index));
  wr.num_sge = gather(s, a, index, sges);
  const std::uint64_t bytes =
      op.length + (has_header(op.kind) ? wire::kMessageHeaderBytes : std::size_t{0});
  wr.send_flags = bytes <= s.config.queues.inline_bytes && op.kind != OperationKind::read
                      ? static_cast<unsigned>(IBV_SEND_INLINE)
                      : 0u;
  wr.opcode = kOpcodes[static_cast<std::size_t>(op.kind)];
  wr.imm_data = htobe32(op.immediate);
  wr.wr.rdma.remote_addr = op.remote_address;
  wr.wr.rdma.rkey = op.rkey;
}

void count_success(Agent& a, const Operation& op) noexcept {
  switch (op.kind) {
    case OperationKind::send:
    case OperationKind::send_imm:
      ++a.stats.messages_sent;
      a.stats.bytes_sent += op.length;
      break;
    case OperationKind::write:
    case OperationKind::write_imm:
      ++a.stats.writes;
      a.stats.bytes_written += op.length;
      break;
    case OperationKind::read:
      ++a.stats.reads;
      a.stats.bytes_read += op.length;
      break;
    default:
      break;
  }
}

/// Ends the oldest operation: its record is free before its callback runs, so that the callback
/// may start another.
void finish_oldest(Shared& s, Agent& a, Status status) noexcept {
  const std::uint32_t index = a.first;
  Operation& op = s.operations.at(index);
  a.first = op.next;
  if (a.first == kNone) a.last = kNone;
  if (a.unposted == index) a.unposted = op.next;
  --a.sq_used;
  if (status == Status::ok) [[likely]] count_success(a, op);
  Block* block = op.block;
  if (op.beside) --block->header_in_use;
  const bool users = is_users(op.kind);
  if (users) {
    --s.users_operations;
  } else if (op.kind == OperationKind::credit_write) {
    a.credit_write_pending = false;
  } else if (op.kind == OperationKind::keepalive) {
    a.keepalive_pending = false;
  }
  const Completion completion{status, status == Status::ok ? op.length : 0};
  const CompletionCallback done = op.done;
  s.operations.release(index);
  if (users && done) done(completion);
  if (block != nullptr) detail::release(block);
}

Status status_of(ibv_wc_status status) noexcept {
  switch (status) {
    case IBV_WC_SUCCESS:
      return Status::ok;
    case IBV_WC_WR_FLUSH_ERR:
      return Status::flushed;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
      return Status::peer_lost;
    case IBV_WC_REM_ACCESS_ERR:
      return Status::remote_access;
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_ABORT_ERR:
      return Status::remote_error;
    default:
      return Status::local_error;
  }
}

}  // namespace

Status submit(Shared& s, Agent& a, const Request& r) noexcept {
  if (a.state != ConnectionState::ready) [[unlikely]] return Status::not_connected;
  if (const Status status = check_data(a, r); status != Status::ok) [[unlikely]] return status;
  if (a.sq_used >= a.sq_room || s.users_operations >= s.config.queues.operations) [[unlikely]]
    return Status::would_block;
  const bool credit = uses_credit(r.kind);
  if (credit && !has_credit(s, a)) [[unlikely]] return Status::would_block;
  const std::uint32_t index = s.operations.acquire();
  if (index == kNone) [[unlikely]] return Status::would_block;
  Operation& op = s.operations.at(index);
  op.kind = r.kind;
  op.data = r.data->data();
  op.length = r.data->size();
  op.block = r.data->block();
  op.wants_credit = false;
  op.beside = false;
  op.lkey = 0;
  detail::retain(op.block);
  op.lkey = op.block->lkey;
  // The header goes beside the payload if the slice begins there and no operation uses the room.
  if (has_header(r.kind) && op.block->header_in_use == 0 &&
      op.data == reinterpret_cast<std::byte*>(op.block) + sizeof(Block)) [[likely]] {
    op.block->header_in_use = 1;
    op.beside = true;
  }
  op.immediate = r.immediate;
  if (r.remote != nullptr) {
    op.remote_address = r.remote->address;
    op.rkey = r.remote->rkey;
  }
  op.done = *r.done;
  if (credit) {
    ++a.sent;
    a.last_sent = s.now;
    op.wants_credit = send_credits(a) == 0;
  }
  ++s.users_operations;
  append(s, a, index);
  if (r.defer) {
    defer(s, a);
  } else {
    flush(s, a);
  }
  return Status::ok;
}

bool submit_control(Shared& s, Agent& a, OperationKind kind, std::uint16_t credits) noexcept {
  const std::uint32_t index = s.operations.acquire();
  if (index == kNone) [[unlikely]] return false;
  Operation& op = s.operations.at(index);
  op.kind = kind;
  op.beside = false;
  op.block = nullptr;
  op.data = nullptr;
  op.length = 0;
  op.lkey = 0;
  op.wants_credit = false;
  op.credits = credits;
  op.immediate = 0;
  op.done = {};
  op.remote_address = a.peer_cell;
  op.rkey = a.peer_cell_key;
  if (kind == OperationKind::credit_write) {
    // The value goes out of the cell's own block, whose second word is kept for it.
    auto* value = reinterpret_cast<std::uint64_t*>(a.cell_block->payload) + 8;
    *value = a.granted;
    op.data = reinterpret_cast<std::byte*>(value);
    op.length = sizeof *value;
    op.lkey = a.cell_block->lkey;
    op.block = a.cell_block;
    detail::retain(op.block);
    a.published = a.granted;
    a.credit_write_pending = true;
  } else if (kind == OperationKind::credit_return) {
    ++a.sent;
    a.returned_by_us += credits;
  } else if (kind == OperationKind::keepalive) {
    a.keepalive_pending = true;
  }
  append(s, a, index);
  defer(s, a);
  return true;
}

void flush(Shared& s, Agent& a) noexcept {
  while (a.unposted != kNone) {
    std::uint32_t count = 0;
    std::uint32_t index = a.unposted;
    for (; index != kNone && count < verbs::SendList::kCapacity; ++count) {
      build(s, a, index, s.sends.wr(count), s.sends.sges(count));
      index = s.operations.at(index).next;
    }
    s.sends.wr(count - 1).send_flags |= IBV_SEND_SIGNALED;
    const std::uint32_t began = a.unposted;
    a.unposted = index;
    std::uint32_t posted = 0;
    const int error = s.sends.post(a.qp, count, posted);
    ++s.stats.doorbells;
    if (error == 0) [[likely]] continue;
    // Nothing signaled may be left to complete what was taken: the queue pair goes to ERR, which
    // completes that; the rest ends from here.
    a.unposted = began;
    for (; posted != 0; --posted) a.unposted = s.operations.at(a.unposted).next;
    fail(s, a, {Status::local_error, "post a list of send work requests",
                "ibv_post_send: errno " + std::to_string(error), "report this as a defect"});
    return;
  }
}

void flush_all(Shared& s) noexcept {
  for (std::uint32_t i = 0; i < s.dirty.count(); ++i) {
    Agent& a = s.dirty[i];
    a.dirty = false;
    flush(s, a);
  }
  s.dirty.cut(0);
}

std::uint32_t on_send_completion(Shared& s, const ibv_wc& wc) noexcept {
  const auto index = static_cast<std::uint32_t>(wc.wr_id) >> 1;
  const auto generation = static_cast<std::uint32_t>(wc.wr_id >> 32);
  Operation* op = s.operations.find(index, generation);
  if (op == nullptr) [[unlikely]] {
    ++s.stats.stale_completions;
    return 0;
  }
  Agent& a = s.agents.at(op->agent);
  std::uint32_t ended = 1;
  // A work request completes all before it.
  for (; a.first != index; ++ended) finish_oldest(s, a, Status::ok);
  if (wc.status == IBV_WC_SUCCESS) [[likely]] {
    a.last_heard = s.now;
    finish_oldest(s, a, Status::ok);
  } else {
    const OperationKind kind = op->kind;
    on_operation_failed(s, a, kind, wc);
    finish_oldest(s, a, status_of(wc.status));
  }
  if (a.state != ConnectionState::ready && (a.first == kNone || a.first == a.unposted))
      [[unlikely]] {
    on_drained(s, a);
  }
  return ended;
}

void flush_unposted(Shared& s, Agent& a) noexcept {
  // Deferred operations that will not be posted any more. They end behind those that the device
  // has, so only when none of those is left.
  while (a.first != kNone && a.first == a.unposted) finish_oldest(s, a, Status::flushed);
}

}  // namespace spinwire::agent
