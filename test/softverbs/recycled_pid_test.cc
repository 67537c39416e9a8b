// A process that has got the pid of a peer that has ended: nothing is written into it, whether the
// peer's address space was opened before or not.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/sched.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "softverbs/peer_process.h"

namespace softverbs_test {
namespace {

/// Private memory of each process, at the same address in all of them.
alignas(64) std::array<std::byte, 4096> target;

/// What the peer tells of its target.
struct Target {
  std::uint64_t address;
  std::uint32_t key;
};

/// A peer that does nothing but keep its memory open.
void stay(int socket) {
  Node node;
  (void)meet(node, node.make_qp(), socket);
  ibv_mr* const mr = sv::reg_mr(node.pd, target.data(), target.size(), Node::kAllAccess);
  must(mr != nullptr, "reg_mr");
  put(socket, Target{reinterpret_cast<std::uint64_t>(target.data()), mr->rkey});
  for (;;) (void)pause();
}

/// A child with the pid asked for, which waits until the other end of the pipe is closed and ends
/// with 0 if its target is still zero; -1 and errno if there can be none.
pid_t successor(pid_t pid, const int (&ends)[2]) {
  clone_args args{};
  args.exit_signal = SIGCHLD;
  args.set_tid = reinterpret_cast<std::uint64_t>(&pid);
  args.set_tid_size = 1;
  const auto child = static_cast<pid_t>(::syscall(SYS_clone3, &args, sizeof args));
  if (child != 0) return child;
  ::close(ends[1]);
  char byte = 0;
  (void)!::read(ends[0], &byte, 1);
  ::_exit(all_are(target, 0) ? 0 : 1);
}

class SoftverbsRecycledPid : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(OpenedBefore, SoftverbsRecycledPid, testing::Bool());

TEST_P(SoftverbsRecycledPid, IsNotReached) {
  if (!children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  const bool opened_before = GetParam();
  Child peer(stay);
  const pid_t pid = peer.pid();
  Node node;
  ibv_qp* const qp = node.make_qp();
  (void)meet(node, qp, peer.socket());
  const Target there = get<Target>(peer.socket());
  fill(node.bytes(0, 64), 1);
  const auto write = [&] {
    Send send(1, node.sge(0, 64), IBV_WR_RDMA_WRITE);
    send.to(there.address, there.key);
    must(send.post(qp) == 0, "post");
    ibv_wc wc{};
    bool ended = false;
    // The attempt is made in ibv_post_send(). Upkeep, which notices the death, comes afterwards.
    must(until(
             [&] {
               ended = node.poll(wc);
               if (!ended) sv::control_device(node.context);
             },
             [&] { return ended; }),
         "poll");
    return wc.status;
  };
  if (opened_before) {
    ASSERT_EQ(write(), IBV_WC_SUCCESS);
    ASSERT_TRUE(node.internals().peers[0]->process->memory);
  }
  peer.kill_and_reap();

  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const spinwire::base::UniqueFd read_end(ends[0]);
  spinwire::base::UniqueFd write_end(ends[1]);
  const pid_t next = successor(pid, ends);
  if (next < 0 && (errno == EPERM || errno == ENOSYS))
    GTEST_SKIP() << "clone3(set_tid): " << std::strerror(errno) << "; needs root";
  ASSERT_EQ(next, pid) << std::strerror(errno);
  EXPECT_EQ(write(), IBV_WC_RETRY_EXC_ERR);
  write_end.reset();
  int status = -1;
  ASSERT_EQ(::waitpid(next, &status, 0), next);
  EXPECT_EQ(status, 0) << "the successor was written to";
}

}  // namespace
}  // namespace softverbs_test
