// A request runs its handler at most once: the server's slot knows the number of its last call.
#pragma once

#include "rpc/client_call.h"

namespace spinwire::rpc {

/// Whether a request is ahead of its slot: numbers of a slot grow by the window and may wrap
/// around.
[[gnu::always_inline]] inline bool is_new_request(const ServerSlot& slot,
                                                  std::uint32_t number) noexcept {
  return static_cast<std::int32_t>(number - slot.number) > 0;
}
/// A request that has arrived before: sends its reply again if there is one, else drops the
/// request.
[[gnu::cold]] void on_duplicate_request(Rpc& r, const ServerSession& s, const ServerSlot& v,
                                        std::uint32_t number) noexcept;
/// The client has finished all calls below this number: their replies are dropped, and a late
/// request of theirs is a duplicate.
void forget_calls_below(ServerSession& s, std::uint32_t below) noexcept;

}  // namespace spinwire::rpc
