#include "control/resolution_limits.h"

#include <algorithm>

namespace spinwire::control {

bool AnsweredAddresses::contains(const Gid& address) const noexcept {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& each) { return each.address == address; });
}

bool AnsweredAddresses::contains(const Source& source, const Gid& address) const noexcept {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& each) {
    return each.source == source && each.address == address;
  });
}

void AnsweredAddresses::add(const Source& source, const Gid& address) {
  if (contains(source, address)) return;
  const auto is_of_source = [&](const Entry& each) { return each.source == source; };
  const auto count = std::count_if(entries_.begin(), entries_.end(), is_of_source);
  if (static_cast<std::size_t>(count) >= kOfSource) {
    entries_.erase(std::find_if(entries_.begin(), entries_.end(), is_of_source));
  } else if (entries_.size() >= kOfAll) {
    entries_.erase(entries_.begin());
  }
  entries_.push_back({source, address});
}

void AnsweredAddresses::remove(const Gid& address) noexcept {
  std::erase_if(entries_, [&](const Entry& each) { return each.address == address; });
}

void AnsweredAddresses::remove(const Source& source, const Gid& address) noexcept {
  std::erase_if(entries_, [&](const Entry& each) {
    return each.source == source && each.address == address;
  });
}

bool ResolutionLimits::has_room(const Account& account, const Limit& limit) const noexcept {
  return account.pending < limit.at_once &&
         account.spent_until <= clock_.now() + clock_.ticks(limit.interval * (limit.burst - 1));
}

void ResolutionLimits::charge(Account& account, const Limit& limit) noexcept {
  ++account.pending;
  account.spent_until = std::max(account.spent_until, clock_.now()) + clock_.ticks(limit.interval);
}

void ResolutionLimits::settle(Account& account, const Limit& limit, bool answered) noexcept {
  --account.pending;
  if (answered) account.spent_until -= clock_.ticks(limit.interval);
}

bool ResolutionLimits::may_begin(const Source& source) const noexcept {
  const auto found = sources_.find(source);
  if (found == sources_.end() || is_settled(found->second)) return has_room(all_, of_all_);
  // The rest is for sources that have none unanswered: a few strangers cannot keep those out.
  Limit rest = of_all_;
  rest.at_once -= rest.at_once / 4;
  rest.burst -= rest.burst / 4;
  return has_room(all_, rest) && has_room(found->second, of_source_);
}

bool ResolutionLimits::is_settled(const Account& account) const noexcept {
  return account.pending == 0 && account.spent_until <= clock_.now();
}

bool ResolutionLimits::try_begin(const Source& source) {
  forget_settled();
  if (!may_begin(source)) return false;
  charge(sources_[source], of_source_);
  charge(all_, of_all_);
  return true;
}

void ResolutionLimits::end(const Source& source, bool answered) noexcept {
  settle(all_, of_all_, answered);
  const auto found = sources_.find(source);
  if (found != sources_.end()) settle(found->second, of_source_, answered);
}

/// The limit of all bounds how many there are to look at.
void ResolutionLimits::forget_settled() noexcept {
  std::erase_if(sources_, [this](const auto& each) { return is_settled(each.second); });
}

}  // namespace spinwire::control
