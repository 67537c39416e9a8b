// A session whose connection for long calls has a raw peer at one end.
#pragma once

#include <endian.h>

#include <functional>
#include <optional>
#include <vector>

#include "agent/raw_peer.h"
#include "base/internals.h"
#include "rpc/bare_engine.h"
#include "rpc/client_session.h"
#include "rpc/long_calls.h"
#include "rpc/server_session.h"
#include "rpc/transport/connection_transport.h"

namespace rpc_long_calls_hostile_test {

using namespace rpc_test;  // NOLINT: a test's helpers
using raw_peer::How;
using raw_peer::message;
using raw_peer::Peer;
using spinwire::Endpoint;
using spinwire::PrepareOptions;
using spinwire::agent::Agent;
using spinwire::rpc::ClientSession;
using spinwire::rpc::ServerSession;
using spinwire::wire::MessageKind;
using spinwire::wire::RendezvousVerdict;
using spinwire::wire::RpcMessageHeader;
using spinwire::wire::RpcMessageKind;

inline Bytes call_message(const RpcMessageHeader& header, std::size_t payload = 0) {
  const auto head = spinwire::wire::encode(header);
  Bytes bytes(head.begin(), head.end());
  bytes.resize(bytes.size() + payload);
  return message(MessageKind::data, bytes, spinwire::wire::message_flag::kWantCredit);
}
inline Bytes body(std::size_t size) {
  return message(MessageKind::data, Bytes(size), spinwire::wire::message_flag::kWantCredit);
}
inline How with(std::uint32_t number) { return {IBV_WR_SEND_WITH_IMM, htobe32(number)}; }

/// A session whose connection for long calls has a raw peer at one end.
class RpcLongCallsHostile : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the raw peer is its own device";
    server_.emplace(config(), ticks(), server_device());
    client_.emplace(config(), ticks());
    listener_ = std::move(*server_->core->listen("127.0.0.1:0", {}));
    ASSERT_TRUE(server_->core->serve(kEcho, [this](Request& r) {
      ++runs_;
      (void)r.reply(r.bytes());
    }));
    ASSERT_TRUE(server_->core->serve(kLater, [this](Request& r) { later_.push_back(r.defer()); }));
    SessionOptions options;
    options.on_closed = [this](Session, const Error&) { ++closed_; };
    session_ = client_->core->open_session(listener_.address(), options).value();
    ASSERT_TRUE(run([&] { return session_.ready(); }));
  }
  /// The engines' clock; null: the real one. Each turn of run() moves it by a microsecond.
  [[nodiscard]] virtual const std::uint64_t* ticks() const { return nullptr; }
  [[nodiscard]] virtual const spinwire::verbs::Provider* server_device() { return nullptr; }
  /// The raw peer sees the keys of replies.
  [[nodiscard]] virtual Config config() const { return with_reply_keys(quick()); }
  static Config quick() {
    Config c = long_call_config();
    c.rpc.direct_datagrams = spinwire::DirectPath::off;  // so that eager messages are long calls
    c.queue_pair.ack_timeout = 8;
    c.connections.keepalive_interval = 20ms * slowness();
    return c;
  }
  template <typename Done>
  bool run(Done&& done) {
    return until({}, [&] {
      now_ += 1000;
      (void)server_->core->poll();
      (void)client_->core->poll();
      peer_.poll();
      peer_.control();
      return done();
    });
  }
  void poll_some(int rounds = 200) {
    int left = rounds;
    (void)run([&] { return left-- == 0; });
  }
  [[nodiscard]] ClientSession& opened() const {
    return *spinwire::rpc::find_client(*client_->core->calls,
                                       spinwire::detail::Internals::name(session_));
  }
  [[nodiscard]] ServerSession& served() const {
    return *spinwire::rpc::find_server(*server_->core->calls, opened().peer_session);
  }
  /// Connects the raw peer with the engine.
  [[nodiscard]] Agent* attack(const Bare& node) {
    said_ = 0;
    victim_ = node.core->prepare({}).value();
    EXPECT_TRUE(run([&] { return victim_.endpoint().has_value(); }));
    const Endpoint mine = peer_.open();
    peer_.join(*victim_.endpoint());
    EXPECT_TRUE(victim_.join(mine));
    EXPECT_TRUE(run([&] { return victim_.ready(); }));
    auto& s = node.core->context;
    for (std::uint32_t i = 0; i < s.agents.capacity(); ++i) {
      Agent& a = s.agents.at(i);
      if (s.agents.in_use(i) && spinwire::agent::handle(s, a) == victim_) return &a;
    }
    return nullptr;
  }
  /// Sends once there is credit.
  void say(const Bytes& bytes, const How& how = {}) {
    ASSERT_TRUE(run([&] { return peer_.granted() > said_; }));
    ++said_;
    ASSERT_TRUE(peer_.send(bytes, how));
  }
  /// The raw peer poses as the session's client.
  void attack_server() {
    Agent* const a = attack(*server_);
    ASSERT_NE(a, nullptr);
    join_session(*server_->core->calls, served(), *a);
    // Replaces the connection that the client may have had.
    ASSERT_TRUE(run([&] {
      return opened().connection == nullptr ||
             opened().connection->agent.index == spinwire::agent::kNone;
    }));
  }
  /// The raw peer poses as the server and has received a call.
  void attack_client(bool room) {
    auto& r = *client_->core->calls;
    if (opened().connection != nullptr) {  // of the last test
      if (Agent* const a = agent_of(r, *opened().connection); a != nullptr)
        spinwire::agent::close(client_->core->context, *a);
      ASSERT_TRUE(run([&] { return opened().connection->agent.index == spinwire::agent::kNone; }));
    }
    Agent* const a = attack(*client_);
    ASSERT_NE(a, nullptr);
    CallOptions options;
    if (room) block_ = buffer(1000);
    if (room) options.reply_into = block_.slice();
    const ReplyCallback done = [this](Reply& reply) {
      ++ended_;
      status_ = reply.status();
      size_ = reply.bytes().size();
      code_ = reply.code();
      if (on_done_) on_done_();
    };
    const Buffer request = buffer(4050);
    ASSERT_EQ(session_.call(kEcho, request.slice(0, room ? 20 : 4050), done, options), Status::ok);
    attach_connection(r, opened(), *a);
    queue_connection(r, *opened().connection);
    ASSERT_TRUE(run([&] { return peer_.heard.size() == (room ? 1u : 2u); }));
    std::span<const std::byte> payload;
    ASSERT_TRUE(decode(std::span(peer_.heard[0].body), heard_, payload));
  }
  [[nodiscard]] Buffer buffer(std::size_t size) const {
    auto* const block =
        client_->core->context.arena->allocate(spinwire::memory::PoolId::send, size);
    EXPECT_NE(block, nullptr);
    return spinwire::detail::make<Buffer>(block, size);
  }
  [[nodiscard]] static std::uint64_t bad(const Bare& node) {
    return spinwire::rpc::stats(*node.core->calls).bad_long_calls;
  }
  /// Checks that only this connection has ended.
  void expect_ended(const Bare& node, std::uint64_t bad_ones) {
    EXPECT_TRUE(run([&] { return victim_.state() == ConnectionState::closed; }));
    EXPECT_EQ(bad(node), bad_ones);
    peer_.close();
    expect_unharmed();
  }
  void expect_unharmed() {
    later_.clear();
    int ended = 0;
    Status status = Status::system;
    const ReplyCallback done = [&](Reply& r) {
      ++ended;
      status = r.status();
    };
    for (const std::size_t size : {9u, 5000u}) {
      const Buffer b = buffer(size);
      EXPECT_EQ(session_.call(size == 9 ? kEcho : kLater, b.slice(), done), Status::ok);
    }
    EXPECT_TRUE(run([&] { return ended == 1 && !later_.empty(); }));
    EXPECT_EQ(status, Status::ok);
    EXPECT_EQ(later_.back().reply(filled(3, 1)), Status::ok);
    EXPECT_TRUE(run([&] { return ended == 2; }));
    EXPECT_EQ(status, Status::ok);
    EXPECT_EQ(closed_, 0);
    block_.reset();
    server_->expect_clean();
    client_->expect_clean();
  }
  /// Each of the messages to a client with a call ends the connection, and the call.
  template <typename Messages>
  void expect_each_ends_client(Messages&& messages, bool room = true) {
    const std::size_t count = messages(0u).size();
    for (std::size_t i = 0; i < count; ++i) {
      SCOPED_TRACE(i);
      ended_ = 0;
      attack_client(room);
      EXPECT_EQ(heard_.reply_capacity, room ? 1000u : 0u);
      const auto said = messages(heard_.number)[i];
      say(said.bytes, said.how);
      expect_ended(*client_, i + 1);
      EXPECT_EQ(ended_, 1);
      EXPECT_EQ(status_, Status::peer_lost);
      if (HasFailure()) return;
    }
  }
  using ReplyCallback = spinwire::ReplyCallback;

  std::uint64_t now_ = 1'000'000'000;
  std::function<void()> on_done_;  ///< at the end of the raw peer's call
  std::optional<Bare> server_, client_;
  Peer peer_;
  Listener listener_;
  Session session_;
  Connection victim_;
  RpcMessageHeader heard_;
  Buffer block_;
  std::vector<PendingCall> later_;
  std::uint32_t said_ = 0;
  int runs_ = 0, closed_ = 0, ended_ = 0;
  Status status_ = Status::system;
  std::size_t size_ = 0;
  std::optional<std::uint32_t> code_;
};

inline RpcMessageHeader call_of(std::uint32_t number, std::uint32_t size,
                                spinwire::Method method = kLater) {
  return {number, method, RpcMessageKind::call, 0, size, 0, 0, 0};
}

using spinwire::wire::kHasCode;
inline constexpr std::uint8_t kRefused = static_cast<std::uint8_t>(Status::refused) | kHasCode;
/// A goodbye's number: the application's server has moved, for 5 ms.
inline constexpr std::uint32_t kMoved =
    5u << 8 | static_cast<std::uint32_t>(spinwire::GoodbyeReason::draining);

struct Said {
  Bytes bytes;
  How how{};
};

}  // namespace rpc_long_calls_hostile_test
