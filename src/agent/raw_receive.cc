// Receives of raw connections, from their acceptance to their callback. Hot.
#include <endian.h>

#include <utility>

#include "agent/agent.h"
#include "agent/completion.h"
#include "agent/raw_elements.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

/// Lists the agent for the end of the poll, which posts its receives and runs their callbacks.
void queue_receives(EngineContext& ctx, Agent& a) noexcept {
  RawQueue& q = *a.raw;
  visit_at_end_of_poll(ctx, a);
  if (q.in_queue) return;
  q.in_queue = true;
  ctx.raw->queue.push_back(a);
  ++ctx.queued_agents;
}

/// Replaces the engine's key to the pools by the key of the agent's own domain.
void use_own_keys(const EngineContext& ctx, Agent& a) noexcept {
  RawQueue& q = *a.raw;
  for (std::uint32_t i = q.posted; i != q.accepted; ++i) {
    ibv_sge* const sges = q.elements_of(i);
    for (int k = 0; k < q.slot(i).wr.num_sge; ++k) {
      if (sges[k].lkey == ctx.staging_block->lkey) sges[k].lkey = a.domain->lkey;
    }
  }
}

/// Posts the accepted receives. Returns 0 or an errno value. Receives that the device refuses end
/// with the connection.
int post_accepted(EngineContext& ctx, Agent& a) noexcept {
  RawQueue& q = *a.raw;
  if (q.posted == q.accepted) return 0;
  if (a.domain != nullptr) [[unlikely]]
    use_own_keys(ctx, a);
  ibv_recv_wr* bad = nullptr;
  const int error = ibv_post_recv(a.qp, &q.slot(q.posted).wr, &bad);
  const std::uint32_t end = error == 0 ? q.accepted : q.receive_at(bad);
  ctx.posted_receives += end - q.posted;
  ctx.stats.receives_posted += end - q.posted;
  q.posted = end;
  if (error != 0) [[unlikely]]
    q.failed = true;
  if (q.callbacks_due == 0) {
    q.notified = q.posted;
  } else {
    queue_receives(ctx, a);
  }
  return error;
}

[[gnu::cold]] void fail_post(EngineContext& ctx, Agent& a, int error) noexcept {
  fail(ctx, a,
       {Status::local_error, "post a list of receive work requests",
        base::format("ibv_post_recv: errno {}", error), "report this as a defect"});
}

inline void post_or_fail(EngineContext& ctx, Agent& a) noexcept {
  if (!takes_raw_receives(a)) return;
  if (const int error = post_accepted(ctx, a); error != 0) [[unlikely]]
    fail_post(ctx, a, error);
}

/// Runs the callback `on_posted` of the next posted receive.
inline void notify_next_posted(RawQueue& q) noexcept {
  const RawSlot& slot = q.slot(q.notified++);
  if (!slot.on_posted) return;
  --q.callbacks_due;
  slot.on_posted();
}

void run_posted_callbacks_of(RawQueue& q) noexcept {
  // The next poll notifies of receives that these callbacks post.
  for (const std::uint32_t end = q.posted; q.notified != end;) notify_next_posted(q);
}

}  // namespace

Agent*& next_in_raw_queue(Agent& a) noexcept { return a.raw->next_in_queue; }

bool takes_raw_receives(const Agent& a) noexcept {
  return a.stage >= Stage::wait && a.stage <= Stage::up && !a.raw->failed;
}

int post_raw_receives(EngineContext& ctx, Agent& a) noexcept { return post_accepted(ctx, a); }

std::uint32_t raw_receives_posted(const Agent& a) noexcept {
  return a.raw->posted - a.raw->completed;
}

void remove_from_raw_queue(EngineContext& ctx, Agent& a) noexcept {
  if (!std::exchange(a.raw->in_queue, false)) return;
  --ctx.queued_agents;
  ctx.raw->queue.erase(a);
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
  hold_elements(r.into, sges, q.blocks_of(q.accepted));
  slot.wr = {raw_receive_id(q.accepted), nullptr, sges, static_cast<int>(r.into.size())};
  slot.on_received = r.on_received;
  slot.on_posted = r.on_posted;
  if (slot.on_posted) ++q.callbacks_due;
  if (q.accepted != q.posted) q.slot(q.accepted - 1).wr.next = &slot.wr;
  ++q.accepted;
  if (r.defer && takes_raw_receives(a)) {
    queue_receives(ctx, a);
  } else {
    post_or_fail(ctx, a);  // before INIT, the receive waits
  }
  return Status::ok;
}

namespace {

/// Why the connection of a failed receive ends.
Error receive_error(const Agent& a, const ibv_wc& wc, Status status) noexcept {
  const bool flushed = status == Status::flushed;
  const char* const remedy =
      flushed
          ? "the local queue pair failed earlier and reported no error: the peer asked for what "
            "it may not do, or the device failed; see the device's events"
      : status == Status::message_too_long
          ? "give the receive as many bytes as the peer sends at once"
          : "the local memory of a receive is gone, or the device has failed: see its events";
  return base::make_error(
      flushed ? Status::local_error : status, base::format("receive from {}", a.peer.name.data()),
      base::format("completion status {} ({}), vendor error {:#x}", static_cast<int>(wc.status),
                   ibv_wc_status_str(wc.status), wc.vendor_err),
      remedy);
}

/// Soft-RoCE reports an overlong message like other faults of the queue pair.
Status receive_status(ibv_wc_status status) noexcept {
  const bool too_long = status == IBV_WC_LOC_LEN_ERR || status == IBV_WC_LOC_QP_OP_ERR ||
                        status == IBV_WC_REM_INV_REQ_ERR;
  return too_long ? Status::message_too_long : status_of(status);
}

[[gnu::cold, gnu::noinline]] Status on_receive_error(EngineContext& ctx, Agent& a,
                                                     const ibv_wc& wc) noexcept {
  const Status status = receive_status(wc.status);
  a.raw->failed = true;
  if (status == Status::flushed && a.state == ConnectionState::draining) return status;
  fail(ctx, a, receive_error(a, wc, status));
  return status;
}

/// Ends the oldest receive. Its slot stays unchanged until the callback has run.
inline void end_receive(EngineContext& ctx, RawQueue& q, const RawReceive& how) noexcept {
  const std::uint32_t receive = q.completed++;
  --ctx.posted_receives;
  RawSlot& slot = q.slot(receive);
  if (slot.on_received) slot.on_received(how);
  release_all(q.blocks_of(receive), slot.wr.num_sge);
}

inline void on_raw_receive(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept {
  RawQueue& q = *a.raw;
  if (q.completed == q.posted || q.slot(q.completed).wr.wr_id != wc.wr_id) [[unlikely]] {
    ++ctx.stats.stale_completions;
    return;
  }
  if (a.stage == Stage::await_flush) [[unlikely]]
    queue_setup(ctx, a);  // this receive may be the last to drain
  if (q.notified == q.completed) notify_next_posted(q);
  RawReceive how;
  if (wc.status != IBV_WC_SUCCESS) [[unlikely]] {
    how.status = on_receive_error(ctx, a, wc);
    return end_receive(ctx, q, how);
  }
  a.activity.last_heard = ctx.now;
  // The message may overtake the last frame of the handshake, or this end's last step.
  if (a.state == ConnectionState::exchanging) [[unlikely]]
    on_early_message(ctx, a);
  how.bytes = wc.byte_len;
  how.is_write = wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
  if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) how.immediate = be32toh(wc.imm_data);
  ++a.activity.messages_received;
  a.activity.bytes_received += wc.byte_len;
  end_receive(ctx, q, how);
}

}  // namespace

const ibv_wc* process_raw_receives(EngineContext& ctx, Agent& a, const ibv_wc* wc,
                                   const ibv_wc* end) noexcept {
  const std::uint32_t qp_num = wc->qp_num;
  do {
    on_raw_receive(ctx, a, *wc);
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
    if (q.notified == q.completed) {  // flushed before it was posted
      if (q.slot(q.notified++).on_posted) --q.callbacks_due;
    }
    end_receive(ctx, q, how);
  }
}

void post_raw_receives_now(EngineContext& ctx, Agent& a) noexcept { post_or_fail(ctx, a); }

void post_queued_raw_receives(EngineContext& ctx) noexcept {
  for (Agent& a : ctx.raw->queue) post_or_fail(ctx, a);
}

void run_posted_callbacks(EngineContext& ctx) noexcept {
  // A callback may list its agent again.
  auto queue = std::exchange(ctx.raw->queue, {});
  while (!queue.empty()) {
    Agent& a = queue.pop_front();
    a.raw->in_queue = false;
    --ctx.queued_agents;
    run_posted_callbacks_of(*a.raw);
  }
  post_queued_raw_receives(ctx);
}

}  // namespace spinwire::agent
