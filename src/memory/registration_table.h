// Registrations: the application's own memory, and parts of blocks that are exposed to peers.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/index_pool.h"
#include "base/intrusive_list.h"
#include "base/key_map.h"
#include "spinwire/buffer.h"
#include "spinwire/device.h"
#include "spinwire/status.h"
#include "verbs/provider.h"

namespace spinwire::base {
class Auditor;
}

namespace spinwire::memory {

/// The application's own memory, registered until the last reference to `whole` is dropped.
struct RegisteredMemory {
  BufferSlice whole;
  RemoteRegion remote;  ///< for peers that use the memory; empty with Access::local
};

/// IBV_ACCESS_* for memory that the engine uses and peers may use with `access`.
[[nodiscard]] int own_access_flags(Access access) noexcept;
/// IBV_ACCESS_* for a key that only peers use with `access`.
[[nodiscard]] int exposed_access_flags(Access access) noexcept;

/// IBV_ACCESS_* for flags.
[[nodiscard]] int memory_access_flags(MemoryFlags flags) noexcept;
/// The flags to register memory with: `asked`, without the hint that the device has not. `exposed`:
/// the memory is opened to peers only. Errors: unsupported, with the flag;
/// invalid_argument (flags that do not exist; zero-based memory that is registered, or begins
/// within a page).
Result<MemoryFlags> check_memory_flags(MemoryFlags asked, const DeviceInfo& device,
                                       std::span<const std::byte> bytes, bool exposed);

/// The Error of a reg_mr that failed with `error` on `bytes`: no_memory with the limits on locked
/// memory, invalid_argument, limit or system. May throw std::bad_alloc.
[[nodiscard]] Error registration_error(std::string asked, std::uint64_t bytes, int error);

/// All registrations of an engine but its slab's, up to a fixed number. One thread. Set-up: each
/// call that registers or deregisters is a control verb. Close the table before the protection
/// domain; the memory that it returned may outlive both.
///
/// Deregistering can take time, because a peer may be accessing the memory. The key is invalid at
/// once, but the registration stays pending and holds the memory until poll_revocations() or
/// revoke() finds that the access has ended.
class RegistrationTable {
  struct Entry;
  static base::IntrusiveLinks<Entry>& links_of(Entry& entry) noexcept;
  using List = base::IntrusiveList<links_of>;  ///< oldest first

 public:
  /// Who may revoke an exposure: the application, the library itself, or an owner of another
  /// number.
  using Owner = std::uint64_t;
  static constexpr Owner kApplication = ~Owner{0};
  static constexpr Owner kLibrary = kApplication - 1;

  /// The registrations in another protection domain than the engine's. Empty it with end_next()
  /// before you destroy it.
  struct Group {
    ibv_pd* pd = nullptr;
    List live;
  };

  /// `limit` registrations at once, pending ones included. May throw std::bad_alloc.
  RegistrationTable(const verbs::Provider& provider, ibv_pd* pd, std::uint32_t limit);
  RegistrationTable(const RegistrationTable&) = delete;
  RegistrationTable& operator=(const RegistrationTable&) = delete;
  ~RegistrationTable() { close(); }

  /// Whether the block's memory is registered in this table.
  [[nodiscard]] bool owns(const detail::Block* block) const noexcept {
    return block->recycle == &RegistrationTable::recycle &&
           static_cast<const OwnMemory*>(block->owner)->table == this;
  }

  // The next two register in the engine's protection domain, or in that of a group.

  /// Registers `bytes`, which must stay mapped until `whole` and all its slices are destroyed.
  /// Errors: invalid_argument (no bytes; not mapped; not writable), no_memory, limit, no_device
  /// (closed), system.
  /// `flags` are of a device that has them; see check_memory_flags().
  Result<RegisteredMemory> register_memory(std::span<std::byte> bytes, Access access,
                                           Group* group = nullptr,
                                           MemoryFlags flags = MemoryFlags::none);

  /// Opens exactly the bytes of `slice` to peers under a new key, and holds a reference to their
  /// block until the key is revoked. Errors: those of register_memory(); invalid_argument also for
  /// Access::local and for an empty slice.
  Result<RemoteRegion> expose(const BufferSlice& slice, Access access, Group* group = nullptr,
                              Owner owner = kApplication, MemoryFlags flags = MemoryFlags::none);
  /// Exposes to the peer of one queue pair alone if the device can do that: see opens_to_one().
  /// Otherwise exposes to all peers of the queue pair's domain. Errors: those of expose().
  Result<RemoteRegion> expose_to(ibv_qp* qp, const BufferSlice& slice, Access access,
                                 Group* group = nullptr, Owner owner = kApplication);
  /// The same for memory of the device, which no block holds.
  Result<RemoteRegion> expose_of_device(ibv_qp* qp, std::span<std::byte> bytes, Access access,
                                        Group* group, Owner owner);
  [[nodiscard]] bool opens_to_one() const noexcept { return provider_.reg_mr_for_qp != nullptr; }

  /// Ends an exposure of this owner.
  ///   ok                no peer can access the memory any more; the reference is dropped
  ///   would_block       the key is invalid, but an access is in progress; call again
  ///   local_error       the device refused to deregister; the memory stays held; call again
  ///   invalid_argument  the owner has no such exposure
  /// After the first ok the table forgets the key; later calls return invalid_argument.
  Status revoke(std::uint32_t rkey, Owner owner = kApplication) noexcept;
  /// Makes revoke(rkey, owner) return ok once, for a key that was closed elsewhere, such as a
  /// window's, or that the library has revoked. Has no effect while all entries are in use.
  void remember_ended(std::uint32_t rkey, Owner owner) noexcept;
  /// Whether the access has ended that made revoke(rkey, kLibrary) return would_block; if it has,
  /// the table forgets the key. Makes no control verb: poll_revocations() does.
  bool has_ended(std::uint32_t rkey) noexcept;
  /// Whether a key of the group, or of the engine's domain, opens these bytes to peers with these
  /// rights: an exposure's, or that of registered memory. Accepts any region.
  [[nodiscard]] bool opens(const RemoteRegion& region, const Group* group) const noexcept;

  /// Ends the oldest registration of a group, with one control verb; false if there is none left.
  /// Registered memory that is still held becomes plain memory. A registration that cannot be
  /// deregistered at once is pending; an exposure's key can still be revoked.
  bool end_next(Group& group) noexcept;
  /// The group that a block's memory is registered in; null if there is none.
  [[nodiscard]] const Group* group_of(const detail::Block& block) const noexcept;

  /// Retries the oldest pending deregistration, if any: at most one control verb. Returns whether
  /// it succeeded. For the control step.
  bool poll_revocations() noexcept;

  /// Deregisters everything; the table makes no verb afterwards. Memory of register_memory() that
  /// is still held becomes plain memory: its control words stay valid until its references are
  /// dropped. A registration that the device refuses to release is abandoned, with a warning. A
  /// no-op when called again.
  void close() noexcept;

  /// Checks that entries, lists, keys and the held memory agree. Takes time in proportion to
  /// limit(). Errors: system, naming what does not hold.
  [[nodiscard]] Result<void> audit() const;

  [[nodiscard]] std::uint32_t size() const noexcept;  ///< registered or pending
  [[nodiscard]] std::uint32_t pending() const noexcept { return pending_count_; }
  [[nodiscard]] std::uint32_t limit() const noexcept { return entries_.capacity(); }

 private:
  static constexpr std::uint32_t kNone = base::KeyMap::kNone;

  enum class State : std::uint8_t {
    live,     ///< registered, until revoked or dropped
    pending,  ///< key invalid, an access in progress; until the device releases it
    ended,    ///< an exposure that ended; kept until revoke() reports it, or the slot is needed
  };

  /// Control words of the application's memory, on the heap instead of in front of the payload.
  struct OwnMemory {
    detail::Block block{};
    RegistrationTable* table = nullptr;  ///< null once closed
    std::uint32_t entry = kNone;
  };

  struct Entry {
    ibv_mr* mr = nullptr;
    detail::Block* held = nullptr;  ///< exposures: the block that the entry references, if any
    OwnMemory* own = nullptr;       ///< registered memory: its control words, while referenced
    Owner owner = kApplication;     ///< exposures: who may revoke it
    std::uint32_t rkey = 0;
    State state = State::live;
    Access access = Access::local;  ///< what peers may do
    bool exposure = false;
    bool of_device = false;             ///< an exposure of memory that no block holds
    bool zero_based = false;            ///< peers address its bytes from 0 on
    Group* group = nullptr;             ///< the group of a live entry
    base::IntrusiveLinks<Entry> links;  ///< in the list of its state or group
  };

  Result<RemoteRegion> expose_bytes(ibv_qp* qp, std::span<std::byte> bytes, detail::Block* held,
                                    Access access, Group* group, Owner owner,
                                    MemoryFlags flags = MemoryFlags::none);
  static void recycle(detail::Block* block) noexcept;
  void drop(std::uint32_t index) noexcept;
  Result<std::uint32_t> add(std::span<std::byte> bytes, int flags, std::string_view what,
                            Group* group, ibv_qp* qp = nullptr);
  void end(std::uint32_t index) noexcept;
  void add_key(std::uint32_t index) noexcept;
  void remove_from_group(std::uint32_t index) noexcept;
  void check_entry(base::Auditor& audit, std::uint32_t index) const;
  void check_list(base::Auditor& audit, const List& list, std::uint32_t size, State state) const;
  std::uint32_t acquire_entry() noexcept;
  int deregister(std::uint32_t index) noexcept;
  void forget(std::uint32_t index) noexcept;
  void list_ended(std::uint32_t index) noexcept;

  const verbs::Provider& provider_;
  ibv_pd* pd_;
  base::IndexPool<Entry> entries_;
  base::KeyMap keys_;  ///< exposures, and registered memory that is referenced, by rkey
  List pending_;
  List ended_;
  std::uint32_t pending_count_ = 0;
  std::uint32_t ended_count_ = 0;
};

inline base::IntrusiveLinks<RegistrationTable::Entry>& RegistrationTable::links_of(
    Entry& entry) noexcept {
  return entry.links;
}

}  // namespace spinwire::memory
