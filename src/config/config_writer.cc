// Config::to_toml().
#include <fmt/core.h>

#include "config/config_keys.h"
#include "spinwire/config.h"

namespace spinwire {
namespace config {
namespace {

std::string write_toml(const Config& config) {
  std::string text =
      "# Settings of a Spinwire engine. A file needs only those it changes. Amounts of memory are\n"
      "# bytes, or a text with B, KiB, MiB, GiB or TiB; times are a text with ns, us, ms, s, min "
      "or h.\n";
  std::string_view section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section != section) {
      section = key.section;
      text += fmt::format("\n[{}]\n", section);
    }
    text +=
        fmt::format("{:<28} # {}; {}\n", fmt::format("{} = {}", key.name, toml_value(key, config)),
                    key.help, range_text(key));
  }
  return text;
}

}  // namespace
}  // namespace config

std::string Config::to_toml() const {
  try {
    return config::write_toml(*this);
  } catch (const std::bad_alloc&) {
    return {};
  }
}

}  // namespace spinwire
