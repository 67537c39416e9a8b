// A connection's life, from set-up to tear-down. Cold: at most one control verb a step.
#include <errno.h>
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "base/random.h"

namespace spinwire::agent {
namespace {

constexpr std::size_t kCellBytes = 64;

std::uint64_t after(const Shared& s, Nanoseconds delay) noexcept {
  return s.clock.now() + s.clock.ticks(delay);
}

Nanoseconds idle_period(const Config::Connections& c) noexcept {
  return std::min({c.keepalive, c.peer_timeout, c.credit_idle}) / 2;
}

/// The next set-up verb failed: the connection ends with that error.
bool set_up_failed(Shared& s, Agent& a, const Error& error) noexcept {
  fail(s, a, error);
  return true;
}

bool step_expose(Shared& s, Agent& a) noexcept {
  a.cell_block = s.arena->allocate(memory::PoolId::control, 2 * kCellBytes);
  if (a.cell_block == nullptr) {
    a.stage = Stage::over;
    return set_up_failed(s, a,
                         {Status::limit, "keep a credit cell for the connection",
                          "the control pool is used up", "lower connections.maximum"});
  }
  a.cell = new (a.cell_block->payload) CreditCell{};
  const BufferSlice cell(a.cell_block, a.cell_block->payload, sizeof(CreditCell));
  auto exposed = s.registrations->expose(cell, Access::remote_write);
  if (!exposed) return set_up_failed(s, a, exposed.error());
  a.cell_region = *exposed;
  a.stage = Stage::create;
  return true;
}

bool step_create(Shared& s, Agent& a) noexcept {
  const verbs::QueuePairOptions options{s.config.queues.send_depth, s.config.queues.inline_bytes,
                                        0};
  auto qp = s.device->create_qp(options);
  if (!qp) return set_up_failed(s, a, qp.error());
  a.qp = *qp;
  try {
    s.by_qpn.set(a.qp->qp_num, &a);
  } catch (const std::bad_alloc&) {
    return set_up_failed(s, a, base::out_of_memory());
  }
  a.psn = static_cast<std::uint32_t>(base::random_seed()) & 0xffffff;
  a.stage = Stage::init;
  return true;
}

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

verbs::RetryOptions retry_options(const Config::QueuePair& c) noexcept {
  return {static_cast<std::uint8_t>(c.ack_timeout), static_cast<std::uint8_t>(c.retry_count),
          static_cast<std::uint8_t>(c.rnr_retry), static_cast<std::uint8_t>(c.min_rnr_timer)};
}

bool step_up(Shared& s, Agent& a) noexcept {
  const verbs::RetryOptions retry = retry_options(s.config.queue_pair);
  Result<void> done;
  Stage next = Stage::up;
  if (a.stage == Stage::init) {
    done = s.device->to_init(a.qp, kAccess);
    next = a.remote.qp_num != 0 ? Stage::rtr : Stage::wait;
  } else if (a.stage == Stage::rtr) {
    done = s.device->to_rtr(a.qp, a.remote, retry);
    next = Stage::rts;
  } else {
    done = s.device->to_rts(a.qp, a.psn, a.remote, retry);
  }
  if (!done) return set_up_failed(s, a, done.error());
  a.stage = next;
  return true;
}

bool step_destroy(Shared& s, Agent& a) noexcept {
  s.by_qpn.clear(a.qp->qp_num);
  s.device->destroy_qp(a.qp);
  a.qp = nullptr;
  flush_everything(s, a);
  a.stage = Stage::conceal;
  return true;
}

bool step_conceal(Shared& s, Agent& a) noexcept {
  const bool exposed = static_cast<bool>(a.cell_region);
  // The peer may be in the midst of a write to the cell: its key is dead from now on, and the
  // registration keeps the block until the write has ended.
  if (exposed) (void)s.registrations->revoke(std::exchange(a.cell_region, {}).rkey);
  if (a.cell_block != nullptr) detail::release(std::exchange(a.cell_block, nullptr));
  a.cell = nullptr;
  a.stage = Stage::over;
  return exposed;
}

void abandon(Agent& a) noexcept {
  if (a.stage == Stage::drain || a.stage == Stage::destroy || a.stage == Stage::conceal ||
      a.stage == Stage::over || a.stage == Stage::error)
    return;
  a.stage = a.qp != nullptr ? Stage::error : Stage::conceal;
}

Error operation_error(const Agent& a, const ibv_wc& wc) {
  const char* name = ibv_wc_status_str(wc.status);
  const bool lost = wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_RNR_RETRY_EXC_ERR;
  return base::make_error(
      lost                                 ? Status::peer_lost
      : wc.status == IBV_WC_REM_ACCESS_ERR ? Status::remote_access
                                           : Status::remote_error,
      fmt::format("an operation on queue pair {:#x} to {} (queue pair {:#x})", wc.qp_num,
                  a.peer.data(), a.remote.qp_num),
      fmt::format("completion status {} ({})", static_cast<int>(wc.status), name),
      lost ? "the peer's process is gone, has closed its device, or its queue pair has failed"
           : "see the completion's status; the connection cannot be used any more");
}

}  // namespace

Shared::Shared(const Config& settings, const Clock& time)
    : config(settings),
      clock(time),
      agents(settings.connections.maximum),
      operations(settings.queues.operations, kControlRequests * settings.connections.maximum),
      dirty(settings.connections.maximum, work.dirty),
      grants(settings.connections.maximum, work.grants),
      timers(time.ticks(std::chrono::microseconds(100)), time.now()),
      incarnation(base::random_seed() | 1),
      starved(settings.connections.maximum, starved_count) {}

Agent* acquire(Shared& s, ConnectionState state, bool outbound) noexcept {
  if (s.allotted >= s.receive_capacity) return nullptr;  // no receive to promise
  const std::uint32_t index = s.agents.acquire();
  if (index == kNone) return nullptr;
  Agent& a = s.agents.at(index);
  a.~Agent();
  new (&a) Agent();
  a.index = index;
  a.generation = s.agents.generation(index);
  a.outbound = outbound;
  a.allotment = 1;
  a.granted = a.published = 1;
  ++s.allotted;
  a.deadline_timer.index = a.idle_timer.index = index;
  a.deadline_timer.kind = kDeadlineTimer;
  a.idle_timer.kind = kIdleTimer;
  a.cause.status = Status::ok;
  a.last_heard = a.last_sent = s.clock.now();
  a.stage = Stage::expose;
  enter(s, a, state);
  list_setup(s, a);
  return &a;
}

void enter(Shared& s, Agent& a, ConnectionState state) noexcept {
  a.state = state;
  a.sq_room = state == ConnectionState::ready ? s.config.queues.send_depth - kControlRequests : 0;
  s.timers.cancel(a.deadline_timer);
  const Config::Connections& c = s.config.connections;
  switch (state) {
    case ConnectionState::resolving:
      a.deadline = after(s, c.connect_timeout);
      break;
    case ConnectionState::exchanging:
      // Outbound: the deadline of the whole attempt goes on.
      if (!a.outbound) a.deadline = after(s, c.handshake_timeout);
      break;
    case ConnectionState::draining:
      a.deadline = after(s, c.close_timeout);
      break;
    case ConnectionState::ready:
      s.timers.reschedule(a.idle_timer, after(s, idle_period(c)));
      return;
    case ConnectionState::closed:
      s.timers.cancel(a.idle_timer);
      return;
  }
  s.timers.schedule(a.deadline_timer, a.deadline);
}

void list_setup(Shared& s, Agent& a) noexcept {
  if (a.setup_listed) return;
  a.setup_listed = true;
  a.next_setup = kNone;
  if (s.setup_last == kNone) {
    s.setup_first = a.index;
  } else {
    s.agents.at(s.setup_last).next_setup = a.index;
  }
  s.setup_last = a.index;
}

bool advance(Shared& s, Agent& a) noexcept {
  switch (a.stage) {
    case Stage::expose:
      return step_expose(s, a);
    case Stage::create:
      return step_create(s, a);
    case Stage::init:
    case Stage::rtr:
    case Stage::rts:
      return step_up(s, a);
    case Stage::error:
      a.stage = Stage::drain;
      (void)s.device->to_error(a.qp);
      return true;
    case Stage::drain:
      flush_unposted(s, a);
      if (idle(a)) a.stage = Stage::destroy;
      return false;
    case Stage::destroy:
      return step_destroy(s, a);
    case Stage::conceal:
      return step_conceal(s, a);
    case Stage::idle:
    case Stage::wait:
    case Stage::up:
    case Stage::over:
      return false;
  }
  return false;
}

void fail(Shared& s, Agent& a, Error cause) noexcept {
  if (a.state == ConnectionState::closed) return;
  if (a.cause.status == Status::ok && !a.closing) {
    if (cause.status == Status::peer_lost) ++s.stats.peers_lost;
    a.cause = std::move(cause);
  }
  abandon(a);
  if (a.state != ConnectionState::draining) enter(s, a, ConnectionState::draining);
  list_setup(s, a);
}

void close(Shared& s, Agent& a) noexcept {
  a.closing = true;
  if (a.state != ConnectionState::ready) {
    abandon(a);
    if (a.state != ConnectionState::draining) enter(s, a, ConnectionState::draining);
    list_setup(s, a);
    return;
  }
  enter(s, a, ConnectionState::draining);
  if (idle(a)) on_drained(s, a);
}

void on_operation_failed(Shared& s, Agent& a, OperationKind kind, const ibv_wc& wc) noexcept {
  if (kind == OperationKind::goodbye) return;  // the peer was gone first; on_drained goes on
  if (wc.status == IBV_WC_WR_FLUSH_ERR && a.state == ConnectionState::draining) return;
  try {
    fail(s, a, operation_error(a, wc));
  } catch (...) {
    fail(s, a, base::out_of_memory());
  }
}

void on_receive_failed(Shared& s, Agent& a, const ibv_wc& wc) noexcept {
  if (wc.status == IBV_WC_WR_FLUSH_ERR) return;
  fail(s, a,
       {Status::protocol, "receive a message",
        std::string("completion status: ") + ibv_wc_status_str(wc.status),
        "the peer sent more than the limit it was told"});
}

void on_goodbye(Shared& s, Agent& a) noexcept {
  a.goodbye_received = true;
  a.closing = true;  // what the device reports from now on is no fault
  abandon(a);
  if (a.state != ConnectionState::draining) enter(s, a, ConnectionState::draining);
  list_setup(s, a);
}

void on_drained(Shared& s, Agent& a) noexcept {
  if (a.stage == Stage::up && a.closing && !a.goodbye_sent && !a.goodbye_received) {
    a.goodbye_sent = true;
    if (submit_control(s, a, OperationKind::goodbye)) return;
  }
  abandon(a);
  list_setup(s, a);
}

namespace {

/// Nothing is outstanding: asks a silent peer for a sign of life, gives unused credit back.
void look_at_idle(Shared& s, Agent& a) noexcept {
  const Config::Connections& c = s.config.connections;
  const std::uint64_t now = s.clock.now();
  a.looked_at = 0;  // the next look finds new operations, if any
  const std::uint64_t silent = now - std::min(a.last_heard, now);
  if (silent > s.clock.ticks(c.keepalive) && !a.keepalive_pending)
    (void)submit_control(s, a, OperationKind::keepalive);
  const bool unused = now - std::min(a.last_sent, now) > s.clock.ticks(c.credit_idle);
  if (unused) (void)learn_credit(a);
  if (unused && read_credit_cell(a) && send_credits(a) >= 2) {
    // The return takes a credit itself and leaves one.
    (void)submit_control(s, a, OperationKind::credit_return,
                         static_cast<std::uint16_t>(send_credits(a) - 2));
  }
}

/// Whether operations have been outstanding, and the peer silent, for the whole time-out. Time in
/// which we did not poll ourselves says nothing about the peer, so that a look counts for no more
/// than two periods.
bool silent_too_long(Shared& s, Agent& a) noexcept {
  const Config::Connections& c = s.config.connections;
  const std::uint64_t now = s.clock.now();
  const std::uint64_t most = 2 * s.clock.ticks(idle_period(c));
  if (a.last_heard >= a.looked_at) {
    a.waited = 0;
  } else {
    a.waited += std::min(now - std::min(a.looked_at, now), most);
  }
  a.looked_at = now;
  return a.waited > s.clock.ticks(c.peer_timeout);
}

}  // namespace

void on_timer(Shared& s, Agent& a, TimerKind kind) noexcept {
  const Config::Connections& c = s.config.connections;
  if (kind == kDeadlineTimer) {
    if (a.state == ConnectionState::draining) {
      // The device owes completions, or the peer an answer: no more waiting.
      a.stage = a.qp != nullptr ? Stage::destroy : std::max(a.stage, Stage::conceal);
      list_setup(s, a);
      return;
    }
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
        a.outbound ? c.connect_timeout : c.handshake_timeout);
    fail(s, a,
         {Status::timed_out,
          fmt::format("{} {} within {} ms", a.outbound ? "connect to" : "shake hands with",
                      a.peer.data(), ms.count()),
          fmt::format("still {}", to_string(a.state)),
          a.outbound ? "see whether the peer polls its engine, or raise connections.connect_timeout"
                     : "see what connects there, or raise connections.handshake_timeout"});
    return;
  }
  if (a.state != ConnectionState::ready) return;
  s.timers.schedule(a.idle_timer, after(s, idle_period(c)));
  if (idle(a)) {
    look_at_idle(s, a);
  } else if (silent_too_long(s, a)) {
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(c.peer_timeout);
    fail(s, a,
         {Status::peer_lost, fmt::format("operations on the connection to {}", a.peer.data()),
          fmt::format("no sign of life for {} ms", ms.count()),
          "the peer's process hangs or its network is down"});
  }
}

void become_ready(Shared& s, Agent& a) noexcept {
  if (a.state == ConnectionState::ready) return;
  a.last_heard = a.last_sent = s.clock.now();
  a.was_ready = true;
  enter(s, a, ConnectionState::ready);
  ++(a.outbound ? s.stats.connected : s.stats.accepted);
  if (a.handlers_replaced) replace_handlers(a);
  if (a.handlers.on_ready) a.handlers.on_ready(handle(s, a));
}

wire::EndpointInfo endpoint(const Shared& s, const Agent& a) noexcept {
  wire::EndpointInfo info{};
  std::copy_n(s.device->gid().raw, info.gid.size(), info.gid.begin());
  info.gid_type = wire::GidType::softverbs;
  info.lid = s.device->lid();
  info.qp_num = a.qp->qp_num;
  info.psn = a.psn;
  info.mtu = static_cast<std::uint16_t>(std::min(s.config.connections.mtu, s.device->mtu()));
  info.max_message = s.config.connections.eager_bytes;
  info.credits = a.granted;
  info.incarnation = s.incarnation;
  info.control_address = reinterpret_cast<std::uint64_t>(a.cell);
  info.control_rkey = a.cell_region.rkey;
  info.max_rd_atomic = s.device->rd_atomic();
  return info;
}

Result<void> take_endpoint(Shared& s, Agent& a, const wire::EndpointInfo& peer) {
  if (peer.gid_type != wire::GidType::softverbs) {
    return base::fail(Status::unsupported, "connect to a peer on an embedded device",
                      fmt::format("the peer's GID is of type {}", wire::to_string(peer.gid_type)),
                      "open the same kind of device at both ends");
  }
  if (peer.credits == 0) {
    return base::fail(Status::protocol, "take the peer's endpoint", "it grants no credit",
                      "the peer is broken");
  }
  std::copy(peer.gid.begin(), peer.gid.end(), a.remote.gid.raw);
  a.remote.lid = peer.lid;
  a.remote.qp_num = peer.qp_num;
  a.remote.psn = peer.psn;
  a.remote.mtu = std::min<std::uint32_t>(
      {peer.mtu, s.config.connections.mtu, s.device->mtu()});  // the smaller end's counts
  a.remote.rd_atomic = peer.max_rd_atomic;
  a.max_message = std::min(peer.max_message, s.config.connections.eager_bytes);
  a.granted_to_us = a.send_limit = peer.credits;
  a.told_granted = static_cast<std::uint16_t>(peer.credits);
  a.peer_incarnation = peer.incarnation;
  a.peer_cell = peer.control_address;
  a.peer_cell_key = peer.control_rkey;
  return {};
}

void finish(Shared& s, Agent& a) noexcept {
  enter(s, a, ConnectionState::closed);
  s.allotted -= a.allotment;
  a.allotment = 0;
  s.dirty.remove(a);
  s.grants.remove(a);
  s.starved.remove(a);
  ++s.stats.closed;
  s.stats.messages_sent += messages_sent(a);
  s.stats.messages_received += a.messages_received;
  if (a.handlers_replaced) replace_handlers(a);
  const Callback<void(Connection, const Error&)> on_closed = a.handlers.on_closed;
  const Connection gone = handle(s, a);
  const Error cause = std::move(a.cause);
  a.generation = 0;
  s.agents.release(a.index);
  if (on_closed) on_closed(gone, cause);
}

}  // namespace spinwire::agent
