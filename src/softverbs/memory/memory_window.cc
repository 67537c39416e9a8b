#include "softverbs/memory/memory_window.h"

#include <errno.h>
#include <unistd.h>

#include <memory>
#include <new>

#include "softverbs/memory/access_tracking.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/queues.h"
#include "softverbs/refusal.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint32_t kConsumerBits = 0xff;
constexpr unsigned kWindowAccess =
    IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
constexpr Nanoseconds kAccessRetryDelay = std::chrono::microseconds(1);

constexpr bool same_window(std::uint32_t key, std::uint32_t other) noexcept {
  return ((key ^ other) & ~kConsumerBits) == 0;
}

/// A parent domain equals the domain whose rights it has.
bool same_domain(const ibv_pd* a, const ibv_pd* b) noexcept {
  return static_cast<const Pd*>(a)->id == static_cast<const Pd*>(b)->id;
}

Mw* window_at(Context& c, std::uint32_t key) noexcept {
  const std::uint32_t index = region_index(key);
  return index < c.regions.slots.size() ? c.regions.slots[index].window : nullptr;
}

ibv_mw* make_window(Context& c, Pd& pd) {
  auto mw = std::make_unique<Mw>();
  const std::uint32_t index = acquire_slot(c.regions);
  if (index == 0) return refuse_with(ENOMEM);
  RegionSlots::Slot& slot = c.regions.slots[index];
  // The consumer may have used all keys with equal high bits.
  slot.generation = ((slot.generation | kConsumerBits) + 1) & kGenerationMask;
  slot.window = mw.get();
  mw->context = &c.verbs;
  mw->pd = &pd;
  mw->rkey = mw->key = region_key(index, slot.generation);
  mw->handle = mw->index = index;
  mw->type = IBV_MW_TYPE_2;
  ++pd.users;
  ++c.objects_open;
  return mw.release();
}

/// Invalidates the window's key and records the peer's access. The peer marks itself busy and
/// issues a barrier before it reads the key, so this side needs no membarrier.
void invalidate_key(Context& c, Mw& mw) noexcept {
  set_key(c.regions.own[mw.index], 0);
  c.segment->regions[mw.index].key.exchange(0, std::memory_order_seq_cst);
  mw.pending_access = current_access(c, *mw.qp->peer);
  mw.invalidated = true;
}

/// Whether the peer's access through the window has ended.
bool peer_finished(Context& c, const Mw& mw) noexcept { return access_ended(c, mw.pending_access); }

/// Frees the window to be bound again.
void unbind(Context& c, Mw& mw) noexcept {
  --mw.qp->windows;
  --c.regions.slots[mw.region].windows;
  mw.qp = nullptr;
  mw.invalidated = false;
}

/// The window that `key` names, if work requests of `qp` may invalidate it: bound to it, or free.
Mw* find_owned_window(Context& c, const Qp& qp, std::uint32_t key) noexcept {
  Mw* mw = window_at(c, key);
  if (mw == nullptr || mw->key != key || !same_domain(mw->pd, qp.pd)) return nullptr;
  return mw->qp == nullptr || mw->qp == &qp ? mw : nullptr;
}

/// Whether the window may be bound to the region (IB specification volume 1, 10.6.7).
bool bindable(const OwnRegion& region, const Qp& qp, const SendWr& wr) noexcept {
  constexpr std::uint32_t kChanges = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  const std::uint64_t length = wr.bind_length;
  return wr.first.lkey != 0 && region.key == wr.first.lkey &&
         region.pd == static_cast<Pd*>(qp.pd)->id && (region.access & IBV_ACCESS_MW_BIND) != 0 &&
         ((wr.imm & kChanges) == 0 || (region.access & IBV_ACCESS_LOCAL_WRITE) != 0) &&
         length != 0 && wr.remote_address >= region.address && length <= region.length &&
         wr.remote_address - region.address <= region.length - length;
}

bool bind(Context& c, Qp& qp, const SendWr& wr) noexcept {
  Mw* mw = window_at(c, wr.rkey);
  if (mw == nullptr || !same_window(mw->key, wr.rkey) || !same_domain(mw->pd, qp.pd) ||
      mw->qp != nullptr)
    return false;
  const std::uint32_t region_at = region_index(wr.first.lkey);
  const OwnRegion& own = c.regions.own[region_at];
  if (!bindable(own, qp, wr)) return false;
  const RegionSlots::Slot& region = c.regions.slots[region_at];
  RegionSlots::Slot& slot = c.regions.slots[mw->index];
  open_region(c.regions.own[mw->index],
              {wr.rkey, wr.imm | (own.access & kMapped), wr.remote_address, wr.bind_length,
               window_scope(qp.qp_num)});
  slot.object = region.object;
  slot.object_offset = region.object_offset + (wr.remote_address - own.address);
  slot.object_generation = region.object_generation;
  publish_region(c, mw->index);
  mw->key = wr.rkey;
  mw->region = region_at;
  mw->qp = &qp;
  ++qp.windows;
  ++c.regions.slots[region_at].windows;
  return true;
}

}  // namespace

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) noexcept {
  if (type != IBV_MW_TYPE_2) return refuse_with(type == IBV_MW_TYPE_1 ? EOPNOTSUPP : EINVAL);
  return or_no_memory([&] { return make_window(context_of(pd->context), *static_cast<Pd*>(pd)); });
}

int dealloc_mw(ibv_mw* base) noexcept {
  Mw* mw = static_cast<Mw*>(base);
  Context& c = context_of(mw->context);
  // A forked child shares the segment with its parent, which still uses the key.
  if (c.pid != static_cast<std::uint32_t>(getpid())) return EPERM;
  if (mw->qp != nullptr) {
    if (!mw->invalidated) invalidate_key(c, *mw);
    if (!peer_finished(c, *mw)) return EBUSY;
    unbind(c, *mw);
  }
  RegionSlots::Slot& slot = c.regions.slots[mw->index];
  slot.window = nullptr;
  slot.generation |= kConsumerBits;
  release_slot(c.regions, mw->index);
  --static_cast<Pd*>(mw->pd)->users;
  --c.objects_open;
  delete mw;
  return 0;
}

int keep_bind(const Qp& qp, SendWr& kept, const ibv_send_wr& wr) noexcept {
  const ibv_mw* mw = wr.bind_mw.mw;
  const ibv_mw_bind_info& info = wr.bind_mw.bind_info;
  // Zero-based windows are not supported.
  if (mw == nullptr || mw->context != qp.context || !same_window(mw->rkey, wr.bind_mw.rkey) ||
      (info.mw_access_flags & ~(kWindowAccess | IBV_ACCESS_LOCAL_WRITE)) != 0)
    return EINVAL;
  kept.rkey = wr.bind_mw.rkey;
  kept.remote_address = info.addr;
  kept.bind_length = info.length;
  kept.imm = info.mw_access_flags & kWindowAccess;  // a window has no local key
  kept.first.lkey = info.mr == nullptr ? 0 : info.mr->lkey;
  return 0;
}

namespace {

/// Ends a bound window's key. False while the peer uses it.
bool try_unbind(Context& c, Mw& mw) noexcept {
  if (!mw.invalidated) invalidate_key(c, mw);
  if (!peer_finished(c, mw)) return false;
  unbind(c, mw);
  return true;
}

}  // namespace

bool run_local(Qp& qp, const SendWr& wr) noexcept {
  Context& c = context_of(qp.context);
  if (wr.opcode == IBV_WR_BIND_MW) {
    return bind(c, qp, wr) || (fail_oldest(qp, IBV_WC_MW_BIND_ERR), false);
  }
  Mw* mw = find_owned_window(c, qp, wr.imm);
  if (mw == nullptr) return fail_oldest(qp, IBV_WC_LOC_QP_OP_ERR), false;
  if (mw->qp == nullptr || try_unbind(c, *mw)) return true;
  return wait_until(qp, kAccessRetryDelay), false;
}

bool run_local_ahead(Qp& qp, const SendWr& wr) noexcept {
  Context& c = context_of(qp.context);
  if (wr.opcode == IBV_WR_BIND_MW) return bind(c, qp, wr);
  Mw* const mw = find_owned_window(c, qp, wr.imm);
  return mw != nullptr && (mw->qp == nullptr || try_unbind(c, *mw));
}

bool invalidate_for_peer(Qp& qp, std::uint32_t key) noexcept {
  Context& c = context_of(qp.context);
  Mw* mw = find_owned_window(c, qp, key);
  if (mw == nullptr) return false;
  if (mw->qp == nullptr) return true;
  set_key(c.regions.own[mw->index], 0);
  c.segment->regions[mw->index].key.store(0, std::memory_order_release);
  unbind(c, *mw);
  return true;
}

}  // namespace spinwire::softverbs
