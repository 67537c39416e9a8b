// Forged datagrams in runs: each is counted and affects no session.
#include <array>
#include <optional>

#include "base/internals.h"
#include "rpc/direct_calls.h"
#include "rpc/server_session.h"

namespace rpc_hostile_direct_calls_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

/// Sends arbitrary datagrams in runs: from the client's own queue pair, which the server knows, or
/// from another of its device, which uses the same lane.
class RpcDirectHostile : public RpcDirect {
 protected:
  using RpcKind = spinwire::wire::RpcKind;
  std::optional<Calls> t_;
  ibv_qp* stranger_ = nullptr;

  void SetUp() override {
    RpcDirect::SetUp();
    if (IsSkipped()) return;
    t_.emplace();
    EXPECT_EQ(t_->call(kCount, filled(4, 1)).status, Status::ok);
    spinwire::verbs::DatagramOptions options;
    options.send_depth = options.receive_depth = 8;
    options.inline_bytes = 64;
    options.qkey = 5;
    stranger_ = device().create_datagram_qp(options).value();
  }
  void TearDown() override {
    if (!t_) return;
    device().destroy_qp(stranger_);
    EXPECT_EQ(t_->call(kCount, filled(4, 2)).status, Status::ok);
    EXPECT_EQ(t_->runs[filled(4, 1)], 1);
    t_->bad_allowed = true;
    t_->finish();
  }
  [[nodiscard]] spinwire::verbs::Device& device() const {
    return *spinwire::detail::core_of(t_->client.engine)->context.device;
  }
  [[nodiscard]] ibv_qp* known() const {
    return const_cast<ibv_qp*>(port_of(t_->client).queue_pair());
  }
  [[nodiscard]] const spinwire::rpc::ClientSession& session() const {
    return *spinwire::detail::core_of(t_->client.engine)->calls->clients.find(0);
  }
  /// A valid request for an unused slot.
  [[nodiscard]] spinwire::wire::RpcHeader request() const {
    return {session().peer_session, session().slots[1].number, kCount, RpcKind::request, 0, 4, 0};
  }
  void send(ibv_qp* by, const spinwire::wire::RpcHeader& header, std::uint64_t length) const {
    const auto& direct = *device().provider().direct;
    const auto words = spinwire::wire::pack(header);
    const std::array<std::byte, 32> payload{};
    ASSERT_NE(spinwire::verbs::send_direct({&direct, by, direct.sender(by)},
                                           session().peer_address->destination, words.low,
                                           words.high, payload.data(), length),
              spinwire::verbs::Sent::refused);
    direct.publish(by);
  }
  /// Sends by a work request, as a direct datagram always has a header.
  void send_short(ibv_qp* by, std::uint32_t length) const {
    std::array<std::byte, 16> bytes{};
    const auto words = spinwire::wire::pack(request());
    std::memcpy(bytes.data(), &words, sizeof words);
    ibv_sge sge{reinterpret_cast<std::uint64_t>(bytes.data()), length, 0};
    ibv_send_wr wr{};
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_INLINE;
    wr.wr.ud.ah = session().peer_address->destination.ah;
    wr.wr.ud.remote_qpn = session().peer_address->destination.qp_num;
    wr.wr.ud.remote_qkey = session().peer_address->destination.qkey;
    ibv_send_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_send(by, &wr, &bad), 0);
  }
  /// Checks that one more bad datagram was counted, no handler ran, and no receive was taken.
  void expect_bad() {
    const std::uint64_t bad = ++bad_;
    EXPECT_TRUE(t_->until([&] { return t_->server.engine.rpc_stats().bad_datagrams >= bad; }));
    for (int i = 0; i < 8; ++i) (void)t_->server.poll();
    EXPECT_EQ(t_->server.engine.rpc_stats().bad_datagrams, bad);
    EXPECT_EQ(t_->server.engine.rpc_stats().served, 1u);
    EXPECT_EQ(queue_pair_of(t_->server).receives->head, 0u);
  }

 private:
  std::uint64_t bad_ = 0;
};

TEST_F(RpcDirectHostile, AStrangerOnTheSameDeviceIsNotTheClient) {
  EXPECT_NE(port_of(t_->client).qp_num(), stranger_->qp_num);
  spinwire::wire::RpcHeader header = request();
  for (int i = 0; i < 3; ++i) {
    ASSERT_NO_FATAL_FAILURE(send(stranger_, header, 4));
    expect_bad();
  }
  header.kind = RpcKind::ping;
  header.length = header.method = 0;
  ASSERT_NO_FATAL_FAILURE(send(stranger_, header, 0));
  expect_bad();
}

TEST_F(RpcDirectHostile, MalformedHeadersAreCounted) {
  const spinwire::wire::RpcHeader good = request();
  for (ibv_qp* by : {known(), stranger_}) {
    for (int what = 0; what < 7; ++what) {
      SCOPED_TRACE(what);
      spinwire::wire::RpcHeader header = good;
      if (what == 0) header.length = 5;
      if (what == 1) header.length = 3;
      if (what == 2) header.kind = RpcKind{0};
      if (what == 3) header.kind = RpcKind{8};
      if (what == 4) header.status = 1;
      if (what == 5) header.window = 1;
      if (what == 6) header.kind = RpcKind::reply;  // that grants nothing
      ASSERT_NO_FATAL_FAILURE(send(by, header, 4));
      expect_bad();
    }
  }
}

/// The line of a long datagram has a copy of the header, and the peer can change either. Each is a
/// valid datagram of the client's or none.
TEST_F(RpcDirectHostile, TheHeaderInTheLineIsAnotherThanTheOneBesideIt) {
  namespace sv = spinwire::softverbs;
  const auto& direct = *device().provider().direct;
  auto& out = static_cast<sv::OutLane&>(*session().peer_address->destination.lane);
  for (const bool in_line : {true, false}) {
    const unsigned slot = in_line ? 1 : 2;
    const auto payload = filled(100, slot);
    const auto words = spinwire::wire::pack(spinwire::wire::RpcHeader{
        session().peer_session, session().slots[slot].number, kCount, RpcKind::request, 0,
        static_cast<std::uint16_t>(payload.size()), 0});
    ASSERT_NE(direct.send_long({&direct, known(), direct.sender(known())},
                               session().peer_address->destination, words.low, words.high,
                               payload.data(), payload.size()),
              spinwire::verbs::Sent::refused);
    const sv::PlacedBytes placed = out.placed[(out.tail - 1) % sv::kLaneLines];
    std::byte* const header =
        in_line ? out.lines[(out.tail - 1) % sv::kLaneLines].payload : out.data + placed.begin;
    std::memset(header, 0xff, sizeof words);
    direct.publish(known());
    EXPECT_TRUE(t_->until([&] { return t_->runs[payload] == 1; }));
  }
  EXPECT_EQ(t_->server.engine.rpc_stats().bad_datagrams, 0u);
}

TEST_F(RpcDirectHostile, WhatIsShorterThanAHeaderIsCounted) {
  for (ibv_qp* by : {known(), stranger_}) {
    for (const std::uint32_t length : {0, 1, 8, 15}) {
      ASSERT_NO_FATAL_FAILURE(send_short(by, length));
      expect_bad();
    }
  }
}

TEST_F(RpcDirectHostile, AReplyOfAStrangerEndsNoCall) {
  // Sent to the client by another queue pair of the server's device.
  ASSERT_EQ(t_->begin(kLater, filled(9, 3)), Status::ok);
  ASSERT_TRUE(t_->until([&] { return t_->later.size() == 1; }));
  spinwire::verbs::DatagramOptions options;
  options.send_depth = options.receive_depth = 8;
  options.inline_bytes = 64;
  options.qkey = 5;
  spinwire::verbs::Device& device = *spinwire::detail::core_of(t_->server.engine)->context.device;
  ibv_qp* const other = device.create_datagram_qp(options).value();
  const auto& s = *spinwire::rpc::find_server(*spinwire::detail::core_of(t_->server.engine)->calls,
                                              session().peer_session);
  const auto words =
      spinwire::wire::pack({s.peer_session, session().slots[0].number, 0, RpcKind::reply, 0, 4, 8});
  const auto& direct = *device.provider().direct;
  const std::array<std::byte, 32> payload{};
  ASSERT_NE(spinwire::verbs::send_direct({&direct, other, direct.sender(other)},
                                         s.peer_address->destination, words.low, words.high,
                                         payload.data(), 4),
            spinwire::verbs::Sent::refused);
  direct.publish(other);
  ASSERT_TRUE(t_->until([&] { return t_->client.engine.rpc_stats().bad_datagrams == 1; }));
  EXPECT_FALSE(t_->all_ended());
  EXPECT_EQ(t_->later[0].call.reply(filled(5, 5)), Status::ok);
  ASSERT_TRUE(t_->until([&] { return t_->all_ended(); }));
  EXPECT_EQ(t_->ended.back().bytes, filled(5, 5));
  device.destroy_qp(other);
}

}  // namespace
}  // namespace rpc_hostile_direct_calls_test
