#include "control/noise.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace noise_test {
namespace {

using spinwire::control::kNoiseMessageBytes;
using spinwire::control::kNoiseTagBytes;
using spinwire::control::NoiseCipher;
using spinwire::control::NoiseHandshake;
using spinwire::control::NoisePsk;
using spinwire::control::NoiseSecret;
using Bytes = std::vector<std::byte>;

Bytes from_hex(std::string_view hex) {
  Bytes bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  return bytes;
}

template <typename Range>
std::string hex(const Range& bytes) {
  std::string text;
  for (const auto b : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(b));
  return text;
}

NoiseSecret secret(std::string_view hex) {
  NoiseSecret made;
  std::size_t i = 0;
  for (const std::byte b : from_hex(hex)) made.bytes.at(i++) = std::to_integer<std::uint8_t>(b);
  return made;
}

// The vector of Noise_NNpsk0_25519_ChaChaPoly_SHA256 that cacophony, an independent implementation,
// publishes, and that others test themselves by.
constexpr std::string_view kPrologue = "4a6f686e2047616c74";
constexpr std::string_view kPsk =
    "54686973206973206d7920417573747269616e20706572737065637469766521";
constexpr std::string_view kClient =
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a";
constexpr std::string_view kServer =
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b";
constexpr std::string_view kHash =
    "f4d03dc34495c95729ea6de9e1b59004b59733102488b3e24bc441e0be208eaf";
struct Message {
  std::string_view payload, sealed;
};
constexpr std::array<Message, 6> kMessages{{
    {"4c756477696720766f6e204d69736573",
     "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
     "79b962b8aff8485742ac32f905ba45369e2465fb59e138a93d67a0d1266b6a54"},
    {"4d757272617920526f746862617264",
     "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
     "d6062704d5a9c422a8e834423f8c1feada7e8d0d910a1a2cd030fb584221e3"},
    {"462e20412e20486179656b", "e632c3763d7669067383433197a3baddf146e9e70ad4b4e9e59e0f"},
    {"4361726c204d656e676572", "64c6bee32ea91c8474bb4c21d7a700109ad45af77b29764ba5eb1e"},
    {"4a65616e2d426170746973746520536179",
     "e2fa0bed0603b62d3ccac2ecabbf3fe33f3e86514909b323361626266cb2471cc8"},
    {"457567656e2042f6686d20766f6e2042617765726b",
     "0c01dc9cec1fe4ddd692e8dd32188aa351088dc91183639a53b57aa4692b5ebdef8b8ca111"},
}};

/// Both ends of a handshake.
struct Ends {
  explicit Ends(std::string_view server_psk = kPsk, std::string_view server_prologue = kPrologue) {
    client.begin(NoisePsk(secret(kPsk)), from_hex(kPrologue));
    server.begin(NoisePsk(secret(server_psk)), from_hex(server_prologue));
  }
  Bytes first(std::string_view payload = {}) {
    const Bytes text = from_hex(payload);
    Bytes message(text.size() + kNoiseMessageBytes);
    EXPECT_TRUE(client.write_first(secret(kClient), text, message.data()));
    return message;
  }
  Bytes second(std::string_view payload = {}) {
    const Bytes text = from_hex(payload);
    Bytes message(text.size() + kNoiseMessageBytes);
    EXPECT_TRUE(server.write_second(secret(kServer), text, message.data()));
    return message;
  }
  NoiseHandshake client, server;
};

Bytes room_for(const Bytes& message) { return Bytes(message.size() - kNoiseMessageBytes + 1); }

TEST(Noise, EqualsThePublishedVector) {
  Ends ends;
  const Bytes first = ends.first(kMessages[0].payload);
  EXPECT_EQ(hex(first), kMessages[0].sealed);
  Bytes payload(first.size() - kNoiseMessageBytes);
  ASSERT_TRUE(ends.server.read_first(first, payload.data()));
  EXPECT_EQ(hex(payload), kMessages[0].payload);

  const Bytes second = ends.second(kMessages[1].payload);
  EXPECT_EQ(hex(second), kMessages[1].sealed);
  payload.resize(second.size() - kNoiseMessageBytes);
  ASSERT_TRUE(ends.client.read_second(second, payload.data()));
  EXPECT_EQ(hex(payload), kMessages[1].payload);
  EXPECT_EQ(hex(ends.client.hash()), kHash);
  EXPECT_EQ(hex(ends.server.hash()), kHash);

  NoiseCipher to_server, from_client, to_client, from_server;
  ends.client.split(to_server, from_server);
  ends.server.split(from_client, to_client);
  for (std::size_t i = 2; i < kMessages.size(); ++i) {
    const bool is_clients = i % 2 == 0;
    const Bytes text = from_hex(kMessages[i].payload);
    Bytes sealed(text.size() + kNoiseTagBytes);
    ASSERT_TRUE((is_clients ? to_server : to_client).encrypt({}, text, sealed.data()));
    EXPECT_EQ(hex(sealed), kMessages[i].sealed);
    Bytes opened(text.size());
    ASSERT_TRUE((is_clients ? from_client : from_server).decrypt({}, sealed, opened.data()));
    EXPECT_EQ(opened, text);
  }
}

TEST(Noise, AFirstMessageNeedsTheKeyAndThePrologue) {
  std::string other_psk(kPsk);
  other_psk[0] = '4';
  Ends wrong_key(other_psk), wrong_prologue(kPsk, "4a6f686e2047616c75"), right;
  const Bytes first = right.first("01");
  Bytes payload = room_for(first);
  EXPECT_FALSE(wrong_key.server.read_first(first, payload.data()));
  EXPECT_FALSE(wrong_prologue.server.read_first(first, payload.data()));
  EXPECT_TRUE(right.server.read_first(first, payload.data()));
}

TEST(Noise, EachBitOfAMessageCounts) {
  Ends honest;
  const Bytes first = honest.first("0102");
  Bytes payload = room_for(first);
  ASSERT_TRUE(honest.server.read_first(first, payload.data()));
  const Bytes second = honest.second("0304");
  for (std::size_t bit = 0; bit < 8 * first.size(); ++bit) {
    Ends ends;
    Bytes altered = first;
    altered[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_FALSE(ends.server.read_first(altered, payload.data())) << "bit " << bit;
  }
  for (std::size_t bit = 0; bit < 8 * second.size(); ++bit) {
    Ends ends;
    (void)ends.first("0102");
    Bytes altered = second;
    altered[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_FALSE(ends.client.read_second(altered, payload.data())) << "bit " << bit;
  }
  for (std::size_t size = 0; size < second.size(); ++size) {
    Ends ends;
    (void)ends.first("0102");
    EXPECT_FALSE(ends.client.read_second(std::span(second).first(size), payload.data())) << size;
  }
}

TEST(Noise, APublicKeyWithAKnownResultIsRefused) {
  Ends ends;
  Bytes zeroes(kNoiseMessageBytes);
  std::byte nothing{};
  (void)ends.first();
  EXPECT_FALSE(ends.client.read_second(zeroes, &nothing));
}

TEST(Noise, ACipherAcceptsEachTextOnceAndInOrder) {
  NoiseCipher sender, receiver, other;
  sender.set_key(secret(kPsk));
  receiver.set_key(secret(kPsk));
  other.set_key(secret(kClient));
  const Bytes text = from_hex("00112233");
  Bytes first(text.size() + kNoiseTagBytes), second = first, opened(text.size());
  ASSERT_TRUE(sender.encrypt({}, text, first.data()));
  ASSERT_TRUE(sender.encrypt({}, text, second.data()));
  EXPECT_NE(first, second);
  EXPECT_FALSE(receiver.decrypt({}, second, opened.data())) << "too early";
  EXPECT_FALSE(other.decrypt({}, first, opened.data())) << "another key";
  EXPECT_FALSE(receiver.decrypt({}, std::span(first).first(kNoiseTagBytes - 1), opened.data()));
  EXPECT_TRUE(receiver.decrypt({}, first, opened.data()));
  EXPECT_FALSE(receiver.decrypt({}, first, opened.data())) << "again";
  EXPECT_TRUE(receiver.decrypt({}, second, opened.data()));
  EXPECT_EQ(opened, text);
}

TEST(Noise, SecretsAreZeroedWhenTheyAreDropped) {
  alignas(NoiseSecret) std::array<unsigned char, sizeof(NoiseSecret)> room{};
  auto* const made = new (room.data()) NoiseSecret(secret(kPsk));
  EXPECT_EQ(room[0], 0x54);
  made->~NoiseSecret();
  // Read through volatile: the object has ended, its memory has not.
  const volatile unsigned char* const bytes = room.data();
  for (std::size_t i = 0; i < room.size(); ++i) EXPECT_EQ(bytes[i], 0) << i;
}

/// The bytes of an object that is not trivially copied.
template <typename Object>
std::string_view bytes_of(const Object& object) {
  return {reinterpret_cast<const char*>(&object), sizeof object};
}

// Its parts are private: this looks for the bytes of the key in the whole handshake.
TEST(Noise, AHandshakeZeroesItsCopyOfTheKeyWhenItHasMixedItIn) {
  const NoisePsk psk(secret(kPsk));
  NoiseHandshake client, server;
  const auto count_parts = [&](const NoiseHandshake& end) {
    int found = 0;
    for (std::size_t at = 0; at < sizeof psk; at += sizeof(NoiseSecret)) {
      const std::string_view part = bytes_of(psk).substr(at, sizeof(NoiseSecret));
      found += bytes_of(end).find(part) != std::string_view::npos ? 1 : 0;
    }
    return found;
  };
  for (NoiseHandshake* end : {&client, &server}) {
    end->begin(psk, {});
    EXPECT_EQ(count_parts(*end), 3);
  }
  Bytes message(kNoiseMessageBytes);
  ASSERT_TRUE(client.write_first(secret(kPsk), {}, message.data()));
  ASSERT_TRUE(server.read_first(message, message.data()));
  EXPECT_EQ(count_parts(client), 0);
  EXPECT_EQ(count_parts(server), 0);
}

}  // namespace
}  // namespace noise_test
