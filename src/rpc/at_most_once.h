// Runs the handler of a request at most once: the server's slot knows the number of its last call.
#pragma once

#include <cstdint>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Whether a request is ahead of its slot. The numbers of a slot grow by the window and may wrap
/// around.
[[gnu::always_inline]] inline bool is_new_request(const ServerSlot& slot,
                                                  std::uint32_t number) noexcept {
  return static_cast<std::int32_t>(number - slot.number) > 0;
}
/// Handles a request that has arrived before: sends its reply again if there is one, else drops the
/// request.
[[gnu::cold]] void on_duplicate_request(Rpc& r, ServerSession& s, const ServerSlot& v,
                                        std::uint32_t number) noexcept;
/// The client has finished all calls below this number: drops their replies. A late request of
/// these calls is then a duplicate.
void drop_replies_below(ServerSession& s, std::uint32_t below) noexcept;

}  // namespace spinwire::rpc
