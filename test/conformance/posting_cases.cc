// Which posts are refused, and what happens to the rest of a list.
#include "conformance/conformance_ends.h"

namespace conformance::posting_cases {

class Posting : public Connected {};

TEST_F(Posting, SendsBeyondTheQueueNameTheFirstRefused) {
  const std::uint32_t depth = a.cap.max_send_wr;
  std::vector<std::unique_ptr<Send>> list;
  for (unsigned i = 0; i < depth + 2; ++i) {
    list.push_back(
        std::make_unique<Send>(i, IBV_WR_SEND, std::vector<ibv_sge>{a.memory.sge(0, 8)}));
  }
  chain(list);
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(a.qp.get(), &list[0]->wr, &bad), ENOMEM);
  EXPECT_EQ(bad, &list[depth]->wr);
  a.to_error();
  for (unsigned i = 0; i < depth; ++i) expect_wc(a.sent(), a, i, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(nothing(a.send_cq.get())) << "what was refused is not in the queue";
}

TEST_F(Posting, ReceivesBeyondTheQueueNameTheFirstRefused) {
  const std::uint32_t depth = b.cap.max_recv_wr;
  ibv_sge sge = b.memory.sge(0, 64);
  std::vector<ibv_recv_wr> list(depth + 2, ibv_recv_wr{0, nullptr, &sge, 1});
  for (std::size_t i = 0; i < list.size(); ++i) {
    list[i].wr_id = i;
    if (i + 1 < list.size()) list[i].next = &list[i + 1];
  }
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_recv(b.qp.get(), list.data(), &bad), ENOMEM);
  EXPECT_EQ(bad, &list[depth]);
  b.to_error();
  for (unsigned i = 0; i < depth; ++i) expect_wc(b.received(), b, i, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(nothing(b.recv_cq.get()));
}

// Work requests before the refused one are posted; those behind it are not.
TEST_F(Posting, AListCountsUpToTheRefused) {
  for (unsigned i = 0; i < 4; ++i) b.receive(i, 64 * i, 64);
  std::vector<std::unique_ptr<Send>> list;
  for (unsigned i = 0; i < 4; ++i) {
    const std::size_t elements = i == 2 ? a.cap.max_send_sge + 1 : 1;
    list.push_back(std::make_unique<Send>(10 + i, IBV_WR_SEND,
                                          std::vector<ibv_sge>(elements, a.memory.sge(0, 1))));
  }
  chain(list);
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_send(a.qp.get(), &list[0]->wr, &bad), EINVAL);
  EXPECT_EQ(bad, &list[2]->wr);
  expect_wc(a.sent(), a, 10, IBV_WC_SUCCESS);
  expect_wc(a.sent(), a, 11, IBV_WC_SUCCESS);
  Send(20, IBV_WR_SEND, {a.memory.sge(0, 5)}).on(a);
  expect_wc(a.sent(), a, 20, IBV_WC_SUCCESS);
  EXPECT_EQ(b.received().wr_id, 0u);
  EXPECT_EQ(b.received().wr_id, 1u);
  expect_recv(b.received(), b, 2, 5);
}

TEST_F(Posting, AListOfReceivesCountsUpToTheRefused) {
  std::vector<ibv_sge> many(b.cap.max_recv_sge + 1, b.memory.sge(0, 8));
  ibv_recv_wr list[3] = {{1, &list[1], many.data(), 1},
                         {2, &list[2], many.data(), static_cast<int>(many.size())},
                         {3, nullptr, many.data(), 1}};
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_recv(b.qp.get(), list, &bad), EINVAL);
  EXPECT_EQ(bad, &list[1]);
  b.to_error();
  expect_wc(b.received(), b, 1, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(nothing(b.recv_cq.get()));
}

TEST_F(Posting, InlineBeyondItsRoomIsRefused) {
  const std::uint32_t room = a.cap.max_inline_data;
  b.receive(1, 0, room);
  fill(a.memory.at(0, room + 1), 1);
  Send too_long(2, IBV_WR_SEND, {a.memory.sge(0, room + 1)}, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
  ibv_send_wr* bad = nullptr;
  EXPECT_NE(ibv_post_send(a.qp.get(), &too_long.wr, &bad), 0);
  EXPECT_EQ(bad, &too_long.wr);
  Send(3, IBV_WR_SEND, {a.memory.sge(0, room)}, IBV_SEND_SIGNALED | IBV_SEND_INLINE).on(a);
  expect_recv(b.received(), b, 1, room);
  EXPECT_TRUE(holds(b.memory.at(0, room), 1));
  expect_wc(a.sent(), a, 3, IBV_WC_SUCCESS);
}

TEST_F(Posting, AsManyElementsAsAgreed) {
  const std::uint32_t most = a.cap.max_send_sge;
  fill(a.memory.at(0, most), 1);
  std::vector<ibv_sge> sges;
  for (unsigned i = 0; i < most; ++i) sges.push_back(a.memory.sge(i, 1));
  b.receive(1, 0, 256);
  Send(2, IBV_WR_SEND, sges).on(a);
  expect_recv(b.received(), b, 1, most);
  EXPECT_TRUE(holds(b.memory.at(0, most), 1));
}

TEST_F(Posting, ListsArriveInOrder) {
  constexpr unsigned kLength = 8;
  ibv_sge places[kLength];
  ibv_recv_wr receives[kLength];
  for (unsigned i = 0; i < kLength; ++i) {
    places[i] = b.memory.sge(1024 * i, 1024);
    receives[i] = {i, i + 1 < kLength ? &receives[i + 1] : nullptr, &places[i], 1};
  }
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_recv(b.qp.get(), receives, &bad), 0);
  std::vector<std::unique_ptr<Send>> list;
  for (unsigned i = 0; i < kLength; ++i) {
    fill(a.memory.at(1024 * i, 10 + 100 * i), i);
    list.push_back(std::make_unique<Send>(
        50 + i, IBV_WR_SEND, std::vector<ibv_sge>{a.memory.sge(1024 * i, 10 + 100 * i)},
        i + 1 == kLength ? unsigned{IBV_SEND_SIGNALED} : 0u));
  }
  chain(list);
  ASSERT_EQ(a.post(list[0]->wr), 0);
  for (unsigned i = 0; i < kLength; ++i) {
    expect_recv(b.received(), b, i, 10 + 100 * i);
    EXPECT_TRUE(holds(b.memory.at(1024 * i, 10 + 100 * i), i));
  }
  expect_wc(a.sent(), a, 50 + kLength - 1, IBV_WC_SUCCESS);
  EXPECT_TRUE(nothing(a.send_cq.get()));
}

// Work requests, elements and lists belong to the program again once the post returns.
TEST_F(Posting, KeepsNothingOfTheProgramsLists) {
  fill(a.memory.at(0, 700), 1);
  {
    std::vector<ibv_sge> places = {b.memory.sge(0, 600), b.memory.sge(2000, 600)};
    ibv_recv_wr wr{4, nullptr, places.data(), 2};
    ibv_recv_wr* bad = nullptr;
    ASSERT_EQ(ibv_post_recv(b.qp.get(), &wr, &bad), 0);
    std::ranges::fill(places, ibv_sge{});
    wr = {};
    Send send(5, IBV_WR_SEND, {a.memory.sge(0, 300), a.memory.sge(300, 400)});
    send.on(a);
    std::ranges::fill(send.sges, ibv_sge{});
    send.wr = {};
  }
  expect_recv(b.received(), b, 4, 700);
  EXPECT_TRUE(std::ranges::equal(b.memory.at(0, 600), a.memory.at(0, 600)));
  EXPECT_TRUE(std::ranges::equal(b.memory.at(2000, 100), a.memory.at(600, 100)));
  expect_wc(a.sent(), a, 5, IBV_WC_SUCCESS);
}

// ---- limits of objects ------------------------------------------------------------------------

class Limits : public Verbs {
 protected:
  /// The errno of creating such a queue pair; 0 if it succeeds.
  int refusal(const ibv_qp_cap& cap) const {
    const Cq cq(ibv_create_cq(context.get(), 8, nullptr, nullptr, 0));
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq.get();
    init.qp_type = IBV_QPT_RC;
    init.cap = cap;
    errno = 0;
    const Qp qp(ibv_create_qp(pd.get(), &init));
    return qp != nullptr ? 0 : errno;
  }
  static void expect_refused(int error) {
    EXPECT_TRUE(error == EINVAL || error == ENOMEM) << std::strerror(error);
  }
};

TEST_F(Limits, OfQueuePairs) {
  const auto wrs = static_cast<std::uint32_t>(device.max_qp_wr);
  const auto sges = static_cast<std::uint32_t>(device.max_sge);
  EXPECT_EQ(refusal({1, 1, 1, 1, 0}), 0);
  EXPECT_EQ(refusal({wrs, 1, 1, 1, 0}), 0);
  expect_refused(refusal({wrs + 1, 1, 1, 1, 0}));
  expect_refused(refusal({1, wrs + 1, 1, 1, 0}));
  EXPECT_EQ(refusal({1, 1, sges, sges, 0}), 0);
  expect_refused(refusal({1, 1, sges + 1, 1, 0}));
  expect_refused(refusal({1, 1, 1, sges + 1, 0}));
  expect_refused(refusal({1, 1, 1, 1, 1u << 30}));
}

TEST_F(Limits, MadeQueuesAreAtLeastAsLargeAsAsked) {
  EndOptions odd;
  odd.send_wr = 5;
  odd.recv_wr = 7;
  odd.sges = 3;
  odd.inline_bytes = 33;
  const End subject = end(odd);
  EXPECT_GE(subject.cap.max_send_wr, 5u);
  EXPECT_GE(subject.cap.max_recv_wr, 7u);
  EXPECT_GE(subject.cap.max_send_sge, 3u);
  EXPECT_GE(subject.cap.max_recv_sge, 3u);
  EXPECT_GE(subject.cap.max_inline_data, 33u);
}

TEST_F(Limits, OfCompletionQueues) {
  EXPECT_EQ(Cq(ibv_create_cq(context.get(), 0, nullptr, nullptr, 0)), nullptr);
  EXPECT_EQ(Cq(ibv_create_cq(context.get(), device.max_cqe + 1, nullptr, nullptr, 0)), nullptr);
  EXPECT_EQ(Cq(ibv_create_cq(context.get(), 8, nullptr, nullptr, 1 << 20)), nullptr);
  const Cq cq(ibv_create_cq(context.get(), 5, this, nullptr, 0));
  ASSERT_NE(cq, nullptr);
  EXPECT_GE(cq->cqe, 5);
  EXPECT_EQ(cq->cq_context, this);
}

// Remote write without local write is refused (ibv_reg_mr(3)).
TEST_F(Limits, OfMemoryAccess) {
  std::vector<std::byte> bytes(4096);
  const auto error = [&](int access) {
    errno = 0;
    const Mr mr(ibv_reg_mr(pd.get(), bytes.data(), bytes.size(), access));
    return mr != nullptr ? 0 : errno;
  };
  EXPECT_EQ(error(kLocalWrite | kRemote), 0);
  EXPECT_EQ(error(kRemoteRead), 0);
  EXPECT_EQ(error(0), 0);
  EXPECT_EQ(error(kRemoteWrite), EINVAL);
  EXPECT_EQ(error(kRemoteAtomic), EINVAL);
}

TEST_F(Limits, ObjectsInUseAreNotDestroyed) {
  const Pair link = pair();
  EXPECT_EQ(ibv_dealloc_pd(pd.get()), EBUSY);
  EXPECT_EQ(ibv_destroy_cq(link.a.send_cq.get()), EBUSY);
  link.b.receive(1, 0, 64);
  Send(2, IBV_WR_SEND, {link.a.memory.sge(0, 8)}).on(link.a);
  expect_recv(link.b.received(), link.b, 1, 8);
}

}  // namespace conformance::posting_cases
