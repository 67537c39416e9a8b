// What examples share: values that travel as their bytes, and errors that end a program.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "spinwire/status.h"

namespace spinwire::tools {

/// An error to show to the user.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Throws a Failure unless there is a value.
template <typename T>
T must(Result<T> result) {
  if (!result) throw Failure(result.error().message());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}
inline void must(Status status) {
  if (status != Status::ok) throw Failure(std::string(to_string(status)));
}

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}
/// Fails if the length differs from T's.
template <typename T>
bool decode(std::span<const std::byte> bytes, T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (bytes.size() != sizeof value) return false;
  std::memcpy(&value, bytes.data(), sizeof value);
  return true;
}

}  // namespace spinwire::tools
