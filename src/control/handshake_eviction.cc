// When inbound handshakes are used up, a silent peer gives way to a new one: which, and when.
#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "control/control_port.h"

namespace spinwire::control {
namespace {

// How long a peer may be silent before it gives way to a new one.
constexpr Nanoseconds kGrace = std::chrono::milliseconds(100);
constexpr Nanoseconds kGraceOfHeavySource = std::chrono::milliseconds(5);

}  // namespace

/// Whether the peer has had its time. It is shorter for sources that hold much of the port: honest
/// peers that come in a crowd come from many, or are near.
bool ControlPort::may_give_up(const Handshake& h) const noexcept {
  if (!h.inbound || !std::visit([](const auto& d) { return d.waits_for_peer(); }, h.dialogue))
    return false;
  const bool is_heavy = h.source->second > options_.handshakes / 4;
  const Nanoseconds grace = is_heavy ? kGraceOfHeavySource : kGrace;
  return clock_.now() - h.waits_since >=
         clock_.ticks(std::min<Nanoseconds>(options_.handshake_timeout / 8, grace));
}

/// The handshake that gives way to a new peer: of the source that has the most of them, the one
/// whose peer has been silent for the longest time. Null: none has had its time.
Handshake* ControlPort::find_to_give_up() noexcept {
  Handshake* found = nullptr;
  for (std::uint32_t i = 0; i < handshakes_.capacity(); ++i) {
    if (!handshakes_.in_use(i)) continue;
    Handshake& h = handshakes_.at(i);
    if (!may_give_up(h)) continue;
    const auto ahead = [&] {
      const std::uint32_t most = found->source->second;
      return h.source->second != most ? h.source->second > most
                                      : h.waits_since < found->waits_since;
    };
    if (found == nullptr || ahead()) found = &h;
  }
  return found;
}

void ControlPort::give_up(Handshake& h) noexcept {
  const HandshakeId id = h.id;
  try {
    std::visit([&](auto& dialogue) { dialogue.give_up(*this, h); }, h.dialogue);
  } catch (...) {
    base::log(LogLevel::error, "{}: out of memory in a handshake", h.exchange.peer_address());
  }
  drop(id);  // a refusal that lingers would keep the room
}

}  // namespace spinwire::control
