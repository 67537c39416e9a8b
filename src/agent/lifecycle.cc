// A connection's life, from its record to its end; bring_up.cc has the way to RTS. Cold: at most
// one control verb a step.
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "agent/completion.h"
#include "base/error.h"
#include "base/random.h"
#include "wire/cm_data.h"

namespace spinwire::agent {
namespace {

std::uint64_t after(const EngineContext& ctx, Nanoseconds delay) noexcept {
  return ctx.clock.now() + ctx.clock.ticks(delay);
}

Nanoseconds idle_period(const Config::Connections& c) noexcept {
  return std::min({c.keepalive_interval, c.peer_timeout, c.credit_idle_timeout}) / 2;
}

/// Tells rdma_cm that the connection is over, and a peer that still waits for our answer why.
void leave_cm(Agent& a) noexcept {
  if (a.setup.cm == nullptr) return;
  if (!a.setup.outbound && !a.setup.cm->spoken) {
    const Status status = a.cause.status == Status::ok ? Status::refused : a.cause.status;
    const wire::Frame no = wire::encode_cm_refusal(wire::make_refuse(
        status, a.cause.found.empty() ? "the application refused" : a.cause.found));
    a.setup.cm->id.reject(no.bytes());
  } else if (a.setup.was_ready) {
    a.setup.cm->id.disconnect();
  }
  a.setup.cm.reset();
}

/// Whether nothing of the agent's is with the device, in ERR, any more: a receive that completed
/// after its queue pair is gone would have an entry of the completion queue that nobody counts.
bool is_drained(EngineContext& ctx, const Agent& a) noexcept {
  return idle(a) && (a.own_queue == kNone || own_receives_posted(ctx, a) == 0) &&
         (a.raw == nullptr || raw_receives_posted(a) == 0);
}

bool step_destroy(EngineContext& ctx, Agent& a) noexcept {
  // Windows go before their queue pair.
  if (!end_rendezvous_sends(ctx, a) || !end_leases(ctx, a)) return true;
  leave_cm(a);
  neighbours(ctx, a).clear(a.qp->qp_num);
  ctx.device->destroy_qp(a.qp);
  a.qp = nullptr;
  flush_everything(ctx, a);
  if (a.raw != nullptr) flush_raw_receives(ctx, a);
  drop_rendezvous_receives(ctx, a);
  a.stage = Stage::conceal;
  return true;
}

bool step_conceal(EngineContext& ctx, Agent& a) noexcept {
  leave_cm(a);
  const bool exposed = static_cast<bool>(a.credit_cells.region);
  // The peer may be in the midst of a write to the cell: its key is dead from now on, and the
  // registration keeps the block until the write has ended.
  if (exposed) (void)ctx.registrations->revoke(std::exchange(a.credit_cells.region, {}).rkey);
  if (a.credit_cells.block != nullptr)
    detail::release(std::exchange(a.credit_cells.block, nullptr));
  a.credit.cell = nullptr;
  a.stage = a.domain != nullptr ? Stage::leave : Stage::over;
  return exposed;
}

void abandon(Agent& a) noexcept {
  if (a.stage == Stage::drain || a.stage == Stage::destroy || a.stage == Stage::conceal ||
      a.stage == Stage::leave || a.stage == Stage::over || a.stage == Stage::error)
    return;
  a.stage = a.qp != nullptr ? Stage::error : Stage::conceal;
}

const char* kind_text(OperationKind kind) noexcept {
  switch (kind) {
    case OperationKind::send:
    case OperationKind::send_imm:
    case OperationKind::raw_send:
    case OperationKind::raw_send_imm:
      return "a SEND";
    case OperationKind::write:
    case OperationKind::write_imm:
    case OperationKind::raw_write_imm:
      return "a WRITE";
    case OperationKind::read:
      return "a READ";
    case OperationKind::compare_swap:
    case OperationKind::fetch_add:
      return "an atomic";
    case OperationKind::credit_write:
      return "the WRITE of a credit";
    case OperationKind::keepalive:
      return "a keepalive";
    case OperationKind::rendezvous_read:
      return "the READ of a long message";
    case OperationKind::rendezvous_bind:
    case OperationKind::rendezvous_unbind:
    case OperationKind::lease_bind:
    case OperationKind::lease_unbind:
      return "a memory window's work request";
    case OperationKind::rendezvous_offer:
    case OperationKind::rendezvous_offer_imm:
      return "the offer of a long message";
    case OperationKind::control_message:
    case OperationKind::credit_return:
    case OperationKind::goodbye:
    case OperationKind::cancelled:
      break;
  }
  return "a control message";
}

/// What to look at when the device gives this status.
const char* likely_cause(const EngineContext& ctx, ibv_wc_status status) noexcept {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return ctx.device->info().gid_type == GidType::embedded
                 ? "the peer's process is gone, has closed its device, or its queue pair has failed"
                 : "the peer's process is gone or its queue pair has failed; else packets are lost "
                   "on the way: see both GIDs, the MTU of every hop, and flow control";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "the peer has no receive posted: see whether its engine is polled";
    case IBV_WC_REM_ACCESS_ERR:
      return "the peer's memory was revoked, is smaller or of other rights than was used, or in "
             "another protection domain than the peer's end (own_domain)";
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
      return "the peer's device could not do it: see its events and the longest message it takes";
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return "local memory was deregistered while in use, is of another connection's domain, or "
             "lacks a right that the operation needs";
    case IBV_WC_LOC_LEN_ERR:
      return "the local device takes no message of that length: see its max_msg_sz";
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_EEC_OP_ERR:
      return "the local device could not execute it: some tell so of a wrong length, a dead key or "
             "a queue pair in the wrong state; see that no memory is deregistered while in use";
    case IBV_WC_MW_BIND_ERR:
      return "the local device could not bind a window: its memory lacks the rights, or is gone";
    case IBV_WC_WR_FLUSH_ERR:
      return "the local queue pair had failed before, without a word: the peer asked for what it "
             "may not do, or the device failed; see the device's events";
    case IBV_WC_FATAL_ERR:
      return "the local device has failed: see the system's log, then open another engine";
    default:
      return "see the completion's status; the connection cannot be used any more";
  }
}

Error operation_error(const EngineContext& ctx, const Agent& a, OperationKind kind,
                      const ibv_wc& wc) {
  const verbs::QueuePairOptions& ours = a.attributes.queue_pair;
  // Flushed are operations; a connection that was not to end has a queue pair that failed here.
  const bool failed = wc.status == IBV_WC_WR_FLUSH_ERR;
  return base::make_error(
      failed ? Status::local_error : status_of(wc.status),
      fmt::format("{} on queue pair {:#x} ({}) to {}, queue pair {:#x} ({})", kind_text(kind),
                  wc.qp_num, verbs::gid_text(ours.place.gid), a.peer.name.data(),
                  a.peer.queue_pair.qp_num, verbs::gid_text(a.peer.queue_pair.gid)),
      fmt::format("completion status {} ({}), vendor error {:#x}; ack_timeout {}, retry_count {}, "
                  "rnr_retry {}",
                  static_cast<int>(wc.status), ibv_wc_status_str(wc.status), wc.vendor_err,
                  ours.retry.ack_timeout, ours.retry.retry_count, ours.retry.rnr_retry),
      likely_cause(ctx, wc.status));
}

/// A message that is longer than its receive is the peer's fault, all else our own. Soft-RoCE tells
/// of both with the same status.
Error receive_error(const Agent& a, const ibv_wc& wc) {
  const bool peers = wc.status == IBV_WC_LOC_LEN_ERR || wc.status == IBV_WC_LOC_QP_OP_ERR ||
                     wc.status == IBV_WC_REM_INV_REQ_ERR;
  return base::make_error(
      peers ? Status::protocol : status_of(wc.status),
      fmt::format("receive a message from {}", a.peer.name.data()),
      fmt::format("completion status {} ({}), vendor error {:#x}", static_cast<int>(wc.status),
                  ibv_wc_status_str(wc.status), wc.vendor_err),
      peers ? "the peer sent more than the limit it was told"
            : "the local memory of a receive is gone, or the device has failed: see its events");
}

}  // namespace

namespace {

/// Most rendezvous messages that can be outstanding to peers.
std::uint32_t max_rendezvous_sends(const Config& c) noexcept {
  constexpr std::uint32_t kRegistered = 256;  // messages that need no window
  return std::max(c.memory.windows, kRegistered);
}
/// Most records of rendezvous receives: a message for each receive, and the goodbye of each
/// connection.
std::uint32_t max_rendezvous_receives(const Config& c) noexcept {
  return c.queues.receive_depth + c.connections.maximum +
         c.connections.own_domains * config::receives_per_own_domain(c);
}

}  // namespace

EngineContext::EngineContext(const Config& settings, const Clock& time)
    : config(settings),
      clock(time),
      agents(settings.connections.maximum),
      operations(settings.queues.operations,
                 kControlRequests * settings.connections.maximum + kRendezvousRecords),
      flush_queue(settings.connections.maximum, work.flush),
      credit_queue(settings.connections.maximum, work.credit),
      timers(time.ticks(std::chrono::microseconds(100)), time.now()),
      incarnation(base::random_seed() | 1),
      rendezvous(std::make_unique<RendezvousPool>(max_rendezvous_sends(settings),
                                                  max_rendezvous_receives(settings))),
      control_messages(max_rendezvous_receives(settings) + max_rendezvous_sends(settings) +
                       4 * settings.leases.maximum),
      leases(std::make_unique<LeasePool>(settings.leases.maximum)),
      receive_waiters(settings.connections.maximum, receive_waiter_count) {}

void prepare_timers(Agent& a) noexcept {
  a.setup.timer.index = a.liveness.timer.index = a.index;
  a.setup.timer.kind = kDeadlineTimer;
  a.liveness.timer.kind = kIdleTimer;
  a.cause.status = Status::ok;
}

bool promise_receive(EngineContext& ctx, Agent& a) noexcept {
  if (a.raw != nullptr) {
    a.liveness.last_heard = a.liveness.last_sent = ctx.clock.now();
    return true;
  }
  const bool shares = ctx.device->srq() != nullptr;
  if (shares ? ctx.reserved_receives >= ctx.reservable_receives : !take_own_queue(ctx, a))
    return false;
  ++allotted_with(ctx, a);
  a.credit.reserved = 1;
  a.credit.granted = a.credit.advertised = 1;
  a.liveness.last_heard = a.liveness.last_sent = ctx.clock.now();
  return true;
}

Agent* acquire(EngineContext& ctx, ConnectionState state, bool outbound,
               Nanoseconds patience) noexcept {
  const std::uint32_t index = ctx.agents.acquire();
  if (index == kNone) return nullptr;
  Agent& a = ctx.agents.at(index);
  a.~Agent();
  new (&a) Agent();
  a.index = index;
  a.generation = ctx.agents.generation(index);
  a.setup.outbound = outbound;
  prepare_timers(a);
  set_attributes(a, ctx.attributes);
  if (!promise_receive(ctx, a)) {
    a.generation = 0;
    ctx.agents.release(index);
    return nullptr;
  }
  a.setup.timeout = patience.count() != 0 ? patience
                    : outbound            ? ctx.config.connections.connect_timeout
                                          : ctx.config.connections.handshake_timeout;
  a.stage = Stage::domain;
  enter(ctx, a, state);
  list_setup(ctx, a);
  return &a;
}

void enter(EngineContext& ctx, Agent& a, ConnectionState state) noexcept {
  a.state = state;
  if (a.reconnect != nullptr && state != ConnectionState::resolving) a.reconnect->resting = false;
  room_in_force(a) = state == ConnectionState::ready ? room_of(a) : 0;
  ctx.timers.cancel(a.setup.timer);
  const Config::Connections& c = ctx.config.connections;
  switch (state) {
    case ConnectionState::resolving:
      a.setup.deadline =
          after(ctx, a.reconnect != nullptr && a.reconnect->resting ? a.reconnect->delay
                                                                    : a.setup.timeout);
      break;
    case ConnectionState::exchanging:
      // After `resolving` the deadline of the whole attempt goes on.
      if (a.setup.deadline == 0) a.setup.deadline = after(ctx, a.setup.timeout);
      break;
    case ConnectionState::draining:
      a.setup.deadline = after(ctx, c.close_timeout);
      break;
    case ConnectionState::ready:
      ctx.timers.reschedule(a.liveness.timer, after(ctx, idle_period(c)));
      return;
    case ConnectionState::closed:
      ctx.timers.cancel(a.liveness.timer);
      return;
  }
  ctx.timers.schedule(a.setup.timer, a.setup.deadline);
}

void list_setup(EngineContext& ctx, Agent& a) noexcept {
  if (a.setup.in_queue) return;
  a.setup.in_queue = true;
  a.setup.next = kNone;
  if (ctx.setup_last == kNone) {
    ctx.setup_first = a.index;
  } else {
    ctx.agents.at(ctx.setup_last).setup.next = a.index;
  }
  ctx.setup_last = a.index;
}

bool advance(EngineContext& ctx, Agent& a) noexcept {
  switch (a.stage) {
    case Stage::domain:
    case Stage::slab:
    case Stage::expose:
    case Stage::create:
    case Stage::init:
    case Stage::rtr:
    case Stage::rts:
      return bring_up(ctx, a);
    case Stage::error:
      a.stage = Stage::drain;
      (void)ctx.device->to_error(a.qp);
      return true;
    case Stage::drain:
      flush_unposted(ctx, a);
      if (is_drained(ctx, a)) a.stage = Stage::destroy;
      return false;
    case Stage::destroy:
      return step_destroy(ctx, a);
    case Stage::conceal:
      return step_conceal(ctx, a);
    case Stage::leave:
      return step_leave(ctx, a);
    case Stage::idle:
    case Stage::resolve:
    case Stage::wait:
    case Stage::up:
    case Stage::over:
      return false;
  }
  return false;
}

void fail(EngineContext& ctx, Agent& a, Error cause) noexcept {
  if (a.state == ConnectionState::closed) return;
  if (a.cause.status == Status::ok && !a.closing) {
    if (cause.status == Status::peer_lost) ++ctx.stats.peers_lost;
    a.cause = std::move(cause);
  }
  abandon(a);
  if (a.state != ConnectionState::draining) enter(ctx, a, ConnectionState::draining);
  list_setup(ctx, a);
}

void fail_bad(EngineContext& ctx, Agent& a, Error cause) noexcept {
  ++ctx.stats.bad_messages;
  fail(ctx, a, std::move(cause));
}

void close(EngineContext& ctx, Agent& a) noexcept {
  a.closing = true;
  if (a.state != ConnectionState::ready) {
    abandon(a);
    if (a.state != ConnectionState::draining) enter(ctx, a, ConnectionState::draining);
    list_setup(ctx, a);
    return;
  }
  enter(ctx, a, ConnectionState::draining);
  refuse_rendezvous_receives(ctx, a);
  if (idle(a)) on_drained(ctx, a);
}

void on_operation_failed(EngineContext& ctx, Agent& a, OperationKind kind,
                         const ibv_wc& wc) noexcept {
  if (kind == OperationKind::goodbye) return;  // the peer was gone first; on_drained goes on
  if (wc.status == IBV_WC_WR_FLUSH_ERR && a.state == ConnectionState::draining) return;
  try {
    // Of a long message, the peer's device refuses what the peer has offered.
    const bool offered =
        kind == OperationKind::rendezvous_read && wc.status == IBV_WC_REM_ACCESS_ERR;
    Error cause = operation_error(ctx, a, kind, wc);
    offered ? fail_bad(ctx, a, std::move(cause)) : fail(ctx, a, std::move(cause));
  } catch (...) {
    fail(ctx, a, base::out_of_memory());
  }
}

void on_receive_failed(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept {
  if (a.own_queue != kNone) stop_own_receives(ctx, a);
  if (wc.status == IBV_WC_WR_FLUSH_ERR) return;
  try {
    Error cause = receive_error(a, wc);
    const bool peers = cause.status == Status::protocol;
    peers ? fail_bad(ctx, a, std::move(cause)) : fail(ctx, a, std::move(cause));
  } catch (...) {
    fail(ctx, a, base::out_of_memory());
  }
}

void on_goodbye(EngineContext& ctx, Agent& a) noexcept {
  a.goodbye_received = true;
  a.closing = true;  // what the device reports from now on is no fault
  abandon(a);
  if (a.state != ConnectionState::draining) enter(ctx, a, ConnectionState::draining);
  list_setup(ctx, a);
}

void on_drained(EngineContext& ctx, Agent& a) noexcept {
  const bool speaks = a.stage == Stage::up && a.raw == nullptr;
  if (speaks && a.closing && !a.goodbye_sent && !a.goodbye_received) {
    // Until our offers are answered, and the peer's.
    if (!a.rendezvous.sends.empty() || !a.control_queue.messages.empty()) return;
    a.goodbye_sent = true;
    if (submit_control(ctx, a, OperationKind::goodbye)) return;
  }
  abandon(a);
  list_setup(ctx, a);
}

namespace {

/// Nothing is outstanding: asks a silent peer for a sign of life, gives unused credit back.
void look_at_idle(EngineContext& ctx, Agent& a) noexcept {
  const Config::Connections& c = ctx.config.connections;
  const std::uint64_t now = ctx.clock.now();
  a.liveness.last_check = 0;  // the next look finds new operations, if any
  if (a.raw != nullptr) return;
  const std::uint64_t silent = now - std::min(a.liveness.last_heard, now);
  if (silent > ctx.clock.ticks(c.keepalive_interval) && !a.liveness.keepalive_pending)
    (void)submit_control(ctx, a, OperationKind::keepalive);
  const bool unused =
      now - std::min(a.liveness.last_sent, now) > ctx.clock.ticks(c.credit_idle_timeout);
  if (unused) (void)learn_credit(a);
  if (unused && read_credit_cell(ctx, a) && send_credits(a) >= 2) {
    // The return takes a credit itself and leaves one.
    (void)submit_control(ctx, a, OperationKind::credit_return,
                         static_cast<std::uint16_t>(send_credits(a) - 2));
  }
}

/// Whether operations have been outstanding, and the peer silent, for the whole time-out. Time in
/// which we did not poll ourselves says nothing about the peer, so that a look counts for no more
/// than two periods.
bool silent_too_long(EngineContext& ctx, Agent& a) noexcept {
  const Config::Connections& c = ctx.config.connections;
  const std::uint64_t now = ctx.clock.now();
  const std::uint64_t most = 2 * ctx.clock.ticks(idle_period(c));
  if (a.liveness.last_heard >= a.liveness.last_check) {
    a.liveness.silent_ticks = 0;
  } else {
    a.liveness.silent_ticks += std::min(now - std::min(a.liveness.last_check, now), most);
  }
  a.liveness.last_check = now;
  return a.liveness.silent_ticks > ctx.clock.ticks(c.peer_timeout);
}

Error set_up_timed_out(const Agent& a) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(a.setup.timeout).count();
  const char* const remedy =
      a.setup.out_of_band
          ? "give the peer's endpoint to join(), or allow more time with PrepareOptions::timeout"
      : a.setup.outbound
          ? "see whether the peer polls its engine, or raise connections.connect_timeout"
          : "see what connects there, or raise connections.handshake_timeout";
  return {Status::timed_out,
          fmt::format("{} {} within {} ms", a.setup.outbound ? "connect to" : "shake hands with",
                      a.peer.name.data(), ms),
          fmt::format("still {}", to_string(a.state)), remedy};
}

}  // namespace

void on_timer(EngineContext& ctx, Agent& a, TimerKind kind) noexcept {
  const Config::Connections& c = ctx.config.connections;
  if (kind == kDeadlineTimer) {
    if (a.state == ConnectionState::draining) {
      // The device owes completions, or the peer an answer: no more waiting.
      a.stage = a.qp != nullptr ? Stage::destroy : std::max(a.stage, Stage::conceal);
      list_setup(ctx, a);
      return;
    }
    fail(ctx, a, set_up_timed_out(a));
    return;
  }
  if (a.state != ConnectionState::ready) return;
  ctx.timers.schedule(a.liveness.timer, after(ctx, idle_period(c)));
  if (idle(a)) {
    look_at_idle(ctx, a);
  } else if (silent_too_long(ctx, a)) {
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(c.peer_timeout);
    fail(ctx, a,
         {Status::peer_lost, fmt::format("operations on the connection to {}", a.peer.name.data()),
          fmt::format("no sign of life for {} ms", ms.count()),
          "the peer's process hangs or its network is down"});
  }
}

void become_ready(EngineContext& ctx, Agent& a) noexcept {
  if (a.state == ConnectionState::ready) return;
  a.liveness.last_heard = a.liveness.last_sent = ctx.clock.now();
  a.setup.was_ready = true;
  if (a.reconnect != nullptr) {
    a.reconnect->ready_at = a.liveness.last_heard;
    a.reconnect->first.status = Status::ok;
  }
  enter(ctx, a, ConnectionState::ready);
  ++(a.setup.outbound ? ctx.stats.connected : ctx.stats.accepted);
  if ((a.detour & kReplaced) != 0) replace_handlers(a);
  if (a.handlers.on_ready) a.handlers.on_ready(handle(ctx, a));
}

void overtake_handshake(EngineContext& ctx, Agent& a) noexcept {
  // A peer that was given our endpoint by hand may send as soon as we can receive.
  if (a.setup.out_of_band && a.stage == Stage::rts) (void)advance(ctx, a);
  if (a.stage == Stage::up && (a.setup.out_of_band || !a.setup.outbound)) become_ready(ctx, a);
}

void finish(EngineContext& ctx, Agent& a) noexcept {
  enter(ctx, a, ConnectionState::closed);
  allotted_with(ctx, a) -= a.credit.reserved;
  a.credit.reserved = 0;
  if (a.own_queue != kNone) reclaim_own_receives(ctx, a);
  if (a.raw != nullptr) {
    flush_raw_receives(ctx, a);
    unlist_raw(ctx, a);
  }
  ctx.flush_queue.remove(a);
  ctx.credit_queue.remove(a);
  ctx.receive_waiters.remove(a);
  if ((a.detour & kReplaced) != 0) replace_handlers(a);
  if (tries_again(a)) return rest(ctx, a);
  ++ctx.stats.closed;
  ctx.stats.messages_sent += messages_sent(a);
  ctx.stats.messages_received += a.traffic.messages_received;
  const Callback<void(Connection, const Error&)> on_closed = a.handlers.on_closed;
  const Connection gone = handle(ctx, a);
  const Error cause = final_cause(a);
  a.generation = 0;
  a.reconnect.reset();
  a.raw.reset();
  ctx.agents.release(a.index);
  if (on_closed) on_closed(gone, cause);
}

}  // namespace spinwire::agent
