// The table of settings: what drives parsing, ranges, the environment and the written form.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "spinwire/config.h"

namespace spinwire::engine {

enum class ValueKind : std::uint8_t { text, integer, bytes, duration, choice };

/// One setting. Everything but text is held as a number: bytes, nanoseconds, or which of the
/// choices; `least` and `most` bound it, or the length of a text.
struct ConfigKey {
  std::string_view section;
  std::string_view name;
  ValueKind kind;
  std::int64_t least;
  std::int64_t most;
  std::string_view unit;  ///< of a plain number, for readers; may be empty
  std::string_view help;
  std::span<const std::string_view> choices;
  std::int64_t (*get)(const Config& config);
  void (*set)(Config& config, std::int64_t value);
  std::string& (*text)(Config& config);  ///< instead of get and set, for text
};

/// In the order of include/spinwire/config.h, sections together.
[[nodiscard]] std::span<const ConfigKey> config_keys() noexcept;
/// Null when there is none.
[[nodiscard]] const ConfigKey* find_config_key(std::string_view section,
                                               std::string_view name) noexcept;
[[nodiscard]] bool is_config_section(std::string_view section) noexcept;

/// "section.name".
[[nodiscard]] std::string full_name(const ConfigKey& key);
/// "SPINWIRE_SECTION_NAME".
[[nodiscard]] std::string environment_name(const ConfigKey& key);
/// The range for readers: "1 .. 255", "1ms .. 1h", or the choices.
[[nodiscard]] std::string range_text(const ConfigKey& key);
/// What the key takes, as a remedy: "give a whole number in 1 .. 255".
[[nodiscard]] std::string wanted_text(const ConfigKey& key);
/// A value for readers: "4KiB", "100us", "prefer".
[[nodiscard]] std::string value_text(const ConfigKey& key, std::int64_t value);
/// The present value as it is written in TOML, quoted where TOML wants it.
[[nodiscard]] std::string toml_value(const ConfigKey& key, const Config& config);

/// Sets a number; or one phrase that says what is wrong with it, fit to follow it: "is out of
/// range". Not for text.
[[nodiscard]] tl::expected<void, std::string> set_from_number(const ConfigKey& key, Config& config,
                                                              std::int64_t number);
/// The same from text such as the environment or a TOML string holds. For any key.
[[nodiscard]] tl::expected<void, std::string> set_from_text(const ConfigKey& key, Config& config,
                                                            std::string_view text);
/// Whether the present value lies in the key's range.
[[nodiscard]] bool in_range(const ConfigKey& key, const Config& config);
/// The present value for readers.
[[nodiscard]] std::string present_text(const ConfigKey& key, const Config& config);

/// Entries of the completion queue that connections can need at once.
[[nodiscard]] std::uint64_t most_completions(const Config& config) noexcept;

/// Changes that turn one text into the other: insert, remove, replace, or swap two neighbours.
[[nodiscard]] std::size_t edit_distance(std::string_view a, std::string_view b);
/// The key most like `section.name`. A key of that very name in another section comes first;
/// `section` may be empty.
[[nodiscard]] const ConfigKey& nearest_config_key(std::string_view section, std::string_view name);
[[nodiscard]] std::string_view nearest_config_section(std::string_view section);
/// The key whose environment name is most like `variable`.
[[nodiscard]] const ConfigKey& nearest_environment_key(std::string_view variable);

}  // namespace spinwire::engine
