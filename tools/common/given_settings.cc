#include "common/given_settings.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>

namespace spinwire::tools {
namespace {

std::string without_spaces(std::string_view text) {
  std::string bare;
  for (const char c : text) {
    if (c != ' ' && c != '\t' && c != '"' && c != '\r') bare += c;
  }
  return bare;
}

}  // namespace

GivenSettings::GivenSettings(const std::filesystem::path& conf) {
  if (conf.empty()) return;
  std::ifstream file(conf);
  std::string section;
  for (std::string line; std::getline(file, line);) {
    line.erase(std::min(line.find('#'), line.size()));
    const std::size_t equals = line.find('=');
    if (equals != std::string::npos) {
      keys_.insert(section + without_spaces(std::string_view(line).substr(0, equals)));
    } else if (const std::string bare = without_spaces(line); bare.starts_with('[')) {
      section = bare.substr(1, bare.find(']') - 1) + '.';
    }
  }
}

bool GivenSettings::has(std::string_view setting) const {
  std::string variable = "SPINWIRE_";
  for (const char c : setting) {
    variable += c == '.' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return std::getenv(variable.c_str()) != nullptr || keys_.contains(setting);
}

}  // namespace spinwire::tools
