#include "common/json_line.h"

#include <fmt/core.h>

#include <cmath>

namespace spinwire::tools {

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

JsonLine& JsonLine::add_raw(std::string_view key, std::string_view value) {
  if (text_.size() > 1) text_ += ", ";
  text_ += json_string(key);
  text_ += ": ";
  text_ += value;
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, std::string_view value) {
  return add_raw(key, json_string(value));
}

// JSON has no infinities.
JsonLine& JsonLine::add(std::string_view key, double value) {
  return add_raw(key, std::isfinite(value) ? fmt::format("{:.6g}", value) : "null");
}

}  // namespace spinwire::tools
