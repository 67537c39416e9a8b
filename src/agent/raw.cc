#include "agent/raw.h"

#include <endian.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "agent/agent.h"
#include "agent/completion.h"
#include "agent/submit.h"
#include "base/error.h"
#include "base/internals.h"
#include "base/random.h"

namespace spinwire::agent {
namespace {

/// Whether the agent's queue pair takes receives: from INIT until it is to end.
bool takes_receives(const Agent& a) noexcept {
  return a.stage >= Stage::wait && a.stage <= Stage::up && !a.raw->failed;
}

/// The end of the next poll looks after the agent's receives.
void list(EngineContext& ctx, Agent& a) noexcept {
  RawQueue& q = *a.raw;
  queue_credit(ctx, a);
  if (q.listed) return;
  q.listed = true;
  q.next_listed = std::exchange(ctx.raw->listed, &a);
  ++ctx.queued_agents;
}

/// In a domain of its own the pools have another key.
void use_own_keys(const EngineContext& ctx, Agent& a) noexcept {
  RawQueue& q = *a.raw;
  for (std::uint32_t i = q.posted; i != q.accepted; ++i) {
    ibv_sge* const sges = q.elements_of(i);
    for (int k = 0; k < q.slot(i).wr.num_sge; ++k) {
      if (sges[k].lkey == ctx.staging_block->lkey) sges[k].lkey = a.domain->lkey;
    }
  }
}

/// Posts what was accepted, if it is anything. 0 or an errno value; what the device does not take
/// waits for the end.
int post_accepted(EngineContext& ctx, Agent& a) noexcept {
  RawQueue& q = *a.raw;
  if (q.posted == q.accepted) return 0;
  if (a.domain != nullptr) [[unlikely]]
    use_own_keys(ctx, a);
  ibv_recv_wr* bad = nullptr;
  const int error = ibv_post_recv(a.qp, &q.slot(q.posted).wr, &bad);
  const std::uint32_t end = error == 0 ? q.accepted : q.receive_of(bad);
  ctx.posted_receives += end - q.posted;
  ctx.stats.receives_posted += end - q.posted;
  q.posted = end;
  if (error != 0) [[unlikely]]
    q.failed = true;
  if (q.to_tell == 0) {
    q.told = q.posted;
  } else {
    list(ctx, a);
  }
  return error;
}

[[gnu::cold]] void refused(EngineContext& ctx, Agent& a, int error) noexcept {
  fail(ctx, a,
       {Status::local_error, "post a list of receive work requests",
        "ibv_post_recv: errno " + std::to_string(error), "report this as a defect"});
}

inline void post_or_fail(EngineContext& ctx, Agent& a) noexcept {
  if (!takes_receives(a)) return;
  if (const int error = post_accepted(ctx, a); error != 0) [[unlikely]]
    refused(ctx, a, error);
}

/// The next receive is with the device.
inline void tell_next(RawQueue& q) noexcept {
  const RawSlot& slot = q.slot(q.told++);
  if (!slot.on_posted) return;
  --q.to_tell;
  slot.on_posted();
}

void tell_posted(RawQueue& q) noexcept {
  // Those that the callbacks post meanwhile are told of by the next poll.
  for (const std::uint32_t end = q.posted; q.told != end;) tell_next(q);
}

/// The bytes of a list of elements, or what is wrong with it.
struct Extent {
  Status status = Status::ok;
  std::uint32_t bytes = 0;
};

/// Whether the agent's queue pair has a key to the block's memory.
bool has_key(const EngineContext& ctx, const Agent& a, const Block& block) noexcept {
  if (!ctx.owns(block)) return false;
  if (!a.attributes.own_domain) return true;
  // Before the domain is there, nothing can be registered in it.
  return a.domain != nullptr ? reaches(ctx, *a.domain, block)
                             : block.lkey == ctx.staging_block->lkey;
}

inline Extent measure(const EngineContext& ctx, const Agent& a,
                      std::span<const BufferSlice> elements, std::uint32_t most) noexcept {
  if (elements.size() > most) [[unlikely]]
    return {Status::invalid_argument};
  Extent extent;
  for (const BufferSlice& e : elements) {
    if (detail::block_of(e) == nullptr || e.size() == 0) [[unlikely]]
      return {Status::out_of_bounds};
    if (e.size() > kMaxRawBytes - extent.bytes) [[unlikely]]
      return {Status::message_too_long};
    if (!has_key(ctx, a, *detail::block_of(e))) [[unlikely]]
      return {Status::invalid_argument};
    extent.bytes += static_cast<std::uint32_t>(e.size());
  }
  return extent;
}

/// A list's memory is held from here on.
inline void keep(std::span<const BufferSlice> elements, ibv_sge* sges, Block** blocks) noexcept {
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const BufferSlice& e = elements[i];
    detail::retain(detail::block_of(e));
    blocks[i] = detail::block_of(e);
    sges[i] = {reinterpret_cast<std::uint64_t>(e.data()), static_cast<std::uint32_t>(e.size()),
               detail::block_of(e)->lkey};
  }
}

void release_all(Block** blocks, int count) noexcept {
  for (int i = 0; i < count; ++i) detail::release(blocks[i]);
}

/// Gives back what the agent was promised of receives that it does not need.
void return_reserved_receives(EngineContext& ctx, Agent& a) noexcept {
  reserved_total(ctx, a) -= a.credit.reserved;
  a.credit.reserved = a.credit.granted = a.credit.advertised = 0;
  if (a.own_queue != kNone) reclaim_own_receives(ctx, a);
}

/// Entries of the completion queue that nothing else may fill.
std::uint32_t completion_room(const EngineContext& ctx) noexcept {
  const std::uint64_t taken = std::uint64_t{ctx.operations.capacity()} + ctx.receives.size();
  const std::uint64_t depth = ctx.config.queues.completion_depth;
  return static_cast<std::uint32_t>(depth - std::min(taken, depth));
}

}  // namespace

RawQueue::RawQueue(RawShared& all, const verbs::QueuePairOptions& sizes)
    : depth(sizes.receive_depth),
      receive_elements(sizes.receive_elements),
      send_elements(sizes.send_elements),
      accepted(static_cast<std::uint32_t>(base::random_seed())),
      posted(accepted),
      told(accepted),
      completed(accepted),
      all_(all),
      mask_(std::bit_ceil(depth + 1) - 1),
      // One operation's memory is held while its callback starts another.
      lists_(send_elements > 1 ? sizes.send_depth + 1 : 0),
      free_(lists_ != 0 ? 0 : kNone) {
  const std::size_t slots = std::size_t{mask_} + 1;
  slots_ = std::make_unique<RawSlot[]>(slots);
  sges_ = std::make_unique<ibv_sge[]>(slots * receive_elements);
  blocks_ = std::make_unique<Block*[]>(slots * receive_elements);
  list_sges_ = std::make_unique<ibv_sge[]>(std::size_t{lists_} * send_elements);
  list_blocks_ = std::make_unique<Block*[]>(std::size_t{lists_} * send_elements);
  sizes_ = std::make_unique<std::uint32_t[]>(lists_);
  for (std::uint32_t i = 0; i < lists_; ++i) sizes_[i] = i + 1 < lists_ ? i + 1 : kNone;
  all_.reserved += depth;
}

RawQueue::~RawQueue() { all_.reserved -= depth; }

std::uint32_t RawQueue::receive_of(const ibv_recv_wr* wr) const noexcept {
  const auto index =
      static_cast<std::uint32_t>(reinterpret_cast<const RawSlot*>(wr) - slots_.get());
  return posted + ((index - posted) & mask_);
}

std::uint32_t RawQueue::take_list(std::size_t size) noexcept {
  const std::uint32_t index = free_;
  if (index != kNone) free_ = std::exchange(sizes_[index], static_cast<std::uint32_t>(size));
  return index;
}

void RawQueue::free_list(std::uint32_t index) noexcept {
  sizes_[index] = std::exchange(free_, index);
}

Result<std::unique_ptr<RawQueue>> make_raw(EngineContext& ctx,
                                           const config::ConnectionAttributes& attributes,
                                           const RawQueue* instead_of) {
  using Made = Result<std::unique_ptr<RawQueue>>;
  if (!attributes.raw) return nullptr;
  return base::no_throw("make the queues of a raw connection", [&]() -> Made {
    if (ctx.raw == nullptr) ctx.raw = std::make_unique<RawShared>();
    const std::uint32_t asked = attributes.queue_pair.receive_depth;
    const std::uint32_t had = instead_of != nullptr ? instead_of->depth : 0;
    const std::uint32_t room = completion_room(ctx);
    const std::uint32_t others = ctx.raw->reserved - had;
    if (others > room || asked > room - others) {
      const std::uint32_t left = room - std::min(others, room);
      return base::fail(
          Status::limit, fmt::format("raw.receive_depth = {}", asked),
          fmt::format("queues.completion_depth = {} leaves room for {} receives of raw "
                      "connections, of which {} are others'",
                      ctx.config.queues.completion_depth, room, others),
          fmt::format("raise it by {}, or lower receive_depth", asked - left));
    }
    return std::make_unique<RawQueue>(*ctx.raw, attributes.queue_pair);
  });
}

bool use_raw(EngineContext& ctx, Agent& a, std::unique_ptr<RawQueue> queue) noexcept {
  if (queue == nullptr) {
    const bool was = std::exchange(a.raw, nullptr) != nullptr;
    return !was || reserve_first_receive(ctx, a);
  }
  if (a.raw == nullptr) return_reserved_receives(ctx, a);
  a.raw = std::move(queue);
  return true;
}

Result<void> agree_on_raw(const Agent& a, bool peers) {
  const bool ours = a.raw != nullptr;
  if (ours == peers) return {};
  return base::fail(
      Status::unsupported, fmt::format("connect to {}{}", ours ? "raw, " : "", a.peer.name.data()),
      fmt::format("the end at {} is not raw, the other is", ours ? "the peer" : "this engine"),
      "give both ends ConnectionSettings::raw, or neither");
}

int post_raw_receives(EngineContext& ctx, Agent& a) noexcept { return post_accepted(ctx, a); }

std::uint32_t raw_receives_posted(const Agent& a) noexcept {
  return a.raw->posted - a.raw->completed;
}

void leave_raw_queue(EngineContext& ctx, Agent& a) noexcept {
  if (!std::exchange(a.raw->listed, false)) return;
  --ctx.queued_agents;
  Agent** at = &ctx.raw->listed;
  while (*at != &a) at = &(*at)->raw->next_listed;
  *at = a.raw->next_listed;
}

void reset_raw(RawQueue& queue) noexcept {
  queue.failed = false;
  queue.send_limit = 0;
}

Status post_receive(EngineContext& ctx, Agent& a, const RawPost& r) noexcept {
  if (a.raw == nullptr) return Status::unsupported;
  if (a.state == ConnectionState::draining || a.state == ConnectionState::closed)
    return Status::not_connected;
  RawQueue& q = *a.raw;
  const Extent extent = measure(ctx, a, r.into, q.receive_elements);
  if (extent.status != Status::ok) return extent.status;
  if (q.accepted - q.completed == q.depth) return Status::would_block;
  RawSlot& slot = q.slot(q.accepted);
  ibv_sge* const sges = q.elements_of(q.accepted);
  keep(r.into, sges, q.blocks_of(q.accepted));
  slot.wr = {raw_receive_id(q.accepted), nullptr, sges, static_cast<int>(r.into.size())};
  slot.on_received = r.on_received;
  slot.on_posted = r.on_posted;
  if (slot.on_posted) ++q.to_tell;
  if (q.accepted != q.posted) q.slot(q.accepted - 1).wr.next = &slot.wr;
  ++q.accepted;
  if (r.defer && takes_receives(a)) {
    list(ctx, a);
  } else {
    post_or_fail(ctx, a);  // or at INIT
  }
  return Status::ok;
}

namespace {

/// What ends a connection whose receive failed.
Error receive_error(const Agent& a, const ibv_wc& wc, Status status) {
  const bool flushed = status == Status::flushed;
  const char* const remedy =
      flushed
          ? "the local queue pair had failed before, without a word: the peer asked for what it "
            "may not do, or the device failed; see the device's events"
      : status == Status::message_too_long
          ? "give the receive as many bytes as the peer sends at once"
          : "the local memory of a receive is gone, or the device has failed: see its events";
  return base::make_error(
      flushed ? Status::local_error : status, fmt::format("receive from {}", a.peer.name.data()),
      fmt::format("completion status {} ({}), vendor error {:#x}", static_cast<int>(wc.status),
                  ibv_wc_status_str(wc.status), wc.vendor_err),
      remedy);
}

/// Soft-RoCE tells of a message that is too long as of other faults of the queue pair.
Status receive_status(ibv_wc_status status) noexcept {
  const bool too_long = status == IBV_WC_LOC_LEN_ERR || status == IBV_WC_LOC_QP_OP_ERR ||
                        status == IBV_WC_REM_INV_REQ_ERR;
  return too_long ? Status::message_too_long : status_of(status);
}

[[gnu::cold, gnu::noinline]] Status take_failure(EngineContext& ctx, Agent& a,
                                                 const ibv_wc& wc) noexcept {
  const Status status = receive_status(wc.status);
  a.raw->failed = true;
  if (status == Status::flushed && a.state == ConnectionState::draining) return status;
  try {
    fail(ctx, a, receive_error(a, wc, status));
  } catch (...) {
    fail(ctx, a, base::out_of_memory());
  }
  return status;
}

/// Ends the oldest receive. Its slot stays as it is until the callback has run.
inline void end_receive(EngineContext& ctx, RawQueue& q, const RawReceive& how) noexcept {
  const std::uint32_t receive = q.completed++;
  --ctx.posted_receives;
  RawSlot& slot = q.slot(receive);
  if (slot.on_received) slot.on_received(how);
  release_all(q.blocks_of(receive), slot.wr.num_sge);
}

inline void take(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept {
  RawQueue& q = *a.raw;
  if (q.completed == q.posted || q.slot(q.completed).wr.wr_id != wc.wr_id) [[unlikely]] {
    ++ctx.stats.stale_completions;
    return;
  }
  if (a.stage == Stage::drain) [[unlikely]]
    queue_setup(ctx, a);  // it may be the last to wait for
  if (q.told == q.completed) tell_next(q);
  RawReceive how;
  if (wc.status != IBV_WC_SUCCESS) [[unlikely]] {
    how.status = take_failure(ctx, a, wc);
    return end_receive(ctx, q, how);
  }
  a.liveness.last_heard = ctx.now;
  // It may overtake the last frame of the handshake, or our own last step.
  if (a.state == ConnectionState::exchanging) [[unlikely]]
    on_early_message(ctx, a);
  how.bytes = wc.byte_len;
  how.is_write = wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
  if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) how.immediate = be32toh(wc.imm_data);
  ++a.traffic.messages_received;
  a.traffic.bytes_received += wc.byte_len;
  end_receive(ctx, q, how);
}

}  // namespace

const ibv_wc* process_raw_receives(EngineContext& ctx, const ibv_wc* wc,
                                   const ibv_wc* end) noexcept {
  Agent* const a = ctx.raw->by_qpn.find(wc->qp_num);
  if (a == nullptr) [[unlikely]] {
    ++ctx.stats.stale_completions;
    return wc + 1;
  }
  const std::uint32_t qp_num = wc->qp_num;
  do {
    take(ctx, *a, *wc);
  } while (++wc != end && wc->qp_num == qp_num && is_receive(wc->wr_id));
  return wc;
}

void flush_raw_receives(EngineContext& ctx, Agent& a) noexcept {
  RawQueue& q = *a.raw;
  RawReceive how;
  how.status = Status::flushed;
  while (q.completed != q.accepted) {
    if (q.completed == q.posted) {
      ++q.posted;
      ++ctx.posted_receives;
    }
    if (q.told == q.completed) {  // never told, if not posted
      if (q.slot(q.told++).on_posted) --q.to_tell;
    }
    end_receive(ctx, q, how);
  }
}

void flush_raw(EngineContext& ctx, Agent& a) noexcept { post_or_fail(ctx, a); }

void post_queued_raw_receives(EngineContext& ctx) noexcept {
  for (Agent* a = ctx.raw->listed; a != nullptr; a = a->raw->next_listed) post_or_fail(ctx, *a);
}

void run_posted_callbacks(EngineContext& ctx) noexcept {
  Agent* a = std::exchange(ctx.raw->listed, nullptr);
  while (a != nullptr) {
    RawQueue& q = *a->raw;
    Agent* const next = q.next_listed;
    q.listed = false;
    --ctx.queued_agents;
    tell_posted(q);
    a = next;
  }
  post_queued_raw_receives(ctx);
}

Status send_raw(EngineContext& ctx, Agent& a, const RawSend& r) noexcept {
  if (a.raw == nullptr) return Status::unsupported;
  if (a.state != ConnectionState::ready) return Status::not_connected;
  RawQueue& q = *a.raw;
  const Extent extent = measure(ctx, a, r.data, q.send_elements);
  if (extent.status != Status::ok) return extent.status;
  if (a.send_queue.used >= q.send_limit) return Status::would_block;
  const bool listed = r.data.size() > 1;
  const std::uint32_t index = listed ? q.take_list(r.data.size()) : kNone;
  if (listed && index == kNone) return Status::would_block;
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) {
    if (listed) q.free_list(index);
    return Status::would_block;
  }
  op->block = nullptr;
  if (listed) {
    op->wr.sg_list = q.list(index).sges;
    keep(r.data, op->wr.sg_list, q.list(index).blocks);
  } else {
    keep(r.data, op->sges, &op->block);
  }
  op->kind = r.immediate ? OperationKind::raw_send_imm : OperationKind::raw_send;
  op->length = extent.bytes;
  op->header_in_headroom = false;
  op->calls_back = static_cast<bool>(r.done);
  if (op->calls_back) op->done = r.done;
  count_begin(a, op->kind);
  op->wr.num_sge = static_cast<int>(r.data.size());
  op->wr.opcode = opcode_of(op->kind);
  op->wr.send_flags = extent.bytes <= a.send_queue.inline_bytes ? unsigned{IBV_SEND_INLINE} : 0u;
  op->wr.imm_data = htobe32(r.immediate.value_or(0));
  if (a.domain != nullptr) [[unlikely]]
    use_own_key(ctx, *a.domain, *op);
  append(a, *op);
  if (!r.defer && q.posted != q.accepted) post_or_fail(ctx, a);  // what answers it has to find them
  return post(ctx, a, r.defer);
}

Status submit_on_raw(EngineContext& ctx, Agent& a, const Request& r, OperationKind kind) noexcept {
  if (kind != OperationKind::write_imm) return Status::unsupported;
  if (a.send_queue.used >= a.raw->send_limit) return Status::would_block;
  if (!has_key(ctx, a, *r.block)) return Status::invalid_argument;
  Operation* const op = ctx.operations.acquire();
  if (op == nullptr) return Status::would_block;
  begin<OperationKind::raw_write_imm>(a, *op, r.block, r.size, r.done);
  build_one_sided<OperationKind::write_imm>(a, *op, r);
  op->wr.imm_data = htobe32(r.immediate);
  if (a.domain != nullptr) use_own_key(ctx, *a.domain, *op);
  append(a, *op);
  return post(ctx, a, r.defer);
}

std::uint32_t detach_elements(Agent& a, Operation& op) noexcept {
  if (op.wr.sg_list == op.sges) return kNone;
  const std::uint32_t index = a.raw->index_of(op.wr.sg_list);
  op.wr.sg_list = op.sges;
  return index;
}

void release_elements(Agent& a, std::uint32_t index) noexcept {
  RawQueue& q = *a.raw;
  release_all(q.list(index).blocks, static_cast<int>(q.size_of_list(index)));
  q.free_list(index);
}

namespace {

std::string audit_receives(RawQueue& q) {
  const std::uint32_t outstanding = q.accepted - q.completed;
  if (outstanding > q.depth || q.posted - q.completed > outstanding ||
      q.told - q.completed > q.posted - q.completed) {
    return fmt::format("of {} receives, {} are outstanding, {} posted and {} told of", q.depth,
                       outstanding, q.posted - q.completed, q.told - q.completed);
  }
  std::uint32_t to_tell = 0;
  for (std::uint32_t i = q.completed; i != q.accepted; ++i) {
    const RawSlot& slot = q.slot(i);
    const auto count = static_cast<std::uint32_t>(slot.wr.num_sge);
    if (slot.wr.wr_id != raw_receive_id(i) || count > q.receive_elements)
      return fmt::format("receive {} is not its own", i - q.completed);
    for (std::uint32_t k = 0; k < count; ++k) {
      if (q.blocks_of(i)[k]->refs == 0)
        return fmt::format("receive {} goes into a free block", i - q.completed);
    }
    if (i - q.completed >= q.told - q.completed && slot.on_posted) ++to_tell;
  }
  if (to_tell == q.to_tell) return {};
  return fmt::format("{} receives are to be told of, {} counted", to_tell, q.to_tell);
}

/// Each list is free, or of one operation.
std::string audit_lists(const EngineContext& ctx, const Agent& a) {
  const RawQueue& q = *a.raw;
  std::uint32_t found = 0;
  for (std::uint32_t i = q.first_free_list(); i != kNone; i = q.size_of_list(i)) {
    if (i >= q.lists() || ++found > q.lists()) return "the free lists of elements are broken";
  }
  const auto count = [&found](const Operation& op) { found += op.wr.sg_list != op.sges ? 1 : 0; };
  for (const Operation* op = a.send_queue.posted; op != nullptr; op = op->next()) count(*op);
  for (const Operation* op = a.send_queue.deferred; op != nullptr;
       op = op == a.send_queue.deferred_last ? nullptr : op->next())
    count(*op);
  for (const Operation& op : ctx.cancelled_operations) {
    if (op.agent == &a && !op.with_device) count(op);
  }
  if (found == q.lists()) return {};
  return fmt::format("{} lists of elements are free or in use, of {}", found, q.lists());
}

}  // namespace

std::string audit_raw(EngineContext& ctx, const Agent& a) {
  RawQueue& q = *a.raw;
  if (std::string fault = audit_receives(q); !fault.empty()) return fault;
  if (std::string fault = audit_lists(ctx, a); !fault.empty()) return fault;
  bool listed = false;
  for (const Agent* b = ctx.raw->listed; b != nullptr; b = b->raw->next_listed) listed |= b == &a;
  if (listed != q.listed) return "its receives are listed wrongly";
  const bool waits = takes_receives(a) && (q.posted != q.accepted || q.to_tell != 0);
  if (waits && (!listed || !a.credit.in_credit_queue))
    return "receives wait and nobody will post them";
  return {};
}

}  // namespace spinwire::agent
