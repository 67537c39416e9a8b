// An inbound message, and the offer of a rendezvous message, as callbacks receive them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "spinwire/buffer.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

namespace agent {
struct Agent;
struct EngineContext;
}  // namespace agent

/// An inbound message. Valid during its callback. Hot.
///
/// A message of up to 32 KiB may lie where the peer has written it (connections.direct_messages),
/// and a hostile peer can change it there at any time. If you do not trust the peer, copy the
/// bytes, or take() them, before you validate them.
class Message {
 public:
  /// The payload; empty if is_write().
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
    return {data_, data_ != nullptr ? size_ : 0};
  }
  /// The first byte; null if empty.
  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  /// Length in bytes.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The sender's 32-bit immediate, in host order.
  [[nodiscard]] std::optional<std::uint32_t> immediate() const noexcept {
    return has_immediate_ ? std::optional<std::uint32_t>(immediate_) : std::nullopt;
  }
  /// True if this reports the peer's write_with_imm(): size() is the number of bytes written, and
  /// data() is null, because the peer chose where to write.
  [[nodiscard]] bool is_write() const noexcept { return is_write_; }
  /// Returns the received bytes as a buffer, to keep them beyond the callback. The buffer is the
  /// block that received the message; the engine replaces it while the pool has blocks. A message
  /// in the device's memory is copied. The result is empty if is_write(), if Offer::place() chose
  /// the memory, and when called again; also if the message is longer than connections.eager_bytes
  /// and lies in the device's memory, and the pool memory.rendezvous_bytes has no block for a copy.
  /// EngineStats::unkept_messages counts the last case; bytes() is valid until the callback ends.
  [[nodiscard]] Buffer take() noexcept {
    if (engine_ != nullptr) return take_copy();
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
  /// A message in the device's memory.
  Message(agent::EngineContext* engine, const std::byte* data, std::size_t size) noexcept
      : block_(nullptr),
        data_(data),
        size_(size),
        immediate_(0),
        has_immediate_(false),
        is_write_(false),
        engine_(engine) {}
  /// take() of a message in the device's memory.
  SPINWIRE_API Buffer take_copy() noexcept;

  detail::Block* block_;
  const std::byte* data_;
  std::size_t size_;
  std::uint32_t immediate_;
  bool has_immediate_;
  bool is_write_;
  agent::EngineContext* engine_ = nullptr;  ///< of a message in the device's memory; for take()
};

/// A message longer than connections.eager_bytes, which the engine will read from its sender. Valid
/// during its callback. Hot.
///
/// On a device with direct messages (connections.direct_messages), a connection that had no
/// on_offer handler when it was set up gets messages of up to 32 KiB without an offer. If it has
/// got an on_offer handler since, the handler runs for such a message, too; but the message is
/// there already, and its sender does not learn that it was refused.
class Offer {
 public:
  /// Length in bytes.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The sender's 32-bit immediate, in host order.
  [[nodiscard]] std::optional<std::uint32_t> immediate() const noexcept { return immediate_; }
  /// Receives the message into the first size() bytes of `to`, which are undefined until on_message
  /// runs. Holds a reference to the memory until then. Without place(), or if it answers an error,
  /// the message arrives in a block of the pool memory.rendezvous_bytes. Errors:
  ///   out_of_bounds     `to` is empty or shorter than size()
  ///   invalid_argument  memory of another engine, or that the connection's own domain cannot use
  SPINWIRE_API Status place(const BufferSlice& to) noexcept;
  /// Refuses the message: the sender's operation ends as `refused`, and on_message does not run.
  void refuse() noexcept { refused_ = true; }

 private:
  friend struct detail::Internals;

  Offer(const agent::EngineContext* engine, const agent::Agent* connection, std::size_t size,
        std::optional<std::uint32_t> immediate) noexcept
      : engine_(engine), connection_(connection), size_(size), immediate_(immediate) {}

  const agent::EngineContext* engine_;  ///< whose memory place() takes
  const agent::Agent* connection_;      ///< that the message arrives on
  std::size_t size_;
  std::optional<std::uint32_t> immediate_;
  BufferSlice to_;
  bool refused_ = false;
};

}  // namespace spinwire
