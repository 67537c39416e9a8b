// Programs may close a device with objects left. For other devices the kernel destroys them.
#include <infiniband/verbs.h>

#include <new>
#include <vector>

#include "preload/host.h"
#include "preload/interpose.h"

namespace spinwire::preload {

namespace {

std::uint32_t events_taken(ibv_cq* cq) noexcept {
  const Guard guard(cq->context);
  return events_handed_out(guard.host(), cq);
}
std::uint32_t async_events_taken(ibv_context* context, const void* object) noexcept {
  const Guard guard(context);
  return async_events_handed_out(guard.host(), object);
}

/// Destroys an object. Marks its events as acknowledged, as the program no longer will.
void destroy(void* object, Kind kind) noexcept {
  switch (kind) {
    case Kind::queue_pair:
      static_cast<ibv_qp*>(object)->events_completed =
          async_events_taken(static_cast<ibv_qp*>(object)->context, object);
      (void)ibv_destroy_qp(static_cast<ibv_qp*>(object));
      break;
    case Kind::address:
      (void)ibv_destroy_ah(static_cast<ibv_ah*>(object));
      break;
    case Kind::window:
      (void)ibv_dealloc_mw(static_cast<ibv_mw*>(object));
      break;
    case Kind::shared_receives:
      static_cast<ibv_srq*>(object)->events_completed =
          async_events_taken(static_cast<ibv_srq*>(object)->context, object);
      (void)ibv_destroy_srq(static_cast<ibv_srq*>(object));
      break;
    case Kind::completions:
      static_cast<ibv_cq*>(object)->comp_events_completed =
          events_taken(static_cast<ibv_cq*>(object));
      static_cast<ibv_cq*>(object)->async_events_completed =
          async_events_taken(static_cast<ibv_cq*>(object)->context, object);
      (void)ibv_destroy_cq(static_cast<ibv_cq*>(object));
      break;
    case Kind::memory:
      (void)ibv_dereg_mr(static_cast<ibv_mr*>(object));
      break;
    case Kind::thread_domain:
      (void)ibv_dealloc_td(static_cast<ibv_td*>(static_cast<ThreadDomain*>(object)));
      break;
    default:
      (void)ibv_dealloc_pd(static_cast<ibv_pd*>(object));
  }
}

}  // namespace

void note_made(Host& host, void* object, Kind kind) noexcept {
  try {
    host.objects.emplace(object, kind);
  } catch (const std::bad_alloc&) {
    return;  // only the program can destroy this one
  }
}

int unmade(const Guard& guard, void* object, int error) noexcept {
  if (error == 0) guard.host().objects.erase(object);
  return error;
}

void destroy_leftovers(ibv_context* context) noexcept {
  for (std::uint8_t kind = 0; kind < static_cast<std::uint8_t>(Kind::count); ++kind) {
    std::vector<void*> left;
    {
      const Guard guard(context);
      for (const auto& [object, its_kind] : guard.host().objects) {
        if (its_kind == static_cast<Kind>(kind)) left.push_back(object);
      }
    }
    for (void* object : left) destroy(object, static_cast<Kind>(kind));
  }
}

}  // namespace spinwire::preload
