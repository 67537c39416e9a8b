// Forged messages on a connection for long calls: each ends that connection and is counted, but
// affects no session and no other call.
#include "rpc/long_calls_hostile.h"

namespace rpc_long_calls_hostile_test {
namespace {

/// Messages to a server. The last one ends the connection; the others are valid.
const std::vector<std::vector<Said>>& bad_for_servers() {
  static const std::vector<std::vector<Said>> all = {
      {{body(31)}},                                                           // no header
      {{body(64)}},                                                           // invalid
      {{call_message({8, 0, RpcMessageKind::reply, 0, 0, 0, 0, 0})}},         // a server's message
      {{call_message({8, 0, RpcMessageKind::cancelled, 0, 0, 0, 0, 0})}},     // a server's message
      {{call_message({8, 0, RpcMessageKind::cancel, 0, 0, 0, 0, 0})}},        // of no call
      {{call_message(call_of(8, 3), 3)}, {call_message(call_of(8, 3), 3)}},   // twice
      {{call_message(call_of(16, 3), 3)}, {call_message(call_of(8, 3), 3)}},  // backwards
      {{call_message(call_of(8, (1u << 20) + 1))}},                           // too long
      {{body(100), with(8)}},                                                 // without a header
      {{call_message(call_of(8, 100))}, {body(100), with(16)}},               // before its header
      {{call_message(call_of(8, 100))}, {body(99), with(8)}},                 // of another size
      {{call_message(call_of(8, 3), 3)}, {Bytes(), {IBV_WR_RDMA_WRITE_WITH_IMM, htobe32(8)}}},
      {{call_message(call_of(8, 3), 3)},
       {call_message({8, 0, RpcMessageKind::cancel, 0, 0, 0, 0, 0})},
       {call_message({9, 0, RpcMessageKind::cancel, 0, 0, 0, 0, 0})}},   // of another call
      {{call_message({0, 0, RpcMessageKind::goodbye, 0, 0, 0, 0, 0})}},  // a server's message
      {{call_message({kMoved, 0, RpcMessageKind::goodbye, 0, 0, 0, 0, 0})}},
      {{call_message({8, 0, RpcMessageKind::reply, kRefused, 0, 0, 0, 0, 5})}},
      {{call_message({8, kLater, RpcMessageKind::call, kHasCode, 0, 0, 0, 0})}},  // no code in it
      {{call_message({8, kLater, RpcMessageKind::call, kRefused, 0, 0, 0, 0, 5})}},
      {{call_message({8, kLater, RpcMessageKind::call, 0, 0, 0, 0, 0, 5})}},
      {{call_message(call_of(8, 3), 3)},
       {call_message({8, 0, RpcMessageKind::cancel, kRefused, 0, 0, 0, 0, 5})}},
  };
  return all;
}

TEST_F(RpcLongCallsHostile, WhatMakesNoSenseToAServerEndsItsConnection) {
  std::uint64_t count = 0;
  for (const auto& each : bad_for_servers()) {
    SCOPED_TRACE(count);
    attack_server();
    for (const Said& said : each) {
      EXPECT_EQ(bad(*server_), count);
      say(said.bytes, said.how);
      poll_some(20);
    }
    expect_ended(*server_, ++count);
  }
}

TEST_F(RpcLongCallsHostile, HandlersRunOnceForEachCall) {
  attack_server();
  say(call_message(call_of(8, 10, kEcho)));
  poll_some(20);
  EXPECT_EQ(runs_, 0);
  say(body(10), with(8));
  ASSERT_TRUE(run([&] { return runs_ == 1 && peer_.heard.size() == 1; }));
  // The request again, whose call is over.
  say(body(10), with(8));
  // A call that was overtaken in its slot.
  say(call_message(call_of(16, 10, kEcho)));
  say(call_message(call_of(24, 0, kEcho)));
  say(body(10), with(16));
  poll_some();
  EXPECT_EQ(runs_, 2);
  EXPECT_EQ(spinwire::rpc::stats(*server_->core->calls).late_replies, 2u);
  EXPECT_EQ(bad(*server_), 0u);
  peer_.fail();
  expect_ended(*server_, 0);
}

TEST_F(RpcLongCallsHostile, AKeyThatOpensNothingCostsTheConnectionAlone) {
  attack_server();
  RpcMessageHeader header = call_of(8, 3, kEcho);
  header.reply_capacity = 100;
  header.address = 0x1000;
  header.rkey = 0x12345;
  say(call_message(header, 3));
  expect_ended(*server_, 0);
  EXPECT_EQ(runs_, 2);
}

/// Messages that end the connection of a client whose call, with memory for its reply, has this
/// number.
std::vector<Said> bad_for_clients(std::uint32_t number) {
  const auto say = [](RpcMessageKind k, std::uint32_t n) {
    return call_message({n, 0, k, 0, 0, 0, 0, 0});
  };
  const auto notice = [](std::uint32_t n) { return How{IBV_WR_RDMA_WRITE_WITH_IMM, htobe32(n)}; };
  return {
      {body(31)},
      {body(64)},
      {say(RpcMessageKind::call, number)},
      {say(RpcMessageKind::cancel, number)},
      {say(RpcMessageKind::cancelled, number)},            // was not requested
      {say(RpcMessageKind::reply, number)},                // ok, but not in the caller's memory
      {say(RpcMessageKind::reply, number + 1)},            // to a call that was never made
      {say(RpcMessageKind::reply, number + 800)},          // to a call that was never made
      {say(RpcMessageKind::reply, number), with(number)},  // with an immediate
      {Bytes(), notice(number + 8)},                       // of no call
      {Bytes(), notice(number - 8)},                       // of a call that is over
  };
}

/// As above: messages with a code, and goodbyes.
std::vector<Said> bad_endings_for_clients(std::uint32_t number) {
  const auto reply = [number](int status, std::uint32_t code, std::size_t size = 0) {
    return call_message({number, 0, RpcMessageKind::reply, static_cast<std::uint8_t>(status),
                         static_cast<std::uint32_t>(size), 0, 0, 0, code});
  };
  std::vector<Said> all = {
      {reply(kHasCode, 5)},                                    // of success
      {reply(kHasCode | static_cast<int>(Status::limit), 5)},  // of another failure
      {reply(0xff, 5)},                                        // of no status
      {reply(static_cast<int>(Status::refused), 5)},           // not said to be there
      {reply(0, 5)},                                           // not said to be there
      {reply(kRefused, 5, 4)},                                 // of another size
      {reply(kRefused, 5), with(number)},                      // with an immediate
      {call_message(
          {number + 1, 0, RpcMessageKind::reply, kRefused, 0, 0, 0, 0, 5})},  // of no call
      {call_message({number, kEcho, RpcMessageKind::reply, kRefused, 0, 0, 0, 0, 5})},
      {call_message({number, 0, RpcMessageKind::cancelled, kHasCode, 0, 0, 0, 0})},
      {call_message({number, 0, RpcMessageKind::cancelled, kRefused, 0, 0, 0, 0, 5})},
  };
  // Goodbyes without a known reason, or for too long.
  for (const std::uint32_t n : {1u, 4u, 255u, 1u << 8, 3'600'001u << 8 | 2u, 1u << 31})
    all.push_back({call_message({n, 0, RpcMessageKind::goodbye, 0, 0, 0, 0, 0})});
  const auto goodbye = [&](auto&& change, std::size_t payload = 0) {
    RpcMessageHeader h{kMoved, 0, RpcMessageKind::goodbye, 0, 0, 0, 0, 0};
    change(h);
    all.push_back({call_message(h, payload)});
  };
  goodbye([](auto& h) { h.method = 1; });
  goodbye([](auto& h) { h.status = static_cast<std::uint8_t>(Status::flushed); });
  goodbye([](auto& h) { h.status = kRefused; });
  goodbye([](auto& h) { h.code = 5; });
  goodbye([](auto& h) { h.size = 3; }, 3);
  goodbye([](auto&) {}, 3);
  goodbye([](auto& h) { h.reply_capacity = 8, h.address = 8, h.rkey = 1; });
  goodbye([](auto& h) { h.kind = static_cast<RpcMessageKind>(6); });
  return all;
}

TEST_F(RpcLongCallsHostile, WhatMakesNoSenseToAClientEndsItsConnection) {
  expect_each_ends_client(bad_for_clients);
}

TEST_F(RpcLongCallsHostile, BadCodesAndGoodbyesEndTheConnectionOfAClient) {
  expect_each_ends_client(bad_endings_for_clients);
}

TEST_F(RpcLongCallsHostile, ARefusalsCodeComesToItsCall) {
  for (const std::uint32_t code : {0u, 0xffffffffu}) {
    attack_client(false);
    say(call_message({heard_.number, 0, RpcMessageKind::reply, kRefused, 5, 0, 0, 0, code}, 5));
    ASSERT_TRUE(run([&] { return ended_ == 1; }));
    EXPECT_EQ(status_, Status::refused);
    EXPECT_EQ(code_, std::optional(code));
    EXPECT_EQ(size_, 5u);
    peer_.fail();
    expect_ended(*client_, 0);
    ended_ = 0;
  }
}

TEST_F(RpcLongCallsHostile, AGoodbyeEndsTheSessionOnceItsCallIsOver) {
  attack_client(false);
  const Bytes goodbye = call_message({kMoved, 0, RpcMessageKind::goodbye, 0, 0, 0, 0, 0});
  for (int i = 0; i < 3; ++i) say(goodbye);
  poll_some();
  EXPECT_EQ(closed_, 0);
  EXPECT_EQ(ended_, 0);
  say(call_message({heard_.number, 0, RpcMessageKind::reply, 0, 5, 0, 0, 0}, 5));
  ASSERT_TRUE(run([&] { return ended_ == 1; }));
  EXPECT_EQ(status_, Status::ok);
  ASSERT_TRUE(run([&] {
    if (session_.state() != SessionState::ready) peer_.fail();  // it does not answer the close
    return closed_ == 1;
  }));
  EXPECT_EQ(bad(*client_), 0u);
  EXPECT_EQ(bad(*server_), 0u);
  peer_.close();
}

TEST_F(RpcLongCallsHostile, AReplyIsWrittenOnce) {
  attack_client(true);
  const How write{IBV_WR_RDMA_WRITE_WITH_IMM, htobe32(heard_.number), 0, heard_.address,
                  heard_.rkey};
  say(Bytes(300), write);
  ASSERT_TRUE(run([&] { return ended_ == 1; }));
  EXPECT_EQ(status_, Status::ok);
  EXPECT_EQ(size_, 300u);
  // Its key is closed by now, and its number is invalid.
  say(Bytes(), {IBV_WR_RDMA_WRITE_WITH_IMM, htobe32(heard_.number)});
  expect_ended(*client_, 1);
  EXPECT_EQ(ended_, 1);
}

TEST_F(RpcLongCallsHostile, NobodyWritesBehindTheRoom) {
  attack_client(true);
  const How write{IBV_WR_RDMA_WRITE_WITH_IMM, htobe32(heard_.number), 0, heard_.address,
                  heard_.rkey};
  say(Bytes(1001), write);
  expect_ended(*client_, 0);
  EXPECT_EQ(ended_, 1);
  EXPECT_EQ(status_, Status::peer_lost);
}

TEST_F(RpcLongCallsHostile, ASecondReplyComesToNobody) {
  attack_client(false);
  const Bytes reply = call_message({heard_.number, 0, RpcMessageKind::reply, 0, 5, 0, 0, 0}, 5);
  say(reply);
  ASSERT_TRUE(run([&] { return ended_ == 1; }));
  EXPECT_EQ(status_, Status::ok);
  EXPECT_EQ(size_, 5u);
  // The next call is in the same slot.
  peer_.heard.clear();
  const Buffer next = buffer(4050);
  const ReplyCallback done = [this](Reply& r) {
    ended_ += r.status() == Status::peer_lost ? 10 : 100;
  };
  ASSERT_EQ(session_.call(kEcho, next.slice(), done), Status::ok);
  ASSERT_TRUE(run([&] { return peer_.heard.size() == 2; }));
  say(reply);
  poll_some();
  EXPECT_EQ(ended_, 1);
  EXPECT_EQ(spinwire::rpc::stats(*client_->core->calls).late_replies, 1u);
  EXPECT_EQ(bad(*client_), 0u);
  peer_.fail();
  peer_.close();
  EXPECT_TRUE(run([&] { return ended_ == 11; }));
}

TEST_F(RpcLongCallsHostile, AConnectionFitsItsSessionOrNone) {
  SessionOptions options;
  options.on_closed = [this](Session, const Error&) { ++closed_; };
  Session other = client_->core->open_session(listener_.address(), options).value();
  ASSERT_TRUE(run([&] { return other.ready(); }));
  const std::uint32_t right = opened().peer_session;
  const std::uint32_t others =
      spinwire::rpc::find_client(*client_->core->calls, spinwire::detail::Internals::name(other))
          ->peer_session;
  std::uint64_t count = 0;
  for (const std::uint32_t wrong : {others, right ^ (1u << 20), 0x7fffffffu}) {
    opened().peer_session = wrong;
    const Buffer b = buffer(40000);
    const ReplyCallback done = [this](Reply& r) {
      ++ended_;
      status_ = r.status();
    };
    ended_ = 0;
    ASSERT_EQ(session_.call(kEcho, b.slice(), done), Status::ok);
    ASSERT_TRUE(run([&] { return ended_ == 1; }));
    EXPECT_EQ(status_, Status::not_connected);
    // The client asks once more when it has heard that the server is there.
    EXPECT_EQ(bad(*server_), count += 2);
  }
  opened().peer_session = right;
  EXPECT_EQ(runs_, 0);
  expect_unharmed();
}

}  // namespace
}  // namespace rpc_long_calls_hostile_test
