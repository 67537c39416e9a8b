// An attacker between two ends that have a key, who puts other bytes in place of each frame of a
// connection: neither end hears of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "control/authentication_fixture.h"

namespace authentication_test {
namespace {

/// One frame of a connection.
struct Victim {
  From from;
  std::size_t number;
  std::size_t size;  ///< bytes of the frame
};
// The frames of a connection, in their order.
const std::vector<Victim> kFrames{{From::client, 0, 16 + 64},
                                  {From::server, 0, 16 + 64},
                                  {From::client, 1, 16 + 16 + 70 + 16},
                                  {From::server, 1, 16 + 16 + 70 + 16},
                                  {From::client, 2, 16 + 16 + 8 + 16}};

class AlteredFrames : public Authentication {
 protected:
  /// How many frames the two owners have heard of.
  [[nodiscard]] std::size_t heard() const {
    return (listener_->offered ? 1u : 0u) + (client_owner_.saw("accept 11") ? 1u : 0u) +
           (server_owner_.saw("confirmed 77") ? 1u : 0u);
  }
  /// Clients that have not proved the key to the server.
  [[nodiscard]] std::uint64_t unproved() const {
    return failures(server_, AuthenticationFailure::no_proof) +
           failures(server_, AuthenticationFailure::unknown_key) +
           failures(server_, AuthenticationFailure::wrong_proof) +
           failures(server_, AuthenticationFailure::unconfirmed_proof);
  }
  /// Puts other bytes in place of a frame, passes all others on, and expects that neither owner
  /// hears of the frame, nor of one behind it.
  void expect_unheard(std::size_t frame, const std::function<Bytes(Bytes)>& alter) {
    const Victim& victim = kFrames[frame];
    const std::uint64_t before = unproved();
    bool seen = false;
    Relay relay(server_address(), [&](const Passing& p) -> std::vector<Bytes> {
      if (p.from != victim.from || p.number != victim.number) return {p.frame};
      EXPECT_EQ(p.frame.size(), victim.size);
      seen = true;
      return {alter(p.frame)};
    });
    connect_through(relay, &seen);
    EXPECT_TRUE(seen);
    EXPECT_EQ(heard(), frame < 2 ? 0 : frame - 2);
    // The server has accepted the proof alone, or the hello with it.
    EXPECT_EQ(unproved() - before, frame < 3 ? 1u : 0u);
    forget();
  }
};

TEST_F(AlteredFrames, ABitOfEachByteCounts) {
  use(kKey);
  for (std::size_t frame = 0; frame < kFrames.size(); ++frame) {
    for (std::size_t at = 0; at < kFrames[frame].size; ++at) {
      SCOPED_TRACE("frame " + std::to_string(frame) + ", byte " + std::to_string(at));
      expect_unheard(frame, [&](Bytes bytes) {
        bytes[at] ^= static_cast<std::byte>(1u << (at + frame) % 8);
        return bytes;
      });
      if (HasFailure()) return;
    }
  }
}

// What both ends offer is sealed but for the versions, which the first frames say in the clear, and
// which their proof covers.
TEST_F(AlteredFrames, ADowngradeIsNotHeard) {
  constexpr std::size_t kVersions = 4, kFeatures = 12;  // in the header
  use(kKey);
  for (const std::size_t frame : {0u, 1u}) {
    SCOPED_TRACE("frame " + std::to_string(frame));
    expect_unheard(frame, [](Bytes bytes) {  // from version 0 on
      std::fill_n(bytes.begin() + kVersions, 2, std::byte{});
      return bytes;
    });
    expect_unheard(frame, [](Bytes bytes) {
      EXPECT_TRUE(std::all_of(bytes.begin() + kFeatures, bytes.begin() + kFeatures + 4,
                              [](std::byte b) { return b == std::byte{}; }));
      bytes[kFeatures] = std::byte{0xff};
      return bytes;
    });
  }
}

TEST_F(AlteredFrames, ACutFrameIsNotHeard) {
  use(kKey);
  for (std::size_t frame = 0; frame < kFrames.size(); ++frame) {
    for (std::size_t size = 0; size < kFrames[frame].size; size += 5) {
      SCOPED_TRACE("frame " + std::to_string(frame) + ", cut to " + std::to_string(size));
      expect_unheard(frame, [&](Bytes bytes) {
        bytes.resize(size);
        return bytes;
      });
      if (HasFailure()) return;
    }
  }
}

TEST_F(AlteredFrames, AnotherHandshakesFrameIsNotHeard) {
  use(kKey);
  Relay earlier(server_address());
  connect_through(earlier);
  forget();
  // Without the first, which begins a handshake of its own: AReplayedHandshakeGetsNothing.
  for (std::size_t frame = 1; frame < kFrames.size(); ++frame) {
    SCOPED_TRACE("frame " + std::to_string(frame));
    expect_unheard(frame, [&](const Bytes&) { return earlier.passed()[frame].frame; });
  }
}

TEST_F(AlteredFrames, FramesInTheClearAreNotHeard) {
  use(kKey);
  const std::vector<wire::Frame> clear{
      wire::encode(wire::Hello{endpoint(101, kClientIncarnation)}),
      wire::encode(wire::Accept{endpoint(202, kServerIncarnation)}),
      wire::encode(wire::Hello{endpoint(101, kClientIncarnation)}),
      wire::encode(wire::Accept{endpoint(202, kServerIncarnation)}),
      wire::encode(wire::Ready{kServerIncarnation})};
  for (std::size_t frame = 0; frame < kFrames.size(); ++frame) {
    SCOPED_TRACE("frame " + std::to_string(frame));
    expect_unheard(frame, [&](const Bytes&) { return bytes_of(clear[frame]); });
  }
}

}  // namespace
}  // namespace authentication_test
