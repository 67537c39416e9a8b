// Unreliable datagrams: what arrives and how, what does not, and their effect on connections.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "softverbs/ud_link.h"

namespace softverbs_test::datagram {

constexpr std::uint32_t kSizes[] = {0,  1,  3,  4,   7,   8,   15,  35,   36,   37,  40,
                                    41, 48, 49, 103, 104, 105, 160, 1024, 4095, 4096};
constexpr std::size_t kAt = 1u << 20;  ///< offset of the receives

class SoftverbsDatagram : public testing::Test {
 protected:
  Node a_, b_;
  ibv_qp* qa_ = ready_ud(a_, false);
  ibv_qp* qb_ = ready_ud(b_, false);
  Handle to_b_{a_, b_};

  /// Whether the receive at kAt begins with this header.
  [[nodiscard]] bool header_is(const ibv_ah_attr& way, std::uint32_t payload, bool imm) const {
    return std::memcmp(b_.bytes(kAt, kGrh).data(),
                       route_header(way, gid_of(a_), payload, imm).data(), kGrh) == 0;
  }
  Datagram datagram(std::uint64_t id, std::size_t offset, std::uint32_t length) const {
    return {id, a_.sge(offset, length), to_b_, qb_->qp_num};
  }
  /// The only completion at b.
  ibv_wc only_at_b() {
    const std::vector<ibv_wc> all = completions(b_);
    EXPECT_EQ(all.size(), 1u);
    return all.empty() ? ibv_wc{} : all.front();
  }
};

TEST_F(SoftverbsDatagram, EverySizeArrivesBehindItsHeader) {
  for (const std::uint32_t size : kSizes) {
    SCOPED_TRACE(size);
    fill(a_.bytes(0, size), size + 1);
    std::fill_n(b_.bytes(kAt, 8192).begin(), 8192, std::byte{0xee});
    ASSERT_EQ(b_.post_recv(size, kAt, kGrh + 4096, qb_), 0);
    ASSERT_EQ(datagram(size, 0, size).post(qa_), 0);
    fill(a_.bytes(0, size), 99);  // the memory is free after the post
    ibv_wc sent{};
    ASSERT_TRUE(a_.poll(sent));
    EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
    EXPECT_EQ(sent.opcode, IBV_WC_SEND);
    EXPECT_EQ(sent.wr_id, size);
    EXPECT_EQ(sent.qp_num, qa_->qp_num);
    const ibv_wc wc = only_at_b();
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV);
    EXPECT_EQ(wc.wr_id, size);
    EXPECT_EQ(wc.byte_len, size + kGrh);
    EXPECT_EQ(wc.wc_flags, unsigned{IBV_WC_GRH});
    EXPECT_EQ(wc.qp_num, qb_->qp_num);
    EXPECT_EQ(wc.src_qp, qa_->qp_num);
    EXPECT_EQ(wc.pkey_index | wc.slid | wc.sl, 0);
    EXPECT_TRUE(header_is(way_to(gid_of(b_)), size, false));
    EXPECT_TRUE(holds(b_.bytes(kAt + kGrh, size), size + 1));
    EXPECT_TRUE(all_are(b_.bytes(kAt + kGrh + size, 4096 - size + 64), 0xee));
  }
}

TEST_F(SoftverbsDatagram, ImmediateDataAndRouteArrive) {
  ibv_ah_attr way = way_to(gid_of(b_));
  way.grh.traffic_class = 0xa5;
  way.grh.flow_label = 0x98765;
  way.grh.hop_limit = 64;
  const Handle routed(a_, way);
  for (const std::uint32_t size : kSizes) {
    for (const bool imm : {false, true}) {
      for (const bool plain : {false, true}) {
        SCOPED_TRACE(std::to_string(size) + (imm ? " imm" : "") + (plain ? " plain" : ""));
        fill(a_.bytes(0, size), size + 2);
        ASSERT_EQ(b_.post_recv(1, kAt, kGrh + size, qb_), 0);
        Datagram d(2, a_.sge(0, size), plain ? to_b_ : routed, qb_->qp_num);
        if (imm) d.wr.opcode = IBV_WR_SEND_WITH_IMM;
        d.wr.imm_data = htonl(0xfeed0000 + size);
        ASSERT_EQ(d.post(qa_), 0);
        const ibv_wc wc = only_at_b();
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        EXPECT_EQ(wc.byte_len, size + kGrh);
        EXPECT_EQ(wc.src_qp, qa_->qp_num);
        EXPECT_EQ(wc.wc_flags, unsigned{IBV_WC_GRH} | (imm ? unsigned{IBV_WC_WITH_IMM} : 0u));
        EXPECT_EQ(wc.imm_data, imm ? htonl(0xfeed0000 + size) : 0u);
        EXPECT_TRUE(header_is(plain ? way_to(gid_of(b_)) : way, size, imm));
        EXPECT_TRUE(holds(b_.bytes(kAt + kGrh, size), size + 2));
      }
    }
  }
}

TEST_F(SoftverbsDatagram, InlineBytesNeedNoRegistration) {
  std::vector<std::byte> heap(256);
  for (const std::uint32_t size : {0u, 1u, 48u, 49u, 256u}) {
    SCOPED_TRACE(size);
    fill({heap.data(), size}, size + 3);
    ASSERT_EQ(b_.post_recv(1, kAt, kGrh + size, qb_), 0);
    const ibv_sge sge{reinterpret_cast<std::uint64_t>(heap.data()), size, 0};
    Datagram d(3, sge, to_b_, qb_->qp_num, kQkey, IBV_SEND_INLINE);
    ASSERT_EQ(d.post(qa_), 0);
    EXPECT_EQ(only_at_b().byte_len, size + kGrh);
    EXPECT_TRUE(holds(b_.bytes(kAt + kGrh, size), size + 3));
  }
  EXPECT_TRUE(completions(a_).empty());  // unsignaled
  const ibv_sge longer{reinterpret_cast<std::uint64_t>(heap.data()), 257, 0};
  EXPECT_EQ(Datagram(4, longer, to_b_, qb_->qp_num, kQkey, IBV_SEND_INLINE).post(qa_), EINVAL);
}

TEST_F(SoftverbsDatagram, ElementsAreGatheredAndScattered) {
  spinwire::base::Random random(5);
  for (int round = 0; round < 200; ++round) {
    ibv_sge from[4], to[4];
    std::uint32_t size = 0;
    std::vector<std::byte> expected;
    for (std::uint32_t i = 0; i < 4; ++i) {
      const auto part = static_cast<std::uint32_t>(random.next() % 1025);
      from[i] = a_.sge(i * 2048, random.next() % 4 == 0 ? 0 : part);
      fill(a_.bytes(i * 2048, from[i].length), random.next());
      const auto bytes = a_.bytes(i * 2048, from[i].length);
      expected.insert(expected.end(), bytes.begin(), bytes.end());
      size += from[i].length;
    }
    // The header is divided as well.
    const auto first = static_cast<std::uint32_t>(random.next() % (kGrh + 8));
    const auto second = static_cast<std::uint32_t>(random.next() % 64);
    to[0] = b_.sge(kAt, first);
    to[1] = b_.sge(kAt + first, second);
    to[2] = b_.sge(kAt + first + second, 0);
    to[3] = b_.sge(kAt + first + second, 4200);
    ibv_recv_wr receive{1, nullptr, to, 4};
    ibv_recv_wr* bad_receive = nullptr;
    ASSERT_EQ(ibv_post_recv(qb_, &receive, &bad_receive), 0);
    Datagram d = datagram(1, 0, 0);
    d.wr.sg_list = from;
    d.wr.num_sge = 4;
    ASSERT_EQ(d.post(qa_), 0);
    ASSERT_EQ(only_at_b().byte_len, size + kGrh);
    ASSERT_TRUE(header_is(way_to(gid_of(b_)), size, false));
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), b_.bytes(kAt + kGrh, size).begin()));
    (void)completions(a_);
  }
}

TEST_F(SoftverbsDatagram, ManyArriveInOnePoll) {
  ibv_qp* shared = ready_ud(b_, true);
  for (std::uint64_t i = 0; i < 32; ++i) {
    ASSERT_EQ(b_.post_recv(i, kAt + i * 256, 256, qb_), 0);
    ASSERT_EQ(b_.post_recv(100 + i, 2 * kAt + i * 256, 256), 0);
    std::memcpy(a_.bytes(0, 8).data(), &i, 8);
    ASSERT_EQ(datagram(i, 0, 8).post(qa_), 0);
    ASSERT_EQ(Datagram(i, a_.sge(0, 100), to_b_, shared->qp_num).post(qa_), 0);
  }
  ibv_wc wc[64];
  ASSERT_EQ(ibv_poll_cq(b_.cq, 64, wc), 64);
  for (std::uint64_t i = 0; i < 64; ++i) {
    const std::uint64_t n = i / 2;
    EXPECT_EQ(wc[i].wr_id, i % 2 == 0 ? n : 100 + n);
    EXPECT_EQ(wc[i].qp_num, i % 2 == 0 ? qb_->qp_num : shared->qp_num);
    EXPECT_EQ(std::memcmp(b_.bytes((i % 2 == 0 ? kAt : 2 * kAt) + n * 256 + kGrh, 8).data(), &n, 8),
              0);
  }
}

TEST_F(SoftverbsDatagram, OnlyTheRightKeyAndNumberAreTaken) {
  ASSERT_EQ(b_.post_recv(1, kAt, 256, qb_), 0);
  ASSERT_EQ(Datagram(1, a_.sge(0, 8), to_b_, qb_->qp_num, kQkey + 1).post(qa_), 0);
  ASSERT_EQ(Datagram(2, a_.sge(0, 8), to_b_, qb_->qp_num + 0x10000).post(qa_), 0);
  ASSERT_EQ(Datagram(3, a_.sge(0, 8), to_b_, 0xffffff).post(qa_), 0);
  ibv_qp* connected = b_.make_qp();
  ASSERT_EQ(Datagram(4, a_.sge(0, 8), to_b_, connected->qp_num).post(qa_), 0);
  ibv_qp* waiting = make_ud(b_, false);
  ASSERT_EQ(ud_init(waiting), 0);
  ASSERT_EQ(b_.post_recv(2, kAt, 256, waiting), 0);
  ASSERT_EQ(Datagram(5, a_.sge(0, 8), to_b_, waiting->qp_num).post(qa_), 0);
  EXPECT_TRUE(completions(b_).empty());
  const std::vector<ibv_wc> sent = completions(a_);
  ASSERT_EQ(sent.size(), 5u);
  for (const ibv_wc& wc : sent) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(dropped(b_, sv::Drop::wrong_key), 1u);
  EXPECT_EQ(dropped(b_, sv::Drop::no_queue_pair), 4u);
  // RTR suffices to receive.
  ASSERT_EQ(ud_rtr(waiting), 0);
  ASSERT_EQ(Datagram(6, a_.sge(0, 8), to_b_, waiting->qp_num).post(qa_), 0);
  EXPECT_EQ(only_at_b().wr_id, 2u);
  // A Q_Key with its top bit set means the sender's own.
  ASSERT_EQ(Datagram(7, a_.sge(0, 8), to_b_, qb_->qp_num, 0x80000000).post(qa_), 0);
  EXPECT_EQ(only_at_b().wr_id, 1u);
  ibv_qp* other = ready_ud(a_, false, kQkey + 1);
  ASSERT_EQ(b_.post_recv(3, kAt, 256, qb_), 0);
  ASSERT_EQ(Datagram(8, a_.sge(0, 8), to_b_, qb_->qp_num, 0x80000000 | kQkey).post(other), 0);
  EXPECT_TRUE(completions(b_).empty());
  EXPECT_EQ(dropped(b_, sv::Drop::wrong_key), 2u);
}

TEST_F(SoftverbsDatagram, WithoutAReceiveItIsDropped) {
  ASSERT_EQ(datagram(1, 0, 8).post(qa_), 0);
  EXPECT_TRUE(completions(b_).empty());
  EXPECT_EQ(dropped(b_, sv::Drop::no_receive), 1u);
  ASSERT_EQ(b_.post_recv(1, kAt, 256, qb_), 0);
  EXPECT_TRUE(completions(b_).empty());  // it is not retransmitted
  fill(a_.bytes(0, 8), 4);
  ASSERT_EQ(datagram(2, 0, 8).post(qa_), 0);
  EXPECT_EQ(only_at_b().wr_id, 1u);
  EXPECT_TRUE(holds(b_.bytes(kAt + kGrh, 8), 4));
}

TEST_F(SoftverbsDatagram, AReceiveTooSmall) {
  std::fill_n(b_.bytes(kAt, 256).begin(), 256, std::byte{0xee});
  for (const std::uint32_t room : {0u, 39u, 40u, 47u}) {
    SCOPED_TRACE(room);
    ibv_qp* own = ready_ud(b_, false);
    ASSERT_EQ(b_.post_recv(1, kAt, room, own), 0);
    ASSERT_EQ(Datagram(1, a_.sge(0, 8), to_b_, own->qp_num).post(qa_), 0);
    EXPECT_TRUE(completions(b_).empty());  // kept: class D
    EXPECT_EQ(state_of(own), IBV_QPS_RTS);
    ibv_qp* shared = ready_ud(b_, true);
    ASSERT_EQ(b_.post_recv(2, kAt, room), 0);
    ASSERT_EQ(Datagram(2, a_.sge(0, 8), to_b_, shared->qp_num).post(qa_), 0);
    const ibv_wc wc = only_at_b();  // class E
    EXPECT_EQ(wc.wr_id, 2u);
    EXPECT_EQ(wc.status, IBV_WC_LOC_LEN_ERR);
    EXPECT_EQ(state_of(shared), IBV_QPS_RTS);
  }
  EXPECT_EQ(dropped(b_, sv::Drop::too_long), 8u);
  EXPECT_TRUE(all_are(b_.bytes(kAt, 256), 0xee));
}

TEST_F(SoftverbsDatagram, AReceiveThatMayNotBeWritten) {
  ibv_mr* mr = sv::reg_mr(b_.pd, b_.bytes(kAt, 4096).data(), 4096, IBV_ACCESS_REMOTE_READ);
  ASSERT_NE(mr, nullptr);
  ibv_sge sge{b_.address(kAt), 256, mr->lkey};
  ibv_recv_wr wr{1, nullptr, &sge, 1};
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_recv(qb_, &wr, &bad), 0);
  ASSERT_EQ(datagram(1, 0, 8).post(qa_), 0);
  EXPECT_EQ(only_at_b().status, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(state_of(qb_), IBV_QPS_ERR);
  EXPECT_EQ(sv::dereg_mr(mr), 0);
}

TEST_F(SoftverbsDatagram, FailedSendsStopTheSendQueueOnly) {
  // Too long, or an unknown key; behind each a datagram that is flushed.
  const ibv_sge nobodys{a_.address(0), 8, 0};
  const std::pair<ibv_sge, ibv_wc_status> failing[] = {{a_.sge(0, 4097), IBV_WC_LOC_LEN_ERR},
                                                       {nobodys, IBV_WC_LOC_PROT_ERR}};
  for (const auto& [sge, status] : failing) {
    Datagram bad(1, sge, to_b_, qb_->qp_num, kQkey, 0);
    Datagram behind = datagram(2, 0, 8);
    bad.wr.next = &behind.wr;
    ASSERT_EQ(bad.post(qa_), 0);
    const std::vector<ibv_wc> sent = completions(a_);
    ASSERT_EQ(sent.size(), 2u);
    EXPECT_EQ(sent[0].status, status);
    EXPECT_EQ(sent[0].wr_id, 1u);
    EXPECT_EQ(sent[1].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(sent[1].wr_id, 2u);
    EXPECT_EQ(state_of(qa_), IBV_QPS_SQE);
    EXPECT_TRUE(completions(b_).empty());
    // It still receives.
    const Handle to_a(b_, a_);
    ASSERT_EQ(a_.post_recv(3, kAt, 256, qa_), 0);
    ASSERT_EQ(Datagram(4, b_.sge(0, 8), to_a, qa_->qp_num).post(qb_), 0);
    (void)completions(b_);
    const std::vector<ibv_wc> received = completions(a_);
    ASSERT_EQ(received.size(), 1u);
    EXPECT_EQ(received[0].wr_id, 3u);
    // It sends again.
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    ASSERT_EQ(sv::modify_qp(qa_, &attr, IBV_QP_STATE), 0);
    ASSERT_EQ(b_.post_recv(5, kAt, 256, qb_), 0);
    ASSERT_EQ(datagram(6, 0, 8).post(qa_), 0);
    EXPECT_EQ(only_at_b().wr_id, 5u);
    EXPECT_EQ(completions(a_).size(), 1u);
  }
}

TEST_F(SoftverbsDatagram, BadWorkRequestsAreRefused) {
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW, IBV_WR_SEND_WITH_INV}) {
    Datagram d = datagram(1, 0, 8);
    d.wr.opcode = opcode;
    EXPECT_EQ(d.post(qa_), EINVAL) << opcode;
    d.wr.wr.rdma.remote_addr = 0x40;  // at the place of the address handle, must not be used
    EXPECT_EQ(d.post(qa_), EINVAL) << opcode;
  }
  Datagram nowhere = datagram(1, 0, 8);
  nowhere.wr.wr.ud.ah = nullptr;
  EXPECT_EQ(nowhere.post(qa_), EINVAL);
  ibv_pd* pd = sv::alloc_pd(a_.context);
  ibv_ah_attr way = way_to(gid_of(b_));
  ibv_ah* ah = sv::create_ah(pd, &way);
  ASSERT_NE(ah, nullptr);
  nowhere.wr.wr.ud.ah = ah;
  EXPECT_EQ(nowhere.post(qa_), EINVAL);  // of another domain
  EXPECT_EQ(sv::dealloc_pd(pd), EBUSY);
  EXPECT_EQ(sv::destroy_ah(ah), 0);
  EXPECT_EQ(sv::dealloc_pd(pd), 0);
  Datagram many = datagram(1, 0, 8);
  many.wr.num_sge = 5;
  EXPECT_EQ(many.post(qa_), EINVAL);
  many.wr.num_sge = -1;
  EXPECT_EQ(many.post(qa_), EINVAL);
  // The first bad one ends the list and is reported.
  ASSERT_EQ(b_.post_recv(1, kAt, 256, qb_), 0);
  Datagram good = datagram(7, 0, 8), bad = datagram(8, 0, 8);
  bad.wr.opcode = IBV_WR_RDMA_READ;
  good.wr.next = &bad.wr;
  ibv_send_wr* named = nullptr;
  EXPECT_EQ(ibv_post_send(qa_, &good.wr, &named), EINVAL);
  EXPECT_EQ(named, &bad.wr);
  EXPECT_EQ(only_at_b().wr_id, 1u);
  EXPECT_EQ(completions(a_).size(), 1u);
}

TEST_F(SoftverbsDatagram, UnsignaledOnesHoldTheirPlaceUntilASignaledOne) {
  ibv_qp* qp = ready_ud(a_, false, kQkey, 4);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 3; ++i)
      ASSERT_EQ(Datagram(1, a_.sge(0, 8), to_b_, qb_->qp_num, kQkey, 0).post(qp), 0);
    ASSERT_EQ(Datagram(2, a_.sge(0, 8), to_b_, qb_->qp_num).post(qp), 0);
  }
  for (int i = 0; i < 4; ++i)
    ASSERT_EQ(Datagram(1, a_.sge(0, 8), to_b_, qb_->qp_num, kQkey, 0).post(qp), 0);
  EXPECT_EQ(Datagram(1, a_.sge(0, 8), to_b_, qb_->qp_num, kQkey, 0).post(qp), ENOMEM);
  EXPECT_EQ(completions(a_).size(), 3u);
  ibv_qp* all = make_ud(a_, false, 4, true);  // sq_sig_all
  ASSERT_TRUE(ud_init(all) == 0 && ud_rtr(all) == 0 && ud_rts(all) == 0);
  for (int i = 0; i < 9; ++i)
    ASSERT_EQ(Datagram(1, a_.sge(0, 8), to_b_, qb_->qp_num, kQkey, 0).post(all), 0);
  EXPECT_EQ(completions(a_).size(), 9u);
}

TEST_F(SoftverbsDatagram, ToOneself) {
  const Handle self(a_, a_);
  ibv_qp* other = ready_ud(a_, true);
  for (std::uint32_t round = 0; round < 300; ++round) {
    const std::uint32_t size = round * 13;
    fill(a_.bytes(0, size), round);
    ASSERT_EQ(a_.post_recv(1, kAt, kGrh + size), 0);
    ASSERT_EQ(a_.post_recv(2, 2 * kAt, kGrh + size, qa_), 0);
    ASSERT_EQ(Datagram(3, a_.sge(0, size), self, other->qp_num).post(qa_), 0);
    ASSERT_EQ(Datagram(4, a_.sge(0, size), self, qa_->qp_num).post(qa_), 0);  // also to itself
    std::size_t got = 0;
    ibv_wc wc{};
    ASSERT_TRUE(until([&] { got += a_.poll(wc) ? 1 : 0; }, [&] { return got == 4; }));
    ASSERT_TRUE(holds(a_.bytes(kAt + kGrh, size), round));
    ASSERT_TRUE(holds(a_.bytes(2 * kAt + kGrh, size), round));
    ASSERT_EQ(std::memcmp(a_.bytes(kAt, kGrh).data(),
                          route_header(way_to(gid_of(a_)), gid_of(a_), size, false).data(), kGrh),
              0);
  }
}

TEST_F(SoftverbsDatagram, HandlesAreChecked) {
  const auto refused = [&](const auto& spoil, int error) {
    ibv_ah_attr way = way_to(gid_of(b_));
    spoil(way);
    errno = 0;
    return sv::create_ah(a_.pd, &way) == nullptr && errno == error;
  };
  EXPECT_TRUE(refused([](auto& w) { w.is_global = 0; }, EINVAL));
  EXPECT_TRUE(refused([](auto& w) { w.port_num = 2; }, EINVAL));
  EXPECT_TRUE(refused([](auto& w) { w.grh.sgid_index = 1; }, EINVAL));
  EXPECT_TRUE(refused([](auto& w) { w.grh.dgid.raw[0] = 0xff; }, EINVAL));
  EXPECT_TRUE(refused([](auto& w) { w.grh.dgid.raw[15] ^= 1; }, ENODEV));
  auto gone = std::make_unique<Node>();
  ibv_ah_attr way = way_to(gid_of(*gone));
  gone.reset();
  EXPECT_TRUE(refused([&](auto& w) { w = way; }, ENODEV));
  EXPECT_EQ(sv::close_device(a_.context), EBUSY);
  ibv_device_attr attr{};
  ASSERT_EQ(sv::query_device(a_.context, &attr), 0);
  EXPECT_GT(attr.max_ah, 0);
}

TEST_F(SoftverbsDatagram, HandlesComeAndGo) {
  auto first = std::make_unique<Handle>(a_, b_);
  const Handle second(a_, b_);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(b_.post_recv(1, kAt, 256, qb_), 0);
  ASSERT_EQ(Datagram(1, a_.sge(0, 8), *first, qb_->qp_num).post(qa_), 0);
  first.reset();  // its datagrams are in flight
  EXPECT_EQ(only_at_b().status, IBV_WC_SUCCESS);
  for (int i = 0; i < 10; ++i) {
    const Handle again(a_, b_);
    ASSERT_EQ(Datagram(1, a_.sge(0, 8), again, qb_->qp_num).post(qa_), 0);
  }
  ASSERT_EQ(Datagram(1, a_.sge(0, 8), second, qb_->qp_num).post(qa_), 0);
  EXPECT_EQ(completions(b_).size(), 11u);
  EXPECT_EQ(a_.internals().peers.size(), 1u);
}

TEST_F(SoftverbsDatagram, APeerThatClosedSwallowsThem) {
  auto c = std::make_unique<Node>();
  ibv_qp* qc = ready_ud(*c, false);
  auto to_c = std::make_unique<Handle>(a_, *c);
  const std::uint32_t qpn = qc->qp_num;
  c.reset();
  ASSERT_TRUE(
      until([&] { sv::control_device(a_.context); },
            [&] {
              (void)Datagram(1, a_.sge(0, 8), *to_c, qpn, kQkey, IBV_SEND_SIGNALED).post(qa_);
              return dropped(a_, sv::Drop::peer_gone) >= 3;
            }));
  ASSERT_EQ(Datagram(2, a_.sge(0, 4096), *to_c, qpn).post(qa_), 0);
  const std::vector<ibv_wc> sent = completions(a_);
  ASSERT_FALSE(sent.empty());
  for (const ibv_wc& wc : sent) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(sent.back().wr_id, 2u);
  to_c.reset();
  ASSERT_TRUE(until([&] { sv::control_device(a_.context); },
                    [&] { return a_.internals().peers.size() == 1; }));
}

}  // namespace softverbs_test::datagram
