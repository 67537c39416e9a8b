// Memory windows of type 2B: bound by a work request, valid on one queue pair under the key given
// there, ended by an invalidation from either side (specification volume 1, 10.6.7).
#include "conformance/conformance_ends.h"

namespace conformance::window_cases {

class Windows : public Connected {
 protected:
  void SetUp() override {
    if ((device.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0)
      GTEST_SKIP() << "device_cap_flags has no IBV_DEVICE_MEM_WINDOW_TYPE_2B";
    window_ = make_window();
  }
  void TearDown() override {
    // A window is destroyed before its queue pair.
    window_.reset();
  }
  [[nodiscard]] Mw make_window() const {
    Mw mw(ibv_alloc_mw(pd.get(), IBV_MW_TYPE_2));
    must(mw != nullptr, "ibv_alloc_mw");
    return mw;
  }
  /// Binds bytes of `memory` on b. Returns the completion.
  ibv_wc try_bind(ibv_mw* mw, std::uint32_t rkey, const Memory& memory, std::size_t offset,
                  std::uint64_t length, int access) {
    Send(70, IBV_WR_BIND_MW)
        .bind(mw, rkey, memory.mr(), memory.address(offset), length, access)
        .on(b);
    return b.sent();
  }
  /// Binds bytes of b's memory and returns their key.
  std::uint32_t bind(std::size_t offset = 1024, std::uint64_t length = 256, int access = kRemote) {
    const std::uint32_t rkey = ibv_inc_rkey(window_->rkey);
    const ibv_wc wc = try_bind(window_.get(), rkey, b.memory, offset, length, access);
    expect_wc(wc, b, 70, IBV_WC_SUCCESS, IBV_WC_BIND_MW);
    window_->rkey = rkey;
    return rkey;
  }
  void invalidate(std::uint32_t rkey) {
    Send(71, IBV_WR_LOCAL_INV).invalidate(rkey).on(b);
    expect_wc(b.sent(), b, 71, IBV_WC_SUCCESS, IBV_WC_LOCAL_INV);
  }
  ibv_wc_status write(const End& from, std::size_t offset, std::uint32_t length,
                      std::uint32_t rkey) {
    Send(72, IBV_WR_RDMA_WRITE, {from.memory.sge(0, length)})
        .at(b.memory.address(offset), rkey)
        .on(from);
    return from.sent().status;
  }
  ibv_wc_status read(std::size_t offset, std::uint32_t length, std::uint32_t rkey) {
    Send(73, IBV_WR_RDMA_READ, {a.memory.sge(4096, length)})
        .at(b.memory.address(offset), rkey)
        .on(a);
    return a.sent().status;
  }
  Mw window_;
};

TEST_F(Windows, OpenWhatWasBound) {
  const std::uint32_t rkey = bind();
  fill(a.memory.at(0, 256), 1);
  EXPECT_EQ(write(a, 1024, 256, rkey), IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(b.memory.at(1024, 256), 1));
  EXPECT_EQ(read(1024 + 100, 156, rkey), IBV_WC_SUCCESS);
  EXPECT_TRUE(std::ranges::equal(a.memory.at(4096, 156), b.memory.at(1124, 156)));
}

// A window opens memory to peers, so local write has no effect on it.
TEST_F(Windows, LocalWriteMayBeAskedFor) {
  const std::uint32_t rkey = bind(1024, 256, kLocalWrite | kRemoteWrite);
  EXPECT_EQ(write(a, 1024, 64, rkey), IBV_WC_SUCCESS);
}

TEST_F(Windows, KeyHasTheTagThatWasAskedFor) {
  const std::uint32_t before = window_->rkey;
  const std::uint32_t rkey = bind();
  EXPECT_EQ(rkey >> 8, before >> 8);
  EXPECT_NE(rkey, before);
  EXPECT_EQ(read(1024, 8, rkey), IBV_WC_SUCCESS);
  EXPECT_EQ(read(1024, 8, before), IBV_WC_REM_ACCESS_ERR) << "the key of before";
}

TEST_F(Windows, AtomicsAndWritesWithImmediate) {
  const std::uint32_t rkey = bind();
  b.memory.set_word(1032, 4);
  Send(1, IBV_WR_ATOMIC_FETCH_AND_ADD, {a.memory.sge(0, 8)})
      .atomic(b.memory.address(1032), rkey, 3)
      .on(a);
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_FETCH_ADD);
  EXPECT_EQ(b.memory.word(1032), 7u);
  b.receive(2, 8192, 16);
  fill(a.memory.at(0, 64), 2);
  Send(3, IBV_WR_RDMA_WRITE_WITH_IMM, {a.memory.sge(0, 64)})
      .imm(5)
      .at(b.memory.address(1100), rkey)
      .on(a);
  expect_recv(b.received(), b, 2, 64, IBV_WC_WITH_IMM, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_TRUE(holds(b.memory.at(1100, 64), 2));
}

struct Beyond {
  const char* name;
  std::size_t offset;
  std::uint32_t length;
};
class WindowBounds : public Windows, public testing::WithParamInterface<Beyond> {};

TEST_P(WindowBounds, Hold) {
  const std::uint32_t rkey = bind();
  fill(a.memory.at(0, 300), 1);
  EXPECT_EQ(write(a, GetParam().offset, GetParam().length, rkey), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(all_are(b.memory.at(1000, 400), std::byte{0}));
}

INSTANTIATE_TEST_SUITE_P(Places, WindowBounds,
                         testing::Values(Beyond{"Behind", 1280, 1}, Beyond{"Before", 1023, 1},
                                         Beyond{"Over", 1279, 2}, Beyond{"Longer", 1024, 257},
                                         Beyond{"FarOff", 9000, 8}),
                         [](const auto& place) { return std::string(place.param.name); });

TEST_F(Windows, GrantWhatWasBoundOnly) {
  const std::uint32_t rkey = bind(1024, 256, kRemoteRead);
  EXPECT_EQ(read(1024, 8, rkey), IBV_WC_SUCCESS);
  EXPECT_EQ(write(a, 1024, 8, rkey), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, WriteOnlyIsNotRead) {
  const std::uint32_t rkey = bind(1024, 256, kRemoteWrite);
  EXPECT_EQ(write(a, 1024, 8, rkey), IBV_WC_SUCCESS);
  EXPECT_EQ(read(1024, 8, rkey), IBV_WC_REM_ACCESS_ERR);
}

// The window grants access that its region does not.
TEST_F(Windows, NeedNoRemoteRightOfTheirRegion) {
  const Memory quiet(pd.get(), 4096, kLocalWrite | kBind);
  const std::uint32_t rkey = ibv_inc_rkey(window_->rkey);
  expect_wc(try_bind(window_.get(), rkey, quiet, 0, 64, kRemoteWrite), b, 70, IBV_WC_SUCCESS,
            IBV_WC_BIND_MW);
  fill(a.memory.at(0, 64), 3);
  Send(1, IBV_WR_RDMA_WRITE, {a.memory.sge(0, 64)}).at(quiet.address(), rkey).on(a);
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  EXPECT_TRUE(holds(quiet.at(0, 64), 3));
  invalidate(rkey);
}

TEST_F(Windows, HoldForOneQueuePair) {
  const Pair other(context.get(), pd.get());
  const std::uint32_t rkey = bind();
  EXPECT_EQ(write(other.a, 1024, 8, rkey), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(write(a, 1024, 8, rkey), IBV_WC_SUCCESS);
}

TEST_F(Windows, AreNoLocalKeys) {
  const std::uint32_t rkey = bind();
  ibv_sge sge = b.memory.sge(1024, 8);
  sge.lkey = rkey;
  a.receive(1, 0, 64);
  Send(2, IBV_WR_SEND, {sge}).on(b);
  expect_wc(b.sent(), b, 2, IBV_WC_LOC_PROT_ERR);
}

// ---- invalidation -----------------------------------------------------------------------------

TEST_F(Windows, EndByLocalInvalidation) {
  const std::uint32_t rkey = bind();
  EXPECT_EQ(write(a, 1024, 8, rkey), IBV_WC_SUCCESS);
  invalidate(rkey);
  std::ranges::fill(b.memory.at(1024, 8), std::byte{7});
  EXPECT_EQ(write(a, 1024, 8, rkey), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(all_are(b.memory.at(1024, 8), std::byte{7}));
}

TEST_F(Windows, EndByRemoteInvalidation) {
  const std::uint32_t rkey = bind();
  b.receive(1, 8192, 64);
  Send(2, IBV_WR_SEND_WITH_INV, {a.memory.sge(0, 8)}).invalidate(rkey).on(a);
  const ibv_wc wc = b.received();
  expect_recv(wc, b, 1, 8, IBV_WC_WITH_INV);
  EXPECT_EQ(wc.invalidated_rkey, rkey);
  expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS, IBV_WC_SEND);
  EXPECT_EQ(read(1024, 8, rkey), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, AreBoundAgainAfterInvalidation) {
  std::uint32_t rkey = 0;
  for (unsigned round = 0; round < 10; ++round) {
    const std::uint32_t older = rkey;
    rkey = bind(1024 + 64 * round, 64);
    EXPECT_NE(rkey, older);
    fill(a.memory.at(0, 64), round);
    EXPECT_EQ(write(a, 1024 + 64 * round, 64, rkey), IBV_WC_SUCCESS);
    EXPECT_TRUE(holds(b.memory.at(1024 + 64 * round, 64), round));
    invalidate(rkey);
  }
}

TEST_F(Windows, BindAndUseInOnePost) {
  const std::uint32_t rkey = ibv_inc_rkey(window_->rkey);
  Send bind_first(1, IBV_WR_BIND_MW, {}, 0);
  bind_first.bind(window_.get(), rkey, b.memory.mr(), b.memory.address(1024), 64, kRemoteWrite);
  Send tell(2, IBV_WR_SEND, {b.memory.sge(0, 8)});
  bind_first.wr.next = &tell.wr;
  a.receive(3, 0, 64);
  ASSERT_EQ(b.post(bind_first.wr), 0);
  expect_recv(a.received(), a, 3, 8);
  EXPECT_EQ(write(a, 1024, 64, rkey), IBV_WC_SUCCESS) << "bound before the message went out";
}

// Invalidating an invalid key: libibverbs has no name for the specification's "memory management
// operation error", and devices report one of two statuses.
TEST_F(Windows, InvalidatingAWrongKeyFails) {
  Send(1, IBV_WR_LOCAL_INV).invalidate(0x00fedc00).on(b);
  const ibv_wc wc = b.sent();
  EXPECT_EQ(wc.wr_id, 1u);
  EXPECT_TRUE(wc.status == IBV_WC_LOC_QP_OP_ERR || wc.status == IBV_WC_MW_BIND_ERR)
      << ibv_wc_status_str(wc.status);
  EXPECT_EQ(b.state(), IBV_QPS_ERR);
}

// A class J fault: the receive completes with the error, and both ends fail.
TEST_F(Windows, RemotelyInvalidatingAWrongKeyFails) {
  b.receive(1, 8192, 64);
  Send(2, IBV_WR_SEND_WITH_INV, {a.memory.sge(0, 8)}).invalidate(0x00fedc00).on(a);
  expect_wc(b.received(), b, 1, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(b.state(), IBV_QPS_ERR);
  EXPECT_NE(a.sent().status, IBV_WC_SUCCESS);
  EXPECT_EQ(a.state(), IBV_QPS_ERR);
}

TEST_F(Windows, OfAnotherQueuePairAreNotInvalidatedRemotely) {
  const Pair other(context.get(), pd.get());
  const std::uint32_t rkey = bind();
  other.b.receive(1, 8192, 64);
  Send(2, IBV_WR_SEND_WITH_INV, {other.a.memory.sge(0, 8)}).invalidate(rkey).on(other.a);
  expect_wc(other.b.received(), other.b, 1, IBV_WC_REM_INV_REQ_ERR);
  EXPECT_EQ(write(a, 1024, 8, rkey), IBV_WC_SUCCESS);
}

// ---- what cannot be bound ---------------------------------------------------------------------

class WindowBinding : public Windows {
 protected:
  void expect_refused(const ibv_wc& wc) {
    expect_wc(wc, b, 70, IBV_WC_MW_BIND_ERR);
    EXPECT_EQ(b.state(), IBV_QPS_ERR);
  }
  [[nodiscard]] std::uint32_t next() const { return ibv_inc_rkey(window_->rkey); }
};

// A type 2 window must be free to be bound (o10-37.2.30), and the length must not be 0
// (o10-37.2.40).
TEST_F(WindowBinding, TwiceIsRefused) {
  bind();
  expect_refused(try_bind(window_.get(), next(), b.memory, 0, 64, kRemoteRead));
}
TEST_F(WindowBinding, OfNoBytesIsRefused) {
  expect_refused(try_bind(window_.get(), next(), b.memory, 0, 0, kRemoteRead));
}
TEST_F(WindowBinding, BeyondTheRegionIsRefused) {
  expect_refused(try_bind(window_.get(), next(), b.memory, b.options.memory - 63, 64, kRemoteRead));
}
TEST_F(WindowBinding, LongerThanTheRegionIsRefused) {
  expect_refused(try_bind(window_.get(), next(), b.memory, 0, b.options.memory + 1, kRemoteRead));
}
TEST_F(WindowBinding, OfARegionWithoutTheRightIsRefused) {
  const Memory closed(pd.get(), 4096, kLocalWrite | kRemote);
  expect_refused(try_bind(window_.get(), next(), closed, 0, 64, kRemoteRead));
}
TEST_F(WindowBinding, ForWritingAReadOnlyRegionIsRefused) {
  const Memory read_only(pd.get(), 4096, kBind);
  expect_refused(try_bind(window_.get(), next(), read_only, 0, 64, kRemoteWrite));
}
TEST_F(WindowBinding, OfAnotherDomainsRegionIsRefused) {
  const Pd other(ibv_alloc_pd(context.get()));
  const Memory foreign(other.get(), 4096, kLocalWrite | kRemote | kBind);
  expect_refused(try_bind(window_.get(), next(), foreign, 0, 64, kRemoteRead));
}

// ---- life -------------------------------------------------------------------------------------

TEST_F(Windows, KeepTheirRegion) {
  Memory memory(pd.get(), 4096, kLocalWrite | kBind);
  const std::uint32_t rkey = ibv_inc_rkey(window_->rkey);
  expect_wc(try_bind(window_.get(), rkey, memory, 0, 64, kRemoteRead), b, 70, IBV_WC_SUCCESS,
            IBV_WC_BIND_MW);
  ASSERT_EQ(memory.try_to_deregister(), EBUSY);
  invalidate(rkey);
}

TEST_F(Windows, EndWithTheirObject) {
  const std::uint32_t rkey = bind();
  EXPECT_EQ(read(1024, 8, rkey), IBV_WC_SUCCESS);
  window_.reset();
  EXPECT_EQ(read(1024, 8, rkey), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(Windows, UnboundHaveNoUse) {
  EXPECT_EQ(read(1024, 8, window_->rkey), IBV_WC_REM_ACCESS_ERR);
}

}  // namespace conformance::window_cases
