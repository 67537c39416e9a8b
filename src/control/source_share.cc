#include "control/source_share.h"

#include <algorithm>
#include <utility>

namespace spinwire::control {
namespace {

std::uint32_t count(const SourceCounts& counts, const Source& of) noexcept {
  const auto found = counts.find(of);
  return found != counts.end() ? found->second : 0;
}

}  // namespace

bool SourceShare::admits(const Address& peer, std::uint32_t free) const noexcept {
  if (peer.is_loopback()) return true;
  const std::uint32_t used = count(sources_, peer.source());
  if (used >= share_) return false;
  if (!leaves_room_) return true;
  const std::uint64_t room = room_of_source(used, free);
  const Source host = peer.as_v6();
  if (room == 0 || host == peer.source()) return room != 0;
  return room_of_source(count(hosts_, host), std::min<std::uint64_t>(share_ - used, room)) != 0;
}

std::uint32_t SourceShare::used_by(const Address& peer) const noexcept {
  return count(sources_, peer.source());
}

SourceShare::Place SourceShare::add(const Address& peer) {
  Place place;
  if (peer.is_loopback()) return place;
  place.source_ = sources_.try_emplace(peer.source(), 0).first;
  try {
    place.host_ = hosts_.try_emplace(peer.as_v6(), 0).first;
  } catch (...) {
    if (place.source_->second == 0) sources_.erase(place.source_);
    throw;
  }
  ++place.source_->second;
  ++place.host_->second;
  place.is_counted_ = true;
  return place;
}

void SourceShare::remove(Place& place) noexcept {
  if (!std::exchange(place.is_counted_, false)) return;
  if (--place.source_->second == 0) sources_.erase(place.source_);
  if (--place.host_->second == 0) hosts_.erase(place.host_);
}

}  // namespace spinwire::control
