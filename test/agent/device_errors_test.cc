// Errors of connections after the device reported a failed completion.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <string>
#include <utility>

#include "agent/agent.h"
#include "base/internals.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace device_errors_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::agent::Agent;
using spinwire::detail::EngineCore;

constexpr std::uint64_t kMillisecond = 1'000'000;

/// An engine whose device gives the next completion, of a send or receive, the status that a test
/// sets.
struct Faulty {
  Faulty() : core(small_config(), Clock::real(), std::move(*spinwire::base::OwnerGuard::create())) {
    const auto opened = core.open();
    EXPECT_TRUE(opened) << opened.error().message();
    self = this;
    ibv_context_ops& ops = core.context.device->context()->ops;
    plain = std::exchange(ops.poll_cq, [](ibv_cq* cq, int entries, ibv_wc* wcs) {
      const int count = self->plain(cq, entries, wcs);
      if (count > 0) self->spoil(wcs, wcs + count);
      return count;
    });
  }
  Faulty(const Faulty&) = delete;
  Faulty& operator=(const Faulty&) = delete;
  ~Faulty() {
    core.context.device->context()->ops.poll_cq = plain;
    core.end();
  }
  void spoil(ibv_wc* begin, const ibv_wc* end) {
    for (ibv_wc* wc = begin; wc != end && status != IBV_WC_SUCCESS; ++wc) {
      if (spinwire::agent::is_receive(wc->wr_id) == receives)
        wc->status = std::exchange(status, IBV_WC_SUCCESS);
    }
  }
  void fail_next(ibv_wc_status with, bool of_receives) {
    status = with;
    receives = of_receives;
  }

  EngineCore core;
  int (*plain)(ibv_cq*, int, ibv_wc*) = nullptr;
  ibv_wc_status status = IBV_WC_SUCCESS;
  bool receives = false;
  static inline Faulty* self = nullptr;
};

/// A connection of a faulty engine, and how it ended.
struct Ended {
  Status operation = Status::ok;  ///< a SEND to the peer
  Error cause;
};
Ended end_by(Faulty& faulty, Node& peer, ibv_wc_status status, bool of_receives) {
  Ended ended;
  bool sent = false, closed = false;
  ConnectOptions options;
  options.handlers.on_closed = [&](Connection, const Error& e) {
    ended.cause = e;
    closed = true;
  };
  Connection c = faulty.core.connect(peer.listener.address(), options).value();
  const std::size_t before = peer.ready.size();
  const auto both = [&](auto&& done) {
    return until({&peer}, [&] {
      (void)faulty.core.poll();
      return done();
    });
  };
  EXPECT_TRUE(both([&] { return c.ready() && peer.ready.size() > before; }));
  faulty.fail_next(status, of_receives);
  const std::byte data{7};
  if (of_receives) {
    EXPECT_EQ(peer.ready.back().send_copy({&data, 1}), Status::ok);
  } else {
    const auto done = [&](const Completion& what) {
      ended.operation = what.status;
      sent = true;
    };
    EXPECT_EQ(c.send_copy({&data, 1}, done), Status::ok);
  }
  EXPECT_TRUE(both([&] { return closed && (sent || of_receives); }));
  return ended;
}

TEST(EngineDeviceErrors, TellWhoseFaultASendWas) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a device that errs on purpose";
  const struct {
    ibv_wc_status status;
    Status operation, connection;
    const char* cause;
  } cases[] = {
      {IBV_WC_LOC_LEN_ERR, Status::local_error, Status::local_error, "max_msg_sz"},
      {IBV_WC_LOC_QP_OP_ERR, Status::local_error, Status::local_error, "could not execute"},
      {IBV_WC_LOC_EEC_OP_ERR, Status::local_error, Status::local_error, "could not execute"},
      {IBV_WC_LOC_PROT_ERR, Status::local_error, Status::local_error, "deregistered"},
      {IBV_WC_LOC_ACCESS_ERR, Status::local_error, Status::local_error, "lacks a right"},
      {IBV_WC_WR_FLUSH_ERR, Status::flushed, Status::local_error, "failed earlier"},
      {IBV_WC_MW_BIND_ERR, Status::local_error, Status::local_error, "bind a window"},
      {IBV_WC_FATAL_ERR, Status::local_error, Status::local_error, "open another engine"},
      {IBV_WC_GENERAL_ERR, Status::local_error, Status::local_error, "completion's status"},
      {IBV_WC_BAD_RESP_ERR, Status::local_error, Status::local_error, "completion's status"},
      {IBV_WC_REM_INV_REQ_ERR, Status::remote_error, Status::remote_error, "peer's device"},
      {IBV_WC_REM_OP_ERR, Status::remote_error, Status::remote_error, "peer's device"},
      {IBV_WC_REM_ABORT_ERR, Status::remote_error, Status::remote_error, "completion's status"},
      {IBV_WC_REM_ACCESS_ERR, Status::remote_access, Status::remote_access, "revoked"},
      {IBV_WC_RETRY_EXC_ERR, Status::peer_lost, Status::peer_lost, "gone"},
      {IBV_WC_RNR_RETRY_EXC_ERR, Status::peer_lost, Status::peer_lost, "no receive"},
      {IBV_WC_RESP_TIMEOUT_ERR, Status::peer_lost, Status::peer_lost, "completion's status"},
  };
  Node peer;
  peer.stale_allowed = true;
  peer.listen();
  Faulty faulty;
  for (const auto& k : cases) {
    const Ended ended = end_by(faulty, peer, k.status, false);
    const std::string name = ibv_wc_status_str(k.status);
    EXPECT_EQ(ended.operation, k.operation) << name;
    EXPECT_EQ(ended.cause.status, k.connection) << ended.cause.message();
    EXPECT_NE(ended.cause.remedy.find(k.cause), std::string::npos) << ended.cause.message();
    EXPECT_NE(ended.cause.found.find(name), std::string::npos) << ended.cause.message();
    EXPECT_EQ(ended.cause.asked.rfind("a SEND on queue pair", 0), 0u) << ended.cause.message();
  }
}

/// The system frees the memory of a killed process before its queue pairs, which answer meanwhile.
TEST(EngineDeviceErrors, ARefusedWriteOfCreditMeansThatThePeerIsLost) {
  std::uint64_t ticks = kMillisecond;
  Config config = small_config();
  config.connections.keepalive_interval = 100ms;
  config.connections.peer_timeout = 60s;
  Pair p(config, &ticks);
  p.client.stale_allowed = p.server.stale_allowed = true;
  spinwire::agent::EngineContext& ctx = spinwire::detail::core_of(p.server.engine)->context;
  Agent& dying = *ctx.agents.begin();
  const std::uint32_t key = std::exchange(dying.own_cell.region, {}).rkey;
  ASSERT_EQ(ctx.registrations->revoke(key, spinwire::memory::RegistrationTable::kLibrary),
            Status::ok);
  ASSERT_TRUE(p.until([&] {
    ticks += kMillisecond / 10;
    return !p.client.closed.empty();
  }));
  const Error& why = p.client.closed[0];
  EXPECT_EQ(why.status, Status::peer_lost) << why.message();
  EXPECT_EQ(why.asked.rfind("the WRITE of a credit", 0), 0u) << why.message();
  EXPECT_EQ(p.client.engine.stats().peers_lost, 1u);
  (void)p.ends.server.close();
  ASSERT_TRUE(p.until([&] {
    ticks += kMillisecond / 10;
    return p.server.engine.stats().connections == 0;
  }));
  p.finish();
}

TEST(EngineDeviceErrors, TellWhoseFaultAReceiveWas) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "a device that errs on purpose";
  const struct {
    ibv_wc_status status;
    Status connection;
    const char* cause;
  } cases[] = {
      {IBV_WC_LOC_LEN_ERR, Status::protocol, "more than the limit"},
      {IBV_WC_LOC_QP_OP_ERR, Status::protocol, "more than the limit"},  // as reported by Soft-RoCE
      {IBV_WC_LOC_PROT_ERR, Status::local_error, "local memory"},
      {IBV_WC_LOC_ACCESS_ERR, Status::local_error, "local memory"},
      {IBV_WC_FATAL_ERR, Status::local_error, "the device has failed"},
  };
  Node peer;
  peer.stale_allowed = true;
  peer.listen();
  Faulty faulty;
  for (const auto& k : cases) {
    const Ended ended = end_by(faulty, peer, k.status, true);
    EXPECT_EQ(ended.cause.status, k.connection) << ended.cause.message();
    EXPECT_NE(ended.cause.remedy.find(k.cause), std::string::npos) << ended.cause.message();
    EXPECT_NE(ended.cause.found.find(ibv_wc_status_str(k.status)), std::string::npos)
        << ended.cause.message();
  }
}

}  // namespace
}  // namespace device_errors_test
