#include "engine/accepted_connections.h"

#include <algorithm>

#include "base/error.h"
#include "config/queue_sizing.h"
#include "control/peer_source.h"

namespace spinwire::engine {

AcceptedConnections::AcceptedConnections(const Config::Connections& limits)
    : maximum_(limits.maximum),
      half_open_share_(config::half_open_connections(limits)),
      sources_(limits.maximum, limits.maximum_per_source),
      records_(limits.maximum) {}

Result<void> AcceptedConnections::check_share(const control::Address& source,
                                              std::uint32_t free) const {
  // A full engine refuses everybody, and with another reason.
  if (free == 0 || sources_.admits(source, free)) return {};
  return base::fail(Status::limit, "accept one more connection",
                    base::format("{} of connections.maximum = {} are of {}, which is its share",
                                 sources_.used_by(source), maximum_, control::source_text(source)),
                    "close some, or raise connections.maximum_per_source or "
                    "connections.maximum at the server");
}

std::uint32_t AcceptedConnections::records_lacking(const control::Address& source,
                                                   std::uint32_t free) const noexcept {
  const std::uint32_t needed = sources_.used_by(source) / control::kShareOfFree + 1;
  return std::max(needed, free) - free;
}

AcceptedConnections::Unready AcceptedConnections::unready_of(
    const control::Address& source) const noexcept {
  Unready found;
  if (half_open_ + ending_ == 0) return found;
  for (const Record& each : records_) {
    if (!each.source.is_of(source)) continue;
    if (each.part == Part::half_open) ++found.half_open;
    if (each.part == Part::ending) ++found.ending;
  }
  return found;
}

Result<control::Admission> AcceptedConnections::admit(const control::Address& source,
                                                      std::uint32_t free, bool is_full) const {
  if (auto share = check_share(source, free); !share) return tl::unexpected(share.error());
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

void AcceptedConnections::add(std::uint64_t subject, const control::Address& source) noexcept {
  Record& record = record_of(subject);
  enter(record, Part::half_open);
  // Without memory for its source it counts as this host's.
  (void)base::no_throw("count a connection", [&]() -> Result<void> {
    record.source = sources_.add(source);
    return {};
  });
}

void AcceptedConnections::on_ready(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  if (record.part == Part::half_open) enter(record, Part::ready);
}

void AcceptedConnections::on_ending(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  if (record.part == Part::half_open) enter(record, Part::ending);
}

void AcceptedConnections::on_giving_way(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  if (record.part == Part::ready) enter(record, Part::ending);
}

void AcceptedConnections::remove(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  enter(record, Part::none);
  sources_.remove(record.source);
}

}  // namespace spinwire::engine
