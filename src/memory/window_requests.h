// Remote keys of memory windows. Work requests on the peer's queue pair bind and unbind a window,
// so a key costs no system call. Hot.
#pragma once

#include <infiniband/verbs.h>

#include "memory/remote_key.h"

namespace spinwire::memory {

/// Binds a window to the target: fills in `request`, which the caller posts before the key's first
/// use. A window must be free.
void bind_window(const KeySource& source, const KeyTarget& target, RemoteKey& key,
                 ibv_send_wr& request) noexcept;
/// Fills in the request that unbinds a window. The key is closed when the request has completed.
void unbind_window(const RemoteKey& key, ibv_send_wr& request) noexcept;
/// Frees the window, after the device has invalidated its key or if its binding was never posted.
void on_window_unbound(const KeySource& source, RemoteKey& key) noexcept;

}  // namespace spinwire::memory
