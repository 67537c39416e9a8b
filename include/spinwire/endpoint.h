// One end of a connection, as applications exchange it out-of-band: through a file, a message of
// their own, or a scheduler's key-value store.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "spinwire/export.h"
#include "spinwire/gid_type.h"
#include "spinwire/identity.h"
#include "spinwire/status.h"

namespace spinwire {

/// Shows that a holder of a key has made an endpoint, with each of its values. An engine with a key
/// gives one to the endpoints of prepared connections, and refuses endpoints of peers without one;
/// see Config::Security. All zeroes: no proof.
struct EndpointProof {
  std::array<std::uint8_t, 16> key{};    ///< tells which key, and is not secret
  std::array<std::uint8_t, 16> nonce{};  ///< random, of this connection alone
  /// The code of the peer's endpoint that was joined before this one was taken; zeroes: none was.
  std::array<std::uint8_t, 32> answers{};
  std::array<std::uint8_t, 32> code{};  ///< an HMAC-SHA-256 of the other values

  /// Whether there is no proof.
  [[nodiscard]] bool empty() const noexcept { return *this == EndpointProof(); }
  friend bool operator==(const EndpointProof&, const EndpointProof&) noexcept = default;
};

/// Tells the other end how to connect its queue pair, and our limits. A program that has the
/// endpoint can connect in place of the intended peer: treat it as a secret, also with a key.
struct Endpoint {
  std::array<std::uint8_t, 16> gid{};      ///< network order; not all zero
  GidType gid_type = GidType::infiniband;  ///< must be the same at both ends
  std::uint16_t lid = 0;                   ///< 1 … 0xbfff on InfiniBand; ignored elsewhere
  std::uint32_t qp_num = 0;                ///< 2 … 0xfffffe
  std::uint32_t psn = 0;                   ///< first packet sequence number sent; 24 bits
  std::uint16_t mtu = 0;                   ///< bytes: 256, 512, 1024, 2048 or 4096
  std::uint32_t max_message = 0;           ///< longest message accepted, bytes; 1 … 2^31
  std::uint32_t eager_bytes = 0;  ///< longest message sent as one SEND; 256 … max_message
  std::uint32_t credits = 0;      ///< messages that the other end may send at first; 0 … 32768
  std::uint64_t incarnation = 0;  ///< random number of this run of the engine; not 0
  std::uint64_t credit_cell_address = 0;  ///< cell to which the other end writes credit; 8-aligned
  std::uint32_t credit_cell_rkey = 0;     ///< its key; not 0
  std::uint32_t credit_cell_token = 0;    ///< random; proves who wrote a word there; not 0
  std::uint32_t peer_timeout_ms = 0;      ///< longest silence that this end accepts; 25 … 3600000
  std::uint8_t max_rd_atomic = 0;         ///< READs and atomics accepted at once: responder_depth
  /// The end of a raw connection: only address, queue pair, PSN, MTU and max_rd_atomic are used.
  /// For a peer that is not a Spinwire engine, fill in these and set `raw`.
  bool raw = false;
  /// This end takes private data in an answer, the code of a refusal, and the tags of leases. Older
  /// releases do not.
  bool application_fields = false;
  PrivateData private_data{};  ///< of this end's application, for the other end's
  /// This end understands a goodbye with a reason.
  bool goodbye_reasons = false;
  EndpointProof proof{};  ///< out-of-band only
  friend bool operator==(const Endpoint&, const Endpoint&) noexcept = default;

  /// Formats the endpoint as one line of printable ASCII, for parse(). Set-up; any thread.
  [[nodiscard]] SPINWIRE_API std::string text() const;
  /// Parses the output of text(), with its words in any order, and checks every field. A raw
  /// endpoint has only the fields that it uses. Set-up; any thread. Errors: invalid_argument (names
  /// the word and the allowed values), protocol (a value that no endpoint can have).
  [[nodiscard]] SPINWIRE_API static Result<Endpoint> parse(std::string_view text);
};

}  // namespace spinwire
