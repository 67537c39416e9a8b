// Replies that a server keeps: a datagram's reply until the client certainly has it, and the reply
// of a long call until the connection takes it. Their memory can be taken back. Cold.
#pragma once

#include <cstdint>
#include <string_view>

#include "memory/arena.h"

namespace spinwire::rpc {

struct Rpc;
struct ServerSession;

/// Takes the memory of kept replies back when the send pool is exhausted: a client may keep its
/// slots unused, and not say which replies it has. Blocks for copies come first. Then the source
/// with the most kept replies loses those of up to 32 sessions that it has not used for longest.
class ReplyReclaimer final : public memory::Reclaimer {
 public:
  explicit ReplyReclaimer(Rpc& rpc) noexcept : rpc_(rpc) {}
  bool reclaim() noexcept override;

 private:
  Rpc& rpc_;
  std::uint64_t next_attempt_ = 0;  ///< tick; later than now after an attempt that found nothing
};

/// Why a call whose reply was dropped fails.
inline constexpr std::string_view kReplyDropped = "the server ran the call and dropped the reply";

/// Drops the replies of inline calls that a session keeps. Each becomes a short error in its slot:
/// a request that is sent again gets the error, and its handler does not run again. Replies that a
/// connection has yet to take stay: their clients do not ask again.
void drop_kept_inline_replies(Rpc& r, ServerSession& s) noexcept;

}  // namespace spinwire::rpc
