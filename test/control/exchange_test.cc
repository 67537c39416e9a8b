#include "control/exchange.h"

#include <gtest/gtest.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "loopback.h"
#include "wire/codec.h"
#include "wire/endpoints.h"

namespace exchange_test {

namespace wire = spinwire::wire;
using spinwire::Endpoint;
using spinwire::GidType;
using spinwire::Status;
using spinwire::base::UniqueFd;
using spinwire::control::Address;
using spinwire::control::Exchange;
using spinwire::control::Interest;
using spinwire::control::ListenSocket;
using spinwire::control::Progress;
using wire::FrameKind;

constexpr wire::KindSet kHelloOnly = wire::kinds(FrameKind::hello);
constexpr wire::KindSet kAnswer = wire::kinds(FrameKind::accept, FrameKind::refuse);

Endpoint endpoint(std::uint32_t qp_num) {
  Endpoint e = wire_test::valid_endpoint();
  e.qp_num = qp_num;
  return e;
}

/// An exchange at one end of a local stream, and a plain descriptor at the other.
struct Fixture {
  explicit Fixture(wire::KindSet expected = kHelloOnly) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    peer.reset(ends[1]);
    exchange.adopt(UniqueFd(ends[0]), *Address::parse("127.0.0.1:9"), expected);
  }
  void write(std::span<const std::byte> bytes) const {
    ASSERT_EQ(::send(peer.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void write(std::string_view text) const { write(std::as_bytes(std::span(text))); }
  [[nodiscard]] std::vector<std::byte> read() const {
    std::vector<std::byte> bytes(4096);
    const ssize_t got = ::recv(peer.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return bytes;
  }
  /// Whether the exchange has ended its direction and nothing is left to read.
  [[nodiscard]] bool at_end() const {
    char byte = 0;
    return ::recv(peer.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }

  Exchange exchange;
  UniqueFd peer;
};

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

spinwire::Result<wire::Received> decode(std::span<const std::byte> frame) {
  auto header = wire::decode_header(frame);
  if (!header) return tl::make_unexpected(header.error());
  return wire::decode_body(*header, frame.subspan(wire::kHeaderBytes));
}

Progress until_told(Exchange& exchange) {
  Progress progress = Progress::waiting;
  EXPECT_TRUE(loopback::eventually([&] {
    progress = exchange.advance();
    return progress != Progress::waiting;
  }));
  return progress;
}

TEST(Exchange, WholeHandshakeOverLoopback) {
  ListenSocket listener = loopback::listener();
  Exchange client;
  ASSERT_TRUE(client.connect(listener.local(), kAnswer));
  EXPECT_EQ(client.interest(), Interest::write);
  EXPECT_EQ(client.peer_address(), listener.local().str());
  EXPECT_EQ(client.send(wire::encode(wire::Hello{endpoint(100)})), Status::ok);
  ASSERT_TRUE(loopback::eventually([&] {
    EXPECT_EQ(client.advance(), Progress::waiting);
    return client.state() == Exchange::State::open;
  }));

  auto accepted = loopback::accept_one(listener);
  ASSERT_TRUE(accepted);
  Exchange server;
  server.adopt(std::move(accepted->fd), accepted->peer, kHelloOnly);
  EXPECT_EQ(server.interest(), Interest::read);
  EXPECT_EQ(server.peer_address(), spinwire::control::local_address(client.fd())->str());
  EXPECT_EQ(*spinwire::control::local_address(server.fd()), listener.local());
  ASSERT_EQ(until_told(server), Progress::frame);
  EXPECT_EQ(std::get<wire::Hello>(server.received().body).endpoint, endpoint(100));

  server.expect(wire::kinds(FrameKind::ready, FrameKind::refuse));
  EXPECT_EQ(server.send(wire::encode(wire::Accept{endpoint(200)})), Status::ok);
  EXPECT_EQ(server.interest(), Interest::read_write);
  EXPECT_EQ(server.advance(), Progress::waiting);
  EXPECT_TRUE(server.all_sent());
  ASSERT_EQ(until_told(client), Progress::frame);
  EXPECT_EQ(std::get<wire::Accept>(client.received().body).endpoint, endpoint(200));

  EXPECT_EQ(client.send(wire::encode(wire::Ready{0x1234})), Status::ok);
  EXPECT_EQ(client.advance(), Progress::waiting);
  ASSERT_EQ(until_told(server), Progress::frame);
  EXPECT_EQ(std::get<wire::Ready>(server.received().body).incarnation, 0x1234u);

  client.reset();
  EXPECT_EQ(client.state(), Exchange::State::idle);
  EXPECT_EQ(client.fd(), -1);
  EXPECT_EQ(until_told(server), Progress::closed);
  EXPECT_EQ(server.advance(), Progress::closed);
  EXPECT_EQ(server.send(wire::encode(wire::Ready{1})), Status::not_connected);
}

TEST(Exchange, FrameMayArriveByteByByte) {
  Fixture f;
  const wire::Frame frame = wire::encode(wire::Hello{endpoint(5)});
  for (std::size_t i = 0; i < frame.size; ++i) {
    ASSERT_EQ(f.exchange.advance(), Progress::waiting) << i;
    f.write(frame.bytes().subspan(i, 1));
    ASSERT_EQ(f.exchange.advance(), i + 1 < frame.size ? Progress::waiting : Progress::frame) << i;
  }
  EXPECT_EQ(std::get<wire::Hello>(f.exchange.received().body).endpoint, endpoint(5));
}

TEST(Exchange, FrameMaySplitAnywhere) {
  const wire::Frame frame = wire::encode(wire::make_refuse(Status::limit, "full"));
  for (std::size_t cut = 1; cut < frame.size; ++cut) {
    Fixture f(kAnswer);
    f.write(frame.bytes().first(cut));
    ASSERT_EQ(f.exchange.advance(), Progress::waiting) << cut;
    f.write(frame.bytes().subspan(cut));
    ASSERT_EQ(until_told(f.exchange), Progress::frame) << cut;
    EXPECT_EQ(std::get<wire::Refuse>(f.exchange.received().body).message(), "full");
  }
}

TEST(Exchange, FramesInARowAreTakenOneByOne) {
  Fixture f;
  std::vector<std::byte> both;
  for (const auto& frame : {wire::encode(wire::Hello{endpoint(5)}), wire::encode(wire::Ready{3})}) {
    both.insert(both.end(), frame.bytes().begin(), frame.bytes().end());
  }
  f.write(both);
  ASSERT_EQ(f.exchange.advance(), Progress::frame);
  EXPECT_EQ(f.exchange.received().header.kind, FrameKind::hello);
  EXPECT_TRUE(loopback::wait_ready(f.exchange.fd(), POLLIN)) << "the second stays announced";
  f.exchange.expect(wire::kinds(FrameKind::ready));
  ASSERT_EQ(f.exchange.advance(), Progress::frame);
  EXPECT_EQ(std::get<wire::Ready>(f.exchange.received().body).incarnation, 3u);
}

TEST(Exchange, BytesBeyondTheLastFrameAreAnError) {
  Fixture f;
  const wire::Frame frame = wire::encode(wire::Hello{endpoint(5)});
  f.write(frame.bytes());
  f.write("!!");
  ASSERT_EQ(f.exchange.advance(), Progress::frame);
  ASSERT_EQ(f.exchange.advance(), Progress::failed);
  EXPECT_EQ(f.exchange.error().status, Status::protocol);
  EXPECT_EQ(f.exchange.error().found, "2 or more bytes after it, the first of them 0x21");
}

TEST(Exchange, StrangersFailAtTheirFirstBytes) {
  Fixture http;
  http.write("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  ASSERT_EQ(http.exchange.advance(), Progress::failed);
  EXPECT_EQ(http.exchange.error().status, Status::protocol);
  EXPECT_TRUE(contains(http.exchange.error().found, "GET / HTTP")) << http.exchange.error().found;

  Fixture single;
  single.write("\x16");
  EXPECT_EQ(single.exchange.advance(), Progress::failed);

  Fixture late;
  late.write("SPN");
  EXPECT_EQ(late.exchange.advance(), Progress::waiting);
  late.write("?");
  EXPECT_EQ(late.exchange.advance(), Progress::failed);
  EXPECT_EQ(late.exchange.refuse(wire::make_refuse(Status::protocol, "no")), Progress::closed);
  EXPECT_TRUE(late.read().empty()) << "a stranger gets no byte";
}

TEST(Exchange, OverlongLengthFailsAtTheHeader) {
  Fixture f;
  wire::Frame frame = wire::encode(wire::Hello{endpoint(5)});
  wire::put_number<std::uint16_t>(frame.storage.data() + wire_test::header_at::body_length, 65535);
  f.write(frame.bytes().first(wire::kHeaderBytes));
  ASSERT_EQ(f.exchange.advance(), Progress::failed);
  EXPECT_TRUE(contains(f.exchange.error().found, "body length is 65535"));
}

TEST(Exchange, LongestFrameOfANewerPeerIsTaken) {
  Fixture f;
  std::vector<std::byte> bytes(wire::kFrameBytesMax, std::byte{0xee});
  const wire::Frame hello = wire::encode(wire::Hello{endpoint(5)}, {{1, 2}, 0});
  std::copy(hello.bytes().begin(), hello.bytes().end(), bytes.begin());
  wire::put_number<std::uint16_t>(bytes.data() + wire_test::header_at::body_length, 512 - 16);
  f.write(bytes);
  ASSERT_EQ(f.exchange.advance(), Progress::frame) << f.exchange.error().message();
  EXPECT_EQ(std::get<wire::Hello>(f.exchange.received().body).endpoint, endpoint(5));
}

TEST(Exchange, UnexpectedKindIsNamed) {
  Fixture f(kAnswer);
  f.write(wire::encode(wire::Hello{endpoint(5)}).bytes());
  ASSERT_EQ(f.exchange.advance(), Progress::failed);
  EXPECT_EQ(f.exchange.error().asked, "receive accept or refuse from 127.0.0.1:9");
  EXPECT_EQ(f.exchange.error().found, "a frame of kind hello");
}

TEST(Exchange, BadFieldFailsAndCanBeAnswered) {
  Fixture f;
  auto info = endpoint(5);
  info.mtu = 1000;
  f.write(wire::encode(wire::Hello{info}).bytes());
  ASSERT_EQ(f.exchange.advance(), Progress::failed);
  EXPECT_TRUE(contains(f.exchange.error().found, "mtu is 1000"));
  EXPECT_EQ(f.exchange.interest(), Interest::none);
  const auto refusal = wire::make_refuse(f.exchange.error().status, f.exchange.error().found);
  EXPECT_EQ(f.exchange.refuse(refusal), Progress::waiting);
  const auto told = decode(f.read());
  ASSERT_TRUE(told) << told.error().message();
  EXPECT_EQ(std::get<wire::Refuse>(told->body).status, Status::protocol);
  EXPECT_TRUE(contains(std::string(std::get<wire::Refuse>(told->body).message()), "mtu is 1000"));
  EXPECT_TRUE(f.at_end());
  EXPECT_EQ(f.exchange.advance(), Progress::waiting);
  f.peer.reset();
  EXPECT_EQ(f.exchange.advance(), Progress::closed);
}

TEST(Exchange, ResetFreesTheTextsOfAFailure) {
  Fixture f;
  f.write("GET / HTTP/1.1\r\n\r\n, and so on");
  ASSERT_EQ(f.exchange.advance(), Progress::failed);
  const std::size_t short_text = std::string().capacity();  // needs no heap
  const spinwire::Error& error = f.exchange.error();
  ASSERT_GT(std::max(error.asked.capacity(), error.found.capacity()), short_text);
  f.exchange.reset();
  for (const std::string* text : {&error.asked, &error.found, &error.remedy}) {
    EXPECT_EQ(*text, "");
    EXPECT_EQ(text->capacity(), short_text);
  }
}

TEST(Exchange, VersionMismatchReachesBothEnds) {
  Fixture f;
  f.write(wire::encode(wire::Hello{endpoint(5)}, {{8, 9}, 0}).bytes());
  ASSERT_EQ(f.exchange.advance(), Progress::failed);
  EXPECT_EQ(f.exchange.error().status, Status::unsupported);
  EXPECT_EQ(f.exchange.error().found, "the peer speaks version 8 to 9, we speak version 1");
  EXPECT_EQ(f.exchange.refuse(wire::make_refuse(Status::unsupported, "")), Progress::waiting);
  // The refusal's header alone suffices for the peer, even if it cannot decode the body.
  const auto header = wire::decode_header(f.read(), {8, 9});
  ASSERT_FALSE(header);
  EXPECT_EQ(header.error().found, "the peer speaks version 1, we speak version 8 to 9");
}

TEST(Exchange, RefusalArrivesThoughThePeerWasStillSending) {
  ListenSocket listener = loopback::listener();
  Exchange client;
  ASSERT_TRUE(client.connect(listener.local(), kAnswer));
  ASSERT_EQ(client.send(wire::encode(wire::Hello{endpoint(100)})), Status::ok);
  ASSERT_TRUE(loopback::eventually([&] {
    EXPECT_EQ(client.advance(), Progress::waiting);
    return client.all_sent();
  }));
  auto accepted = loopback::accept_one(listener);
  ASSERT_TRUE(accepted);
  Exchange server;  // does not read the hello first
  server.adopt(std::move(accepted->fd), accepted->peer, kHelloOnly);
  ASSERT_TRUE(loopback::wait_ready(server.fd(), POLLIN));
  EXPECT_EQ(server.refuse(wire::make_refuse(Status::limit, "handshakes")), Progress::waiting);
  EXPECT_EQ(server.state(), Exchange::State::refusing);
  ASSERT_EQ(until_told(client), Progress::frame);
  EXPECT_EQ(std::get<wire::Refuse>(client.received().body).message(), "handshakes");
  client.reset();
  EXPECT_EQ(until_told(server), Progress::closed);
}

TEST(Exchange, RefusedPeerCannotKeepItBusy) {
  Fixture f;
  EXPECT_EQ(f.exchange.refuse(wire::make_refuse(Status::limit, "")), Progress::waiting);
  const std::string noise(1024, 'n');
  int rounds = 0;
  while (f.exchange.advance() == Progress::waiting && rounds < 100) {
    f.write(noise);
    ++rounds;
  }
  EXPECT_EQ(f.exchange.state(), Exchange::State::closed);
  EXPECT_GT(rounds, 8) << "some of it is read, lest the refusal be destroyed";
}

TEST(Exchange, SilentPeerLeavesItWaiting) {
  Fixture f;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(f.exchange.advance(), Progress::waiting);
  f.write(wire::encode(wire::Hello{endpoint(5)}).bytes().first(40));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(f.exchange.advance(), Progress::waiting);
}

TEST(Exchange, EndOfStreamBetweenFramesIsClosed) {
  Fixture f;
  f.peer.reset();
  EXPECT_EQ(f.exchange.advance(), Progress::closed);
  EXPECT_EQ(f.exchange.refuse(wire::make_refuse(Status::limit, "")), Progress::closed);
}

TEST(Exchange, EndOfStreamWithinAFrameNamesHowFarItCame) {
  const wire::Frame frame = wire::encode(wire::Hello{endpoint(5)});
  for (std::size_t size = 1; size < frame.size; ++size) {
    Fixture f;
    f.write(frame.bytes().first(size));
    ::shutdown(f.peer.get(), SHUT_WR);
    ASSERT_EQ(until_told(f.exchange), Progress::failed) << size;
    EXPECT_EQ(f.exchange.error().status, Status::peer_lost);
    const std::string expected =
        size < wire::kHeaderBytes ? " of 16 bytes of a header" : " of 86 bytes of a hello";
    EXPECT_EQ(f.exchange.error().found,
              "the stream ended after " + std::to_string(size) + expected);
  }
}

TEST(Exchange, ResetByThePeerIsPeerLost) {
  ListenSocket listener = loopback::listener();
  UniqueFd client = loopback::plain_client(listener.local());
  auto accepted = loopback::accept_one(listener);
  ASSERT_TRUE(accepted);
  Exchange server;
  server.adopt(std::move(accepted->fd), accepted->peer, kHelloOnly);
  const linger at_once{1, 0};
  ASSERT_EQ(::setsockopt(client.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
  client.reset();
  ASSERT_EQ(until_told(server), Progress::failed);
  EXPECT_EQ(server.error().status, Status::peer_lost);
  EXPECT_TRUE(contains(server.error().asked, server.peer_address()));
}

TEST(Exchange, RefusalIsReadEvenIfOurWriteFails) {
  Fixture f(kAnswer);
  f.write(wire::encode(wire::make_refuse(Status::limit, "full")).bytes());
  f.peer.reset();
  ASSERT_EQ(f.exchange.send(wire::encode(wire::Hello{endpoint(5)})), Status::ok);
  ASSERT_EQ(f.exchange.advance(), Progress::frame);
  EXPECT_EQ(std::get<wire::Refuse>(f.exchange.received().body).message(), "full");
  ASSERT_EQ(f.exchange.advance(), Progress::failed);
  EXPECT_EQ(f.exchange.error().status, Status::peer_lost);
}

TEST(Exchange, RefusedConnectionIsToldByAdvance) {
  const loopback::DeadPort dead;
  Exchange client;
  ASSERT_TRUE(client.connect(dead.address(), kAnswer));
  ASSERT_EQ(until_told(client), Progress::failed);
  EXPECT_EQ(client.error().status, Status::refused);
  EXPECT_TRUE(contains(client.error().asked, dead.address().str()));
  EXPECT_EQ(client.advance(), Progress::failed);
  EXPECT_EQ(client.refuse(wire::make_refuse(Status::limit, "")), Progress::closed);

  // reset() restores the initial state, for the next use of the pool's slot.
  client.reset();
  EXPECT_EQ(client.error().status, spinwire::Error{}.status);
  EXPECT_EQ(client.advance(), Progress::waiting);
  ListenSocket listener = loopback::listener();
  ASSERT_TRUE(client.connect(listener.local(), kAnswer));
  ASSERT_TRUE(loopback::eventually([&] {
    EXPECT_EQ(client.advance(), Progress::waiting);
    return client.state() == Exchange::State::open;
  }));
}

TEST(Exchange, UnansweredConnectionLeavesItWaiting) {
  // A full accept queue makes the kernel drop further attempts.
  ListenSocket listener = loopback::listener(0);
  std::array<Exchange, 8> clients;
  for (Exchange& client : clients) {
    ASSERT_TRUE(client.connect(listener.local(), kAnswer));
    for (int i = 0; i < 10; ++i) ASSERT_EQ(client.advance(), Progress::waiting);
  }
  EXPECT_EQ(clients.front().state(), Exchange::State::open);
  EXPECT_EQ(clients.back().state(), Exchange::State::connecting);
  EXPECT_EQ(clients.back().interest(), Interest::write);
  EXPECT_EQ(clients.back().send(wire::encode(wire::Hello{endpoint(5)})), Status::ok);
  EXPECT_EQ(clients.back().refuse(wire::make_refuse(Status::limit, "")), Progress::closed);
}

TEST(Exchange, LackOfDescriptorsIsToldAtOnce) {
  ListenSocket listener = loopback::listener();
  Exchange client;
  const loopback::NoDescriptors none;
  const auto connected = client.connect(listener.local(), kAnswer);
  ASSERT_FALSE(connected);
  EXPECT_EQ(connected.error().status, Status::limit);
  EXPECT_EQ(client.state(), Exchange::State::idle);
}

TEST(Exchange, SendQueueIsBounded) {
  Fixture f;
  spinwire::Endpoint endpoint = wire_test::valid_endpoint();
  ASSERT_EQ(endpoint.private_data.assign(std::vector<std::byte>(spinwire::kPrivateDataMax)),
            Status::ok);
  const wire::Frame longest = wire::encode(wire::Hello{endpoint});
  ASSERT_EQ(longest.size, sizeof longest.storage);
  EXPECT_EQ(f.exchange.send(longest), Status::ok);
  EXPECT_EQ(f.exchange.send(longest), Status::ok);
  EXPECT_EQ(f.exchange.send(longest), Status::would_block);
  EXPECT_EQ(f.exchange.send(wire::encode(wire::Ready{1})), Status::would_block);
  EXPECT_EQ(f.exchange.advance(), Progress::waiting);
  EXPECT_TRUE(f.exchange.all_sent());
  EXPECT_EQ(f.exchange.send(wire::encode(wire::Ready{1})), Status::ok);
  EXPECT_EQ(f.exchange.advance(), Progress::waiting);
  const auto bytes = f.read();
  ASSERT_EQ(bytes.size(), 2 * longest.size + 24);
  EXPECT_TRUE(decode(std::span(bytes).subspan(longest.size, longest.size)));
  EXPECT_TRUE(decode(std::span(bytes).last(24)));
}

// A peer that does not read must not block us, and loses or repeats no byte once it reads.
TEST(Exchange, FullSocketHoldsBytesBack) {
  Fixture f;
  const std::vector<std::byte> filler(1 << 16, std::byte{0x55});
  std::size_t filled = 0;
  for (ssize_t sent = 0; sent >= 0;
       filled += static_cast<std::size_t>(std::max<ssize_t>(sent, 0))) {
    sent = ::send(f.exchange.fd(), filler.data(), filler.size(), MSG_DONTWAIT);
  }
  const wire::Frame frame = wire::encode(wire::Ready{99});
  ASSERT_EQ(f.exchange.send(frame), Status::ok);
  EXPECT_EQ(f.exchange.advance(), Progress::waiting);
  ASSERT_FALSE(f.exchange.all_sent());
  EXPECT_EQ(f.exchange.interest(), Interest::read_write);
  // A refusal fits behind a full queue.
  EXPECT_EQ(f.exchange.refuse(wire::make_refuse(Status::timed_out, "late")), Progress::waiting);

  std::vector<std::byte> bytes;
  ASSERT_TRUE(loopback::eventually([&] {
    EXPECT_NE(f.exchange.advance(), Progress::failed);
    const auto more = f.read();
    bytes.insert(bytes.end(), more.begin(), more.end());
    return f.exchange.all_sent() && more.empty();
  }));
  ASSERT_EQ(bytes.size(), filled + frame.size + 16 + 5);
  const auto rest = std::span<const std::byte>(bytes).subspan(filled);
  EXPECT_EQ(std::get<wire::Ready>(decode(rest.first(frame.size))->body).incarnation, 99u);
  EXPECT_EQ(std::get<wire::Refuse>(decode(rest.subspan(frame.size))->body).message(), "late");
}

// A socket that takes only part of the queued bytes must not lose or repeat a byte.
TEST(Exchange, PartialWritesGoOnWhereTheyStopped) {
  ListenSocket listener = loopback::listener();
  const UniqueFd client = loopback::plain_client(listener.local());
  auto accepted = loopback::accept_one(listener);
  ASSERT_TRUE(accepted);
  const int least = 1;  // the kernel raises it to its own minimum
  ASSERT_EQ(::setsockopt(accepted->fd.get(), SOL_SOCKET, SO_SNDBUF, &least, sizeof(least)), 0);
  // Without TCP_NODELAY, part of a write can fill up a packet.
  const int off = 0;
  ASSERT_EQ(::setsockopt(accepted->fd.get(), IPPROTO_TCP, TCP_NODELAY, &off, sizeof(off)), 0);
  Exchange server;
  server.adopt(std::move(accepted->fd), accepted->peer, kHelloOnly);

  std::uint64_t sent = 0;
  const auto fill = [&] {
    while (server.send(wire::encode(wire::Ready{sent + 1})) == Status::ok) ++sent;
  };
  std::vector<std::byte> bytes;
  for (int stalls = 0; stalls < 3; ++stalls) {
    while (server.all_sent()) {
      fill();
      ASSERT_EQ(server.advance(), Progress::waiting);
    }
    fill();  // after the rest of the partial write
    ASSERT_TRUE(loopback::eventually([&] {
      std::array<std::byte, 65536> part;
      const ssize_t got = ::recv(client.get(), part.data(), part.size(), MSG_DONTWAIT);
      bytes.insert(bytes.end(), part.begin(), part.begin() + std::max<ssize_t>(got, 0));
      EXPECT_EQ(server.advance(), Progress::waiting);
      return bytes.size() >= sent * 24;
    }));
  }
  ASSERT_EQ(bytes.size(), sent * 24);
  for (std::uint64_t i = 0; i < sent; ++i) {
    const auto frame = decode(std::span<const std::byte>(bytes).subspan(i * 24, 24));
    ASSERT_TRUE(frame) << "frame " << i << ": " << frame.error().message();
    ASSERT_EQ(std::get<wire::Ready>(frame->body).incarnation, i + 1);
  }
}

}  // namespace exchange_test
