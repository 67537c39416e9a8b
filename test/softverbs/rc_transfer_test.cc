// Arriving data: every opcode in every size and form, and the completions.
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "softverbs/rc_link.h"

namespace softverbs_test::transfer {

// Around each limit: empty, one line, the next line, the largest in the lane, references.
constexpr std::uint32_t kSizes[] = {
    0,   1,   2,   3,   4,   7,   8,   15,  16,  31,  32,   47,   48,   49,   103,   104,     105,
    423, 424, 425, 439, 440, 441, 447, 448, 449, 450, 1023, 1088, 1089, 4096, 65537, 1u << 20};
constexpr std::size_t kTarget = 2u << 20;  ///< offset of the destination
constexpr std::uint32_t kGuard = 64;       ///< bytes beside it that must not change

struct Form {
  ibv_wr_opcode opcode;
  bool inlined;
  bool shared_queue;
  bool private_memory;
};

std::string name_of(const testing::TestParamInfo<Form>& info) {
  const char* opcode = "?";
  switch (info.param.opcode) {
    case IBV_WR_SEND:
      opcode = "Send";
      break;
    case IBV_WR_SEND_WITH_IMM:
      opcode = "SendImm";
      break;
    case IBV_WR_RDMA_WRITE:
      opcode = "Write";
      break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      opcode = "WriteImm";
      break;
    case IBV_WR_RDMA_READ:
      opcode = "Read";
      break;
    default:
      break;
  }
  return std::string(opcode) + (info.param.inlined ? "Inline" : "") +
         (info.param.shared_queue ? "" : "OwnQueue") + (info.param.private_memory ? "Private" : "");
}

bool takes_receive(ibv_wr_opcode opcode) {
  return opcode != IBV_WR_RDMA_WRITE && opcode != IBV_WR_RDMA_READ;
}
bool has_imm(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}
ibv_wc_opcode sent_as(ibv_wr_opcode opcode) {
  if (opcode == IBV_WR_RDMA_READ) return IBV_WC_RDMA_READ;
  const bool write = opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  return write ? IBV_WC_RDMA_WRITE : IBV_WC_SEND;
}

class SoftverbsTransfer : public testing::TestWithParam<Form> {
 protected:
  static NodeOptions options() {
    NodeOptions o;
    o.srq_depth = GetParam().shared_queue ? 64 : 0;
    o.private_memory = GetParam().private_memory;
    o.max_inline = 1024;
    return o;
  }
  ibv_qp* own(ibv_qp* qp) const { return GetParam().shared_queue ? nullptr : qp; }

  static void expect_receive(const ibv_wc& wc, const Link& link, std::uint64_t id,
                             std::uint32_t size) {
    const Form& form = GetParam();
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.wr_id, id);
    EXPECT_EQ(wc.byte_len, size);
    EXPECT_EQ(wc.qp_num, link.qb->qp_num);
    EXPECT_EQ(wc.src_qp, link.qa->qp_num);
    const bool write = form.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    EXPECT_EQ(wc.opcode, write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV);
    EXPECT_EQ(wc.wc_flags & IBV_WC_WITH_IMM, has_imm(form.opcode) ? unsigned{IBV_WC_WITH_IMM} : 0u);
    if (has_imm(form.opcode)) {
      EXPECT_EQ(wc.imm_data, htonl(0x11223300 + size % 256));
    }
  }
  /// One operation from a's start to b's kTarget, or the reverse for READ.
  void transfer(Link& link, std::uint32_t size) {
    const Form& form = GetParam();
    const bool read = form.opcode == IBV_WR_RDMA_READ;
    Node& from = read ? link.b : link.a;
    Node& into = read ? link.a : link.b;
    fill(from.bytes(0, size), size);
    const auto target = into.bytes(kTarget - kGuard, size + 2 * kGuard);
    std::fill(target.begin(), target.end(), std::byte{0x5a});
    if (takes_receive(form.opcode)) {
      // A write with immediate takes a receive but none of its memory.
      const bool send = form.opcode != IBV_WR_RDMA_WRITE_WITH_IMM;
      ASSERT_EQ(link.b.post_recv(900 + size, kTarget, send ? size : 0, own(link.qb)), 0);
    }
    const unsigned flags = IBV_SEND_SIGNALED | (form.inlined ? unsigned{IBV_SEND_INLINE} : 0u);
    Send send(size, link.a.sge(read ? kTarget : 0, size), form.opcode, flags);
    send.wr.imm_data = htonl(0x11223300 + size % 256);
    send.to(link.b.address(read ? 0 : kTarget), link.b.mr->rkey);
    ASSERT_EQ(send.post(link.qa), 0);
    // Inline bytes belong to the user again at once.
    if (form.inlined) fill(from.bytes(0, size), ~std::uint64_t{size});
    ASSERT_TRUE(link.run(1, takes_receive(form.opcode) ? 1 : 0));
    const ibv_wc& sent = link.at_a[0];
    EXPECT_EQ(sent.status, IBV_WC_SUCCESS);
    EXPECT_EQ(sent.wr_id, size);
    EXPECT_EQ(sent.opcode, sent_as(form.opcode));
    EXPECT_EQ(sent.qp_num, link.qa->qp_num);
    EXPECT_EQ(sent.byte_len, size);
    if (takes_receive(form.opcode)) expect_receive(link.at_b[0], link, 900 + size, size);
    EXPECT_TRUE(holds(into.bytes(kTarget, size), size));
    EXPECT_TRUE(all_are(target.first(kGuard), 0x5a));
    EXPECT_TRUE(all_are(target.last(kGuard), 0x5a));
    link.steps(3);
    EXPECT_EQ(link.at_a.size(), 1u);
    EXPECT_EQ(link.at_b.size(), takes_receive(form.opcode) ? 1u : 0u);
    link.at_a.clear();
    link.at_b.clear();
  }
};

TEST_P(SoftverbsTransfer, EverySizeArrivesAsItWas) {
  Link link(options());
  for (const std::uint32_t size : kSizes) {
    if (GetParam().inlined && size > 1024) continue;
    SCOPED_TRACE(size);
    transfer(link, size);
    if (HasFatalFailure()) return;
  }
}

TEST_P(SoftverbsTransfer, ElementsAreGatheredAndScattered) {
  const Form& form = GetParam();
  // Two ways to divide 1000 bytes (in a lane) and 300,000 (by reference), with empty elements.
  const std::vector<std::vector<std::uint32_t>> cuts = {{0, 17, 0, 23},           {40, 0},
                                                        {100, 0, 250, 50},        {399, 1, 0, 0},
                                                        {0, 120'000, 180'000, 0}, {1, 0, 299'999}};
  Link link(options());
  for (std::size_t at = 0; at < cuts.size(); ++at) {
    SCOPED_TRACE(at);
    const std::vector<std::uint32_t>& local_cut = cuts[at];
    const std::vector<std::uint32_t>& remote_cut = cuts[at ^ 1];
    std::uint32_t size = 0;
    for (const std::uint32_t n : local_cut) size += n;
    if (form.inlined && size > 1024) continue;
    const bool read = form.opcode == IBV_WR_RDMA_READ;
    // Elements are 7 bytes apart, so that a wrong concatenation shows.
    const auto elements = [](const Node& node, std::size_t base,
                             const std::vector<std::uint32_t>& cut) {
      std::vector<ibv_sge> sges;
      for (const std::uint32_t n : cut) {
        sges.push_back(node.sge(base, n));
        base += n + 7;
      }
      return sges;
    };
    const auto cut_bytes = [](const Node& node, std::size_t base,
                              const std::vector<std::uint32_t>& cut) {
      std::vector<std::byte> all;
      for (const std::uint32_t n : cut) {
        const auto part = node.bytes(base, n);
        all.insert(all.end(), part.begin(), part.end());
        base += n + 7;
      }
      return all;
    };
    fill(link.a.bytes(0, 1u << 20), at + 100);
    fill(link.b.bytes(kTarget, 1u << 20), at + 200);
    std::vector<ibv_sge> local = elements(link.a, 0, local_cut);
    std::vector<ibv_sge> remote = elements(link.b, kTarget, remote_cut);
    const bool scattered = form.opcode == IBV_WR_SEND || form.opcode == IBV_WR_SEND_WITH_IMM;
    if (takes_receive(form.opcode)) {
      ibv_recv_wr wr{7, nullptr, remote.data(), static_cast<int>(remote.size())};
      ibv_recv_wr* bad = nullptr;
      ASSERT_EQ(form.shared_queue ? ibv_post_srq_recv(link.b.srq, &wr, &bad)
                                  : ibv_post_recv(link.qb, &wr, &bad),
                0);
    }
    Send send(8, {}, form.opcode, IBV_SEND_SIGNALED | (form.inlined ? IBV_SEND_INLINE : 0));
    send.wr.sg_list = local.data();
    send.wr.num_sge = static_cast<int>(local.size());
    send.to(link.b.address(kTarget), link.b.mr->rkey);
    ASSERT_EQ(send.post(link.qa), 0);
    ASSERT_TRUE(link.run(1, takes_receive(form.opcode) ? 1 : 0));
    EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
    const std::vector<std::byte> ours = cut_bytes(link.a, 0, local_cut);
    const std::vector<std::byte> theirs =
        cut_bytes(link.b, kTarget, scattered ? remote_cut : std::vector<std::uint32_t>{size});
    EXPECT_EQ(ours, theirs);
    EXPECT_EQ(ours.size(), size);
    EXPECT_TRUE(read || holds(link.a.bytes(0, 1u << 20), at + 100));
    link.at_a.clear();
    link.at_b.clear();
  }
}

INSTANTIATE_TEST_SUITE_P(All, SoftverbsTransfer,
                         testing::Values(Form{IBV_WR_SEND, false, true, false},
                                         Form{IBV_WR_SEND, true, true, false},
                                         Form{IBV_WR_SEND, false, false, false},
                                         Form{IBV_WR_SEND, false, true, true},
                                         Form{IBV_WR_SEND_WITH_IMM, false, true, false},
                                         Form{IBV_WR_SEND_WITH_IMM, true, false, false},
                                         Form{IBV_WR_RDMA_WRITE, false, true, false},
                                         Form{IBV_WR_RDMA_WRITE, true, true, false},
                                         Form{IBV_WR_RDMA_WRITE, false, true, true},
                                         Form{IBV_WR_RDMA_WRITE_WITH_IMM, false, true, false},
                                         Form{IBV_WR_RDMA_WRITE_WITH_IMM, true, false, false},
                                         Form{IBV_WR_RDMA_WRITE_WITH_IMM, false, false, true},
                                         Form{IBV_WR_RDMA_READ, false, true, false},
                                         Form{IBV_WR_RDMA_READ, false, true, true}),
                         name_of);

TEST(SoftverbsSending, NoElementsAtAll) {
  Link link;
  ASSERT_EQ(link.b.post_recv(1, 0, 16), 0);
  Send send(2, {});
  send.wr.sg_list = nullptr;
  send.wr.num_sge = 0;
  ASSERT_EQ(send.post(link.qa), 0);
  ASSERT_TRUE(link.run(1, 1));
  EXPECT_EQ(link.at_b[0].byte_len, 0u);
  EXPECT_EQ(link.at_b[0].status, IBV_WC_SUCCESS);

  ibv_recv_wr empty{3, nullptr, nullptr, 0};
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_srq_recv(link.b.srq, &empty, &bad), 0);
  ASSERT_EQ(Send(4, link.a.sge(0, 0)).post(link.qa), 0);
  ASSERT_TRUE(link.run(2, 2));
  EXPECT_EQ(link.at_b[1].wr_id, 3u);
  EXPECT_EQ(link.at_b[1].status, IBV_WC_SUCCESS);
}

TEST(SoftverbsSending, EmptyElementsNeedNoKeys) {
  Link link;
  ibv_sge none{0, 0, 0};
  ibv_recv_wr receive{3, nullptr, &none, 1};
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_srq_recv(link.b.srq, &receive, &bad), 0);
  ASSERT_EQ(Send(4, none).post(link.qa), 0);
  ASSERT_EQ(Send(5, none, IBV_WR_RDMA_WRITE).post(link.qa), 0);
  ASSERT_EQ(Send(6, none, IBV_WR_RDMA_READ).post(link.qa), 0);
  ASSERT_TRUE(link.run(3, 1));
  for (const ibv_wc& wc : link.at_a) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(link.at_b[0].status, IBV_WC_SUCCESS);
}

TEST(SoftverbsSending, UnsignaledCompleteSilently) {
  Link link;
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  ASSERT_EQ(Send(1, link.a.sge(0, 8), IBV_WR_SEND, 0).post(link.qa), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 60), IBV_WR_SEND, 0).post(link.qa), 0);
  ASSERT_EQ(Send(3, link.a.sge(0, 8), IBV_WR_RDMA_WRITE, 0)
                .to(link.b.address(64), link.b.mr->rkey)
                .post(link.qa),
            0);
  ASSERT_EQ(Send(4, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_TRUE(link.run(1, 3));
  link.steps(3);
  ASSERT_EQ(link.at_a.size(), 1u);
  EXPECT_EQ(link.at_a[0].wr_id, 4u);
}

TEST(SoftverbsSending, SignalAllSignalsAll) {
  NodeOptions options;
  options.signal_all = true;
  Link link(options);
  for (std::uint64_t i = 0; i < 2; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  ASSERT_EQ(Send(1, link.a.sge(0, 8), IBV_WR_SEND, 0).post(link.qa), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 60), IBV_WR_SEND, 0).post(link.qa), 0);
  ASSERT_EQ(Send(3, link.a.sge(0, 8), IBV_WR_RDMA_READ, 0)
                .to(link.b.address(64), link.b.mr->rkey)
                .post(link.qa),
            0);
  ASSERT_TRUE(link.run(3, 2));
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_EQ(link.at_a[i].wr_id, i + 1);
}

/// Each message of the list takes room in the lane's data before the list as a whole is counted as
/// sent.
TEST(SoftverbsSending, APostlistMayFillMoreOfTheDataThanWasInUse) {
  constexpr std::size_t kCount = 32;
  constexpr std::uint32_t kSize = 1024;
  static_assert(kCount * kSize >= 2 * sv::kLeastData);
  Link link;
  std::vector<ibv_sge> sges(kCount);
  std::vector<ibv_send_wr> wrs(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    fill(link.a.bytes(i * kSize, kSize), i);
    sges[i] = link.a.sge(i * kSize, kSize);
    wrs[i] = {};
    wrs[i].wr_id = i;
    wrs[i].next = i + 1 < kCount ? &wrs[i + 1] : nullptr;
    wrs[i].sg_list = &sges[i];
    wrs[i].num_sge = 1;
    wrs[i].send_flags = IBV_SEND_SIGNALED;
    wrs[i].opcode = IBV_WR_SEND;
    ASSERT_EQ(link.b.post_recv(i, kTarget + i * kSize, kSize), 0);
  }
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(link.qa, wrs.data(), &bad), 0);
  ASSERT_TRUE(link.run(kCount, kCount));
  for (std::size_t i = 0; i < kCount; ++i)
    EXPECT_TRUE(holds(link.b.bytes(kTarget + i * kSize, kSize), i)) << i;
}

TEST(SoftverbsSending, PostlistsRunInOrder) {
  Link link;
  // Posted as one list: SENDs of one line and of several, with WRITEs and READs between them.
  constexpr std::size_t kCount = 24;
  std::vector<ibv_sge> sges(kCount);
  std::vector<ibv_send_wr> wrs(kCount);
  std::size_t sends = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::size_t at = i * 1024;
    const auto size = static_cast<std::uint32_t>(20 + 37 * i);
    fill(link.a.bytes(at, 1024), i);
    sges[i] = link.a.sge(at, size);
    wrs[i] = {};
    wrs[i].wr_id = i;
    wrs[i].next = i + 1 < kCount ? &wrs[i + 1] : nullptr;
    wrs[i].sg_list = &sges[i];
    wrs[i].num_sge = 1;
    wrs[i].send_flags = IBV_SEND_SIGNALED;
    wrs[i].opcode = i % 4 == 3 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND;
    wrs[i].wr.rdma.remote_addr = link.b.address(kTarget + at);
    wrs[i].wr.rdma.rkey = link.b.mr->rkey;
    if (wrs[i].opcode == IBV_WR_SEND) {
      ASSERT_EQ(link.b.post_recv(i, kTarget + at, 1024), 0);
      ++sends;
    }
  }
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(link.qa, wrs.data(), &bad), 0);
  ASSERT_TRUE(link.run(kCount, sends));
  for (std::size_t i = 0; i < kCount; ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(link.at_a[i].wr_id, i);
    EXPECT_EQ(link.at_a[i].status, IBV_WC_SUCCESS);
    EXPECT_TRUE(holds(link.b.bytes(kTarget + i * 1024, 20 + 37 * i), i));
  }
  std::uint64_t last = 0;
  for (const ibv_wc& wc : link.at_b) {
    EXPECT_EQ(wc.byte_len, 20 + 37 * wc.wr_id);
    EXPECT_TRUE(wc.wr_id == 0 || wc.wr_id > last);
    last = wc.wr_id;
  }
}

TEST(SoftverbsSending, ContextConnectedToItself) {
  Node node;
  ibv_qp* left = node.make_qp();
  ibv_qp* right = node.make_qp();
  connect(node, left, node, right);
  fill(node.bytes(0, 5000), 1);
  ASSERT_EQ(node.post_recv(1, 10'000, 5000), 0);
  ASSERT_EQ(Send(2, node.sge(0, 5000)).post(left), 0);
  ASSERT_EQ(Send(3, node.sge(0, 5000), IBV_WR_RDMA_WRITE)
                .to(node.address(20'000), node.mr->rkey)
                .post(right),
            0);
  std::vector<std::uint64_t> ids;
  ASSERT_TRUE(until(
      [&] {
        ibv_wc wc{};
        if (!node.poll(wc)) return;
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        ids.push_back(wc.wr_id);
      },
      [&] { return ids.size() == 3; }));
  EXPECT_TRUE(holds(node.bytes(10'000, 5000), 1));
  EXPECT_TRUE(holds(node.bytes(20'000, 5000), 1));
}

TEST(SoftverbsSending, SharedAndOwnQueuesSideBySide) {
  // Two receive queues of one node: each message takes a receive of its own queue pair.
  NodeOptions options;
  Link link(options);
  ibv_srq* const shared = std::exchange(link.b.srq, nullptr);
  ibv_qp* own = link.b.make_qp();
  link.b.srq = shared;
  ibv_qp* other = link.a.make_qp();
  connect(link.a, other, link.b, own);
  ASSERT_EQ(link.b.post_recv(1, 0, 64, own), 0);
  ASSERT_EQ(link.b.post_recv(2, 64, 64), 0);
  ASSERT_EQ(Send(3, link.a.sge(0, 10)).post(link.qa), 0);
  ASSERT_EQ(Send(4, link.a.sge(0, 20)).post(other), 0);
  ASSERT_TRUE(link.run(2, 2));
  EXPECT_EQ(link.at_b[0].wr_id, 2u);
  EXPECT_EQ(link.at_b[0].byte_len, 10u);
  EXPECT_EQ(link.at_b[1].wr_id, 1u);
  EXPECT_EQ(link.at_b[1].byte_len, 20u);
  EXPECT_EQ(link.at_b[1].qp_num, own->qp_num);
}

TEST(SoftverbsSending, SharedQueueIsFirstInFirstOut) {
  Link link;
  ibv_qp* other_b = link.b.make_qp();
  ibv_qp* other_a = link.a.make_qp();
  connect(link.a, other_a, link.b, other_b);
  for (std::uint64_t i = 0; i < 40; ++i) ASSERT_EQ(link.b.post_recv(i, 64 * i, 64), 0);
  for (std::uint64_t i = 0; i < 40; ++i)
    ASSERT_EQ(Send(i, link.a.sge(0, 8)).post(i % 3 == 0 ? link.qa : other_a), 0);
  ASSERT_TRUE(link.run(40, 40));
  for (std::uint64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(link.at_b[i].wr_id, i);
    EXPECT_EQ(link.at_b[i].qp_num, (i % 3 == 0 ? link.qb : other_b)->qp_num);
  }
}

}  // namespace softverbs_test::transfer
