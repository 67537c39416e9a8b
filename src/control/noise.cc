#include "control/noise.h"

#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace spinwire::control {
namespace {

constexpr std::string_view kProtocolName = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
constexpr std::size_t kPublicBytes = 32;

static_assert(crypto_hash_sha256_BYTES == 32 && crypto_auth_hmacsha256_BYTES == 32 &&
              crypto_scalarmult_curve25519_BYTES == 32 &&
              crypto_aead_chacha20poly1305_ietf_KEYBYTES == 32 &&
              crypto_aead_chacha20poly1305_ietf_ABYTES == kNoiseTagBytes);

const unsigned char* bytes_of(std::span<const std::byte> bytes) noexcept {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}
unsigned char* bytes_of(std::byte* bytes) noexcept {
  return reinterpret_cast<unsigned char*>(bytes);
}

using Nonce = std::array<std::uint8_t, crypto_aead_chacha20poly1305_ietf_NPUBBYTES>;

/// Four bytes of zeroes, then the count, little-endian.
Nonce nonce_of(std::uint64_t count) noexcept {
  Nonce nonce{};
  for (std::size_t i = 0; i < 8; ++i) nonce[4 + i] = static_cast<std::uint8_t>(count >> (8 * i));
  return nonce;
}

/// HMACs by one key, whose part of the work is done once.
class Hmac {
 public:
  explicit Hmac(const NoiseSecret& key) noexcept {
    crypto_auth_hmacsha256_init(&keyed_, key.bytes.data(), key.bytes.size());
  }
  Hmac(const Hmac&) = delete;
  Hmac& operator=(const Hmac&) = delete;
  ~Hmac() { sodium_memzero(&keyed_, sizeof keyed_); }

  void of(std::span<const std::uint8_t> first, std::span<const std::uint8_t> second,
          NoiseSecret& to) const noexcept {
    crypto_auth_hmacsha256_state state = keyed_;
    crypto_auth_hmacsha256_update(&state, first.data(), first.size());
    crypto_auth_hmacsha256_update(&state, second.data(), second.size());
    crypto_auth_hmacsha256_final(&state, to.bytes.data());
    sodium_memzero(&state, sizeof state);
  }

 private:
  crypto_auth_hmacsha256_state keyed_;
};

/// HKDF of the specification, section 4.3: the outputs in turn.
template <std::size_t count>
std::array<NoiseSecret, count> derive(const NoiseSecret& chaining_key,
                                      std::span<const std::uint8_t> material) noexcept {
  NoiseSecret key;
  Hmac(chaining_key).of(material, {}, key);
  const Hmac by_key(key);
  std::array<NoiseSecret, count> outputs;
  for (std::size_t i = 0; i < count; ++i) {
    const auto number = static_cast<std::uint8_t>(i + 1);
    std::span<const std::uint8_t> before;
    if (i != 0) before = outputs[i - 1].bytes;
    by_key.of(before, std::span(&number, 1), outputs[i]);
  }
  return outputs;
}

}  // namespace

void NoiseSecret::clear() noexcept { sodium_memzero(bytes.data(), bytes.size()); }

// ---- cipher ----

void NoiseCipher::set_key(const NoiseSecret& key) noexcept {
  key_ = key;
  count_ = 0;
}

void NoiseCipher::clear() noexcept {
  key_.clear();
  count_ = 0;
}

bool NoiseCipher::encrypt(std::span<const std::byte> associated, std::span<const std::byte> text,
                          std::byte* to) noexcept {
  if (count_ == ~std::uint64_t{0}) return false;  // reserved by the specification
  const Nonce nonce = nonce_of(count_++);
  crypto_aead_chacha20poly1305_ietf_encrypt(bytes_of(to), nullptr, bytes_of(text), text.size(),
                                            bytes_of(associated), associated.size(), nullptr,
                                            nonce.data(), key_.bytes.data());
  return true;
}

bool NoiseCipher::decrypt(std::span<const std::byte> associated, std::span<const std::byte> sealed,
                          std::byte* to) noexcept {
  if (count_ == ~std::uint64_t{0} || sealed.size() < kNoiseTagBytes) return false;
  const Nonce nonce = nonce_of(count_);
  if (crypto_aead_chacha20poly1305_ietf_decrypt(
          bytes_of(to), nullptr, nullptr, bytes_of(sealed), sealed.size(), bytes_of(associated),
          associated.size(), nonce.data(), key_.bytes.data()) != 0)
    return false;
  ++count_;
  return true;
}

// ---- handshake ----

namespace {

/// The hash and the chaining key with which each handshake begins.
std::array<std::uint8_t, 32> first_hash() noexcept {
  static_assert(kProtocolName.size() > 32);  // a shorter name would be padded, not hashed
  std::array<std::uint8_t, 32> hash;
  crypto_hash_sha256(hash.data(), reinterpret_cast<const unsigned char*>(kProtocolName.data()),
                     kProtocolName.size());
  return hash;
}

}  // namespace

NoisePsk::NoisePsk(const NoiseSecret& psk) noexcept {
  NoiseSecret first;
  first.bytes = first_hash();
  const auto outputs = derive<3>(first, psk.bytes);
  chaining_key_ = outputs[0];
  hash_ = outputs[1];
  key_ = outputs[2];
}

void NoisePsk::clear() noexcept {
  chaining_key_.clear();
  hash_.clear();
  key_.clear();
}

void NoiseHandshake::begin(const NoisePsk& psk, std::span<const std::byte> prologue) noexcept {
  static const auto kFirstHash = first_hash();
  hash_ = kFirstHash;
  psk_ = psk;
  mix_hash({bytes_of(prologue), prologue.size()});
}

void NoiseHandshake::mix_hash(std::span<const std::uint8_t> bytes) noexcept {
  crypto_hash_sha256_state state;
  crypto_hash_sha256_init(&state);
  crypto_hash_sha256_update(&state, hash_.data(), hash_.size());
  crypto_hash_sha256_update(&state, bytes.data(), bytes.size());
  crypto_hash_sha256_final(&state, hash_.data());
  sodium_memzero(&state, sizeof state);
}

void NoiseHandshake::mix_key(std::span<const std::uint8_t> material) noexcept {
  const auto outputs = derive<2>(chaining_key_, material);
  chaining_key_ = outputs[0];
  cipher_.set_key(outputs[1]);
}

/// The token `psk`: MixKeyAndHash() of the specification.
void NoiseHandshake::mix_psk() noexcept {
  chaining_key_ = psk_.chaining_key_;
  mix_hash(psk_.hash_.bytes);
  cipher_.set_key(psk_.key_);
  psk_.clear();  // it is as good as the key, and is not needed again
}

/// The token `e` of a handshake with a pre-shared key, in the message whose payload is sealed next.
void NoiseHandshake::mix_ephemeral(const PublicKey& key) noexcept {
  mix_hash(key);
  mix_key(key);
}

/// The tokens `e, ee`. Nothing is sealed between the two, so the first has no cipher key. False:
/// the peer's key is one of the few that give a known result.
bool NoiseHandshake::mix_both(const PublicKey& second, const NoiseSecret& ours,
                              const PublicKey& theirs) noexcept {
  NoiseSecret shared;
  if (crypto_scalarmult_curve25519(shared.bytes.data(), ours.bytes.data(), theirs.data()) != 0)
    return false;
  mix_hash(second);
  chaining_key_ = derive<1>(chaining_key_, second)[0];
  mix_key(shared.bytes);
  return true;
}

NoiseHandshake::PublicKey NoiseHandshake::put_ephemeral(const NoiseSecret& ephemeral,
                                                        std::byte* to) noexcept {
  PublicKey key;
  crypto_scalarmult_curve25519_base(key.data(), ephemeral.bytes.data());
  std::memcpy(to, key.data(), key.size());
  return key;
}

bool NoiseHandshake::seal(std::span<const std::byte> payload, std::byte* to) noexcept {
  if (!cipher_.encrypt(std::as_bytes(std::span(hash_)), payload, to)) return false;
  mix_hash({bytes_of(to), payload.size() + kNoiseTagBytes});
  return true;
}

bool NoiseHandshake::open(std::span<const std::byte> sealed, std::byte* to) noexcept {
  if (!cipher_.decrypt(std::as_bytes(std::span(hash_)), sealed, to)) return false;
  mix_hash({bytes_of(sealed), sealed.size()});
  return true;
}

bool NoiseHandshake::write_first(const NoiseSecret& ephemeral, std::span<const std::byte> payload,
                                 std::byte* to) noexcept {
  mix_psk();
  ephemeral_ = ephemeral;
  mix_ephemeral(put_ephemeral(ephemeral, to));
  return seal(payload, to + kPublicBytes);
}

bool NoiseHandshake::read_first(std::span<const std::byte> message, std::byte* payload) noexcept {
  if (message.size() < kNoiseMessageBytes) return false;
  mix_psk();
  std::memcpy(theirs_.data(), message.data(), theirs_.size());
  mix_ephemeral(theirs_);
  return open(message.subspan(kPublicBytes), payload);
}

bool NoiseHandshake::write_second(const NoiseSecret& ephemeral, std::span<const std::byte> payload,
                                  std::byte* to) noexcept {
  const PublicKey ours = put_ephemeral(ephemeral, to);
  return mix_both(ours, ephemeral, theirs_) && seal(payload, to + kPublicBytes);
}

bool NoiseHandshake::read_second(std::span<const std::byte> message, std::byte* payload) noexcept {
  if (message.size() < kNoiseMessageBytes) return false;
  std::memcpy(theirs_.data(), message.data(), theirs_.size());
  return mix_both(theirs_, ephemeral_, theirs_) && open(message.subspan(kPublicBytes), payload);
}

void NoiseHandshake::split(NoiseCipher& from_initiator, NoiseCipher& from_responder) noexcept {
  const auto keys = derive<2>(chaining_key_, {});
  from_initiator.set_key(keys[0]);
  from_responder.set_key(keys[1]);
}

void NoiseHandshake::clear() noexcept {
  chaining_key_.clear();
  cipher_.clear();
  psk_.clear();
  ephemeral_.clear();
}

}  // namespace spinwire::control
