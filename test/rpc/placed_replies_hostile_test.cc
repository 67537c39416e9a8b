// Forged replies to calls whose reply the client places in memory itself: no reply is longer than
// its memory, and nothing changes the memory once the call is over.
#include <algorithm>

#include "rpc/long_calls_hostile.h"
#include "verbs/providers.h"

namespace rpc_placed_replies_hostile_test {
namespace {

using namespace rpc_long_calls_hostile_test;  // NOLINT: a test's helpers

constexpr auto kOk = static_cast<std::uint8_t>(Status::ok);

class RpcPlacedRepliesHostile : public RpcLongCallsHostile {
 protected:
  [[nodiscard]] Config config() const override {
    Config c = quick();
    c.connections.direct_messages = spinwire::DirectPath::automatic;
    return c;
  }
  void TearDown() override {
    on_done_ = {};
    memory_ = {};
  }
  /// Sends without a poll of the client, which has granted credit: see gather().
  void put(const Bytes& bytes, const How& how = {}) {
    ASSERT_GT(peer_.granted(), said_);
    ++said_;
    ASSERT_TRUE(peer_.send(bytes, how));
  }
  /// Sends replies to a call that is over until the client has granted credit for more messages.
  void gather(std::uint32_t more) {
    for (int i = 0; i < 10 && peer_.granted() < said_ + more; ++i) {
      say(call_message({old(), 0, RpcMessageKind::reply, kOk, 0, 0, 0, 0}));
      poll_some(20);
    }
    ASSERT_GE(peer_.granted(), said_ + more);
    late_ = late();
  }
  /// The number of a call that is over.
  [[nodiscard]] std::uint32_t old() const { return heard_.number - opened().connection->window; }
  [[nodiscard]] std::uint64_t late() const {
    return spinwire::rpc::stats(*client_->core->calls).late_replies;
  }
  [[nodiscard]] Bytes offer(std::uint32_t bytes, std::uint32_t id) const {
    return message(MessageKind::rendezvous_offer, spinwire::wire::encode(peer_.offer(bytes, id)),
                   spinwire::wire::message_flag::kWantCredit);
  }
  /// What the client answers to the offer with this id; none: nothing yet.
  [[nodiscard]] std::optional<RendezvousVerdict> answer_to(std::uint32_t id) const {
    for (const auto& each : peer_.heard) {
      spinwire::wire::RendezvousAnswer answer;
      if (each.header.kind == MessageKind::rendezvous_answer &&
          spinwire::wire::decode(each.body, answer) && answer.id == id)
        return answer.verdict;
    }
    return {};
  }
  /// The client fetches a reply to a call that is over from where all offers are.
  void prepare_old_reply() {
    const auto head = spinwire::wire::encode(RpcMessageHeader{old(), 0, RpcMessageKind::reply});
    std::ranges::copy(head, peer_.offered(head.size()).begin());
  }
  /// Fills the call's memory when the call ends. Nobody may change it afterwards.
  void watch_memory() {
    memory_ = block_.slice();
    on_done_ = [this] { std::ranges::fill(memory_.bytes(), std::byte{0x11}); };
  }
  void expect_untouched() {
    poll_some();
    EXPECT_TRUE(std::ranges::all_of(memory_.bytes(), [](std::byte b) {
      return b == std::byte{0x11};
    })) << "the memory has changed since the call ended";
    memory_ = {};
    on_done_ = {};
  }

  BufferSlice memory_;
  std::uint64_t late_ = 0;  ///< counted before the test's own messages
};

TEST_F(RpcPlacedRepliesHostile, TheServerLearnsNoKey) {
  attack_client(true);
  EXPECT_EQ(heard_.reply_capacity, 1000u);
  EXPECT_EQ(heard_.address, 0u);
  EXPECT_EQ(heard_.rkey, 0u);
  peer_.fail();
  expect_ended(*client_, 0);
}

TEST_F(RpcPlacedRepliesHostile, WhatNoCallWaitsForEndsTheConnection) {
  expect_each_ends_client([](std::uint32_t number) -> std::vector<Said> {
    return {{body(10), with(number + 1)},    // of a call that was never made
            {body(10), with(number + 800)},  // of a call that was never made
            {body(1001), with(number)},      // beyond the call's memory
            {Bytes(), {IBV_WR_RDMA_WRITE_WITH_IMM, htobe32(number)}},
            {call_message({number, 0, RpcMessageKind::reply, kOk, 1001, 0, 0, 0}, 1001)}};
  });
}

TEST_F(RpcPlacedRepliesHostile, ACallWithoutMemoryHasNoPlacedReply) {
  expect_each_ends_client(
      [](std::uint32_t number) -> std::vector<Said> {
        return {{body(10), with(number)}, {Bytes(), {IBV_WR_RDMA_WRITE_WITH_IMM, htobe32(number)}}};
      },
      false);
}

TEST_F(RpcPlacedRepliesHostile, AnOfferToACallWithoutMemoryIsRefused) {
  attack_client(false);
  say(offer(900, 1), with(heard_.number));
  ASSERT_TRUE(run([&] { return answer_to(1).has_value(); }));
  EXPECT_EQ(answer_to(1), RendezvousVerdict::refused);
  EXPECT_EQ(ended_, 0);
  peer_.fail();
  expect_ended(*client_, 0);
}

TEST_F(RpcPlacedRepliesHostile, AReplyComesOnce) {
  attack_client(true);
  watch_memory();
  say(body(300), with(heard_.number));
  ASSERT_TRUE(run([&] { return ended_ == 1; }));
  EXPECT_EQ(status_, Status::ok);
  EXPECT_EQ(size_, 300u);
  // The server cannot know whether the client has given the call up, so a late reply is no fault.
  say(body(300), with(heard_.number));
  say(offer(300, 1), with(heard_.number));
  ASSERT_TRUE(run([&] { return answer_to(1).has_value(); }));
  EXPECT_EQ(answer_to(1), RendezvousVerdict::refused);
  EXPECT_EQ(late(), 2u);
  EXPECT_EQ(bad(*client_), 0u);
  EXPECT_EQ(ended_, 1);
  expect_untouched();
  peer_.fail();
  expect_ended(*client_, 0);
}

TEST_F(RpcPlacedRepliesHostile, AnOfferThatTheMemoryCannotTakeIsRefused) {
  attack_client(true);
  say(offer(1001, 1), with(heard_.number));
  ASSERT_TRUE(run([&] { return answer_to(1).has_value(); }));
  EXPECT_EQ(answer_to(1), RendezvousVerdict::refused);
  EXPECT_EQ(ended_, 0);
  gather(2);
  put(offer(900, 2), with(heard_.number));
  put(offer(900, 3), with(heard_.number));  // while the first one is on its way
  ASSERT_TRUE(run([&] { return ended_ == 1 && answer_to(3).has_value(); }));
  EXPECT_EQ(answer_to(2), RendezvousVerdict::received);
  EXPECT_EQ(answer_to(3), RendezvousVerdict::refused);
  EXPECT_EQ(status_, Status::ok);
  EXPECT_EQ(size_, 900u);
  EXPECT_EQ(bad(*client_), 0u);
  peer_.fail();
  expect_ended(*client_, 0);
}

// A message that is held behind another one arrives after the offer of a reply, but comes first.
TEST_F(RpcPlacedRepliesHostile, AnotherReplyBeforeThePlacedOneEndsTheConnection) {
  for (const bool is_bare : {true, false}) {
    SCOPED_TRACE(is_bare);
    ended_ = 0;
    attack_client(true);
    gather(3);
    watch_memory();
    prepare_old_reply();
    put(offer(32, 1));
    if (is_bare) {
      put(body(4096), with(heard_.number));
    } else {
      put(call_message({heard_.number, 0, RpcMessageKind::reply, kRefused, 4, 0, 0, 0, 5}, 4));
    }
    put(offer(1000, 2), with(heard_.number));
    ASSERT_TRUE(run([&] { return ended_ == 1; }));
    EXPECT_EQ(status_, Status::peer_lost);
    EXPECT_EQ(size_, 0u);
    EXPECT_EQ(late(), late_ + 1) << "the first message has come";
    expect_untouched();
    expect_ended(*client_, is_bare ? 1 : 2);
    EXPECT_EQ(ended_, 1);
  }
}

/// The test moves the time, and READs of the client take some.
class RpcHeldRepliesHostile : public RpcPlacedRepliesHostile {
 protected:
  [[nodiscard]] const std::uint64_t* ticks() const override { return &now_; }
  void delay(Nanoseconds time) const {
    spinwire::softverbs::FaultPlan plan;
    plan.delay_min = plan.delay_max = time;
    client_->set(plan);
  }
  void pass(Nanoseconds time) {
    now_ += static_cast<std::uint64_t>(time.count());
    poll_some(20);
  }
};

TEST_F(RpcHeldRepliesHostile, TheConfirmationOfACancelDoesNotOvertakeThePlacedReply) {
  attack_client(true);
  gather(3);
  watch_memory();
  prepare_old_reply();
  delay(1ms);
  put(offer(32, 1));
  poll_some(20);
  delay(5ms);
  put(call_message({heard_.number, 0, RpcMessageKind::cancelled}));
  put(offer(1000, 2), with(heard_.number));
  poll_some(20);
  EXPECT_EQ(session_.cancel(session_.last_call()), Status::ok);
  poll_some(20);
  EXPECT_EQ(late(), late_) << "the first message is on its way";
  pass(2ms);
  EXPECT_EQ(late(), late_ + 1);
  EXPECT_EQ(ended_, 0) << "the reply is on its way to the memory";
  pass(5ms);
  EXPECT_EQ(ended_, 1);
  EXPECT_EQ(status_, Status::cancelled);
  expect_untouched();
  EXPECT_EQ(bad(*client_), 0u);
  delay(0ms);
  peer_.fail();
  expect_ended(*client_, 0);
}

/// The server's device has no direct messages.
class RpcPlainServerHostile : public RpcLongCallsHostile {
 protected:
  [[nodiscard]] const spinwire::verbs::Provider* server_device() override {
    static const spinwire::verbs::Provider plain = [] {
      spinwire::verbs::Provider provider = spinwire::verbs::softverbs_provider();
      provider.direct_messages = nullptr;
      return provider;
    }();
    return &plain;
  }
};

TEST_F(RpcPlainServerHostile, MemoryWithoutAKeyEndsTheConnection) {
  attack_server();
  RpcMessageHeader header = call_of(8, 3, kEcho);
  header.reply_capacity = 100;
  say(call_message(header, 3));
  expect_ended(*server_, 1);
  EXPECT_EQ(runs_, 1) << "of the call that shows that nothing else has ended";
}

}  // namespace
}  // namespace rpc_placed_replies_hostile_test
