#include "engine/accepted_connections.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "config/queue_sizing.h"
#include "control/peer_source.h"

namespace spinwire::engine {

AcceptedConnections::AcceptedConnections(const Config::Connections& limits)
    : maximum_(limits.maximum),
      half_open_share_(config::half_open_connections(limits)),
      share_(limits.maximum, limits.maximum_per_source),
      records_(limits.maximum, Record{Phase::none, {}, sources_.end()}) {}

Result<void> AcceptedConnections::check_share(const control::Address& source,
                                              std::uint32_t free) const {
  // A full engine refuses everybody, and with another reason.
  if (free == 0 || share_.admits(source, free)) return {};
  return base::fail(Status::limit, "accept one more connection",
                    base::format("{} of connections.maximum = {} are of {}, which is its share",
                                 share_.used_by(source), maximum_, control::source_text(source)),
                    "close some, or raise connections.maximum_per_source or "
                    "connections.maximum at the server");
}

std::uint32_t AcceptedConnections::records_lacking(const control::Address& source,
                                                   std::uint32_t free) const noexcept {
  const std::uint32_t needed = share_.used_by(source) / control::kShareOfFree + 1;
  return std::max(needed, free) - free;
}

AcceptedConnections::Unready AcceptedConnections::unready_of(
    const control::Address& source) const noexcept {
  const auto found = sources_.find(source.source());
  return found != sources_.end() ? found->second.unready : Unready{};
}

Result<control::Admission> AcceptedConnections::admit(const control::Address& source,
                                                      std::uint32_t free, bool is_full) const {
  if (auto share = check_share(source, free); !share) return tl::unexpected(share.error());
  const std::uint32_t unready = unready_.half_open + unready_.ending;
  if (unready == 0 || (!is_full && unready < half_open_share_)) return control::Admission{};
  return control::Admission{false, unready_.ending};
}

std::uint32_t* AcceptedConnections::count_of(Unready& of, Phase phase) noexcept {
  return phase == Phase::half_open ? &of.half_open : phase == Phase::ending ? &of.ending : nullptr;
}

void AcceptedConnections::enter(Record& record, Phase phase) noexcept {
  const auto move = [&](Unready& of) {
    if (std::uint32_t* const before = count_of(of, record.phase); before != nullptr) --*before;
    if (std::uint32_t* const after = count_of(of, phase); after != nullptr) ++*after;
  };
  move(unready_);
  if (record.source != sources_.end()) move(record.source->second.unready);
  record.phase = phase;
}

void AcceptedConnections::add(std::uint64_t subject, const control::Address& source) noexcept {
  Record& record = record_of(subject);
  // Without memory for its source it counts as this host's.
  (void)base::no_throw("count a connection", [&]() -> Result<void> {
    if (source.is_loopback()) return {};
    const auto of = sources_.try_emplace(source.source()).first;
    try {
      record.place = share_.add(source);
    } catch (...) {
      if (of->second.connections == 0) sources_.erase(of);
      throw;
    }
    ++of->second.connections;
    record.source = of;
    return {};
  });
  enter(record, Phase::half_open);
}

void AcceptedConnections::on_ready(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  if (record.phase == Phase::half_open) enter(record, Phase::ready);
}

void AcceptedConnections::on_ending(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  if (record.phase == Phase::half_open) enter(record, Phase::ending);
}

void AcceptedConnections::on_giving_way(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  if (record.phase == Phase::ready) enter(record, Phase::ending);
}

void AcceptedConnections::remove(std::uint64_t subject) noexcept {
  Record& record = record_of(subject);
  enter(record, Phase::none);
  share_.remove(record.place);
  const auto of = std::exchange(record.source, sources_.end());
  if (of != sources_.end() && --of->second.connections == 0) sources_.erase(of);
}

}  // namespace spinwire::engine
