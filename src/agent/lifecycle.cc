// A connection's stages, from its record to its end. Other parts are in bring_up.cc (steps to RTS),
// completion_errors.cc (failed completions) and liveness.cc (death of a peer). Cold: each step uses
// at most one control verb.

#include <algorithm>
#include <utility>

#include "agent/agent.h"
#include "agent/completion.h"
#include "agent/recording.h"
#include "agent/room_waiters.h"
#include "agent/unheard_peers.h"
#include "base/error.h"
#include "base/random.h"

namespace spinwire::agent {
namespace {

std::uint64_t after(const EngineContext& ctx, Nanoseconds delay) noexcept {
  return ctx.clock.now() + ctx.clock.ticks(delay);
}

/// Whether the device, whose queue pair is in ERR, has completed everything of the agent. A receive
/// that completed after its queue pair is gone would use an uncounted entry of the completion
/// queue.
bool is_flushed(EngineContext& ctx, const Agent& a) noexcept {
  return idle(a) && (a.own_queue == kNone || own_receives_posted(ctx, a) == 0) &&
         (a.raw == nullptr || raw_receives_posted(a) == 0);
}

bool step_destroy(EngineContext& ctx, Agent& a) noexcept {
  // After a time-out the queue pair still receives. What its peer sends from now on must not be
  // reported: the record that comes with it is soon that of another connection.
  const bool receives = a.qp->state == IBV_QPS_RTR || a.qp->state == IBV_QPS_RTS;
  if (receives && ctx.device->to_error(a.qp)) return true;
  // Windows go before their queue pair.
  if (!end_rendezvous_sends(ctx, a) || !end_leases(ctx, a)) return true;
  end_cm(a);
  ctx.by_qpn.clear(a.qp->qp_num);
  ctx.device->destroy_qp(a.qp);
  a.qp = ctx.queue_pairs[a.index] = nullptr;
  if (a.own_cell.block == nullptr) a.credit.cell = nullptr;  // it was the queue pair's
  flush_all_operations(ctx, a);
  if (a.raw != nullptr) flush_raw_receives(ctx, a);
  drop_rendezvous_receives(ctx, a);
  set_stage(a, Stage::deregister_cell);
  return true;
}

bool step_deregister_cell(EngineContext& ctx, Agent& a) noexcept {
  end_cm(a);
  const bool exposed = a.own_cell.region.rkey != 0;
  // While a write of the peer to the cell is under way, the registration keeps the block.
  if (exposed) {
    (void)ctx.registrations->revoke(std::exchange(a.own_cell.region, {}).rkey,
                                    memory::RegistrationTable::kLibrary);
  }
  if (a.own_cell.block != nullptr) detail::release(std::exchange(a.own_cell.block, nullptr));
  a.credit.cell = nullptr;
  set_stage(a, a.domain != nullptr ? Stage::end_domain : Stage::over);
  return exposed;
}

/// Starts the tear-down, unless it has started.
void start_teardown(Agent& a) noexcept {
  if (a.stage >= Stage::error) return;
  set_stage(a, a.qp != nullptr ? Stage::error : Stage::deregister_cell);
}

/// Limit of rendezvous messages outstanding to peers.
std::uint32_t max_rendezvous_sends(const Config& c) noexcept {
  constexpr std::uint32_t kRegistered = 256;  // messages that need no window
  return std::max(c.memory.windows, kRegistered);
}
/// Limit of records of rendezvous receives: a message for each receive, and the goodbye of each
/// connection.
std::uint32_t max_rendezvous_receives(const Config& c) noexcept {
  return c.queues.receive_depth + c.connections.maximum +
         c.connections.own_domains * config::receives_per_own_domain(c);
}

}  // namespace

EngineParts::EngineParts(const Config& settings, const Clock& time)
    : config(settings),
      clock(time),
      timers(time.ticks(std::chrono::microseconds(100)), time.now()),
      incarnation(base::random_seed() | 1) {}

EngineContext::EngineContext(const Config& settings, const Clock& time)
    : EngineParts(settings, time),
      agents(settings.connections.maximum),
      operations(settings.queues.operations, config::internal_operations(settings)),
      queue_pairs(std::make_unique<ibv_qp*[]>(settings.connections.maximum)),
      flush_queue(settings.connections.maximum, work.flush),
      end_of_poll_list(settings.connections.maximum, work.end_of_poll),
      sources(settings.connections.maximum, clock),
      rendezvous(std::make_unique<RendezvousPool>(max_rendezvous_sends(settings),
                                                  max_rendezvous_receives(settings))),
      control_messages(max_rendezvous_receives(settings) + max_rendezvous_sends(settings) +
                       4 * settings.leases.maximum),
      leases(std::make_unique<LeasePool>(settings.leases.maximum, settings.connections.maximum)),
      receive_waiters(settings.connections.maximum, receive_waiter_count) {}

void prepare_timers(Agent& a) noexcept {
  a.setup.timer.index = a.liveness.timer.index = a.index;
  a.setup.timer.kind = kDeadlineTimer;
  a.liveness.timer.kind = kLivenessTimer;
  a.cause.status = Status::ok;
}

std::uint16_t max_direct_limit(const EngineContext& ctx, const Agent& a) noexcept {
  if (ctx.direct == nullptr || a.raw != nullptr || a.domain != nullptr) return 0;
  const std::uint32_t longest = ctx.direct->longest - verbs::kDirectMessageHeader;
  return static_cast<std::uint16_t>(std::min(a.send_queue.max_eager, longest) + 1);
}

std::uint32_t longest_in_place(const EngineContext& ctx) noexcept {
  if (ctx.direct == nullptr) return 0;
  const Config::Connections& c = ctx.config.connections;
  // The pool of rendezvous messages has the blocks for those that are kept.
  const bool takes_long = ctx.config.memory.rendezvous_bytes != 0;
  const std::uint32_t longest = takes_long ? c.max_message_bytes : c.eager_bytes;
  return std::min(ctx.direct->longest, longest + std::uint32_t{wire::kMessageHeaderBytes});
}

namespace {

/// Rendezvous::longest_direct of a ready connection.
std::uint32_t longest_direct(const EngineContext& ctx, const Agent& a) noexcept {
  if (max_direct_limit(ctx, a) == 0) return 0;
  const std::uint32_t there = ctx.direct->longest_in_place(a.qp);
  return there > verbs::kDirectMessageHeader
             ? std::min(there - verbs::kDirectMessageHeader, a.max_message)
             : 0;
}

}  // namespace

void enter(EngineContext& ctx, Agent& a, ConnectionState state) noexcept {
  a.state = state;
  record(ctx, a, observe::EventKind::state, {to_string(state), ", peer ", a.peer.name.data()});
  const bool ready = state == ConnectionState::ready;
  a.slow_path =
      static_cast<std::uint8_t>(ready ? a.slow_path & ~kNotReady : a.slow_path | kNotReady);
  if (a.reconnect != nullptr && state != ConnectionState::resolving)
    a.reconnect->backing_off = false;
  send_limit_of(a) = ready ? max_send_limit(a) : 0;
  a.send_queue.direct_limit = ready ? max_direct_limit(ctx, a) : std::uint16_t{0};
  a.rendezvous.longest_direct = ready ? longest_direct(ctx, a) : 0;
  if (ready && ctx.direct != nullptr) {
    // The embedded device of another process reads the replies that are sent from these blocks.
    a.rendezvous.reuse =
        ctx.direct->is_between_processes(a.qp) ? memory::Reuse::oldest : memory::Reuse::newest;
  }
  ctx.timers.cancel(a.setup.timer);
  if (!ready) stop_awaiting_peer(ctx, a);
  const Config::Connections& c = ctx.config.connections;
  switch (state) {
    case ConnectionState::resolving:
      a.setup.deadline = a.reconnect != nullptr && a.reconnect->backing_off
                             ? a.reconnect->next_attempt
                             : after(ctx, a.setup.timeout);
      break;
    case ConnectionState::exchanging:
      // After `resolving`, keep the deadline of the whole attempt.
      if (a.setup.deadline == 0) a.setup.deadline = after(ctx, a.setup.timeout);
      break;
    case ConnectionState::draining:
      a.setup.deadline = after(ctx, a.goodbyes.awaits_peer || a.goodbyes.peer_awaits
                                        ? std::max(c.close_timeout, c.peer_timeout)
                                        : c.close_timeout);
      break;
    case ConnectionState::ready:
      return start_liveness_checks(ctx, a);
    case ConnectionState::closed:
      ctx.timers.cancel(a.liveness.timer);
      return;
  }
  ctx.timers.schedule(a.setup.timer, a.setup.deadline);
}

namespace {

Error set_up_timed_out(const Agent& a) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(a.setup.timeout).count();
  const char* const remedy =
      a.setup.out_of_band
          ? "give the peer's endpoint to join(), or allow more time with PrepareOptions::timeout"
      : a.setup.outbound
          ? "see whether the peer polls its engine, or raise connections.connect_timeout"
          : "see what connects there, or raise connections.handshake_timeout";
  const char* const address = a.setup.address_pending ? ", and nobody answers at its address" : "";
  return {Status::timed_out,
          base::format("{} {} within {} ms", a.setup.outbound ? "connect to" : "shake hands with",
                       a.peer.name.data(), ms),
          base::format("still {}{}", to_string(a.state), address), remedy};
}

}  // namespace

void set_stage(Agent& a, Stage stage) noexcept { a.stage = stage; }

void advance(EngineContext& ctx, Agent& a, Event event) noexcept {
  switch (event) {
    case Event::route_resolved:
      record(ctx, a, observe::EventKind::handshake, {"the route is resolved"});
      a.setup.cm->resolved = true;
      if (a.stage != Stage::resolve) return;
      set_stage(a, Stage::init);
      return queue_setup(ctx, a);
    case Event::endpoint_received:
      record(ctx, a, observe::EventKind::handshake, {"the peer's endpoint is here"});
      if (a.stage != Stage::wait) return;  // step_up() skips `wait`
      set_stage(a, Stage::rtr);
      return queue_setup(ctx, a);
    case Event::peer_ready:
      record(ctx, a, observe::EventKind::handshake, {"the peer is ready"});
      if (a.stage == Stage::up) become_ready(ctx, a);
      return;
    case Event::timeout:
      if (a.state != ConnectionState::draining) return fail(ctx, a, set_up_timed_out(a));
      // Completions of the device, or an answer of the peer, are missing: stop waiting for them.
      set_stage(a, a.qp != nullptr ? Stage::destroy : std::max(a.stage, Stage::deregister_cell));
      return queue_setup(ctx, a);
    case Event::aborted:
      return set_stage(a, a.qp != nullptr ? Stage::destroy : Stage::deregister_cell);
  }
}

bool run_setup_step(EngineContext& ctx, Agent& a) noexcept {
  switch (a.stage) {
    case Stage::domain:
    case Stage::slab:
    case Stage::create:
    case Stage::register_cell:
    case Stage::init:
    case Stage::rtr:
    case Stage::rts:
      return bring_up(ctx, a);
    case Stage::error:
      set_stage(a, Stage::await_flush);
      (void)ctx.device->to_error(a.qp);
      return true;
    case Stage::await_flush:
      flush_unposted(ctx, a);
      if (is_flushed(ctx, a)) set_stage(a, Stage::destroy);
      return false;
    case Stage::destroy:
      return step_destroy(ctx, a);
    case Stage::deregister_cell:
      return step_deregister_cell(ctx, a);
    case Stage::end_domain:
      return step_end_domain(ctx, a);
    case Stage::idle:
    case Stage::resolve:
    case Stage::wait:
    case Stage::up:
    case Stage::over:
      return false;
  }
  return false;
}

namespace {

void tear_down(EngineContext& ctx, Agent& a) noexcept {
  start_teardown(a);
  if (a.state != ConnectionState::draining) enter(ctx, a, ConnectionState::draining);
  queue_setup(ctx, a);
}

}  // namespace

void fail(EngineContext& ctx, Agent& a, Error cause) noexcept {
  if (a.state == ConnectionState::closed) return;
  if (a.cause.status == Status::ok && !a.closing) {
    if (cause.status == Status::peer_lost) ++ctx.stats.peers_lost;
    record(ctx, a, cause);
    a.cause = std::move(cause);
  }
  tear_down(ctx, a);
}

void fail_protocol(EngineContext& ctx, Agent& a, Error cause) noexcept {
  ++ctx.stats.bad_messages;
  fail(ctx, a, std::move(cause));
}

void close(EngineContext& ctx, Agent& a) noexcept {
  a.closing = a.goodbyes.by_us = true;
  if (a.state != ConnectionState::ready) return tear_down(ctx, a);
  enter(ctx, a, ConnectionState::draining);
  refuse_rendezvous_receives(ctx, a);
  if (idle(a)) continue_close(ctx, a);
}

void on_goodbye(EngineContext& ctx, Agent& a) noexcept {
  a.goodbye_received = true;
  record(ctx, a, observe::EventKind::goodbye, {"received"});
  a.closing = true;  // errors that the device reports from now on are no fault
  const bool awaits_peer = std::exchange(a.goodbyes.awaits_peer, false);
  const bool can_answer = a.goodbyes.peer_awaits && a.raw == nullptr;
  if (a.stage == Stage::up && (can_answer || (awaits_peer && !idle(a)))) {
    if (is_ready(a)) enter(ctx, a, ConnectionState::draining);
    // Otherwise the last completion goes on: that of our goodbye may be missing.
    if (idle(a)) continue_close(ctx, a);
    return;
  }
  tear_down(ctx, a);
}

void continue_close(EngineContext& ctx, Agent& a) noexcept {
  const bool can_send = a.stage == Stage::up && a.raw == nullptr;
  const bool is_due = !a.goodbye_received || a.goodbyes.peer_awaits;
  if (can_send && a.closing && !a.goodbye_sent && is_due) {
    // The offers of both ends must be answered first.
    if (!a.rendezvous.sends.empty() || !a.control_to_send.empty()) return;
    if (send_goodbye(ctx, a)) {
      if (a.goodbyes.awaits_peer) {  // the peer has a time of its own
        a.setup.deadline = after(ctx, std::max(ctx.config.connections.close_timeout,
                                               ctx.config.connections.peer_timeout));
        ctx.timers.reschedule(a.setup.timer, a.setup.deadline);
      }
      return;
    }
    a.goodbyes.awaits_peer = false;  // all records are in use
  }
  if (can_send && a.goodbyes.awaits_peer) return;
  start_teardown(a);
  queue_setup(ctx, a);
}

Agent* on_timer(EngineContext& ctx, const base::Timer& timer) noexcept {
  if (timer.kind == kLeaseGrantedTimer || timer.kind == kLeaseHeldTimer) {
    on_lease_timer(ctx, timer);
    return nullptr;
  }
  if (timer.kind == kOperationTimer) return on_operation_timer(ctx, timer), nullptr;
  Agent& a = ctx.agents.at(timer.index);
  if (timer.kind == kLivenessTimer) {
    check_liveness(ctx, a);
    return nullptr;
  }
  if (a.reconnect != nullptr && a.reconnect->backing_off) return &a;
  advance(ctx, a, Event::timeout);
  return nullptr;
}

void become_ready(EngineContext& ctx, Agent& a) noexcept {
  if (a.state == ConnectionState::ready) return;
  // An early message made the connection ready, and its handler closed the connection before the
  // peer's last frame came.
  if (a.state == ConnectionState::draining) return;
  a.activity.last_heard = a.activity.last_sent = ctx.clock.now();
  a.setup.was_ready = true;
  if (a.reconnect != nullptr) {
    a.reconnect->ready_at = a.activity.last_heard;
    a.reconnect->first.status = Status::ok;
  }
  enter(ctx, a, ConnectionState::ready);
  await_peer(ctx, a);
  if (a.setup.outbound && a.raw == nullptr) write_first_word(ctx, a);
  ++(a.setup.outbound ? ctx.stats.connected : ctx.stats.accepted);
  use_next_handlers(a);
  if (a.handlers.on_ready) a.handlers.on_ready(handle(ctx, a));
}

void install_next_handlers(Agent& a) noexcept {
  use_handlers(a, a.next_handlers);
  a.slow_path &= static_cast<std::uint8_t>(~kHandlersReplaced);
}

void on_early_message(EngineContext& ctx, Agent& a) noexcept {
  // An out-of-band peer may send as soon as this end can receive.
  if (a.setup.out_of_band && a.stage == Stage::rts) (void)run_setup_step(ctx, a);
  if (a.stage == Stage::up && (a.setup.out_of_band || !a.setup.outbound)) become_ready(ctx, a);
}

void finish(EngineContext& ctx, Agent& a) noexcept {
  enter(ctx, a, ConnectionState::closed);
  unreserve_receives(ctx, a, a.credit.reserved);
  if (a.own_queue != kNone) reclaim_own_receives(ctx, a);
  if (a.raw != nullptr) {
    flush_raw_receives(ctx, a);
    remove_from_raw_queue(ctx, a);
  }
  if (ctx.direct != nullptr) ctx.direct->publish(ctx.device->context());
  ctx.flush_queue.remove(a);
  ctx.end_of_poll_list.remove(a);
  ctx.receive_waiters.remove(a);
  stop_waiting_for_credit(ctx, a);
  stop_waiting_for_room(ctx, a);
  forget_ran_operations(ctx, a);
  use_next_handlers(a);
  if (can_reconnect(ctx, a)) return back_off(ctx, a);
  ++ctx.stats.closed;
  ctx.stats.messages_sent += messages_sent(a);
  ctx.stats.messages_received += a.activity.messages_received;
  const Callback<void(Connection, const Error&)> on_closed = a.handlers.on_closed;
  const Connection gone = handle(ctx, a);
  const Error cause = final_cause(a);
  a.generation = 0;
  a.reconnect.reset();
  a.raw.reset();
  a.private_data.reset();
  a.peer.private_data.reset();
  a.setup.endpoints.reset();
  close_account(ctx, a);
  ctx.agents.release(a.index);
  find_yielding_peers(ctx);
  if (on_closed) on_closed(gone, cause);
}

}  // namespace spinwire::agent
