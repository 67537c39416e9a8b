// When inbound handshakes or connections are used up, a silent peer gives way to a new one,
// whatever the silent peer has said before. Pauses between polls do not count as silence. The
// victim is the peer that has been silent for the longest time, at the source (IPv4 address, IPv6
// /64) that holds the most. While a source holds more than a quarter, only its peers give way,
// though they may have to be silent for a little longer first: a slow client of another source
// stays. Strangers with many addresses hold everything without such a source: grace.h shortens the
// time of all then.
//
// A handshake that waits for this engine's own verbs never gives way. The peer of one that waits
// for a connection has said all: it keeps its place while such handshakes have no more than half of
// the places, and its source has no more than a quarter. The rest serves peers that need no
// connection.
//
// With a key, peers that have proved it keep three quarters of the places against peers that have
// proved nothing. Those that hold more give way like all others: a new peer cannot prove the key
// before it has a place, and one holder of the key must not block the other holders.
//
// Half-open connections have a quarter of connections.maximum. The port ends one of them for each
// request that waits for a connection, by the same choice.
//
// Descriptors may be used up before handshakes are. The peer for which there was none is dropped.
// For the next second the port takes fewer handshakes than it had then: others wait, and silent
// peers give way, as if handshakes were used up. What is left serves the set-up of connections.
//
// A request through rdma_cm is an inbound handshake until the peer confirms the answer. If no
// silent handshake is due, the oldest request of a source that has more of them than the newcomer
// gives way at once, since the source is known before anything is done.
#include <algorithm>
#include <chrono>

#include "base/log_message.h"
#include "control/control_port.h"

namespace spinwire::control {
namespace {

constexpr Nanoseconds kLackOfDescriptors = std::chrono::seconds(1);

bool is_connection(const Handshake& h) noexcept {
  return std::holds_alternative<Accept>(h.dialogue) || std::holds_alternative<CmAccept>(h.dialogue);
}

/// Whether a source with so many handshakes is heavy: it holds more than a quarter of `limit`.
/// Honest peers that come in a crowd come from many sources, or are near.
bool holds_much(std::uint32_t count, std::uint32_t limit) noexcept { return count > limit / 4; }

}  // namespace

/// Whether the handshake waits for its peer.
bool ControlPort::waits_for_peer(const Handshake& h) noexcept {
  return std::visit(
      [](const auto& dialogue) {
        if constexpr (requires { dialogue.waits_for_peer(); }) return dialogue.waits_for_peer();
        return false;
      },
      h.dialogue);
}

bool ControlPort::may_give_way(const Handshake& h) noexcept {
  return h.address == AddressState::pending ? !h.is_authenticated : waits_for_peer(h);
}

/// What the rules depend on, beside the source and the time.
HandshakeGroup ControlPort::group_of(const Handshake& h) noexcept {
  return {.waits_for = !may_give_way(h)                    ? WaitsFor::us
                       : h.held_for == HeldFor::connection ? WaitsFor::room
                       : is_connection(h)                  ? WaitsFor::confirmation
                                                           : WaitsFor::peer,
          .is_proved = h.is_authenticated,
          .is_request = h.request != nullptr};
}

bool ControlPort::is_of_heavy_source(const Handshake& h, std::uint32_t limit) const noexcept {
  return holds_much(eviction_order_.count_beside(h.id.index), limit);
}

/// The time that a silent peer has, which is shorter at a heavy source.
std::uint64_t ControlPort::time_of_source(bool is_heavy) const noexcept {
  return std::min(clock_.ticks(options_.handshake_timeout / 8),
                  is_heavy ? clock_.ticks(Grace::kShortest) : grace_.at(heard_time_));
}

bool ControlPort::has_had_its_time(const Handshake& h, std::uint32_t limit) const noexcept {
  return heard_time_ - h.waits_since >= time_of_source(is_of_heavy_source(h, limit));
}

/// The waiting peer that gives way, of the groups that `is_eligible` names. Null: none has had its
/// time. Those that `keeps_its_place` names do so unless their source is heavy.
template <typename IsEligible, typename KeepsItsPlace>
Handshake* ControlPort::find_silent(std::uint32_t limit, IsEligible&& is_eligible,
                                    KeepsItsPlace&& keeps_its_place) noexcept {
  const auto heaviest = eviction_order_.first(is_eligible);
  if (!heaviest) return nullptr;
  if (holds_much(heaviest->count, limit)) {
    const bool is_due = heard_time_ - heaviest->since >= time_of_source(true);
    return is_due ? &handshakes_.at(heaviest->name) : nullptr;
  }
  const std::uint64_t time = time_of_source(false);
  if (heard_time_ < time) return nullptr;
  const auto found = eviction_order_.first(
      [&](HandshakeGroup group) { return is_eligible(group) && !keeps_its_place(group); },
      heard_time_ - time);
  return found ? &handshakes_.at(found->name) : nullptr;
}

/// The handshake that gives way to a new peer: of a peer that has proved the key only if no other's
/// is due. Null: none has had its time.
Handshake* ControlPort::find_victim() noexcept {
  const std::uint32_t limit = inbound_limit();
  const bool many_wait = held_for_connections_ > limit / 2;
  const auto find = [&](bool proved) {
    return find_silent(
        limit,
        [&](HandshakeGroup group) {
          return group.is_proved == proved && group.waits_for != WaitsFor::us;
        },
        [&](HandshakeGroup group) { return group.waits_for == WaitsFor::room && !many_wait; });
  };
  Handshake* const stranger = find(false);
  const bool many_are_proved = proved_ > limit - std::max(limit / 4, 1u);
  return stranger == nullptr && many_are_proved ? find(true) : stranger;
}

/// There was no descriptor, or no memory, for a peer, which was dropped or waits.
void ControlPort::on_accept_failed(const Error& why) noexcept {
  if (!lacks_descriptors()) base::log(LogLevel::warning, "{}", why.message());
  affordable_ = std::max(inbound_ - inbound_ / 4, 2u) - 1;
  lacks_until_ = last_poll_ + clock_.ticks(kLackOfDescriptors);
}

/// The half-open connection that gives way to a new one. Null: none has had its time.
Handshake* ControlPort::find_half_open_victim() noexcept {
  return find_silent(
      options_.half_open,
      [](HandshakeGroup group) { return group.waits_for == WaitsFor::confirmation; },
      [](HandshakeGroup) { return false; });
}

/// The same for a newcomer whose source has its share: the oldest that counts for that source,
/// wherever it comes from.
Handshake* ControlPort::find_half_open_of_own(const Handshake& newcomer) noexcept {
  Handshake* oldest = nullptr;
  for (std::uint32_t i = 0; i < handshakes_.capacity(); ++i) {
    if (!handshakes_.in_use(i)) continue;
    Handshake& h = handshakes_.at(i);
    if (!is_connection(h) || !may_give_way(h) || h.counted_for != newcomer.counted_for) continue;
    if (oldest == nullptr || h.waits_since < oldest->waits_since) oldest = &h;
  }
  return oldest != nullptr && has_had_its_time(*oldest, options_.half_open) ? oldest : nullptr;
}

/// A request through rdma_cm that gives way before it has had its time, even while it waits for our
/// own verbs, because its source has more handshakes than the newcomer's will have.
Handshake* ControlPort::find_request_victim(const Address& newcomer) noexcept {
  const std::uint32_t will_have = eviction_order_.count_of(newcomer.source()) + 1;
  const auto found = eviction_order_.first([](HandshakeGroup group) { return group.is_request; });
  return found && found->count > will_have ? &handshakes_.at(found->name) : nullptr;
}

/// Whether a peer that gives way is one of many that hold no more than their share each. One that
/// was refused, or gives way before it has had its time, is not, nor one whose address we resolve.
bool ControlPort::is_of_many(const Handshake& h) const noexcept {
  const std::uint32_t limit = is_connection(h) ? options_.half_open : inbound_limit();
  return waits_for_peer(h) && h.address != AddressState::pending &&
         !std::holds_alternative<Refusing>(h.dialogue) && !is_of_heavy_source(h, limit) &&
         has_had_its_time(h, limit);
}

void ControlPort::evict(Handshake& h) noexcept {
  if (is_of_many(h)) grace_.shorten(heard_time_);
  const HandshakeId id = h.id;
  with_dialogue(h, [&](auto& dialogue) {
    if constexpr (requires { dialogue.give_up(*this, h); }) dialogue.give_up(*this, h);
  });
  drop(id);  // a lingering refusal would keep the room
}

}  // namespace spinwire::control
