// Address handles. Cold.
#include <arpa/inet.h>
#include <errno.h>

#include <new>
#include <string>

#include "base/log.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/objects.h"
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

bool valid(const ibv_ah_attr& attr) noexcept {
  return attr.is_global != 0 && attr.port_num == 1 && attr.grh.sgid_index == 0;
}

}  // namespace

ibv_ah* create_ah(ibv_pd* base, ibv_ah_attr* attr) noexcept {
  Context& c = context_of(base->context);
  if (!valid(*attr)) {
    errno = EINVAL;  // peers are found by GID only
    return nullptr;
  }
  auto* ah = new (std::nothrow) Ah();
  if (ah == nullptr) {
    errno = ENOMEM;
    return nullptr;
  }
  std::string why;
  ah->peer = attach_peer(c, attr->grh.dgid, why);
  if (ah->peer == nullptr) {
    const int error = errno;
    base::log(LogLevel::warning, "softverbs: the peer cannot be reached: {}", why);
    delete ah;
    errno = error;
    return nullptr;
  }
  ah->context = base->context;
  ah->pd = base;
  ah->version_class_flow = version_class_flow(attr->grh);
  ah->hop_limit = attr->grh.hop_limit;
  ah->plain = attr->grh.traffic_class == 0 && (attr->grh.flow_label & kFlowMask) == 0 &&
              attr->grh.hop_limit == kUsualHops;
  ++ah->peer->users;
  ++static_cast<Pd*>(base)->users;
  ++c.objects_open;
  return ah;
}

int destroy_ah(ibv_ah* base) noexcept {
  Ah* ah = static_cast<Ah*>(base);
  --ah->peer->users;
  --static_cast<Pd*>(ah->pd)->users;
  --context_of(ah->context).objects_open;
  delete ah;
  return 0;
}

}  // namespace spinwire::softverbs
