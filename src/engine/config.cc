#include "spinwire/config.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <optional>
#include <tuple>

#include "agent/engine_context.h"
#include "base/error.h"
#include "base/unique_fd.h"
#include "base/units.h"
#include "engine/config_keys.h"
#include "memory/arena.h"

// Errors come as values; nothing of the parser is visible in the library's interface. What it
// asserts of "[!]" is not so, and checked by it again: it shall neither abort nor, with NDEBUG,
// build on that.
#undef NDEBUG
#define TOML_ASSERT(expr) static_cast<void>(0)
#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

namespace spinwire {
namespace engine {
namespace {

using std::string_view;

constexpr string_view kAsked = "read the settings";

/// Puts the settings of a TOML table into a config and keeps the first complaint, first as a reader
/// of the file meets it.
class TableReader {
 public:
  TableReader(Config& config, string_view origin) : config_(config), origin_(origin) {}

  Result<void> read(const toml::table& table) {
    for (const auto& [name, node] : table) read_section(name, node);
    if (first_) return tl::unexpected(std::move(first_->error));
    return {};
  }

 private:
  struct Complaint {
    toml::source_position at;
    Error error;
  };

  void complain(const toml::source_position& at, string_view what, std::string found,
                std::string remedy) {
    const auto order = [](const toml::source_position& p) { return std::tie(p.line, p.column); };
    if (first_ && order(first_->at) <= order(at)) return;
    first_ = Complaint{
        at, base::make_error(Status::bad_config,
                             fmt::format("{}:{}:{}: {}", origin_, at.line, at.column, what),
                             std::move(found), std::move(remedy))};
  }

  void read_section(const toml::key& name, const toml::node& node) {
    const string_view section = name.str();
    const toml::table* table = node.as_table();
    if (table != nullptr && is_config_section(section)) {
      for (const auto& [key, value] : *table) read_value(section, key, value);
    } else if (table != nullptr) {
      complain(name.source().begin, fmt::format("[{}]", section), "there is no such section",
               fmt::format("the nearest known is [{}]", nearest_config_section(section)));
    } else if (is_config_section(section)) {
      complain(node.source().begin, section,
               fmt::format("{} where a section is expected", article(node)),
               fmt::format("write [{}] on a line of its own, then its settings", section));
    } else {
      complain(name.source().begin, section, "there is no such setting outside of a section",
               fmt::format("the nearest known is {}", full_name(nearest_config_key("", section))));
    }
  }

  void read_value(string_view section, const toml::key& name, const toml::node& value) {
    const ConfigKey* key = find_config_key(section, name.str());
    if (key == nullptr) {
      complain(name.source().begin, fmt::format("{}.{}", section, name.str()),
               "there is no such setting",
               fmt::format("the nearest known is {}",
                           full_name(nearest_config_key(section, name.str()))));
      return;
    }
    const std::string wrong = store(*key, value);
    if (!wrong.empty()) complain(value.source().begin, full_name(*key), wrong, wanted_text(*key));
  }

  /// Empty, or what is wrong with the value.
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
  std::optional<Complaint> first_;
};

/// The parser's tables of characters beyond ASCII have holes, in which its behaviour is undefined.
/// Such characters may be in comments and strings only, then, and strings in one line: no setting
/// is any other. Within a bare key or value a quote begins no string: the parser reads on there.
/// Answers what is wrong with the first that is not, and where.
std::optional<std::pair<std::size_t, const char*>> find_unfit(string_view text) {
  constexpr string_view kBetween = " \t\r,[]{}";
  char within = 0;     // a comment or string, by what begins it
  bool bare = false;   // within a bare key or value, or right behind a string
  bool value = false;  // behind the line's first '='
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

/// Whether a variable's name, without SPINWIRE_, is that of a section or goes on after one.
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
                      fmt::format("\"{}\" {}", value, set.error()), wanted_text(key));
  }
  return base::fail(
      Status::bad_config, std::string(name), "there is no such setting",
      fmt::format("the nearest known is {}", environment_name(nearest_environment_key(name))));
}

/// Takes SPINWIRE_SECTION_KEY. Variables of that prefix that name no section belong to others.
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

/// A key and its present value, for complaints about two that do not go together.
std::string setting(const Config& config, string_view section, string_view name) {
  const ConfigKey* key = find_config_key(section, name);
  return fmt::format("{}.{} = {}", section, name, present_text(*key, config));
}

tl::unexpected<Error> disagree(const Config& config, string_view section, string_view name,
                               std::string found, std::string remedy) {
  return base::fail(Status::bad_config, setting(config, section, name), std::move(found),
                    std::move(remedy));
}

Result<void> check_ranges(const Config& config) {
  for (const ConfigKey& key : config_keys()) {
    if (in_range(key, config)) continue;
    return base::fail(Status::bad_config, full_name(key),
                      fmt::format("{} is out of range", present_text(key, config)),
                      wanted_text(key));
  }
  return {};
}

/// Receives beside those of the queue that connections share.
std::uint64_t domain_receives(const Config& config) {
  if (config.queues.shared_receives == SharedReceives::off) return 0;
  return std::uint64_t{config.connections.own_domains} * agent::domain_slots(config);
}
/// For complaints that count them.
std::string domains_text(const Config& config) {
  if (domain_receives(config) == 0) return "";
  return fmt::format(", {} with {} receives each", setting(config, "connections", "own_domains"),
                     agent::domain_slots(config));
}

/// Work requests of long messages and leases.
std::uint64_t shared_requests(const Config& config) noexcept {
  const bool long_messages = config.connections.message_bytes > config.connections.eager_bytes;
  return long_messages || config.leases.maximum != 0 ? agent::kRendezvousRecords : 0;
}

Result<void> check_queues(const Config& config) {
  const auto& queues = config.queues;
  const std::uint32_t mtu = config.connections.mtu;
  if (!std::has_single_bit(mtu)) {  // The range leaves the five.
    return disagree(config, "connections", "mtu", "no path MTU has that size",
                    "give 256, 512, 1024, 2048 or 4096");
  }
  if (config.connections.credits > queues.receive_depth) {
    return disagree(config, "connections", "credits",
                    fmt::format("the engine posts fewer receives: {}",
                                setting(config, "queues", "receive_depth")),
                    "lower the first or raise the second");
  }
  // Receives that wait to be reposted and those kept for goodbyes are granted to nobody.
  const std::uint32_t ungranted = queues.receive_postlist + agent::kSpareReceives;
  if (queues.receive_depth <= ungranted) {
    return disagree(
        config, "queues", "receive_depth",
        fmt::format("no receive is left to grant to a peer: {}, and {} are kept for closing",
                    setting(config, "queues", "receive_postlist"), agent::kSpareReceives),
        fmt::format("give at least {}, or lower the other", ungranted + 1));
  }
  const std::uint64_t entries = most_completions(config);
  const std::uint64_t context = shared_requests(config);
  if (queues.completion_depth < entries) {
    return disagree(
        config, "queues", "completion_depth",
        fmt::format(
            "{}, {}{}, {} with {} control requests each{} can complete {} at once",
            setting(config, "queues", "operations"), setting(config, "queues", "receive_depth"),
            domains_text(config), setting(config, "connections", "maximum"),
            agent::kControlRequests,
            context != 0 ? fmt::format(", and {} of long messages and leases", context) : "",
            entries),
        fmt::format("give at least {}, or lower one of the others", entries));
  }
  return {};
}

Result<void> check_rpc(const Config& config) {
  for (const string_view name : {"window", "send_depth"}) {
    const ConfigKey* key = find_config_key("rpc", name);
    if (std::has_single_bit(static_cast<std::uint64_t>(key->get(config)))) continue;
    return disagree(config, "rpc", name, "it is no power of two", "give 8, 16, 32 or the like");
  }
  return {};
}

Result<void> check_path(const Config& config) {
  if (config.queue_pair.static_rate != 1) return {};
  return disagree(config, "queue_pair", "static_rate", "no rate has that code",
                  "give 0 or a code of enum ibv_rate");
}

Result<void> check_receive_pool(const Config& config) {
  const std::uint64_t payload =
      std::max<std::uint64_t>(256, std::bit_ceil(config.connections.eager_bytes));
  const std::uint64_t blocks =
      (config.queues.receive_depth + domain_receives(config)) * (payload + 64);
  const std::uint64_t needed = blocks + blocks / 4;
  if (needed <= config.memory.receive_bytes) return {};
  return disagree(
      config, "memory", "receive_bytes",
      fmt::format("{}{} with {} needs {} bytes, a quarter spare; the pool has {}",
                  setting(config, "queues", "receive_depth"), domains_text(config),
                  setting(config, "connections", "eager_bytes"), needed,
                  config.memory.receive_bytes),
      fmt::format("raise memory.receive_bytes to at least {}, or lower one of the others",
                  base::bytes_text((needed + (1u << 20) - 1) & ~((std::uint64_t{1} << 20) - 1))));
}

Result<void> check_large_pool(const Config& config) {
  const std::uint64_t message = config.connections.message_bytes;
  if (message < config.connections.eager_bytes) {
    return disagree(config, "connections", "message_bytes",
                    fmt::format("messages up to {} are to go in one piece",
                                setting(config, "connections", "eager_bytes")),
                    "raise message_bytes or lower connections.eager_bytes");
  }
  if (message == config.connections.eager_bytes) return {};
  const std::uint64_t needed =
      (message + sizeof(detail::Block) + memory::kChunkBytes - 1) & ~(memory::kChunkBytes - 1);
  if (needed <= config.memory.large_bytes) return {};
  return disagree(
      config, "memory", "large_bytes",
      fmt::format("{} needs {} to arrive in; the pool has {}",
                  setting(config, "connections", "message_bytes"), base::bytes_text(needed),
                  base::bytes_text(config.memory.large_bytes)),
      fmt::format("raise memory.large_bytes to at least {}, or lower "
                  "connections.message_bytes",
                  base::bytes_text(needed)));
}

Result<void> check_leases(const Config& config) {
  if (!std::has_single_bit(config.leases.alignment)) {
    return disagree(config, "leases", "alignment", "it is no power of two",
                    "give a power of two up to 2MiB");
  }
  if (config.leases.guard < config.leases.longest) return {};
  return disagree(config, "leases", "guard",
                  fmt::format("no lease would be usable: {}", setting(config, "leases", "longest")),
                  "lower the first or raise the second");
}

Result<void> check_address(const Config& config) {
  const std::string& address = config.device.address;
  in6_addr parsed{};
  if (address.empty() || ::inet_pton(AF_INET, address.c_str(), &parsed) == 1 ||
      ::inet_pton(AF_INET6, address.c_str(), &parsed) == 1)
    return {};
  return base::fail(Status::bad_config, "device.address",
                    fmt::format("\"{}\" is no IP address", address),
                    "give one such as \"10.0.0.1\" or \"fd00::1\", without port");
}

Result<void> check_times(const Config& config) {
  for (const string_view name : {"connect_timeout", "handshake_timeout", "close_timeout",
                                 "keepalive", "peer_timeout", "credit_idle"}) {
    const ConfigKey* key = find_config_key("connections", name);
    if (key->get(config) > config.engine.control_interval.count()) continue;
    return disagree(config, "connections", name,
                    fmt::format("time is looked at less often: {}",
                                setting(config, "engine", "control_interval")),
                    "raise the first or lower the second");
  }
  if (config.connections.peer_timeout < config.connections.keepalive) {
    return disagree(config, "connections", "peer_timeout",
                    fmt::format("a silent peer would be lost before it is asked: {}",
                                setting(config, "connections", "keepalive")),
                    "raise the first or lower the second");
  }
  return {};
}

std::string write_toml(const Config& config) {
  std::string text =
      "# Settings of a Spinwire engine. A file needs only those it changes. Amounts of memory are\n"
      "# bytes, or a text with B, KiB, MiB, GiB or TiB; times are a text with ns, us, ms, s, min "
      "or h.\n";
  string_view section;
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

// Every work request has at most one completion, so that this many are never too few.
std::uint64_t most_completions(const Config& config) noexcept {
  return std::uint64_t{config.queues.operations} + config.queues.receive_depth +
         domain_receives(config) +
         std::uint64_t{agent::kControlRequests} * config.connections.maximum +
         shared_requests(config);
}

}  // namespace engine

Result<Config> Config::load(const std::filesystem::path& file) {
  return base::no_throw(engine::kAsked, [&]() -> Result<Config> {
    if (file.empty()) return engine::from_text("", "");
    const Result<std::string> text = engine::read_file(file);
    if (!text) return tl::unexpected(text.error());
    return engine::from_text(*text, file.native());
  });
}

Result<Config> Config::parse(std::string_view toml, std::string_view origin) {
  return base::no_throw(engine::kAsked, [&] { return engine::from_text(toml, origin); });
}

Result<void> Config::check() const {
  return base::no_throw("check the settings", [&]() -> Result<void> {
    for (const auto part : {engine::check_ranges, engine::check_queues, engine::check_receive_pool,
                            engine::check_large_pool, engine::check_leases, engine::check_times,
                            engine::check_address, engine::check_path, engine::check_rpc}) {
      if (auto done = part(*this); !done) return done;
    }
    return {};
  });
}

std::string Config::to_toml() const {
  try {
    return engine::write_toml(*this);
  } catch (const std::bad_alloc&) {
    return {};
  }
}

}  // namespace spinwire
