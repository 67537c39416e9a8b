// Amounts as people write them: "4KiB", "100us".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::base {

/// The parsed amount, or a phrase that says what is wrong with the text.
template <typename T>
using Parsed = tl::expected<T, std::string>;

/// Parses a whole number with B, KiB, MiB, GiB, TiB or no unit. Set-up.
[[nodiscard]] Parsed<std::uint64_t> parse_bytes(std::string_view text);
/// Parses a whole number with ns, us, ms, s, min or h; a unit is required. Set-up.
[[nodiscard]] Parsed<Nanoseconds> parse_duration(std::string_view text);
/// Parses a whole decimal number, which may be negative. Set-up.
[[nodiscard]] Parsed<std::int64_t> parse_integer(std::string_view text);

/// The shortest exact text that parse_bytes() reads back: "32MiB", "100". Set-up.
[[nodiscard]] std::string bytes_text(std::uint64_t bytes);
/// The shortest exact text that parse_duration() reads back: "100us", "1500ms". Set-up.
[[nodiscard]] std::string duration_text(Nanoseconds duration);

}  // namespace spinwire::base
