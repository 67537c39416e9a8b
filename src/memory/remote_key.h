// Remote keys: each opens exactly some bytes of a block to a peer. A key belongs to a memory window
// (see window_requests.h) or to a registration, made and ended by control verbs.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "memory/registration_table.h"
#include "memory/window_pool.h"
#include "spinwire/buffer.h"
#include "spinwire/status.h"

namespace spinwire::memory {

enum class KeyState : std::uint8_t {
  none,     ///< never opened
  open,     ///< valid from the next work request
  closing,  ///< invalid, but an access may be in progress
  closed,   ///< no peer can access the bytes
};

struct RemoteKey {
  std::uint32_t rkey = 0;
  std::uint32_t window = WindowPool::kNone;  ///< kNone: the key belongs to a registration
  KeyState state = KeyState::none;

  [[nodiscard]] bool is_window() const noexcept { return window != WindowPool::kNone; }
};

/// The bytes that a key opens.
struct KeyTarget {
  detail::Block* block = nullptr;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  Access access = Access::local;
};

/// The source of an engine's keys. Windows open only memory of the slab.
struct KeySource {
  WindowPool& windows;
  RegistrationTable& registrations;
  ibv_mr* slab;

  [[nodiscard]] bool can_bind(const detail::Block& block) const noexcept {
    return windows.size() != 0 && block.lkey == slab->lkey;
  }
};

/// Opens the target by a new registration in `group`, with one control verb. Errors: those of
/// RegistrationTable::expose().
Result<void> open_key(const KeySource& source, const KeyTarget& target,
                      RegistrationTable::Group* group, RemoteKey& key) noexcept;
/// Closes the key of a registration, or of a window whose queue pair takes no more work requests,
/// with at most one control verb. While an access is in progress, the key is `closing` and the
/// source holds a reference to `block`. Call again for a registration's key.
void close_key(const KeySource& source, RemoteKey& key, detail::Block* block) noexcept;

}  // namespace spinwire::memory
