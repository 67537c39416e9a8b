// Building, posting and flushing operations. Hot.
#include <cstring>
#include <string>

#include "agent/completion.h"
#include "agent/long_messages.h"
#include "agent/submit.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

/// Moves the deferred operations behind the posted ones.
inline void join_deferred(Agent& a) noexcept {
  a.send_queue.deferred_last->wr.next = nullptr;
  if (a.send_queue.posted == nullptr) {
    a.send_queue.posted = a.send_queue.deferred;
  } else {
    a.send_queue.posted_last->wr.next = &a.send_queue.deferred->wr;
  }
  a.send_queue.posted_last = a.send_queue.deferred_last;
  a.send_queue.deferred = nullptr;
}

/// The device took the operations before `bad`, possibly all unsignaled. So the queue pair moves to
/// ERR, which flushes them. The rest end after that, or at the close time-out.
[[gnu::cold, gnu::noinline]] void on_post_failed(EngineContext& ctx, Agent& a, ibv_send_wr* bad,
                                                 int error) noexcept {
  a.send_queue.deferred = Operation::of(bad);
  a.send_queue.deferred_last = a.send_queue.posted_last;
  if (a.send_queue.posted == a.send_queue.deferred) {
    a.send_queue.posted = nullptr;
  } else {
    Operation* before = a.send_queue.posted;
    while (before->wr.next != bad) before = before->next();
    before->wr.next = nullptr;
    a.send_queue.posted_last = before;
  }
  fail(ctx, a,
       {Status::local_error, "post a list of send work requests",
        base::format("ibv_post_send: errno {}", error), "report this as a defect"});
}

}  // namespace

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

void build_staged(const EngineContext& ctx, const Agent& a, Operation& op, std::uint64_t header,
                  const std::byte* data, std::uint32_t lkey) noexcept {
  std::byte* at = ctx.staging + std::size_t{ctx.operations.index_of(op)} * kStagingBytes;
  wire::put(header, at);
  op.header_in_headroom = false;
  op.sges[0] = {reinterpret_cast<std::uint64_t>(at), wire::kMessageHeaderBytes,
                ctx.staging_block->lkey};
  const std::uint32_t length = op.length;
  const std::uint32_t bytes = length + std::uint32_t{wire::kMessageHeaderBytes};
  const bool fits_inline = bytes <= a.send_queue.inline_bytes;
  op.wr.send_flags = fits_inline ? unsigned{IBV_SEND_INLINE} : 0u;
  if (length == 0) return;
  if (fits_inline && bytes <= kStagingBytes) {
    // The device would gather the payload in any case.
    std::memcpy(at + wire::kMessageHeaderBytes, data, length);
    op.sges[0].length = bytes;
  } else {
    op.sges[1] = {reinterpret_cast<std::uint64_t>(data), length, lkey};
    op.wr.num_sge = 2;
  }
}

void build_control(const EngineContext& ctx, const Agent& a, Operation& op,
                   const wire::MessageHeader& header, std::span<const std::byte> body) noexcept {
  std::byte* at = ctx.staging + std::size_t{ctx.operations.index_of(op)} * kStagingBytes;
  wire::put(wire::encode(header), at);
  std::memcpy(at + wire::kMessageHeaderBytes, body.data(), body.size());
  const auto bytes = static_cast<std::uint32_t>(wire::kMessageHeaderBytes + body.size());
  op.header_in_headroom = false;
  op.length = 0;
  op.wr.num_sge = 1;
  op.sges[0] = {reinterpret_cast<std::uint64_t>(at), bytes, ctx.staging_block->lkey};
  op.wr.send_flags = bytes <= a.send_queue.inline_bytes ? unsigned{IBV_SEND_INLINE} : 0u;
  if (a.domain != nullptr) use_own_key(ctx, *a.domain, op);
}

bool send_control_direct(EngineContext& ctx, Agent& a, const wire::MessageHeader& header,
                         std::span<const std::byte> body) noexcept {
  // What is deferred comes first, and the device refuses while work requests wait. The peer of a
  // connection that closes may be gone, which fails a direct message, and with it the connection.
  if (a.state != ConnectionState::ready || a.send_queue.deferred != nullptr ||
      max_direct_limit(ctx, a) == 0)
    return false;
  const verbs::Sent sent =
      ctx.direct->send(a.qp, wire::encode(header), body.data(),
                       static_cast<std::uint32_t>(body.size()), verbs::kNoCompletion);
  if (sent == verbs::Sent::refused) return false;
  ctx.direct_unpublished = true;
  return true;
}

bool submit_internal(EngineContext& ctx, Agent& a, OperationKind kind,
                     std::uint16_t credits) noexcept {
  Operation* const acquired = ctx.operations.acquire_for_agent();
  if (acquired == nullptr) [[unlikely]]
    return false;
  Operation& op = *acquired;
  begin_internal(a, op, kind);
  op.wr.num_sge = 1;
  op.wr.wr.rdma.remote_addr = a.peer_cell.address;
  op.wr.wr.rdma.rkey = a.peer_cell.key;
  if (has_header(kind)) {
    const bool returns = kind == OperationKind::credit_return;
    build_staged(
        ctx, a, op,
        wire::encode({returns ? wire::MessageKind::credit_return : wire::MessageKind::goodbye, 0,
                      static_cast<std::uint16_t>(a.credit.granted),
                      returns ? std::uint32_t{credits} : goodbye_number(a)}),
        nullptr, 0);
    a.credit.advertised = a.credit.granted;
  }
  if (kind == OperationKind::credit_write) {
    const std::uint64_t value = next_credit_word(a);
    std::byte* const at = staging_of(ctx, op);
    std::memcpy(at, &value, sizeof value);
    op.sges[0] = {reinterpret_cast<std::uint64_t>(at), sizeof value, ctx.staging_block->lkey};
    if (a.send_queue.inline_bytes >= sizeof value) op.wr.send_flags = IBV_SEND_INLINE;
    a.credit.write_pending = true;
    on_credit_word_sent(ctx, a);
  } else if (kind == OperationKind::credit_return) {
    ++a.credit.sent;
    a.credit.returned_by_us += credits;
    a.credit.send_limit -= credits;
  }
  if (a.domain != nullptr) [[unlikely]]
    use_own_key(ctx, *a.domain, op);
  append(a, op);
  queue_flush(ctx, a);
  return true;
}

namespace {

/// Whether an operation is a READ or a WRITE.
inline bool is_one_sided(const Operation& op) noexcept {
  return op.wr.opcode == IBV_WR_RDMA_WRITE || op.wr.opcode == IBV_WR_RDMA_READ;
}

inline void flush_one(EngineContext& ctx, Agent& a) noexcept {
  Operation* first = a.send_queue.deferred;
  if (first == nullptr || a.stage != Stage::up) return;
  if (ctx.has_unposted_sample()) [[unlikely]]
    note_posted(ctx, a);
  if (is_one_sided(*first) && ctx.direct != nullptr) {
    run_deferred(ctx, a);
    first = a.send_queue.deferred;
    if (first == nullptr) return;
  }
  Operation& last = *a.send_queue.deferred_last;
  // The last message carries the latest grant.
  if (has_header(last.kind)) {
    auto* at = reinterpret_cast<std::byte*>(last.sges[0].addr);
    wire::put(wire::with_granted(wire::get(at), static_cast<std::uint16_t>(a.credit.granted)), at);
    a.credit.advertised = a.credit.granted;
  }
  last.wr.send_flags |= IBV_SEND_SIGNALED;
  join_deferred(a);
  ++ctx.stats.doorbells;
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(a.qp, &first->wr, &bad);
  if (error != 0) [[unlikely]]
    on_post_failed(ctx, a, bad, error);
}

}  // namespace

bool find_credit_and_send(EngineContext& ctx, Agent& a, const std::byte* data, std::uint32_t size,
                          bool defer_it) noexcept {
  bool is_last = false;
  return has_credit(ctx, a, is_last) && send_with_credit(ctx, a, data, size, is_last, defer_it);
}

namespace {

/// Sends a message by `send(header, wr_id)`, with a record.
template <typename Send>
[[gnu::always_inline]] inline bool send_recorded(EngineContext& ctx, Agent& a, Block* block,
                                                 std::uint32_t size, const CompletionCallback& done,
                                                 Send&& send) noexcept {
  bool is_last = false;
  if (a.send_queue.deferred != nullptr || a.send_queue.used >= a.send_queue.limit ||
      ctx.operations.empty() || !has_credit(ctx, a, is_last))
    return false;
  Operation& op = *ctx.operations.acquire();
  if (send(build_header(a, size, is_last), op.wr.wr_id) == verbs::Sent::refused) {
    op.kind = OperationKind::send;
    ctx.operations.release(op);
    return false;
  }
  begin<OperationKind::send>(a, op, block, size, done);
  if (ctx.is_sample_due()) [[unlikely]]
    begin_sample(ctx, a, op);
  op.header_in_headroom = false;
  ctx.direct_unpublished = true;
  a.credit.advertised = a.credit.granted;
  ++a.credit.sent;
  a.activity.last_sent = ctx.now;
  append(a, op);
  join_deferred(a);
  publish_direct(ctx);
  if (ctx.has_unposted_sample()) [[unlikely]]
    note_posted(ctx, a);
  return true;
}

}  // namespace

bool send_direct_recorded(EngineContext& ctx, Agent& a, Block* block, const std::byte* data,
                          std::uint32_t size, const CompletionCallback& done) noexcept {
  return send_recorded(ctx, a, block, size, done, [&](std::uint64_t header, std::uint64_t wr_id) {
    return ctx.direct->send(a.qp, header, data, size, wr_id);
  });
}

bool send_direct_gathered(EngineContext& ctx, Agent& a, std::span<const ibv_sge> parts,
                          std::uint32_t size, bool defer_it) noexcept {
  bool is_last = false;
  if (!has_credit(ctx, a, is_last)) return false;
  const verbs::Sent sent = ctx.direct->send_parts(a.qp, build_header(a, size, is_last), parts, size,
                                                  verbs::kNoCompletion);
  return note_direct(ctx, a, sent, size, defer_it);
}

bool send_direct_gathered_recorded(EngineContext& ctx, Agent& a, std::span<const ibv_sge> parts,
                                   std::uint32_t size, const CompletionCallback& done) noexcept {
  // The bytes are copied, so the operation holds no memory of the application.
  return send_recorded(ctx, a, ctx.staging_block, size, done,
                       [&](std::uint64_t header, std::uint64_t wr_id) {
                         return ctx.direct->send_parts(a.qp, header, parts, size, wr_id);
                       });
}

bool send_long_direct(EngineContext& ctx, Agent& a, Block* block, const std::byte* data,
                      std::size_t size, const CompletionCallback& done, bool tracked,
                      bool defer) noexcept {
  // A window that is too large for the device goes by rendezvous as a whole, because a mixture of
  // both costs more than either.
  constexpr std::uint32_t kPause = 256;
  Rendezvous& r = a.rendezvous;
  if (r.direct_pause == kLacksCredit) r.direct_pause = 0;
  if (size > r.longest_direct) return false;
  if (r.direct_pause != 0) return --r.direct_pause, false;
  // The limit is 0 also while control messages wait. Behind a rendezvous message the peer would
  // need a block to hold this one.
  if (a.send_queue.direct_limit == 0 || !r.sends.empty() || a.send_queue.deferred != nullptr)
    return false;
  const bool recorded = tracked || done;
  if (recorded && (defer || a.send_queue.used >= a.send_queue.limit || ctx.operations.empty()))
    return false;
  const auto length = static_cast<std::uint32_t>(size);
  const bool sent = recorded ? send_direct_recorded(ctx, a, block, data, length, done)
                             : send_direct(ctx, a, data, length, defer);
  if (!sent) r.direct_pause = a.credit.sent != a.credit.send_limit ? kPause : kLacksCredit;
  return sent;
}

void flush(EngineContext& ctx, Agent& a) noexcept {
  flush_one(ctx, a);
  await_ran_operations(ctx);
  publish_direct(ctx);
}

void flush_listed_agents(EngineContext& ctx) noexcept {
  for (std::uint32_t i = 0; i < ctx.flush_queue.count(); ++i) {
    Agent& a = ctx.flush_queue[i];
    a.in_flush_queue = false;
    flush_one(ctx, a);
  }
  ctx.flush_queue.cut(0);
  publish_direct(ctx);
}

void flush_unposted(EngineContext& ctx, Agent& a) noexcept {
  // Deferred operations end after the posted ones.
  while (a.send_queue.posted == nullptr && a.send_queue.deferred != nullptr) {
    Operation& op = *a.send_queue.deferred;
    a.send_queue.deferred = &op == a.send_queue.deferred_last ? nullptr : op.next();
    end(ctx, a, op, Status::flushed);
  }
}

void flush_all_operations(EngineContext& ctx, Agent& a) noexcept {
  if (a.send_queue.deferred != nullptr)
    join_deferred(a);  // a flush() in a callback must find nothing to post
  while (a.send_queue.posted != nullptr) end_flushed(ctx, a);
  run_cancel_callbacks(ctx);
}

}  // namespace spinwire::agent
