// The limit of shared receive queues, below which an event is raised. Cold.
//
// The hot paths see only the receives above the limit. A packet that finds no receive takes the
// general path, which checks the limit.
#include <errno.h>

#include <algorithm>

#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::softverbs {

void hide_reserve(ReceiveQueue& queue) noexcept {
  queue.tail += queue.reserved;
  queue.reserved = std::min(queue.limit, queue.count());
  queue.tail -= queue.reserved;
}

void expose_reserve(ReceiveQueue& queue) noexcept {
  queue.tail += queue.reserved;
  queue.reserved = 0;
}

bool claim_reserve(Qp& qp) noexcept {
  ReceiveQueue& queue = *qp.receives;
  if (queue.reserved == 0) return false;
  queue.limit = 0;
  expose_reserve(queue);
  raise_event(context_of(qp.context), IBV_EVENT_SRQ_LIMIT_REACHED, qp.srq);
  return true;
}

int modify_srq(ibv_srq* base, ibv_srq_attr* attr, int mask) noexcept {
  ReceiveQueue& queue = static_cast<Srq*>(base)->queue;
  if ((mask & ~IBV_SRQ_LIMIT) != 0) return EINVAL;  // IBV_SRQ_MAX_WR: the depth is fixed
  if ((mask & IBV_SRQ_LIMIT) == 0) return 0;
  if (attr->srq_limit > queue.depth) return EINVAL;
  queue.limit = attr->srq_limit;
  hide_reserve(queue);
  return 0;
}

int query_srq(ibv_srq* base, ibv_srq_attr* attr) noexcept {
  const ReceiveQueue& queue = static_cast<Srq*>(base)->queue;
  *attr = {queue.depth, queue.max_sge, queue.limit};
  return 0;
}

}  // namespace spinwire::softverbs
