// Memory windows of type 2B: keys that open part of a region to one queue pair. Work requests bind
// and invalidate them, in order with the queue pair's others.
#pragma once

#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// A window has an entry in the region table, as a region does. The consumer sets the low 8 bits of
/// its key.
struct Mw : ibv_mw {
  std::uint32_t index = 0;         ///< entry in the region table
  std::uint32_t key = 0;           ///< the key of the last binding
  std::uint32_t region = 0;        ///< index of the region that the window is bound to
  Qp* qp = nullptr;                ///< bound to this queue pair; null: free
  bool invalidated = false;        ///< the key is invalid, but an access may be in progress
  PendingAccess pending_access{};  ///< the access that may be in progress
};

/// The next two mirror libibverbs: null and errno, or an errno value. Set-up.
ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) noexcept;
/// Invalidates a bound window's key at once. EBUSY while its peer's access is in progress: call
/// again.
int dealloc_mw(ibv_mw* mw) noexcept;

/// Checks and stores the operands of IBV_WR_BIND_MW. Returns 0 or an errno value.
int keep_bind(const Qp& qp, SendWr& kept, const ibv_send_wr& wr) noexcept;
/// Runs IBV_WR_BIND_MW or IBV_WR_LOCAL_INV. False if it failed, or has to wait.
bool run_local(Qp& qp, const SendWr& wr) noexcept;
/// The same while earlier work requests are in flight. False, and nothing failed: it has to run in
/// its turn.
bool run_local_ahead(Qp& qp, const SendWr& wr) noexcept;
/// Invalidates a window for the peer of `qp` (SEND with invalidate). False if `key` does not belong
/// to a window that the peer may use.
bool invalidate_for_peer(Qp& qp, std::uint32_t key) noexcept;

}  // namespace spinwire::softverbs
