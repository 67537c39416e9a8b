// Remote keys: each opens exactly some bytes of a block to a peer. A key is a memory window's
// (see window_requests.h) or a registration's, made and ended by control verbs.
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
  open,     ///< valid from the next work request on
  closing,  ///< dead, but an access may be under way
  closed,   ///< no peer can reach the bytes
};

struct RemoteKey {
  std::uint32_t rkey = 0;
  std::uint32_t window = WindowPool::kNone;  ///< kNone: the key is a registration's
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

/// Where an engine's keys come from. Windows open memory of the slab only.
struct KeySource {
  WindowPool& windows;
  RegistrationTable& registrations;
  ibv_mr* slab;

  [[nodiscard]] bool can_bind(const detail::Block& block) const noexcept {
    return windows.size() != 0 && block.lkey == slab->lkey;
  }
};

/// Opens the target by a registration of its own in `group`, with one control verb. Errors: those
/// of RegistrationTable::expose().
Status open_key(const KeySource& source, const KeyTarget& target, RegistrationTable::Group* group,
                RemoteKey& key) noexcept;
/// Closes a registration's key, or the key of a window whose queue pair takes no work requests any
/// more, with at most one control verb. While an access is under way, the key is `closing` and the
/// source keeps a reference to `block`; call again to ask about a registration's.
void close_key(const KeySource& source, RemoteKey& key, detail::Block* block) noexcept;

}  // namespace spinwire::memory
