// One end of a connection as the other end has to know it, for applications that bring the two
// together by hand: over a file, a message of their own, a scheduler's key-value store.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "spinwire/export.h"
#include "spinwire/gid_type.h"
#include "spinwire/status.h"

namespace spinwire {

/// What the other end needs to bring its queue pair up and to stay inside our limits. Whoever has
/// it can connect in the place of whom it was meant for: treat it as a secret.
struct Endpoint {
  std::array<std::uint8_t, 16> gid{};  ///< network order; not all zero
  GidType gid_type = GidType::infiniband;
  std::uint16_t lid = 0;              ///< 1 … 0xbfff on InfiniBand, ignored else
  std::uint32_t qp_num = 0;           ///< 2 … 0xfffffe
  std::uint32_t psn = 0;              ///< first packet sequence number sent; 24 bits
  std::uint16_t mtu = 0;              ///< bytes: 256, 512, 1024, 2048 or 4096
  std::uint32_t max_message = 0;      ///< longest message accepted, bytes; 1 … 2^31
  std::uint32_t eager_bytes = 0;      ///< those up to here arrive as one SEND; 1 … max_message
  std::uint32_t credits = 0;          ///< messages the other end may send at first; 0 … 32768
  std::uint64_t incarnation = 0;      ///< random, one per engine's life; not 0
  std::uint64_t control_address = 0;  ///< cell that the other end may write credits to; 8-aligned
  std::uint32_t control_rkey = 0;     ///< its key; not 0
  std::uint8_t max_rd_atomic = 0;     ///< READs and atomics accepted at once
  /// The end of a raw connection, of which only address, queue pair, PSN, MTU and the READs mean
  /// something: for a peer that is no Spinwire engine, fill in those and set this.
  bool raw = false;
  friend bool operator==(const Endpoint&, const Endpoint&) noexcept = default;

  /// One line of printable ASCII that parse() reads back. Set-up; any thread.
  [[nodiscard]] SPINWIRE_API std::string text() const;
  /// Reads what text() wrote; words may be in any order and any amount of white space apart. Every
  /// field is checked. Set-up; any thread. Errors: invalid_argument naming the word, what is wrong
  /// with it and what is allowed; protocol for a value that no endpoint can have.
  SPINWIRE_API static Result<Endpoint> parse(std::string_view text);
};

}  // namespace spinwire
