#include "memory/registration_table.h"

#include <fmt/core.h>
#include <sched.h>

#include <cerrno>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/internals.h"
#include "base/log_message.h"
#include "base/memlock.h"
#include "base/units.h"

namespace spinwire::memory {
namespace {

/// Total attempts of close() at registrations with an access in progress: a peer that was stopped
/// during an access must not block this engine.
constexpr std::uint32_t kCloseAttempts = 2000;

bool is_access(Access access) noexcept {
  return static_cast<std::uint8_t>(access) <= static_cast<std::uint8_t>(Access::remote_all);
}

}  // namespace

int own_access_flags(Access access) noexcept {
  return IBV_ACCESS_LOCAL_WRITE | exposed_access_flags(access);
}

// Verbs require local write wherever a peer may write.
int exposed_access_flags(Access access) noexcept {
  int flags = 0;
  if (allows(access, Access::remote_read)) flags |= IBV_ACCESS_REMOTE_READ;
  if (allows(access, Access::remote_write))
    flags |= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if (allows(access, Access::remote_atomic))
    flags |= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  return flags;
}

Error registration_error(std::string asked, std::uint64_t bytes, int error) {
  switch (error) {
    case ENOMEM:
      return base::lock_error(std::move(asked), "reg_mr", error, bytes, base::LockUse::pin,
                              base::lock_limits());
    case EFAULT:
    case EINVAL:
      return base::make_error(Status::invalid_argument, std::move(asked),
                              base::format("reg_mr: {}", base::errno_text(error)),
                              "give bytes that are mapped for reading and writing, in memory that "
                              "the device can reach and no more than it registers at once");
    case ENOSPC:
    case EMFILE:
      return base::make_error(Status::limit, std::move(asked),
                              base::format("reg_mr: {}", base::errno_text(error)),
                              "register less often: the device has no more keys");
    default:
      return base::make_error(Status::system, std::move(asked),
                              base::format("reg_mr: {}", base::errno_text(error)),
                              "see whether the device is still there and may be used");
  }
}

RegistrationTable::RegistrationTable(const verbs::Provider& provider, ibv_pd* pd,
                                     std::uint32_t limit)
    : provider_(provider), pd_(pd), entries_(limit), keys_(limit) {}

Result<RegisteredMemory> RegistrationTable::register_memory(std::span<std::byte> bytes,
                                                            Access access, Group* group,
                                                            MemoryFlags flags) {
  return base::no_throw("register memory", [&]() -> Result<RegisteredMemory> {
    if (!is_access(access)) {
      return base::fail(Status::invalid_argument, "register memory", "unknown access rights",
                        "combine the named values of Access");
    }
    auto own = std::make_unique<OwnMemory>();
    const Result<std::uint32_t> index =
        add(bytes, own_access_flags(access) | memory_access_flags(flags), "register", group);
    if (!index) return tl::unexpected(index.error());
    Entry& entry = entries_.at(*index);
    entry.own = own.get();
    entry.access = access;
    add_key(*index);
    own->table = this;
    own->entry = *index;
    own->block.lkey = entry.mr->lkey;
    own->block.capacity = bytes.size();
    own->block.payload = bytes.data();
    own->block.recycle = &RegistrationTable::recycle;
    own->block.owner = own.get();
    RegisteredMemory memory;
    // From now on the references own the control words.
    memory.whole = detail::make<BufferSlice>(&own.release()->block, bytes.data(), bytes.size());
    if (access != Access::local) {
      memory.remote = {reinterpret_cast<std::uint64_t>(bytes.data()), bytes.size(), entry.rkey,
                       access};
    }
    return memory;
  });
}

Result<RemoteRegion> RegistrationTable::expose(const BufferSlice& slice, Access access,
                                               Group* group, Owner owner, MemoryFlags flags) {
  return expose_bytes(nullptr, slice.bytes(), detail::block_of(slice), access, group, owner, flags);
}

Result<RemoteRegion> RegistrationTable::expose_to(ibv_qp* qp, const BufferSlice& slice,
                                                  Access access, Group* group, Owner owner) {
  return expose_bytes(qp, slice.bytes(), detail::block_of(slice), access, group, owner);
}

Result<RemoteRegion> RegistrationTable::expose_of_device(ibv_qp* qp, std::span<std::byte> bytes,
                                                         Access access, Group* group, Owner owner) {
  return expose_bytes(qp, bytes, nullptr, access, group, owner);
}

Result<RemoteRegion> RegistrationTable::expose_bytes(ibv_qp* qp, std::span<std::byte> bytes,
                                                     detail::Block* held, Access access,
                                                     Group* group, Owner owner, MemoryFlags flags) {
  return base::no_throw("expose memory", [&]() -> Result<RemoteRegion> {
    if (!is_access(access) || access == Access::local) {
      return base::fail(Status::invalid_argument, "expose memory", "no remote access rights",
                        "give Access::remote_read, remote_write, remote_atomic or several");
    }
    const Result<std::uint32_t> index =
        add(bytes, exposed_access_flags(access) | memory_access_flags(flags), "expose", group, qp);
    if (!index) return tl::unexpected(index.error());
    Entry& entry = entries_.at(*index);
    entry.exposure = true;
    entry.access = access;
    entry.owner = owner;
    entry.held = held;
    entry.of_device = held == nullptr;
    if (held != nullptr) detail::retain(held);
    entry.zero_based = contains(flags, MemoryFlags::zero_based);
    add_key(*index);
    return RemoteRegion{entry.zero_based ? 0 : reinterpret_cast<std::uint64_t>(bytes.data()),
                        bytes.size(), entry.rkey, access};
  });
}

/// Registers with the device, for one queue pair if there is one. Returns the entry's index.
Result<std::uint32_t> RegistrationTable::add(std::span<std::byte> bytes, int flags,
                                             std::string_view what, Group* group, ibv_qp* qp) {
  std::string asked = base::format("{} {} of memory", what, base::bytes_text(bytes.size()));
  if (bytes.empty() || bytes.data() == nullptr) {
    return base::fail(Status::invalid_argument, std::move(asked), "there are no bytes",
                      "give at least one byte");
  }
  if (pd_ == nullptr) {
    return base::fail(Status::no_device, std::move(asked), "the engine is closed",
                      "use memory with an open engine");
  }
  const std::uint32_t index = acquire_entry();
  if (index == kNone) {
    return base::fail(Status::limit, std::move(asked),
                      base::format("all {} registrations are in use, {} of them being revoked",
                                   limit(), pending()),
                      "revoke or drop some first, or register larger ranges");
  }
  errno = 0;
  ibv_pd* const pd = group != nullptr ? group->pd : pd_;
  ibv_mr* mr = qp != nullptr && opens_to_one()
                   ? provider_.reg_mr_for_qp(qp, bytes.data(), bytes.size(), flags)
                   : provider_.reg_mr(pd, bytes.data(), bytes.size(), flags);
  if (mr == nullptr) {
    const int error = errno;
    entries_.release(index);
    return tl::unexpected(registration_error(std::move(asked), bytes.size(), error));
  }
  entries_.at(index) = Entry{};
  entries_.at(index).mr = mr;
  entries_.at(index).rkey = mr->rkey;
  entries_.at(index).group = group;
  if (group != nullptr) group->live.push_back(entries_.at(index));
  return index;
}

/// Makes the entry known by its key.
void RegistrationTable::add_key(std::uint32_t index) noexcept {
  const std::uint32_t rkey = entries_.at(index).rkey;
  // The device may reuse a key as soon as the key is free.
  if (const std::uint32_t old = keys_.find(rkey);
      old != kNone && entries_.at(old).state == State::ended)
    forget(old);
  keys_.insert(rkey, index);
}

/// Takes a free entry, or else the entry of the exposure that ended longest ago.
std::uint32_t RegistrationTable::acquire_entry() noexcept {
  if (entries_.full() && !ended_.empty()) forget(entries_.index_of(*ended_.front()));
  return entries_.acquire();
}

Status RegistrationTable::revoke(std::uint32_t rkey, Owner owner) noexcept {
  const std::uint32_t index = keys_.find(rkey);
  if (index == kNone || !entries_.at(index).exposure || entries_.at(index).owner != owner)
    return Status::invalid_argument;
  if (entries_.at(index).state != State::ended) {
    const int error = deregister(index);
    if (error != 0) return error == EBUSY ? Status::would_block : Status::local_error;
    detail::Block* held = std::exchange(entries_.at(index).held, nullptr);
    forget(index);
    // Last: this may drop registered memory of this table.
    if (held != nullptr) detail::release(held);
    return Status::ok;
  }
  forget(index);
  return Status::ok;
}

void RegistrationTable::remember_ended(std::uint32_t rkey, Owner owner) noexcept {
  if (const std::uint32_t found = keys_.find(rkey); found != kNone) {
    // A live entry is another use of the key: the device reuses keys.
    if (Entry& known = entries_.at(found); known.state != State::live) known.owner = owner;
    return;
  }
  const std::uint32_t index = acquire_entry();
  if (index == kNone) return;
  Entry& entry = entries_.at(index) = Entry{};
  entry.owner = owner;
  entry.rkey = rkey;
  entry.exposure = true;
  keys_.insert(rkey, index);
  list_ended(index);
}

bool RegistrationTable::has_ended(std::uint32_t rkey) noexcept {
  const std::uint32_t found = keys_.find(rkey);
  // A live entry, or another owner's, is another use of the key: the device reuses keys.
  if (found == kNone || entries_.at(found).owner != kLibrary) return true;
  const State state = entries_.at(found).state;
  if (state == State::ended) forget(found);
  return state != State::pending;
}

bool RegistrationTable::opens(const RemoteRegion& region, const Group* group) const noexcept {
  const std::uint32_t found = keys_.find(region.rkey);
  if (found == kNone || entries_.at(found).state != State::live) return false;
  const Entry& entry = entries_.at(found);
  if (entry.group != group || region.access == Access::local ||
      !allows(entry.access, region.access))
    return false;
  // A peer's key can have the same number: the bytes decide.
  const std::uint64_t begin =
      entry.zero_based ? 0 : reinterpret_cast<std::uint64_t>(entry.mr->addr);
  const std::uint64_t offset = region.address - begin;
  return offset <= entry.mr->length && region.length <= entry.mr->length - offset;
}

bool RegistrationTable::end_next(Group& group) noexcept {
  if (group.live.empty()) return false;
  Entry& entry = *group.live.front();
  const std::uint32_t index = entries_.index_of(entry);
  if (entry.own != nullptr) {
    keys_.erase(index);
    entry.own->block.lkey = 0;
    std::exchange(entry.own, nullptr)->table = nullptr;
  }
  if (deregister(index) == 0) end(index);
  return true;
}

const RegistrationTable::Group* RegistrationTable::group_of(
    const detail::Block& block) const noexcept {
  if (block.recycle != &RegistrationTable::recycle) return nullptr;
  const auto* own = static_cast<const OwnMemory*>(block.owner);
  return own->table == this ? entries_.at(own->entry).group : nullptr;
}

bool RegistrationTable::poll_revocations() noexcept {
  if (pending_.empty()) return false;
  Entry& entry = *pending_.front();
  const std::uint32_t index = entries_.index_of(entry);
  if (deregister(index) != 0) {
    pending_.erase(entry);
    pending_.push_back(entry);
    return false;
  }
  end(index);
  return true;
}

/// Ends an entry after the device has deregistered it. An exposure's key stays known for revoke().
void RegistrationTable::end(std::uint32_t index) noexcept {
  Entry& entry = entries_.at(index);
  if (!entry.exposure) return entries_.release(index);
  list_ended(index);
  if (detail::Block* const held = std::exchange(entry.held, nullptr); held != nullptr)
    detail::release(held);
}

void RegistrationTable::close() noexcept {
  if (pd_ == nullptr) return;
  pd_ = nullptr;
  std::uint32_t attempts = kCloseAttempts;
  std::uint32_t refused = 0;
  for (std::uint32_t i = 0; i < entries_.capacity(); ++i) {
    if (!entries_.in_use(i)) continue;
    Entry& entry = entries_.at(i);
    if (entry.own != nullptr) std::exchange(entry.own, nullptr)->table = nullptr;
    if (entry.mr == nullptr) continue;
    int error = provider_.dereg_mr(entry.mr);
    while (error == EBUSY && attempts != 0) {
      --attempts;
      sched_yield();  // the peer may need the core to end its access
      error = provider_.dereg_mr(entry.mr);
    }
    if (error != 0) ++refused;
    entry.mr = nullptr;
  }
  if (refused != 0) {
    base::log(LogLevel::warning, "the device did not give up {} registrations on closing", refused);
  }
  // Released after all deregistrations: an exposure may hold the last reference to registered
  // memory.
  for (std::uint32_t i = 0; i < entries_.capacity(); ++i) {
    if (!entries_.in_use(i)) continue;
    detail::Block* held = std::exchange(entries_.at(i).held, nullptr);
    entries_.release(i);
    if (held != nullptr) detail::release(held);
  }
  keys_.clear();
  pending_ = ended_ = List{};
  pending_count_ = ended_count_ = 0;
}

std::uint32_t RegistrationTable::size() const noexcept { return entries_.size() - ended_count_; }

void RegistrationTable::recycle(detail::Block* block) noexcept {
  auto* own = static_cast<OwnMemory*>(block->owner);
  SPINWIRE_CHECK(&own->block == block, "registered memory is given back once");
  if (own->table != nullptr) own->table->drop(own->entry);
  delete own;
}

/// Deregisters memory after its last reference was dropped.
void RegistrationTable::drop(std::uint32_t index) noexcept {
  keys_.erase(index);
  entries_.at(index).own = nullptr;
  if (deregister(index) == 0) entries_.release(index);
}

/// Returns dereg_mr's errno value. If the device does not release a live registration, it is
/// pending.
int RegistrationTable::deregister(std::uint32_t index) noexcept {
  Entry& entry = entries_.at(index);
  const int error = provider_.dereg_mr(entry.mr);
  remove_from_group(index);
  if (error == 0) {
    entry.mr = nullptr;
    if (entry.state == State::pending) {
      pending_.erase(entry);
      --pending_count_;
    }
  } else if (entry.state == State::live) {
    entry.state = State::pending;
    pending_.push_back(entry);
    ++pending_count_;
    if (error != EBUSY) {
      base::log(LogLevel::warning, "the device refused to deregister memory, errno {}", error);
    }
  }
  return error;
}

/// Removes the entry from its group's list.
void RegistrationTable::remove_from_group(std::uint32_t index) noexcept {
  Entry& entry = entries_.at(index);
  if (Group* const group = std::exchange(entry.group, nullptr); group != nullptr)
    group->live.erase(entry);
}

/// Keeps an exposure's entry until revoke() reports its end.
void RegistrationTable::list_ended(std::uint32_t index) noexcept {
  entries_.at(index).state = State::ended;
  ended_.push_back(entries_.at(index));
  ++ended_count_;
}

/// Frees the entry of an exposure that the device has released.
void RegistrationTable::forget(std::uint32_t index) noexcept {
  if (Entry& entry = entries_.at(index); entry.state == State::ended) {
    ended_.erase(entry);
    --ended_count_;
  }
  keys_.erase(index);
  entries_.release(index);
}

}  // namespace spinwire::memory
