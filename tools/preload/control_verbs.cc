// Makes, changes and destroys verbs objects. Each function passes objects of other devices on to
// libibverbs.
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "preload/host.h"
#include "preload/interpose.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/softverbs_device.h"

using namespace spinwire;
using preload::actual;
using preload::Guard;
using preload::Kind;
using preload::made;
using preload::ours;
using preload::refuse_with;
using preload::unmade;

SOFTVERBS_INTERPOSED ibv_pd* ibv_alloc_pd(ibv_context* context) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_alloc_pd)(context);
  const Guard guard(context);
  return made(guard, softverbs::alloc_pd(context), Kind::domain);
}
SOFTVERBS_INTERPOSED int ibv_dealloc_pd(ibv_pd* pd) {
  if (!ours(pd->context)) return SOFTVERBS_NEXT(ibv_dealloc_pd)(pd);
  const Guard guard(pd->context);
  const int error = unmade(guard, pd, softverbs::dealloc_pd(pd));
  if (error == 0) preload::release_thread_domain(guard.host(), pd);
  return error;
}

// ---- memory -----------------------------------------------------------------------------------

namespace {

ibv_mr* register_memory(ibv_pd* pd, void* address, std::size_t length, std::uint64_t seen_as,
                        unsigned access) {
  if (seen_as != reinterpret_cast<std::uint64_t>(address)) return refuse_with<ibv_mr>(EOPNOTSUPP);
  const Guard guard(pd->context);
  const unsigned asked = access & ~static_cast<unsigned>(IBV_ACCESS_OPTIONAL_RANGE);
  return made(guard, softverbs::reg_mr(pd, address, length, static_cast<int>(asked)), Kind::memory);
}

/// Retries while the device returns EBUSY because a peer's access is in progress. Programs do not
/// expect that error.
template <typename Verb>
int while_busy(ibv_context* context, Verb verb) {
  constexpr auto kTimeout = std::chrono::seconds(2);
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  for (;;) {
    const int error = verb();
    if (error != EBUSY || std::chrono::steady_clock::now() >= end) return error;
    {
      const Guard guard(context);
      softverbs::control_device(context);  // notices that the peer died
    }
    preload::drive_others(nullptr);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}
/// Waiting does not help for a region with bound windows.
bool has_windows(const Guard& guard, const ibv_mr* mr) {
  const auto index = static_cast<const softverbs::Mr*>(mr)->index;
  return guard.host().device->regions.slots[index].windows != 0;
}

}  // namespace

SOFTVERBS_INTERPOSED ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
  if (!ours(pd->context)) return SOFTVERBS_NEXT(ibv_reg_mr)(pd, address, length, access);
  return register_memory(pd, address, length, reinterpret_cast<std::uint64_t>(address),
                         static_cast<unsigned>(access));
}
SOFTVERBS_INTERPOSED ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* address, std::size_t length,
                                             std::uint64_t seen_as, int access) {
  if (!ours(pd->context))
    return SOFTVERBS_NEXT(ibv_reg_mr_iova)(pd, address, length, seen_as, access);
  return register_memory(pd, address, length, seen_as, static_cast<unsigned>(access));
}
SOFTVERBS_INTERPOSED ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, std::size_t length,
                                              std::uint64_t seen_as, unsigned access) {
  if (!ours(pd->context))
    return SOFTVERBS_NEXT(ibv_reg_mr_iova2)(pd, address, length, seen_as, access);
  return register_memory(pd, address, length, seen_as, access);
}
SOFTVERBS_INTERPOSED ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length,
                                               std::uint64_t seen_as, int fd, int access) {
  if (!ours(pd->context))
    return SOFTVERBS_NEXT(ibv_reg_dmabuf_mr)(pd, offset, length, seen_as, fd, access);
  return refuse_with<ibv_mr>(EOPNOTSUPP);
}
SOFTVERBS_INTERPOSED int ibv_rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* address,
                                      std::size_t length, int access) {
  if (!ours(mr->context))
    return SOFTVERBS_NEXT(ibv_rereg_mr)(mr, flags, pd, address, length, access);
  const auto asked = static_cast<unsigned>(access) & ~unsigned{IBV_ACCESS_OPTIONAL_RANGE};
  const bool windows = has_windows(Guard(mr->context), mr);
  const int error = windows ? EBUSY : while_busy(mr->context, [&] {
    const Guard guard(mr->context);
    return softverbs::rereg_mr(mr, flags, pd, address, length, static_cast<int>(asked));
  });
  if (error == 0) return 0;
  errno = error;
  // After EBUSY, a region without windows has lost its keys and can only be deregistered.
  return error == EBUSY && !windows ? IBV_REREG_MR_ERR_CMD : IBV_REREG_MR_ERR_INPUT;
}
SOFTVERBS_INTERPOSED int ibv_dereg_mr(ibv_mr* mr) {
  if (!ours(mr->context)) return SOFTVERBS_NEXT(ibv_dereg_mr)(mr);
  if (has_windows(Guard(mr->context), mr)) return EBUSY;
  return while_busy(mr->context, [mr] {
    const Guard guard(mr->context);
    return unmade(guard, mr, softverbs::dereg_mr(mr));
  });
}

namespace {

/// Destroys an object once the program has acknowledged all events about it that it took.
template <typename T>
int end_acknowledged(T* object, const preload::Acknowledged& events, int (*destroy)(T*) noexcept) {
  for (;;) {
    std::uint32_t handed_out = 0;
    {
      const Guard guard(object->context);
      handed_out = preload::async_events_handed_out(guard.host(), object);
      if (preload::acknowledged(events, handed_out)) {
        const int error = unmade(guard, object, destroy(object));
        // After an error the object stays, and so do its events, for the next attempt.
        if (error == 0) guard.host().async_events.erase(object);
        return error;
      }
    }
    preload::wait_for_acknowledgements(events, handed_out);
  }
}

}  // namespace

// ---- completion queues ------------------------------------------------------------------------

ibv_cq* preload::create_cq(ibv_context* context, int entries, void* cq_context,
                           ibv_comp_channel* channel, int vector) noexcept {
  if (vector < 0 || vector >= context->num_comp_vectors) return refuse_with<ibv_cq>(EINVAL);
  const Guard guard(context);
  ibv_cq* cq = softverbs::create_cq(context, entries);
  if (cq == nullptr) return nullptr;
  cq->cq_context = cq_context;
  try {
    if (channel != nullptr)
      preload::watch(guard.host(), cq, static_cast<preload::Channel*>(channel));
  } catch (const std::bad_alloc&) {
    (void)softverbs::destroy_cq(cq);
    return refuse_with<ibv_cq>(ENOMEM);
  }
  return made(guard, cq, Kind::completions);
}

SOFTVERBS_INTERPOSED ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* cq_context,
                                           ibv_comp_channel* channel, int vector) {
  if (!ours(context))
    return SOFTVERBS_NEXT(ibv_create_cq)(context, entries, cq_context, channel, vector);
  return preload::create_cq(context, entries, cq_context, channel, vector);
}

SOFTVERBS_INTERPOSED int ibv_resize_cq(ibv_cq* cq, int entries) {
  if (!ours(cq->context)) return SOFTVERBS_NEXT(ibv_resize_cq)(cq, entries);
  preload::drive_others(nullptr);  // as on an adapter, completions on their way have arrived
  const Guard guard(cq->context);
  preload::drain_packets(guard.host());
  return softverbs::resize_cq(cq, entries);
}

SOFTVERBS_INTERPOSED int ibv_destroy_cq(ibv_cq* cq) {
  if (!ours(cq->context)) return SOFTVERBS_NEXT(ibv_destroy_cq)(cq);
  std::uint32_t handed_out = 0;
  {
    const Guard guard(cq->context);
    if (static_cast<softverbs::Cq*>(cq)->users != 0) return EBUSY;
    handed_out = preload::events_handed_out(guard.host(), cq);
    preload::unwatch(guard.host(), cq);
  }
  preload::wait_for_acknowledgements({cq->mutex, cq->cond, cq->comp_events_completed}, handed_out);
  return end_acknowledged(cq, {cq->mutex, cq->cond, cq->async_events_completed},
                          softverbs::destroy_cq);
}

// ---- shared receive queues --------------------------------------------------------------------

SOFTVERBS_INTERPOSED ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* attr) {
  if (!ours(pd->context)) return SOFTVERBS_NEXT(ibv_create_srq)(pd, attr);
  const Guard guard(pd->context);
  return made(guard, softverbs::create_srq(pd, attr), Kind::shared_receives);
}
SOFTVERBS_INTERPOSED int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* attr, int mask) {
  if (!ours(srq->context)) return SOFTVERBS_NEXT(ibv_modify_srq)(srq, attr, mask);
  const Guard guard(srq->context);
  return softverbs::modify_srq(srq, attr, mask);
}
SOFTVERBS_INTERPOSED int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* attr) {
  if (!ours(srq->context)) return SOFTVERBS_NEXT(ibv_query_srq)(srq, attr);
  const Guard guard(srq->context);
  return softverbs::query_srq(srq, attr);
}
SOFTVERBS_INTERPOSED int ibv_destroy_srq(ibv_srq* srq) {
  if (!ours(srq->context)) return SOFTVERBS_NEXT(ibv_destroy_srq)(srq);
  {
    const Guard guard(srq->context);
    if (static_cast<softverbs::Srq*>(srq)->users != 0) return EBUSY;
  }
  return end_acknowledged(srq, {srq->mutex, srq->cond, srq->events_completed},
                          softverbs::destroy_srq);
}

// ---- queue pairs ------------------------------------------------------------------------------

SOFTVERBS_INTERPOSED ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) {
  if (!ours(pd->context)) return SOFTVERBS_NEXT(ibv_create_qp)(pd, attr);
  const Guard guard(pd->context);
  return made(guard, softverbs::create_qp(pd, attr), Kind::queue_pair);
}

namespace {

/// Waiting does not help for a queue pair with bound windows.
bool has_windows(ibv_qp* qp) {
  const Guard guard(qp->context);
  return static_cast<softverbs::Qp*>(actual(qp))->windows != 0;
}

}  // namespace

SOFTVERBS_INTERPOSED int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  if (!ours(qp->context)) return SOFTVERBS_NEXT(ibv_modify_qp)(qp, attr, mask);
  if ((mask & IBV_QP_STATE) != 0 && attr->qp_state == IBV_QPS_RESET && has_windows(qp))
    return EBUSY;
  return while_busy(qp->context, [&] {
    const Guard guard(qp->context);
    const int error = softverbs::modify_qp(actual(qp), attr, mask);
    qp->state = actual(qp)->state;
    return error;
  });
}
SOFTVERBS_INTERPOSED int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask,
                                      ibv_qp_init_attr* init) {
  if (!ours(qp->context)) return SOFTVERBS_NEXT(ibv_query_qp)(qp, attr, mask, init);
  const Guard guard(qp->context);
  return softverbs::query_qp(actual(qp), attr, mask, init);
}
SOFTVERBS_INTERPOSED int ibv_destroy_qp(ibv_qp* base) {
  if (!ours(base->context)) return SOFTVERBS_NEXT(ibv_destroy_qp)(base);
  if (has_windows(base)) return EBUSY;
  ibv_qp* qp = actual(base);
  ibv_context* context = qp->context;
  {
    const Guard guard(context);
    preload::drain_packets(guard.host());
  }
  const int error = while_busy(context, [qp] {
    return end_acknowledged(qp, {qp->mutex, qp->cond, qp->events_completed}, softverbs::destroy_qp);
  });
  const Guard guard(context);
  if (error == 0) preload::drop_builder(guard.host(), qp);
  return error;
}
SOFTVERBS_INTERPOSED int ibv_query_qp_data_in_order(ibv_qp* qp, ibv_wr_opcode opcode,
                                                    std::uint32_t flags) {
  return ours(qp->context) ? 0 : SOFTVERBS_NEXT(ibv_query_qp_data_in_order)(qp, opcode, flags);
}
SOFTVERBS_INTERPOSED int ibv_set_ece(ibv_qp* qp, ibv_ece* ece) {
  return ours(qp->context) ? EOPNOTSUPP : SOFTVERBS_NEXT(ibv_set_ece)(qp, ece);
}
/// The device has no options to negotiate, so it reports zeros.
SOFTVERBS_INTERPOSED int ibv_query_ece(ibv_qp* qp, ibv_ece* ece) {
  if (!ours(qp->context)) return SOFTVERBS_NEXT(ibv_query_ece)(qp, ece);
  *ece = {};
  return 0;
}
SOFTVERBS_INTERPOSED int ibv_attach_mcast(ibv_qp* qp, const ibv_gid* gid, std::uint16_t lid) {
  return ours(qp->context) ? EOPNOTSUPP : SOFTVERBS_NEXT(ibv_attach_mcast)(qp, gid, lid);
}
SOFTVERBS_INTERPOSED int ibv_detach_mcast(ibv_qp* qp, const ibv_gid* gid, std::uint16_t lid) {
  return ours(qp->context) ? EOPNOTSUPP : SOFTVERBS_NEXT(ibv_detach_mcast)(qp, gid, lid);
}

// ---- address handles --------------------------------------------------------------------------

SOFTVERBS_INTERPOSED ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
  if (!ours(pd->context)) return SOFTVERBS_NEXT(ibv_create_ah)(pd, attr);
  const Guard guard(pd->context);
  return made(guard, softverbs::create_ah(pd, attr), Kind::address);
}
SOFTVERBS_INTERPOSED int ibv_destroy_ah(ibv_ah* ah) {
  if (!ours(ah->context)) return SOFTVERBS_NEXT(ibv_destroy_ah)(ah);
  const Guard guard(ah->context);
  return unmade(guard, ah, softverbs::destroy_ah(ah));
}
/// The header has the sender's address: this device has no LIDs.
SOFTVERBS_INTERPOSED int ibv_init_ah_from_wc(ibv_context* context, std::uint8_t port, ibv_wc* wc,
                                             ibv_grh* grh, ibv_ah_attr* attr) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_init_ah_from_wc)(context, port, wc, grh, attr);
  *attr = {};
  if (port != 1 || (wc->wc_flags & IBV_WC_GRH) == 0) return errno = EINVAL, -1;
  attr->is_global = 1;
  attr->port_num = port;
  attr->sl = wc->sl;
  attr->grh.dgid = grh->sgid;
  attr->grh.hop_limit = 0xff;
  return 0;
}
SOFTVERBS_INTERPOSED ibv_ah* ibv_create_ah_from_wc(ibv_pd* pd, ibv_wc* wc, ibv_grh* grh,
                                                   std::uint8_t port) {
  if (!ours(pd->context)) return SOFTVERBS_NEXT(ibv_create_ah_from_wc)(pd, wc, grh, port);
  ibv_ah_attr attr;
  if (ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr) != 0) return nullptr;
  return ibv_create_ah(pd, &attr);
}
/// The device is not on an Ethernet.
SOFTVERBS_INTERPOSED int ibv_resolve_eth_l2_from_gid(ibv_context* context, ibv_ah_attr* attr,
                                                     std::uint8_t* mac, std::uint16_t* vlan) {
  return ours(context) ? EOPNOTSUPP
                       : SOFTVERBS_NEXT(ibv_resolve_eth_l2_from_gid)(context, attr, mac, vlan);
}

// ---- objects of other processes ---------------------------------------------------------------

SOFTVERBS_INTERPOSED ibv_pd* ibv_import_pd(ibv_context* context, std::uint32_t handle) {
  return ours(context) ? refuse_with<ibv_pd>(EOPNOTSUPP)
                       : SOFTVERBS_NEXT(ibv_import_pd)(context, handle);
}
SOFTVERBS_INTERPOSED ibv_mr* ibv_import_mr(ibv_pd* pd, std::uint32_t handle) {
  return ours(pd->context) ? refuse_with<ibv_mr>(EOPNOTSUPP)
                           : SOFTVERBS_NEXT(ibv_import_mr)(pd, handle);
}
SOFTVERBS_INTERPOSED ibv_dm* ibv_import_dm(ibv_context* context, std::uint32_t handle) {
  return ours(context) ? refuse_with<ibv_dm>(EOPNOTSUPP)
                       : SOFTVERBS_NEXT(ibv_import_dm)(context, handle);
}
/// No object can have been imported.
SOFTVERBS_INTERPOSED void ibv_unimport_pd(ibv_pd* pd) {
  if (!ours(pd->context)) SOFTVERBS_NEXT(ibv_unimport_pd)(pd);
}
SOFTVERBS_INTERPOSED void ibv_unimport_mr(ibv_mr* mr) {
  if (!ours(mr->context)) SOFTVERBS_NEXT(ibv_unimport_mr)(mr);
}
SOFTVERBS_INTERPOSED void ibv_unimport_dm(ibv_dm* dm) {
  if (!ours(dm->context)) SOFTVERBS_NEXT(ibv_unimport_dm)(dm);
}
