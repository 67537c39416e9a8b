#include "engine/accepted_connections.h"

#include <utility>

#include "base/error.h"
#include "config/queue_sizing.h"

namespace spinwire::engine {

AcceptedConnections::AcceptedConnections(const Config::Connections& limits)
    : maximum_(limits.maximum),
      share_of_source_(limits.maximum_per_source != 0 ? limits.maximum_per_source
                                                      : limits.maximum - limits.maximum / 4),
      half_open_share_(config::half_open_connections(limits)),
      records_(limits.maximum) {}

Result<control::Admission> AcceptedConnections::admit(const control::Address& peer,
                                                      bool is_full) const {
  if (!peer.is_loopback()) {
    const auto found = sources_.find(peer.source());
    if (found != sources_.end() && found->second >= share_of_source_) {
      return base::fail(Status::limit, "accept one more connection",
                        base::format("{} of connections.maximum = {} are of {}, which is its share",
                                     found->second, maximum_, peer.str()),
                        "close some, or raise connections.maximum_per_source or "
                        "connections.maximum at the server");
    }
  }
  const std::uint32_t unready = half_open_ + ending_;
  if (unready == 0 || (!is_full && unready < half_open_share_)) return control::Admission{};
  return control::Admission{false, ending_};
}

void AcceptedConnections::enter(Record& record, Part part) noexcept {
  const auto count = [this](Part of) -> std::uint32_t* {
    return of == Part::half_open ? &half_open_ : of == Part::ending ? &ending_ : nullptr;
  };
  if (std::uint32_t* const before = count(record.part); before != nullptr) --*before;
  if (std::uint32_t* const after = count(part); after != nullptr) ++*after;
  record.part = part;
}

void AcceptedConnections::add(std::uint64_t subject, const control::Address& peer) noexcept {
  Record& record = record_of(subject);
  enter(record, Part::half_open);
  if (peer.is_loopback()) return;
  // Without memory for its source it counts as this host's.
  const auto counted = base::no_throw("count a connection", [&]() -> Result<void> {
    record.source = sources_.try_emplace(peer.source(), 0).first;
    return {};
  });
  record.is_counted = counted.has_value();
  if (record.is_counted) ++record.source->second;
}

void AcceptedConnections::on_ready(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  if (record.part == Part::half_open) enter(record, Part::ready);
}

void AcceptedConnections::on_ending(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  if (record.part == Part::half_open) enter(record, Part::ending);
}

void AcceptedConnections::remove(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  enter(record, Part::none);
  if (!std::exchange(record.is_counted, false)) return;
  if (--record.source->second == 0) sources_.erase(record.source);
}

}  // namespace spinwire::engine
