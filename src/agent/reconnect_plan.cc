#include "agent/reconnect_plan.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace spinwire::agent {

Error last_error(Error first, Error last, const ReconnectPlan& plan) noexcept {
  const bool has_ended_all = !is_retryable(last) && plan.is_last_hope();
  const bool tells_last = has_ended_all || !is_retryable(first);
  Error& told = tells_last ? last : first;
  try {
    told.found += tells_last ? base::format("; before that: {}", first.message())
                             : base::format("; {} attempts to reconnect failed, the last one: {}",
                                            plan.rounds(), last.message());
  } catch (...) {  // without memory, the error alone
  }
  if (!tells_last) {
    told.code = last.code;
    if (last.goodbye.reason != GoodbyeReason::none) told.goodbye = last.goodbye;
  }
  return std::move(told);
}

/// Within a pass over the addresses, each attempt takes the next address and the next path. The
/// second pass begins with the second path, and so on: a round has each pair once.
ReconnectPlan::ReconnectPlan(const Reconnect& options,
                             const std::vector<control::Address>& addresses,
                             const std::vector<LocalPath>& paths, const Clock& clock)
    : options_(options), clock_(clock), random_(base::random_seed()), paths_(paths) {
  const auto count = static_cast<std::uint32_t>(addresses.size());
  const auto passes = std::max(static_cast<std::uint32_t>(paths.size()), 1u);
  addresses_.reserve(count);
  for (const control::Address& each : addresses) addresses_.push_back({each});
  targets_.reserve(std::size_t{count} * passes);
  for (std::uint32_t pass = 0; pass < passes; ++pass) {
    for (std::uint32_t i = 0; i < count; ++i) targets_.push_back({i, (pass + i) % passes});
  }
  left_ = static_cast<std::uint32_t>(targets_.size()) - 1;
}

bool ReconnectPlan::can_leave(std::uint32_t port) const noexcept {
  if (paths_.empty() || local_path()->port != port) return false;
  return std::any_of(paths_.begin(), paths_.end(),
                     [port](const LocalPath& each) { return each.port != port; });
}

Result<ReconnectPlan> ReconnectPlan::make(const char* asked, const Reconnect& options,
                                          std::string_view address,
                                          const std::vector<std::string>& alternatives,
                                          const Clock& clock, const std::vector<LocalPath>& paths) {
  constexpr Nanoseconds kLeast = std::chrono::microseconds(1), kMost = std::chrono::hours(1);
  if (options.first_delay < kLeast || options.first_delay > options.max_delay ||
      options.max_delay > kMost) {
    return base::fail(Status::invalid_argument, base::format("{} with reconnecting", asked),
                      base::format("delays from {} ns to {} ns", options.first_delay.count(),
                                   options.max_delay.count()),
                      "delays are 1 us to 1 h, and first_delay is at most max_delay");
  }
  std::vector<control::Address> addresses;
  addresses.reserve(alternatives.size() + 1);
  const auto add = [&addresses](std::string_view text) {
    return control::Address::parse(text).map(
        [&addresses](const control::Address& each) { addresses.push_back(each); });
  };
  if (auto added = add(address); !added) return tl::unexpected(added.error());
  for (const std::string& text : alternatives) {
    if (auto added = add(text); !added) return tl::unexpected(added.error());
  }
  return ReconnectPlan(options, addresses, paths, clock);
}

/// Rounds that count when the next one begins. What is soon lost again does not reset them.
std::uint32_t ReconnectPlan::rounds_after(const AttemptEnd& end, std::uint64_t now) const noexcept {
  const bool lasted = end.was_ready && now - end.ready_at >= clock_.ticks(options_.max_delay);
  return lasted ? 0 : rounds_;
}

bool ReconnectPlan::has_next(const AttemptEnd& end, std::uint64_t now) const noexcept {
  if (!end.was_ready && left_ != 0) return true;
  const bool no_other = end.was_ready ? targets_.size() == 1 : all_final_;
  if (end.is_final && no_other) return false;
  return rounds_after(end, now) < options_.attempts;
}

std::uint64_t ReconnectPlan::next(const AttemptEnd& end, std::uint64_t now) noexcept {
  std::uint64_t pause = 0;
  if (!end.was_ready && left_ != 0) {
    --left_;
    all_final_ = all_final_ && end.is_final;
  } else {
    rounds_ = rounds_after(end, now);
    pause = next_pause();
    ++rounds_;
    left_ = static_cast<std::uint32_t>(targets_.size()) - 1;
    all_final_ = true;
  }
  if (++place_ == targets_.size()) place_ = 0;
  return std::max(pause, skip_held_off(now + pause) - now);
}

/// Doubles with each round up to the maximum. A random part of up to a half keeps clients of one
/// peer from connecting at the same time.
std::uint64_t ReconnectPlan::next_pause() noexcept {
  constexpr std::uint32_t kMostDoublings = 30;
  const std::uint32_t doublings = std::min(rounds_, kMostDoublings);
  const auto first = static_cast<std::uint64_t>(options_.first_delay.count());
  const auto most = static_cast<std::uint64_t>(options_.max_delay.count());
  const std::uint64_t longest = first > most >> doublings ? most : first << doublings;
  return clock_.ticks(
      Nanoseconds(static_cast<std::int64_t>(longest - random_.below(longest / 2 + 1))));
}

/// Goes on to the first attempt of this round whose address may be tried at `when`, or else to the
/// one that may be made soonest. Returns the tick from which it may be tried.
std::uint64_t ReconnectPlan::skip_held_off(std::uint64_t when) noexcept {
  const auto count = static_cast<std::uint32_t>(targets_.size());
  std::uint32_t best = 0;
  for (std::uint32_t i = 0; i <= left_; ++i) {
    const std::uint64_t from = not_before((place_ + i) % count);
    if (from < not_before((place_ + best) % count)) best = i;
    if (from > when) continue;
    best = i;
    break;
  }
  place_ = (place_ + best) % count;
  left_ -= best;
  if (best != 0) all_final_ = false;  // those that were left out may take us later
  return std::max(when, not_before(place_));
}

}  // namespace spinwire::agent
