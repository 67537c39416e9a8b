// The table of settings: names, ranges, help texts, and how values are read and written.
//
// Parsing, range checks, the environment and the TOML form use this table, so a new setting needs
// only one member in include/spinwire/config.h and one row here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "spinwire/config.h"

namespace spinwire::config {

enum class ValueKind : std::uint8_t { text, integer, bytes, duration, choice, boolean };

/// One setting. All kinds but text are held as a number: bytes, nanoseconds, or the index of a
/// choice; a boolean is a choice of false and true. `least` and `most` bound that number, or the
/// length of a text.
struct ConfigKey {
  std::string_view section;
  std::string_view name;
  ValueKind kind;
  std::int64_t least;
  std::int64_t most;
  std::string_view unit;  ///< unit of a plain number, for people; may be empty
  std::string_view help;
  std::span<const std::string_view> choices = {};
  std::int64_t (*get)(const Config& config) = nullptr;
  void (*set)(Config& config, std::int64_t value) = nullptr;
  std::string& (*text)(Config& config) = nullptr;  ///< for text, in place of get and set
};

/// All settings in the order of include/spinwire/config.h, sections together.
[[nodiscard]] std::span<const ConfigKey> config_keys() noexcept;
/// Null if the setting does not exist.
[[nodiscard]] const ConfigKey* find_config_key(std::string_view section,
                                               std::string_view name) noexcept;
[[nodiscard]] bool is_config_section(std::string_view section) noexcept;

/// "section.name".
[[nodiscard]] std::string full_name(const ConfigKey& key);
/// "SPINWIRE_SECTION_NAME".
[[nodiscard]] std::string environment_name(const ConfigKey& key);
/// The range for people: "1 .. 255", "1ms .. 1h", or the choices.
[[nodiscard]] std::string range_text(const ConfigKey& key);
/// The remedy for a bad value: "give a whole number in 1 .. 255".
[[nodiscard]] std::string remedy_text(const ConfigKey& key);
/// A value for people: "4KiB", "100us", "prefer".
[[nodiscard]] std::string value_text(const ConfigKey& key, std::int64_t value);
/// The present value for people.
[[nodiscard]] std::string present_text(const ConfigKey& key, const Config& config);
/// The present value as TOML.
[[nodiscard]] std::string toml_value(const ConfigKey& key, const Config& config);

/// Sets a number. The error is a phrase that follows the number: "is out of range". Not for text.
[[nodiscard]] tl::expected<void, std::string> set_from_number(const ConfigKey& key, Config& config,
                                                              std::int64_t number);
/// Sets a value of any kind from its text in the environment or a TOML string. The error is a
/// phrase that follows the text.
[[nodiscard]] tl::expected<void, std::string> set_from_text(const ConfigKey& key, Config& config,
                                                            std::string_view text);
/// Whether the present value is in the key's range.
[[nodiscard]] bool in_range(const ConfigKey& key, const Config& config);

/// Number of edits that turn one text into the other: insert, remove, replace, or swap neighbours.
[[nodiscard]] std::size_t edit_distance(std::string_view a, std::string_view b);
/// The key most similar to `section.name`. A key of exactly that name in another section comes
/// first. `section` may be empty.
[[nodiscard]] const ConfigKey& nearest_config_key(std::string_view section, std::string_view name);
[[nodiscard]] std::string_view nearest_config_section(std::string_view section);
/// The key whose environment name is most similar to `variable`.
[[nodiscard]] const ConfigKey& nearest_environment_key(std::string_view variable);

}  // namespace spinwire::config
