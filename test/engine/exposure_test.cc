#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "trust_pages.h"

namespace exposure_test {
namespace {

using namespace engine_test;  // the names of a test namespace

TEST(EngineExposure, HeapMemoryWithinOneProcess) {
  Pair p;
  std::vector<std::byte> theirs(100000, std::byte{0x44});
  std::vector<std::byte> ours(100000);
  auto there = p.server.engine.register_memory(theirs, Access::remote_read_write);
  auto here = p.client.engine.register_memory(ours, Access::local);
  ASSERT_TRUE(there && here);
  EXPECT_FALSE(here->remote());
  EXPECT_EQ(there->remote().length, theirs.size());
  const auto done = [&](auto&& call) {
    ASSERT_EQ(p.client.tally.run(call), Status::ok);
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  };
  done([&](CompletionCallback d) { return p.ends.client.read(here->slice(), there->remote(), d); });
  EXPECT_EQ(ours, theirs);
  ours[5000] = std::byte{1};
  done([&](CompletionCallback d) {
    return p.ends.client.write(here->slice(5000, 1), there->remote().slice(7000, 1), d);
  });
  EXPECT_EQ(theirs[7000], std::byte{1});
  EXPECT_EQ(theirs[7001], std::byte{0x44});
  // A message also sends from it.
  bool good = false;
  p.server.on_message = [&](Connection, Message& m) {
    good = std::memcmp(m.data(), ours.data() + 4000, 3000) == 0 && m.size() == 3000;
  };
  done([&](CompletionCallback d) { return p.ends.client.send(here->slice(4000, 3000), d); });
  ASSERT_TRUE(p.until([&] { return p.server.messages == 1; }));
  EXPECT_TRUE(good);
  EXPECT_EQ(p.client.tally.ended(Status::ok), 3u);
  // An operation holds the dropped buffer's memory until it ends.
  ASSERT_EQ(p.client.tally.run([&](CompletionCallback d) {
    return p.ends.client.write(here->slice(), there->remote(), d, Post::defer);
  }),
            Status::ok);
  *here = MemoryRegion();
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  EXPECT_EQ(p.client.tally.ended(Status::ok), 4u);
  EXPECT_EQ(theirs, ours);
  *there = MemoryRegion();
  p.finish();
}

TEST(EngineMemoryFlags, EachIsTakenIfTheDeviceHasItAndElseRefused) {
  Pair p;
  const spinwire::MemoryFlags has = p.server.engine.device().memory_flags;
  alignas(4096) static std::byte theirs[4096];
  const auto mine = p.server.engine.register_memory(theirs, Access::local);
  ASSERT_TRUE(mine);
  for (const auto flag : {spinwire::MemoryFlags::on_demand, spinwire::MemoryFlags::relaxed_ordering,
                          spinwire::MemoryFlags::zero_based, spinwire::MemoryFlags::huge_pages}) {
    const auto region = p.server.engine.expose(mine->slice(), Access::remote_write, flag);
    const auto there = p.ends.server.expose(mine->slice(), Access::remote_write, flag);
    const bool taken = contains(has, flag) || flag == spinwire::MemoryFlags::relaxed_ordering;
    EXPECT_EQ(region.has_value(), taken) << static_cast<int>(flag);
    EXPECT_EQ(there.has_value(), taken) << static_cast<int>(flag);
    const bool own = taken && flag != spinwire::MemoryFlags::zero_based;
    EXPECT_EQ(p.server.engine.register_memory(theirs, Access::local, flag).has_value(), own);
    EXPECT_EQ(Connection(p.ends.server).register_memory(theirs, Access::local, flag).has_value(),
              own);
    if (!taken) {
      EXPECT_EQ(region.error().status, Status::unsupported) << region.error().message();
      EXPECT_EQ(there.error().status, Status::unsupported);
      continue;
    }
    const Buffer data = p.client.filled(64, static_cast<std::uint32_t>(flag));
    ASSERT_EQ(p.client.tally.run([&](CompletionCallback d) {
      return p.ends.client.write(data, region->slice(64, 64), d);
    }),
              Status::ok);
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    EXPECT_EQ(std::memcmp(theirs + 64, data.data(), 64), 0) << static_cast<int>(flag);
    EXPECT_EQ(p.server.engine.revoke(*region), Status::ok);
    EXPECT_EQ(Connection(p.ends.server).revoke(*there), Status::ok);
  }
  p.finish();
}

TEST(EngineExposure, DroppedRegionCanNoLongerBeReached) {
  Pair p(watchful_config());
  std::vector<std::byte> theirs(4096, std::byte{0x44});
  auto there = p.server.engine.register_memory(theirs, Access::remote_read_write);
  const RemoteRegion remote = there->remote();
  *there = MemoryRegion();
  Buffer b = p.client.filled(64, 1);
  ASSERT_EQ(p.client.tally.run(
                [&](CompletionCallback d) { return p.ends.client.write(b.slice(), remote, d); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.tally.ended(Status::remote_access), 1u);
  EXPECT_EQ(theirs[0], std::byte{0x44});
  b.reset();
  p.server.stale_allowed = p.client.stale_allowed = true;
  p.finish();
}

TEST(EngineExposure, MemoryThatMayNotBeWrittenIsNotRegistered) {
  constexpr std::size_t kPage = 4096;
  Node node(small_config());
  void* const at = ::mmap(nullptr, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(at, MAP_FAILED);
  const std::span<std::byte> bytes(static_cast<std::byte*>(at), kPage);
  const auto refused = [&] {
    const auto region = node.engine.register_memory(bytes, Access::remote_read_write);
    if (region || region.error().status != Status::invalid_argument) return false;
    return region.error().remedy.starts_with("give bytes that are mapped for reading and writing");
  };
  EXPECT_TRUE(refused());
  EXPECT_EQ(::munmap(at, kPage), 0);
  EXPECT_TRUE(refused()) << "not mapped";
  node.expect_clean();
}

TEST(EngineExposure, RevokedMeansUnreachable) {
  Pair p(watchful_config());
  Ends other = connect(p.client, p.server);
  Buffer memory = p.server.buffer(1024, Pool::lease);
  std::memset(memory.data(), 0x55, 1024);
  const auto first = p.server.engine.expose(memory.slice(0, 512), Access::remote_read_write);
  const auto second = p.server.engine.expose(memory.slice(512, 512), Access::remote_read);
  ASSERT_TRUE(first && second);
  EXPECT_NE(first->rkey, second->rkey);
  Buffer b = p.client.filled(512, 3);
  ASSERT_EQ(p.client.tally.run(
                [&](CompletionCallback d) { return p.ends.client.write(b.slice(), *first, d); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  ASSERT_EQ(p.server.engine.revoke(*first), Status::ok);
  EXPECT_EQ(p.server.engine.revoke(*first), Status::invalid_argument);
  std::memset(memory.data(), 0x66, 512);
  ASSERT_EQ(p.client.tally.run(
                [&](CompletionCallback d) { return p.ends.client.write(b.slice(), *first, d); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.closed.size() == 1; }));
  EXPECT_EQ(p.client.tally.ended(Status::remote_access), 1u);
  EXPECT_EQ(p.client.closed[0].status, Status::remote_access) << p.client.closed[0].message();
  EXPECT_EQ(memory.data()[0], std::byte{0x66});
  // The other exposure, on the other connection, is unchanged.
  ASSERT_EQ(p.client.tally.run(
                [&](CompletionCallback d) { return other.client.read(b.slice(), *second, d); }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  EXPECT_EQ(p.client.tally.ended(Status::ok), 2u);
  EXPECT_EQ(b.data()[0], std::byte{0x55});
  EXPECT_EQ(p.server.engine.revoke(*second), Status::ok);
  memory.reset();
  b.reset();
  p.server.stale_allowed = p.client.stale_allowed = true;
  p.finish();
}

TEST(EngineExposure, HoldsItsBlock) {
  Node node;
  Buffer memory = node.buffer(1000, Pool::lease);
  const auto region = node.engine.expose(memory.slice(), Access::remote_read);
  memory.reset();
  EXPECT_EQ(node.engine.memory_stats(Pool::lease).blocks_used, 1u);
  EXPECT_EQ(node.engine.revoke(*region), Status::ok);
  node.expect_clean();
}

/// A process that exposes its own memory, revokes it on request, and reports its contents.
int exposing_server(int in, int out, bool heap) {
  Node node;
  std::vector<std::byte> own(65536, std::byte{0x21});
  MemoryRegion region;
  Buffer buffer;
  RemoteRegion remote;
  if (heap) {
    region = node.engine.register_memory(own, Access::remote_read_write).value();
    remote = region.remote();
  } else {
    buffer = node.buffer(65536, Pool::lease);
    std::memset(buffer.data(), 0x21, 65536);
    remote = node.engine.expose(buffer.slice(), Access::remote_read_write).value();
  }
  node.listen();
  write_line(out, node.listener.address());
  write_line(out, std::to_string(remote.address) + " " + std::to_string(remote.rkey));
  for (unsigned i = 0;; ++i) {
    (void)node.poll();
    if (i % 256 != 0) continue;
    const char what = command(in);
    if (what == 'q') return 0;
    if (what == 'r') {
      if (heap) {
        region = MemoryRegion();
      } else if (node.engine.revoke(remote) != Status::ok) {
        return 3;
      }
      write_line(out, "revoked");
    }
    if (what == 's') {
      const std::byte* data = heap ? own.data() : buffer.data();
      write_line(out, std::to_string(std::to_integer<int>(data[0])) + " " +
                          std::to_string(std::to_integer<int>(data[65535])));
    }
  }
}

/// What the server has exposed, from its second line.
RemoteRegion exposed_by(Child& child) {
  RemoteRegion remote;
  unsigned long long where = 0;
  EXPECT_EQ(std::sscanf(child.line().c_str(), "%llu %u", &where, &remote.rkey), 2);
  remote.address = where;
  remote.length = 65536;
  remote.access = Access::remote_read_write;
  return remote;
}

class EngineExposureAcross : public testing::TestWithParam<bool> {};

TEST(EngineExposureAcrossProcesses, AReadOfHeapMemorySaysWhatItNeeds) {
  if (!device_name().starts_with("softverbs"))
    GTEST_SKIP() << kSoftverbsOnly
                 << "adapters, and preloaded programs, read all registered memory";
  const TrustPages trust("");
  Child child([](int in, int out) { return exposing_server(in, out, true); });
  const std::string address = child.line();
  const RemoteRegion remote = exposed_by(child);
  Node client;
  Connection c = client.begin(address);
  ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
  Buffer b = client.buffer(64);
  ASSERT_EQ(client.tally.run([&](CompletionCallback d) { return c.read(b.slice(), remote, d); }),
            Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.tally.ended(Status::ok), 0u);
  const std::string why = client.closed[0].message();
  EXPECT_NE(why.find("SOFTVERBS_TRUST_PAGES=1"), std::string::npos) << why;
}

TEST_P(EngineExposureAcross, Processes) {
  const bool heap = GetParam();
  const TrustPages trust(heap ? "1" : "");
  Child child([&](int in, int out) { return exposing_server(in, out, heap); });
  const std::string address = child.line();
  const RemoteRegion remote = exposed_by(child);
  Node client;
  Connection c = client.begin(address);
  ASSERT_TRUE(until({&client}, [&] { return c.ready(); }));
  Buffer b = client.buffer(65536);
  const auto done = [&](auto&& call) {
    ASSERT_EQ(client.tally.run(call), Status::ok);
    ASSERT_TRUE(until({&client}, [&] { return client.tally.idle(); }));
  };
  done([&](CompletionCallback d) { return c.read(b.slice(), remote, d); });
  ASSERT_EQ(client.tally.ended(Status::ok), 1u) << client.closed.size();
  EXPECT_EQ(b.data()[0], std::byte{0x21});
  EXPECT_EQ(b.data()[65535], std::byte{0x21});
  std::memset(b.data(), 0x42, 65536);
  done([&](CompletionCallback d) { return c.write(b.slice(0, 65535), remote, d); });
  child.tell('s');
  EXPECT_EQ(child.line(), "66 33");
  child.tell('r');
  EXPECT_EQ(child.line(), "revoked");
  done([&](CompletionCallback d) { return c.write(b.slice(), remote, d); });
  EXPECT_EQ(client.tally.ended(Status::remote_access), 1u);
  child.tell('s');
  EXPECT_EQ(child.line(), "66 33");
  ASSERT_TRUE(until({&client}, [&] { return client.closed.size() == 1; }));
  // The process still serves others.
  Connection again = client.begin(address);
  ASSERT_TRUE(until({&client}, [&] { return again.ready(); }));
  EXPECT_EQ(again.close(), Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return client.engine.stats().connections == 0; }));
  b.reset();
  client.stale_allowed = true;
  for (int i = 0; i < 8; ++i) (void)client.poll();
  client.expect_clean();
  child.tell('q');
  EXPECT_EQ(child.wait(), 0);
}
INSTANTIATE_TEST_SUITE_P(Memory, EngineExposureAcross, testing::Bool(),
                         [](const auto& each) { return each.param ? "Heap" : "Pool"; });

}  // namespace
}  // namespace exposure_test
