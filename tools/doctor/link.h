// The doctors' own connection: TCP, because it has to work where RDMA does not. Frames of a kind
// and a text:
//
//   client                   server
//   facts (of its host)    →
//                          ← busy (how many are served before)   again and again while it serves
//                                                    another client (waiting_room.h)
//                          ← facts (of its host, and where its engine listens)
//   clock                  →                                                     16 times, if both
//                          ← clock (when this came, and when the answer left)    know it (clocks.h)
//   (both engines measure)
//   endpoint (ours)        →
//                          ← endpoint (its own)      once, if both know it (out_of_band.h)
//   end                    →
//
// A client that certifies goes on, with facts that request something and facts that answer; see
// certify_pair.h. The server answers `request=begin` only if an engine that connected, and with a
// key proved it, has said the client's nonce.
//
// A frame is a header of 12 bytes (magic, version, kind, length; little-endian) and the text. A
// text longer than kMostText, and a header with another magic, end the connection.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "spinwire/status.h"

namespace spinwire::doctor {

inline constexpr int kLinkPort = 18516;
inline constexpr std::uint16_t kLinkVersion = 1;
inline constexpr std::size_t kMostText = 16 << 10;

/// What a host says of itself: names and values, without line ends.
using Facts = std::map<std::string, std::string, std::less<>>;
[[nodiscard]] std::string encode_facts(const Facts& facts);
/// Lines without '=', and more than 200 facts, are left out. Bytes that are not printable become
/// '?'.
[[nodiscard]] Facts decode_facts(std::string_view text);
/// The value, or an empty text. A peer chooses the texts of its facts, so no command that a user is
/// told to run has one: use number_fact() and interface_fact() there.
[[nodiscard]] std::string fact(const Facts& facts, std::string_view name);
/// A value that is a decimal number of 1 to `most` and nothing else.
[[nodiscard]] std::optional<std::uint32_t> number_fact(const Facts& facts, std::string_view name,
                                                       std::uint32_t most);
/// A value that is a name of a network interface; else "INTERFACE".
[[nodiscard]] std::string interface_fact(const Facts& facts, std::string_view name);

enum class LinkKind : std::uint16_t { facts = 1, end = 2, clock = 3, endpoint = 4, busy = 5 };

/// A TCP socket with deadlines. The destructor closes it.
class Link {
 public:
  using Limit = std::chrono::milliseconds;

  explicit Link(int fd) noexcept : fd_(fd) {}
  Link(Link&& other) noexcept;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link();

  /// Connects to "host" and a port. Errors: invalid_argument (no such host), timed_out, refused,
  /// system.
  static Result<Link> connect(const std::string& host, int port, Limit limit);
  /// Listens at an address of this host. Errors: invalid_argument, in_use, system.
  static Result<Link> listen(const std::string& address, int port);
  /// The next client; negative, after `limit`: none came, or none can be taken now.
  [[nodiscard]] int accept(Limit limit) const;

  /// Errors: timed_out, peer_lost.
  [[nodiscard]] Result<void> send(LinkKind kind, std::string_view text, Limit limit);
  /// Errors: timed_out, peer_lost, protocol (malformed, too long, another kind), unsupported
  /// (another version of the protocol, which the error names).
  [[nodiscard]] Result<std::string> receive(LinkKind kind, Limit limit);
  /// A frame of one of two kinds. Errors: those of receive().
  struct Frame {
    LinkKind kind;
    std::string text;
  };
  [[nodiscard]] Result<Frame> receive_either(LinkKind one, LinkKind other, Limit limit);
  /// The text of a frame of that kind, which receive() returns again. Nothing: no such frame has
  /// come as a whole. Does not wait.
  [[nodiscard]] std::optional<std::string> peek(LinkKind kind) const;
  /// Whether the peer has sent something or has closed; waits for it until `limit`.
  [[nodiscard]] bool is_readable(Limit limit = Limit(0)) const noexcept;
  /// The kind of the frame that has come and was not received yet; `end` also if the peer has
  /// closed, or sends no frames. Nothing: no whole header is there. Does not wait.
  [[nodiscard]] std::optional<LinkKind> next_kind() const noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_; }

  /// Numeric address of the peer, and of a listener; an IPv6 address in brackets.
  [[nodiscard]] std::string peer_host() const;
  [[nodiscard]] std::string local_address() const;

 private:
  int fd_;
};

/// "host", "host:port" or "[v6]:port". False: no such form.
[[nodiscard]] bool split_address(std::string_view text, std::string& host, int& port);

}  // namespace spinwire::doctor
