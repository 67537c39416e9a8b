// A connection's life, from set-up to tear-down. Cold: at most one control verb a step.
#include <errno.h>
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "base/random.h"
#include "wire/cm_data.h"

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
  auto qp = s.device->create_qp(a.attributes.queue_pair);
  if (!qp) return set_up_failed(s, a, qp.error());
  a.qp = *qp;
  try {
    s.by_qpn.set(a.qp->qp_num, &a);
  } catch (const std::bad_alloc&) {
    return set_up_failed(s, a, base::out_of_memory());
  }
  const std::int32_t psn = a.attributes.psn;
  a.psn = static_cast<std::uint32_t>(psn >= 0 ? static_cast<std::uint64_t>(psn)
                                              : base::random_seed() & 0xffffff);
  a.stage = a.cm != nullptr && !a.cm->resolved ? Stage::resolve : Stage::init;
  return true;
}

/// Both ends' smaller one.
verbs::RemoteQueuePair reachable(const Agent& a) noexcept {
  verbs::RemoteQueuePair remote = a.remote;
  remote.mtu = std::min({remote.mtu, a.attributes.mtu, a.attributes.queue_pair.place.mtu});
  return remote;
}

/// The queue pair's next state, with the attributes of the handshake over TCP or by hand.
Result<void> bring(const Shared& s, const Agent& a, ibv_qp_state state) {
  const verbs::QueuePairOptions& options = a.attributes.queue_pair;
  if (state == IBV_QPS_INIT) return s.device->to_init(a.qp, options);
  if (state == IBV_QPS_RTR) return s.device->to_rtr(a.qp, options, reachable(a));
  return s.device->to_rts(a.qp, options, a.psn, a.remote);
}

/// What was asked for otherwise than by default goes before what rdma_cm found.
void refine(ibv_ah_attr& attr, const verbs::PathOptions& asked) noexcept {
  constexpr verbs::PathOptions kDefault;
  const auto take = [](auto& found, auto wanted, auto standard) {
    if (wanted != standard) found = wanted;
  };
  take(attr.sl, asked.service_level, kDefault.service_level);
  take(attr.src_path_bits, asked.src_path_bits, kDefault.src_path_bits);
  take(attr.static_rate, asked.static_rate, kDefault.static_rate);
  take(attr.grh.hop_limit, asked.hop_limit, kDefault.hop_limit);
  take(attr.grh.traffic_class, asked.traffic_class, kDefault.traffic_class);
  take(attr.grh.flow_label, asked.flow_label, kDefault.flow_label);
}

/// The same with what rdma_cm says, where the settings say nothing else.
Result<void> bring_through_cm(const Shared& s, const Agent& a, ibv_qp_state state) {
  const verbs::QueuePairOptions& options = a.attributes.queue_pair;
  const verbs::RetryOptions& retry = options.retry;
  ibv_qp_attr attr{};
  int mask = 0;
  if (auto known = a.cm->id.attributes(state, attr, mask); !known) return known;
  if (state == IBV_QPS_INIT) attr.qp_access_flags = static_cast<unsigned>(options.access);
  if (state == IBV_QPS_RTR) {
    refine(attr.ah_attr, options.path);
    attr.path_mtu = std::min(attr.path_mtu, verbs::mtu_code(reachable(a).mtu));
    attr.min_rnr_timer = retry.min_rnr_timer;
  } else if (state == IBV_QPS_RTS) {
    attr.timeout = retry.ack_timeout;
    attr.retry_cnt = retry.retry_count;
    attr.rnr_retry = retry.rnr_retry;
  }
  return s.device->modify_qp(a.qp, attr, mask);
}

bool receives_refused(Shared& s, Agent& a, int error) noexcept {
  return set_up_failed(s, a,
                       {Status::system, "post receives to a queue pair",
                        "ibv_post_recv: errno " + std::to_string(error),
                        "set queues.shared_receives = \"auto\", or report this as a defect"});
}

bool step_up(Shared& s, Agent& a) noexcept {
  struct Step {
    ibv_qp_state state;
    Stage next;
  };
  const Step step = a.stage == Stage::init
                        ? Step{IBV_QPS_INIT, a.remote.qp_num != 0 ? Stage::rtr : Stage::wait}
                    : a.stage == Stage::rtr ? Step{IBV_QPS_RTR, Stage::rts}
                                            : Step{IBV_QPS_RTS, Stage::up};
  const Result<void> done = base::no_throw("bring a queue pair up", [&] {
    return a.cm != nullptr ? bring_through_cm(s, a, step.state) : bring(s, a, step.state);
  });
  if (!done) return set_up_failed(s, a, done.error());
  if (step.state == IBV_QPS_INIT && s.own != nullptr) {
    // Before the peer can send.
    if (const int error = post_own_receives(s, a); error != 0) return receives_refused(s, a, error);
  }
  a.stage = step.next;
  return true;
}

/// Tells rdma_cm that the connection is over, and a peer that still waits for our answer why.
void leave_cm(Agent& a) noexcept {
  if (a.cm == nullptr) return;
  if (!a.outbound && !a.cm->spoken) {
    const Status status = a.cause.status == Status::ok ? Status::refused : a.cause.status;
    const wire::Frame no = wire::encode_cm_refusal(wire::make_refuse(
        status, a.cause.found.empty() ? "the application refused" : a.cause.found));
    a.cm->id.reject(no.bytes());
  } else if (a.was_ready) {
    a.cm->id.disconnect();
  }
  a.cm.reset();
}

bool step_destroy(Shared& s, Agent& a) noexcept {
  leave_cm(a);
  s.by_qpn.clear(a.qp->qp_num);
  s.device->destroy_qp(a.qp);
  a.qp = nullptr;
  flush_everything(s, a);
  a.stage = Stage::conceal;
  return true;
}

bool step_conceal(Shared& s, Agent& a) noexcept {
  leave_cm(a);
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

const char* kind_text(OperationKind kind) noexcept {
  switch (kind) {
    case OperationKind::send:
    case OperationKind::send_imm:
      return "a SEND";
    case OperationKind::write:
    case OperationKind::write_imm:
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
    case OperationKind::credit_return:
    case OperationKind::goodbye:
    case OperationKind::cancelled:
      break;
  }
  return "a control message";
}

/// What to look at when the device gives this status.
const char* likely_cause(const Shared& s, ibv_wc_status status) noexcept {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return s.device->info().gid_type == GidType::embedded
                 ? "the peer's process is gone, has closed its device, or its queue pair has failed"
                 : "the peer's process is gone or its queue pair has failed; else packets are lost "
                   "on the way: see both GIDs, the MTU of every hop, and flow control";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "the peer has no receive posted: see whether its engine is polled";
    case IBV_WC_REM_ACCESS_ERR:
      return "the peer's memory was revoked, or is smaller or of other rights than was used";
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
      return "the peer's device could not do it: see its events and the longest message it takes";
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return "local memory was deregistered while in use";
    default:
      return "see the completion's status; the connection cannot be used any more";
  }
}

Error operation_error(const Shared& s, const Agent& a, OperationKind kind, const ibv_wc& wc) {
  const bool lost = wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_RNR_RETRY_EXC_ERR;
  const verbs::QueuePairOptions& ours = a.attributes.queue_pair;
  return base::make_error(
      lost                                 ? Status::peer_lost
      : wc.status == IBV_WC_REM_ACCESS_ERR ? Status::remote_access
                                           : Status::remote_error,
      fmt::format("{} on queue pair {:#x} ({}) to {}, queue pair {:#x} ({})", kind_text(kind),
                  wc.qp_num, verbs::gid_text(ours.place.gid), a.peer.data(), a.remote.qp_num,
                  verbs::gid_text(a.remote.gid)),
      fmt::format("completion status {} ({}), vendor error {:#x}; ack_timeout {}, retry_count {}, "
                  "rnr_retry {}",
                  static_cast<int>(wc.status), ibv_wc_status_str(wc.status), wc.vendor_err,
                  ours.retry.ack_timeout, ours.retry.retry_count, ours.retry.rnr_retry),
      likely_cause(s, wc.status));
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

void prepare_timers(Agent& a) noexcept {
  a.deadline_timer.index = a.idle_timer.index = a.index;
  a.deadline_timer.kind = kDeadlineTimer;
  a.idle_timer.kind = kIdleTimer;
  a.cause.status = Status::ok;
}

bool promise_receive(Shared& s, Agent& a) noexcept {
  if (s.own != nullptr ? !take_own_queue(s, a) : s.allotted >= s.receive_capacity) return false;
  ++s.allotted;
  a.allotment = 1;
  a.granted = a.published = 1;
  a.last_heard = a.last_sent = s.clock.now();
  return true;
}

Agent* acquire(Shared& s, ConnectionState state, bool outbound, Nanoseconds patience) noexcept {
  const std::uint32_t index = s.agents.acquire();
  if (index == kNone) return nullptr;
  Agent& a = s.agents.at(index);
  a.~Agent();
  new (&a) Agent();
  a.index = index;
  a.generation = s.agents.generation(index);
  a.outbound = outbound;
  prepare_timers(a);
  set_attributes(a, s.attributes);
  if (!promise_receive(s, a)) {
    a.generation = 0;
    s.agents.release(index);
    return nullptr;
  }
  a.patience = patience.count() != 0 ? patience
               : outbound            ? s.config.connections.connect_timeout
                                     : s.config.connections.handshake_timeout;
  a.stage = Stage::expose;
  enter(s, a, state);
  list_setup(s, a);
  return &a;
}

void enter(Shared& s, Agent& a, ConnectionState state) noexcept {
  a.state = state;
  if (a.again != nullptr && state != ConnectionState::resolving) a.again->resting = false;
  a.sq_room =
      state == ConnectionState::ready ? a.attributes.queue_pair.send_depth - kControlRequests : 0;
  s.timers.cancel(a.deadline_timer);
  const Config::Connections& c = s.config.connections;
  switch (state) {
    case ConnectionState::resolving:
      a.deadline = after(s, a.again != nullptr && a.again->resting ? a.again->delay : a.patience);
      break;
    case ConnectionState::exchanging:
      // After `resolving` the deadline of the whole attempt goes on.
      if (a.deadline == 0) a.deadline = after(s, a.patience);
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
    case Stage::resolve:
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
    fail(s, a, operation_error(s, a, kind, wc));
  } catch (...) {
    fail(s, a, base::out_of_memory());
  }
}

void on_receive_failed(Shared& s, Agent& a, const ibv_wc& wc) noexcept {
  if (s.own != nullptr) stop_own_receives(s, a);
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

Error set_up_timed_out(const Agent& a) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(a.patience).count();
  const char* const remedy =
      a.by_hand
          ? "give the peer's endpoint to join(), or allow more time with PrepareOptions::timeout"
      : a.outbound ? "see whether the peer polls its engine, or raise connections.connect_timeout"
                   : "see what connects there, or raise connections.handshake_timeout";
  return {Status::timed_out,
          fmt::format("{} {} within {} ms", a.outbound ? "connect to" : "shake hands with",
                      a.peer.data(), ms),
          fmt::format("still {}", to_string(a.state)), remedy};
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
    fail(s, a, set_up_timed_out(a));
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
  if (a.again != nullptr) {
    a.again->ready_at = a.last_heard;
    a.again->first.status = Status::ok;
  }
  enter(s, a, ConnectionState::ready);
  ++(a.outbound ? s.stats.connected : s.stats.accepted);
  if (a.handlers_replaced) replace_handlers(a);
  if (a.handlers.on_ready) a.handlers.on_ready(handle(s, a));
}

void overtake_handshake(Shared& s, Agent& a) noexcept {
  // A peer that was given our endpoint by hand may send as soon as we can receive.
  if (a.by_hand && a.stage == Stage::rts) (void)advance(s, a);
  if (a.stage == Stage::up && (a.by_hand || !a.outbound)) become_ready(s, a);
}

namespace {

GidType gid_type(const Agent& a) noexcept {
  const GidType type = a.attributes.queue_pair.place.gid_type;
  return type == GidType::unknown ? GidType::infiniband : type;
}

}  // namespace

Endpoint endpoint(const Shared& s, const Agent& a) noexcept {
  const verbs::Place& place = a.attributes.queue_pair.place;
  Endpoint info{};
  std::copy_n(place.gid.raw, info.gid.size(), info.gid.begin());
  info.gid_type = gid_type(a);
  // Of the addresses that the port has on InfiniBand, packets come from the one asked for.
  info.lid = static_cast<std::uint16_t>(place.lid | a.attributes.queue_pair.path.src_path_bits);
  info.qp_num = a.qp->qp_num;
  info.psn = a.psn;
  info.mtu = static_cast<std::uint16_t>(std::min(a.attributes.mtu, place.mtu));
  info.max_message = s.config.connections.eager_bytes;
  info.credits = a.granted;
  info.incarnation = s.incarnation;
  info.control_address = reinterpret_cast<std::uint64_t>(a.cell);
  info.control_rkey = a.cell_region.rkey;
  info.max_rd_atomic = a.attributes.queue_pair.rd_atomic;
  return info;
}

Result<void> take_endpoint(Shared& s, Agent& a, const Endpoint& peer) {
  if (peer.gid_type != gid_type(a)) {
    return base::fail(Status::unsupported,
                      fmt::format("connect a GID of type {} to the peer's", to_string(gid_type(a))),
                      fmt::format("the peer's GID is of type {}", to_string(peer.gid_type)),
                      "open the same kind of device at both ends; on RoCE set device.gid_index or "
                      "device.address, so that both take the same version");
  }
  if (peer.credits == 0) {
    return base::fail(Status::protocol, "take the peer's endpoint", "it grants no credit",
                      "the peer is broken");
  }
  std::copy(peer.gid.begin(), peer.gid.end(), a.remote.gid.raw);
  a.remote.lid = peer.lid;
  a.remote.qp_num = peer.qp_num;
  a.remote.psn = peer.psn;
  a.remote.mtu = peer.mtu;
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
  if (a.own_queue != kNone) reclaim_own_receives(s, a);
  s.dirty.remove(a);
  s.grants.remove(a);
  s.starved.remove(a);
  if (a.handlers_replaced) replace_handlers(a);
  if (tries_again(a)) return rest(s, a);
  ++s.stats.closed;
  s.stats.messages_sent += messages_sent(a);
  s.stats.messages_received += a.messages_received;
  const Callback<void(Connection, const Error&)> on_closed = a.handlers.on_closed;
  const Connection gone = handle(s, a);
  const Error cause = final_cause(a);
  a.generation = 0;
  a.again.reset();
  s.agents.release(a.index);
  if (on_closed) on_closed(gone, cause);
}

}  // namespace spinwire::agent
