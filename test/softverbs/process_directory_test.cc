// Contexts of one process behind one GID, found by the GID and the queue pair's number.
#include "softverbs/process_directory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <list>
#include <optional>

#include "softverbs/peer_process.h"
#include "softverbs/ud_link.h"

namespace softverbs_test::process_directory {

NodeOptions of_program() {
  NodeOptions options;
  options.driving = sv::Driving::by_poll;
  options.memory = 1u << 20;
  return options;
}

/// The next completion; wr_id ~0 if there is none.
ibv_wc next(const Node& node) {
  ibv_wc wc{};
  bool there = false;
  if (!until([&] { there = node.poll(wc); }, [&] { return there; })) wc.wr_id = ~std::uint64_t{0};
  return wc;
}

/// A program's node, with a datagram queue pair that receives at offset 0.
struct Receiver {
  Node node{of_program()};
  ibv_qp* qp = ready_ud(node, true);
  Receiver() { must(node.post_recv(1, 0, 256) == 0, "recv"); }
  bool receives() {
    const ibv_wc wc = next(node);
    return wc.wr_id == 1 && wc.opcode == IBV_WC_RECV;
  }
};

void send_datagram(Node& from, ibv_qp* qp, const Handle& to, std::uint32_t qpn) {
  must(Datagram(9, from.sge(4096, 16), to, qpn).post(qp) == 0, "send");
  const ibv_wc wc = next(from);
  must(wc.wr_id == 9, "a completion");
  must(wc.opcode == IBV_WC_SEND && wc.status == IBV_WC_SUCCESS, "sent");
}

TEST(ProcessGid, IsThatOfEveryContextOfAProgram) {
  const Node a(of_program());
  const Node b(of_program());
  EXPECT_TRUE(sv::same_gid(gid_of(a), gid_of(b)));
  EXPECT_TRUE(sv::names_process(gid_of(a)));
  const Node engine;  // driven by its user, and found by its GID alone
  EXPECT_FALSE(sv::names_process(gid_of(engine)));
}

TEST(ProcessGid, LeadsToContextsOfAnotherProcess) {
  Child child([](int socket) {
    Receiver first;
    Receiver second;
    put(socket, gid_of(first.node));
    put(socket, first.qp->qp_num);
    put(socket, second.qp->qp_num);
    must(first.receives() && second.receives(), "a datagram for each");
    Node third(of_program());
    ibv_qp* qp = third.make_qp();
    must(third.post_recv(1, 0, 64) == 0, "recv");
    (void)meet(third, qp, socket);
    must(next(third).byte_len == 40, "a message");
    put(socket, 'x');
  });
  const auto gid = get<ibv_gid>(child.socket());
  const auto first = get<std::uint32_t>(child.socket());
  const auto second = get<std::uint32_t>(child.socket());
  EXPECT_NE(first, second);
  Node node;
  ibv_qp* datagrams = ready_ud(node, true);
  const Handle to(node, way_to(gid));
  send_datagram(node, datagrams, to, second);
  send_datagram(node, datagrams, to, first);
  ibv_qp* qp = node.make_qp();
  (void)meet(node, qp, child.socket());
  ASSERT_EQ(Send(2, node.sge(0, 40)).post(qp), 0);
  const ibv_wc wc = next(node);
  EXPECT_EQ(wc.wr_id, 2u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(get<char>(child.socket()), 'x');
  EXPECT_EQ(child.wait(), 0);
}

TEST(ProcessGid, OfAContextThatHasClosedLeadsNowhere) {
  Receiver stays;
  Node sender(of_program());
  ibv_qp* qp = ready_ud(sender, true);
  std::optional<Receiver> leaves(std::in_place);
  const std::uint32_t gone = leaves->qp->qp_num;
  const Handle to(sender, way_to(gid_of(sender)));
  send_datagram(sender, qp, to, gone);
  EXPECT_TRUE(leaves->receives());
  leaves.reset();
  const auto& peers = sender.internals().peers;
  ibv_wc wc{};
  EXPECT_TRUE(until([&] { (void)sender.poll(wc); },
                    [&] { return std::ranges::any_of(peers, [](auto& p) { return p->gone; }); }));
  send_datagram(sender, qp, to, gone);  // lost, as on a network
  EXPECT_TRUE(until([&] { (void)sender.poll(wc); },
                    [&] { return dropped(sender, sv::Drop::no_queue_pair) == 1; }));
  send_datagram(sender, qp, to, stays.qp->qp_num);
  EXPECT_TRUE(stays.receives());
  ibv_qp* connected = sender.make_qp();
  ASSERT_EQ(sender.init(connected), 0);
  EXPECT_EQ(sender.rtr(connected, {gid_of(sender), gone, 0}), ENODEV);
  // Another context takes the slot, and the address handle leads there.
  leaves.emplace();
  EXPECT_EQ(leaves->qp->qp_num, gone);
  send_datagram(sender, qp, to, gone);
  EXPECT_TRUE(leaves->receives());
}

TEST(ProcessGid, HasPlaceFor256Contexts) {
  std::list<sv::DirectorySlot> slots;
  const ibv_gid context = sv::make_gid({static_cast<std::uint32_t>(getpid()), 5, 6});
  for (int i = 0; i < 256; ++i) {
    auto taken = sv::DirectorySlot::take(context);
    ASSERT_TRUE(taken) << i;
    slots.push_back(std::move(*taken));
  }
  const auto one_more = sv::DirectorySlot::take(context);
  ASSERT_FALSE(one_more);
  EXPECT_EQ(one_more.error().status, spinwire::Status::limit);
  EXPECT_NE(one_more.error().found.find("256"), std::string::npos) << one_more.error().found;
  const std::uint32_t number = slots.front().number();
  slots.pop_front();
  const auto again = sv::DirectorySlot::take(context);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->number(), number);
}

/// Whether queue pairs of the slot are found under the GID.
bool leads(const ibv_gid& gid, std::uint32_t slot) {
  ibv_gid context{};
  std::string why;
  return sv::find_context(gid, slot << 16 | 2, context, why);
}

TEST(ProcessGid, IsTheParentsNotItsChilds) {
  const ibv_gid context = sv::make_gid({static_cast<std::uint32_t>(getpid()), 5, 6});
  std::optional<sv::DirectorySlot> slot(std::move(*sv::DirectorySlot::take(context)));
  const ibv_gid gid = slot->gid();
  const std::uint32_t number = slot->number();
  ASSERT_TRUE(leads(gid, number));
  Child child([&](int) {
    must(leads(gid, number), "the parent's context, from its child");
    slot.reset();  // a copy of the parent's
    must(leads(gid, number), "the parent's context, after its child has left");
    const Node own(of_program());
    must(!sv::same_gid(gid_of(own), gid), "a GID of its own");
  });
  EXPECT_EQ(child.wait(), 0);
  EXPECT_TRUE(leads(gid, number));
  slot.reset();
  EXPECT_FALSE(leads(gid, number));
}

/// The directory that a GID of this process names, as any process of its user can map it.
class ForeignView {
 public:
  explicit ForeignView(const ibv_gid& gid) {
    const int fd = static_cast<int>(sv::parse_gid(gid, sv::GidKind::process)->fd);
    bytes_ = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(bytes_ != MAP_FAILED, "mmap");
  }
  ForeignView(const ForeignView&) = delete;
  ForeignView& operator=(const ForeignView&) = delete;
  ~ForeignView() { (void)::munmap(bytes_, kBytes); }
  void overwrite(int value) { std::memset(bytes_, value, kBytes); }

 private:
  static constexpr std::size_t kBytes = 8 + 16 + 256 * 8;
  void* bytes_;
};

TEST(SoftverbsForgedDirectory, IsNotReadBack) {
  const ibv_gid context = sv::make_gid({static_cast<std::uint32_t>(getpid()), 5, 6});
  std::list<sv::DirectorySlot> slots;
  slots.push_back(std::move(*sv::DirectorySlot::take(context)));
  const ibv_gid gid = slots.front().gid();
  ForeignView view(gid);
  for (const int value : {0, 0xff}) {
    view.overwrite(value);
    auto taken = sv::DirectorySlot::take(context);
    ASSERT_TRUE(taken) << value;
    for (const auto& other : slots) EXPECT_NE(taken->number(), other.number()) << value;
    slots.push_back(std::move(*taken));
    EXPECT_TRUE(sv::same_gid(slots.back().gid(), gid)) << value;
    for (const auto& each : slots) EXPECT_TRUE(leads(gid, each.number())) << value;
    EXPECT_FALSE(leads(gid, 200)) << value;
  }
  const std::uint32_t left = slots.back().number();
  slots.pop_back();
  EXPECT_FALSE(leads(gid, left));
  EXPECT_EQ(sv::DirectorySlot::take(context)->number(), left);
}

TEST(SoftverbsForgedDirectory, ContextsOfAProgramKeepTheirGidAndNumbers) {
  Receiver first;
  ForeignView view(gid_of(first.node));
  view.overwrite(0);
  Receiver second;
  EXPECT_TRUE(sv::same_gid(gid_of(first.node), gid_of(second.node)));
  EXPECT_NE(first.qp->qp_num, second.qp->qp_num);
  Node sender(of_program());
  ibv_qp* const qp = ready_ud(sender, true);
  const Handle to(sender, way_to(gid_of(first.node)));
  send_datagram(sender, qp, to, second.qp->qp_num);
  EXPECT_TRUE(second.receives());
  send_datagram(sender, qp, to, first.qp->qp_num);
  EXPECT_TRUE(first.receives());
}

TEST(ProcessGid, ThatNamesNoDirectoryIsRefused) {
  Child child([](int socket) {
    const spinwire::base::UniqueFd memory(memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    must(ftruncate(memory.get(), 1 << 16) == 0, "ftruncate");
    must(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0, "seal");
    put(socket, memory.get());
    (void)get<char>(socket);
  });
  const auto pid = static_cast<std::uint32_t>(child.pid());
  const auto fd = static_cast<std::uint32_t>(get<int>(child.socket()));
  const Node node;
  for (const std::uint32_t each : {fd, 0u, 12345u}) {
    const ibv_gid gid = sv::make_gid({pid, each, 77}, sv::GidKind::process);
    EXPECT_FALSE(leads(gid, 0)) << each;
    ibv_ah_attr way = way_to(gid);
    EXPECT_EQ(sv::create_ah(node.pd, &way), nullptr) << each;
    EXPECT_EQ(errno, ENODEV);
  }
  put(child.socket(), 'x');
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace softverbs_test::process_directory
