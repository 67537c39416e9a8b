// Config::load() and Config::parse(): settings from a TOML file and from the environment. Unknown
// sections, keys and values are reported here.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <tuple>

#include "base/error.h"
#include "base/unique_fd.h"
#include "config/config_keys.h"

// The parser returns its errors as values, and this library's interface shows none of its types.
// Its assertion about "[!]" can fail, although the parser checks the condition again later. These
// definitions keep the parser from aborting and, with NDEBUG, from assuming that the assertion
// holds.
#undef NDEBUG
#define TOML_ASSERT(expr) static_cast<void>(0)
#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

namespace spinwire {
namespace config {
namespace {

using std::string_view;

constexpr string_view kAsked = "read the settings";

/// Copies the settings of a TOML table into a config. Keeps the error that comes first in the file.
class TableReader {
 public:
  TableReader(Config& config, string_view origin) : config_(config), origin_(origin) {}

  Result<void> read(const toml::table& table) {
    for (const auto& [name, node] : table) read_section(name, node);
    if (first_) return tl::unexpected(std::move(first_->error));
    return {};
  }

 private:
  struct Finding {
    toml::source_position at;
    Error error;
  };

  void report(const toml::source_position& at, string_view what, std::string found,
              std::string remedy) {
    const auto order = [](const toml::source_position& p) { return std::tie(p.line, p.column); };
    if (first_ && order(first_->at) <= order(at)) return;
    first_ =
        Finding{at, base::make_error(Status::bad_config,
                                     fmt::format("{}:{}:{}: {}", origin_, at.line, at.column, what),
                                     std::move(found), std::move(remedy))};
  }

  void read_section(const toml::key& name, const toml::node& node) {
    const string_view section = name.str();
    const toml::table* table = node.as_table();
    if (table != nullptr && is_config_section(section)) {
      for (const auto& [key, value] : *table) read_value(section, key, value);
    } else if (table != nullptr) {
      report(name.source().begin, fmt::format("[{}]", section), "there is no such section",
             fmt::format("the nearest known is [{}]", nearest_config_section(section)));
    } else if (is_config_section(section)) {
      report(node.source().begin, section,
             fmt::format("{} where a section is expected", article(node)),
             fmt::format("write [{}] on a line of its own, then its settings", section));
    } else {
      report(name.source().begin, section, "there is no such setting outside of a section",
             fmt::format("the nearest known is {}", full_name(nearest_config_key("", section))));
    }
  }

  void read_value(string_view section, const toml::key& name, const toml::node& value) {
    const ConfigKey* key = find_config_key(section, name.str());
    if (key == nullptr) {
      report(name.source().begin, fmt::format("{}.{}", section, name.str()),
             "there is no such setting",
             fmt::format("the nearest known is {}",
                         full_name(nearest_config_key(section, name.str()))));
      return;
    }
    const std::string wrong = store(*key, value);
    if (!wrong.empty()) report(value.source().begin, full_name(*key), wrong, remedy_text(*key));
  }

  /// Returns the fault of the value; empty if there is none.
  std::string store(const ConfigKey& key, const toml::node& value) {
    const bool takes_text = key.kind != ValueKind::integer;
    const bool takes_number = key.kind == ValueKind::integer || key.kind == ValueKind::bytes;
    if (const auto* number = value.as_integer()) {
      if (key.kind == ValueKind::duration) return fmt::format("{} needs a unit", number->get());
      if (!takes_number) return fmt::format("{} is a number", number->get());
      const auto set = set_from_number(key, config_, number->get());
      return set ? std::string() : fmt::format("{} {}", number->get(), set.error());
    }
    if (const auto* text = value.as_string()) {
      if (!takes_text) return fmt::format("\"{}\" is a text", text->get());
      const auto set = set_from_text(key, config_, text->get());
      return set ? std::string() : fmt::format("\"{}\" {}", text->get(), set.error());
    }
    if (const auto* truth = value.as_boolean();
        truth != nullptr && key.kind == ValueKind::boolean) {
      key.set(config_, truth->get() ? 1 : 0);
      return {};
    }
    return fmt::format("it is {}", article(value));
  }

  static string_view article(const toml::node& node) {
    switch (node.type()) {
      case toml::node_type::table:
        return "a table";
      case toml::node_type::array:
        return "an array";
      case toml::node_type::string:
        return "a text";
      case toml::node_type::integer:
        return "a whole number";
      case toml::node_type::floating_point:
        return "a number with a fraction";
      case toml::node_type::boolean:
        return "a boolean";
      default:
        return "a date or time";
    }
  }

  Config& config_;
  string_view origin_;
  std::optional<Finding> first_;
};

/// Finds text that must not reach the parser: its tables of characters beyond ASCII have holes,
/// where its behaviour is undefined. So such characters are allowed only in comments and one-line
/// strings, which suffice for every setting. A quote inside a bare key or value begins no string,
/// because the parser reads on there. Returns the offset of the first unfit text and its name.
std::optional<std::pair<std::size_t, const char*>> find_unfit(string_view text) {
  constexpr string_view kBetween = " \t\r,[]{}";
  char within = 0;     // the character that began the comment or string; 0 outside
  bool bare = false;   // within a bare key or value, or directly behind a string
  bool value = false;  // after the first '=' of the line
  for (std::size_t i = text.starts_with("\xef\xbb\xbf") ? 3 : 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') {
      within = 0;
      bare = value = false;
    } else if (within == '"' && c == '\\' && text.substr(i + 1, 1) != "\n") {
      ++i;
    } else if (within != 0) {
      if (within != '#' && c == within) within = 0;
    } else if ((c == '"' || c == '\'') && !bare) {
      if (text.substr(i, 3) == std::string(3, c)) return {{i, "a string of several lines"}};
      within = c;
      bare = true;
    } else if (c == '#') {
      within = c;
    } else if (static_cast<unsigned char>(c) >= 0x80) {
      return {{i, "a character beyond ASCII, outside of strings and comments"}};
    } else {
      const bool ends_key = !value && (c == '=' || c == '.');
      bare = !ends_key && kBetween.find(c) == string_view::npos;
      value = value || c == '=';
    }
  }
  return std::nullopt;
}

tl::unexpected<Error> bad_toml(string_view origin, std::size_t line, std::size_t column,
                               std::string found) {
  return base::fail(Status::bad_config, fmt::format("{}:{}:{}", origin, line, column),
                    std::move(found), "correct the TOML there");
}

Result<void> read_toml(Config& config, string_view text, string_view origin) {
  if (const auto unfit = find_unfit(text)) {
    const string_view before = text.substr(0, unfit->first);
    const auto line = static_cast<std::size_t>(std::count(before.begin(), before.end(), '\n')) + 1;
    return bad_toml(origin, line, before.size() - (before.rfind('\n') + 1) + 1, unfit->second);
  }
  const toml::parse_result parsed = toml::parse(text);
  if (!parsed) {
    const toml::parse_error& error = parsed.error();
    const toml::source_position& at = error.source().begin;
    return bad_toml(origin, at.line, at.column, std::string(error.description()));
  }
  return TableReader(config, origin).read(parsed.table());
}

/// Whether a variable's name, without SPINWIRE_, is a section's name or begins with SECTION_.
bool names_a_section(string_view rest) {
  return std::any_of(config_keys().begin(), config_keys().end(), [&](const ConfigKey& key) {
    string_view prefix = "SPINWIRE_";
    const std::string full = environment_name(key);
    const string_view section = string_view(full).substr(prefix.size(), key.section.size());
    return rest.substr(0, section.size()) == section &&
           (rest.size() == section.size() || rest[section.size()] == '_');
  });
}

Result<void> read_variable(Config& config, string_view name, string_view value) {
  for (const ConfigKey& key : config_keys()) {
    if (environment_name(key) != name) continue;
    const auto set = set_from_text(key, config, value);
    if (set) return {};
    return base::fail(Status::bad_config, std::string(name),
                      fmt::format("\"{}\" {}", value, set.error()), remedy_text(key));
  }
  return base::fail(
      Status::bad_config, std::string(name), "there is no such setting",
      fmt::format("the nearest known is {}", environment_name(nearest_environment_key(name))));
}

/// Reads SPINWIRE_SECTION_KEY. Ignores variables with that prefix that name no section, because
/// other programs use them.
Result<void> read_environment(Config& config) {
  constexpr string_view kPrefix = "SPINWIRE_";
  if (environ == nullptr) return {};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (equals == string_view::npos || text.substr(0, kPrefix.size()) != kPrefix) continue;
    const string_view name = text.substr(0, equals);
    if (!names_a_section(name.substr(kPrefix.size()))) continue;
    auto done = read_variable(config, name, text.substr(equals + 1));
    if (!done) return done;
  }
  return {};
}

Result<std::string> read_file(const std::filesystem::path& file) {
  constexpr std::size_t kLongest = 1u << 20;
  const auto refuse = [&](string_view call) {
    return base::fail_errno(Status::bad_config, fmt::format("read {}", file.native()), call, errno,
                            "give the path of a readable TOML file");
  };
  const base::UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return refuse("open");
  std::string text;
  for (;;) {
    const std::size_t had = text.size();
    text.resize(had + 4096);
    const ssize_t got = ::read(fd.get(), text.data() + had, 4096);
    if (got < 0 && errno != EINTR) return refuse("read");
    text.resize(had + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return text;
    if (text.size() > kLongest) {
      return base::fail(Status::bad_config, fmt::format("read {}", file.native()),
                        "it is longer than 1 MiB", "give the path of a TOML file of settings");
    }
  }
}

Result<Config> from_text(string_view text, string_view origin) {
  Config config;
  if (auto done = read_toml(config, text, origin); !done) return tl::unexpected(done.error());
  if (auto done = read_environment(config); !done) return tl::unexpected(done.error());
  return config;
}

}  // namespace
}  // namespace config

Result<Config> Config::load(const std::filesystem::path& file) {
  return base::no_throw(config::kAsked, [&]() -> Result<Config> {
    if (file.empty()) return config::from_text("", "");
    const Result<std::string> text = config::read_file(file);
    if (!text) return tl::unexpected(text.error());
    return config::from_text(*text, file.native());
  });
}

Result<Config> Config::parse(std::string_view toml, std::string_view origin) {
  return base::no_throw(config::kAsked, [&] { return config::from_text(toml, origin); });
}

}  // namespace spinwire
