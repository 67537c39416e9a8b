// Remote keys of memory windows: a window is bound and unbound by work requests of the peer's queue
// pair, so a key costs no system call. Hot.
#pragma once

#include <infiniband/verbs.h>

#include "memory/remote_key.h"

namespace spinwire::memory {

/// Binds a window to the target: fills in `request`, which the caller posts ahead of the key's
/// first use. A window must be free.
void bind_window(const KeySource& source, const KeyTarget& target, RemoteKey& key,
                 ibv_send_wr& request) noexcept;
/// Fills in the request that unbinds a window. The key is closed when it has completed.
void unbind_window(const RemoteKey& key, ibv_send_wr& request) noexcept;
/// The window's key is invalid at the device, or its binding was never posted: frees the window.
void on_window_unbound(const KeySource& source, RemoteKey& key) noexcept;

}  // namespace spinwire::memory
