// Identity: who a peer is, what its application says of itself in the handshake, and whether ours
// accepts it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "spinwire/export.h"
#include "spinwire/goodbye.h"
#include "spinwire/status.h"

namespace spinwire {

/// Most bytes of private data.
inline constexpr std::size_t kPrivateDataMax = 256;

/// Bytes of the application's own that one end gives to the other in the handshake. Plain data.
class PrivateData {
 public:
  constexpr PrivateData() noexcept = default;
  /// Copies the bytes. Errors: invalid_argument (more than kPrivateDataMax; nothing changes).
  constexpr Status assign(std::span<const std::byte> bytes) noexcept {
    if (bytes.size() > kPrivateDataMax) return Status::invalid_argument;
    std::copy(bytes.begin(), bytes.end(), storage_.begin());
    size_ = static_cast<std::uint16_t>(bytes.size());
    return Status::ok;
  }
  /// The bytes; none if empty.
  [[nodiscard]] constexpr std::span<const std::byte> bytes() const noexcept {
    return {storage_.data(), size_};
  }
  /// Whether there are no bytes.
  [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }

  friend constexpr bool operator==(const PrivateData& a, const PrivateData& b) noexcept {
    return std::equal(a.bytes().begin(), a.bytes().end(), b.bytes().begin(), b.bytes().end());
  }

 private:
  std::uint16_t size_ = 0;
  std::array<std::byte, kPrivateDataMax> storage_{};
};

/// A peer, as its handshake has shown it. Refers to memory of the engine: the function that answers
/// it says for how long.
struct PeerIdentity {
  std::string_view address;  ///< "address:port" of its TCP end; as Connection::peer()
  /// Name of the key that it has proved, of our security.key_file; empty: the engine has no key, or
  /// PrepareOptions::peer_has_no_key has let the peer in.
  std::string_view key;
  std::span<const std::byte> private_data;  ///< its application's; empty: it gave none
};

/// Most bytes of the text of a refusal.
inline constexpr std::size_t kRefusalTextMax = 200;

/// A peer asks for a connection or a session. Nothing has been made for the peer yet. Valid during
/// its callback, which accepts or refuses the peer; the last call counts. A peer that is neither
/// accepted nor refused, because of an exception for example, is refused with the code 0. Set-up.
class PeerRequest {
 public:
  PeerRequest(const PeerRequest&) = delete;
  PeerRequest& operator=(const PeerRequest&) = delete;

  /// The peer. Valid during the callback.
  [[nodiscard]] const PeerIdentity& peer() const noexcept { return peer_; }
  /// Accepts the peer, and gives it ListenOptions::private_data. The engine may still refuse it: a
  /// limit may be reached.
  void accept() noexcept { decision_ = Decision::accepted; }
  /// Accepts the peer, and gives it these bytes instead. Errors, which change nothing:
  ///   invalid_argument  more than kPrivateDataMax bytes
  ///   unsupported       through rdma_cm, the peer is of an older release, which takes none there
  Status accept(std::span<const std::byte> private_data) noexcept {
    if (!carries_data_ && !private_data.empty()) return Status::unsupported;
    const Status assigned = ours_.assign(private_data);
    if (assigned == Status::ok) accept();
    return assigned;
  }
  /// Refuses the peer. Its on_closed gets an Error with the status `refused`, this code, and up to
  /// kRefusalTextMax bytes of the text (through rdma_cm 127, with a key 107); '?' replaces bytes
  /// that are not printable ASCII. The refusal is final: a peer that reconnects ends, too. The text
  /// is copied.
  ///
  /// With `retry_after`, the refusal is not final: the peer also gets Error::goodbye, with the
  /// reason `overloaded` and this time, and a peer that reconnects comes back after it. Up to
  /// kMaxRetryAfter, for which longer times count; in whole milliseconds, rounded up. Through
  /// rdma_cm it takes four bytes of the text. 0 or less: the peer ends, or goes elsewhere. A peer
  /// of an older release that does not take codes cannot tell this refusal from one by the engine.
  void refuse(std::uint32_t code, std::string_view text, Nanoseconds retry_after = {}) noexcept {
    decision_ = Decision::refused;
    code_ = code;
    goodbye_ = {};
    if (retry_after.count() > 0)
      goodbye_ = {GoodbyeReason::overloaded, std::min(retry_after, kMaxRetryAfter)};
    length_ = std::min(text.size(), kRefusalTextMax);
    std::copy_n(text.begin(), length_, text_.begin());
  }

 private:
  friend struct detail::Internals;
  enum class Decision : std::uint8_t { none, accepted, refused };

  PeerRequest(const PeerIdentity& peer, const PrivateData& ours, bool carries_data) noexcept
      : peer_(peer), ours_(ours), carries_data_(carries_data) {}

  PeerIdentity peer_;
  PrivateData ours_;
  bool carries_data_;
  Decision decision_ = Decision::none;
  std::uint32_t code_ = 0;
  Goodbye goodbye_{};
  std::size_t length_ = 0;
  std::array<char, kRefusalTextMax> text_{};
};

}  // namespace spinwire
