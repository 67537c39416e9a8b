// Two control ports with keys, and an attacker who connects them through a relay.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "control/control_port_fixture.h"
#include "control/key_files.h"
#include "control/relay.h"

namespace authentication_test {

using namespace control_port_test;  // the names of a test namespace
using control::AuthenticationFailure;
using control::KeyRing;
using key_files::line;
using relay_test::Bytes;
using relay_test::From;
using relay_test::kind_of;
using relay_test::Passing;
using relay_test::Relay;
using wire::FrameKind;

inline KeyRing ring(const std::string& text) { return std::move(*KeyRing::parse(text, "keys")); }

inline Bytes bytes_of(const wire::Frame& frame) {
  return {frame.bytes().begin(), frame.bytes().end()};
}

class Authentication : public ControlPortTest {
 protected:
  void use(const std::string& client, const std::string& server) {
    if (!client.empty()) client_.port.set_keys(ring(client));
    if (!server.empty()) server_.port.set_keys(ring(server));
  }
  void use(const std::string& both) { use(both, both); }

  static std::uint64_t failures(const Port& port, AuthenticationFailure why) {
    return port.port.authentication().failures.at(static_cast<std::size_t>(why));
  }
  /// An outbound handshake of subject 11 with `to` that has sent its hello.
  HandshakeId hello_to(const control::Address& to) {
    const auto id = client_.port.connect(to, client_owner_);
    EXPECT_TRUE(id);
    client_.port.assign(*id, 11);
    client_.port.ask(*id, endpoint(101, kClientIncarnation));
    return *id;
  }
  /// Connects through the relay until both ends have finished, one way or the other. Once
  /// `altered`, an end that waits for the rest of a frame gets the stream's end when nothing moves
  /// any more.
  void connect_through(Relay& relay, const bool* altered = nullptr) {
    constexpr int kIdleRounds = 100;
    const HandshakeId id = hello_to(relay.address());
    bool answered = false, confirmed = false;
    std::size_t passed = 0;
    int idle = 0;
    EXPECT_TRUE(until([&] {
      relay.pump();
      idle = relay.passed().size() == passed ? idle + 1 : 0;
      passed = relay.passed().size();
      if (altered != nullptr && *altered && idle > kIdleRounds) relay.cut();
      if (!answered && listener_->offered) {
        answered = true;
        server_.port.answer(listener_->offered, endpoint(202, kServerIncarnation));
      }
      if (!confirmed && client_owner_.saw("accept 11")) {
        confirmed = true;
        client_.port.confirm(id, kServerIncarnation);
      }
      return client_.port.handshakes() == 0 && server_.port.handshakes() == 0;
    }));
  }
  /// Begins to connect through the relay. The first that the client's owner hears is that it
  /// failed.
  void expect_failure_through(Relay& relay) {
    (void)hello_to(relay.address());
    EXPECT_TRUE(until([&] {
      relay.pump();
      return !client_owner_.events.empty();
    }));
    EXPECT_TRUE(client_owner_.saw("failed 11"));
  }
  /// Connects without an attacker, until the client knows the outcome.
  void connect() {
    (void)hello();
    EXPECT_TRUE(until([&] {
      if (listener_->offered)
        server_.port.answer(listener_->offered, endpoint(202, kServerIncarnation));
      return !client_owner_.events.empty();
    }));
  }
  void forget() {
    client_owner_.events.clear();
    server_owner_.events.clear();
    listener_->offered = {};
    listener_->asked.clear();
  }
  [[nodiscard]] bool server_owner_was_asked() const {
    return listener_->offered || !listener_->asked.empty() || !server_owner_.events.empty();
  }
};

inline const std::string kKey = line("2026", 'a');

}  // namespace authentication_test
