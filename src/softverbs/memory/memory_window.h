// Memory windows of type 2B: keys for part of a region that hold for one queue pair. Bound and
// invalidated by work requests, in order with the others of that queue pair.
#pragma once

#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// A window has an entry in the region table as a region has; the low 8 bits of its key are the
/// consumer's.
struct Mw : ibv_mw {
  std::uint32_t index = 0;   ///< of the region table
  std::uint32_t key = 0;     ///< the key of the last binding
  std::uint32_t region = 0;  ///< index of the region that it is bound to
  Qp* qp = nullptr;          ///< bound to this one; null: free
  bool invalidated = false;  ///< the key is invalid, but an access may be in progress
  PendingAccess busy{};      ///< that access
};

/// libibverbs calls: null and errno, or an errno value. Set-up.
ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) noexcept;
/// Invalidates a bound window's key at once. EBUSY while its peer's access is in progress: call
/// again.
int dealloc_mw(ibv_mw* mw) noexcept;

/// Checks and stores the operands of IBV_WR_BIND_MW; 0 or an errno value.
int keep_bind(const Qp& qp, SendWr& kept, const ibv_send_wr& wr) noexcept;
/// Runs IBV_WR_BIND_MW or IBV_WR_LOCAL_INV; false if it did not succeed (yet).
bool run_local(Qp& qp, const SendWr& wr) noexcept;
/// Invalidates a window for the peer of `qp` (SEND with invalidate). False if `key` is not of a
/// window that the peer could use.
bool invalidate_for_peer(Qp& qp, std::uint32_t key) noexcept;

}  // namespace spinwire::softverbs
