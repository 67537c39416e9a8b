// The calls that verbs.h makes through a verbs_context. For a null entry the header returns
// EOPNOTSUPP.
#include <algorithm>
#include <cstring>
#include <new>

#include "preload/host.h"
#include "preload/interpose.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::preload {

namespace {

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr, std::size_t size) {
  ibv_port_attr whole{};
  const int error = softverbs::query_port(context, port, &whole);
  if (error == 0) std::memcpy(attr, &whole, std::min(size, sizeof whole));
  return error;
}

int query_device_ex(ibv_context* context, const ibv_query_device_ex_input* input,
                    ibv_device_attr_ex* attr, std::size_t size) {
  if (input != nullptr && input->comp_mask != 0) return EINVAL;
  if (size < sizeof attr->orig_attr) return EINVAL;
  ibv_device_attr_ex whole{};
  const int error = ibv_query_device(context, &whole.orig_attr);
  whole.phys_port_cnt_ex = whole.orig_attr.phys_port_cnt;
  std::memcpy(attr, &whole, std::min(size, sizeof whole));
  return error;
}

constexpr std::uint64_t kSendOperations =
    IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |
    IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
    IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW |
    IBV_QP_EX_WITH_SEND_WITH_INV;

ibv_qp* create_qp_ex(ibv_context*, ibv_qp_init_attr_ex* attr) {
  constexpr std::uint32_t kKnown =
      IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  const bool builds = (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0;
  const bool flags =
      (attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS) != 0 && attr->create_flags != 0;
  if ((attr->comp_mask & IBV_QP_INIT_ATTR_PD) == 0) return refuse_with<ibv_qp>(EINVAL);
  if ((attr->comp_mask & ~kKnown) != 0 || flags ||
      (builds && (attr->send_ops_flags & ~kSendOperations) != 0))
    return refuse_with<ibv_qp>(EOPNOTSUPP);
  // ibv_qp_init_attr_ex begins with the members of ibv_qp_init_attr.
  ibv_qp* qp = ibv_create_qp(attr->pd, reinterpret_cast<ibv_qp_init_attr*>(attr));
  if (qp == nullptr || !builds) return qp;
  if (make_builder(host_of(qp->context), qp, attr->cap)) return qp;
  (void)ibv_destroy_qp(qp);
  return refuse_with<ibv_qp>(ENOMEM);
}

ibv_td* alloc_td(ibv_context* context, ibv_td_init_attr* attr) {
  if (attr == nullptr || attr->comp_mask != 0) return refuse_with<ibv_td>(EINVAL);
  auto* td = new (std::nothrow) ThreadDomain();
  if (td == nullptr) return refuse_with<ibv_td>(ENOMEM);
  td->context = context;
  const Guard guard(context);
  return made(guard, td, Kind::thread_domain);
}
int dealloc_td(ibv_td* base) {
  auto* td = static_cast<ThreadDomain*>(base);
  const Guard guard(td->context);
  if (td->users != 0) return EBUSY;
  (void)unmade(guard, static_cast<void*>(td), 0);
  delete td;
  return 0;
}
/// The allocators are never called: the device allocates none of a program's memory.
ibv_pd* alloc_parent_domain(ibv_context* context, ibv_parent_domain_init_attr* attr) {
  constexpr std::uint32_t kKnown =
      IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
  if (attr->pd == nullptr || attr->pd->context != context ||
      (attr->td != nullptr && attr->td->context != context))
    return refuse_with<ibv_pd>(EINVAL);
  if ((attr->comp_mask & ~kKnown) != 0) return refuse_with<ibv_pd>(EOPNOTSUPP);
  const Guard guard(context);
  ibv_pd* pd = softverbs::alloc_parent_domain(attr->pd);
  if (pd == nullptr || attr->td == nullptr) return made(guard, pd, Kind::parent_domain);
  auto* td = static_cast<ThreadDomain*>(attr->td);
  try {
    guard.host().thread_domains.emplace(pd, td);
  } catch (const std::bad_alloc&) {
    (void)softverbs::dealloc_pd(pd);
    return refuse_with<ibv_pd>(ENOMEM);
  }
  ++td->users;
  return made(guard, pd, Kind::parent_domain);
}

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) {
  const Guard guard(pd->context);
  return made(guard, softverbs::alloc_mw(pd, type), Kind::window);
}
int dealloc_mw(ibv_mw* mw) {
  const Guard guard(mw->context);
  return unmade(guard, mw, softverbs::dealloc_mw(mw));
}
/// ibv_bind_mw() applies to windows of type 1 only, which the device lacks.
int bind_mw(ibv_qp*, ibv_mw*, ibv_mw_bind*) { return EOPNOTSUPP; }

}  // namespace

void release_thread_domain(Host& host, const ibv_pd* pd) noexcept {
  const auto found = host.thread_domains.find(pd);
  if (found == host.thread_domains.end()) return;
  --found->second->users;
  host.thread_domains.erase(found);
}

void fill_extended_operations(verbs_context& extended) noexcept {
  extended.sz = sizeof extended;
  extended.query_port = query_port;
  extended.query_device_ex = query_device_ex;
  extended.create_qp_ex = create_qp_ex;
  extended.create_cq_ex = create_cq_ex;
  extended.alloc_td = alloc_td;
  extended.dealloc_td = dealloc_td;
  extended.alloc_parent_domain = alloc_parent_domain;
  extended.context.ops.alloc_mw = alloc_mw;
  extended.context.ops.dealloc_mw = dealloc_mw;
  extended.context.ops.bind_mw = bind_mw;
}

}  // namespace spinwire::preload
