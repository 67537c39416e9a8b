// Operations: acceptance, posting, completion. Hot.
#include <endian.h>

#include <string>

#include "agent/submit.h"

namespace spinwire::agent {
namespace {

/// By OperationKind.
constexpr ibv_wr_opcode kOpcodes[] = {
    IBV_WR_SEND,      IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_RDMA_READ, IBV_WR_SEND,          IBV_WR_SEND,       IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE};

constexpr wire::MessageKind message_kind(OperationKind kind) noexcept {
  return kind == OperationKind::credit_return ? wire::MessageKind::credit_return
         : kind == OperationKind::goodbye     ? wire::MessageKind::goodbye
                                              : wire::MessageKind::data;
}

/// The message header of an operation, made when it is posted so that it tells the latest credit.
inline void write_header(Agent& a, wire::MessageKind kind, bool wants_credit, std::uint32_t length,
                         std::byte* at) noexcept {
  wire::encode({kind, wants_credit ? wire::message_flag::kWantCredit : std::uint8_t{0},
                static_cast<std::uint16_t>(a.granted), length},
               at);
  a.published = a.granted;
}

/// The common case: a message whose header lies beside its payload.
inline void build_message(Shared& s, Agent& a, const Operation& op, ibv_send_wr& wr,
                          ibv_sge& sge) noexcept {
  const std::uint32_t length = op.length;
  std::byte* header = op.data - wire::kMessageHeaderBytes;
  write_header(a, wire::MessageKind::data, op.wants_credit, length, header);
  const auto bytes = static_cast<std::uint32_t>(length + wire::kMessageHeaderBytes);
  sge = {reinterpret_cast<std::uint64_t>(header), bytes, op.lkey};
  wr.num_sge = 1;
  wr.opcode = op.kind == OperationKind::send ? IBV_WR_SEND : IBV_WR_SEND_WITH_IMM;
  wr.imm_data = htobe32(op.immediate);
  wr.send_flags =
      bytes <= s.config.queues.inline_bytes ? static_cast<unsigned>(IBV_SEND_INLINE) : 0u;
}

/// Any other operation.
void build_other(Shared& s, Agent& a, const Operation& op, ibv_send_wr& wr,
                 ibv_sge* sges) noexcept {
  const std::uint32_t length = op.length;
  std::uint64_t bytes = length;
  int count = 0;
  if (has_header(op.kind)) {
    std::byte* header =
        s.headers + std::size_t{s.operations.index_of(op)} * wire::kMessageHeaderBytes;
    const std::uint32_t told = op.kind == OperationKind::credit_return ? op.credits : length;
    write_header(a, message_kind(op.kind), op.wants_credit, told, header);
    sges[count++] = {reinterpret_cast<std::uint64_t>(header), wire::kMessageHeaderBytes,
                     s.headers_block->lkey};
    bytes += wire::kMessageHeaderBytes;
  }
  if (length != 0) sges[count++] = {reinterpret_cast<std::uint64_t>(op.data), length, op.lkey};
  wr.num_sge = count;
  wr.opcode = kOpcodes[static_cast<std::size_t>(op.kind)];
  wr.imm_data = htobe32(op.immediate);
  wr.wr.rdma.remote_addr = op.remote_address;
  wr.wr.rdma.rkey = op.rkey;
  wr.send_flags = bytes <= s.config.queues.inline_bytes && op.kind != OperationKind::read
                      ? static_cast<unsigned>(IBV_SEND_INLINE)
                      : 0u;
}

/// Ends the oldest operation: its record is free before its callback runs, so that the callback
/// may start another.
inline void finish_oldest(Shared& s, Agent& a, Status status) noexcept {
  Operation& op = *a.first;
  a.first = op.next;
  if (a.unposted == &op) [[unlikely]]
    a.unposted = op.next;
  --a.sq_used;
  const std::uint32_t bytes = status == Status::ok ? op.length : 0;
  const auto kind = static_cast<std::size_t>(op.kind);
  a.done[kind] += status == Status::ok ? 1 : 0;
  a.bytes[kind] += bytes;
  Block* block = op.block;
  if (op.beside) --block->header_in_use;
  if (!is_users(op.kind)) [[unlikely]] {
    a.credit_write_pending = a.credit_write_pending && op.kind != OperationKind::credit_write;
    a.keepalive_pending = a.keepalive_pending && op.kind != OperationKind::keepalive;
  }
  if (op.done) {
    const Completion completion{status, bytes};
    const CompletionCallback done = op.done;
    s.operations.release(op);
    done(completion);
  } else {
    s.operations.release(op);
  }
  if (block != nullptr) [[likely]]
    detail::release(block);
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

bool find_credit(Shared& s, Agent& a) noexcept {
  if (learn_credit(a)) return true;
  if (!read_credit_cell(a)) {
    fail(s, a,
         {Status::protocol, "read the credit that the peer granted",
          "a count that no peer of this protocol writes", "the peer is broken or hostile"});
    return false;
  }
  return send_credits(a) != 0;
}

bool submit_control(Shared& s, Agent& a, OperationKind kind, std::uint16_t credits) noexcept {
  Operation* const acquired = s.operations.acquire_for_agent();
  if (acquired == nullptr) [[unlikely]]
    return false;
  Operation& op = *acquired;
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
    a.send_limit -= credits;
  } else if (kind == OperationKind::keepalive) {
    a.keepalive_pending = true;
  }
  append(a, op);
  defer(s, a);
  return true;
}

void flush(Shared& s, Agent& a) noexcept {
  while (a.unposted != nullptr) {
    Operation* const began = a.unposted;
    Operation* op = began;
    std::uint32_t count = 0;
    for (; op != nullptr && count < verbs::SendList::kCapacity; ++count, op = op->next) {
      ibv_send_wr& wr = s.sends.wr(count);
      wr.wr_id = op->wr_id;
      if (op->beside) [[likely]] {
        build_message(s, a, *op, wr, *s.sends.sges(count));
      } else {
        build_other(s, a, *op, wr, s.sends.sges(count));
      }
    }
    s.sends.wr(count - 1).send_flags |= IBV_SEND_SIGNALED;
    a.unposted = op;
    a.last_sent = s.now;
    std::uint32_t posted = 0;
    const int error = s.sends.post(a.qp, count, posted);
    ++s.stats.doorbells;
    if (error == 0) [[likely]]
      continue;
    // Nothing signaled may be left to complete what was taken: the queue pair goes to ERR, which
    // completes that; the rest ends from here.
    a.unposted = began;
    for (; posted != 0 && a.unposted != nullptr; --posted) a.unposted = a.unposted->next;
    fail(s, a,
         {Status::local_error, "post a list of send work requests",
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
  Operation* const op = s.operations.find(wc.wr_id);
  if (op == nullptr) [[unlikely]] {
    ++s.stats.stale_completions;
    return 0;
  }
  Agent& a = *op->agent;
  std::uint32_t ended = 1;
  // A work request completes all before it.
  for (; a.first != op; ++ended) finish_oldest(s, a, Status::ok);
  if (wc.status == IBV_WC_SUCCESS) [[likely]] {
    a.last_heard = s.now;
    finish_oldest(s, a, Status::ok);
  } else {
    on_operation_failed(s, a, op->kind, wc);
    finish_oldest(s, a, status_of(wc.status));
  }
  if (a.state != ConnectionState::ready && (a.first == nullptr || a.first == a.unposted))
      [[unlikely]] {
    on_drained(s, a);
  }
  return ended;
}

void flush_everything(Shared& s, Agent& a) noexcept {
  a.unposted = nullptr;  // a flush() from a callback finds nothing to post
  while (a.first != nullptr) finish_oldest(s, a, Status::flushed);
}

void flush_unposted(Shared& s, Agent& a) noexcept {
  // Deferred operations that will not be posted any more. They end behind those that the device
  // has, so only when none of those is left.
  while (a.first != nullptr && a.first == a.unposted) finish_oldest(s, a, Status::flushed);
}

}  // namespace spinwire::agent
