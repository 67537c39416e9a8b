// What peers write about their memory, their answers and our queue pairs neither hangs nor harms
// us.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "own_process.h"
#include "softverbs/many_objects.h"
#include "softverbs/memory/atomic_lock.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc_link.h"
#include "trust_pages.h"

#ifndef MFD_HUGE_SHIFT
#define MFD_HUGE_SHIFT 26
#endif

namespace softverbs_test::hostile_memory {

constexpr std::size_t kWord = 4096;
constexpr std::size_t kResult = 8192;

ibv_wc_status run(Node& node, ibv_qp* qp, Send send) {
  must(send.post(qp) == 0, "post");
  ibv_wc wc{};
  bool got = false;
  must(until([&] { got = node.poll(wc); }, [&] { return got; }), "a completion");
  return wc.status;
}

// ---- private memory ----

TEST(SoftverbsPrivateMemory, IsNotReachedWithoutTrust) {
  if (!children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  Child child([](int socket) {
    NodeOptions options;
    options.private_memory = true;
    Node theirs(options);
    fill(theirs.bytes(0, 64), 5);
    ibv_qp* own = theirs.make_qp();
    (void)meet(theirs, own, socket);
    (void)get<char>(socket);
  });
  NodeOptions options;
  options.page_trust = sv::PageTrust::none;
  Node node(options);
  ibv_qp* qp = node.make_qp();
  const Card theirs = meet(node, qp, child.socket());
  Send read(1, node.sge(0, 64), IBV_WR_RDMA_READ);
  read.to(theirs.memory, theirs.key);
  EXPECT_EQ(run(node, qp, read), IBV_WC_REM_OP_ERR);
  EXPECT_TRUE(all_are(node.bytes(0, 64), 0));
}

TEST(SoftverbsPrivateMemory, TheEnvironmentDecidesWhetherItIsTrusted) {
  const auto trust = [](sv::Driving driving) {
    ibv_context* const context = sv::open_device(spinwire::Clock::real(), driving).value();
    const sv::PageTrust chosen = sv::context_of(context).page_trust;
    (void)sv::close_device(context);
    return chosen;
  };
  constexpr auto kEngine = sv::Driving::by_user;
  constexpr auto kProgram = sv::Driving::by_poll;
  for (const char* value : {"", "no"}) {
    const TrustPages by_default(value);
    EXPECT_EQ(trust(kEngine), sv::PageTrust::usual);
    EXPECT_EQ(trust(kProgram), sv::PageTrust::all);
  }
  const std::pair<const char*, sv::PageTrust> kChosen[] = {{"0", sv::PageTrust::none},
                                                           {"1", sv::PageTrust::all}};
  for (const auto& [value, expected] : kChosen) {
    const TrustPages chosen(value);
    EXPECT_EQ(trust(kEngine), expected);
    EXPECT_EQ(trust(kProgram), expected);
  }
}

// ---- hugepages ----

/// A sealed memfd of one hugepage. While no hugepage is free, its page is missing, as if its owner
/// had punched a hole.
spinwire::base::UniqueFd missing_hugepage() {
  spinwire::base::UniqueFd fd(::memfd_create(
      "missing-hugepage", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | (21u << MFD_HUGE_SHIFT)));
  if (!fd || ftruncate(fd.get(), 2 << 20) != 0 || fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0)
    fd.reset();
  return fd;
}

/// Node b's memory lies, as its segment says, in a hugepage of this process.
struct HugeLink : Link {
  spinwire::base::UniqueFd fd = missing_hugepage();
  sv::Peer& peer = *a.internals().peers[0];
  sv::Context& owner = b.internals();
  sv::RegionEntry& region = owner.segment->regions[sv::region_index(b.mr->rkey)];
  sv::PeerProcess process;

  /// Makes the other node look like one of another process.
  void forge(std::uint64_t size, std::uint32_t generation) {
    struct stat file {};
    must(fstat(fd.get(), &file) == 0, "fstat");
    sv::ObjectEntry& object = owner.segment->objects[region.object];
    object.fd = fd.get();
    object.size = size;
    object.inode = file.st_ino;
    object.generation = region.object_generation = generation;
    peer.same_process = false;
    peer.process = &process;
  }
  ~HugeLink() {
    sv::unmap_objects(peer);
    peer.process = nullptr;
    peer.same_process = true;
    EXPECT_EQ(process.mapped.objects, 0u);
    EXPECT_EQ(process.mapped.bytes, 0u);
  }
};

TEST(SoftverbsHugepages, APageThatIsMissingFailsTheOperation) {
  HugeLink link;
  if (!link.fd) GTEST_SKIP() << "this kernel has no hugepages of 2 MiB";
  if (own_process::number_in("/proc/meminfo", "HugePages_Free").value_or(0) != 0)
    GTEST_SKIP() << "hugepages are free, so none is missing";
  link.a.internals().page_trust = sv::PageTrust::usual;
  link.forge(2 << 20, 7);
  for (const sv::Copy direction : {sv::Copy::from_peer, sv::Copy::to_peer}) {
    const auto bytes = sv::resolve(link.peer, link.region.pd, link.b.address(0), 64,
                                   link.b.mr->rkey, IBV_ACCESS_REMOTE_WRITE, 0);
    ASSERT_EQ(bytes.kind, sv::RemoteBytes::Kind::guarded);
    EXPECT_TRUE(bytes.mappable);  // others use the processor's atomics, so an atomic is refused
    const ibv_sge here = link.a.sge(0, 64);
    errno = 0;
    EXPECT_FALSE(sv::copy_remote(link.peer, bytes, &here, 1, 64, direction));
    EXPECT_EQ(errno, EFAULT);
  }
}

TEST(SoftverbsHugepages, AreCopiedByTheKernelUnlessTrusted) {
  struct Case {
    sv::PageTrust trust;
    bool shares_hugepages;
    bool guarded;
  };
  for (const Case& c :
       {Case{sv::PageTrust::none, false, true}, Case{sv::PageTrust::none, true, true},
        Case{sv::PageTrust::usual, false, true}, Case{sv::PageTrust::usual, true, false},
        Case{sv::PageTrust::all, false, false}}) {
    HugeLink link;
    if (!link.fd) GTEST_SKIP() << "this kernel has no hugepages of 2 MiB";
    link.a.internals().page_trust = c.trust;
    link.a.internals().shares_hugepages = c.shares_hugepages;
    link.forge(2 << 20, 7);
    const sv::MappedObject* const mapped = sv::object_of(link.peer, link.region.object, 7);
    // Pages that are not guarded are reserved, so one must be free.
    if (!c.guarded && mapped == nullptr) continue;
    ASSERT_NE(mapped, nullptr);
    EXPECT_EQ(mapped->guarded, c.guarded);
  }
}

TEST(SoftverbsHugepages, APartOfAPageIsUnmappedWhole) {
  HugeLink link;
  if (!link.fd) GTEST_SKIP() << "this kernel has no hugepages of 2 MiB";
  link.a.internals().page_trust = sv::PageTrust::none;  // else a page must be free
  const std::uint32_t object = link.region.object;
  for (std::uint32_t generation = 7; generation < 20; ++generation) {
    link.forge(4096, generation);
    ASSERT_NE(sv::object_of(link.peer, object, generation), nullptr);
    EXPECT_EQ(own_process::mappings("memfd:missing-hugepage"), 1u);
  }
}

TEST(SoftverbsHugepages, CopiesThroughTheKernelAreWhole) {
  Link link;
  fill(link.b.bytes(0, 5000), 3);
  sv::RemoteBytes bytes{sv::RemoteBytes::Kind::guarded, false, link.b.memory.data(), 0};
  ibv_sge parts[] = {link.a.sge(0, 1000), link.a.sge(1000, 4000)};
  sv::Peer& peer = *link.a.internals().peers[0];
  ASSERT_TRUE(sv::copy_remote(peer, bytes, parts, 2, 5000, sv::Copy::from_peer));
  EXPECT_TRUE(holds(link.a.bytes(0, 5000), 3));
  fill(link.a.bytes(0, 5000), 4);
  ASSERT_TRUE(sv::copy_remote(peer, bytes, parts, 2, 5000, sv::Copy::to_peer));
  EXPECT_TRUE(holds(link.b.bytes(0, 5000), 4));
}

// ---- how much is mapped ----

TEST(SoftverbsMappedShare, LeavesSomethingForOthers) {
  std::vector<sv::Mapped> processes(12);
  for (sv::Mapped& own : processes) {
    while (sv::take_mapping(own, 1 << 20)) {
    }
    EXPECT_GE(own.objects, 256u);
    EXPECT_LE(own.objects, sv::kMostMapped.objects / 4);
  }
  for (sv::Mapped& own : processes) {
    while (own.objects != 0) sv::return_mapping(own, 1 << 20);
    EXPECT_EQ(own.bytes, 0u);
  }
}

TEST(SoftverbsMappedShare, CountsBytes) {
  sv::Mapped first;
  sv::Mapped second;
  EXPECT_FALSE(sv::take_mapping(first, ~std::uint64_t{0}));
  EXPECT_FALSE(sv::take_mapping(first, sv::kMostMapped.bytes / 4 + 1));
  ASSERT_TRUE(sv::take_mapping(first, sv::kMostMapped.bytes / 5));
  EXPECT_FALSE(sv::take_mapping(first, sv::kMostMapped.bytes / 5));
  EXPECT_EQ(first.objects, 1u);
  ASSERT_TRUE(sv::take_mapping(second, sv::kMostMapped.bytes / 5));
  sv::return_mapping(first, sv::kMostMapped.bytes / 5);
  sv::return_mapping(second, sv::kMostMapped.bytes / 5);
}

/// Node b says before each message by reference that its memory is another object.
TEST(SoftverbsMappedShare, PacketsHaveFewObjectsMappedInAStep) {
  constexpr std::uint32_t kMessages = 3 * sv::kMapsPerStep - 1;
  HugeLink link;
  link.a.internals().page_trust = sv::PageTrust::usual;
  fill(link.b.bytes(0, 2048), 6);
  link.peer.same_process = false;
  link.peer.process = &link.process;
  link.control();
  const auto receive = [&] {
    for (int i = 0; i < 100; ++i) link.poll_a();
  };
  std::uint32_t expected = 0;
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    link.owner.segment->objects[link.region.object].generation = link.region.object_generation =
        100 + i;
    ASSERT_EQ(link.a.post_recv(i, 0, 2048), 0);
    ASSERT_EQ(Send(i, link.b.sge(0, 2048)).post(link.qb), 0);
    receive();
    if (i == 0 || i % sv::kMapsPerStep != 0) {
      EXPECT_EQ(link.at_a.size(), ++expected) << i;
      continue;
    }
    EXPECT_EQ(link.at_a.size(), expected) << "it waits for a step";
    link.control();
    receive();
    EXPECT_EQ(link.at_a.size(), ++expected);
  }
  for (const ibv_wc& wc : link.at_a) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(link.a.bytes(0, 2048), 6));
  EXPECT_EQ(link.process.mapped.objects, 1u);
}

/// The first lane has as many objects mapped as a step allows, and more to come.
TEST(SoftverbsMappedShare, ALaneWaitsForOneStepOnly) {
  Link link;
  Node third;
  ibv_qp* const of_third = third.make_qp();
  ibv_qp* const to_third = link.a.make_qp();
  connect(link.a, to_third, third, of_third);
  sv::Context& c = link.a.internals();
  c.page_trust = sv::PageTrust::usual;
  ManyObjects greedy(link.b, *c.peers[0]);
  ManyObjects modest(third, *c.peers[1]);
  link.control();
  for (std::uint32_t i = 0; i < 3 * sv::kMapsPerStep; ++i) {
    ASSERT_EQ(link.a.post_recv(i, 0, 2048), 0);
    greedy.send(link.qb);
  }
  ASSERT_EQ(link.a.post_recv(0, 0, 2048), 0);
  modest.send(of_third);
  const auto received = [&](const ibv_qp* qp) {
    for (int i = 0; i < 100; ++i) link.poll_a();
    return std::count_if(link.at_a.begin(), link.at_a.end(), [&](const ibv_wc& wc) {
      return wc.qp_num == qp->qp_num && wc.status == IBV_WC_SUCCESS;
    });
  };
  ASSERT_EQ(received(link.qa), sv::kMapsPerStep);
  ASSERT_EQ(received(to_third), 0);
  sv::control_device(link.a.context);
  EXPECT_EQ(received(to_third), 1);
  EXPECT_EQ(received(link.qa), 2 * sv::kMapsPerStep - 1);
}

/// A message of many parts waits for several steps, and its sender has each poll look at it.
TEST(SoftverbsMappedShare, AMessageThatWaitsIsNotCopiedInEachPoll) {
  constexpr std::uint32_t kPart = 256, kParts = 2 * sv::kMapsPerStep, kBytes = kParts * kPart;
  NodeOptions options;
  options.sges = kParts;
  Link link(options);
  sv::Context& c = link.a.internals();
  c.page_trust = sv::PageTrust::usual;
  ManyObjects objects(link.b, *c.peers[0]);
  ibv_sge parts[kParts];
  for (std::uint32_t i = 0; i < kParts; ++i) parts[i] = objects.bytes(i * kPart, kPart);
  const auto poll = [&] {
    for (int i = 0; i < 100; ++i) link.poll_a();
  };
  const auto received = [&] {
    const auto bytes = link.a.bytes(0, kBytes);
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  ASSERT_EQ(link.a.post_recv(1, 0, kBytes), 0);
  fill(link.b.bytes(0, kBytes), 1);
  link.control();
  Send send(2, parts[0]);
  send.wr.sg_list = parts;
  send.wr.num_sge = kParts;
  ASSERT_EQ(send.post(link.qb), 0);
  poll();
  const auto first = received();
  fill(link.b.bytes(0, kBytes), 2);
  poll();
  EXPECT_TRUE(received() == first) << "a poll without a step before it has copied";
  link.control();
  c.maps_left = 1;  // other lanes had the rest of the step
  poll();
  EXPECT_TRUE(received() == first) << "it has copied, though parts are still missing";
  ASSERT_TRUE(link.at_a.empty());
  link.control();
  poll();
  ASSERT_EQ(link.at_a.size(), 1u);
  EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(link.a.bytes(0, kBytes), 2));
}

// ---- what we know of ourselves ----

TEST(SoftverbsForgedSelf, OurGidIsNotReadBack) {
  Link link;
  sv::Context& c = link.a.internals();
  const ibv_gid ours = link.a.endpoint(link.qa).gid;
  c.segment->gid = c.segment->shown_gid = ibv_gid{};
  c.segment->pid = 1;
  EXPECT_TRUE(sv::same_gid(link.a.endpoint(link.qa).gid, ours));
  Node third;
  ibv_qp* qp = link.a.make_qp();
  ASSERT_EQ(link.a.init(qp), 0);
  ASSERT_EQ(link.a.rtr(qp, third.endpoint(third.make_qp())), 0);
  const sv::LaneEntry& entry = third.internals().segment->directory[0];
  EXPECT_TRUE(sv::same_gid(entry.sender, ours));
  EXPECT_EQ(sv::lane_pid(entry.state), c.pid);
}

TEST(SoftverbsForgedSelf, TheExpectedPsnIsNotReadBack) {
  Link link;
  const auto queried = [&] {
    ibv_qp_attr attr{};
    must(sv::query_qp(link.qb, &attr, IBV_QP_RQ_PSN, nullptr) == 0, "query_qp");
    return attr.rq_psn;
  };
  const std::uint32_t first = queried();
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_TRUE(link.run(1, 1));
  sv::QueuePairEntry& entry = link.b.internals().segment->queue_pairs[link.qb->handle];
  entry.expected_psn = 12345;
  EXPECT_EQ(queried(), sv::psn_add(first, 1));
  link.b.fail(link.qb);
  EXPECT_EQ(queried(), sv::psn_add(first, 1));
}

// ---- answers and locks ----

TEST(SoftverbsForgedAnswer, AReasonThatDoesNotExistIsNoAnswer) {
  Link link(ConnectOptions{.rnr_timer = 1, .timeout = 1, .retries = 0, .rnr_retry = 7});
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  sv::QueuePairEntry& entry = link.b.internals().segment->queue_pairs[link.qb->handle];
  const sv::OutLane& out = link.a.internals().peers[0]->out;
  entry.nak = static_cast<sv::Nak>(99);
  entry.nak_serial = entry.nak_serial + 1;
  out.control->last_nak = out.tail;
  out.control->head = out.tail;
  ASSERT_TRUE(
      until([&] { link.poll_a(); }, [&] { return !link.at_a.empty(); }, std::chrono::seconds(60)));
  EXPECT_EQ(link.at_a[0].status, IBV_WC_RETRY_EXC_ERR);
}

class SoftverbsForgedLock : public testing::Test {
 protected:
  static NodeOptions with(const std::uint64_t* now) {
    NodeOptions options;
    options.private_memory = true;
    options.clock = spinwire::Clock::manual(now);
    return options;
  }
  [[nodiscard]] std::atomic<std::uint64_t>& lock() const {
    return *sv::lock_of(*link_.a.internals().peers[0], link_.b.address(kWord));
  }
  void add() {
    Send send(1, link_.a.sge(kResult, 8), IBV_WR_ATOMIC_FETCH_AND_ADD);
    send.wr.wr.atomic = {link_.b.address(kWord), 1, 0, link_.b.mr->rkey};
    ASSERT_EQ(send.post(link_.qa), 0);
  }
  std::uint64_t now_ = 1'000'000;
  Link link_{with(&now_)};
};

TEST_F(SoftverbsForgedLock, AHolderThatNoProcessCanBe) {
  lock() = std::uint64_t{77} << 32;  // pid 0
  add();
  link_.steps(1);
  ASSERT_EQ(link_.at_a.size(), 1u);
  EXPECT_EQ(link_.at_a[0].status, IBV_WC_SUCCESS);
}

TEST_F(SoftverbsForgedLock, AHolderThatNeverEnds) {
  lock() = sv::process_word(1);
  add();
  for (int i = 0; i < 90; ++i) {
    now_ += 100'000'000;
    link_.steps(1);
  }
  ASSERT_TRUE(link_.at_a.empty());
  for (int i = 0; i < 20; ++i) {
    now_ += 100'000'000;
    link_.steps(1);
  }
  ASSERT_EQ(link_.at_a.size(), 1u);
  EXPECT_EQ(link_.at_a[0].status, IBV_WC_REM_OP_ERR);
  lock() = 0;
}

// ---- words that change while they are read ----

/// The sender changes the lengths of its references all the time.
TEST(SoftverbsChangingWords, ReferencesAreReadOnce) {
  constexpr std::uint32_t kShort = 1000, kLong = 3000;
  Link link;
  fill(link.a.bytes(0, 4096), 8);
  const sv::OutLane& out = link.a.internals().peers[0]->out;
  std::atomic<sv::Line*> line = out.lines;
  std::atomic<bool> stop = false;
  std::thread hostile([&] {
    for (std::uint32_t i = 0; !stop; ++i) {
      auto* const reference = reinterpret_cast<sv::Reference*>(line.load()->payload);
      *const_cast<volatile std::uint32_t*>(&reference->length) = i % 2 == 0 ? kShort : kLong;
    }
  });
  std::uint32_t lengths[2] = {};
  const std::uint32_t psn = link.a.endpoint(link.qa).psn;
  bool sound = true;
  for (std::uint32_t n = 0; sound && (n < 20'000 || lengths[0] == 0 || lengths[1] == 0); ++n) {
    std::memset(link.b.memory.data(), 0, 4096);
    must(link.b.post_recv(1, 0, 4096) == 0, "post_recv");
    sv::Line& at = out.lines[n % sv::kLaneLines];
    const sv::Reference reference{link.a.address(0), kShort, link.a.mr->lkey};
    std::memcpy(at.payload, &reference, sizeof reference);
    at.length = sizeof reference;
    line = &at;
    at.word.store(sv::lane_mark(n) << 56 |
                      sv::packet_kind(sv::Packet::send, sv::line_flag::kReference) << 48 |
                      std::uint64_t{sv::psn_add(psn, n)} << 24 | link.qb->qp_num,
                  std::memory_order_release);
    link.at_b.clear();
    link.poll_b();
    sound = link.at_b.size() == 1 && link.at_b[0].status == IBV_WC_SUCCESS &&
            std::memcmp(link.b.memory.data(), link.a.memory.data(), link.at_b[0].byte_len) == 0 &&
            all_are(link.b.bytes(link.at_b[0].byte_len, 4096 - link.at_b[0].byte_len), 0);
    EXPECT_TRUE(sound) << "message " << n;
    if (sound) ++lengths[link.at_b[0].byte_len == kLong ? 1 : 0];
  }
  stop = true;
  hostile.join();
}

/// The owner says by turns that its word lies in a file, and in private memory.
TEST(SoftverbsChangingWords, WhereAnAtomicsWordLiesIsReadOnce) {
  if (!children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  Child child([](int socket) {
    Node theirs;
    ibv_qp* own = theirs.make_qp();
    (void)meet(theirs, own, socket);
    sv::RegionEntry& region =
        theirs.internals().segment->regions[sv::region_index(theirs.mr->rkey)];
    const std::uint32_t object = region.object;
    volatile std::uint32_t& says = region.object;
    while (!hung_up(socket)) {
      for (int i = 0; i < 10'000; ++i) says = i % 2 == 0 ? sv::kNoObject : object;
    }
  });
  Node node;
  ibv_qp* qp = node.make_qp();
  const Card theirs = meet(node, qp, child.socket());
  for (int i = 0; i < 20'000; ++i) {
    Send add(1, node.sge(kResult, 8), IBV_WR_ATOMIC_FETCH_AND_ADD);
    add.wr.wr.atomic = {theirs.memory + kWord, 1, 0, theirs.key};
    ASSERT_EQ(run(node, qp, add), IBV_WC_SUCCESS) << i;
  }
}

}  // namespace softverbs_test::hostile_memory
