#include "memory/remote_key.h"

#include "base/internals.h"

namespace spinwire::memory {

Result<void> open_key(const KeySource& source, const KeyTarget& target,
                      RegistrationTable::Group* group, RemoteKey& key) noexcept {
  return source.registrations
      .expose(detail::make<BufferSlice>(target.block, target.data, target.bytes), target.access,
              group, RegistrationTable::kLibrary)
      .map([&key](const RemoteRegion& region) {
        key = {region.rkey, WindowPool::kNone, KeyState::open};
      });
}

void close_key(const KeySource& source, RemoteKey& key, detail::Block* block) noexcept {
  bool ended = true;
  if (key.is_window()) {
    detail::retain(block);  // for the pool
    ended = source.windows.discard(key.window, block);
    key.window = WindowPool::kNone;
  } else if (key.state == KeyState::closing) {
    ended = source.registrations.has_ended(key.rkey);
  } else if (key.state == KeyState::open) {
    ended = source.registrations.revoke(key.rkey, RegistrationTable::kLibrary) == Status::ok;
  }
  key.state = ended ? KeyState::closed : KeyState::closing;
}

}  // namespace spinwire::memory
