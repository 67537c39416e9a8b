#include "softverbs/faults/fault_plan.h"

#include <errno.h>
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "softverbs/context_gid.h"
#include "softverbs/faults/fault_layer.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

constexpr Nanoseconds kLongestDelay = std::chrono::hours(24);
constexpr std::uint64_t kHighestRate = 1'000'000'000'000'000;  // so that sums with it fit 64 bits
constexpr std::uint64_t kLargestBurst = std::uint64_t{1} << 40;
constexpr std::uint32_t kMostHeld = 1u << 16;

// ---- validation -------------------------------------------------------------------------------

Result<void> bad_field(const char* name, const std::string& value, std::string range) {
  return base::fail(Status::invalid_argument, fmt::format("set a fault plan: {} = {}", name, value),
                    "it is out of range", fmt::format("give {}", range));
}

Result<void> check_probability(const char* name, double value) {
  if (value >= 0 && value <= 1) return {};  // false for what is not a number
  return bad_field(name, fmt::format("{}", value), "a probability between 0 and 1");
}

Result<void> check_number(const char* name, std::uint64_t value, std::uint64_t least,
                          std::uint64_t most) {
  if (value >= least && value <= most) return {};
  return bad_field(name, fmt::format("{}", value), fmt::format("{} to {}", least, most));
}

Result<void> check_delay(const char* name, Nanoseconds least, Nanoseconds value) {
  if (value >= least && value <= kLongestDelay) return {};
  return bad_field(name, fmt::format("{} ns", value.count()),
                   fmt::format("{} to {} ns", least.count(), kLongestDelay.count()));
}

/// The first of all checks that fails.
Result<void> first_of(std::initializer_list<Result<void>> checks) {
  for (const Result<void>& check : checks) {
    if (!check) return check;
  }
  return {};
}

Result<void> check(const FaultPlan& p) {
  constexpr Nanoseconds kNone{0};
  return first_of({
      check_probability("drop", p.drop),
      check_probability("duplicate", p.duplicate),
      check_probability("reorder", p.reorder),
      check_probability("rnr", p.rnr),
      check_probability("packet_loss", p.packet_loss),
      check_number("reorder_distance", p.reorder_distance, 1, kMostHeld),
      check_number("held_datagrams", p.held_datagrams, 1, kMostHeld),
      check_number("rnr_in_a_row", p.rnr_in_a_row, 1, UINT32_MAX),
      check_number("bytes_per_second", p.bytes_per_second, 0, kHighestRate),
      check_number("burst_bytes", p.burst_bytes, 0, kLargestBurst),
      check_number("fail_status", static_cast<std::uint64_t>(p.fail_status), IBV_WC_LOC_LEN_ERR,
                   IBV_WC_GENERAL_ERR),
      check_delay("reorder_timeout", kNone, p.reorder_timeout),
      check_delay("datagram_delay_min", kNone, p.datagram_delay_min),
      check_delay("datagram_delay_max", p.datagram_delay_min, p.datagram_delay_max),
      check_delay("delay_min", kNone, p.delay_min),
      check_delay("delay_max", p.delay_min, p.delay_max),
      check_delay("round_trip", kNone, p.round_trip),
  });
}

// ---- the limit of bytes per second ------------------------------------------------------------

/// `pace` after so many bytes that were ready at a time.
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

/// Whether so many bytes that were ready at a time have left by now. If so it is noted, and
/// `ready` becomes the time when they had.
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

/// Of all that may go, the first to be ready.
Turn next_turn(const Faults& f) noexcept {
  Turn turn;
  for (Qp* qp : f.busy) {
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

/// Lets the first of all that may go have its turn on the link; false if none can.
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
  // Timers first, so that who waited goes in this poll.
  if (!c.waiting.empty()) run_timers(c);
  run_faults(c);
  return poll_cq(cq, entries, wc);
}

/// May throw std::bad_alloc; then what is there is whole, and forgotten with the context.
void install(Context& c) {
  c.faults = std::make_unique<Faults>();
  for (std::uint32_t i = 0; i < c.next_queue_pair; ++i) {
    if (c.queue_pairs[i] != nullptr) attach_queue(c, *c.queue_pairs[i]);
  }
  for (const auto& peer : c.peers) peer->out.direct_limit = 0;
}

void uninstall(Context& c) noexcept {
  c.verbs.ops.post_send = post_send;
  c.verbs.ops.poll_cq = poll_cq;
  for (std::uint32_t i = 0; i < c.next_queue_pair; ++i) {
    if (c.queue_pairs[i] != nullptr) c.queue_pairs[i]->faults.reset();
  }
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
  for (std::uint32_t i = 0; i < c.next_queue_pair; ++i) {
    if (c.queue_pairs[i] != nullptr) c.queue_pairs[i]->faults->count = 0;
  }
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
  auto good = first_of({check_number("bytes_per_second", bytes_per_second, 1, kHighestRate),
                        check_number("burst_bytes", burst_bytes, 0, kLargestBurst)});
  if (!good) return tl::unexpected(good.error());
  try {
    auto link = std::make_shared<SharedLink>();
    set_rate(link->pace, bytes_per_second, burst_bytes);
    return link;
  } catch (const std::bad_alloc&) {
    return tl::unexpected(base::out_of_memory());
  }
}

Fate draw(const FaultPlan& plan, std::uint64_t number, Nanoseconds delay_min,
          Nanoseconds delay_max) noexcept {
  base::Random random(base::Random::mix(plan.seed ^ base::Random::mix(number)));
  const auto chance = [&](double probability) {
    constexpr double kUnit = 1.0 / (std::uint64_t{1} << 53);
    return static_cast<double>(random.next() >> 11) * kUnit < probability;
  };
  const auto span = static_cast<std::uint64_t>((delay_max - delay_min).count());
  const auto delay = [&] {
    return static_cast<std::uint64_t>(delay_min.count()) + random.below(span + 1);
  };
  // Each is drawn, needed or not, so that none depends on the others.
  Fate fate{};
  fate.drop = chance(plan.drop);
  fate.duplicate = chance(plan.duplicate);
  fate.rnr = chance(plan.rnr);
  const bool reorder = chance(plan.reorder);
  const auto distance = 1 + static_cast<std::uint32_t>(random.below(plan.reorder_distance));
  fate.overtakers = reorder ? distance : 0;
  fate.delay[0] = delay();
  fate.delay[1] = delay();
  return fate;
}

const FaultPlan& plan_for(const Faults& f, const ibv_gid& peer) noexcept {
  for (const PeerPlan& each : f.peer_plans) {
    if (same_gid(each.peer, peer)) return each.plan;
  }
  return f.plan;
}

ibv_wc_status count_request(Faults& f, const Qp& qp) noexcept {
  ++f.number;
  ++qp.faults->count;
  const FaultPlan& p = f.plan;
  const bool of_queue = p.fail_queue_pair == qp.qp_num;
  const bool fails = p.fail_at != 0 && (p.fail_queue_pair == 0 || of_queue) &&
                     (of_queue ? qp.faults->count : f.number) == p.fail_at;
  return fails ? p.fail_status : IBV_WC_SUCCESS;
}

std::uint64_t now_in_ns(const Context& c) noexcept {
  return static_cast<std::uint64_t>(c.clock.duration(c.clock.now()).count());
}

void run_faults(Context& c) noexcept {
  Faults& f = *c.faults;
  const std::uint64_t now = now_in_ns(c);
  sweep_lanes(c);
  for (Qp* qp : f.busy) sync_queue(*qp, now);
  while (release_one(c, now)) {
  }
  std::erase_if(f.busy, [](Qp* qp) { return !(qp->faults->busy = has_held(*qp)); });
}

void release_all(Context& c) noexcept {
  Faults& f = *c.faults;
  for (Qp* qp : f.busy) {
    qp->sq_head = qp->faults->posted;
    if (qp->state == IBV_QPS_ERR) {
      enter_error(*qp);
    } else {
      pump(*qp);
    }
    qp->faults->busy = false;
  }
  f.busy.clear();
  while (!f.heap.empty()) send_held(c);
}

void attach_queue(Context& c, Qp& qp) {
  Faults& f = *c.faults;
  if (f.busy.capacity() <= c.objects_open)
    f.busy.reserve(std::max<std::size_t>(64, 2 * std::size_t{c.objects_open}));
  auto faults = std::make_unique<QueueFaults>();
  if (qp.sq != nullptr && qp.qp_type != IBV_QPT_UD)
    faults->held = std::make_unique<HeldWr[]>(std::size_t{qp.sq_mask} + 1);
  faults->posted = qp.sq_head;
  qp.faults = std::move(faults);
}

void queue_connected(Qp& qp) noexcept { update_link(qp); }

void queue_reset(Qp& qp) noexcept {
  Faults& f = *context_of(qp.context).faults;
  QueueFaults& q = *qp.faults;
  drop_held(f, qp);
  std::erase(f.busy, &qp);
  q.busy = q.link_down = q.cut = false;
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
    auto found = std::find_if(plans.begin(), plans.end(),
                              [&](const PeerPlan& each) { return same_gid(each.peer, peer); });
    if (found == plans.end() && plans.size() == kMaxLanes) {
      return base::fail(Status::limit, "set a fault plan for a peer",
                        fmt::format("{} peers have plans", plans.size()),
                        "set one for the context, or take the others away");
    }
    if (found == plans.end()) found = plans.insert(plans.end(), {peer, {}});
    found->plan = plan;
    found->plan.seed = c.faults->plan.seed;
    return {};
  });
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
  for (std::uint32_t i = 0; i < c.next_queue_pair; ++i) {
    if (c.queue_pairs[i] != nullptr) c.queue_pairs[i]->faults->link_down = false;
  }
  (void)set_links(context, LinkState::up);
  c.faults->peers_down.clear();
  for (std::uint32_t i = 0; i < c.next_queue_pair; ++i) {
    if (c.queue_pairs[i] != nullptr) update_link(*c.queue_pairs[i]);
  }
  wake_restored(c);
  release_all(c);
  uninstall(c);
}

FaultStatistics fault_statistics(ibv_context* context) noexcept {
  const Context& c = context_of(context);
  return c.faults == nullptr ? FaultStatistics{} : c.faults->statistics;
}

}  // namespace spinwire::softverbs
