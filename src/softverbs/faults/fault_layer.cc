// Applies a fault plan: holds work requests and datagrams, and sends them when they are due.
#include "softverbs/faults/fault_layer.h"

#include <errno.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "softverbs/context_gid.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// `pace` after `bytes` more bytes, ready at time `ready`.
Pace after(Pace pace, std::uint64_t ready, std::uint64_t bytes) noexcept {
  if (ready > pace.end) {
    pace.end = ready;
    pace.fraction = 0;
  }
  constexpr std::uint64_t kSecond = 1'000'000'000;
  const std::uint64_t parts = bytes * kSecond + pace.fraction;  // a message has at most 2^30 bytes
  pace.end += parts / pace.rate;
  pace.fraction = parts % pace.rate;
  return pace;
}

std::uint64_t leaves_at(const Pace& pace, std::uint64_t ready) noexcept {
  const std::uint64_t end = pace.end + (pace.fraction != 0 ? 1 : 0);
  return std::max(ready, end - std::min(end, pace.burst));
}

/// Whether `bytes` bytes, ready at time `ready`, have left by `now`. If so, charges the link and
/// sets `ready` to the time at which they left.
bool leaves(Faults& f, std::uint64_t& ready, std::uint64_t bytes, std::uint64_t now) noexcept {
  if (ready > now) return false;
  if (f.pace->rate != 0) {
    const Pace next = after(*f.pace, ready, bytes);
    const std::uint64_t left = leaves_at(next, ready);
    if (left > now) return false;
    *f.pace = next;
    ready = left;
  }
  f.statistics.bytes += bytes;
  return true;
}

void set_rate(Pace& pace, std::uint64_t bytes_per_second, std::uint64_t burst_bytes) noexcept {
  __extension__ using Wide = unsigned __int128;
  pace.rate = bytes_per_second;
  pace.fraction = 0;
  const Wide burst =
      bytes_per_second == 0 ? 0 : Wide{burst_bytes} * 1'000'000'000 / bytes_per_second;
  pace.burst = static_cast<std::uint64_t>(std::min(burst, Wide{UINT64_MAX}));
}

void set_pace(Faults& f) noexcept {
  f.pace = f.plan.link != nullptr ? &f.plan.link->pace : &f.own_pace;
  if (f.plan.link == nullptr) set_rate(f.own_pace, f.plan.bytes_per_second, f.plan.burst_bytes);
}

// ---- sending what is held ---------------------------------------------------------------------

/// The next turn on the link: a queue pair's next work request, or the next datagram.
struct Turn {
  Qp* qp = nullptr;
  bool datagram = false;
  std::uint64_t ready = UINT64_MAX;
  std::uint64_t order = UINT64_MAX;
  std::uint64_t bytes = 0;

  [[nodiscard]] bool any() const noexcept { return qp != nullptr || datagram; }
};

/// Returns the sendable work that is ready first.
Turn next_turn(const Faults& f) noexcept {
  Turn turn;
  for (Qp* qp : f.with_held_work) {
    if (!is_sendable(*qp)) continue;
    const HeldWr& held = qp->faults->held[qp->sq_head & qp->sq_mask];
    const std::uint64_t at = std::max(held.ready, qp->faults->not_before);
    if (at > turn.ready || (at == turn.ready && held.order > turn.order)) continue;
    turn.qp = qp;
    turn.ready = at;
    turn.order = held.order;
  }
  if (!f.heap.empty()) {
    const HeldDatagram& held = f.slots[f.heap.front()];
    if (held.ready < turn.ready || (held.ready == turn.ready && held.order < turn.order))
      return {nullptr, true, held.ready, held.order, held.length};
  }
  if (turn.qp != nullptr) turn.bytes = bytes_to_leave(*turn.qp);
  return turn;
}

/// Gives the link to the first sendable work; false if none is due.
bool release_one(Context& c, std::uint64_t now) noexcept {
  Turn turn = next_turn(*c.faults);
  if (!turn.any() || !leaves(*c.faults, turn.ready, turn.bytes, now)) return false;
  if (turn.datagram) {
    send_held(c);
  } else {
    dispatch_next(*turn.qp, turn.ready);
  }
  return true;
}

// ---- the functions in ibv_context::ops --------------------------------------------------------

int post_send_with_faults(ibv_qp* base, ibv_send_wr* wr, ibv_send_wr** bad) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  const int error = qp.qp_type == IBV_QPT_UD ? post_datagrams_with_faults(qp, wr, bad)
                                             : post_connected_with_faults(qp, wr, bad);
  run_faults(context_of(qp.context));
  return error;
}

int poll_cq_with_faults(ibv_cq* cq, int entries, ibv_wc* wc) noexcept {
  Context& c = context_of(cq->context);
  // Timers first: a queue pair whose wait has ended sends in this poll.
  if (!c.waiting.empty()) run_timers(c);
  run_faults(c);
  return poll_cq(cq, entries, wc);
}

/// May throw std::bad_alloc; the caller then calls uninstall().
void install(Context& c) {
  c.faults = std::make_unique<Faults>();
  for_each_queue_pair(c, [&c](Qp& qp) { attach_queue(c, qp); });
  for (const auto& peer : c.peers) peer->out.direct_limit = 0;
}

void uninstall(Context& c) noexcept {
  c.verbs.ops.post_send = post_send;
  c.verbs.ops.poll_cq = poll_cq;
  for_each_queue_pair(c, [](Qp& qp) {
    qp.faults.reset();
    qp.has_faults = false;
  });
  c.faults.reset();
}

Result<void> apply(Context& c, const FaultPlan& plan) {
  const bool fresh = c.faults == nullptr;
  try {
    if (fresh) install(c);
    reserve_datagrams(*c.faults, plan.held_datagrams);
  } catch (const std::bad_alloc&) {
    if (fresh) uninstall(c);
    return tl::unexpected(base::out_of_memory());
  }
  Faults& f = *c.faults;
  f.plan = plan;
  for (PeerPlan& each : f.peer_plans) each.plan.seed = plan.seed;
  f.number = 0;
  set_pace(f);
  for_each_queue_pair(c, [](Qp& qp) { qp.faults->count = 0; });
  c.verbs.ops.post_send = post_send_with_faults;
  c.verbs.ops.poll_cq = poll_cq_with_faults;
  return {};
}

}  // namespace

void charge_wasted(Faults& f, std::uint64_t at, std::uint64_t bytes) noexcept {
  if (f.pace->rate != 0) *f.pace = after(*f.pace, at, bytes);
  f.statistics.bytes += bytes;
}

Result<std::shared_ptr<SharedLink>> make_link(std::uint64_t bytes_per_second,
                                              std::uint64_t burst_bytes) {
  if (auto good = check_rate(bytes_per_second, burst_bytes); !good)
    return tl::unexpected(good.error());
  try {
    auto link = std::make_shared<SharedLink>();
    set_rate(link->pace, bytes_per_second, burst_bytes);
    return link;
  } catch (const std::bad_alloc&) {
    return tl::unexpected(base::out_of_memory());
  }
}

std::uint64_t now_in_ns(const Context& c) noexcept {
  return static_cast<std::uint64_t>(c.clock.duration(c.clock.now()).count());
}

void run_faults(Context& c) noexcept {
  Faults& f = *c.faults;
  const std::uint64_t now = now_in_ns(c);
  sweep_lanes(c);
  for (Qp* qp : f.with_held_work) sync_queue(*qp, now);
  while (release_one(c, now)) {
  }
  std::erase_if(f.with_held_work,
                [](Qp* qp) { return !(qp->faults->in_held_work_list = has_held(*qp)); });
}

void release_all(Context& c) noexcept {
  Faults& f = *c.faults;
  for (Qp* qp : f.with_held_work) {
    qp->sq_head = qp->faults->posted;
    if (qp->state == IBV_QPS_ERR) {
      enter_error(*qp);
    } else {
      run_send_queue(*qp);
    }
    qp->faults->in_held_work_list = false;
  }
  f.with_held_work.clear();
  while (!f.heap.empty()) send_held(c);
}

void attach_queue(Context& c, Qp& qp) {
  Faults& f = *c.faults;
  if (f.with_held_work.capacity() <= c.objects_open)
    f.with_held_work.reserve(std::max<std::size_t>(64, 2 * std::size_t{c.objects_open}));
  auto faults = std::make_unique<QueueFaults>();
  if (qp.sq != nullptr && qp.qp_type != IBV_QPT_UD)
    faults->held = std::make_unique<HeldWr[]>(std::size_t{qp.sq_mask} + 1);
  faults->posted = qp.sq_head;
  qp.faults = std::move(faults);
  qp.has_faults = true;
}

void queue_connected(Qp& qp) noexcept { update_link(qp); }

void queue_reset(Qp& qp) noexcept {
  Faults& f = *context_of(qp.context).faults;
  QueueFaults& q = *qp.faults;
  discard_held(f, qp);
  std::erase(f.with_held_work, &qp);
  q.in_held_work_list = q.link_down = q.cut = false;
  q.posted = 0;
  q.last_ready = q.not_before = 0;
}

Result<void> set_faults(ibv_context* context, const FaultPlan& plan) {
  return base::no_throw("set a fault plan", [&]() -> Result<void> {
    if (auto good = check(plan); !good) return good;
    return apply(context_of(context), plan);
  });
}

Result<void> set_faults(ibv_context* context, const ibv_gid& peer, const FaultPlan& plan) {
  return base::no_throw("set a fault plan", [&]() -> Result<void> {
    if (auto good = check(plan); !good) return good;
    Context& c = context_of(context);
    if (c.faults == nullptr) {
      if (auto made = apply(c, {}); !made) return made;
    }
    auto& plans = c.faults->peer_plans;
    const ibv_gid own = own_gid(peer);  // that of any port names the peer
    auto found = std::find_if(plans.begin(), plans.end(),
                              [&](const PeerPlan& each) { return same_gid(each.peer, own); });
    if (found == plans.end() && plans.size() == kMaxLanes) {
      return base::fail(Status::limit, "set a fault plan for a peer",
                        base::format("{} peers have plans", plans.size()),
                        "set a plan for the context, or call clear_faults()");
    }
    if (found == plans.end()) found = plans.insert(plans.end(), {own, {}});
    found->plan = plan;
    found->plan.seed = c.faults->plan.seed;
    return {};
  });
}

std::uint32_t unreported_receives(const ibv_qp& queue_pair,
                                  bool (*is_receive)(std::uint64_t wr_id)) noexcept {
  const auto& qp = static_cast<const Qp&>(queue_pair);
  const auto& cq = *static_cast<const Cq*>(qp.recv_cq);
  std::uint32_t count = qp.receives->count();
  for (std::uint32_t i = cq.head; i != cq.tail; ++i) {
    const ibv_wc& wc = cq.ring[i & cq.mask];
    count += wc.qp_num == qp.qp_num && is_receive(wc.wr_id) ? 1 : 0;
  }
  return count;
}

std::uint64_t next_due(ibv_context* context) noexcept {
  const Context& c = context_of(context);
  std::uint64_t next = ~std::uint64_t{0};
  for (const Qp* qp : c.waiting) next = std::min(next, qp->retry_at);
  if (c.faults == nullptr) return next;
  const Faults& f = *c.faults;
  const Turn turn = next_turn(f);
  if (!turn.any()) return next;
  const bool paced = f.pace->rate != 0 && turn.ready < kNever;
  const std::uint64_t at =
      paced ? leaves_at(after(*f.pace, turn.ready, turn.bytes), turn.ready) : turn.ready;
  return std::min(next, c.clock.ticks(Nanoseconds(static_cast<std::int64_t>(at))));
}

void clear_faults(ibv_context* context) noexcept {
  Context& c = context_of(context);
  if (c.faults == nullptr) return;
  for_each_queue_pair(c, [](Qp& qp) { qp.faults->link_down = false; });
  c.faults->peers_down.clear();
  c.faults->ports_down = c.faults->ports_silent = 0;
  (void)set_links(context, LinkState::up);
  release_all(c);
  uninstall(c);
}

FaultStatistics fault_statistics(ibv_context* context) noexcept {
  const Context& c = context_of(context);
  return c.faults == nullptr ? FaultStatistics{} : c.faults->statistics;
}

}  // namespace spinwire::softverbs
