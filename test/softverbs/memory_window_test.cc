// Memory windows: who may use them, for how long, and when they are really closed.
#include "softverbs/memory/memory_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "softverbs/memory/remote_access.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::window {

constexpr std::size_t kAt = 8192;  ///< offset of the window in its owner's memory
constexpr std::uint32_t kLength = 1024;
constexpr unsigned kReadWrite = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

struct Bind {
  ibv_send_wr wr{};
  Bind(const Node& node, ibv_mw* mw, std::uint32_t rkey, unsigned access = kReadWrite) {
    wr.wr_id = 70;
    wr.opcode = IBV_WR_BIND_MW;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = {node.mr, node.address(kAt), kLength, access};
  }
  int post(ibv_qp* qp) {
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp, &wr, &bad);
  }
};
struct Invalidate {
  ibv_send_wr wr{};
  explicit Invalidate(std::uint32_t rkey) {
    wr.wr_id = 71;
    wr.opcode = IBV_WR_LOCAL_INV;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.invalidate_rkey = rkey;
  }
  int post(ibv_qp* qp) {
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp, &wr, &bad);
  }
};

/// A link whose b owns a window; bound to qb on request.
struct Fixture {
  Link link;
  ibv_mw* mw;
  std::uint32_t key = 0;

  explicit Fixture(const NodeOptions& options = {})
      : link(options), mw(sv::alloc_mw(link.b.pd, IBV_MW_TYPE_2)) {
    must(mw != nullptr, "alloc_mw");
    key = mw->rkey;
  }
  ~Fixture() {
    if (mw != nullptr) must(sv::dealloc_mw(mw) == 0, "dealloc_mw");
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;

  void bind(unsigned access = kReadWrite, ibv_qp* qp = nullptr) {
    key = ibv_inc_rkey(key);
    must(Bind(link.b, mw, key, access).post(qp != nullptr ? qp : link.qb) == 0, "bind");
    expect_at_b(IBV_WC_BIND_MW, IBV_WC_SUCCESS, 70);
    mw->rkey = key;
  }
  /// Checks the next and only completion at b.
  void expect_at_b(ibv_wc_opcode opcode, ibv_wc_status status, std::uint64_t id) {
    link.at_b.clear();
    link.steps(1);
    ASSERT_EQ(link.at_b.size(), 1u);
    EXPECT_EQ(link.at_b[0].status, status);
    EXPECT_EQ(link.at_b[0].opcode, opcode);
    EXPECT_EQ(link.at_b[0].wr_id, id);
    link.at_b.clear();
  }
  ibv_wc_status access(ibv_wr_opcode opcode, ibv_qp* from = nullptr, std::size_t offset = 0,
                       std::uint32_t size = 64) {
    link.at_a.clear();
    Send send(5, link.a.sge(0, size), opcode);
    send.to(link.b.address(kAt + offset), key);
    must(send.post(from != nullptr ? from : link.qa) == 0, "post_send");
    link.steps(2);
    must(link.at_a.size() == 1, "one completion");
    return link.at_a[0].status;
  }
  ibv_wc_status write() { return access(IBV_WR_RDMA_WRITE); }
  sv::Peer& a_sees_b() const { return *link.a.internals().peers.front(); }
};

TEST(SoftverbsWindows, GiveAccessToTheirPartOnly) {
  for (const bool private_memory : {false, true}) {
    NodeOptions options;
    options.private_memory = private_memory;
    Fixture f(options);
    f.bind();
    fill(f.link.a.bytes(0, kLength), 1);
    EXPECT_EQ(f.access(IBV_WR_RDMA_WRITE, nullptr, 0, kLength), IBV_WC_SUCCESS);
    EXPECT_TRUE(holds(f.link.b.bytes(kAt, kLength), 1));
    fill(f.link.b.bytes(kAt, kLength), 2);
    EXPECT_EQ(f.access(IBV_WR_RDMA_READ, nullptr, 0, kLength), IBV_WC_SUCCESS);
    EXPECT_TRUE(holds(f.link.a.bytes(0, kLength), 2));
    ASSERT_EQ(f.link.b.post_recv(3, 0, 64), 0);
    fill(f.link.a.bytes(0, 64), 3);
    EXPECT_EQ(f.access(IBV_WR_RDMA_WRITE_WITH_IMM, nullptr, 100, 64), IBV_WC_SUCCESS);
    EXPECT_TRUE(holds(f.link.b.bytes(kAt + 100, 64), 3));
    EXPECT_EQ(f.access(IBV_WR_RDMA_WRITE, nullptr, 1, kLength), IBV_WC_REM_ACCESS_ERR);
  }
}

TEST(SoftverbsWindows, RightsAreTheirOwn) {
  // The region itself grants nothing to peers; the window does.
  for (const auto& [granted, opcode, good] : std::vector<std::tuple<unsigned, ibv_wr_opcode, bool>>{
           {IBV_ACCESS_REMOTE_READ, IBV_WR_RDMA_READ, true},
           {IBV_ACCESS_REMOTE_READ, IBV_WR_RDMA_WRITE, false},
           {IBV_ACCESS_REMOTE_READ, IBV_WR_RDMA_WRITE_WITH_IMM, false},
           {IBV_ACCESS_REMOTE_WRITE, IBV_WR_RDMA_WRITE, true},
           {IBV_ACCESS_REMOTE_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, true},
           {IBV_ACCESS_REMOTE_WRITE, IBV_WR_RDMA_READ, false},
           {kReadWrite, IBV_WR_ATOMIC_FETCH_AND_ADD, false},
           {IBV_ACCESS_REMOTE_ATOMIC, IBV_WR_ATOMIC_FETCH_AND_ADD, true}}) {
    SCOPED_TRACE(testing::Message() << granted << " opcode " << opcode);
    Fixture f;
    ibv_mr* mr = sv::reg_mr(f.link.b.pd, &f.link.b.memory[kAt], kLength,
                            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    f.key = ibv_inc_rkey(f.key);
    Bind bind(f.link.b, f.mw, f.key, granted);
    bind.wr.bind_mw.bind_info.mr = mr;
    ASSERT_EQ(bind.post(f.link.qb), 0);
    f.expect_at_b(IBV_WC_BIND_MW, IBV_WC_SUCCESS, 70);
    ASSERT_EQ(f.link.b.post_recv(3, 0, 64), 0);
    const ibv_wc_status expected = good ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      Send add(5, f.link.a.sge(0, 8), opcode);
      add.wr.wr.atomic = {f.link.b.address(kAt), 7, 0, f.key};
      ASSERT_EQ(add.post(f.link.qa), 0);
      f.link.steps(1);
      ASSERT_EQ(f.link.at_a.size(), 1u);
      EXPECT_EQ(f.link.at_a[0].status, expected);
      EXPECT_EQ(f.link.b.memory[kAt], std::byte(good ? 7 : 0));
    } else {
      EXPECT_EQ(f.access(opcode), expected);
    }
    EXPECT_EQ(sv::dealloc_mw(std::exchange(f.mw, nullptr)), 0);
    EXPECT_EQ(sv::dereg_mr(mr), 0);
  }
}

TEST(SoftverbsWindows, HoldForOneQueuePair) {
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    Fixture f;
    ibv_qp* qa = f.link.a.make_qp();
    ibv_qp* qb = f.link.b.make_qp();
    connect(f.link.a, qa, f.link.b, qb);
    f.bind();
    ASSERT_EQ(f.link.b.post_recv(3, 0, 64), 0);
    ASSERT_EQ(f.link.b.post_recv(4, 0, 64), 0);
    EXPECT_EQ(f.access(opcode), IBV_WC_SUCCESS);
    EXPECT_EQ(f.access(opcode, qa), IBV_WC_REM_ACCESS_ERR);
  }
}

TEST(SoftverbsWindows, KeysOfBeforeAndAfter) {
  Fixture f;
  EXPECT_EQ(f.write(), IBV_WC_REM_ACCESS_ERR);  // not bound yet
  for (int spoil = 0; spoil < 2; ++spoil) {
    Fixture g;
    g.bind();
    const std::uint32_t old = g.key;
    ASSERT_EQ(Invalidate(g.key).post(g.link.qb), 0);
    g.expect_at_b(IBV_WC_LOCAL_INV, IBV_WC_SUCCESS, 71);
    if (spoil == 1) {
      g.bind();
      EXPECT_NE(g.key, old);
      EXPECT_EQ(g.key >> 8, old >> 8);
      EXPECT_EQ(g.write(), IBV_WC_SUCCESS);
      g.key = old;
    }
    EXPECT_EQ(g.write(), IBV_WC_REM_ACCESS_ERR);
  }
}

TEST(SoftverbsWindows, NoKeyForLocalUse) {
  Fixture f;
  f.bind();
  Send send(1, f.link.b.sge(kAt, 8));
  send.sge.lkey = f.key;
  ASSERT_EQ(send.post(f.link.qb), 0);
  f.link.steps(1);
  ASSERT_EQ(f.link.at_b.size(), 1u);
  EXPECT_EQ(f.link.at_b[0].status, IBV_WC_LOC_PROT_ERR);
}

TEST(SoftverbsWindows, BindingsThatFail) {
  using Info = ibv_mw_bind_info;
  const auto with = [](int access) {
    return [access](Fixture& f, Info& info) {
      info.mr = sv::reg_mr(f.link.b.pd, &f.link.b.memory[kAt], kLength, access);
    };
  };
  const std::vector<std::function<void(Fixture&, Info&)>> spoils = {
      [](Fixture&, Info& info) { info.length = 0; },
      [](Fixture&, Info& info) { info.mr = nullptr; },
      [](Fixture& f, Info& info) { info.length = f.link.b.memory.size() - kAt + 1; },
      [](Fixture& f, Info& info) { info.addr = f.link.b.address(0) - 1; },
      [](Fixture&, Info& info) { info.length = ~std::uint64_t{0}; },
      with(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ),
      with(IBV_ACCESS_MW_BIND),             // not writable, so neither is the window
      [](Fixture& f, Info&) { f.bind(); },  // already bound
  };
  for (std::size_t i = 0; i < spoils.size(); ++i) {
    SCOPED_TRACE(i);
    Fixture f;
    Bind bind(f.link.b, f.mw, 0);
    spoils[i](f, bind.wr.bind_mw.bind_info);
    f.key = bind.wr.bind_mw.rkey = ibv_inc_rkey(f.key);
    ASSERT_EQ(bind.post(f.link.qb), 0);
    f.expect_at_b(IBV_WC_BIND_MW, IBV_WC_MW_BIND_ERR, 70);
    EXPECT_EQ(state_of(f.link.qb), IBV_QPS_ERR);
    ibv_mr* mr = bind.wr.bind_mw.bind_info.mr;
    if (mr != nullptr && mr != f.link.b.mr) {
      EXPECT_EQ(sv::dereg_mr(mr), 0);
    }
  }
}

TEST(SoftverbsWindows, OtherDomains) {
  for (int spoil = 0; spoil < 2; ++spoil) {
    Fixture f;
    ibv_pd* pd = sv::alloc_pd(f.link.b.context);
    ibv_mw* mw = spoil == 0 ? sv::alloc_mw(pd, IBV_MW_TYPE_2) : f.mw;
    ibv_mr* mr = sv::reg_mr(pd, &f.link.b.memory[kAt], kLength, Node::kAllAccess);
    Bind bind(f.link.b, mw, ibv_inc_rkey(mw->rkey));
    if (spoil == 1) bind.wr.bind_mw.bind_info.mr = mr;
    ASSERT_EQ(bind.post(f.link.qb), 0);
    f.expect_at_b(IBV_WC_BIND_MW, IBV_WC_MW_BIND_ERR, 70);
    if (spoil == 0) {
      EXPECT_EQ(sv::dealloc_pd(pd), EBUSY);
      EXPECT_EQ(sv::dealloc_mw(mw), 0);
    }
    EXPECT_EQ(sv::dereg_mr(mr), 0);
    EXPECT_EQ(sv::dealloc_pd(pd), 0);
  }
}

TEST(SoftverbsWindows, PostingChecksItsArguments) {
  Fixture f;
  Bind other(f.link.b, f.mw, f.key + 0x100);  // the key of another window
  EXPECT_EQ(other.post(f.link.qb), EINVAL);
  Bind none(f.link.b, nullptr, f.key);
  EXPECT_EQ(none.post(f.link.qb), EINVAL);
  Bind zero_based(f.link.b, f.mw, f.key, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED);
  EXPECT_EQ(zero_based.post(f.link.qb), EINVAL);
  f.link.steps(1);
  EXPECT_TRUE(f.link.at_b.empty());
  EXPECT_EQ(sv::alloc_mw(f.link.b.pd, IBV_MW_TYPE_1), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  ibv_device_attr attr{};
  ASSERT_EQ(sv::query_device(f.link.b.context, &attr), 0);
  EXPECT_GT(attr.max_mw, 1000);
  EXPECT_EQ(attr.device_cap_flags & (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B),
            static_cast<unsigned>(IBV_DEVICE_MEM_WINDOW_TYPE_2B));
}

TEST(SoftverbsWindows, InvalidationsThatFail) {
  const std::vector<std::function<std::uint32_t(Fixture&)>> keys = {
      [](Fixture& f) { return ibv_inc_rkey(f.key); },
      [](Fixture& f) { return f.key + 0x100; },
      [](Fixture& f) { return f.link.b.mr->rkey; },
      [](Fixture&) { return 0u; },
      [](Fixture&) { return ~0u; },
      [](Fixture& f) {  // bound to another queue pair
        must(Invalidate(f.key).post(f.link.qb) == 0, "post");
        f.expect_at_b(IBV_WC_LOCAL_INV, IBV_WC_SUCCESS, 71);
        ibv_qp* qa = f.link.a.make_qp();
        ibv_qp* qb = f.link.b.make_qp();
        connect(f.link.a, qa, f.link.b, qb);
        f.bind(kReadWrite, qb);
        return f.key;
      },
  };
  for (const bool local : {true, false}) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      SCOPED_TRACE(testing::Message() << local << ' ' << i);
      Fixture f;
      f.bind();
      const std::uint32_t bad = keys[i](f);
      if (local) {
        ASSERT_EQ(Invalidate(bad).post(f.link.qb), 0);
        f.expect_at_b(IBV_WC_LOCAL_INV, IBV_WC_LOC_QP_OP_ERR, 71);
      } else {
        ASSERT_EQ(f.link.b.post_recv(9, 0, 64), 0);
        Send send(1, f.link.a.sge(0, 8), IBV_WR_SEND_WITH_INV);
        send.wr.invalidate_rkey = bad;
        ASSERT_EQ(send.post(f.link.qa), 0);
        f.expect_at_b(IBV_WC_RECV, IBV_WC_REM_INV_REQ_ERR, 9);
        ASSERT_EQ(f.link.at_a.size(), 1u);
        EXPECT_EQ(f.link.at_a[0].status, IBV_WC_REM_INV_REQ_ERR);
        EXPECT_EQ(state_of(f.link.qa), IBV_QPS_ERR);
      }
      EXPECT_EQ(state_of(f.link.qb), IBV_QPS_ERR);
      EXPECT_EQ(static_cast<sv::Mw*>(f.mw)->qp != nullptr, true);  // the window is unchanged
    }
  }
}

TEST(SoftverbsWindows, ThePeerGivesThemUp) {
  for (const std::uint32_t size : {0u, 8u, 200u, 5000u}) {
    SCOPED_TRACE(size);
    Fixture f;
    f.bind();
    fill(f.link.a.bytes(0, size), size);
    ASSERT_EQ(f.link.b.post_recv(9, 0, 8000), 0);
    Send write(1, f.link.a.sge(0, 64), IBV_WR_RDMA_WRITE);
    write.to(f.link.b.address(kAt), f.key);
    Send give(2, f.link.a.sge(0, size), IBV_WR_SEND_WITH_INV);
    give.wr.invalidate_rkey = f.key;
    Send late = write;
    late.wr.wr_id = 3;
    late.wr.sg_list = &late.sge;
    ASSERT_EQ(write.post(f.link.qa), 0);
    ASSERT_EQ(give.post(f.link.qa), 0);
    f.link.steps(2);
    ASSERT_EQ(f.link.at_b.size(), 1u);
    EXPECT_EQ(f.link.at_b[0].status, IBV_WC_SUCCESS);
    EXPECT_EQ(f.link.at_b[0].opcode, IBV_WC_RECV);
    EXPECT_EQ(f.link.at_b[0].wc_flags, static_cast<unsigned>(IBV_WC_WITH_INV));
    EXPECT_EQ(f.link.at_b[0].invalidated_rkey, f.key);
    EXPECT_EQ(f.link.at_b[0].byte_len, size);
    EXPECT_TRUE(holds(f.link.b.bytes(0, size), size));
    ASSERT_EQ(f.link.at_a.size(), 2u);
    EXPECT_EQ(f.link.at_a[0].status, IBV_WC_SUCCESS);
    EXPECT_EQ(f.link.at_a[1].status, IBV_WC_SUCCESS);
    EXPECT_EQ(f.link.at_a[1].opcode, IBV_WC_SEND);
    // Free: the owner may invalidate it again, and bind it again.
    ASSERT_EQ(Invalidate(f.key).post(f.link.qb), 0);
    f.expect_at_b(IBV_WC_LOCAL_INV, IBV_WC_SUCCESS, 71);
    f.bind();
    ASSERT_EQ(late.post(f.link.qa), 0);
    f.link.steps(2);
    ASSERT_EQ(f.link.at_a.size(), 3u);
    EXPECT_EQ(f.link.at_a[2].status, IBV_WC_REM_ACCESS_ERR);
  }
}

/// The peer changes the key that its message names all the time, from one window's to another's.
TEST(SoftverbsChangingWords, AKeyToInvalidateIsReadOnce) {
  Fixture first;
  Link& link = first.link;
  ibv_mw* const windows[2] = {first.mw, sv::alloc_mw(link.b.pd, IBV_MW_TYPE_2)};
  ASSERT_NE(windows[1], nullptr);
  const std::uint32_t keys[2] = {ibv_inc_rkey(windows[0]->rkey), ibv_inc_rkey(windows[1]->rkey)};
  const auto is_bound = [&](int i) { return static_cast<sv::Mw*>(windows[i])->qp != nullptr; };
  const auto bind_both = [&] {
    for (int i = 0; i < 2; ++i) {
      if (is_bound(i)) continue;
      must(Bind(link.b, windows[i], keys[i]).post(link.qb) == 0, "bind");
      first.expect_at_b(IBV_WC_BIND_MW, IBV_WC_SUCCESS, 70);
    }
  };
  const sv::OutLane& out = link.a.internals().peers[0]->out;
  std::atomic<sv::Line*> line = out.lines;
  std::atomic<bool> stop = false;
  std::thread hostile([&] {
    for (std::uint32_t i = 0; !stop; ++i)
      *const_cast<volatile std::uint32_t*>(&line.load()->imm) = keys[i % 2];
  });
  const std::uint32_t psn = link.a.endpoint(link.qa).psn;
  bool sound = true;
  std::uint32_t seen[2] = {};
  constexpr std::uint32_t kEnough = 5;
  for (std::uint32_t n = 0; sound && std::min(seen[0], seen[1]) < kEnough; ++n) {
    bind_both();
    must(link.b.post_recv(1, 0, 64) == 0, "post_recv");
    sv::Line& at = out.lines[n % sv::kLaneLines];
    at.imm = keys[0];
    at.length = 8;
    line = &at;
    at.word.store(sv::lane_mark(n) << 56 | sv::packet_kind(sv::Packet::send_inv, 0) << 48 |
                      std::uint64_t{sv::psn_add(psn, n)} << 24 | link.qb->qp_num,
                  std::memory_order_release);
    link.at_b.clear();
    link.poll_b();
    const std::uint32_t told = link.at_b.size() == 1 ? link.at_b[0].invalidated_rkey : 0;
    const int named = told == keys[1] ? 1 : 0;
    sound = told == keys[named] && !is_bound(named) && is_bound(1 - named);
    EXPECT_TRUE(sound) << "message " << n << " names key " << told;
    ++seen[named];
  }
  stop = true;
  hostile.join();
  must(sv::dealloc_mw(windows[1]) == 0, "dealloc_mw");
}

TEST(SoftverbsWindows, WhatTheyAreBoundToStays) {
  Fixture f;
  f.bind();
  EXPECT_EQ(sv::dereg_mr(f.link.b.mr), EBUSY);
  EXPECT_EQ(sv::destroy_qp(f.link.qb), EBUSY);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  EXPECT_EQ(sv::modify_qp(f.link.qb, &attr, IBV_QP_STATE), EBUSY);
  EXPECT_EQ(f.write(), IBV_WC_SUCCESS);  // the window is unchanged
  // A queue pair in ERR takes no work requests, so its windows are deallocated.
  f.link.b.fail(f.link.qb);
  EXPECT_EQ(sv::dealloc_mw(std::exchange(f.mw, nullptr)), 0);
  EXPECT_EQ(sv::modify_qp(f.link.qb, &attr, IBV_QP_STATE), 0);
  EXPECT_EQ(sv::dereg_mr(std::exchange(f.link.b.mr, nullptr)), 0);
}

TEST(SoftverbsWindows, DeallocatedWhileBound) {
  Fixture f;
  f.bind();
  EXPECT_EQ(f.write(), IBV_WC_SUCCESS);
  ASSERT_EQ(sv::dealloc_mw(std::exchange(f.mw, nullptr)), 0);
  EXPECT_EQ(f.write(), IBV_WC_REM_ACCESS_ERR);
  // The entry's next user accepts no key of the window.
  bool again = false;
  for (int i = 0; i < 3000 && !again; ++i) {
    ibv_mr* mr = sv::reg_mr(f.link.b.pd, f.link.b.memory.data(), 64, 0);
    ASSERT_NE(mr, nullptr);
    again = sv::region_index(mr->rkey) == sv::region_index(f.key);
    EXPECT_NE(mr->rkey >> 8, f.key >> 8);
    ASSERT_EQ(sv::dereg_mr(mr), 0);
  }
  EXPECT_TRUE(again);
}

TEST(SoftverbsWindows, InvalidationWaitsForThePeerAndBlocksNobody) {
  Fixture f;
  ibv_qp* qa = f.link.a.make_qp();
  ibv_qp* qb = f.link.b.make_qp();
  connect(f.link.a, qa, f.link.b, qb);
  f.bind();
  sv::begin_access(f.a_sees_b());
  ASSERT_EQ(Invalidate(f.key).post(f.link.qb), 0);
  ASSERT_EQ(Send(72, f.link.b.sge(0, 8)).post(f.link.qb), 0);  // behind it
  ASSERT_EQ(f.link.a.post_recv(1, 0, 64), 0);
  f.link.at_b.clear();
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_EQ(f.link.b.post_recv(i, 0, 64), 0);
    ASSERT_EQ(Send(i, f.link.a.sge(0, 8)).post(qa), 0);
    f.link.steps(1);
  }
  ASSERT_EQ(f.link.at_b.size(), 5u);
  for (const ibv_wc& wc : f.link.at_b) EXPECT_EQ(wc.opcode, IBV_WC_RECV);
  // The key is already closed, and the objects that it needs stay.
  EXPECT_EQ(
      sv::resolve(f.a_sees_b(), 0, f.link.b.address(kAt), 8, f.key, 0, f.link.qb->qp_num).kind,
      sv::RemoteBytes::Kind::refused);
  EXPECT_EQ(sv::dereg_mr(f.link.b.mr), EBUSY);
  EXPECT_EQ(sv::destroy_qp(f.link.qb), EBUSY);
  sv::end_access(f.a_sees_b());
  ASSERT_TRUE(until([&] { f.link.step(); }, [&] { return f.link.at_b.size() >= 7; }));
  EXPECT_EQ(f.link.at_b[5].opcode, IBV_WC_LOCAL_INV);
  EXPECT_EQ(f.link.at_b[5].status, IBV_WC_SUCCESS);
  EXPECT_EQ(f.link.at_b[6].wr_id, 72u);
  EXPECT_EQ(f.link.at_b[6].status, IBV_WC_SUCCESS);
}

TEST(SoftverbsWindows, InvalidationThatIsFlushedLeavesADyingWindow) {
  Fixture f;
  f.bind();
  sv::begin_access(f.a_sees_b());
  ASSERT_EQ(Invalidate(f.key).post(f.link.qb), 0);
  f.link.b.fail(f.link.qb);
  f.expect_at_b(IBV_WC_LOCAL_INV, IBV_WC_WR_FLUSH_ERR, 71);
  EXPECT_EQ(sv::dealloc_mw(f.mw), EBUSY);
  EXPECT_EQ(sv::destroy_qp(f.link.qb), EBUSY);
  sv::end_access(f.a_sees_b());
  sv::begin_access(f.a_sees_b());  // another access, begun later
  EXPECT_EQ(sv::dealloc_mw(std::exchange(f.mw, nullptr)), 0);
  sv::end_access(f.a_sees_b());
}

TEST(SoftverbsWindows, PeersThatWereNeverSeenAreWaitedFor) {
  // b has not checked its lanes since a connected.
  Node a, b;
  ibv_qp* qa = a.make_qp();
  ibv_qp* qb = b.make_qp();
  ASSERT_EQ(a.init(qa) + b.init(qb), 0);
  ASSERT_EQ(b.rtr(qb, a.endpoint(qa)) + b.rts(qb), 0);
  ASSERT_EQ(a.rtr(qa, b.endpoint(qb)) + a.rts(qa), 0);
  ASSERT_EQ(b.internals().peers.front()->in, nullptr);
  ibv_mw* mw = sv::alloc_mw(b.pd, IBV_MW_TYPE_2);
  ASSERT_EQ(Bind(b, mw, mw->rkey).post(qb), 0);
  sv::Peer& peer = *a.internals().peers.front();
  sv::begin_access(peer);
  ASSERT_EQ(sv::dealloc_mw(mw), EBUSY);
  sv::end_access(peer);
  EXPECT_EQ(sv::dealloc_mw(mw), 0);
}

TEST(SoftverbsWindows, APeerThatIsGoneHasLeft) {
  // A process dies during an access, which the owner's control step detects.
  Child child([](int socket) {
    Node node;
    ibv_qp* qp = node.make_qp();
    (void)meet(node, qp, socket);
    sv::begin_access(*node.internals().peers.front());
    put(socket, 'b');
    (void)get<char>(socket);
  });
  Node owner;
  ibv_qp* qp = owner.make_qp();
  meet(owner, qp, child.socket());
  ASSERT_EQ(get<char>(child.socket()), 'b');
  ibv_mw* mw = sv::alloc_mw(owner.pd, IBV_MW_TYPE_2);
  ASSERT_EQ(Bind(owner, mw, mw->rkey).post(qp), 0);
  ASSERT_EQ(Invalidate(mw->rkey).post(qp), 0);
  ibv_wc wc{};
  ASSERT_TRUE(owner.poll(wc));
  EXPECT_EQ(wc.opcode, IBV_WC_BIND_MW);
  for (int i = 0; i < 1000; ++i) ASSERT_FALSE(owner.poll(wc));
  child.kill_and_reap();
  bool got = false;
  ASSERT_TRUE(until(
      [&] {
        sv::control_device(owner.context);
        got = got || owner.poll(wc);
      },
      [&] { return got; }));
  EXPECT_EQ(wc.opcode, IBV_WC_LOCAL_INV);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(sv::dealloc_mw(mw), 0);
}

TEST(SoftverbsWindows, NothingIsWrittenAfterTheInvalidation) {
  // Another process writes without pause. Once the invalidation completes, the memory is ours.
  constexpr std::uint32_t kSize = 256 * 1024;
  Child child([](int socket) {
    Node node;
    ibv_qp* qp = node.make_qp();
    const Card owner = meet(node, qp, socket);
    const auto key = get<std::uint32_t>(socket);
    std::fill_n(node.memory.begin(), kSize, std::byte{0xff});
    ibv_wc wc{};
    for (bool told = false;; told = true) {
      must(Send(1, node.sge(0, kSize), IBV_WR_RDMA_WRITE).to(owner.memory, key).post(qp) == 0,
           "write");
      must(node.poll(wc), "poll");
      if (wc.status != IBV_WC_SUCCESS) break;
      if (!told) put(socket, 'w');
    }
    must(wc.status == IBV_WC_REM_ACCESS_ERR, "status");
    put(socket, 'e');
    (void)get<char>(socket);
  });
  Node owner;
  ibv_qp* qp = owner.make_qp();
  meet(owner, qp, child.socket());
  ibv_mw* mw = sv::alloc_mw(owner.pd, IBV_MW_TYPE_2);
  Bind bind(owner, mw, mw->rkey);
  bind.wr.bind_mw.bind_info.addr = owner.address(0);
  bind.wr.bind_mw.bind_info.length = kSize;
  ASSERT_EQ(bind.post(qp), 0);
  ibv_wc wc{};
  ASSERT_TRUE(owner.poll(wc));
  put(child.socket(), mw->rkey);
  ASSERT_EQ(get<char>(child.socket()), 'w');
  ASSERT_EQ(Invalidate(mw->rkey).post(qp), 0);
  bool got = false;
  ASSERT_TRUE(until([&] { got = got || owner.poll(wc); }, [&] { return got; }));
  ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
  std::fill_n(owner.memory.begin(), kSize, std::byte{0});
  EXPECT_EQ(get<char>(child.socket()), 'e');
  EXPECT_TRUE(all_are(owner.bytes(0, kSize), 0));
  put(child.socket(), 'q');
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(sv::dealloc_mw(mw), 0);
}

}  // namespace softverbs_test::window
