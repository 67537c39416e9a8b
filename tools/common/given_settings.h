// Which settings the user has given, in the configuration file or in the environment.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <string_view>

namespace spinwire::tools {

class GivenSettings {
 public:
  /// Reads the keys of `conf`, unless it is empty, and nothing else of it: Config::load() reports
  /// what is wrong with the file. Keys of inline tables are not found.
  explicit GivenSettings(const std::filesystem::path& conf = {});

  /// Whether the setting "section.key" was given. The environment counts as of now.
  [[nodiscard]] bool has(std::string_view setting) const;

 private:
  std::set<std::string, std::less<>> keys_;  ///< of the file, as "section.key"
};

}  // namespace spinwire::tools
