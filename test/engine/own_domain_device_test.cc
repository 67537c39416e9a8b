// Connections' own protection domains as the device sees them: counted, refused, busy.
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine_core.h"
#include "engine/harness.h"
#include "engine/own_domain_config.h"
#include "verbs/providers.h"

namespace own_domain_device_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using own_domains::domain_config;
using own_domains::own;
using spinwire::detail::EngineCore;
using spinwire::verbs::Provider;

/// Counts the embedded device's domains and registrations, and can run out of either.
struct Counted {
  static inline std::uint32_t domains, regions, domains_left, regions_left;

  Counted() : provider(spinwire::verbs::softverbs_provider()) {
    domains = regions = 0;
    domains_left = regions_left = 1000;
    provider.alloc_pd = [](ibv_context* context) -> ibv_pd* {
      if (domains_left == 0) {
        errno = ENOMEM;
        return nullptr;
      }
      ibv_pd* pd = spinwire::verbs::softverbs_provider().alloc_pd(context);
      domains += pd != nullptr ? 1 : 0;
      return pd;
    };
    provider.dealloc_pd = [](ibv_pd* pd) {
      const int error = spinwire::verbs::softverbs_provider().dealloc_pd(pd);
      domains -= error == 0 ? 1 : 0;
      return error;
    };
    provider.reg_mr = [](ibv_pd* pd, void* at, std::size_t n, int access) -> ibv_mr* {
      if (regions_left == 0) {
        errno = ENOMEM;
        return nullptr;
      }
      ibv_mr* mr = spinwire::verbs::softverbs_provider().reg_mr(pd, at, n, access);
      regions += mr != nullptr ? 1 : 0;
      return mr;
    };
    provider.reg_mr_for_qp = nullptr;
    provider.dereg_mr = [](ibv_mr* mr) {
      const int error = spinwire::verbs::softverbs_provider().dereg_mr(mr);
      regions -= error == 0 ? 1 : 0;
      return error;
    };
    engine = std::make_unique<EngineCore>(domain_config(), Clock::real(),
                                          std::move(*spinwire::base::OwnerGuard::create()));
    const Provider* const all[] = {&provider};
    const auto opened = engine->open({.providers = all});
    EXPECT_TRUE(opened) << opened.error().message();
  }

  Connection begin(Node& to, bool own_domain) {
    ConnectOptions options;
    options.settings = own(own_domain);
    options.handlers.on_closed = [this](Connection, const Error& e) { closed.push_back(e); };
    return engine->connect(to.listener.address(), options).value();
  }
  template <typename Done>
  bool until(Node& peer, Done&& done) {
    return engine_test::until({&peer}, [&] {
      (void)engine->poll();
      return done();
    });
  }

  Provider provider;
  std::vector<Error> closed;
  std::unique_ptr<EngineCore> engine;
};

TEST(EngineOwnDomainDevice, TheDeviceHasNothingLeftOfIt) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Counted c;
  Node peer;
  peer.listen();
  const std::uint32_t domains = c.domains, regions = c.regions;
  for (std::size_t round = 1; round <= 3; ++round) {
    Connection made = c.begin(peer, true);
    ASSERT_TRUE(c.until(peer, [&] { return made.ready(); }));
    EXPECT_EQ(c.domains, domains + 1);
    EXPECT_EQ(c.regions, regions + 2);  // the pools and the credit cell
    EXPECT_EQ(made.close(), Status::ok);
    ASSERT_TRUE(c.until(peer, [&] { return c.closed.size() == round; }));
    EXPECT_EQ(c.domains, domains);
    EXPECT_EQ(c.regions, regions);
  }
  c.engine.reset();
  EXPECT_EQ(c.domains, 0u);
  EXPECT_EQ(c.regions, 0u);
}

TEST(EngineOwnDomainDevice, ADeviceThatIsOutOfThemRefusesOnlyThat) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Counted c;
  Node peer;
  peer.listen();
  const std::uint32_t domains = c.domains, regions = c.regions;
  Connection sharing = c.begin(peer, false);
  Connection owning = c.begin(peer, true);
  ASSERT_TRUE(c.until(peer, [&] { return sharing.ready() && owning.ready(); }));
  c.domains_left = 0;
  (void)c.begin(peer, true);
  ASSERT_TRUE(c.until(peer, [&] { return c.closed.size() == 1; }));
  EXPECT_EQ(c.closed[0].status, Status::limit);
  for (const char* part :
       {"own_domain", "ibv_alloc_pd", "connections of this engine have 1", "softverbs has 65536"})
    EXPECT_NE(c.closed[0].message().find(part), std::string::npos) << c.closed[0].message();
  EXPECT_FALSE(c.closed[0].remedy.empty());
  // The domain can be made, but not the pools' registration in it; then that, but not the cell's.
  c.domains_left = 1000;
  for (const std::uint32_t left : {0u, 1u}) {
    const std::size_t before = c.closed.size();
    auto* const reg_mr = c.provider.reg_mr;
    if (left == 0) {
      c.regions_left = 0;
    } else {
      c.provider.reg_mr = [](ibv_pd* pd, void* at, std::size_t n, int access) -> ibv_mr* {
        errno = ENOMEM;
        if (n == sizeof(spinwire::agent::CreditCell)) return nullptr;
        ibv_mr* mr = spinwire::verbs::softverbs_provider().reg_mr(pd, at, n, access);
        ++Counted::regions;
        return mr;
      };
    }
    (void)c.begin(peer, true);
    ASSERT_TRUE(c.until(peer, [&] { return c.closed.size() > before; }));
    EXPECT_EQ(c.closed.back().status, Status::no_memory) << c.closed.back().message();
    EXPECT_EQ(c.domains, domains + 1);
    EXPECT_EQ(c.regions, regions + 3);
    c.regions_left = 1000;
    c.provider.reg_mr = reg_mr;
  }
  EXPECT_TRUE(sharing.ready() && owning.ready());
  Connection next = c.begin(peer, true);
  ASSERT_TRUE(c.until(peer, [&] { return next.ready(); }));
}

TEST(EngineOwnDomainDevice, OneThatIsBusyIsEndedLater) {
  if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  Counted c;
  Node peer;
  peer.listen();
  const std::uint32_t domains = c.domains, regions = c.regions;
  Connection made = c.begin(peer, true);
  ASSERT_TRUE(c.until(peer, [&] { return made.ready(); }));
  auto* const dereg_mr = c.provider.dereg_mr;
  c.provider.dereg_mr = [](ibv_mr*) { return EBUSY; };
  EXPECT_EQ(made.close(), Status::ok);
  ASSERT_TRUE(c.until(peer, [&] { return c.closed.size() == 1; }));
  EXPECT_EQ(c.domains, domains + 1);
  EXPECT_EQ(c.engine->context.device->domains(), 1u);
  c.provider.dereg_mr = dereg_mr;
  ASSERT_TRUE(c.until(peer, [&] { return c.domains == domains; }));
  EXPECT_EQ(c.regions, regions);
  EXPECT_EQ(c.engine->context.device->domains(), 0u);
}

TEST(EngineOwnDomainDevice, ReceivesAndCompletionsAreCountedInTheSettings) {
  Config c = domain_config(4);
  c.queues.shared_receive_queue = SharedReceiveQueue::automatic;
  c.leases.maximum = 0;
  c.queues.completion_depth = c.queues.operations + c.queues.receive_depth +
                              4 * c.connections.maximum + 4 * 32;  // 16 credits and a list of 16
  EXPECT_TRUE(c.check());
  --c.queues.completion_depth;
  const auto full = c.check();
  ASSERT_FALSE(full);
  EXPECT_NE(full.error().found.find("connections.own_domains = 4 with 32 receives each"),
            std::string::npos)
      << full.error().message();
  c = domain_config(64);
  c.queues.shared_receive_queue = SharedReceiveQueue::automatic;
  c.queues.completion_depth = 8192;
  const auto dry = c.check();
  ASSERT_FALSE(dry);
  EXPECT_NE(dry.error().asked.find("memory.receive_bytes"), std::string::npos);
  EXPECT_NE(dry.error().found.find("connections.own_domains = 64"), std::string::npos);
  c.queues.shared_receive_queue = SharedReceiveQueue::off;  // then no queue is shared
  EXPECT_TRUE(c.check());
}

}  // namespace
}  // namespace own_domain_device_test
