// Faults of reliable connections: work requests wait in the send queue, hidden from the plain code,
// until they are due or their fault applies. Cold.
#include <algorithm>
#include <utility>

#include "softverbs/device_control.h"
#include "softverbs/faults/fault_layer.h"
#include "softverbs/queues.h"

namespace spinwire::softverbs {
namespace {

void decide(Context& c, Qp& qp, std::uint32_t position) noexcept {
  Faults& f = *c.faults;
  QueueFaults& q = *qp.faults;
  const std::uint32_t slot = position & qp.sq_mask;
  const std::uint8_t opcode = qp.sq[slot].opcode;
  HeldWr& held = q.held[slot];
  held.status = count_request(f, qp);
  const FaultPlan& plan = plan_for(f, qp.peer->gid);
  const RequestFaults faults = draw_faults(plan, f.number, plan.delay_min, plan.delay_max);
  held.rnr = faults.rnr && is_packet(opcode) ? plan.rnr_in_a_row : 0;
  const std::uint64_t delay = is_local(opcode) ? 0 : faults.delay[0];
  if (delay != 0) ++f.statistics.delayed;
  held.order = ++f.order;
  held.ready = q.last_ready = std::max(q.last_ready, now_in_ns(c) + delay);
  held.loss = {};
  if (plan.packet_loss > 0 && !is_local(opcode) && held.status == IBV_WC_SUCCESS)
    plan_loss(plan, f.number, qp, position);
}

/// Checks work requests and appends them to the queue; the plain code sends nothing meanwhile.
int append(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  const bool open = std::exchange(qp.open, false);
  const bool waiting = std::exchange(qp.waiting, true);
  const int error = post_send(&qp, wr, bad);
  qp.open = open;
  qp.waiting = waiting;
  return error;
}

/// Hides the work requests that the plain code has not sent yet.
void withdraw_unsent(Qp& qp) noexcept {
  unstall(qp);
  qp.sq_head = qp.sq_next;
}

/// Lets the oldest work request time out, whether it was sent before the cut or would be sent now.
void time_out(Qp& qp, std::uint64_t now) noexcept {
  QueueFaults& q = *qp.faults;
  withdraw_unsent(qp);
  if (qp.waiting || q.posted == qp.sq_tail) return;
  if (qp.sq_tail == qp.sq_next) {  // the next work request is not sent yet
    const std::uint32_t slot = qp.sq_tail & qp.sq_mask;
    if (is_local(qp.sq[slot].opcode) || q.held[slot].ready > now) return;
  }
  ++context_of(qp.context).faults->statistics.timeouts;
  qp.sq_head = q.posted;  // after the last retry all of it is flushed
  retry(qp, Nak::not_ready, 0);
  if (qp.state != IBV_QPS_ERR) withdraw_unsent(qp);
}

/// Flushes the hidden work requests, after the plain code has flushed the others.
void flush_held(Qp& qp) noexcept {
  if (qp.faults->posted == qp.sq_head) return;
  qp.sq_head = qp.faults->posted;
  enter_error(qp);
}

/// Whether the work request meets its fault instead of being sent.
bool meets_fault(const HeldWr& held) noexcept {
  return held.rnr != 0 || held.status != IBV_WC_SUCCESS || held.loss.exhausted;
}

}  // namespace

bool has_held(const Qp& qp) noexcept {
  const QueueFaults& q = *qp.faults;
  return q.posted != qp.sq_head || (q.cut && q.posted != qp.sq_tail);
}

void list_busy(Faults& f, Qp& qp) noexcept {
  if (qp.faults->in_held_work_list || !has_held(qp)) return;
  qp.faults->in_held_work_list = true;
  f.with_held_work.push_back(&qp);  // room is reserved when a queue pair is created
}

int post_connected_with_faults(Qp& qp, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  Context& c = context_of(qp.context);
  QueueFaults& q = *qp.faults;
  const std::uint32_t sent = qp.sq_head;
  const std::uint32_t before = q.posted;
  qp.sq_head = before;
  if (qp.state != IBV_QPS_RTS) {  // refused, or flushed behind held work requests
    const int error = post_send(&qp, wr, bad);
    q.posted = qp.sq_head;
    return error;
  }
  const int error = append(qp, wr, bad);
  q.posted = qp.sq_head;
  for (std::uint32_t at = before; at != q.posted; ++at) decide(c, qp, at);
  qp.sq_head = sent;
  for (std::uint32_t at = before; at != q.posted; ++at) expose_loss(qp, at);
  list_busy(*c.faults, qp);
  return error;
}

void sync_queue(Qp& qp, std::uint64_t now) noexcept {
  QueueFaults& q = *qp.faults;
  if (qp.state == IBV_QPS_ERR) return flush_held(qp);
  if (qp.peer->gone) {
    qp.sq_head = q.posted;
    stop_waiting(qp);
    return run_send_queue(qp);
  }
  if (q.cut) time_out(qp, now);
  if (!is_sendable(qp)) q.not_before = now;
}

bool is_sendable(const Qp& qp) noexcept {
  const QueueFaults& q = *qp.faults;
  if (q.posted == qp.sq_head || qp.waiting || qp.state != IBV_QPS_RTS) return false;
  const std::uint32_t slot = qp.sq_head & qp.sq_mask;
  if (q.cut && !is_local(qp.sq[slot].opcode)) return false;
  // A fault that ends the queue pair waits until all work requests before it are complete.
  return !meets_fault(q.held[slot]) || qp.sq_tail == qp.sq_head;
}

void dispatch_next(Qp& qp, std::uint64_t at) noexcept {
  Context& c = context_of(qp.context);
  QueueFaults& q = *qp.faults;
  FaultStatistics& statistics = c.faults->statistics;
  HeldWr& held = q.held[qp.sq_head & qp.sq_mask];
  if (held.loss.happened) {
    begin_retry(qp);
    q.not_before = std::max(q.not_before, at);  // later work requests are sent after it
  }
  if (held.loss.next != kNoLoss && !held.loss.exhausted) return drop_packet(qp, at);
  held.loss.probability = 0;  // later tries have other reasons
  if (!meets_fault(held)) {
    ++qp.sq_head;
    run_send_queue(qp);
    if (qp.state == IBV_QPS_ERR) flush_held(qp);
    return;
  }
  qp.sq_head = q.posted;
  if (held.loss.exhausted) return fail_oldest(qp, IBV_WC_RETRY_EXC_ERR);
  if (held.status != IBV_WC_SUCCESS) {
    ++statistics.failed;
    return fail_oldest(qp, held.status);
  }
  --held.rnr;
  ++statistics.rnr;
  retry(qp, Nak::rnr, remote_entry(qp).rights.rnr_timer.load(std::memory_order_relaxed));
  if (qp.state != IBV_QPS_ERR) withdraw_unsent(qp);
}

}  // namespace spinwire::softverbs
