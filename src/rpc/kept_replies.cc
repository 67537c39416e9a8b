#include "rpc/kept_replies.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "rpc/rpc_state.h"
#include "rpc/slots.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {
namespace {

constexpr std::string_view kDropped = "the server ran the call and dropped the reply";
static_assert(kDropped.size() <= kSlotPayloadBytes);

bool has_buffer(const std::unique_ptr<ReplyBuffer[]>& buffers, std::uint32_t slot) noexcept {
  return buffers != nullptr && buffers[slot].block != nullptr;
}

/// Visits the slots whose calls are answered and hold memory. The slot of a running handler keeps
/// its reply buffer.
template <typename Visit>
void for_each_kept(ServerSession& s, Visit&& visit) noexcept {
  for (std::uint32_t slot = 0; slot < s.window; ++slot) {
    const ServerSlot& v = s.slots[slot];
    if (v.state == ServerSlotState::running) continue;
    if (v.payload.block != nullptr || has_buffer(s.reply_buffers, slot)) visit(s, slot);
  }
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
  std::memcpy(v.payload.text, kDropped.data(), kDropped.size());
  v.status = Status::limit;
  v.size = static_cast<std::uint16_t>(kDropped.size());
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

void count_kept_replies(Rpc& r) noexcept {
  for (auto& [address, source] : r.sources) source.kept_replies = 0;
  r.servers.for_each([](ServerSession& s) {
    s.kept_replies = 0;
    for_each_kept(s, [&s](const auto&, std::uint32_t) { ++s.kept_replies; });
    s.source->kept_replies += s.kept_replies;
  });
}

/// The source's session with kept replies whose last request is the oldest.
ServerSession& find_oldest(Rpc& r, const SessionSource& source) noexcept {
  ServerSession* found = nullptr;
  r.servers.for_each([&](ServerSession& s) {
    if (s.source != &source || s.kept_replies == 0) return;
    if (found == nullptr || s.last_heard < found->last_heard) found = &s;
  });
  return *found;
}

}  // namespace

void drop_kept_replies(Rpc& r, ServerSession& s) noexcept {
  for_each_kept(s, [&r](auto& end, std::uint32_t slot) { drop_reply(r, end, slot); });
  s.kept_replies = 0;
}

/// Counting takes a look at each slot. So it frees more than one block, and an attempt in vain is
/// not repeated at once.
bool ReplyReclaimer::reclaim() noexcept {
  constexpr std::uint32_t kPart = 8;
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
  const std::uint32_t before = heaviest->kept_replies;
  const std::uint32_t goal = std::max(before / kPart, 1u);
  while (before - heaviest->kept_replies < goal) {
    ServerSession& s = find_oldest(rpc_, *heaviest);
    heaviest->kept_replies -= s.kept_replies;
    drop_kept_replies(rpc_, s);
  }
  return true;
}

}  // namespace spinwire::rpc
