// Posts receives to a queue pair's own queue or to a shared one. Hot.
#include <errno.h>

#include <algorithm>

#include "softverbs/objects.h"
#include "softverbs/queues.h"

namespace spinwire::softverbs {
namespace {

/// Stores a receive with several elements, or none.
void keep_list(ReceiveQueue& queue, ReceiveWr& kept, const ibv_recv_wr& wr) noexcept {
  ibv_sge* sges = &queue.sges[static_cast<std::size_t>(&kept - queue.ring.get()) * queue.max_sge];
  std::uint64_t capacity = 0;
  for (int i = 0; i < wr.num_sge; ++i) {
    sges[i] = wr.sg_list[i];
    capacity += sges[i].length;
  }
  kept.capacity = static_cast<std::uint32_t>(std::min<std::uint64_t>(capacity, UINT32_MAX));
}

int post(ReceiveQueue& queue, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  ReceiveWr* const ring = queue.ring.get();
  const std::uint32_t limit = queue.head + queue.depth;
  std::uint32_t tail = queue.tail;
  int error = 0;
  for (; wr != nullptr; wr = wr->next) {
    const auto count = static_cast<std::uint32_t>(wr->num_sge);
    if (tail == limit || count > queue.max_sge) [[unlikely]] {
      *bad = wr;
      error = tail == limit ? ENOMEM : EINVAL;
      break;
    }
    ReceiveWr& kept = ring[tail & queue.mask];
    kept.wr_id = wr->wr_id;
    kept.sge_count = count;
    if (count == 1) [[likely]] {
      kept.first = *wr->sg_list;
      kept.capacity = kept.first.length;
    } else {
      keep_list(queue, kept, *wr);
    }
    ++tail;
  }
  queue.tail = tail;
  return error;
}

/// Posts to a shared queue that has a limit.
[[gnu::noinline]] int post_with_limit(ReceiveQueue& queue, ibv_recv_wr* wr,
                                      ibv_recv_wr** bad) noexcept {
  expose_reserve(queue);
  const int error = post(queue, wr, bad);
  hide_reserve(queue);
  return error;
}

}  // namespace

int post_recv(ibv_qp* base, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  if (qp.srq != nullptr || qp.state == IBV_QPS_RESET) [[unlikely]] {
    *bad = wr;
    return EINVAL;
  }
  const int error = post(qp.own_receives, wr, bad);
  if (qp.state == IBV_QPS_ERR) [[unlikely]]
    enter_error(qp);
  return error;
}

int post_srq_recv(ibv_srq* base, ibv_recv_wr* wr, ibv_recv_wr** bad) noexcept {
  ReceiveQueue& queue = static_cast<Srq*>(base)->queue;
  if (queue.limit != 0) [[unlikely]]
    return post_with_limit(queue, wr, bad);
  return post(queue, wr, bad);
}

}  // namespace spinwire::softverbs
