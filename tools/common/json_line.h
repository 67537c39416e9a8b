// One JSON object on one line, written member by member.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace spinwire::tools {

/// The text in quotes, escaped as JSON demands.
std::string json_string(std::string_view text);

class JsonLine {
 public:
  JsonLine& add(std::string_view key, std::string_view value);
  JsonLine& add(std::string_view key, double value);
  template <std::integral Integer>
  JsonLine& add(std::string_view key, Integer value) {
    return add_raw(key, std::to_string(value));
  }
  /// The finished object, without a line end.
  [[nodiscard]] std::string str() const { return text_ + '}'; }

 private:
  JsonLine& add_raw(std::string_view key, std::string_view value);

  std::string text_ = "{";
};

}  // namespace spinwire::tools
