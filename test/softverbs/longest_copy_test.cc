// Operations of 2 GiB, the longest, where the kernel copies: one system call moves less.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <span>

#include "base/unique_fd.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::longest_copy {
namespace {

constexpr std::size_t kLongest = sv::kMaxMessage;
constexpr std::size_t kPart = 16u << 20;

/// Addresses of the longest operation. The same few pages lie there again and again, except for a
/// last page of their own.
class LongRange {
 public:
  LongRange() : pages_(::memfd_create("long-range", MFD_CLOEXEC)) {
    must(pages_ && ::ftruncate(pages_.get(), kPart + kPage) == 0, "memfd");
    base_ = static_cast<std::byte*>(
        ::mmap(nullptr, kLongest, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    must(base_ != MAP_FAILED, "mmap");
    for (std::size_t at = 0; at < kLongest; at += kPart) map(at, kPart, 0);
    map(kLongest - kPage, kPage, kPart);
  }
  LongRange(const LongRange&) = delete;
  LongRange& operator=(const LongRange&) = delete;
  ~LongRange() { (void)::munmap(base_, kLongest); }

  [[nodiscard]] std::byte* data() const { return base_; }
  /// The last bytes, which no other part of the range shows.
  [[nodiscard]] std::span<std::byte> end() const { return {base_ + kLongest - kPage, kPage}; }

 private:
  static constexpr std::size_t kPage = 4096;
  void map(std::size_t at, std::size_t size, std::size_t from) const {
    must(::mmap(base_ + at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages_.get(),
                static_cast<off_t>(from)) != MAP_FAILED,
         "mmap");
  }
  spinwire::base::UniqueFd pages_;
  std::byte* base_ = nullptr;
};

/// A range that a node has registered, as memory that only the kernel reaches.
struct Registered {
  explicit Registered(Node& node)
      : mr(sv::reg_mr(node.pd, range.data(), kLongest, Node::kAllAccess)) {
    must(mr != nullptr, "reg_mr");
  }
  ~Registered() { (void)sv::dereg_mr(mr); }
  [[nodiscard]] ibv_sge sge() const {
    return {reinterpret_cast<std::uintptr_t>(range.data()), static_cast<std::uint32_t>(kLongest),
            mr->lkey};
  }
  LongRange range;
  ibv_mr* mr;
};

TEST(SlowSoftverbsLongestCopy, OfPrivateMemoryIsWhole) {
  if (!children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  Child child([](int socket) {
    Node theirs;
    const Registered memory(theirs);
    fill(memory.range.end(), 5);
    ibv_qp* const qp = theirs.make_qp();
    (void)meet(theirs, qp, socket);
    put(socket, Card{{}, reinterpret_cast<std::uintptr_t>(memory.range.data()), memory.mr->rkey});
    (void)get<char>(socket);
    put(socket, holds(memory.range.end(), 6));
    (void)get<char>(socket);
  });
  Node node;
  const Registered memory(node);
  ibv_qp* const qp = node.make_qp();
  (void)meet(node, qp, child.socket());
  const Card theirs = get<Card>(child.socket());
  const auto run = [&](ibv_wr_opcode what) {
    Send send(1, memory.sge(), what);
    send.to(theirs.memory, theirs.key);
    must(send.post(qp) == 0, "post");
    ibv_wc wc{};
    bool got = false;
    must(until([&] { got = node.poll(wc); }, [&] { return got; }), "a completion");
    return wc.status;
  };
  EXPECT_EQ(run(IBV_WR_RDMA_READ), IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(memory.range.end(), 5));
  fill(memory.range.end(), 6);
  EXPECT_EQ(run(IBV_WR_RDMA_WRITE), IBV_WC_SUCCESS);
  put(child.socket(), 'w');
  EXPECT_TRUE(get<bool>(child.socket()));
}

TEST(SlowSoftverbsLongestCopy, OfGuardedPagesIsWhole) {
  Link link;
  const LongRange here;
  const LongRange there;
  const sv::RemoteBytes remote{sv::RemoteBytes::Kind::guarded, true, there.data(), 0};
  const ibv_sge sge{reinterpret_cast<std::uintptr_t>(here.data()),
                    static_cast<std::uint32_t>(kLongest), 0};
  sv::Peer& peer = *link.a.internals().peers[0];
  fill(here.end(), 7);
  ASSERT_TRUE(sv::copy_remote(peer, remote, &sge, 1, kLongest, sv::Copy::to_peer));
  EXPECT_TRUE(holds(there.end(), 7));
  fill(there.end(), 8);
  ASSERT_TRUE(sv::copy_remote(peer, remote, &sge, 1, kLongest, sv::Copy::from_peer));
  EXPECT_TRUE(holds(here.end(), 8));
}

}  // namespace
}  // namespace softverbs_test::longest_copy
