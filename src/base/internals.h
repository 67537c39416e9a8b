// The library's access to the private members of the public API's types.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "spinwire/buffer.h"
#include "spinwire/export.h"

namespace spinwire::detail {

struct Internals {
  template <typename T, typename... Args>
  [[gnu::always_inline]] static T make(Args&&... args) noexcept {
    return T(std::forward<Args>(args)...);
  }
  template <typename T>
  static Block* block(const T& owner) noexcept {
    return owner.block_;
  }
  template <typename T>
  static bool is_kept(const T& call) noexcept {
    return call.kept_;
  }
  /// Each reply that may have the status `refused` needs it.
  template <typename T>
  static void set_code(T& reply, const std::optional<std::uint32_t>& code) noexcept {
    reply.has_code_ = code ? 1 : 0;
    reply.code_ = code.value_or(0);
  }
  template <typename T>
  static bool is_answered(const T& request) noexcept {
    return request.answered_;
  }
  template <typename T>
  static bool is_refused(const T& offer) noexcept {
    return offer.refused_;
  }
  template <typename T>
  static const BufferSlice& destination(const T& offer) noexcept {
    return offer.to_;
  }
  /// Whether the application has accepted a peer's request.
  template <typename T>
  static bool is_accepted(const T& request) noexcept {
    if constexpr (requires { request.accepted_; })
      return request.accepted_;
    else
      return request.decision_ == T::Decision::accepted;
  }
  template <typename T>
  static std::uint64_t lease_tag(const T& request) noexcept {
    return request.lease_tag_;
  }
  /// The private data with which it has.
  template <typename T>
  static const auto& private_data(const T& request) noexcept {
    return request.ours_;
  }
  template <typename T>
  static std::uint32_t refusal_code(const T& request) noexcept {
    return request.code_;
  }
  template <typename T>
  static const auto& refusal_goodbye(const T& request) noexcept {
    return request.goodbye_;
  }
  template <typename T>
  static std::string_view refusal_text(const T& request) noexcept {
    return {std::data(request.text_), request.length_};
  }
  template <typename T>
  static auto* core(const T& engine) noexcept {
    return engine.core_.get();
  }
  template <typename T>
  static auto generation(const T& connection) noexcept {
    return connection.generation_;
  }
  /// Names the session, here and at the peer. A name is used again after some thousand sessions.
  template <typename T>
  static std::uint32_t name(const T& session) noexcept {
    return static_cast<std::uint32_t>(session.id_);
  }
};

/// Constructs a type of the public API whose constructor is private.
template <typename T, typename... Args>
[[gnu::always_inline]] inline T make(Args&&... args) noexcept {
  return Internals::make<T>(std::forward<Args>(args)...);
}
/// The block of a buffer, a slice or a message; null if it has none.
template <typename T>
Block* block_of(const T& owner) noexcept {
  return Internals::block(owner);
}
template <typename T>
auto* core_of(const T& engine) noexcept {
  return Internals::core(engine);
}

}  // namespace spinwire::detail
