// A client without the key tries every frame, in every state that it can reach.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "attack/latencies.h"
#include "attack/victim.h"
#include "control/key_files.h"
#include "control/relay.h"

namespace attack_test {
namespace {

using relay_test::Bytes;
using relay_test::From;
using relay_test::Passing;
using relay_test::Relay;

Config keyed(const key_files::KeyFile& file) {
  Config c = rpc_test::rpc_config();
  c.security.key_file = file.path();
  return c;
}

Bytes bytes_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// Every frame that an attacker can make.
std::vector<Bytes> all_frames() {
  const ibv_gid gid = gid_of_descriptor(0);
  std::vector<Bytes> frames;
  for (const wire::Frame& frame :
       {wire::encode(wire::Hello{endpoint(gid)}), wire::encode(wire::Accept{endpoint(gid)}),
        wire::encode(wire::make_refuse(Status::limit, "no")), wire::encode(wire::Ready{7}),
        wire::encode(wire::OpenSession{session_end(gid)}),
        wire::encode(wire::SessionOpened{session_end(gid)}),
        wire::encode(wire::JoinSession{endpoint(gid), 1, 2}), wire::encode(wire::PathResponse{3}),
        wire::encode(wire::Authenticate{}), wire::encode(wire::Authenticated{})})
    frames.push_back(bytes_of(frame.bytes()));
  frames.push_back(bytes_of(wire::begin_sealed(86).bytes()));
  return frames;
}

/// All that the victim says until it closes.
Bytes answer_to(const Victim& victim, const std::vector<Bytes>& said) {
  const Stream stream(victim.address());
  for (const Bytes& bytes : said)
    (void)::send(stream.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  (void)::shutdown(stream.fd(), SHUT_WR);
  Bytes got;
  for (;;) {
    pollfd ready{stream.fd(), POLLIN, 0};
    if (::poll(&ready, 1, 60'000) != 1) ADD_FAILURE() << "the victim does not close";
    std::array<std::byte, 512> part;
    const ssize_t size = ::recv(stream.fd(), part.data(), part.size(), 0);
    if (size <= 0) return got;
    got.insert(got.end(), part.begin(), part.begin() + size);
  }
}

/// An honest client's session, through a relay that records it.
void record(Relay& relay, Node& client) {
  auto session = client.engine.open_session(relay.address().str(), {});
  ASSERT_TRUE(session) << session.error().message();
  ASSERT_TRUE(until({&client}, [&] {
    relay.pump();
    return session->ready();
  }));
  Status ended = Status::system;
  ASSERT_EQ(session->call(kEcho, std::as_bytes(std::span("12345678")),
                          [&](const spinwire::Reply& r) { ended = r.status(); }),
            Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return ended != Status::system; }));
  EXPECT_EQ(ended, Status::ok);
}

TEST(AttackWithoutAKey, EveryFrameInEveryStateGetsNothing) {
  const key_files::KeyFile file(key_files::line("2026", 'a'));
  Victim victim(keyed(file));
  Node client(keyed(file));
  Relay relay(*spinwire::control::Address::parse(victim.address()));
  record(relay, client);
  // What an attacker on the way has seen: the client's frames.
  std::vector<Bytes> seen;
  for (const Passing& p : relay.passed())
    if (p.from == From::client) seen.push_back(p.frame);
  ASSERT_GE(seen.size(), 3u);

  const Bytes refusal =
      bytes_of(wire::encode(wire::make_refuse(Status::refused, "authentication required")).bytes());
  std::vector<Bytes> frames = all_frames();
  // A proof of the right key by name, from one who does not have it.
  frames.push_back(seen[0]);
  frames.back().back() ^= std::byte{1};
  for (const Bytes& first : frames) {
    EXPECT_EQ(answer_to(victim, {first}), refusal);
    for (const Bytes& second : frames) EXPECT_EQ(answer_to(victim, {first, second}), refusal);
  }
  // Behind a replayed proof the victim answers with its own, and then refuses, sealed.
  std::vector<Bytes> later = frames;
  later.insert(later.end(), seen.begin() + 1, seen.end());
  for (const Bytes& next : later) {
    const Bytes got = answer_to(victim, {seen[0], next});
    ASSERT_GE(got.size(), wire::kHeaderBytes + wire::kAuthenticatedBytes);
    EXPECT_EQ(relay_test::kind_of(got), wire::FrameKind::authenticated);
    const auto rest = std::span(got).subspan(wire::kHeaderBytes + wire::kAuthenticatedBytes);
    ASSERT_GE(rest.size(), wire::kHeaderBytes);
    EXPECT_EQ(relay_test::kind_of(rest), wire::FrameKind::sealed);
    EXPECT_EQ(std::search(got.begin(), got.end(), refusal.begin(), refusal.end()), got.end());
  }
  // The victim serves its client as before.
  Relay again(*spinwire::control::Address::parse(victim.address()));
  record(again, client);
  (void)victim.stop();
}

/// Strangers that send one half of a proof, or a whole one that is wrong, and then nothing. One
/// that the victim has ended comes again.
class ForgedProofs {
 public:
  explicit ForgedProofs(const Victim& victim) : victim_(victim) {}
  /// Ends and begins a few at each call.
  void keep(std::size_t count) {
    if (each_.size() < count) return begin(each_.emplace_back());
    for (int i = 0; i < 4; ++i) {
      std::unique_ptr<Stream>& one = each_[next_++ % each_.size()];
      if (one->is_over()) begin(one);
    }
  }
  [[nodiscard]] std::size_t begun() const { return begun_; }

 private:
  void begin(std::unique_ptr<Stream>& one) {
    one = std::make_unique<Stream>(victim_.address(), "127.0.0.9:0");
    const linger hard{1, 0};  // its end leaves no port in TIME_WAIT
    EXPECT_EQ(::setsockopt(one->fd(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard), 0);
    one->send_part(wire::encode(wire::Authenticate{}), ++begun_ % 2 == 0 ? 40 : 80);
  }

  const Victim& victim_;
  std::vector<std::unique_ptr<Stream>> each_;
  std::size_t next_ = 0, begun_ = 0;
};

// Each of the strangers keeps its handshake as long as it may.
TEST(AttackWithoutAKey, AFloodOfForgedProofsKeepsNobodyOut) {
  const key_files::KeyFile file(key_files::line("2026", 'a'));
  Config config = keyed(file);
  config.connections.handshakes = 8;
  Victim victim(config);
  Node client(keyed(file));
  ForgedProofs strangers(victim);
  constexpr std::size_t kStrangers = 64;
  const auto is_under_attack = [&] {
    strangers.keep(kStrangers);
    return strangers.begun() >= kStrangers && victim.handshakes() == 8;
  };
  expect_soon(victim, client, "sessions", [&](Latencies& latencies) {
    for (std::uint32_t i = 0; i < std::max(amount(50), 5u); ++i) {
      spinwire::Session session;
      latencies.measure(
          is_under_attack,
          [&] {
            auto made = client.engine.open_session(victim.address(), {});
            ASSERT_TRUE(made) << made.error().message();
            session = *made;
          },
          [&] {
            strangers.keep(kStrangers);
            return session.ready();
          });
      ASSERT_TRUE(session.ready()) << i;
      EXPECT_EQ(session.close(), Status::ok);
    }
  });
  EXPECT_GT(strangers.begun(), kStrangers) << "no attack: nobody gave way";
  (void)victim.stop();
}

}  // namespace
}  // namespace attack_test
