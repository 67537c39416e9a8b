// Faults of datagrams: holds copies until they are due. Cold.
#include <algorithm>
#include <cstring>

#include "softverbs/faults/fault_layer.h"
#include "softverbs/lane/lane_data.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Order of the heap, whose top is due first.
auto is_due_later(const Faults& f) noexcept {
  return [&f](std::uint32_t a, std::uint32_t b) {
    const HeldDatagram& x = f.slots[a];
    const HeldDatagram& y = f.slots[b];
    return x.ready != y.ready ? x.ready > y.ready : x.order > y.order;
  };
}

std::byte* bytes_of(const Faults& f, std::uint32_t slot) noexcept {
  return &f.bytes[std::size_t{slot} * kDatagramBytes];
}

struct When {
  std::uint64_t now;
  std::uint64_t delay;
  std::uint32_t overtakers;
  std::uint64_t order;
};

void hold(Context& c, Qp& qp, const ibv_send_wr& wr, std::uint32_t length,
          const When& when) noexcept {
  Faults& f = *c.faults;
  if (f.heap.size() >= f.plan.held_datagrams) run_faults(c);
  if (f.heap.size() >= f.plan.held_datagrams || f.free.empty()) {
    ++f.statistics.overflowed;
    return;
  }
  if (when.delay != 0) ++f.statistics.datagrams_delayed;
  const std::uint32_t slot = f.free.back();
  f.free.pop_back();
  HeldDatagram& held = f.slots[slot];
  held.qp = &qp;
  held.way = *static_cast<const Ah*>(wr.wr.ud.ah);  // the user may destroy the handle
  ++held.way.peer->users;
  held.wr = wr;
  held.length = length;
  held.overtakers = when.overtakers;
  held.overtaken = false;
  held.order = when.order;
  held.delayed_until = when.now + when.delay;
  held.ready = held.delayed_until;
  if (when.overtakers != 0)
    held.ready += static_cast<std::uint64_t>(f.plan.reorder_timeout.count());
  gather_bytes(bytes_of(f, slot), wr.sg_list, static_cast<std::uint32_t>(wr.num_sge));
  f.heap.push_back(slot);
  std::push_heap(f.heap.begin(), f.heap.end(), is_due_later(f));
}

void give_back(Faults& f, std::uint32_t slot) noexcept {
  --f.slots[slot].way.peer->users;
  f.free.push_back(slot);  // reserved
}

/// A datagram of the queue pair was sent: counts it for the earlier ones that it overtakes.
void overtake(Faults& f, const Qp* qp, std::uint64_t order) noexcept {
  bool changed = false;
  for (const std::uint32_t slot : f.heap) {
    HeldDatagram& held = f.slots[slot];
    if (held.qp != qp || held.overtakers == 0 || held.order >= order) continue;
    held.overtaken = true;
    if (--held.overtakers != 0) continue;
    held.ready = held.delayed_until;
    changed = true;
  }
  if (changed) std::make_heap(f.heap.begin(), f.heap.end(), is_due_later(f));
}

}  // namespace

ibv_wc_status inject_datagram_faults(Qp& qp, const ibv_send_wr& wr, std::uint32_t length) noexcept {
  Context& c = context_of(qp.context);
  Faults& f = *c.faults;
  if (const ibv_wc_status status = count_request(f, qp); status != IBV_WC_SUCCESS) {
    ++f.statistics.failed;
    return status;
  }
  const FaultPlan& plan = plan_for(f, static_cast<const Ah*>(wr.wr.ud.ah)->peer->gid);
  const RequestFaults faults =
      draw_faults(plan, f.number, plan.datagram_delay_min, plan.datagram_delay_max);
  if (faults.drop) {
    ++f.statistics.dropped;
    return IBV_WC_SUCCESS;
  }
  const std::uint64_t now = now_in_ns(c);
  const std::uint64_t order = ++f.order;
  hold(c, qp, wr, length, {now, faults.delay[0], faults.overtakers, order});
  if (faults.duplicate) {
    ++f.statistics.duplicated;
    hold(c, qp, wr, length, {now, faults.delay[1], faults.overtakers, order});
  }
  return IBV_WC_SUCCESS;
}

void send_held(Context& c) noexcept {
  Faults& f = *c.faults;
  std::pop_heap(f.heap.begin(), f.heap.end(), is_due_later(f));
  const std::uint32_t slot = f.heap.back();
  f.heap.pop_back();
  HeldDatagram& held = f.slots[slot];
  if (held.overtaken) ++f.statistics.reordered;
  if (is_down(f, held.way.peer->gid)) {
    ++f.statistics.cut;
  } else {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(bytes_of(f, slot)), held.length, 0};
    ibv_send_wr wr = held.wr;
    wr.next = nullptr;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.wr.ud.ah = &held.way;
    if (!transmit_datagram(*held.qp, outgoing(*held.qp, wr, held.length)))
      count_drop(c, Drop::no_room);
  }
  give_back(f, slot);
  overtake(f, held.qp, held.order);
}

void discard_held(Faults& f, const Qp& qp) noexcept {
  const auto lost = [&](std::uint32_t slot) {
    if (f.slots[slot].qp != &qp) return false;
    give_back(f, slot);
    ++f.statistics.abandoned;
    return true;
  };
  if (std::erase_if(f.heap, lost) != 0)
    std::make_heap(f.heap.begin(), f.heap.end(), is_due_later(f));
}

void reserve_datagrams(Faults& f, std::uint32_t count) {
  const auto had = static_cast<std::uint32_t>(f.slots.size());
  if (count <= had) return;
  auto bytes = std::make_unique_for_overwrite<std::byte[]>(std::size_t{count} * kDatagramBytes);
  f.heap.reserve(count);
  f.free.reserve(count);
  f.slots.resize(count);
  for (const std::uint32_t slot : f.heap)
    std::memcpy(&bytes[std::size_t{slot} * kDatagramBytes], bytes_of(f, slot),
                f.slots[slot].length);
  f.bytes = std::move(bytes);
  for (std::uint32_t slot = count; slot-- != had;) f.free.push_back(slot);
}

}  // namespace spinwire::softverbs
