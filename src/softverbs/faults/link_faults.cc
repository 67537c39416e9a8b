// Cut links. Cold.
//
// Outgoing work waits for its timeouts in rc_faults.cc. The plain code's own checks reject incoming
// packets: a cut queue pair expects no PSN and knows no initiator. The lane of a cut peer is
// emptied, not polled.
#include <errno.h>

#include <algorithm>
#include <new>

#include "softverbs/context_gid.h"
#include "softverbs/faults/fault_layer.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/queues.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::softverbs {
namespace {

void cut(Qp& qp) noexcept {
  QueueFaults& q = *qp.faults;
  q.cut = true;
  q.expected = qp.expected;
  expect_nothing(qp);
  set_remote(qp, 0);
  list_busy(*context_of(qp.context).faults, qp);
}

void heal(Qp& qp) noexcept {
  QueueFaults& q = *qp.faults;
  q.cut = false;
  if (qp.state == IBV_QPS_RTR || qp.state == IBV_QPS_RTS) qp.expected = q.expected;
  set_remote(qp, parse_gid(qp.peer->gid)->nonce);
}

/// The fault layer, made now if there is none; null without memory.
Faults* layer_of(ibv_context* context) noexcept {
  Context& c = context_of(context);
  if (c.faults == nullptr && !set_faults(context, {})) return nullptr;
  return c.faults.get();
}

void update_links(Context& c) noexcept {
  for_each_queue_pair(c, update_link);
  wake_restored(c);
  run_faults(c);
}

bool any_down(const Faults& f) noexcept { return f.all_down || !f.peers_down.empty(); }

template <typename Visit>
void for_each_lane(Context& c, Visit&& visit) noexcept {
  const std::uint32_t used = lanes_in_use(*c.segment);
  for (std::uint32_t i = 0; i < used; ++i) {
    if (InLane* lane = c.lanes[i].get(); lane != nullptr) {
      visit(*lane, is_down(*c.faults, c.segment->directory[i].sender));
    }
  }
}

}  // namespace

bool is_down(const Faults& f, const ibv_gid& peer) noexcept {
  return f.all_down || std::any_of(f.peers_down.begin(), f.peers_down.end(),
                                   [&](const ibv_gid& gid) { return same_gid(gid, peer); });
}

void update_link(Qp& qp) noexcept {
  if (qp.peer == nullptr) return;  // not connected, or a datagram queue pair
  QueueFaults& q = *qp.faults;
  const Faults& f = *context_of(qp.context).faults;
  const std::uint8_t port = qp.attr.port_num;
  const bool down =
      q.link_down || is_port_down(f, port) || is_port_silent(f, port) || is_down(f, qp.peer->gid);
  if (down == q.cut) return;
  if (!down) return heal(qp);
  if (qp.state == IBV_QPS_RTR || qp.state == IBV_QPS_RTS) cut(qp);
}

void sweep_lanes(Context& c) noexcept {
  if (!any_down(*c.faults)) return;
  for_each_lane(c, [&](InLane& lane, bool down) {
    if (!down) return;
    if (lane.awake) sleep_lane(c, lane);  // polls skip the lane; it needs no doorbell
    c.faults->statistics.cut += discard_lane(c, lane);
  });
}

bool has_waiting_packet(ibv_context* context) noexcept {
  bool found = false;
  for_each_lane(context_of(context), [&found](const InLane& lane, bool down) {
    found = found || (!down && has_packet(lane));
  });
  return found;
}

void wake_restored(Context& c) noexcept {
  for_each_lane(c, [&](InLane& lane, bool down) {
    if (!down) wake_lane(c, lane);
  });
}

int set_link(ibv_qp* base, LinkState state) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  if (qp.peer == nullptr || (qp.state != IBV_QPS_RTR && qp.state != IBV_QPS_RTS)) return EINVAL;
  if (layer_of(qp.context) == nullptr) return ENOMEM;
  qp.faults->link_down = state == LinkState::down;
  update_link(qp);
  run_faults(context_of(qp.context));
  return 0;
}

int set_link(ibv_context* context, const ibv_gid& peer, LinkState state) noexcept {
  Faults* f = layer_of(context);
  if (f == nullptr) return ENOMEM;
  const ibv_gid own = own_gid(peer);  // that of any port names the peer
  std::erase_if(f->peers_down, [&](const ibv_gid& gid) { return same_gid(gid, own); });
  if (state == LinkState::down) {
    try {
      f->peers_down.push_back(own);
    } catch (const std::bad_alloc&) {
      return ENOMEM;
    }
  }
  update_links(context_of(context));
  return 0;
}

int set_links(ibv_context* context, LinkState state) noexcept {
  Faults* f = layer_of(context);
  if (f == nullptr) return ENOMEM;
  f->all_down = state == LinkState::down;
  update_links(context_of(context));
  return 0;
}

int set_port(ibv_context* context, std::uint8_t port, LinkState state) noexcept {
  Context& c = context_of(context);
  if (port == 0 || port > ports_of(c)) return EINVAL;
  Faults* f = layer_of(context);
  if (f == nullptr) return ENOMEM;
  const unsigned bit = 1u << port;
  const bool down = state == LinkState::down;
  const bool changes = ((f->ports_down & bit) != 0) != down;
  f->ports_down = down ? f->ports_down | bit : f->ports_down & ~bit;
  // The element of a port's event is its number.
  if (changes) {
    raise_event(c, down ? IBV_EVENT_PORT_ERR : IBV_EVENT_PORT_ACTIVE,
                reinterpret_cast<void*>(std::uintptr_t{port}));
  }
  update_links(c);
  return 0;
}

int set_port_silence(ibv_context* context, std::uint8_t port, bool is_silent) noexcept {
  Context& c = context_of(context);
  if (port == 0 || port > ports_of(c)) return EINVAL;
  Faults* f = layer_of(context);
  if (f == nullptr) return ENOMEM;
  const unsigned bit = 1u << port;
  f->ports_silent = is_silent ? f->ports_silent | bit : f->ports_silent & ~bit;
  update_links(c);
  return 0;
}

}  // namespace spinwire::softverbs
