#include "control/key_ring.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "control/key_files.h"
#include "forbidden_call.h"

namespace key_ring_test {
namespace {

using key_files::KeyFile;
using key_files::line;
using spinwire::Status;
using spinwire::control::KeyRing;
using spinwire::control::NoiseHandshake;
using spinwire::control::NoisePsk;
using spinwire::control::NoiseSecret;

KeyRing parse(const std::string& text) {
  auto ring = KeyRing::parse(text, "keys");
  EXPECT_TRUE(ring) << ring.error().message();
  return ring ? std::move(*ring) : KeyRing();
}

TEST(KeyRing, ReadsKeysInOrder) {
  const KeyRing ring = parse("# keys of the desk\n\n" + line("2026-11", 'a') + "  old.1_x \t" +
                             std::string(64, 'B') + " # until May\r\n");
  ASSERT_EQ(ring.size(), 2u);
  EXPECT_EQ(ring.first().name, "2026-11");
  const auto* const found = ring.find(parse(line("any", 'b')).first().id);
  ASSERT_NE(found, nullptr) << "the identity does not depend on the name, nor on upper case";
  EXPECT_EQ(found->name, "old.1_x");
  EXPECT_EQ(ring.find({}), nullptr);
}

/// Whether a handshake with one key reads the first message of one with the other.
bool reads(const NoisePsk& reader, const NoisePsk& writer) {
  NoiseHandshake client, server;
  client.begin(writer, {});
  server.begin(reader, {});
  std::array<std::byte, spinwire::control::kNoiseMessageBytes> message{};
  std::byte nothing{};
  EXPECT_TRUE(client.write_first({}, {}, message.data()));
  return server.read_first(message, &nothing);
}

TEST(KeyRing, TheIdentityAndTheKeysAreDerivedApart) {
  const KeyRing ring = parse(line("a", 'a'));
  const auto& key = ring.first();
  NoiseSecret secret, id;
  secret.bytes.fill(0xaa);
  std::copy(key.id.begin(), key.id.end(), id.bytes.begin());
  EXPECT_TRUE(reads(key.psk, parse(line("b", 'a')).first().psk));
  EXPECT_FALSE(reads(key.psk, NoisePsk(secret)));
  EXPECT_FALSE(reads(key.psk, NoisePsk(key.endpoint)));
  EXPECT_FALSE(reads(key.psk, NoisePsk(id)));
  EXPECT_NE(key.endpoint.bytes, secret.bytes);
  EXPECT_FALSE(std::equal(key.id.begin(), key.id.end(), key.endpoint.bytes.begin()));
  EXPECT_NE(key.id, parse(line("a", 'c')).first().id);
  EXPECT_NE(key.endpoint.bytes, parse(line("a", 'c')).first().endpoint.bytes);
}

TEST(KeyRing, WhatIsWrongIsNamedByItsLine) {
  struct Case {
    std::string text, where, what;
  };
  std::string many;
  for (int i = 0; i < 17; ++i)
    many +=
        "k" + std::to_string(i) + ' ' + std::string(63, '1') + "0123456789abcdefg"[i % 16] + '\n';
  const std::vector<Case> cases{
      {"", "keys", "no key"},
      {"# nothing\n", "keys", "no key"},
      {"a\n", "keys:1", "64 hexadecimal digits"},
      {line("ok", '1') + "b " + std::string(63, '2') + "\n", "keys:2", "64 hexadecimal digits"},
      {"b " + std::string(65, '2'), "keys:1", "64 hexadecimal digits"},
      {"b " + std::string(63, '2') + "g", "keys:1", "64 hexadecimal digits"},
      {"b " + std::string(64, '2') + " more", "keys:1", "more text"},
      {"b/c " + std::string(64, '2'), "keys:1", "no name"},
      {std::string(33, 'n') + ' ' + std::string(64, '2'), "keys:1", "no name"},
      {line("zero", '0'), "keys:1", "all zeroes"},
      {line("a", '1') + line("a", '2'), "keys:2", "'a' already"},
      {line("a", '1') + "\n" + line("b", '1'), "keys:3", "'a' again"},
      {many, "keys:17", "more than 16 keys"},
  };
  for (const Case& c : cases) {
    const auto ring = KeyRing::parse(c.text, "keys");
    ASSERT_FALSE(ring) << c.text;
    EXPECT_EQ(ring.error().status, Status::bad_config);
    EXPECT_NE(ring.error().asked.find(c.where), std::string::npos) << ring.error().message();
    EXPECT_NE(ring.error().found.find(c.what), std::string::npos) << ring.error().message();
  }
}

TEST(KeyRing, ErrorsShowNoPartOfAKey) {
  const std::string secret(64, 'e');
  for (const std::string& text :
       {secret, secret + " a", "a " + secret.substr(1), "a " + secret + " " + secret,
        secret.substr(32) + "\n" + secret.substr(32), secret.substr(32) + " " + secret + " e",
        secret.substr(32) + " " + std::string(64, '0')}) {
    const auto ring = KeyRing::parse(text, "keys");
    ASSERT_FALSE(ring);
    EXPECT_EQ(ring.error().message().find("eeee"), std::string::npos) << ring.error().message();
  }
}

TEST(KeyRing, AFileThatOthersCanUseIsRefused) {
  for (const mode_t mode : {0640, 0604, 0620, 0602, 0610, 0601, 0660, 0666}) {
    const KeyFile file(line("a", '1'), mode);
    const auto ring = KeyRing::load(file.path());
    ASSERT_FALSE(ring) << mode;
    EXPECT_EQ(ring.error().status, Status::bad_config);
    EXPECT_NE(ring.error().remedy.find("chmod 600"), std::string::npos) << ring.error().message();
  }
  for (const mode_t mode : {0600, 0400, 0700}) {
    const KeyFile file(line("a", '1'), mode);
    const auto ring = KeyRing::load(file.path());
    EXPECT_TRUE(ring) << ring.error().message();
  }
}

TEST(KeyRing, AnotherUsersFileIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to give a file away";
  const KeyFile file(line("a", '1'));
  ASSERT_EQ(::chown(file.path().c_str(), 12345, static_cast<gid_t>(-1)), 0);
  const auto ring = KeyRing::load(file.path());
  ASSERT_FALSE(ring);
  EXPECT_NE(ring.error().found.find("user 12345"), std::string::npos) << ring.error().message();
}

TEST(KeyRing, WhatIsNoFileIsRefusedAtOnce) {
  EXPECT_NE(KeyRing::load("/nonexistent/keys").error().found.find("ENOENT"), std::string::npos);
  EXPECT_NE(KeyRing::load("/tmp").error().found.find("no regular file"), std::string::npos);
  const std::string pipe = "/tmp/spinwire-keys-pipe-" + std::to_string(::getpid());
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(KeyRing::load(pipe).error().found.find("no regular file"), std::string::npos);
  ::unlink(pipe.c_str());
  const KeyFile large(std::string(10'000, '#'));
  EXPECT_NE(KeyRing::load(large.path()).error().found.find("8192 bytes"), std::string::npos);
}

// libsodium would end the process.
TEST(KeyRing, WithoutRandomNumbersThereIsAnError) {
  const KeyFile file(line("a", '1'));
  const pid_t child = fork();
  if (child == 0) {
    if (!forbid_call(SYS_getrandom, EPERM)) _exit(2);
    const auto ring = KeyRing::load(file.path());
    _exit(!ring && ring.error().status == Status::system ? 0 : 1);
  }
  int ended = 0;
  ASSERT_EQ(::waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
}

}  // namespace
}  // namespace key_ring_test
