// Formatting into memory of the caller, without the heap. What of fmt formats is compiled in one
// place: compilers disagree about the name of its function.
#pragma once

#include <fmt/core.h>

#include <cstddef>
#include <span>

namespace spinwire::base {

namespace detail {
std::size_t format_into(std::span<char> to, fmt::string_view how, fmt::format_args args) noexcept;
}

/// Formats as fmt::format() does. Returns the length of the text, which is cut where `to` ends.
template <typename... Args>
std::size_t format_into(std::span<char> to, fmt::format_string<Args...> how,
                        const Args&... args) noexcept {
  return detail::format_into(to, how, fmt::make_format_args(args...));
}

}  // namespace spinwire::base
