// One end of a connection, as the other end has to know it: for applications that exchange
// endpoints out-of-band, through a file, a message of their own, or a scheduler's key-value store.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "spinwire/export.h"
#include "spinwire/gid_type.h"
#include "spinwire/status.h"

namespace spinwire {

/// What the other end needs to connect its queue pair and to respect our limits. A program that has
/// it can connect in the place of the intended peer: treat it as a secret.
struct Endpoint {
  std::array<std::uint8_t, 16> gid{};  ///< network order; not all zero
  GidType gid_type = GidType::infiniband;
  std::uint16_t lid = 0;          ///< 1 … 0xbfff on InfiniBand, ignored else
  std::uint32_t qp_num = 0;       ///< 2 … 0xfffffe
  std::uint32_t psn = 0;          ///< first packet sequence number sent; 24 bits
  std::uint16_t mtu = 0;          ///< bytes: 256, 512, 1024, 2048 or 4096
  std::uint32_t max_message = 0;  ///< longest message accepted, bytes; 1 … 2^31
  std::uint32_t eager_bytes = 0;  ///< longest message in one SEND; 1 … max_message
  std::uint32_t credits = 0;      ///< messages that the other end may send at first; 0 … 32768
  std::uint64_t incarnation = 0;  ///< random, one per engine's life; not 0
  std::uint64_t control_address = 0;  ///< cell to which the other end writes credit; 8-aligned
  std::uint32_t control_rkey = 0;     ///< its key; not 0
  std::uint32_t control_token = 0;    ///< random; part of each word written there; not 0
  std::uint32_t peer_timeout_ms = 0;  ///< longest silence that this end accepts; 1 … 3600000
  std::uint8_t max_rd_atomic = 0;     ///< READs and atomics accepted at once
  /// The end of a raw connection: only address, queue pair, PSN, MTU and max_rd_atomic are used.
  /// For a peer that is not a Spinwire engine, fill in those and set this.
  bool raw = false;
  friend bool operator==(const Endpoint&, const Endpoint&) noexcept = default;

  /// One line of printable ASCII, for parse(). Set-up; any thread.
  [[nodiscard]] SPINWIRE_API std::string text() const;
  /// Parses what text() wrote, in any order of words, and checks every field. Set-up; any thread.
  /// Errors: invalid_argument (names the word and what is allowed), protocol (a value that no
  /// endpoint can have).
  [[nodiscard]] SPINWIRE_API static Result<Endpoint> parse(std::string_view text);
};

}  // namespace spinwire
