// The operations that programs call through their context, each under its lock.
#include <sys/eventfd.h>

#include <thread>

#include "preload/host.h"

namespace spinwire::preload {

namespace {

int poll_locked(ibv_cq* cq, int entries, ibv_wc* wc, bool& weary) noexcept {
  constexpr std::uint32_t kTimeout = 256;
  const Guard guard(cq->context);
  Host& host = guard.host();
  host.polls.fetch_add(1, std::memory_order_relaxed);
  const int got = host.bare.poll_cq(cq, entries, wc);
  if (got == 0) {
    weary = ++host.empty_polls % kTimeout == 0;
    return 0;
  }
  host.empty_polls = 0;
  if (host.armed != 0 && got > 0) note_polled(host, cq, static_cast<std::uint32_t>(got));
  return got;
}

/// Programs poll without pause, because an adapter works by itself. Here the peer's thread does its
/// work, perhaps on the same CPU, so empty polls sometimes yield.
int poll_cq(ibv_cq* cq, int entries, ibv_wc* wc) {
  bool weary = false;
  const int got = poll_locked(cq, entries, wc, weary);
  if (weary) {
    drive_others(&host_of(cq->context));
    std::this_thread::yield();
  }
  return got;
}

int post_send(ibv_qp* base, ibv_send_wr* wr, ibv_send_wr** bad) {
  ibv_qp* qp = actual(base);
  const Guard guard(qp->context);
  return guard.host().bare.post_send(qp, wr, bad);
}

int post_recv(ibv_qp* base, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  ibv_qp* qp = actual(base);
  const Guard guard(qp->context);
  return guard.host().bare.post_recv(qp, wr, bad);
}

int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  const Guard guard(srq->context);
  return guard.host().bare.post_srq_recv(srq, wr, bad);
}

}  // namespace

void lock_operations(ibv_context_ops& ops) noexcept {
  ops.poll_cq = poll_cq;
  ops.req_notify_cq = req_notify_cq;
  ops.post_send = post_send;
  ops.post_recv = post_recv;
  ops.post_srq_recv = post_srq_recv;
}

/// The descriptor counts each new event; a read takes one.
void Guard::report_events(Host& host) noexcept {
  const std::size_t now = host.device->events.size();
  if (now > host.events_reported)
    (void)eventfd_write(host.device->verbs.async_fd, now - host.events_reported);
  host.events_reported = now;
}

}  // namespace spinwire::preload
