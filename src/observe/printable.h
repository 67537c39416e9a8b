// Texts of an engine's file, which may hold any bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

namespace spinwire::observe {

/// No text of a file is longer.
inline constexpr std::size_t kTextMax = 256;

/// Up to the first zero; what is not printable ASCII becomes '?'.
inline std::string printable(const char* data, std::size_t length) {
  std::string text(data, ::strnlen(data, std::min(length, kTextMax)));
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return text;
}

}  // namespace spinwire::observe
