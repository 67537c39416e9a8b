// JSON as the tools write and read it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace spinwire::tools {

/// Objects keep the order of their members.
using Json = nlohmann::ordered_json;

/// The value on a line of its own. Bytes that are not UTF-8 are replaced.
inline std::string json_line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
}

}  // namespace spinwire::tools
