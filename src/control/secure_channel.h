// The two ends of a TCP stream prove to each other that they have the same key, and encrypt every
// frame: Noise_NNpsk0 (noise.h) in the frames of wire/handshake.h. An exchange owns one. Cold.
//
//   client                                     server
//   make_request()   -- authenticate -->       read_request()
//   read_answer()    <-- authenticated --      its answer
//   seal()           -- sealed -->             open()
//   open()           <-- sealed --             seal()
//
// Bound by the prologue: the protocol, the version range and features of the client, and the
// identity and name of the key. Bound by the answer's payload: the server's version range and
// features. So nothing that was said in the clear can be altered unseen. Each direction has its own
// key and count: a frame that is replayed, reflected, reordered, cut or altered is not accepted.
//
// A request may have been recorded and sent again. So a server knows that its client has the key
// only when the first sealed frame opens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "control/key_ring.h"
#include "control/noise.h"
#include "spinwire/status.h"
#include "wire/handshake.h"

namespace spinwire::control {

/// Why a peer is not authenticated, or is no more.
enum class AuthenticationFailure : std::uint8_t {
  none,
  no_proof,     ///< inbound: the peer does not begin with `authenticate`, or is gone before
  unknown_key,  ///< inbound: a key that is not in our file
  wrong_proof,  ///< inbound: made with other bytes than our key, its name and the frame; or ours
  /// Inbound: no sealed frame that opens came behind the proof. So it may have been recorded.
  unconfirmed_proof,
  unproven_server,  ///< outbound: the server has refused, or its answer does not prove our key
  altered_frame,    ///< a sealed frame that the peer has not sealed, or not at this place
};
inline constexpr std::size_t kAuthenticationFailures =
    static_cast<std::size_t>(AuthenticationFailure::altered_frame) + 1;

/// Counts of the peers of a port that has keys.
struct AuthenticationCounts {
  /// Handshakes whose peer has proved a key, in each direction: a server by its answer, a client by
  /// its first sealed frame. So the counts of two ends may differ.
  std::uint64_t authenticated = 0;
  /// Handshakes that failed or ended without a proof, by AuthenticationFailure.
  std::array<std::uint64_t, kAuthenticationFailures> failures{};

  void count(AuthenticationFailure why) noexcept { ++failures[static_cast<std::size_t>(why)]; }
};

/// The requests of one engine that await their answer, so that its server does not take one of them
/// for a request of another engine: a host on the way could lead a client to itself.
class OwnRequests {
 public:
  using PublicKey = std::array<std::byte, 32>;
  /// May throw std::bad_alloc.
  void add(const PublicKey& ephemeral, int fd) { entries_.push_back({ephemeral, fd}); }
  void remove(const PublicKey& ephemeral) noexcept;
  /// The socket of the request that a message begins with; -1: it is of another engine.
  [[nodiscard]] int find(std::span<const std::byte> message) const noexcept;

 private:
  struct Entry {
    PublicKey ephemeral;
    int fd;
  };
  std::vector<Entry> entries_;
};

/// Begins a Noise handshake with a key. The prologue is the context, the header, the identity of
/// the key, and its name behind its length. `context`: names the protocol, at most 32 bytes.
/// `header`: what was said in the clear before, at most 16 bytes.
void begin_noise(NoiseHandshake& noise, const Key& key, std::string_view context,
                 std::span<const std::byte> header) noexcept;
/// Random numbers for a Noise handshake. Errors: system.
Result<NoiseSecret> make_ephemeral();

class SecureChannel {
 public:
  enum class State : std::uint8_t {
    off,             ///< no key: frames travel in the clear
    awaits_request,  ///< a server's first state; left by read_request()
    before_request,  ///< a client's first state; left by make_request()
    awaits_answer,   ///< left by read_answer()
    answered,        ///< a server's: the client must show that it can seal; left by open()
    authenticated,   ///< left by reset() only
  };

  /// Resets the channel. Null: no key. `keys` must outlive the channel, but may be given other
  /// keys: those count until the proof is made or read, and none of them afterwards.
  /// `own`: the requests of this engine; must outlive the channel, unless reset() comes before.
  void begin(const KeyRing* keys, bool is_client, OwnRequests* own = nullptr) noexcept;
  void reset() noexcept;

  [[nodiscard]] State state() const noexcept { return state_; }
  [[nodiscard]] bool is_open() const noexcept { return state_ == State::off || seals(); }
  [[nodiscard]] bool is_client() const noexcept { return is_client_; }
  [[nodiscard]] bool seals() const noexcept {
    return state_ == State::answered || state_ == State::authenticated;
  }
  [[nodiscard]] bool is_authenticated() const noexcept { return state_ == State::authenticated; }
  /// The key in use. Empty: none yet.
  [[nodiscard]] const KeyName& key() const noexcept { return key_; }
  /// The kinds of frame that may come in the clear now; before is_open(), or if it seals.
  [[nodiscard]] wire::KindSet expected() const noexcept;

  /// Client; `fd` names its socket. May throw std::bad_alloc. Errors: system (no random numbers).
  Result<wire::Frame> make_request(int fd);
  /// The decoded header of a frame, and its bytes.
  struct Header {
    const wire::FrameHeader& fields;
    std::span<const std::byte> bytes;
  };
  /// Server: checks the request. Sets `answer`, unless that fails. A peer without the key costs no
  /// Diffie-Hellman operation. Errors: system.
  Result<AuthenticationFailure> read_request(const Header& header,
                                             const wire::Authenticate& request,
                                             wire::Frame& answer);
  /// Client: whether the answer proves our key.
  bool read_answer(const Header& header, const wire::Authenticated& answer) noexcept;

  /// Encrypts a frame. The next frame in this direction must be sent after it.
  [[nodiscard]] wire::SealedFrame seal(const wire::Frame& frame) noexcept;
  /// Decrypts the body of a sealed frame: `sealed.size()` - wire::kSealTagBytes bytes. False: it is
  /// altered, or out of place.
  bool open(const wire::FrameHeader& header, std::span<const std::byte> sealed,
            std::byte* to) noexcept;

 private:
  void finish(const wire::FrameHeader& theirs, State next) noexcept;
  void forget_request() noexcept;

  State state_ = State::off;
  bool is_client_ = false;
  bool is_listed_ = false;  ///< our request is in own_
  const KeyRing* keys_ = nullptr;
  KeyName key_;
  OwnRequests* own_ = nullptr;
  OwnRequests::PublicKey ephemeral_{};  ///< of our request
  wire::VersionRange their_versions_;
  NoiseHandshake noise_;
  NoiseCipher sending_;
  NoiseCipher receiving_;
};

}  // namespace spinwire::control
