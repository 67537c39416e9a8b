// Texts of an engine's file, which may hold any bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "base/printable.h"

namespace spinwire::observe {

/// No text of a file is longer.
inline constexpr std::size_t kTextMax = 256;

/// Up to the first zero; what is not printable ASCII becomes '?'.
inline std::string printable(const char* data, std::size_t length) {
  std::string text(data, ::strnlen(data, std::min(length, kTextMax)));
  std::transform(text.begin(), text.end(), text.begin(), base::shown);
  return text;
}

}  // namespace spinwire::observe
