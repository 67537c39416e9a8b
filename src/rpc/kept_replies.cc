#include "rpc/kept_replies.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "rpc/rpc_state.h"
#include "rpc/session_goodbye.h"
#include "rpc/slots.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {
namespace {

static_assert(kReplyDropped.size() <= kSlotPayloadBytes);

bool has_buffer(const std::unique_ptr<ReplyBuffer[]>& buffers, std::uint32_t slot) noexcept {
  return buffers != nullptr && buffers[slot].block != nullptr;
}

// The next two visit the slots whose calls are answered and hold memory. The slot of a running
// handler keeps its reply buffer.

/// Inline calls.
template <typename Visit>
void for_each_kept_inline(ServerSession& s, Visit&& visit) noexcept {
  for (std::uint32_t slot = 0; slot < s.window; ++slot) {
    const ServerSlot& v = s.slots[slot];
    if (v.state == ServerSlotState::running) continue;
    if (v.payload.block != nullptr || has_buffer(s.reply_buffers, slot)) visit(s, slot);
  }
}
/// All calls.
template <typename Visit>
void for_each_kept(ServerSession& s, Visit&& visit) noexcept {
  for_each_kept_inline(s, visit);
  if (s.connection == nullptr) return;
  ConnectionServer& b = *s.connection;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    const ConnectionServerSlot& v = b.slots[slot];
    if (v.state == ConnectionServerSlot::State::running) continue;
    if (v.state == ConnectionServerSlot::State::answering || has_buffer(b.reply_buffers, slot))
      visit(b, slot);
  }
}

void drop_reply(Rpc& r, ServerSession& s, std::uint32_t slot) noexcept {
  if (s.reply_buffers != nullptr) release_reply_buffer(s.reply_buffers[slot]);
  ServerSlot& v = s.slots[slot];
  if (v.payload.block == nullptr) return;
  release_payload(v.payload);
  std::memcpy(v.payload.text, kReplyDropped.data(), kReplyDropped.size());
  v.status = static_cast<std::uint8_t>(Status::limit);
  v.size = static_cast<std::uint16_t>(kReplyDropped.size());
  ++r.stats.dropped_replies;
}

/// The connection is in the queue already, because it waits for the peer's credit.
void drop_reply(Rpc& r, ConnectionServer& b, std::uint32_t slot) noexcept {
  if (b.reply_buffers != nullptr) release_reply_buffer(b.reply_buffers[slot]);
  ConnectionServerSlot& v = b.slots[slot];
  if (v.state != ConnectionServerSlot::State::answering) return;
  v.reply = {};
  v.state = ConnectionServerSlot::State::refusing;
  v.refusal = Status::limit;
  ++r.stats.dropped_replies;
}

/// Looks at all slots of each session that was not empty at the last count, or has had a request
/// since.
void count_kept_replies(Rpc& r) noexcept {
  for (auto& [address, source] : r.sources) source.kept_replies = 0;
  r.servers.for_each([&r](ServerSession& s) {
    if (s.last_heard < s.empty_at) return;
    s.kept_replies = 0;
    for_each_kept(s, [&s](const auto&, std::uint32_t) { ++s.kept_replies; });
    s.source->kept_replies += s.kept_replies;
    // A request of the same poll may come after this count, and has the same tick.
    s.empty_at = s.kept_replies == 0 && calls_in_progress(s) == 0 ? r.context.now : 0;
  });
}

/// The sessions of a source with kept replies whose last requests are the oldest.
struct OldestSessions {
  static constexpr std::size_t kMost = 32;
  std::array<ServerSession*, kMost> all{};
  std::size_t count = 0;

  static bool is_older(const ServerSession* one, const ServerSession* other) noexcept {
    return one->last_heard < other->last_heard;
  }
  /// `all` is a heap, its newest session first.
  void add(ServerSession& s) noexcept {
    if (count == kMost) {
      if (!is_older(&s, all[0])) return;
      std::pop_heap(all.begin(), all.end(), is_older);
      --count;
    }
    all[count++] = &s;
    std::push_heap(all.begin(), all.begin() + count, is_older);
  }
};

OldestSessions find_oldest(Rpc& r, const SessionSource& source) noexcept {
  OldestSessions oldest;
  r.servers.for_each([&](ServerSession& s) {
    if (s.source == &source && s.kept_replies != 0) oldest.add(s);
  });
  return oldest;
}

void drop_all(Rpc& r, ServerSession& s) noexcept {
  for_each_kept(s, [&r](auto& end, std::uint32_t slot) { drop_reply(r, end, slot); });
}

}  // namespace

void drop_kept_inline_replies(Rpc& r, ServerSession& s) noexcept {
  for_each_kept_inline(s, [&r](auto& end, std::uint32_t slot) { drop_reply(r, end, slot); });
}

/// Counting looks at all slots of many sessions. So an attempt frees the replies of several
/// sessions, and one in vain is not repeated at once.
bool ReplyReclaimer::reclaim() noexcept {
  if (release_spares(rpc_)) return true;
  const std::uint64_t now = rpc_.context.clock.now();
  if (now < next_attempt_) return false;
  count_kept_replies(rpc_);
  SessionSource* heaviest = nullptr;
  for (auto& [address, source] : rpc_.sources) {
    if (heaviest == nullptr || source.kept_replies > heaviest->kept_replies) heaviest = &source;
  }
  if (heaviest == nullptr || heaviest->kept_replies == 0) {
    next_attempt_ = now + rpc_.min_rto;
    return false;
  }
  const OldestSessions oldest = find_oldest(rpc_, *heaviest);
  for (std::size_t i = 0; i < oldest.count; ++i) drop_all(rpc_, *oldest.all[i]);
  return true;
}

}  // namespace spinwire::rpc
