// Leases on a device that cannot deregister memory yet, because a peer is accessing it.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/lease_ends.h"
#include "verbs/providers.h"

namespace lease_device_test {
namespace {

using namespace leases;  // NOLINT: a test's helpers
using spinwire::detail::EngineCore;
using spinwire::verbs::Provider;

/// An engine that leases memory by registrations. On request its device refuses to register, or to
/// end one of them. Only the test moves the time.
struct Lender {
  static inline int refusal;         ///< why the device refuses to register; 0: it does not
  static inline ibv_mr* busy;        ///< the first region to be deregistered while `stuck`
  static inline std::uint32_t vain;  ///< failed attempts to do so
  static inline bool stuck;

  Lender() : provider(spinwire::verbs::softverbs_provider()) {
    busy = nullptr;
    vain = 0;
    stuck = false;
    refusal = 0;
    provider.reg_mr = [](ibv_pd* pd, void* at, std::size_t size, int access) -> ibv_mr* {
      if (refusal == 0) return spinwire::verbs::softverbs_provider().reg_mr(pd, at, size, access);
      errno = refusal;
      return nullptr;
    };
    provider.dereg_mr = [](ibv_mr* mr) {
      if (stuck && busy == nullptr) busy = mr;
      if (!stuck || mr != busy) return spinwire::verbs::softverbs_provider().dereg_mr(mr);
      ++vain;
      return EBUSY;
    };
    engine = std::make_unique<EngineCore>(lease_config(By::registration), Clock::manual(&ticks),
                                          std::move(*spinwire::base::OwnerGuard::create()));
    const Provider* const all[] = {&provider};
    const auto opened = engine->open({.providers = all});
    EXPECT_TRUE(opened) << opened.error().message();
  }
  Connection begin(Node& to) {
    ConnectOptions options;
    options.handlers.on_returned = [this](Connection, const Returned& r) {
      returned.push_back(r.lease);
    };
    return engine->connect(to.listener.address(), options).value();
  }
  [[nodiscard]] std::uint64_t steps() const { return engine->context.stats.control_steps; }
  template <typename Done>
  bool until(Node& peer, Done&& done) {
    return engine_test::until({&peer}, [&] {
      (void)engine->poll();
      (void)engine->poll_control();
      return done();
    });
  }

  std::uint64_t ticks = 1'000'000;
  Provider provider;
  std::vector<LeaseId> returned;
  std::unique_ptr<EngineCore> engine;
};

TEST(EngineLeasesDevice, WhatIsInUseStopsNothingElse) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Lender lender;
  Node holder(lease_config(By::registration));
  holder.listen();
  Connection made = lender.begin(holder);
  ASSERT_TRUE(lender.until(holder, [&] { return made.ready() && holder.ready.size() == 1; }));
  std::vector<RemoteMemory> held;
  const auto grant_lease = [&](std::size_t count) {
    for (std::size_t i = held.size(); i < count; ++i)
      ASSERT_EQ(holder.ready[0].request_memory(
                    1000, {}, [&](LeaseReply& r) { held.push_back(std::move(r.memory)); }),
                Status::ok);
    ASSERT_TRUE(lender.until(holder, [&] { return held.size() == count; }));
  };
  grant_lease(2);

  lender.stuck = true;
  held[0].release();
  ASSERT_TRUE(lender.until(holder, [&] { return lender.vain != 0; }));
  EXPECT_EQ(lender.returned.size(), 0u);
  // The time does not move, so no control step is due, and none is taken just to retry.
  const std::uint64_t before = lender.steps();
  for (int i = 0; i < 1000; ++i) (void)lender.engine->poll();
  EXPECT_LE(lender.steps(), before + 4);
  // Each control step retries at most once.
  const std::uint32_t tried = lender.vain;
  for (int i = 0; i < 400; ++i) (void)lender.engine->poll_control();
  EXPECT_GE(lender.vain, tried + 100);
  EXPECT_LE(lender.vain, tried + 400);
  // The other lease ends, and new ones come and go, although that one is first in the queue.
  for (std::size_t i = 1; i < 20; ++i) {
    held[i].release();
    ASSERT_TRUE(lender.until(holder, [&] { return lender.returned.size() == i; })) << i;
    grant_lease(i + 2);
  }
  // So does this one when its time comes.
  lender.stuck = false;
  ASSERT_TRUE(lender.until(holder, [&] { return lender.returned.size() == 20; }));

  // A busy lease whose connection ends delays neither the close nor other leases.
  lender.stuck = true;
  lender.busy = nullptr;
  held.back().release();
  ASSERT_TRUE(lender.until(holder, [&] { return lender.busy != nullptr; }));
  EXPECT_EQ(made.close(), Status::ok);
  ASSERT_TRUE(lender.until(holder, [&] { return holder.closed.size() == 1; }));
  Connection next = lender.begin(holder);
  ASSERT_TRUE(lender.until(holder, [&] { return next.ready(); }));
  lender.stuck = false;
  ASSERT_TRUE(lender.until(holder, [&] { return made.state() == ConnectionState::closed; }));
  held.clear();
  EXPECT_EQ(next.close(), Status::ok);
  ASSERT_TRUE(lender.until(holder, [&] { return next.state() == ConnectionState::closed; }));
}

TEST(EngineLeasesDevice, ExposingToOnePeerTellsWhyTheDeviceRefuses) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Lender lender;
  Node peer(lease_config(By::registration));
  peer.listen();
  Connection made = lender.begin(peer);
  ASSERT_TRUE(lender.until(peer, [&] { return made.ready(); }));
  const Buffer b = spinwire::detail::make<Buffer>(
      lender.engine->context.arena->allocate(spinwire::memory::PoolId::lease, 64), 64);
  ASSERT_TRUE(b);
  const auto expose = [&] {
    return made.expose(b.slice(), Access::remote_read, spinwire::KeyScope::connection);
  };
  const std::pair<int, Status> answers[] = {{EFAULT, Status::invalid_argument},
                                            {ENOMEM, Status::no_memory},
                                            {ENOSPC, Status::limit},
                                            {EIO, Status::system}};
  for (const auto& [error, status] : answers) {
    Lender::refusal = error;
    const auto refused = expose();
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().status, status) << refused.error().message();
    EXPECT_NE(refused.error().found.find("reg_mr"), std::string::npos);
    EXPECT_EQ(made.snapshot().leased_out, 0u);
  }
  Lender::refusal = 0;
  EXPECT_TRUE(expose());
  EXPECT_EQ(made.close(), Status::ok);
  ASSERT_TRUE(lender.until(peer, [&] { return made.state() == ConnectionState::closed; }));
}

}  // namespace
}  // namespace lease_device_test
