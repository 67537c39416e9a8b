// Control ports without an engine: their owners record events, their peers are plain sockets or
// another port.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "control/control_port.h"
#include "control/loopback.h"
#include "wire/endpoints.h"

namespace control_port_test {

namespace control = spinwire::control;
namespace verbs = spinwire::verbs;
namespace wire = spinwire::wire;
using namespace std::chrono_literals;
using control::ControlPort;
using control::HandshakeId;
using control::ListenerId;
using spinwire::Endpoint;
using spinwire::Error;
using spinwire::GidType;
using spinwire::Nanoseconds;
using spinwire::Result;
using spinwire::Status;
using spinwire::base::UniqueFd;

/// No limit for a probe; the port's own limit is shorter.
constexpr Nanoseconds kNoLimit = std::chrono::hours(1);

inline Endpoint endpoint(std::uint32_t qp_num, std::uint64_t incarnation) {
  Endpoint e = wire_test::valid_endpoint();
  e.gid_type = GidType::embedded;
  e.qp_num = qp_num;
  e.incarnation = incarnation;
  return e;
}

inline wire::SessionEnd session_end(std::uint32_t name, std::uint64_t incarnation) {
  wire::SessionEnd end = wire_test::valid_session_end();
  end.gid_type = GidType::embedded;
  end.name = name;
  end.incarnation = incarnation;
  return end;
}

/// Records what a port reports, in order, as "event subject".
struct Owner : control::ConnectionOwner,
               control::SessionOwner,
               control::ServedSessionOwner,
               control::ProbeOwner {
  std::vector<std::string> events;
  Endpoint peer;
  wire::SessionEnd server;
  std::uint64_t challenge = 0;
  Error error{Status::ok, {}, {}, {}};
  HandshakeId opened;
  control::ProbedEngine last_probed;
  ControlPort* confirms_with = nullptr;  ///< confirms sessions that are opened
  bool accepts = true;

  void add(const char* event, std::uint64_t subject) {
    events.push_back(std::string(event) + ' ' + std::to_string(subject));
  }
  [[nodiscard]] bool saw(std::string_view event) const {
    return std::find(events.begin(), events.end(), event) != events.end();
  }
  Result<void> on_accept(std::uint64_t subject, const Endpoint& from) override {
    add("accept", subject);
    peer = from;
    if (accepts) return {};
    return tl::unexpected(Error{Status::unsupported, "accept", "not to our liking", ""});
  }
  void on_confirmed(std::uint64_t subject) override { add("confirmed", subject); }
  void on_refused(std::uint64_t subject, const wire::Refuse& refusal) override {
    add("refused", subject);
    error = {refusal.status, "", std::string(refusal.message()), ""};
    error.code = refusal.code;
    error.goodbye = refusal.goodbye;
  }
  void on_failed(std::uint64_t subject, const Error& why) override {
    add("failed", subject);
    error = why;
  }
  std::optional<verbs::Place> place;  ///< of its connections; none: the engine's
  void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) override {
    add(outcome ? "resolved" : "not resolved", subject);
  }
  [[nodiscard]] const verbs::Place* own_place(std::uint64_t) const noexcept override {
    return place ? &*place : nullptr;
  }
  void on_opened(std::uint64_t subject, HandshakeId handshake,
                 const wire::SessionEnd& end) override {
    add("opened", subject);
    server = end;
    if (confirms_with != nullptr) confirms_with->confirm(handshake, end.incarnation);
  }
  void on_open_refused(std::uint64_t subject, const wire::Refuse& refusal) override {
    add("open_refused", subject);
    error = {refusal.status, "", std::string(refusal.message()), ""};
    error.code = refusal.code;
  }
  void on_open_failed(std::uint64_t subject, const Error& why) override {
    add("open_failed", subject);
    error = why;
  }
  void on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) override {
    add("unconfirmed", subject);
    EXPECT_EQ(opened_at, 33u);
  }
  void on_challenge_due(std::uint64_t subject, std::uint64_t token) override {
    add("challenge", subject);
    challenge = token;
  }
  void on_path_validated(std::uint64_t subject) override { add("validated", subject); }
  void on_probe_ended(const control::ProbedEngine& probed, control::ProbeOutcome outcome) override {
    constexpr std::array kWords = {"none",   "alive",       "restarted",  "handed_over",
                                   "silent", "no_listener", "unreachable"};
    add(kWords.at(static_cast<std::size_t>(outcome)), probed.incarnation);
    last_probed = probed;
  }
};

/// Accepts every request of peers, or refuses it with `refusal`.
struct ListenerRecord : control::ListenerOwner {
  explicit ListenerRecord(Owner& to) : owner(to) {}
  Owner& owner;
  Status refusal = Status::ok;
  HandshakeId handshake;
  HandshakeId offered;  ///< to on_hello()
  Endpoint client;
  wire::SessionEnd session_client;
  spinwire::PrivateData session_data;  ///< for clients of sessions
  Error session_refusal;               ///< of sessions, if it has a text
  wire::JoinSession joined;
  std::uint64_t path_token = 0;  ///< what clients have to show
  bool has_room = true;          ///< for connections
  /// Peers whose address begins so find room only when one of their own source ends.
  std::string needs_own_source = "none";
  std::uint32_t ending = 0;        ///< half-open connections
  std::vector<std::string> asked;  ///< whether there is room, by these peers
  std::function<void()> inside;    ///< runs inside of on_hello()
  // Through rdma_cm:
  std::vector<spinwire::PrivateData> cm_asked;  ///< the clients' data, each time it was asked
  spinwire::PrivateData cm_client;              ///< of the client that it took
  spinwire::PrivateData cm_given;               ///< to that client
  spinwire::PrivateData cm_data;                ///< for clients
  std::optional<Error> cm_refusal;              ///< of clients
  std::optional<verbs::Place> place;            ///< of its connections; none: the engine's

  [[nodiscard]] const verbs::Place* own_place() const noexcept override {
    return place ? &*place : nullptr;
  }
  Result<control::AcceptedConnection> take(HandshakeId id) {
    handshake = id;
    if (refusal != Status::ok) return tl::unexpected(Error{refusal, "listen", "not today", ""});
    return control::AcceptedConnection{&owner, 77};
  }
  Result<control::Admission> admit(const control::Address& peer, const Endpoint*) override {
    asked.push_back(peer.str());
    return control::Admission{has_room, ending, peer.str().starts_with(needs_own_source),
                              peer.source()};
  }
  Result<control::AcceptedConnection> on_hello(HandshakeId id, const control::Address& peer,
                                               const Endpoint& from) override {
    EXPECT_TRUE(peer.is_loopback());
    client = from;
    offered = id;
    if (inside) inside();
    return take(id);
  }
  Result<control::AcceptedConnection> on_join_session(HandshakeId id, const control::Address&,
                                                      const wire::JoinSession& join) override {
    joined = join;
    return take(id);
  }
  Result<control::AcceptedSession> on_open_session(HandshakeId id, const control::Address& peer,
                                                   const wire::SessionEnd& from) override {
    handshake = id;
    session_client = from;
    if (!session_refusal.found.empty()) return tl::unexpected(session_refusal);
    if (refusal != Status::ok) return tl::unexpected(Error{refusal, "listen", "not today", ""});
    EXPECT_TRUE(peer.is_loopback());
    wire::SessionEnd ours = session_end(44, 2);
    ours.first = from.first;
    ours.token = 99;
    ours.private_data = session_data;
    return control::AcceptedSession{ours, &owner, 44, 33, path_token};
  }
  Result<spinwire::PrivateData> on_cm_hello(HandshakeId, control::CmId&,
                                            const control::CmHello& hello) override {
    cm_asked.push_back(hello.private_data);
    if (cm_refusal) return tl::unexpected(*cm_refusal);
    return cm_data;
  }
  Result<control::AcceptedConnection> on_cm_request(HandshakeId id, control::CmId&,
                                                    const control::CmHello& hello,
                                                    const spinwire::PrivateData& ours) override {
    cm_client = hello.private_data;
    cm_given = ours;
    return take(id);
  }
};

inline constexpr std::uint64_t kClientIncarnation = 1, kServerIncarnation = 2;

/// A port with its own clock.
struct Port {
  explicit Port(std::uint64_t incarnation, std::uint32_t handshakes = 4, bool is_open = false)
      : timers(1, 0), port({handshakes, handshakes, 500ms, incarnation, is_open}, clock, timers) {
    const auto opened = port.open();
    EXPECT_TRUE(opened);
  }
  void step() {
    port.poll();
    timers.advance(now, 64, [this](spinwire::base::Timer& timer) {
      EXPECT_EQ(timer.kind, control::kHandshakeTimer);
      port.on_timer(timer);
    });
    const auto clean = port.audit();
    EXPECT_TRUE(clean) << clean.error().message();
  }

  /// A pause of the whole process, without a poll.
  void pass(Nanoseconds time) { now += static_cast<std::uint64_t>(time.count()); }
  /// Time in which the port is polled.
  void pass_with_polls(Nanoseconds time) {
    constexpr Nanoseconds kStep = std::chrono::milliseconds(1);
    for (; time.count() > 0; time -= kStep) {
      pass(kStep);
      port.poll();
    }
  }

  std::uint64_t now = 0;
  spinwire::Clock clock = spinwire::Clock::manual(&now);
  spinwire::base::TimerWheel timers;
  ControlPort port;
};

class ControlPortTest : public testing::Test {
 protected:
  ControlPortTest() {
    listener_ = std::make_shared<ListenerRecord>(server_owner_);
    const auto id = server_.port.listen(loopback::any_port(), listener_);
    EXPECT_TRUE(id);
    if (id) listening_ = *id;
    client_owner_.confirms_with = &client_.port;
  }
  ~ControlPortTest() override {
    server_.port.close();
    EXPECT_EQ(server_.port.handshakes(), 0u);
    EXPECT_EQ(server_.timers.size(), 0u);
  }
  [[nodiscard]] control::Address server_address() const {
    return *control::Address::parse(server_.port.address_of(listening_));
  }
  template <typename Done>
  bool until(Done&& done) {
    return loopback::eventually([&] {
      client_.step();
      server_.step();
      return done();
    });
  }
  /// An outbound handshake of subject 11 that has sent its hello.
  HandshakeId hello() {
    const auto id = client_.port.connect(server_address(), client_owner_);
    EXPECT_TRUE(id);
    client_.port.assign(*id, 11);
    client_.port.ask(*id, endpoint(101, kClientIncarnation));
    return *id;
  }
  UniqueFd plain_peer(const char* source = nullptr) {
    return loopback::plain_client(server_address(), source);
  }
  static void say(const UniqueFd& fd, std::span<const std::byte> bytes) {
    EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  /// Whether the port has closed the connection. Drops bytes that it has sent.
  static bool ended(const UniqueFd& fd) {
    std::array<char, 512> bytes;
    for (;;) {
      const ssize_t got = ::recv(fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
      if (got < 0) return false;
    }
  }

  Owner client_owner_, server_owner_;
  Port client_{kClientIncarnation}, server_{kServerIncarnation};
  std::shared_ptr<ListenerRecord> listener_;
  ListenerId listening_;
};

}  // namespace control_port_test
