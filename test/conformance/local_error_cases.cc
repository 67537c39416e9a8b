// Errors detected at the end that causes them: wrong keys, bounds, rights, and receives that are
// too small. Each ends the queue pair (reliable connection: ERR).
#include "conformance/conformance_ends.h"

namespace conformance::local_error_cases {

/// Memory that was deregistered, and the key that it had.
class EndedMemory {
 public:
  explicit EndedMemory(ibv_pd* pd) : memory_(pd, 4096), sge_(memory_.sge(0, 8)) {
    memory_.deregister();
  }
  [[nodiscard]] ibv_sge sge() const { return sge_; }

 private:
  Memory memory_;
  ibv_sge sge_;
};

/// Other memory than the end's own.
struct Others {
  Others(ibv_context* context, ibv_pd* pd)
      : other_pd(ibv_alloc_pd(context)),
        read_only(pd, 4096, kRemoteRead),
        foreign(other_pd.get(), 4096),
        ended(pd) {}
  Pd other_pd;
  Memory read_only;
  Memory foreign;
  EndedMemory ended;
};

/// Ways to name memory that the device must not access.
struct Spoiled {
  const char* name;
  ibv_sge (*of)(const End& end, const Others& others);
  bool written;  ///< invalid only for memory that the device writes
};

ibv_sge with_key(ibv_sge sge, std::uint32_t key) {
  sge.lkey = key;
  return sge;
}

const Spoiled kSpoiled[] = {
    {"WrongKey",
     [](const End& e, const Others&) {
       return with_key(e.memory.sge(0, 8), e.memory.mr()->lkey ^ 0x00ffff00);
     },
     false},
    {"BeyondTheEnd",
     [](const End& e, const Others&) { return e.memory.sge(e.options.memory - 7, 8); }, false},
    {"BeforeTheBegin",
     [](const End& e, const Others&) {
       ibv_sge sge = e.memory.sge(0, 8);
       sge.addr -= 8;
       return sge;
     },
     false},
    {"WrapsAround",
     [](const End& e, const Others&) {
       ibv_sge sge = e.memory.sge(0, 8);
       sge.addr = ~std::uint64_t{0} - 3;
       return sge;
     },
     false},
    {"OtherDomain", [](const End&, const Others& o) { return o.foreign.sge(0, 8); }, false},
    {"Deregistered", [](const End&, const Others& o) { return o.ended.sge(); }, false},
    {"ReadOnly", [](const End&, const Others& o) { return o.read_only.sge(0, 8); }, true},
};

class LocalProtection : public Connected, public testing::WithParamInterface<const Spoiled*> {
 protected:
  LocalProtection() : others_(context.get(), pd.get()) {}
  [[nodiscard]] ibv_sge bad() const { return GetParam()->of(link.a, others_); }
  void expect_failure(Send& send) const {
    send.on(a);
    expect_wc(a.sent(), a, send.wr.wr_id, IBV_WC_LOC_PROT_ERR);
    EXPECT_EQ(a.state(), IBV_QPS_ERR);
  }

 private:
  Others others_;
};

TEST_P(LocalProtection, OfWhatIsSent) {
  if (GetParam()->written) {
    // Reading it is allowed.
    b.receive(1, 0, 64);
    Send(2, IBV_WR_SEND, {bad()}).on(a);
    return expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS);
  }
  b.receive(1, 0, 64);
  Send send(2, IBV_WR_SEND, {a.memory.sge(0, 8), bad()});
  expect_failure(send);
  EXPECT_TRUE(nothing(b.recv_cq.get()));
  EXPECT_TRUE(all_are(b.memory.at(0, 64), std::byte{0}));
}

TEST_P(LocalProtection, OfWhatIsWritten) {
  if (GetParam()->written) {
    Send(2, IBV_WR_RDMA_WRITE, {bad()}).at(b.memory.address(), b.memory.rkey()).on(a);
    return expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  }
  fill(b.memory.at(0, 64), 1);
  Send send(2, IBV_WR_RDMA_WRITE, {a.memory.sge(0, 8), bad()});
  send.at(b.memory.address(), b.memory.rkey());
  expect_failure(send);
  EXPECT_TRUE(holds(b.memory.at(0, 64), 1));
}

TEST_P(LocalProtection, OfWhatIsRead) {
  Send send(2, IBV_WR_RDMA_READ, {a.memory.sge(0, 8), bad()});
  send.at(b.memory.address(), b.memory.rkey());
  expect_failure(send);
}

TEST_P(LocalProtection, OfAnAtomicsResult) {
  if (device.atomic_cap == IBV_ATOMIC_NONE) GTEST_SKIP() << "atomic_cap is IBV_ATOMIC_NONE";
  b.memory.set_word(0, 5);
  Send send(2, IBV_WR_ATOMIC_FETCH_AND_ADD, {bad()});
  send.atomic(b.memory.address(), b.memory.rkey(), 1);
  expect_failure(send);
}

// An error of the receiver: its receive completes with the error, and the sender gets a remote
// operational error.
TEST_P(LocalProtection, OfAReceive) {
  ASSERT_EQ(a.receive_into(1, {bad()}), 0);
  Send(2, IBV_WR_SEND, {b.memory.sge(0, 8)}).on(b);
  expect_wc(a.received(), a, 1, IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(a.state(), IBV_QPS_ERR);
  expect_wc(b.sent(), b, 2, IBV_WC_REM_OP_ERR);
  EXPECT_EQ(b.state(), IBV_QPS_ERR);
}

INSTANTIATE_TEST_SUITE_P(Memory, LocalProtection,
                         testing::Values(&kSpoiled[0], &kSpoiled[1], &kSpoiled[2], &kSpoiled[3],
                                         &kSpoiled[4], &kSpoiled[5], &kSpoiled[6]),
                         [](const auto& way) { return std::string(way.param->name); });

// ---- lengths ----------------------------------------------------------------------------------

struct Lengths {
  std::uint32_t message;
  std::uint32_t receive;
};
class TooSmall : public Connected, public testing::WithParamInterface<Lengths> {};

TEST_P(TooSmall, ReceiveAndSendFail) {
  const auto [message, receive] = GetParam();
  b.receive(1, 0, receive);
  b.receive(2, 30000, 64);
  fill(a.memory.at(0, message), 1);
  Send(3, IBV_WR_SEND, {a.memory.sge(0, message)}).on(a);
  Send(4, IBV_WR_SEND, {a.memory.sge(0, 4)}).on(a);
  expect_wc(b.received(), b, 1, IBV_WC_LOC_LEN_ERR);
  expect_wc(b.received(), b, 2, IBV_WC_WR_FLUSH_ERR);
  expect_wc(a.sent(), a, 3, IBV_WC_REM_INV_REQ_ERR);
  expect_wc(a.sent(), a, 4, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(a.state(), IBV_QPS_ERR);
  EXPECT_EQ(b.state(), IBV_QPS_ERR);
  EXPECT_TRUE(all_are(b.memory.at(receive, 8), std::byte{0})) << "written behind the receive";
}

INSTANTIATE_TEST_SUITE_P(Lengths, TooSmall,
                         testing::Values(Lengths{1, 0}, Lengths{9, 8}, Lengths{49, 48},
                                         Lengths{64, 1}, Lengths{441, 440}, Lengths{1025, 1024},
                                         Lengths{20000, 4096}),
                         [](const auto& lengths) {
                           return std::to_string(lengths.param.message) + "Into" +
                                  std::to_string(lengths.param.receive);
                         });

class LocalErrors : public Connected {};

TEST_F(LocalErrors, TooSmallInAllElementsTogether) {
  ASSERT_EQ(b.receive_into(1, {b.memory.sge(0, 10), b.memory.sge(100, 10)}), 0);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 21)}).on(a);
  expect_wc(b.received(), b, 1, IBV_WC_LOC_LEN_ERR);
  expect_wc(a.sent(), a, 2, IBV_WC_REM_INV_REQ_ERR);
}

// Unsignaled work requests complete after an error, too.
TEST_F(LocalErrors, AnErrorAlwaysCompletes) {
  ibv_sge bad = a.memory.sge(0, 8);
  bad.lkey ^= 0x5a5a00;
  Send(2, IBV_WR_SEND, {bad}, 0).on(a);
  expect_wc(a.sent(), a, 2, IBV_WC_LOC_PROT_ERR);
}

// Earlier work requests complete normally and in order.
TEST_F(LocalErrors, EarlierWorkIsNotHurt) {
  b.receive(1, 0, 64);
  fill(a.memory.at(0, 32), 1);
  ibv_sge bad = a.memory.sge(0, 8);
  bad.lkey ^= 0x5a5a00;
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 32)}).on(a);
  Send(3, IBV_WR_RDMA_WRITE, {a.memory.sge(0, 32)})
      .at(b.memory.address(1000), b.memory.rkey())
      .on(a);
  Send(4, IBV_WR_SEND, {bad}).on(a);
  Send(5, IBV_WR_SEND, {a.memory.sge(0, 32)}).on(a);
  expect_recv(b.received(), b, 1, 32);
  expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS, IBV_WC_SEND);
  expect_wc(a.sent(), a, 3, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  expect_wc(a.sent(), a, 4, IBV_WC_LOC_PROT_ERR);
  expect_wc(a.sent(), a, 5, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(holds(b.memory.at(0, 32), 1));
  EXPECT_TRUE(holds(b.memory.at(1000, 32), 1));
}

// An error of the requester does not affect the peer, which keeps waiting.
TEST_F(LocalErrors, ThePeerDoesNotNotice) {
  ibv_sge bad = a.memory.sge(0, 8);
  bad.lkey ^= 0x5a5a00;
  b.receive(1, 0, 64);
  Send(2, IBV_WR_SEND, {bad}).on(a);
  expect_wc(a.sent(), a, 2, IBV_WC_LOC_PROT_ERR);
  EXPECT_TRUE(nothing(b.recv_cq.get()));
  EXPECT_EQ(b.state(), IBV_QPS_RTS);
}

// Errors that completions report raise no event.
TEST_F(LocalErrors, ComeWithoutAnEvent) {
  ibv_sge bad = a.memory.sge(0, 8);
  bad.lkey ^= 0x5a5a00;
  Send(2, IBV_WR_SEND, {bad}).on(a);
  expect_wc(a.sent(), a, 2, IBV_WC_LOC_PROT_ERR);
  settle(a.send_cq.get());
  EXPECT_FALSE(any_event(context.get()));
}

}  // namespace conformance::local_error_cases
