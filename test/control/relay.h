// An attacker between a client and a server: passes on, alters, drops or replaces each frame.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "control/loopback.h"
#include "wire/codec.h"
#include "wire/handshake.h"

namespace relay_test {

namespace control = spinwire::control;
namespace wire = spinwire::wire;
using spinwire::base::UniqueFd;
using Bytes = std::vector<std::byte>;

enum class From { client, server };

inline wire::FrameKind kind_of(std::span<const std::byte> frame) {
  return static_cast<wire::FrameKind>(wire::get_number<std::uint16_t>(frame.data() + 8));
}

/// One frame on its way.
struct Passing {
  From from;
  std::size_t number;  ///< of the frames of that end, from 0
  Bytes frame;
};

class Relay {
 public:
  /// What becomes of a frame: whole frames, or other bytes, that go on in its place.
  using Hook = std::function<std::vector<Bytes>(const Passing&)>;

  explicit Relay(const control::Address& server, Hook hook = {})
      : server_(server), hook_(std::move(hook)) {}

  /// Where the client connects.
  [[nodiscard]] const control::Address& address() const { return listener_.local(); }
  /// All that has passed, as it was sent.
  [[nodiscard]] const std::vector<Passing>& passed() const { return passed_; }

  /// Moves what is there.
  void pump() {
    if (!ends_[0].fd) {
      auto accepted = listener_.accept();
      if (!accepted || !*accepted) return;
      ends_[0].fd = std::move((**accepted).fd);
      ends_[1].fd = loopback::plain_client(server_);
    }
    move(From::client);
    move(From::server);
  }
  /// Sends bytes to one end, as if they came from the other.
  void say(From from, std::span<const std::byte> bytes) const {
    (void)::send(end(from == From::client ? From::server : From::client).fd.get(), bytes.data(),
                 bytes.size(), MSG_NOSIGNAL);
  }
  /// Ends both streams; what was sent arrives before.
  void cut() {
    cut_ = true;
    for (End& e : ends_)
      if (e.fd) ::shutdown(e.fd.get(), SHUT_WR);
  }

 private:
  struct End {
    UniqueFd fd;
    Bytes buffer;
    std::size_t frames = 0;
  };
  [[nodiscard]] const End& end(From which) const { return ends_[which == From::client ? 0 : 1]; }
  [[nodiscard]] End& end(From which) { return ends_[which == From::client ? 0 : 1]; }

  void move(From from) {
    End& e = end(from);
    std::array<std::byte, 2048> part;
    const ssize_t got = ::recv(e.fd.get(), part.data(), part.size(), MSG_DONTWAIT);
    if (got > 0) e.buffer.insert(e.buffer.end(), part.begin(), part.begin() + got);
    while (e.buffer.size() >= wire::kHeaderBytes) {
      const std::size_t size =
          wire::kHeaderBytes + wire::get_number<std::uint16_t>(e.buffer.data() + 10);
      if (e.buffer.size() < size) break;
      const auto at = e.buffer.begin() + static_cast<std::ptrdiff_t>(size);
      passed_.push_back({from, e.frames++, Bytes(e.buffer.begin(), at)});
      e.buffer.erase(e.buffer.begin(), at);
      if (cut_) continue;
      const Passing frame = passed_.back();  // the hook may end the relay's streams
      if (!hook_) {
        say(from, frame.frame);
      } else {
        for (const Bytes& bytes : hook_(frame)) say(from, bytes);
      }
    }
    if (got == 0 && !cut_)
      ::shutdown(end(from == From::client ? From::server : From::client).fd.get(), SHUT_WR);
  }

  control::Address server_;
  Hook hook_;
  control::ListenSocket listener_ = loopback::listener();
  std::array<End, 2> ends_;  ///< the client's, then the server's
  std::vector<Passing> passed_;
  bool cut_ = false;
};

}  // namespace relay_test
