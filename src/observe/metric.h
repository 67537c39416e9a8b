// How a member of a record becomes a column of a table: name, unit, help and kind, and how to read
// its value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "spinwire/clock.h"
#include "spinwire/observe.h"

namespace spinwire::observe {

inline constexpr std::uint32_t kNumberBytes = 8;
inline constexpr std::uint32_t kNanosecondsPerSecond = 1'000'000'000;

/// A column without its source, as the file describes it.
struct Column {
  const char* name;
  const char* unit;
  const char* help;
  MetricKind kind;
  std::uint32_t per_unit;
  std::uint32_t bytes;  ///< in a row; a multiple of 8
};

/// A column that is filled from a record of type T.
template <typename T>
struct ColumnOf : Column {
  std::uint64_t (*number)(const T&) noexcept;   ///< null: a text
  std::string_view (*text)(const T&) noexcept;  ///< null: a number
};

template <typename V>
constexpr std::uint64_t number_of(const V& value) noexcept {
  if constexpr (std::is_same_v<V, Nanoseconds>) {
    return static_cast<std::uint64_t>(value.count() > 0 ? value.count() : 0);
  } else {
    return static_cast<std::uint64_t>(value);
  }
}
template <typename T, typename V>
T record_of(V T::*);
template <typename T, typename V>
V value_of(V T::*);

/// A number, from a member of its record. A member of type Nanoseconds is shown in seconds.
template <auto Member>
constexpr auto number(MetricKind kind, const char* name, const char* help, const char* unit = "") {
  using T = decltype(record_of(Member));
  constexpr bool is_time = std::is_same_v<decltype(value_of(Member)), Nanoseconds>;
  return ColumnOf<T>{{name, is_time ? "seconds" : unit, help, kind,
                      is_time ? kNanosecondsPerSecond : 1, kNumberBytes},
                     [](const T& record) noexcept { return number_of(record.*Member); },
                     nullptr};
}
template <auto Member>
constexpr auto counter(const char* name, const char* help, const char* unit = "") {
  return number<Member>(MetricKind::counter, name, help, unit);
}
template <auto Member>
constexpr auto gauge(const char* name, const char* help, const char* unit = "") {
  return number<Member>(MetricKind::gauge, name, help, unit);
}
/// A text of up to `bytes`, which are a multiple of 8. A member that is no text is an enumeration
/// with a to_string().
template <auto Member>
constexpr auto text(MetricKind kind, const char* name, const char* help, std::uint32_t bytes) {
  using T = decltype(record_of(Member));
  return ColumnOf<T>{{name, "", help, kind, 1, bytes}, nullptr, [](const T& record) noexcept {
                       if constexpr (std::is_same_v<decltype(value_of(Member)), std::string_view>) {
                         return record.*Member;
                       } else {
                         return to_string(record.*Member);
                       }
                     }};
}

/// Writes the values of a record to consecutive words of a row; returns the word behind them.
template <typename T, std::size_t N>
std::uint64_t* fill(std::uint64_t* at, const ColumnOf<T> (&columns)[N], const T& record) noexcept {
  for (const ColumnOf<T>& column : columns) {
    if (column.number != nullptr) {
      *at++ = column.number(record);
      continue;
    }
    const std::string_view value = column.text(record);
    std::memset(at, 0, column.bytes);
    value.copy(reinterpret_cast<char*>(at), column.bytes);
    at += column.bytes / kNumberBytes;
  }
  return at;
}

}  // namespace spinwire::observe
