#include "memory/window_requests.h"

namespace spinwire::memory {

void bind_window(const KeySource& source, const KeyTarget& target, RemoteKey& key,
                 ibv_send_wr& request) noexcept {
  key.window = source.windows.take();
  key.rkey = source.windows.next_key(key.window);
  key.state = KeyState::open;
  const int rights = exposed_access_flags(target.access) & ~IBV_ACCESS_LOCAL_WRITE;
  request.opcode = IBV_WR_BIND_MW;
  request.bind_mw.mw = source.windows.at(key.window);
  request.bind_mw.rkey = key.rkey;
  request.bind_mw.bind_info = {source.slab, reinterpret_cast<std::uint64_t>(target.data),
                               target.bytes, static_cast<unsigned>(rights)};
}

void unbind_window(const RemoteKey& key, ibv_send_wr& request) noexcept {
  request.opcode = IBV_WR_LOCAL_INV;
  request.invalidate_rkey = key.rkey;
}

void on_window_unbound(const KeySource& source, RemoteKey& key) noexcept {
  source.windows.give(key.window);
  key.window = WindowPool::kNone;
  key.state = KeyState::closed;
}

}  // namespace spinwire::memory
