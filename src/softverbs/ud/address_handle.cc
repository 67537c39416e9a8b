// Address handles. Cold.
#include <arpa/inet.h>
#include <errno.h>

#include <memory>
#include <new>
#include <string>
#include <utility>

#include "base/log_message.h"
#include "softverbs/context_gid.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/objects.h"
#include "softverbs/process_directory.h"
#include "softverbs/refusal.h"
#include "softverbs/softverbs_device.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint32_t kFlowMask = 0xfffff;

/// The first word of an IPv6 header: version, traffic class, flow label.
std::uint32_t version_class_flow(const ibv_global_route& route) noexcept {
  return htonl(kRouteVersion | std::uint32_t{route.traffic_class} << 20 |
               (route.flow_label & kFlowMask));
}

/// Makes an address handle for the context with this GID. If there is none, returns null and sets
/// errno and `why`.
std::unique_ptr<Ah> lead_to(const ibv_gid& context, ibv_pd* pd, const ibv_global_route& route,
                            std::string& why) noexcept {
  std::unique_ptr<Ah> ah(new (std::nothrow) Ah());
  if (ah == nullptr) return refuse_with(ENOMEM);
  ah->peer = attach_peer(context_of(pd->context), context, why);
  if (ah->peer == nullptr) return nullptr;
  ++ah->peer->users;
  ah->context = pd->context;
  ah->pd = ah->usable_in = pd;
  ah->version_class_flow = version_class_flow(route);
  ah->hop_limit = route.hop_limit;
  ah->plain = route.traffic_class == 0 && (route.flow_label & kFlowMask) == 0 &&
              route.hop_limit == kUsualHops;
  return ah;
}

std::unique_ptr<Ah> name_process(const ibv_ah_attr& attr, ibv_pd* pd, std::string& why) noexcept {
  if (!process_is_there(attr.grh.dgid, why)) return nullptr;
  std::unique_ptr<ProcessAh> ah(new (std::nothrow) ProcessAh());
  if (ah == nullptr) return refuse_with(ENOMEM);
  ah->context = pd->context;
  ah->pd = pd;
  ah->attr = attr;
  ah->plain = false;
  return ah;
}

}  // namespace

ibv_ah* create_ah(ibv_pd* base, ibv_ah_attr* attr) noexcept {
  if (!has_gid(*attr) || attr->port_num != 1) return refuse_with(EINVAL);
  std::string why;
  std::unique_ptr<Ah> ah = names_process(attr->grh.dgid)
                               ? name_process(*attr, base, why)
                               : lead_to(own_gid(attr->grh.dgid), base, attr->grh, why);
  if (ah == nullptr) {
    const int error = errno;
    base::log(LogLevel::warning, "softverbs: the peer cannot be reached: {}", why);
    return refuse_with(error);
  }
  ++static_cast<Pd*>(base)->users;
  ++context_of(base->context).objects_open;
  return ah.release();
}

int destroy_ah(ibv_ah* base) noexcept {
  Ah* ah = static_cast<Ah*>(base);
  --static_cast<Pd*>(ah->pd)->users;
  --context_of(ah->context).objects_open;
  if (ah->usable_in != nullptr) {
    --ah->peer->users;
    delete ah;
    return 0;
  }
  auto* const process = static_cast<ProcessAh*>(ah);
  for (const ProcessAh::Reached& each : process->reached) --each.ah->peer->users;
  delete process;
  return 0;
}

bool peer_has_ended(const ibv_ah* base) noexcept {
  const Ah& ah = *static_cast<const Ah*>(base);
  return ah.usable_in != nullptr && ah.peer->gone;
}

namespace {

/// Makes the handle for the context with this GID, which now has the slot. Null without memory, or
/// if the context cannot be reached.
Ah* add_reached(ProcessAh& ah, std::uint32_t slot, const ibv_gid& gid) noexcept {
  std::erase_if(ah.reached, [slot](const ProcessAh::Reached& each) {
    if (each.slot == slot) --each.ah->peer->users;
    return each.slot == slot;
  });
  try {
    ah.reached.reserve(ah.reached.size() + 1);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  std::string why;
  std::unique_ptr<Ah> made = lead_to(gid, ah.pd, ah.attr.grh, why);
  if (made == nullptr) return nullptr;
  return ah.reached.emplace_back(ProcessAh::Reached{slot, std::move(made)}).ah.get();
}

Ah* find_reached(const ProcessAh& ah, std::uint32_t slot) noexcept {
  for (const ProcessAh::Reached& each : ah.reached) {
    if (each.slot == slot && !each.ah->peer->gone) return each.ah.get();
  }
  return nullptr;
}

}  // namespace

Ah* choose_context(ibv_ah* base, std::uint32_t& qpn) noexcept {
  constexpr std::uint32_t kNobody = ~0u;  // no slot
  auto& ah = *static_cast<ProcessAh*>(static_cast<Ah*>(base));
  const std::uint32_t slot = directory_slot_of(qpn);
  if (Ah* const known = find_reached(ah, slot); known != nullptr) return known;
  ibv_gid gid{};
  std::string why;
  if (find_context(ah.attr.grh.dgid, qpn, gid, why)) {
    if (Ah* const made = add_reached(ah, slot, gid); made != nullptr) return made;
  }
  qpn = 0;
  Ah* const ourselves = find_reached(ah, kNobody);
  return ourselves != nullptr ? ourselves : add_reached(ah, kNobody, context_of(ah.context).gid);
}

}  // namespace spinwire::softverbs
