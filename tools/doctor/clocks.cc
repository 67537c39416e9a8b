#include "doctor/clocks.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <optional>

namespace spinwire::doctor {
namespace {

using Time = std::chrono::steady_clock;

constexpr Link::Limit kExchangeLimit{5000};
/// For all exchanges of a client.
constexpr Link::Limit kExchangesLimit{10000};
/// Above these the order of events of two hosts is doubtful, or wrong.
constexpr std::int64_t kNotableNs = 1'000'000;
constexpr std::int64_t kMostNs = 10'000'000;

/// One exchange, all in nanoseconds: the round trip without the time at the other host, and by how
/// much its clock is ahead if both ways take equally long.
struct Exchange {
  std::int64_t round_trip = 0;
  std::int64_t ahead = 0;

  [[nodiscard]] std::int64_t uncertainty() const noexcept { return (round_trip + 1) / 2; }
  /// How large the difference is at least.
  [[nodiscard]] std::int64_t least() const noexcept { return std::abs(ahead) - uncertainty(); }
};

/// A time since the Unix epoch. The limit keeps sums and differences of times within 64 bits.
std::optional<std::int64_t> time_fact(const Facts& facts, std::string_view name) {
  constexpr std::int64_t kMost = std::int64_t{1} << 61;  // in the year 2043
  const std::string text = fact(facts, name);
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0 || number > kMost)
    return std::nullopt;
  return number;
}

/// Asks once. Nothing: the answer has no sensible times. Errors: those of Link.
Result<std::optional<Exchange>> ask(const Host& host, Link& link, Link::Limit limit) {
  const std::int64_t asked = host.unix_ns();
  const Time::time_point begin = Time::now();
  const auto answer = link.send(LinkKind::clock, "", limit).and_then([&] {
    return link.receive(LinkKind::clock, limit);
  });
  if (!answer) return tl::unexpected(answer.error());
  const std::int64_t took = std::chrono::nanoseconds(Time::now() - begin).count();
  const Facts times = decode_facts(*answer);
  const auto received = time_fact(times, "received");
  const auto sent = time_fact(times, "sent");
  // A clock that was set in between gives no sensible round trip.
  if (!received || !sent || *sent < *received || *sent - *received > took)
    return std::optional<Exchange>();
  const std::int64_t answered = asked + took;
  return Exchange{took - (*sent - *received), (*received - asked + (*sent - answered)) / 2};
}

std::string milliseconds(std::int64_t ns) {
  return fmt::format("{:.3f} ms", static_cast<double>(ns) / 1e6);
}

void judge(const Exchange& best, std::uint32_t exchanges, Findings& findings) {
  const bool differs = best.least() > kNotableNs;
  const bool is_vague = !differs && best.uncertainty() > kMostNs;
  const std::string evidence = fmt::format(
      "the other clock is {} ahead, +/- {}: the shortest of {} round trips over TCP "
      "took {}",
      milliseconds(best.ahead), milliseconds(best.uncertainty()), exchanges,
      milliseconds(best.round_trip));
  if (is_vague) {
    findings.add("clock offset", Severity::note,
                 "not known: whether the clocks agree, as the network is slow", evidence);
  } else if (!differs) {
    findings.add("clock offset", Severity::ok, "the clocks of both hosts agree", evidence);
  } else {
    findings.add(
        "clock offset", best.least() > kMostNs ? Severity::warning : Severity::note,
        fmt::format("the other host's clock is {} {}: times in events and logs of the two "
                    "hosts do not show what came first",
                    milliseconds(std::abs(best.ahead)), best.ahead > 0 ? "ahead" : "behind"),
        evidence, "chronyc makestep  # on the host whose clock is wrong: see chronyc sources");
  }
}

/// The time until `end`, and not below zero.
Link::Limit time_until(Time::time_point end) {
  return std::max(std::chrono::ceil<Link::Limit>(end - Time::now()), Link::Limit(0));
}

}  // namespace

bool measure_clock(const Host& host, Link& link, const Facts& theirs, Findings& findings) {
  const auto add_unknown = [&](std::string_view path, std::string_view why) {
    findings.add_unknown("clock offset", "the difference between the clocks", path, why);
  };
  if (!number_fact(theirs, kClockFact, kMostClockExchanges)) {
    add_unknown(kClockFact, "the other doctor is older and does not tell its time");
    return true;
  }
  const auto end = Time::now() + Link::Limit(host.limit_ms("clock", kExchangesLimit.count()));
  std::optional<Exchange> best;
  for (std::uint32_t i = 0; i < kClockExchanges; ++i) {
    const auto exchange = ask(host, link, std::min(time_until(end), kExchangeLimit));
    if (!exchange) {
      add_unknown("the doctors' link", exchange.error().message());
      return false;
    }
    if (*exchange && (!best || (*exchange)->round_trip < best->round_trip)) best = **exchange;
  }
  if (best) {
    judge(*best, kClockExchanges, findings);
  } else {
    add_unknown("the doctors' link", "its times are not valid");
  }
  return true;
}

Result<void> answer_clock(const Host& host, Link& client, const Facts& theirs, Link::Limit limit) {
  const Time::time_point end = Time::now() + limit;
  const std::uint32_t exchanges = number_fact(theirs, kClockFact, kMostClockExchanges).value_or(0);
  for (std::uint32_t i = 0; i < exchanges; ++i) {
    if (const auto asked = client.receive(LinkKind::clock, time_until(end)); !asked)
      return tl::unexpected(asked.error());
    const std::int64_t received = host.unix_ns();
    const Facts times{{"received", std::to_string(received)},
                      {"sent", std::to_string(host.unix_ns())}};
    if (auto sent = client.send(LinkKind::clock, encode_facts(times), time_until(end)); !sent)
      return sent;
  }
  return {};
}

}  // namespace spinwire::doctor
