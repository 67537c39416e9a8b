// What applications say of themselves in a handshake, and refusals of applications, through ports
// without an engine.
#include "control/control_port_fixture.h"

namespace control_port_test {
namespace {

using spinwire::PrivateData;

PrivateData data_of(std::size_t size) {
  const std::vector<std::byte> bytes(size, std::byte{0x5a});
  PrivateData data;
  EXPECT_EQ(data.assign(bytes), Status::ok);
  return data;
}

Error application_error(std::uint32_t code) {
  Error why{Status::refused, "accept a peer", "come back on Monday", ""};
  why.code = code;
  return why;
}

class HandshakeIdentity : public ControlPortTest {
 protected:
  /// The frame that a plain peer gets next.
  wire::Received read(const UniqueFd& fd) {
    std::vector<std::byte> got;
    std::array<std::byte, wire::kFrameBytesMax> bytes;
    EXPECT_TRUE(until([&] {
      const ssize_t more = ::recv(fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (more > 0) got.insert(got.end(), bytes.begin(), bytes.begin() + more);
      const auto header = wire::decode_header(got);
      return header && got.size() == wire::kHeaderBytes + header->body_length;
    }));
    auto received = wire_test::decode_frame(got);
    EXPECT_TRUE(received);
    return received ? *received : wire::Received{};
  }
  wire::SessionEnd client_end(bool takes) {
    wire::SessionEnd end = session_end(22, kClientIncarnation);
    end.application_fields = takes;
    end.private_data = data_of(7);
    return end;
  }
};

TEST_F(HandshakeIdentity, ConnectionsCarryPrivateDataBothWays) {
  const auto id = client_.port.connect(server_address(), client_owner_);
  ASSERT_TRUE(id);
  client_.port.assign(*id, 11);
  Endpoint ours = endpoint(101, kClientIncarnation);
  ours.application_fields = true;
  ours.private_data = data_of(spinwire::kPrivateDataMax);
  client_.port.ask(*id, ours);
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(listener_->client, ours);
  EXPECT_EQ(server_.port.key_of(listener_->handshake), "");
  Endpoint theirs = endpoint(102, kServerIncarnation);
  theirs.private_data = data_of(3);
  server_.port.answer(listener_->handshake, theirs);
  ASSERT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
  EXPECT_EQ(client_owner_.peer.private_data, theirs.private_data);
}

TEST_F(HandshakeIdentity, SessionsCarryPrivateDataBothWays) {
  listener_->session_data = data_of(spinwire::kPrivateDataMax);
  ASSERT_TRUE(client_.port.open_session(server_address(), client_end(true), client_owner_, 22));
  ASSERT_TRUE(until([&] { return client_owner_.saw("opened 22"); }));
  EXPECT_EQ(listener_->session_client.private_data, data_of(7));
  EXPECT_EQ(client_owner_.server.private_data, listener_->session_data);
}

// A peer of a release that does not know them can be accepted and refused all the same.
TEST_F(HandshakeIdentity, PeersThatDoNotTakeThemGetNone) {
  listener_->session_data = data_of(9);
  for (const bool takes : {false, true}) {
    const UniqueFd fd = plain_peer();
    say(fd, wire::encode(wire::OpenSession{client_end(takes)}).bytes());
    const wire::Received answer = read(fd);
    const auto* opened = std::get_if<wire::SessionOpened>(&answer.body);
    ASSERT_NE(opened, nullptr);
    EXPECT_EQ(opened->end.private_data, takes ? data_of(9) : PrivateData());
  }
  for (const bool takes : {false, true}) {
    const UniqueFd fd = plain_peer();
    Endpoint e = endpoint(101, kClientIncarnation);
    e.application_fields = takes;
    listener_->handshake = {};
    say(fd, wire::encode(wire::Hello{e}).bytes());
    ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
    Endpoint ours = endpoint(102, kServerIncarnation);
    ours.private_data = data_of(9);
    server_.port.answer(listener_->handshake, ours);
    const wire::Received answer = read(fd);
    const auto* accept = std::get_if<wire::Accept>(&answer.body);
    ASSERT_NE(accept, nullptr);
    EXPECT_EQ(accept->endpoint.private_data, takes ? data_of(9) : PrivateData());
  }
  listener_->session_refusal = application_error(77);
  for (const bool takes : {false, true}) {
    const UniqueFd fd = plain_peer();
    say(fd, wire::encode(wire::OpenSession{client_end(takes)}).bytes());
    const wire::Received answer = read(fd);
    const auto* refusal = std::get_if<wire::Refuse>(&answer.body);
    ASSERT_NE(refusal, nullptr);
    EXPECT_EQ(refusal->code, takes ? std::optional<std::uint32_t>(77) : std::nullopt);
    EXPECT_EQ(refusal->message(), "come back on Monday");
  }
}

TEST_F(HandshakeIdentity, AnApplicationsRefusalHasItsCodeAndText) {
  listener_->session_refusal = application_error(0xfffffff0);
  ASSERT_TRUE(client_.port.open_session(server_address(), client_end(true), client_owner_, 22));
  ASSERT_TRUE(until([&] { return client_owner_.saw("open_refused 22"); }));
  EXPECT_EQ(client_owner_.error.status, Status::refused);
  EXPECT_EQ(client_owner_.error.code, 0xfffffff0u);
  EXPECT_EQ(client_owner_.error.found, "come back on Monday");
  EXPECT_EQ(server_.port.refusals(), 1u);
}

// A hostile peer: lengths beyond the frame, and beyond the limit.
TEST_F(HandshakeIdentity, LengthsOfPrivateDataThatLieAreRefused) {
  for (const unsigned length : {0u, 6u, 8u, 256u, 257u, 0xffffu}) {
    wire::Frame frame = wire::encode(wire::OpenSession{client_end(true)});
    const std::size_t at = wire::kHeaderBytes + wire::kSessionBytes;
    frame.storage[at] = static_cast<std::byte>(length);
    frame.storage[at + 1] = static_cast<std::byte>(length >> 8);
    const UniqueFd fd = plain_peer();
    say(fd, frame.bytes());
    const wire::Received answer = read(fd);
    const auto* refusal = std::get_if<wire::Refuse>(&answer.body);
    ASSERT_NE(refusal, nullptr) << length;
    EXPECT_EQ(refusal->status, Status::protocol);
    EXPECT_FALSE(listener_->handshake) << "the owner saw it";
  }
}

}  // namespace
}  // namespace control_port_test
