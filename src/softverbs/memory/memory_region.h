// Registered memory: registration, keys, and the checks of our own elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// libibverbs calls: null and errno, or an errno value. Set-up.
ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) noexcept;
/// Invalidates the key at once. EBUSY while a peer's access is in progress: call again. EBUSY and
/// no change while windows are bound to the region.
int dereg_mr(ibv_mr* mr) noexcept;
/// As ibv_rereg_mr(); the keys stay. 0 or an errno value: EBUSY as of dereg_mr(), the keys are
/// invalid then; otherwise nothing has changed.
int rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* address, std::size_t length,
             int access) noexcept;

/// An entry of the region table; 0 if all are in use. May throw std::bad_alloc.
std::uint32_t acquire_slot(RegionSlots& regions);
void release_slot(RegionSlots& regions, std::uint32_t index) noexcept;
/// Shows an entry to the peers, with its key last.
void publish_region(Context& c, std::uint32_t index) noexcept;

/// Whether `sge` lies within a valid registration of `pd` (or a window, if that is the
/// window_scope of its queue pair) with the rights asked; null if not. Hot.
inline const OwnRegion* find_allowing(const Context& c, std::uint64_t pd, const ibv_sge& sge,
                                      std::uint32_t access) noexcept {
  const OwnRegion& region = c.regions.own[region_index(sge.lkey)];
  const bool allows = region.key == sge.lkey && sge.lkey != 0 && region.pd == pd &&
                      sge.addr >= region.address && sge.length <= region.length &&
                      sge.addr - region.address <= region.length - sge.length &&
                      (region.access & access) == access;
  return allows ? &region : nullptr;
}
inline bool local_allows(const Context& c, std::uint64_t pd, const ibv_sge& sge,
                         std::uint32_t access) noexcept {
  return find_allowing(c, pd, sge, access) != nullptr;
}

/// Whether an element lies in the registration that was found to allow it. Hot.
inline bool lies_in(const KnownRegion& known, const ibv_sge& sge) noexcept {
  return sge.lkey == known.key && sge.length <= known.size &&
         sge.addr - known.begin <= known.size - sge.length;
}

/// local_allows(), remembering the registration.
[[gnu::noinline]] bool allows_and_remember(const Context& c, const Pd& pd, KnownRegion& known,
                                           const ibv_sge& sge, std::uint32_t access) noexcept;
/// local_allows() for one element, remembering the registration. Hot.
inline bool allows_again(const Context& c, const Pd& pd, KnownRegion& known, const ibv_sge& sge,
                         std::uint32_t access) noexcept {
  if (known.epoch == c.region_epoch && lies_in(known, sge)) [[likely]]
    return true;
  return allows_and_remember(c, pd, known, sge, access);
}

/// Whether every element of a work request may be read (or written) by the device.
inline bool elements_allowed(const Qp& qp, const SendWr& wr, const ibv_sge* sges,
                             std::uint32_t access) noexcept {
  if ((wr.flags & IBV_SEND_INLINE) != 0) return true;
  const Context& c = context_of(qp.context);
  const std::uint64_t pd = static_cast<Pd*>(qp.pd)->id;
  for (std::uint32_t i = 0; i < wr.sge_count; ++i) {
    if (sges[i].length != 0 && !local_allows(c, pd, sges[i], access)) return false;
  }
  return true;
}

}  // namespace spinwire::softverbs
