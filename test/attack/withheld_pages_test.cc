// A peer sends a message that lies in its private memory. It may have mapped a file of a file
// system in user space there, which never supplies the page: a poll that reads it waits for ever.
// The victim must refuse the message instead.
#include <gtest/gtest.h>

#include <vector>

#include "softverbs/peer_process.h"
#include "trust_pages.h"

namespace withheld_pages_test {
namespace {

using namespace softverbs_test;  // NOLINT: a test's helpers

constexpr std::uint32_t kMessage = 2048;  // it goes by reference

/// What became of the victim's queue pair, and whether it has reached for the peer's memory.
struct Outcome {
  ibv_qp_state state;
  bool reached;
};

/// Receives one message with a device as an engine opens it.
void receive_one(int socket) {
  const TrustPages by_default("");
  NodeOptions options;
  options.page_trust.reset();
  Node node(options);
  ibv_qp* const qp = node.make_qp();
  must(node.post_recv(1, 0, kMessage) == 0, "post_recv");
  (void)meet(node, qp, socket);
  ibv_wc wc{};
  bool got = false;
  must(until([&] { got = node.poll(wc); }, [&] { return got || state_of(qp) == IBV_QPS_ERR; }),
       "an end");
  put(socket, Outcome{state_of(qp), static_cast<bool>(node.internals().peers[0]->process->memory)});
  must(until([&] { (void)node.poll(wc); }, [&] { return hung_up(socket); }), "the end");
}

TEST(AttackByPages, AMessageInPrivateMemoryIsNotRead) {
  if (!children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  Child victim(receive_one);
  Node attacker;
  ibv_qp* const qp = attacker.make_qp();
  (void)meet(attacker, qp, victim.socket());
  std::vector<std::byte> message(kMessage);
  ibv_mr* const mr = sv::reg_mr(attacker.pd, message.data(), kMessage, 0);
  ASSERT_NE(mr, nullptr);
  const ibv_sge there{reinterpret_cast<std::uint64_t>(message.data()), kMessage, mr->lkey};
  ASSERT_EQ(Send(1, there).post(qp), 0);
  const auto outcome = get<Outcome>(victim.socket());
  EXPECT_EQ(outcome.state, IBV_QPS_ERR);
  EXPECT_FALSE(outcome.reached);
  ibv_wc wc{};
  bool got = false;
  EXPECT_TRUE(until([&] { got = attacker.poll(wc); }, [&] { return got; }));
  EXPECT_EQ(wc.status, IBV_WC_REM_OP_ERR);
  EXPECT_EQ(victim.wait(), 0);
  EXPECT_EQ(sv::dereg_mr(mr), 0);
}

}  // namespace
}  // namespace withheld_pages_test
