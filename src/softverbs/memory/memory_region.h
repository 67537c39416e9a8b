// Registered memory: registration, keys, and the checks of local elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// The next three mirror libibverbs: they return null and set errno, or return an errno value.
/// Set-up.
ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) noexcept;
/// Registers memory for the peer of `qp` alone: its remote key is good through that queue pair, as
/// a bound window's is, and its local key for nothing. The queue pair may be destroyed first.
ibv_mr* reg_mr_for_qp(ibv_qp* qp, void* address, std::size_t length, int access) noexcept;
/// Invalidates the key at once. EBUSY while a peer's access is in progress: call again. EBUSY and
/// no change while windows are bound to the region.
int dereg_mr(ibv_mr* mr) noexcept;
/// Mirrors ibv_rereg_mr(); the keys stay. After EBUSY (see dereg_mr()) the keys may be invalid;
/// other errors change nothing.
int rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* address, std::size_t length,
             int access) noexcept;

/// Takes an entry of the region table; 0 if all are in use. May throw std::bad_alloc.
std::uint32_t acquire_slot(RegionSlots& regions);
void release_slot(RegionSlots& regions, std::uint32_t index) noexcept;
/// Publishes an entry to peers, its key last.
void publish_region(Context& c, std::uint32_t index) noexcept;

/// The registration of `pd` that holds all of `sge` and has the rights `access`; null if there is
/// none. With a window_scope as `pd`, the window. Hot.
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

/// Whether an element lies in the remembered registration. Hot.
inline bool is_within(const KnownRegion& known, const ibv_sge& sge) noexcept {
  return sge.lkey == known.key && sge.length <= known.size &&
         sge.addr - known.begin <= known.size - sge.length;
}

/// local_allows() that remembers the registration.
[[gnu::noinline]] bool allows_and_remember(const Context& c, const Pd& pd, KnownRegion& known,
                                           const ibv_sge& sge, std::uint32_t access) noexcept;
/// local_allows() that first checks the remembered registration. Hot.
inline bool allows_again(const Context& c, const Pd& pd, KnownRegion& known, const ibv_sge& sge,
                         std::uint32_t access) noexcept {
  if (known.epoch == c.region_epoch && is_within(known, sge)) [[likely]]
    return true;
  return allows_and_remember(c, pd, known, sge, access);
}

/// Whether the device may read (or write) all elements.
inline bool all_allowed(const Context& c, const Pd& pd, const ibv_sge* sges, std::uint32_t count,
                        std::uint32_t access) noexcept {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (sges[i].length != 0 && !local_allows(c, pd.id, sges[i], access)) return false;
  }
  return true;
}
/// all_allowed() that first checks the remembered registration if there is one element. Hot.
inline bool all_allowed_again(const Qp& qp, KnownRegion& known, const ibv_sge* sges,
                              std::uint32_t count, std::uint32_t access) noexcept {
  const Context& c = context_of(qp.context);
  const Pd& pd = *static_cast<Pd*>(qp.pd);
  if (count == 1) [[likely]]
    return allows_again(c, pd, known, *sges, access) || sges->length == 0;
  return all_allowed(c, pd, sges, count, access);
}

/// Whether the device may read (or write) every element of a work request.
inline bool elements_allowed(const Qp& qp, const SendWr& wr, const ibv_sge* sges,
                             std::uint32_t access) noexcept {
  return (wr.flags & IBV_SEND_INLINE) != 0 ||
         all_allowed(context_of(qp.context), *static_cast<Pd*>(qp.pd), sges, wr.sge_count, access);
}

}  // namespace spinwire::softverbs
