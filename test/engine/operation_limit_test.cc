// The longest operation is the device's: up to it operations move data, beyond it they are refused.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <optional>
#include <span>

#include "engine/harness.h"

namespace operation_limit_test {
namespace {

using namespace engine_test;  // the names of a test namespace

/// Pages that nobody has touched, which cost nothing.
class Pages {
 public:
  explicit Pages(std::size_t size)
      : size_(size),
        at_(::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    EXPECT_NE(at_, MAP_FAILED);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { ::munmap(at_, size_); }
  [[nodiscard]] std::span<std::byte> bytes() const { return {static_cast<std::byte*>(at_), size_}; }

 private:
  std::size_t size_;
  void* at_;
};

TEST(EngineOperationLimit, IsTheDevices) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "registers more than 2 GiB";
  Pair p;
  const std::size_t most = p.client.engine.device().max_operation_bytes;
  EXPECT_EQ(most, std::size_t{1} << 31);
  const Pages pages(most + 1);
  auto ours = p.client.engine.register_memory(pages.bytes(), Access::local);
  ASSERT_TRUE(ours) << ours.error().message();
  Connection c = p.ends.client;
  const RemoteRegion nowhere{4096, most + 1, 0x7777, Access::remote_all};
  EXPECT_EQ(c.read(ours->slice(), nowhere), Status::out_of_bounds);
  EXPECT_EQ(c.write(ours->slice(), nowhere), Status::out_of_bounds);
  EXPECT_EQ(c.write_with_imm(ours->slice(), nowhere, 1), Status::out_of_bounds);
  // One byte less is accepted: the peer's device refuses its key.
  std::optional<Status> ended;
  ASSERT_EQ(c.write(ours->slice(0, most), nowhere, [&](const Completion& d) { ended = d.status; }),
            Status::ok);
  ASSERT_TRUE(p.until([&] { return ended.has_value() && p.server.closed.size() == 1; }));
  EXPECT_EQ(*ended, Status::remote_access);
  ours = MemoryRegion();
}

/// Beyond 1 GiB, a length no longer fits 30 bits.
TEST(SlowEngineOperationLimit, MoreThanAGigabyteIsWrittenAndRead) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "registers more than 1 GiB";
  Pair p;
  const std::size_t size = (std::size_t{1} << 30) + 4096;
  const Pages from(size);
  const Pages to(size);
  from.bytes()[0] = from.bytes()[size - 1] = std::byte{0x5a};
  auto ours = p.client.engine.register_memory(from.bytes(), Access::local);
  auto theirs = p.server.engine.register_memory(to.bytes(), Access::remote_read_write);
  ASSERT_TRUE(ours && theirs);
  const auto done = [&](auto&& call) {
    ASSERT_EQ(p.client.tally.run(call), Status::ok);
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
  };
  done([&](CompletionCallback d) {
    return p.ends.client.write(ours->slice(), theirs->remote(), d);
  });
  EXPECT_EQ(to.bytes()[0], std::byte{0x5a});
  EXPECT_EQ(to.bytes()[size - 1], std::byte{0x5a});
  to.bytes()[size - 1] = std::byte{0x5b};
  done(
      [&](CompletionCallback d) { return p.ends.client.read(ours->slice(), theirs->remote(), d); });
  EXPECT_EQ(from.bytes()[size - 1], std::byte{0x5b});
  EXPECT_EQ(p.client.tally.ended(Status::ok), 2u);
  *ours = MemoryRegion();
  *theirs = MemoryRegion();
  p.finish();
}

}  // namespace
}  // namespace operation_limit_test
