// Datagrams and connections in one lane, between processes, and in every state.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "base/random.h"
#include "softverbs/peer_process.h"
#include "softverbs/ud_link.h"

namespace softverbs_test::datagram {

constexpr std::size_t kArea = 1u << 20;

NodeOptions deep(const std::uint64_t* clock = nullptr) {
  NodeOptions options;
  if (clock != nullptr) options.clock = spinwire::Clock::manual(clock);
  options.srq_depth = 0;
  options.recv_depth = 512;
  options.send_depth = 1024;
  options.cq_entries = 8192;
  return options;
}

/// Connected and datagram queue pairs between the same two contexts.
class SoftverbsDatagramLane : public testing::Test {
 protected:
  std::uint64_t now_ = 1'000'000'000;
  Link link_{deep(&now_)};
  ibv_qp* ua_ = ready_ud(link_.a, false, kQkey, 1024);
  ibv_qp* ub_ = make_deep();
  Handle to_b_{link_.a, link_.b};

  ibv_qp* make_deep() {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = link_.b.cq;
    init.qp_type = IBV_QPT_UD;
    init.cap = {64, 512, 1, 1, 0};
    ibv_qp* qp = sv::create_qp(link_.b.pd, &init);
    must(qp != nullptr, "create_qp");
    link_.b.qps.push_back(qp);
    must(ud_init(qp) == 0 && ud_rtr(qp) == 0 && ud_rts(qp) == 0, "RTS");
    return qp;
  }
  void post_receives(ibv_qp* qp, std::size_t at, std::uint32_t each, std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i)
      ASSERT_EQ(link_.b.post_recv(i, at + i * each, each, qp), 0);
  }
  void send_datagram(std::uint64_t i, std::uint32_t length) {
    std::memcpy(link_.a.bytes(0, 8).data(), &i, 8);
    ASSERT_EQ(Datagram(i, link_.a.sge(0, length), to_b_, ub_->qp_num).post(ua_), 0);
  }
  void send_message(std::uint64_t i, unsigned flags) {
    const std::size_t at = kArea + i * 64;
    std::memcpy(link_.a.bytes(at, 8).data(), &i, 8);
    ASSERT_EQ(Send(i, link_.a.sge(at, 8), IBV_WR_SEND, flags).post(link_.qa), 0);
  }
  [[nodiscard]] std::uint64_t number_at(std::size_t at) const {
    std::uint64_t n = 0;
    std::memcpy(&n, link_.b.bytes(at, 8).data(), 8);
    return n;
  }
};

TEST_F(SoftverbsDatagramLane, AFullLaneLeavesRoomToConnections) {
  constexpr std::uint64_t kFit = sv::kLaneLines - sv::kConnectedLines;
  post_receives(ub_, 0, 256, kFit + 100);
  for (std::uint64_t i = 0; i < kFit + 100; ++i) send_datagram(i, 8);
  EXPECT_EQ(completions(link_.a).size(), kFit);  // the others wait
  now_ += link_.a.internals().datagram_timeout;
  EXPECT_EQ(completions(link_.a).size(), 100u);  // the sender has checked and found nothing new
  EXPECT_EQ(dropped(link_.a, sv::Drop::no_room), 100u);
  // Connected messages find a few free lines, the rest waits, and nothing overtakes.
  post_receives(link_.qb, kArea, 256, 300);
  for (std::uint64_t i = 0; i < 300; ++i)
    send_message(i, IBV_SEND_SIGNALED | (i % 2 != 0 ? unsigned{IBV_SEND_INLINE} : 0u));
  send_datagram(kFit, 8);
  EXPECT_EQ(dropped(link_.a, sv::Drop::no_room), 101u);
  ASSERT_TRUE(link_.run(301, kFit + 300));
  std::uint64_t messages = 0, datagrams = 0;
  for (const ibv_wc& wc : link_.at_b) {
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    const bool connected = wc.qp_num == link_.qb->qp_num;
    std::uint64_t& next = connected ? messages : datagrams;
    ASSERT_EQ(wc.wr_id, next);
    ASSERT_EQ(number_at(connected ? kArea + next * 256 : next * 256 + kGrh), next);
    ++next;
  }
  EXPECT_EQ(messages, 300u);
  EXPECT_EQ(datagrams, kFit);
  for (const ibv_wc& wc : link_.at_a) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  // There is room again.
  send_datagram(7, 8);
  ASSERT_TRUE(link_.run(302, kFit + 301));
}

TEST(SoftverbsDatagramIdle, CostsTheSameWithManyPeers) {
  // Some peers poll and some never do. An idle context checks none of them, and at most two lanes.
  constexpr std::size_t kPeers = 12;
  NodeOptions options;
  options.memory = 1u << 16;
  Node hub(options);
  ibv_qp* const qp = ready_ud(hub, true);
  for (std::uint64_t i = 0; i < 64; ++i) ASSERT_EQ(hub.post_recv(i, i * 64, 64), 0);
  std::vector<std::unique_ptr<Node>> others;
  std::vector<ibv_qp*> theirs;
  std::vector<std::unique_ptr<Handle>> there, back;
  for (std::size_t i = 0; i < kPeers; ++i) {
    others.push_back(std::make_unique<Node>(options));
    theirs.push_back(ready_ud(*others[i], true));
    there.push_back(std::make_unique<Handle>(hub, *others[i]));
    back.push_back(std::make_unique<Handle>(*others[i], hub));
    ASSERT_EQ(Datagram(i, hub.sge(0, 8), *there[i], theirs[i]->qp_num).post(qp), 0);
    ASSERT_EQ(Datagram(i, others[i]->sge(0, 8), *back[i], qp->qp_num).post(theirs[i]), 0);
    if (i % 2 == 0) (void)completions(*others[i]);
  }
  EXPECT_EQ(completions(hub).size(), 2 * kPeers);
  for (std::uint32_t i = 0; i <= hub.internals().idle_rounds; ++i) sv::control_device(hub.context);
  EXPECT_EQ(hub.internals().awake_count, 2u);
  EXPECT_EQ(hub.internals().pending.unacked, 0u);
  EXPECT_EQ(hub.internals().pending.slow_work, 0u);
  // A sleeping context still receives.
  for (std::size_t i = 0; i < kPeers; ++i)
    ASSERT_EQ(Datagram(i, others[i]->sge(0, 8), *back[i], qp->qp_num).post(theirs[i]), 0);
  EXPECT_EQ(completions(hub).size(), kPeers);
}

TEST_F(SoftverbsDatagramLane, AsManyOfTheLongestFitAsTheDataHolds) {
  constexpr std::uint64_t kMost = sv::kLaneData / sv::kDatagramBytes;
  post_receives(ub_, 0, 4096 + kGrh, 2 * kMost);
  for (std::uint64_t i = 0; i < kMost + 2; ++i) send_datagram(i, 4096);
  const std::size_t fit = completions(link_.a).size();
  EXPECT_GE(fit, kMost - 2);  // earlier data may be at the start
  EXPECT_LE(fit, kMost);
  EXPECT_EQ(completions(link_.b).size(), fit);
  for (std::uint64_t i = 0; i < 3; ++i) send_datagram(i, 4096);  // behind the waiting ones
  now_ += 10'000;
  EXPECT_EQ(completions(link_.a).size(), kMost + 5 - fit);
  EXPECT_EQ(completions(link_.b).size(), kMost + 5 - fit);
  EXPECT_EQ(dropped(link_.a, sv::Drop::no_room), 0u);
}

TEST_F(SoftverbsDatagramLane, APairThatIsSeldomBusyUsesLittleOfTheData) {
  const sv::OutLane& out = link_.a.internals().peers.front()->out;
  post_receives(ub_, 0, 4096 + kGrh, 64);
  std::uint32_t furthest = 0;
  for (std::uint64_t i = 0; i < 400; ++i) {
    send_datagram(i, 4096);
    furthest = std::max(furthest, out.data_next);
    for (const ibv_wc& wc : completions(link_.b)) {
      ASSERT_EQ(wc.opcode, IBV_WC_RECV);
      ASSERT_EQ(link_.b.post_recv(wc.wr_id, wc.wr_id * (4096 + kGrh), 4096 + kGrh, ub_), 0);
    }
    (void)completions(link_.a);
  }
  EXPECT_EQ(out.data_size, sv::kLeastData);
  EXPECT_LE(furthest, sv::kLeastData);
  // The data grows after it was too small, once the ring does not wrap.
  for (int round = 0; round < 3; ++round) {
    for (std::uint64_t i = 0; i < 8; ++i) send_datagram(i, 4096);
    now_ += 10'000;
    for (int i = 0; i < 4; ++i) {
      (void)completions(link_.a);
      (void)completions(link_.b);
    }
  }
  EXPECT_GT(out.data_size, sv::kLeastData);
}

TEST_F(SoftverbsDatagramLane, AFloodDoesNotStarveConnections) {
  constexpr std::uint64_t kMessages = 300;
  post_receives(link_.qb, kArea, 256, kMessages);
  link_.batch = 4;
  std::uint64_t sent = 0, steps = 0;
  const auto flood = [&](std::uint32_t length) {  // without receives
    return Datagram(0, link_.a.sge(0, length), to_b_, ub_->qp_num).post(ua_);
  };
  while (link_.at_b.size() < kMessages && steps < 100 * kMessages) {
    for (std::uint32_t length = 4096; flood(length) == 0; length ^= 4096 ^ 8) {
    }
    now_ += 10'000;
    if (sent < kMessages) send_message(sent++, IBV_SEND_INLINE | IBV_SEND_SIGNALED);
    link_.step();
    link_.at_a.clear();
    ++steps;
  }
  EXPECT_EQ(link_.at_b.size(), kMessages);
  EXPECT_LT(steps, 3 * kMessages);
  for (std::uint64_t i = 0; i < link_.at_b.size(); ++i) {
    ASSERT_EQ(link_.at_b[i].wr_id, i);
    ASSERT_EQ(number_at(kArea + i * 256), i);
  }
  EXPECT_GT(dropped(link_.b, sv::Drop::no_receive), 0u);
}

TEST_F(SoftverbsDatagramLane, MalformedLinesAreDropped) {
  sv::OutLane& out = link_.a.internals().peers.front()->out;
  post_receives(ub_, 0, 8192, 4);
  const auto forge = [&](sv::Packet packet, std::uint64_t flags, std::uint16_t length,
                         std::uint32_t offset = 0) {
    sv::Line& line = out.lines[out.tail % sv::kLaneLines];
    std::memcpy(line.payload + sv::kOffsetAt, &offset, sizeof offset);
    line.imm = kQkey;
    line.length = length;
    line.word.store(sv::lane_mark(out.tail) << 56 |
                        sv::packet_kind(packet, flags | sv::line_flag::kNoAck) << 48 | ub_->qp_num,
                    std::memory_order_release);
    ++out.tail;
    EXPECT_TRUE(completions(link_.b).empty());
  };
  forge(sv::Packet::datagram_imm, 0, 8);
  forge(sv::Packet::datagram_imm, sv::line_flag::kPrefixed, 11);
  forge(sv::Packet::datagram, sv::line_flag::kPrefixed, 4096 + 13);
  forge(sv::Packet::datagram, 0, 4097);
  forge(sv::Packet::datagram, 0, 0xffff);
  forge(sv::Packet::send, 0, 0xffff);  // connected, to an unconnected queue pair
  EXPECT_EQ(dropped(link_.b, sv::Drop::malformed), 5u);
  // Bytes outside the lane's data.
  forge(sv::Packet::datagram, 0, 100, sv::kWideLaneData - 99);
  forge(sv::Packet::datagram, 0, 100, sv::kWideLaneData);
  forge(sv::Packet::datagram, 0, 100, 0xffffffff);
  forge(sv::Packet::datagram, sv::line_flag::kPrefixed, 4096, sv::kWideLaneData - 4095);
  EXPECT_EQ(dropped(link_.b, sv::Drop::malformed), 9u);
  send_datagram(3, 8);
  EXPECT_EQ(completions(link_.b).size(), 1u);
}

/// One end of a random exchange: two connections and datagrams. Each message has its number.
struct End {
  Node node{deep()};
  ibv_qp* connected[2] = {node.make_qp(), node.make_qp()};
  ibv_qp* loose = ready_ud(node, false, kQkey, 1024);
  std::unique_ptr<Handle> way;
  std::uint64_t sent[2] = {0, 0}, received[2] = {0, 0}, confirmed[2] = {0, 0};
  std::uint64_t cast = 0, gone = 0, caught = 0;
  std::size_t posted[2] = {0, 0}, posted_loose = 0;

  static constexpr std::uint64_t kSlots = 64;
  static constexpr std::uint32_t kSlot = 8192;
  static constexpr std::uint64_t kLoose = 2;
  static std::size_t place(std::uint64_t which, std::uint64_t n, bool receive) {
    return ((which * 2 + (receive ? 1 : 0)) * kSlots + n % kSlots) * kSlot;
  }
  static std::uint32_t size_of(std::uint64_t seed, std::uint32_t most) {
    spinwire::base::Random random(seed * 77 + 1);
    const std::uint64_t kind = random.next() % 4;
    return 16 + static_cast<std::uint32_t>(random.next() % (kind == 0 ? most - 15 : 60));
  }
  /// Writes the number, the stream, and bytes that follow from both.
  std::uint32_t write(std::uint64_t which, std::uint64_t n, std::uint32_t most) const {
    const std::uint32_t size = size_of(n * 3 + which, most);
    const auto bytes = node.bytes(place(which, n, false), size);
    fill(bytes.subspan(16), n * 3 + which);
    std::memcpy(bytes.data(), &n, 8);
    std::memcpy(bytes.data() + 8, &which, 8);
    return size;
  }
  bool read(std::size_t at, std::uint32_t length, std::uint64_t which, std::uint64_t* n,
            std::uint32_t most) const {
    std::uint64_t told = 0;
    std::memcpy(n, node.bytes(at, 8).data(), 8);
    std::memcpy(&told, node.bytes(at + 8, 8).data(), 8);
    return told == which && length == size_of(*n * 3 + which, most) &&
           holds(node.bytes(at + 16, length - 16), *n * 3 + which);
  }

  void send_connected(std::uint64_t which, bool in_line) {
    if (sent[which] - confirmed[which] == kSlots) return;
    const std::uint64_t n = sent[which]++;
    const std::uint32_t size = write(which, n, 4000);
    const unsigned flags =
        IBV_SEND_SIGNALED | (in_line && size <= 256 ? unsigned{IBV_SEND_INLINE} : 0u);
    ASSERT_EQ(Send(which << 32 | n, node.sge(place(which, n, false), size), IBV_WR_SEND, flags)
                  .post(connected[which]),
              0);
  }
  void send_loose(const End& to) {
    if (cast - gone == kSlots) return;
    const std::uint64_t n = cast++;
    const std::uint32_t size = write(kLoose, n, 4096);
    ASSERT_EQ(
        Datagram(kLoose << 32, node.sge(place(kLoose, n, false), size), *way, to.loose->qp_num)
            .post(loose),
        0);
  }
  /// Receives carry their number, to find them again.
  void post_some(std::uint64_t which) {
    if (which == kLoose) {
      if (posted_loose - caught == kSlots) return;
      const std::uint64_t n = posted_loose++;
      ASSERT_EQ(node.post_recv(1ull << 40 | n, place(kLoose, n, true), kSlot, loose), 0);
    } else if (posted[which] - received[which] != kSlots) {
      const std::uint64_t n = posted[which]++;
      ASSERT_EQ(node.post_recv(n, place(which, n, true), kSlot, connected[which]), 0);
    }
  }
  void poll(int most) {
    ibv_wc wc[16];
    const int n = ibv_poll_cq(node.cq, most, wc);
    for (int i = 0; i < n; ++i) take(wc[i]);
  }
  void take(const ibv_wc& wc) {
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    if (wc.opcode == IBV_WC_SEND) {
      const std::uint64_t which = wc.wr_id >> 32;
      if (which != kLoose) {
        ASSERT_EQ(wc.wr_id & 0xffffffff, confirmed[which]++);
      } else {
        ++gone;
      }
      return;
    }
    std::uint64_t n = 0;
    if (wc.qp_num == loose->qp_num) {
      ASSERT_EQ(wc.wr_id, 1ull << 40 | caught);
      ASSERT_TRUE(read(place(kLoose, caught++, true) + kGrh, wc.byte_len - kGrh, kLoose, &n, 4096));
      return;
    }
    const std::uint64_t which = wc.qp_num == connected[0]->qp_num ? 0 : 1;
    ASSERT_EQ(wc.wr_id, received[which]);
    ASSERT_TRUE(read(place(which, received[which], true), wc.byte_len, which, &n, 4000));
    ASSERT_EQ(n, received[which]++);
  }
};

TEST(SoftverbsDatagramMix, ConnectionsLoseNothingAndDatagramsArriveWholeOrNot) {
  const auto ends = std::make_unique<End[]>(2);
  for (int i = 0; i < 2; ++i)
    connect(ends[0].node, ends[0].connected[i], ends[1].node, ends[1].connected[i]);
  ends[0].way = std::make_unique<Handle>(ends[0].node, ends[1].node);
  ends[1].way = std::make_unique<Handle>(ends[1].node, ends[0].node);
  spinwire::base::Random random(11);
  for (int step = 0; step < 60000 && !testing::Test::HasFatalFailure(); ++step) {
    End& end = ends[random.next() % 2];
    const std::uint64_t which = random.next() % 2;
    switch (random.next() % 10) {
      case 0:
      case 1:
      case 2:
        end.send_connected(which, random.next() % 2 == 0);
        break;
      case 3:
      case 4:
        for (std::uint64_t n = random.next() % 8; n != 0; --n)
          end.send_loose(ends[&end == &ends[0] ? 1 : 0]);
        break;
      case 5:
      case 6:
        for (std::uint64_t n = random.next() % 6; n != 0; --n) end.post_some(which);
        end.post_some(End::kLoose);
        break;
      default:
        end.poll(1 + static_cast<int>(random.next() % 16));
    }
  }
  const auto done = [&] {
    bool all = true;
    for (int i = 0; i < 2; ++i) {
      for (int which = 0; which < 2; ++which) {
        all = all && ends[i].received[which] == ends[1 - i].sent[which] &&
              ends[i].confirmed[which] == ends[i].sent[which];
      }
    }
    return all || testing::Test::HasFatalFailure();
  };
  ASSERT_TRUE(until(
      [&] {
        for (int i = 0; i < 2; ++i) {
          ends[i].post_some(0);
          ends[i].post_some(1);
          ends[i].poll(16);
        }
      },
      done));
  for (int i = 0; i < 2; ++i) {
    EXPECT_GT(ends[i].received[0] + ends[i].received[1], 2000u);
    EXPECT_GT(ends[i].caught, 1000u);
    EXPECT_LE(ends[i].caught, ends[1 - i].cast);
    ends[i].way.reset();
  }
}

TEST(SoftverbsDatagramProcess, EchoAndDeath) {
  const Child child([](int socket) {
    Node node;
    ibv_qp* qp = ready_ud(node, false);
    must(node.post_recv(1, 0, kGrh + 4096, qp) == 0, "recv");
    put(socket, node.endpoint(qp));
    const Endpoint parent = get<Endpoint>(socket);
    const Handle back(node, way_to(parent.gid));
    while (!hung_up(socket)) {
      sv::control_device(node.context);
      for (int i = 0; i < 1000; ++i) {
        ibv_wc wc{};
        if (!node.poll(wc)) {
          std::this_thread::yield();
          continue;
        }
        must(wc.status == IBV_WC_SUCCESS, "status");
        if (wc.opcode != IBV_WC_RECV) continue;
        must(wc.src_qp == parent.qpn, "sender");
        Datagram d(2, node.sge(kGrh, wc.byte_len - kGrh), back, wc.src_qp);
        must(d.post(qp) == 0, "send");
        must(node.post_recv(1, 0, kGrh + 4096, qp) == 0, "recv");
      }
    }
  });
  Node node;
  ibv_qp* qp = ready_ud(node, false);
  const Endpoint remote = get<Endpoint>(child.socket());
  auto handle = std::make_unique<Handle>(node, way_to(remote.gid));
  put(child.socket(), node.endpoint(qp));
  for (std::uint32_t size = 0; size <= 4096; size = size < 64 ? size + 1 : size * 2) {
    fill(node.bytes(0, size), size);
    ASSERT_EQ(node.post_recv(1, kArea, kGrh + 4096, qp), 0);
    ASSERT_EQ(Datagram(2, node.sge(0, size), *handle, remote.qpn).post(qp), 0);
    ibv_wc wc{};
    ASSERT_TRUE(until(
        [&] {
          sv::control_device(node.context);
          if (!node.poll(wc)) std::this_thread::yield();
        },
        [&] { return wc.opcode == IBV_WC_RECV; }));
    ASSERT_EQ(wc.byte_len, size + kGrh);
    ASSERT_EQ(std::memcmp(node.bytes(kArea + 8, 16).data(), remote.gid.raw, 16), 0);
    ASSERT_TRUE(holds(node.bytes(kArea + kGrh, size), size));
    ASSERT_LE(completions(node).size(), 1u);
  }
  child.kill_only();
  int sent = 0;
  ASSERT_TRUE(until(
      [&] {
        sv::control_device(node.context);
        ASSERT_EQ(Datagram(3, node.sge(0, 4096), *handle, remote.qpn).post(qp), 0);
        ++sent;
        for (const ibv_wc& wc : completions(node)) ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
      },
      [&] { return dropped(node, sv::Drop::peer_gone) >= 3; }));
  EXPECT_EQ(state_of(qp), IBV_QPS_RTS);
  ibv_ah_attr way = way_to(remote.gid);
  errno = 0;
  EXPECT_EQ(sv::create_ah(node.pd, &way), nullptr);
  EXPECT_NE(errno, 0);
  handle.reset();
  EXPECT_TRUE(until([&] { sv::control_device(node.context); },
                    [&] { return node.internals().peers.empty(); }));
}

class SoftverbsDatagramState : public testing::Test {
 protected:
  Node node_;
  ibv_qp* qp_ = make_ud(node_, false);

  int change(ibv_qp_state to, int mask = 0) {
    ibv_qp_attr attr{};
    attr.qp_state = to;
    attr.port_num = 1;
    attr.qkey = kQkey + 1;
    return sv::modify_qp(qp_, &attr, mask | IBV_QP_STATE);
  }
  std::uint32_t qkey() {
    ibv_qp_attr attr{};
    must(sv::query_qp(qp_, &attr, IBV_QP_QKEY, nullptr) == 0, "query_qp");
    return attr.qkey;
  }
};

TEST_F(SoftverbsDatagramState, LegalWaysOnly) {
  constexpr int kInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
  const auto only_these = [&](std::initializer_list<ibv_qp_state> legal) {
    const ibv_qp_state now = state_of(qp_);
    for (const ibv_qp_state to : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE})
      if (std::find(legal.begin(), legal.end(), to) == legal.end()) {
        EXPECT_EQ(change(to, to == IBV_QPS_INIT  ? kInit
                             : to == IBV_QPS_RTS ? IBV_QP_SQ_PSN
                                                 : 0),
                  EINVAL)
            << now << " to " << to;
      }
    EXPECT_EQ(state_of(qp_), now);
  };
  only_these({IBV_QPS_INIT});
  EXPECT_EQ(change(IBV_QPS_ERR), EINVAL);
  EXPECT_EQ(change(IBV_QPS_INIT, kInit & ~IBV_QP_QKEY), EINVAL);
  EXPECT_EQ(change(IBV_QPS_INIT, kInit & ~IBV_QP_PORT), EINVAL);
  EXPECT_EQ(change(IBV_QPS_INIT, kInit | IBV_QP_ACCESS_FLAGS), EINVAL);
  ASSERT_EQ(ud_init(qp_), 0);
  EXPECT_EQ(qkey(), kQkey);
  EXPECT_EQ(change(IBV_QPS_INIT, IBV_QP_QKEY), 0);
  EXPECT_EQ(qkey(), kQkey + 1);
  only_these({IBV_QPS_INIT, IBV_QPS_RTR});
  for (const int attribute : {IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_PATH_MTU, IBV_QP_RQ_PSN,
                              IBV_QP_MIN_RNR_TIMER, IBV_QP_MAX_DEST_RD_ATOMIC})
    EXPECT_EQ(change(IBV_QPS_RTR, attribute), EINVAL) << attribute;
  ASSERT_EQ(ud_rtr(qp_), 0);
  only_these({IBV_QPS_RTS});
  EXPECT_EQ(change(IBV_QPS_RTS), EINVAL);
  EXPECT_EQ(change(IBV_QPS_RTS, IBV_QP_SQ_PSN | IBV_QP_TIMEOUT), EINVAL);
  ASSERT_EQ(ud_rts(qp_, 0xfffffe), 0);
  only_these({IBV_QPS_RTS});
  EXPECT_EQ(change(IBV_QPS_RTS, IBV_QP_QKEY), 0);
  EXPECT_EQ(change(IBV_QPS_RTS, IBV_QP_MIN_RNR_TIMER), EINVAL);
  EXPECT_EQ(change(IBV_QPS_ERR), 0);
  only_these({});
  EXPECT_EQ(change(IBV_QPS_RESET), 0);
  only_these({IBV_QPS_INIT});
}

TEST_F(SoftverbsDatagramState, SendingNeedsRtsAndCounts) {
  const Handle self(node_, node_);
  const auto post = [&] { return Datagram(1, node_.sge(0, 8), self, qp_->qp_num).post(qp_); };
  EXPECT_EQ(post(), EINVAL);
  EXPECT_EQ(node_.post_recv(1, 0, 64, qp_), EINVAL);
  ASSERT_EQ(ud_init(qp_), 0);
  EXPECT_EQ(post(), EINVAL);
  EXPECT_EQ(node_.post_recv(1, 0, 64, qp_), 0);
  ASSERT_EQ(ud_rtr(qp_), 0);
  EXPECT_EQ(post(), EINVAL);
  ASSERT_EQ(ud_rts(qp_, 0xffffff), 0);
  EXPECT_EQ(post(), 0);
  ibv_qp_attr attr{};
  ASSERT_EQ(sv::query_qp(qp_, &attr, IBV_QP_SQ_PSN, nullptr), 0);
  EXPECT_EQ(attr.sq_psn, 0u);
  EXPECT_EQ(completions(node_).size(), 2u);
}

TEST_F(SoftverbsDatagramState, ErrFlushesAndResetForgets) {
  const Handle self(node_, node_);
  ibv_qp* sender = ready_ud(node_, false);
  ibv_qp* shared = ready_ud(node_, true);
  ASSERT_TRUE(ud_init(qp_) == 0 && ud_rtr(qp_) == 0 && ud_rts(qp_) == 0);
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(node_.post_recv(i, kArea, 256, qp_), 0);
  ASSERT_EQ(node_.post_recv(9, kArea, 256), 0);
  // One is in the lane when the state changes, and comes too late.
  ASSERT_EQ(Datagram(4, node_.sge(0, 8), self, qp_->qp_num, kQkey, 0).post(sender), 0);
  node_.fail(qp_);
  ASSERT_EQ(Datagram(5, node_.sge(0, 8), self, qp_->qp_num, kQkey, 0).post(qp_), 0);
  ASSERT_EQ(node_.post_recv(6, kArea, 256, qp_), 0);
  const std::vector<ibv_wc> flushed = completions(node_);
  ASSERT_EQ(flushed.size(), 5u);
  const std::uint64_t expected[] = {0, 1, 2, 5, 6};
  for (std::size_t i = 0; i < flushed.size(); ++i) {
    EXPECT_EQ(flushed[i].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(flushed[i].wr_id, expected[i]);
    EXPECT_EQ(flushed[i].qp_num, qp_->qp_num);
  }
  EXPECT_EQ(dropped(node_, sv::Drop::no_queue_pair), 1u);
  node_.fail(shared);
  EXPECT_TRUE(completions(node_).empty());
  EXPECT_EQ(next_event(node_).type, IBV_EVENT_QP_LAST_WQE_REACHED);
  // From the start.
  ASSERT_EQ(change(IBV_QPS_RESET), 0);
  ASSERT_TRUE(ud_init(qp_) == 0 && ud_rtr(qp_) == 0 && ud_rts(qp_) == 0);
  ASSERT_EQ(node_.post_recv(7, kArea, 256, qp_), 0);
  ASSERT_EQ(change(IBV_QPS_RESET), 0);
  EXPECT_TRUE(completions(node_).empty());
  ASSERT_TRUE(ud_init(qp_) == 0 && ud_rtr(qp_) == 0 && ud_rts(qp_) == 0);
  ASSERT_EQ(node_.post_recv(8, kArea, 256, qp_), 0);
  ASSERT_EQ(Datagram(4, node_.sge(0, 8), self, qp_->qp_num, kQkey, 0).post(sender), 0);
  const std::vector<ibv_wc> received = completions(node_);
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].wr_id, 8u);
  // Destroyed with a datagram in flight to it.
  ASSERT_EQ(Datagram(4, node_.sge(0, 8), self, qp_->qp_num, kQkey, 0).post(sender), 0);
  node_.destroy(qp_);
  EXPECT_TRUE(completions(node_).empty());
  EXPECT_EQ(dropped(node_, sv::Drop::no_queue_pair), 2u);
}

}  // namespace softverbs_test::datagram
