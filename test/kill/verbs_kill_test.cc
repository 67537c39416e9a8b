// Peers die by SIGKILL during datagrams, atomics (also while they hold a lock) and window
// operations. The survivor's work must end once and soon, counters must be right, and nothing may
// stay behind.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <optional>
#include <string>

#include "kill/verbs_victim.h"
#include "own_process.h"
#include "softverbs/memory/atomic_lock.h"

namespace verbs_kill_test {
namespace {

constexpr std::uint64_t kDetectionMax = 60'000'000'000;  // ns; a loaded machine's
constexpr std::uint64_t kSecret = 0x5ec2e75ec2e7;

struct Held {
  std::size_t files = 0, mappings = 0, lanes = 0, keys = 0, objects = 0;
  friend bool operator==(const Held&, const Held&) = default;
};
Held held_by(const Node& node) {
  Held held;
  held.files = own_process::open_descriptors();
  held.mappings = own_process::mappings("memfd:spinwire");
  const sv::Context& c = node.internals();
  for (const sv::LaneEntry& entry : c.segment->directory)
    held.lanes += sv::lane_state(entry.state.load()) != sv::LaneState::free ? 1 : 0;
  for (std::size_t i = 0; i < c.regions.slots.size(); ++i)
    held.keys += c.segment->regions[i].key.load() != 0 ? 1 : 0;
  held.objects = c.objects_open;
  return held;
}

/// The results for victims of one kind.
struct Tally {
  std::uint32_t killed = 0, inside = 0, holders = 0;
  std::uint64_t slowest = 0;  ///< ns from a death to its detection
  std::uint64_t succeeded = 0, failed = 0, datagrams = 0, revocations = 0;
};

/// A node that victims connect to, and a friend in the same process whose traffic goes on.
class Survivor {
 public:
  explicit Survivor(Kind kind)
      : kind_(kind), node_(options_of(kind)), friend_(NodeOptions{}), ud_(ready_ud(node_, false)) {
    from_friend_ = friend_.make_qp();
    connect(friend_, from_friend_, node_, node_.make_qp());
    for (std::uint64_t i = 0; i < 8; ++i) receive(nullptr, i);
    for (std::uint64_t i = 8; i < kReceives; ++i) receive(ud_, i);
  }

  /// One victim's life and death.
  void round(std::uint64_t seed, Tally& tally) {
    spinwire::base::Random dice(seed);
    void* at =
        mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(at, MAP_FAILED);
    page_ = new (at) Page;
    Child child([this](int socket) { Victim(socket, kind_, *page_).run(); });
    begin(child, Terms{ud_->qp_num, dice.below(200),
                       static_cast<std::uint32_t>(dice.below(100'000)), seed});
    ASSERT_TRUE(turn_until([&] { return died(child); })) << "the victim does not get to die";
    const bool noticed = turn_until([&] { return peer_->gone && outstanding_.empty(); });
    EXPECT_TRUE(noticed) << outstanding_.size() << " operations do not end";
    const std::uint64_t took = now_ns() - std::min(now_ns(), page_->struck_at.load());
    EXPECT_LT(took, kDetectionMax);
    count(child, took, tally);
    paused_ = false;
    finish();
    munmap(at, sizeof(Page));
  }

  /// The resources without victims. Also checks the counter.
  [[nodiscard]] Held rest() {
    EXPECT_TRUE(turn_until([&] { return node_.internals().peers.size() == 1 && !friend_busy_; }));
    return held_by(node_);
  }
  [[nodiscard]] std::uint64_t messages() const { return messages_; }
  [[nodiscard]] bool sound() const { return faults_ == 0; }

 private:
  void receive(ibv_qp* qp, std::uint64_t slot) {
    must(node_.post_recv(slot, kReceivesAt + slot * kSlot, kSlot, qp) == 0, "post_recv");
  }
  static bool died(const Child& child) {
    siginfo_t info{};
    if (waitid(P_PID, static_cast<id_t>(child.pid()), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0)
      return false;
    EXPECT_EQ(info.si_code, CLD_KILLED) << "the victim ended by itself";
    return true;
  }
  template <typename Done>
  bool turn_until(Done done) {
    const std::uint64_t deadline = now_ns() + kDetectionMax;
    while (!done()) {
      for (int i = 0; i < 8; ++i) turn();
      if (now_ns() > deadline) return false;
    }
    return true;
  }

  void begin(const Child& child, const Terms& terms) {
    inbound_ = node_.make_qp();
    meet(node_, inbound_, child.socket());
    outbound_ = node_.make_qp();
    theirs_ = meet(node_, outbound_, child.socket());
    their_ud_ = get<std::uint32_t>(child.socket());
    way_.emplace(node_, way_to(theirs_.endpoint.gid));
    peer_ = node_.internals().peers.back().get();
    sv::control_device(node_.context);
    if (kind_ == Kind::windows) mw_ = sv::alloc_mw(node_.pd, IBV_MW_TYPE_2);
    succeeded_ = failed_ = datagrams_ = revocations_ = 0;
    // An active friend would take a dead holder's lock before the test sees its owner.
    paused_ = terms.seed % 2 != 0;
    put(child.socket(), terms);
  }

  void turn() {
    sv::control_device(node_.context);
    sv::control_device(friend_.context);
    ibv_wc wc{};
    for (int i = 0; i < 4 && node_.poll(wc); ++i) take(wc);
    ask_friend();
    if (peer_ == nullptr || peer_->gone) return;
    if (outstanding_.size() < 6) reach();
    if (mw_ != nullptr) turn_window();
  }

  /// The survivor's operations on the victim's memory, and datagrams to it.
  void reach() {
    const std::uint64_t id = next_id_++;
    outstanding_.emplace(id, true);
    const ibv_sge here = node_.sge(kScratchAt, 8);
    const std::uint64_t there = theirs_.memory + kScratchAt + 256 * 1024;
    switch (id % 4) {
      case 0:
        return must(Send(id, here, IBV_WR_RDMA_WRITE).to(there, theirs_.key).post(outbound_) == 0,
                    "write");
      case 1:
        return must(Send(id, here, IBV_WR_RDMA_READ).to(there, theirs_.key).post(outbound_) == 0,
                    "read");
      case 2: {
        Send add(id, here, IBV_WR_ATOMIC_FETCH_AND_ADD);
        add.wr.wr.atomic = {there, 1, 0, theirs_.key};
        return must(add.post(outbound_) == 0, "add");
      }
      default:
        return must(Datagram(id, here, *way_, their_ud_).post(ud_) == 0, "datagram");
    }
  }

  /// Opens the window to the victim and closes it; a closed window must not be written.
  void turn_window() {
    if (window_id_ != 0) return;
    ibv_send_wr wr{};
    wr.wr_id = window_id_ = next_id_++;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (bound_) {
      if (++window_turns_ % 16 != 0) return void(window_id_ = 0);
      wr.opcode = IBV_WR_LOCAL_INV;
      wr.invalidate_rkey = mw_->rkey;
    } else {
      check_window();
      wr.opcode = IBV_WR_BIND_MW;
      mw_->rkey = ibv_inc_rkey(mw_->rkey);
      wr.bind_mw = {mw_,
                    mw_->rkey,
                    {node_.mr, node_.address(kWindowAt), kWindowBytes, IBV_ACCESS_REMOTE_WRITE}};
    }
    ibv_send_wr* bad = nullptr;
    must(ibv_post_send(inbound_, &wr, &bad) == 0, "window");
  }
  void check_window() {
    if (!stamped_) return;
    if (!holds(node_.bytes(kWindowAt, kWindowBytes), kSecret)) ++faults_;
    stamped_ = false;
  }
  void window_done(ibv_wc_status status) {
    window_id_ = 0;
    if (status != IBV_WC_SUCCESS) return;
    bound_ = !bound_;
    page_->key.store(bound_ ? mw_->rkey : 0, std::memory_order_release);
    if (bound_) return;
    ++revocations_;
    fill(node_.bytes(kWindowAt, kWindowBytes), kSecret);
    stamped_ = true;
  }

  void take(const ibv_wc& wc) {
    if (wc.wr_id < kReceives) return on_message(wc);
    if (wc.wr_id == window_id_) return window_done(wc.status);
    if (outstanding_.erase(wc.wr_id) != 1) ++faults_;  // once only
    ++(wc.status == IBV_WC_SUCCESS ? succeeded_ : failed_);
  }
  void on_message(const ibv_wc& wc) {
    if (wc.status != IBV_WC_SUCCESS) ++faults_;
    const std::size_t at = kReceivesAt + wc.wr_id * kSlot;
    std::uint64_t word = 0;
    if (wc.qp_num != ud_->qp_num) {
      std::memcpy(&word, &node_.memory[at], sizeof word);
      if (word != messages_++) ++faults_;
      friend_busy_ = false;
      return receive(nullptr, wc.wr_id);
    }
    // A datagram arrives whole, or not at all.
    std::memcpy(&word, &node_.memory[at + kGrh], sizeof word);
    if (!holds(node_.bytes(at + kGrh + 8, wc.byte_len - kGrh - 8), word)) ++faults_;
    ++datagrams_;
    receive(ud_, wc.wr_id);
  }

  /// Sends the friend's message and its addition to the same counter.
  void ask_friend() {
    ibv_wc wc{};
    while (friend_.poll(wc)) {
      if (wc.status != IBV_WC_SUCCESS) ++faults_;
      --friend_owes_;
    }
    if (paused_ || friend_busy_ || friend_owes_ != 0) return;
    friend_busy_ = true;
    friend_owes_ = 2;
    std::memcpy(&friend_.memory[0], &messages_, sizeof messages_);
    Send add(2, friend_.sge(64, 8), IBV_WR_ATOMIC_FETCH_AND_ADD);
    add.wr.wr.atomic = {node_.address(kCounterAt), 1, 0, node_.mr->rkey};
    must(Send(1, friend_.sge(0, 8)).post(from_friend_) == 0 && add.post(from_friend_) == 0,
         "friend");
    ++friend_added_;
  }

  void count(const Child& child, std::uint64_t took, Tally& tally) {
    ++tally.killed;
    tally.inside += page_->inside.load();
    tally.slowest = std::max(tally.slowest, took);
    tally.succeeded += succeeded_;
    tally.failed += failed_;
    tally.datagrams += datagrams_;
    tally.revocations += revocations_;
    const auto* locks = reinterpret_cast<const sv::AtomicLock*>(node_.internals().locks->data());
    const std::uint64_t holder = locks[node_.address(kCounterAt) / 8 % sv::kAtomicLocks].holder;
    tally.holders +=
        static_cast<std::uint32_t>(holder) == static_cast<std::uint32_t>(child.pid()) ? 1 : 0;
  }

  void finish() {
    // The friend goes on with the lock that the victim may have held.
    const std::uint64_t before = messages_;
    EXPECT_TRUE(turn_until([&] { return messages_ > before + 2; }));
    paused_ = true;
    EXPECT_TRUE(turn_until([&] { return friend_owes_ == 0 && !friend_busy_; }));
    if (mw_ != nullptr) {
      EXPECT_TRUE(turn_until([&] { return sv::dealloc_mw(mw_) == 0; }));
      check_window();
    }
    mw_ = nullptr;
    bound_ = false;
    window_id_ = 0;
    way_.reset();
    peer_ = nullptr;
    node_.destroy(inbound_);
    node_.destroy(outbound_);
    // A dying victim's last addition may or may not have taken place; all others have.
    std::uint64_t counter = 0;
    std::memcpy(&counter, &node_.memory[kCounterAt], sizeof counter);
    const std::uint64_t sure = friend_added_ + victims_added_ + page_->added.load();
    EXPECT_GE(counter, sure);
    EXPECT_LE(counter, sure + 1);
    victims_added_ = counter - friend_added_;
  }

  Kind kind_;
  Node node_;
  Node friend_;
  ibv_qp* ud_;
  ibv_qp* from_friend_ = nullptr;
  ibv_qp* inbound_ = nullptr;   ///< the victim's queue pair to us
  ibv_qp* outbound_ = nullptr;  ///< ours to the victim
  sv::Peer* peer_ = nullptr;
  Card theirs_{};
  std::uint32_t their_ud_ = 0;
  std::optional<Handle> way_;
  Page* page_ = nullptr;
  ibv_mw* mw_ = nullptr;
  bool bound_ = false, stamped_ = false, friend_busy_ = false, paused_ = false;
  std::uint32_t window_turns_ = 0;
  std::uint64_t window_id_ = 0, next_id_ = kReceives;
  std::map<std::uint64_t, bool> outstanding_;
  std::uint64_t messages_ = 0, friend_added_ = 0, friend_owes_ = 0, victims_added_ = 0;
  std::uint64_t succeeded_ = 0, failed_ = 0, datagrams_ = 0, revocations_ = 0, faults_ = 0;
};

/// Runs victims of each kind, one after another.
void kill(std::uint32_t of_each) {
  constexpr std::array<const char*, kKinds> kNames = {"datagrams", "mapped atomics",
                                                      "private atomics", "windows"};
  const bool may_look = children_may_look();
  for (std::size_t i = 0; i < kKinds; ++i) {
    const auto kind = static_cast<Kind>(i);
    if (kind == Kind::private_atomics && !may_look) continue;  // kernel.yama.ptrace_scope
    SCOPED_TRACE(kNames[i]);
    Survivor survivor(kind);
    Tally tally;
    survivor.round(1, tally);  // maps everything that stays mapped
    const Held before = survivor.rest();
    tally = {};
    // Of many victims a part has to die where it was to die; on a busy machine it takes more of
    // them.
    const auto struck = [&] {
      return of_each < 50 || (tally.inside >= of_each / 10 && tally.succeeded > of_each &&
                              (kind != Kind::datagrams || tally.datagrams > of_each) &&
                              (kind != Kind::windows || tally.revocations > of_each) &&
                              (kind != Kind::private_atomics || tally.holders > 0));
    };
    for (std::uint64_t n = 0;
         (n < of_each || (n < 20 * of_each && !struck())) && !testing::Test::HasFailure(); ++n)
      survivor.round(100 + n, tally);
    EXPECT_EQ(survivor.rest(), before);
    EXPECT_TRUE(survivor.sound());
    std::printf(
        "%-15s %3u killed, %3u in the midst of it (%u held the lock), noticed within %.1f ms; "
        "ours: %llu succeeded, %llu failed; %llu datagrams, %llu windows taken back\n",
        kNames[i], tally.killed, tally.inside, tally.holders,
        static_cast<double>(tally.slowest) / 1e6, static_cast<unsigned long long>(tally.succeeded),
        static_cast<unsigned long long>(tally.failed),
        static_cast<unsigned long long>(tally.datagrams),
        static_cast<unsigned long long>(tally.revocations));
    EXPECT_GE(tally.killed, of_each);
    if (of_each < 50) continue;
    EXPECT_GE(tally.inside, of_each / 10) << "few were struck in what they were to be struck in";
    EXPECT_GT(tally.succeeded, of_each);
    EXPECT_TRUE(kind != Kind::datagrams || tally.datagrams > of_each);
    EXPECT_TRUE(kind != Kind::windows || tally.revocations > of_each);
    EXPECT_TRUE(kind != Kind::private_atomics || tally.holders > 0);
  }
}

TEST(KillVerbs, AFewOfEachKind) { kill(4); }
TEST(SlowKillVerbs, TwoHundred) { kill(50); }

}  // namespace
}  // namespace verbs_kill_test
