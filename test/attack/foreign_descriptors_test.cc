// An attacker opens a session or a connection and names, as its device, a descriptor that is no
// device. The victim must not die, block, or acquire a terminal.
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "attack/victim.h"
#include "softverbs/lane/segment.h"

namespace attack_test {
namespace {

namespace sv = spinwire::softverbs;

class AttackByDescriptor : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "GIDs of adapters name no descriptors";
  }

  /// Names the descriptor in both dialogues; the victim must answer each.
  static void name_descriptor(const Victim& victim, int fd) {
    const ibv_gid gid = gid_of_descriptor(fd);
    const Stream session(victim.address());
    session.send(wire::encode(wire::OpenSession{session_end(gid)}));
    const Stream connection(victim.address());
    connection.send(wire::encode(wire::Hello{endpoint(gid)}));
    EXPECT_TRUE(session.answered());
    EXPECT_TRUE(connection.answered());
  }

  /// Checks that the victim still serves: a connection and a call succeed.
  static void expect_service(const Victim& victim) {
    Node client(rpc_test::rpc_config());
    const Connection c = client.begin(victim.address());
    EXPECT_TRUE(until({&client}, [&] { return c.ready(); }));
    auto session = client.engine.open_session(victim.address(), {});
    ASSERT_TRUE(session) << session.error().message();
    EXPECT_TRUE(until({&client}, [&] { return session->ready(); }));
    Status ended = Status::system;
    const auto word = std::byte{7};
    EXPECT_EQ(
        session->call(kEcho, {&word, 1}, [&](const spinwire::Reply& r) { ended = r.status(); }),
        Status::ok);
    EXPECT_TRUE(until({&client}, [&] { return ended == Status::ok; }));
  }
};

/// Makes the file a segment of this process that passes each check, and maps it. Null if it cannot.
sv::Segment* write_segment(int fd) {
  if (ftruncate(fd, sizeof(sv::Segment)) != 0) return nullptr;
  void* at = mmap(nullptr, sizeof(sv::Segment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  auto* const segment = static_cast<sv::Segment*>(at);
  segment->magic = sv::kSegmentMagic;
  segment->version = sv::kSegmentVersion;
  segment->pid = static_cast<std::uint32_t>(getpid());
  segment->gid = gid_of_descriptor(fd);
  return segment;
}

TEST_F(AttackByDescriptor, ASegmentThatIsTruncatedAfterItsCheck) {
  Victim victim(rpc_test::rpc_config());
  // A correct segment, but its owner can truncate it.
  const UniqueFd fd(memfd_create("attack", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  sv::Segment* const segment = write_segment(fd.get());
  ASSERT_NE(segment, nullptr);
  name_descriptor(victim, fd.get());
  EXPECT_EQ(munmap(segment, sizeof(sv::Segment)), 0);
  ASSERT_EQ(ftruncate(fd.get(), 0), 0);
  expect_service(victim);
  (void)victim.stop();
}

// It passes each check of the file, but cannot be mapped for writing any more.
TEST_F(AttackByDescriptor, ASegmentThatOnlyItsOwnerCanWrite) {
  Victim victim(rpc_test::rpc_config());
  const UniqueFd fd(memfd_create("attack", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  sv::Segment* const segment = write_segment(fd.get());
  ASSERT_NE(segment, nullptr);
  constexpr int kSealFutureWrite = 0x10;  // F_SEAL_FUTURE_WRITE, which old headers lack
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | kSealFutureWrite) != 0)
    GTEST_SKIP() << "this kernel has no such seal";
  name_descriptor(victim, fd.get());
  expect_service(victim);
  EXPECT_EQ(segment->lanes_used.load(), 0u) << "the victim has written to it";
  EXPECT_EQ(munmap(segment, sizeof(sv::Segment)), 0);
  (void)victim.stop();
}

TEST_F(AttackByDescriptor, AFileUnderALease) {
  struct sigaction ignore {};
  struct sigaction before {};
  ignore.sa_handler = SIG_IGN;
  ASSERT_EQ(sigaction(SIGIO, &ignore, &before), 0);
  std::string name = "/tmp/attack-XXXXXX";
  const UniqueFd fd(mkostemp(name.data(), O_CLOEXEC));
  ASSERT_TRUE(fd);
  EXPECT_EQ(unlink(name.c_str()), 0);
  if (fcntl(fd.get(), F_SETLEASE, F_WRLCK) != 0) GTEST_SKIP() << "no file leases here";
  Victim victim(rpc_test::rpc_config());
  name_descriptor(victim, fd.get());
  EXPECT_EQ(fcntl(fd.get(), F_GETLEASE), F_WRLCK) << "the victim opened the file";
  expect_service(victim);
  (void)victim.stop();
  EXPECT_EQ(sigaction(SIGIO, &before, nullptr), 0);
}

TEST_F(AttackByDescriptor, ATerminal) {
  Victim victim(rpc_test::rpc_config());
  const UniqueFd controller(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(controller);
  ASSERT_EQ(grantpt(controller.get()), 0);
  ASSERT_EQ(unlockpt(controller.get()), 0);
  char name[128];
  ASSERT_EQ(ptsname_r(controller.get(), name, sizeof name), 0);
  {
    const UniqueFd terminal(open(name, O_RDWR | O_NOCTTY | O_CLOEXEC));
    ASSERT_TRUE(terminal);
    name_descriptor(victim, terminal.get());
  }
  expect_service(victim);
  EXPECT_FALSE(victim.stop().has_terminal);
}

TEST_F(AttackByDescriptor, AnOrdinaryFile) {
  Victim victim(rpc_test::rpc_config());
  std::string name = "/dev/shm/attack-XXXXXX";
  const UniqueFd fd(mkostemp(name.data(), O_CLOEXEC));
  ASSERT_TRUE(fd);
  EXPECT_EQ(unlink(name.c_str()), 0);
  const ibv_gid gid = gid_of_descriptor(fd.get());
  ASSERT_EQ(ftruncate(fd.get(), sizeof(sv::Segment)), 0);
  struct Header {
    std::uint64_t magic = sv::kSegmentMagic;
    std::uint32_t version = sv::kSegmentVersion;
    std::uint32_t pid = static_cast<std::uint32_t>(getpid());
    ibv_gid gid;
  } header;
  header.gid = gid;
  ASSERT_EQ(pwrite(fd.get(), &header, sizeof header, 0), static_cast<ssize_t>(sizeof header));
  name_descriptor(victim, fd.get());
  char lanes[64];
  // Nothing may register in the fake directory of lanes.
  ASSERT_EQ(
      pread(fd.get(), lanes, sizeof lanes, static_cast<off_t>(offsetof(sv::Segment, directory))),
      static_cast<ssize_t>(sizeof lanes));
  EXPECT_TRUE(std::all_of(std::begin(lanes), std::end(lanes), [](char c) { return c == 0; }));
  expect_service(victim);
  (void)victim.stop();
}

}  // namespace
}  // namespace attack_test
