#include "base/units.h"

#include <fmt/core.h>

#include <array>
#include <charconv>
#include <span>
#include <system_error>

namespace spinwire::base {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t factor;
};

// Coarsest last: amount_text() takes the last unit that divides the amount.
constexpr std::array<Unit, 5> kByteUnits{
    {{"B", 1}, {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40}}};
constexpr std::array<Unit, 6> kTimeUnits{{{"ns", 1},
                                          {"us", 1'000},
                                          {"ms", 1'000'000},
                                          {"s", 1'000'000'000},
                                          {"min", 60'000'000'000},
                                          {"h", 3'600'000'000'000}}};

std::string names(std::span<const Unit> units) {
  std::string list;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (i != 0) list += i + 1 == units.size() ? " or " : ", ";
    list += units[i].name;
  }
  return list;
}

/// Parses a number followed by a unit. `bare` is the factor of a number without one; 0: an error.
Parsed<std::uint64_t> parse_amount(std::string_view text, std::span<const Unit> units,
                                   std::uint64_t bare, std::uint64_t most) {
  std::uint64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc::result_out_of_range) return tl::unexpected<std::string>("is too large");
  if (error != std::errc()) {
    return tl::unexpected(fmt::format("is not a whole number with a unit ({})", names(units)));
  }
  const std::string_view name(rest, static_cast<std::size_t>(end - rest));
  std::uint64_t factor = name.empty() ? bare : 0;
  if (name.empty() && bare == 0) {
    return tl::unexpected(fmt::format("needs a unit: {}", names(units)));
  }
  for (const Unit& unit : units) {
    if (unit.name == name) factor = unit.factor;
  }
  if (factor == 0) {
    return tl::unexpected(
        fmt::format("has the unknown unit '{}'; it is one of {}", name, names(units)));
  }
  if (number > most / factor) return tl::unexpected<std::string>("is too large");
  return number * factor;
}

std::string amount_text(std::uint64_t amount, std::span<const Unit> units) {
  const Unit* best = &units.front();
  for (const Unit& unit : units) {
    if (amount != 0 && amount % unit.factor == 0) best = &unit;
  }
  return fmt::format("{}{}", amount / best->factor, best->name);
}

}  // namespace

Parsed<std::uint64_t> parse_bytes(std::string_view text) {
  return parse_amount(text, kByteUnits, 1, INT64_MAX);
}

Parsed<Nanoseconds> parse_duration(std::string_view text) {
  return parse_amount(text, kTimeUnits, 0, INT64_MAX).map([](std::uint64_t ns) {
    return Nanoseconds(static_cast<std::int64_t>(ns));
  });
}

Parsed<std::int64_t> parse_integer(std::string_view text) {
  std::int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc::result_out_of_range) return tl::unexpected<std::string>("is too large");
  if (error != std::errc() || rest != end) {
    return tl::unexpected<std::string>("is not a whole number");
  }
  return number;
}

std::string bytes_text(std::uint64_t bytes) {
  // A number that is not a multiple of 1024 reads best without a unit.
  if (bytes % 1024 != 0 || bytes == 0) return fmt::format("{}", bytes);
  return amount_text(bytes, kByteUnits);
}

std::string duration_text(Nanoseconds duration) {
  if (duration.count() < 0) {
    return "-" +
           amount_text(std::uint64_t{0} - static_cast<std::uint64_t>(duration.count()), kTimeUnits);
  }
  return amount_text(static_cast<std::uint64_t>(duration.count()), kTimeUnits);
}

}  // namespace spinwire::base
