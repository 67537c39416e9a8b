// An inbound message, and the offer of a long one, as callbacks receive them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "spinwire/buffer.h"
#include "spinwire/export.h"

namespace spinwire {

/// An inbound message. Valid during its callback. Hot.
class Message {
 public:
  /// The payload; empty if is_write().
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {data_, data_ != nullptr ? size_ : 0};
  }
  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The sender's 32-bit immediate, in host order.
  [[nodiscard]] std::optional<std::uint32_t> immediate() const noexcept {
    return has_immediate_ ? std::optional<std::uint32_t>(immediate_) : std::nullopt;
  }
  /// True if this reports the peer's write_with_imm(): size() is the number of bytes written, and
  /// data() is null, as the peer chose where to write.
  [[nodiscard]] bool is_write() const noexcept { return is_write_; }
  /// Takes the buffer with the received bytes, to keep it beyond the callback. The engine replaces
  /// it from the receive pool, as long as that has blocks. Empty if is_write(), if Offer::place()
  /// chose the place, and when called again.
  [[nodiscard]] Buffer take() noexcept {
    Buffer taken(block_, block_ != nullptr ? size_ : 0);
    block_ = nullptr;
    return taken;
  }

 private:
  friend struct detail::Internals;

  Message(detail::Block* block, const std::byte* data, std::size_t size, std::uint32_t immediate,
          bool has_immediate, bool is_write) noexcept
      : block_(block),
        data_(data),
        size_(size),
        immediate_(immediate),
        has_immediate_(has_immediate),
        is_write_(is_write) {}

  detail::Block* block_;
  const std::byte* data_;
  std::size_t size_;
  std::uint32_t immediate_;
  bool has_immediate_;
  bool is_write_;
};

/// A message longer than connections.eager_bytes, which the engine is about to read from its
/// sender. Valid during its callback. Hot.
class Offer {
 public:
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The sender's 32-bit immediate, in host order.
  [[nodiscard]] std::optional<std::uint32_t> immediate() const noexcept { return immediate_; }
  /// Receives the message into the first size() bytes of `to`, which are undefined until on_message
  /// runs. Without place(), it arrives in a block of the pool memory.rendezvous_bytes. False, and
  /// no change, if `to` is empty or shorter than size().
  bool place(const BufferSlice& to) noexcept {
    if (!to || to.size() < size_) return false;
    to_ = to;
    return true;
  }
  /// Refuses the message: the sender's operation ends as `refused`, and on_message does not run.
  void refuse() noexcept { refused_ = true; }

 private:
  friend struct detail::Internals;

  Offer(std::size_t size, std::optional<std::uint32_t> immediate) noexcept
      : size_(size), immediate_(immediate) {}

  std::size_t size_;
  std::optional<std::uint32_t> immediate_;
  BufferSlice to_;
  bool refused_ = false;
};

}  // namespace spinwire
