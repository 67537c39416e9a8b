// The handshake Noise_NNpsk0_25519_ChaChaPoly_SHA256 of the Noise protocol framework, revision 34
// (noiseprotocol.org), by libsodium: two ends that have the same pre-shared key prove that to each
// other and agree on two new keys, one for each direction. Nothing here is our own invention; the
// names follow the specification. Cold.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace spinwire::control {

inline constexpr std::size_t kNoiseTagBytes = 16;
/// A handshake message without its payload: an ephemeral public key and a tag.
inline constexpr std::size_t kNoiseMessageBytes = 32 + kNoiseTagBytes;

/// Where the bytes of a message go in a struct of wire/.
inline std::byte* room_in(auto& bytes) noexcept {
  return std::as_writable_bytes(std::span(bytes)).data();
}
/// Room for the payload of an empty message.
inline std::byte no_payload{};

/// 32 secret bytes, zeroed when they are dropped.
struct NoiseSecret {
  std::array<std::uint8_t, 32> bytes{};

  NoiseSecret() noexcept = default;
  NoiseSecret(const NoiseSecret&) noexcept = default;
  NoiseSecret& operator=(const NoiseSecret&) noexcept = default;
  ~NoiseSecret() { clear(); }
  void clear() noexcept;
};

/// A pre-shared key, as the token `psk` mixes it in: before that token a handshake has the same
/// chaining key every time, so the work is done once.
class NoisePsk {
 public:
  NoisePsk() noexcept = default;
  explicit NoisePsk(const NoiseSecret& psk) noexcept;
  void clear() noexcept;

 private:
  friend class NoiseHandshake;
  NoiseSecret chaining_key_;
  NoiseSecret hash_;
  NoiseSecret key_;
};

/// A key and a counter, for one direction: CipherState of the specification.
class NoiseCipher {
 public:
  void set_key(const NoiseSecret& key) noexcept;
  void clear() noexcept;

  /// Writes text.size() + kNoiseTagBytes bytes. False: the counter is used up.
  bool encrypt(std::span<const std::byte> associated, std::span<const std::byte> text,
               std::byte* to) noexcept;
  /// Writes sealed.size() - kNoiseTagBytes bytes. False: not sealed with this key at this count, or
  /// altered; the count stays.
  bool decrypt(std::span<const std::byte> associated, std::span<const std::byte> sealed,
               std::byte* to) noexcept;

 private:
  NoiseSecret key_;
  std::uint64_t count_ = 0;
};

/// The handshake of either end, in this order:
///   initiator  begin()  write_first()                   read_second()  split()
///   responder  begin()                 read_first()  write_second()    split()
/// After a false the handshake is over. A reader writes the payload, message.size() -
/// kNoiseMessageBytes bytes.
class NoiseHandshake {
 public:
  /// `prologue`: what both ends must agree on.
  void begin(const NoisePsk& psk, std::span<const std::byte> prologue) noexcept;

  /// `ephemeral`: random, for this handshake alone.
  bool write_first(const NoiseSecret& ephemeral, std::span<const std::byte> payload,
                   std::byte* to) noexcept;
  /// Costs no Diffie-Hellman operation: the key alone decides.
  bool read_first(std::span<const std::byte> message, std::byte* payload) noexcept;
  bool write_second(const NoiseSecret& ephemeral, std::span<const std::byte> payload,
                    std::byte* to) noexcept;
  bool read_second(std::span<const std::byte> message, std::byte* payload) noexcept;

  /// The keys of the two directions.
  void split(NoiseCipher& from_initiator, NoiseCipher& from_responder) noexcept;
  /// Equal at both ends, and different for each handshake. Only tests compare it.
  [[nodiscard]] const std::array<std::uint8_t, 32>& hash() const noexcept { return hash_; }
  void clear() noexcept;

 private:
  using PublicKey = std::array<std::uint8_t, 32>;

  void mix_hash(std::span<const std::uint8_t> bytes) noexcept;
  void mix_key(std::span<const std::uint8_t> material) noexcept;
  void mix_psk() noexcept;
  void mix_ephemeral(const PublicKey& key) noexcept;
  bool mix_both(const PublicKey& second, const NoiseSecret& ours, const PublicKey& theirs) noexcept;
  PublicKey put_ephemeral(const NoiseSecret& ephemeral, std::byte* to) noexcept;
  bool seal(std::span<const std::byte> payload, std::byte* to) noexcept;
  bool open(std::span<const std::byte> sealed, std::byte* to) noexcept;

  NoiseSecret chaining_key_;
  std::array<std::uint8_t, 32> hash_{};
  NoiseCipher cipher_;
  NoisePsk psk_;
  NoiseSecret ephemeral_;
  PublicKey theirs_{};
};

}  // namespace spinwire::control
