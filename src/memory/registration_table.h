// Registrations: the application's own memory, and parts of blocks that are exposed to peers.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/index_pool.h"
#include "spinwire/buffer.h"
#include "spinwire/status.h"
#include "verbs/provider.h"

namespace spinwire::memory {

/// Memory of the application's own, registered. It is deregistered when the last reference to
/// `whole` goes.
struct RegisteredMemory {
  BufferSlice whole;
  RemoteRegion remote;  ///< what a peer needs to use it; empty with Access::local
};

/// IBV_ACCESS_* for memory that we use and peers may use with `access`.
[[nodiscard]] int own_access_flags(Access access) noexcept;
/// IBV_ACCESS_* for a key that only peers use with `access`.
[[nodiscard]] int exposed_access_flags(Access access) noexcept;

/// Why reg_mr failed with `error` on `bytes`: no_memory with the limits on locked memory,
/// invalid_argument, limit or system. May throw std::bad_alloc.
[[nodiscard]] Error registration_error(std::string asked, std::uint64_t bytes, int error);

/// All registrations of an engine but its slab's, up to a fixed number. One thread. Set-up: each
/// call that registers or deregisters is a control verb. The table must be closed before the
/// protection domain; the memory that it returned may outlive both.
///
/// Deregistering can take time, because a peer may be in the midst of an access: the key is dead at
/// once, but the registration stays pending, and holds on to the memory, until poll_revocations()
/// or revoke() finds the access ended.
class RegistrationTable {
  static constexpr std::uint32_t kNone = 0xffff'ffff;

  /// Oldest first.
  struct List {
    std::uint32_t head = kNone;
    std::uint32_t tail = kNone;
    std::uint32_t size = 0;
  };

 public:
  /// What is registered in a protection domain other than the engine's. To be emptied by end_next()
  /// before it goes.
  struct Group {
    ibv_pd* pd = nullptr;
    List live;
  };

  /// May throw std::bad_alloc. `limit` registrations at once, pending ones included.
  RegistrationTable(const verbs::Provider& provider, ibv_pd* pd, std::uint32_t limit);
  RegistrationTable(const RegistrationTable&) = delete;
  RegistrationTable& operator=(const RegistrationTable&) = delete;
  ~RegistrationTable() { close(); }

  /// Whether the block is of memory registered here.
  [[nodiscard]] bool owns(const detail::Block* block) const noexcept {
    return block->recycle == &RegistrationTable::recycle &&
           static_cast<const OwnMemory*>(block->owner)->table == this;
  }

  // Both in the engine's protection domain, or in that of a group.

  /// Registers `bytes`, which must stay mapped until `whole` and all slices of it are gone. Errors:
  /// invalid_argument (no bytes; not mapped; not writable), no_memory, limit, no_device (closed),
  /// system.
  Result<RegisteredMemory> register_memory(std::span<std::byte> bytes, Access access,
                                           Group* group = nullptr);

  /// Opens exactly the bytes of `slice` to peers under a key of its own and holds a reference to
  /// their block until the key is revoked. Errors: as above; invalid_argument also for
  /// Access::local and for an empty slice.
  Result<RemoteRegion> expose(const BufferSlice& slice, Access access, Group* group = nullptr);

  /// Ends an exposure.
  ///   ok                no peer can reach the memory any more; the reference is given up
  ///   would_block       the key is dead, but an access is under way; call again
  ///   local_error       the device refused to deregister, the memory stays held; call again
  ///   invalid_argument  no such exposure
  /// The call that first answers ok ends the key's life here; later ones answer invalid_argument.
  Status revoke(std::uint32_t rkey) noexcept;
  /// Makes revoke(rkey) answer ok once: for a key, such as a window's, that was closed elsewhere.
  /// Has no effect while all entries are in use.
  void remember_ended(std::uint32_t rkey) noexcept;
  /// Whether the access is over that revoke() answered would_block for; once it is, the key's life
  /// here ends. Takes no control verb: poll_revocations() does.
  bool has_ended(std::uint32_t rkey) noexcept;

  /// Ends the oldest registration of a group, with one control verb; false if there is none left.
  /// Registered memory that is still held becomes plain memory. What cannot be deregistered at once
  /// is pending; an exposure's key can be revoked still.
  bool end_next(Group& group) noexcept;
  /// The group that a block's memory is registered in; null if in none.
  [[nodiscard]] const Group* group_of(const detail::Block& block) const noexcept;

  /// Retries the deregistration that has been pending longest, if any: at most one control verb.
  /// Returns whether it ended. For the control step.
  bool poll_revocations() noexcept;

  /// Deregisters everything. Memory registered by register_memory() that is still held becomes
  /// plain memory: its control words stay valid until its references go. No verb follows. A
  /// registration that the device refuses to give up is left to it, with a warning. A no-op when
  /// called again.
  void close() noexcept;

  /// Checks that entries, lists, keys and the memory that they hold agree. Takes time in proportion
  /// to limit(). Errors: system, naming what does not hold.
  [[nodiscard]] Result<void> audit() const;

  [[nodiscard]] std::uint32_t size() const noexcept;  ///< registered or pending
  [[nodiscard]] std::uint32_t pending() const noexcept { return pending_.size; }
  [[nodiscard]] std::uint32_t limit() const noexcept { return entries_.capacity(); }

 private:
  enum class State : std::uint8_t {
    live,     ///< until revoked or dropped
    pending,  ///< key dead, an access under way; until the device gives it up
    ended,    ///< an exposure given up by poll_revocations(); until revoke() asks, or the slot is
              ///< needed
  };

  /// Heap-allocated stand-in for a block in front of the application's bytes.
  struct OwnMemory {
    detail::Block block{};
    RegistrationTable* table = nullptr;  ///< null once closed
    std::uint32_t entry = kNone;
  };

  struct Entry {
    ibv_mr* mr = nullptr;
    detail::Block* held = nullptr;  ///< exposures: the block whose reference we hold
    OwnMemory* own = nullptr;       ///< registered memory: its control words, while held
    std::uint32_t rkey = 0;
    State state = State::live;
    bool exposure = false;
    Group* group = nullptr;       ///< that it is live in
    std::uint32_t chain = kNone;  ///< next exposure with the same hash
    std::uint32_t next = kNone;   ///< in the list of its state
    std::uint32_t prev = kNone;
  };

  static void recycle(detail::Block* block) noexcept;
  void drop(std::uint32_t index) noexcept;
  Result<std::uint32_t> add(std::span<std::byte> bytes, int flags, std::string_view what,
                            Group* group);
  void end(std::uint32_t index) noexcept;
  void leave_group(std::uint32_t index) noexcept;
  [[nodiscard]] std::string find_fault() const;
  [[nodiscard]] std::string fault_of(std::uint32_t index) const;
  [[nodiscard]] std::string fault_of(const List& list, State state) const;
  std::uint32_t acquire_entry() noexcept;
  int deregister(std::uint32_t index) noexcept;
  void forget(std::uint32_t index) noexcept;
  [[nodiscard]] std::uint32_t* find(std::uint32_t rkey) noexcept;
  [[nodiscard]] std::uint32_t& bucket(std::uint32_t rkey) noexcept;
  [[nodiscard]] std::size_t bucket_of(std::uint32_t rkey) const noexcept;
  void push(List& list, std::uint32_t index) noexcept;
  void remove(List& list, std::uint32_t index) noexcept;

  const verbs::Provider& provider_;
  ibv_pd* pd_;
  base::IndexPool<Entry> entries_;
  std::vector<std::uint32_t> buckets_;  ///< exposures by rkey
  List pending_;
  List ended_;
};

}  // namespace spinwire::memory
