#include "softverbs/memory/memory_region.h"

#include <errno.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/mapped_memory.h"
#include "base/shared_memory.h"
#include "softverbs/memory/access_tracking.h"
#include "softverbs/refusal.h"

namespace spinwire::softverbs {
std::uint32_t acquire_slot(RegionSlots& regions) {
  constexpr std::uint32_t kRest = 1024;  // released entries to collect before one is used again
  const bool fresh = regions.slots.size() < kMaxRegions;
  if (regions.free == 0 || (fresh && regions.free < kRest)) {
    if (!fresh) return 0;
    regions.slots.emplace_back();
    return static_cast<std::uint32_t>(regions.slots.size() - 1);
  }
  const std::uint32_t index = regions.first_free;
  regions.first_free = regions.slots[index].next;
  --regions.free;
  return index;
}

void release_slot(RegionSlots& regions, std::uint32_t index) noexcept {
  regions.slots[index].next = 0;
  (regions.free == 0 ? regions.first_free : regions.slots[regions.last_free].next) = index;
  regions.last_free = index;
  ++regions.free;
}

bool allows_and_remember(const Context& c, const Pd& pd, KnownRegion& known, const ibv_sge& sge,
                         std::uint32_t access) noexcept {
  const OwnRegion* const region = find_allowing(c, pd.id, sge, access);
  if (region == nullptr) return false;
  known = {sge.lkey, c.region_epoch, region->address, region->length};
  return true;
}

void publish_region(Context& c, std::uint32_t index) noexcept {
  const RegionSlots::Slot& slot = c.regions.slots[index];
  const OwnRegion& own = c.regions.own[index];
  RegionEntry& entry = c.segment->regions[index];
  entry.access = own.access & ~kMapped;
  entry.address = own.address;
  entry.length = own.length;
  entry.pd = own.pd;
  entry.object = slot.object;
  entry.object_offset = slot.object_offset;
  entry.object_generation = slot.object_generation;
  entry.key.store(own.key, std::memory_order_release);
}

namespace {

constexpr int kRegionAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                              IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
                              IBV_ACCESS_MW_BIND | IBV_ACCESS_RELAXED_ORDERING;

/// Takes the object table's entry for a shared mapping of this process. kNoObject if the table is
/// full: peers then reach the region through the kernel.
std::uint32_t acquire_object(Context& c, const base::SharedMemoryRef& ref) {
  struct stat st {};
  struct statfs system {};
  if (fstat(ref.fd, &st) != 0 || fstatfs(ref.fd, &system) != 0) return kNoObject;
  if (system.f_type == HUGETLBFS_MAGIC) c.shares_hugepages = true;
  std::uint32_t free = kNoObject;
  for (std::uint32_t i = 0; i < c.object_users.size(); ++i) {
    const ObjectEntry& o = c.segment->objects[i];
    if (c.object_users[i] == 0) {
      free = std::min(free, i);
    } else if (o.fd == ref.fd && o.inode == st.st_ino) {
      ++c.object_users[i];
      return i;
    }
  }
  if (free == kNoObject) {
    if (c.object_users.size() == kMaxObjects) return kNoObject;
    free = static_cast<std::uint32_t>(c.object_users.size());
    c.object_users.push_back(0);
  }
  ObjectEntry& o = c.segment->objects[free];
  o.fd = ref.fd;
  o.size = ref.size;
  o.inode = st.st_ino;
  const std::uint32_t generation = o.generation.load(std::memory_order_relaxed) + 1;
  o.generation.store(generation == 0 ? 1 : generation, std::memory_order_release);
  c.object_users[free] = 1;
  return free;
}

/// Reserves room for one more object, so that acquire_object() never allocates.
void reserve_object(Context& c) {
  c.object_users.reserve(std::min<std::size_t>(c.object_users.size() + 1, kMaxObjects));
}

/// The place of an address in the segment; its size or more: it is elsewhere.
std::uint64_t offset_in_segment(const Context& c, const void* address) noexcept {
  return reinterpret_cast<std::uint64_t>(address) - reinterpret_cast<std::uint64_t>(c.segment);
}

bool lies_in_segment(const Context& c, const void* address, std::size_t length) noexcept {
  const std::uint64_t offset = offset_in_segment(c, address);
  return offset < sizeof(Segment) && length <= sizeof(Segment) - offset;
}

/// The entry of a queue pair whose word the registration opens to its peer.
QueuePairEntry* entry_of_word(const Context& c, const void* address,
                              std::uint64_t length) noexcept {
  const std::uint64_t offset = offset_in_segment(c, address);
  const std::uint64_t in_table = offset - offsetof(Segment, queue_pairs);
  const bool is_word = in_table < sizeof c.segment->queue_pairs && length == sizeof length &&
                       in_table % sizeof(QueuePairEntry) == offsetof(QueuePairEntry, word);
  return is_word ? &c.segment->queue_pairs[in_table / sizeof(QueuePairEntry)] : nullptr;
}

/// Opens these bytes under the key, within a domain or a window_scope.
void set_region(Context& c, std::uint32_t key, std::uint64_t scope, void* address,
                std::size_t length, int access) noexcept {
  const std::uint32_t index = region_index(key);
  RegionSlots::Slot& slot = c.regions.slots[index];
  std::uint32_t mapped = 0;
  slot.object = kNoObject;
  if (lies_in_segment(c, address, length)) {
    slot.object = kSegmentObject;
    slot.object_offset = offset_in_segment(c, address);
    mapped = kMapped;
  } else if (auto shared = base::find_shared_memory(address, length)) {
    slot.object = acquire_object(c, *shared);
    if (slot.object != kNoObject) {
      slot.object_offset = shared->offset;
      slot.object_generation =
          c.segment->objects[slot.object].generation.load(std::memory_order_relaxed);
      mapped = kMapped;
    }
  }
  open_region(c.regions.own[index], {key, static_cast<std::uint32_t>(access) | mapped,
                                     reinterpret_cast<std::uint64_t>(address), length, scope});
  publish_region(c, index);
}

ibv_mr* register_region(Context& c, Pd& pd, std::uint64_t scope, void* address, std::size_t length,
                        int access) {
  auto mr = std::make_unique<Mr>();
  reserve_object(c);
  const std::uint32_t index = acquire_slot(c.regions);
  if (index == 0) return refuse_with(ENOMEM);
  RegionSlots::Slot& slot = c.regions.slots[index];
  slot.generation = (slot.generation + 1) & kGenerationMask;
  const std::uint32_t key = region_key(index, slot.generation);
  set_region(c, key, scope, address, length, access);

  mr->context = &c.verbs;
  mr->pd = &pd;
  mr->addr = address;
  mr->length = length;
  mr->handle = index;
  mr->lkey = mr->rkey = key;
  mr->index = index;
  ++pd.users;
  ++c.objects_open;
  return mr.release();
}

/// Whether a registration is valid. As libibverbs documents, remote write and atomics require local
/// write.
bool valid(const void* address, std::size_t length, int access) noexcept {
  const bool remote_change = (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
  const auto begin = reinterpret_cast<std::uint64_t>(address);
  return (access & ~kRegionAccess) == 0 && length != 0 && begin != 0 && begin + length >= begin &&
         (!remote_change || (access & IBV_ACCESS_LOCAL_WRITE) != 0);
}

/// Whether the process can access the bytes so. An adapter pins them, and refuses what is not
/// mapped or must not be written; here the first access would end the process.
bool is_accessible(const Context& c, const void* address, std::size_t length, int access) noexcept {
  if (lies_in_segment(c, address, length)) return true;
  if (base::find_shared_memory(address, length)) return true;
  return base::is_mapped(address, length,
                         (access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND)) != 0);
}

ibv_mr* register_within(Pd& pd, std::uint64_t scope, void* address, std::size_t length,
                        int access) noexcept {
  if (!valid(address, length, access)) return refuse_with(EINVAL);
  if (!is_accessible(context_of(pd.context), address, length, access)) return refuse_with(EFAULT);
  return or_no_memory(
      [&] { return register_region(context_of(pd.context), pd, scope, address, length, access); });
}

}  // namespace

ibv_mr* reg_mr(ibv_pd* base, void* address, std::size_t length, int access) noexcept {
  Pd& pd = *static_cast<Pd*>(base);
  return register_within(pd, pd.id, address, length, access);
}

ibv_mr* reg_mr_for_qp(ibv_qp* qp, void* address, std::size_t length, int access) noexcept {
  ibv_mr* const mr =
      register_within(*static_cast<Pd*>(qp->pd), window_scope(qp->qp_num), address, length, access);
  QueuePairEntry* const entry = static_cast<Qp*>(qp)->entry;
  if (mr != nullptr && (access & IBV_ACCESS_REMOTE_WRITE) != 0 &&
      entry_of_word(context_of(qp->context), address, length) == entry)
    entry->word_key.store(mr->rkey, std::memory_order_release);
  return mr;
}

namespace {

/// Invalidates the key and releases the object. EBUSY: see dereg_mr().
int close_region(Context& c, Mr* mr) noexcept {
  // A forked child shares the segment with its parent, which still uses the key.
  if (c.pid != static_cast<std::uint32_t>(getpid())) return EPERM;
  RegionSlots::Slot& slot = c.regions.slots[mr->index];
  if (slot.windows != 0) return EBUSY;
  if (!mr->dead) {
    set_key(c.regions.own[mr->index], 0);
    c.segment->regions[mr->index].key.store(0, std::memory_order_release);
    if (QueuePairEntry* const entry = entry_of_word(c, mr->addr, mr->length);
        entry != nullptr && entry->word_key.load(std::memory_order_relaxed) == mr->rkey)
      entry->word_key.store(0, std::memory_order_release);
    ++c.region_epoch;
    if (!fence_peers(c)) return EBUSY;
    // From now on peers that were not busy see the invalid key.
    try {
      record_accesses(c, *mr);
    } catch (const std::bad_alloc&) {
      mr->pending_accesses.clear();
      return EBUSY;
    }
    mr->dead = true;
  }
  if (!accesses_ended(c, *mr)) return EBUSY;
  if (slot.object < kMaxObjects && --c.object_users[slot.object] == 0) {
    ObjectEntry& object = c.segment->objects[slot.object];
    object.fd = -1;
    object.size = 0;
  }
  slot.object = kNoObject;
  return 0;
}

}  // namespace

int dereg_mr(ibv_mr* base) noexcept {
  Mr* mr = static_cast<Mr*>(base);
  Context& c = context_of(mr->context);
  if (const int error = close_region(c, mr); error != 0) return error;
  release_slot(c.regions, mr->index);
  --static_cast<Pd*>(mr->pd)->users;
  --c.objects_open;
  delete mr;
  return 0;
}

int rereg_mr(ibv_mr* base, int flags, ibv_pd* pd, void* address, std::size_t length,
             int access) noexcept {
  constexpr int kKnown =
      IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
  Mr* mr = static_cast<Mr*>(base);
  Context& c = context_of(mr->context);
  if (flags == 0 || (flags & ~kKnown) != 0) return EINVAL;
  const bool moves = (flags & IBV_REREG_MR_CHANGE_TRANSLATION) != 0;
  if (!moves) address = mr->addr;
  if (!moves) length = mr->length;
  if ((flags & IBV_REREG_MR_CHANGE_PD) == 0) pd = mr->pd;
  if ((flags & IBV_REREG_MR_CHANGE_ACCESS) == 0)
    access = static_cast<int>(c.regions.own[mr->index].access & ~kMapped);
  if (pd == nullptr || pd->context != mr->context) return EINVAL;
  const std::uint64_t scope = pd == mr->pd ? c.regions.own[mr->index].pd : static_cast<Pd*>(pd)->id;
  if (!valid(address, length, access)) return EINVAL;
  if (!is_accessible(c, address, length, access)) return EFAULT;
  try {
    reserve_object(c);
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
  if (const int error = close_region(c, mr); error != 0) return error;
  // Under the same key: programs told it to their peers, and adapters keep it.
  set_region(c, mr->lkey, scope, address, length, access);
  --static_cast<Pd*>(mr->pd)->users;
  ++static_cast<Pd*>(pd)->users;
  mr->pd = pd;
  mr->addr = address;
  mr->length = length;
  mr->dead = false;
  return 0;
}

}  // namespace spinwire::softverbs
