// A device that runs out of an object, or a process that may not lock more memory: only the call
// that needs it fails, with a reason.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine_core.h"
#include "engine/harness.h"
#include "engine/own_domain_config.h"
#include "own_process.h"
#include "verbs/providers.h"

namespace exhausted_device_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::detail::EngineCore;
using spinwire::verbs::Provider;
using spinwire::verbs::softverbs_provider;

enum Kind : std::size_t { domains, regions, windows, queues, shared_queues, pairs, kKinds };

/// The embedded device with a limited number of objects of each kind.
struct LimitedDevice {
  static constexpr std::uint32_t kPlenty = 1u << 30;
  static inline std::array<std::uint32_t, kKinds> left, live;

  template <Kind kind, auto member>
  struct Make;
  template <Kind kind, typename Object, typename... Arguments,
            Object* (*Provider::*member)(Arguments...)>
  struct Make<kind, member> {
    static Object* call(Arguments... arguments) {
      if (left[kind] == 0) {
        errno = ENOMEM;
        return nullptr;
      }
      Object* made = (softverbs_provider().*member)(arguments...);
      left[kind] -= made != nullptr ? 1 : 0;
      live[kind] += made != nullptr ? 1 : 0;
      return made;
    }
  };
  template <Kind kind, auto member>
  struct End;
  template <Kind kind, typename Object, int (*Provider::*member)(Object*)>
  struct End<kind, member> {
    static int call(Object* object) {
      const int error = (softverbs_provider().*member)(object);
      left[kind] += error == 0 ? 1 : 0;
      live[kind] -= error == 0 ? 1 : 0;
      return error;
    }
  };

  LimitedDevice() : provider(softverbs_provider()) {
    left.fill(kPlenty);
    live.fill(0);
    provider.alloc_pd = Make<domains, &Provider::alloc_pd>::call;
    provider.dealloc_pd = End<domains, &Provider::dealloc_pd>::call;
    provider.reg_mr = Make<regions, &Provider::reg_mr>::call;
    provider.reg_mr_for_qp = Make<regions, &Provider::reg_mr_for_qp>::call;
    provider.dereg_mr = End<regions, &Provider::dereg_mr>::call;
    provider.alloc_mw = Make<windows, &Provider::alloc_mw>::call;
    provider.dealloc_mw = End<windows, &Provider::dealloc_mw>::call;
    provider.create_cq = Make<queues, &Provider::create_cq>::call;
    provider.destroy_cq = End<queues, &Provider::destroy_cq>::call;
    provider.create_srq = Make<shared_queues, &Provider::create_srq>::call;
    provider.destroy_srq = End<shared_queues, &Provider::destroy_srq>::call;
    provider.create_qp = Make<pairs, &Provider::create_qp>::call;
    provider.destroy_qp = End<pairs, &Provider::destroy_qp>::call;
  }
  spinwire::Result<void> open() {
    Config config = small_config();
    config.memory.windows = 4;
    config.memory.rendezvous_bytes = 4u << 20;
    config.connections.max_message_bytes = 100'000;
    engine = std::make_unique<EngineCore>(config, Clock::real(),
                                          std::move(*spinwire::base::OwnerGuard::create()));
    const Provider* const all[] = {&provider};
    return engine->open({.providers = all});
  }
  template <typename Done>
  bool until(Node& peer, Done&& done) {
    return engine_test::until({&peer}, [&] {
      (void)engine->poll();
      return done();
    });
  }

  Provider provider;
  std::unique_ptr<EngineCore> engine;
};

class EngineExhaustedDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "a provider of its own";
  }
};

TEST_F(EngineExhaustedDevice, WhateverIsMissingAtOpenNothingIsLeftBehind) {
  LimitedDevice s;
  std::uint32_t refused = 0;
  ASSERT_TRUE(s.open());
  const auto used = LimitedDevice::live;
  s.engine.reset();
  EXPECT_EQ(LimitedDevice::live, (std::array<std::uint32_t, kKinds>{}));
  const std::size_t descriptors = open_descriptors();
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    for (std::uint32_t have = 0; have <= used[kind]; ++have) {
      SCOPED_TRACE(testing::Message() << "kind " << kind << ", of which there are " << have);
      LimitedDevice::left.fill(LimitedDevice::kPlenty);
      LimitedDevice::left[kind] = have;
      const auto opened = s.open();
      // An engine works without optional objects, such as windows.
      if (!opened) {
        ++refused;
        EXPECT_TRUE(opened.error().status == Status::no_memory ||
                    opened.error().status == Status::limit ||
                    opened.error().status == Status::system)
            << opened.error().message();
        EXPECT_FALSE(opened.error().message().empty());
      }
      s.engine.reset();
      EXPECT_EQ(LimitedDevice::live, (std::array<std::uint32_t, kKinds>{}));
      EXPECT_EQ(open_descriptors(), descriptors);
    }
  }
  EXPECT_GE(refused, 5u);
  LimitedDevice::left.fill(LimitedDevice::kPlenty);
  EXPECT_TRUE(s.open());
}

TEST_F(EngineExhaustedDevice, AConnectWithoutAQueuePairFailsAlone) {
  std::vector<Error> closed;  // outlives the engine, whose destructor closes connections
  LimitedDevice s;
  ASSERT_TRUE(s.open());
  Node peer;
  peer.listen();
  ConnectOptions options;
  options.handlers.on_closed = [&](Connection, const Error& e) { closed.push_back(e); };
  Connection first = s.engine->connect(peer.listener.address(), options).value();
  ASSERT_TRUE(s.until(peer, [&] { return first.ready(); }));
  const std::uint32_t live = LimitedDevice::live[pairs];
  LimitedDevice::left[pairs] = 0;
  for (std::size_t i = 1; i <= 3; ++i) {
    const auto made = s.engine->connect(peer.listener.address(), options);
    ASSERT_TRUE(made) << made.error().message();
    ASSERT_TRUE(s.until(peer, [&] { return closed.size() == i; }));
    EXPECT_EQ(closed.back().status, Status::no_memory) << closed.back().message();
    EXPECT_NE(closed.back().message().find("ibv_create_qp"), std::string::npos)
        << closed.back().message();
    EXPECT_EQ(LimitedDevice::live[pairs], live);
  }
  EXPECT_TRUE(first.ready());
  LimitedDevice::left[pairs] = 1;
  Connection next = s.engine->connect(peer.listener.address(), options).value();
  ASSERT_TRUE(s.until(peer, [&] { return next.ready(); }));
}

TEST_F(EngineExhaustedDevice, AnAcceptWithoutAQueuePairIsToldToTheClient) {
  LimitedDevice s;
  ASSERT_TRUE(s.open());
  const auto listener = s.engine->listen("127.0.0.1:0", {});
  ASSERT_TRUE(listener) << listener.error().message();
  Node client;
  const Connection first = client.begin(listener->address());
  ASSERT_TRUE(s.until(client, [&] { return first.ready(); }));
  LimitedDevice::left[pairs] = 0;
  (void)client.begin(listener->address());
  ASSERT_TRUE(s.until(client, [&] { return client.closed.size() == 1; }));
  EXPECT_NE(client.closed[0].status, Status::ok) << client.closed[0].message();
  EXPECT_NE(client.closed[0].status, Status::timed_out) << "it learns only by waiting";
  EXPECT_TRUE(first.ready());
  LimitedDevice::left[pairs] = 1;
  const Connection next = client.begin(listener->address());
  ASSERT_TRUE(s.until(client, [&] { return next.ready(); }));
}

/// From here on limits of locked memory hold for this process, even if it is root's. Call it before
/// a device is opened: the kernel takes no work requests from a process whose credentials have
/// changed since (ib_safe_file_access()).
bool obey_memory_limit() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2]{};
  if (syscall(SYS_capget, &header, data) != 0) return false;
  data[0].effective &= ~(1u << CAP_IPC_LOCK);
  data[0].permitted &= ~(1u << CAP_IPC_LOCK);
  return syscall(SYS_capset, &header, data) == 0;
}
bool limit_locked_memory(std::uint64_t bytes) {
  const rlimit limit{bytes, bytes};
  return setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
}

TEST(EngineLockedMemory, AnEngineThatPinsTooMuchDoesNotOpen) {
  if (on_softverbs()) GTEST_SKIP() << "the embedded device pins nothing";
  Child child([](int, int out) {
    if (!obey_memory_limit() || !limit_locked_memory(1u << 20)) return 1;
    const auto opened = Engine::open(small_config());
    if (opened) return 2;
    write_line(out, opened.error().status == Status::no_memory ? opened.error().message() : "?");
    return 0;
  });
  const std::string line = child.line();
  EXPECT_EQ(child.wait(), 0);
  EXPECT_NE(line.find("1MiB soft"), std::string::npos) << line;
  EXPECT_NE(line.find("ulimit -l"), std::string::npos) << line;
}

TEST(EngineLockedMemory, AConnectThatPinsTooMuchFailsAlone) {
  if (on_softverbs()) GTEST_SKIP() << "the embedded device pins nothing";
  Child child([](int, int out) {
    const Config config = own_domains::domain_config();
    if (!obey_memory_limit()) return 2;
    Pair p(config);
    // Queue pairs and small registrations still fit, the pools a second time do not.
    const std::uint64_t pinned = own_process::number_in("/proc/self/status", "VmPin").value_or(0)
                                 << 10;
    if (pinned < config.memory.send_bytes) return 3;
    if (!limit_locked_memory(pinned + (4u << 20))) return 1;
    ConnectOptions options;
    options.handlers = p.client.handlers();
    options.settings = own_domains::own();
    if (!p.client.engine.connect(p.server.listener.address(), options)) return 4;
    if (!p.until([&] { return p.client.closed.size() == 1; })) return 5;
    write_line(out,
               p.client.closed[0].status == Status::no_memory ? p.client.closed[0].message() : "?");
    if (!p.ends.client.ready()) return 6;
    if (p.ends.client.send(p.client.filled(100, 1)) != Status::ok) return 7;
    if (!p.until([&] { return p.server.messages == 1; })) return 8;
    (void)connect(p.client, p.server);  // one that shares the engine's registration
    p.client.closed.clear();
    p.finish();
    return 0;
  });
  const std::string line = child.line();
  EXPECT_EQ(child.wait(), 0) << line;
  EXPECT_NE(line.find("own_domain"), std::string::npos) << line;
  EXPECT_NE(line.find("ulimit -l"), std::string::npos) << line;
}

// The embedded device itself has no queue pair left.
TEST(SlowEngineDeviceLimits, AConnectWithoutAQueuePairFailsAlone) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "others have more, and share them";
  Pair p;
  const auto& device = *spinwire::detail::core_of(p.client.engine)->context.device;
  std::vector<ibv_qp*> all;
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = device.cq();
  init.qp_type = IBV_QPT_RC;
  init.cap = {1, 1, 1, 1, 0};
  while (ibv_qp* const qp = softverbs_provider().create_qp(device.pd(), &init)) all.push_back(qp);
  EXPECT_GT(all.size(), 60'000u);
  (void)p.client.begin(p.server.listener.address());
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  const std::string why = p.client.closed[0].message();
  EXPECT_EQ(p.client.closed[0].status, Status::no_memory) << why;
  EXPECT_NE(why.find("ibv_create_qp"), std::string::npos) << why;
  EXPECT_NE(why.find("device's own limits"), std::string::npos) << why;
  EXPECT_TRUE(p.ends.client.ready());
  p.client.closed.clear();
  for (ibv_qp* const qp : all) EXPECT_EQ(softverbs_provider().destroy_qp(qp), 0);
  const Connection next = p.client.begin(p.server.listener.address());
  EXPECT_TRUE(p.until([&] { return next.ready(); }));
}

TEST(EngineDeviceLimits, ARegistrationBeyondThoseOfTheEngineIsRefusedByName) {
  auto opened = spinwire::detail::open_engine(small_config(), spinwire::Clock::real(),
                                              {.sparse = true, .registrations = 500});
  ASSERT_TRUE(opened) << opened.error().message();
  std::array<std::byte, 64> bytes{};
  std::vector<spinwire::MemoryRegion> all;
  for (;;) {
    auto one = opened->register_memory(bytes, Access::local);
    if (!one) {
      EXPECT_EQ(one.error().status, Status::limit) << one.error().message();
      EXPECT_NE(one.error().message().find(std::to_string(all.size())), std::string::npos)
          << one.error().message();
      break;
    }
    all.push_back(std::move(*one));
    ASSERT_LE(all.size(), 1000u);
  }
  all.pop_back();
  EXPECT_TRUE(opened->register_memory(bytes, Access::local));
}

// Each number of descriptors that is too low for an engine and a listener, up to the first that is
// enough.
TEST(EngineDescriptors, WhateverIsMissingIsNamedAndNothingIsLeftBehind) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "libibverbs logs and remembers";
  Child child([](int, int out) {
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return 1;
    const std::size_t before = open_descriptors();
    bool is_enough = false;
    for (rlim_t more = 0; more < 32 && !is_enough; ++more) {
      files.rlim_cur = 0;
      for (rlim_t free = 0; free < more; ++files.rlim_cur)
        free += ::fcntl(static_cast<int>(files.rlim_cur), F_GETFD) < 0 ? 1 : 0;
      if (setrlimit(RLIMIT_NOFILE, &files) != 0) return 2;
      auto opened = Engine::open(small_config());
      const auto listening = opened ? opened->listen("127.0.0.1:0", {})
                                    : spinwire::Result<Listener>(tl::unexpected(opened.error()));
      is_enough = listening.has_value();
      if (!is_enough) write_line(out, listening.error().message());
      if (opened) opened = tl::unexpected(Error{});
      files.rlim_cur = files.rlim_max;
      if (setrlimit(RLIMIT_NOFILE, &files) != 0) return 3;
      if (!is_enough && open_descriptors() != before) return 4;
    }
    write_line(out, "enough");
    return is_enough ? 0 : 5;
  });
  std::size_t refused = 0;
  std::string line;
  while (!(line = child.line()).empty() && line != "enough") {
    ++refused;
    EXPECT_NE(line.find("ulimit -n"), std::string::npos) << line;
  }
  EXPECT_EQ(child.wait(), 0);
  EXPECT_GE(refused, 3u);
}

}  // namespace
}  // namespace exhausted_device_test
