// Text of others as we show it: printable ASCII, and '?' for the rest.
#pragma once

namespace spinwire::base {

constexpr bool is_printable(char c) noexcept { return c >= 0x20 && c < 0x7f; }
constexpr char shown(char c) noexcept { return is_printable(c) ? c : '?'; }

}  // namespace spinwire::base
