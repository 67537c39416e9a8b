// A process that is killed during datagrams, atomics or window operations. It uses verbs, not an
// engine.
#pragma once

#include <signal.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/random.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/peer_process.h"
#include "softverbs/ud_link.h"

namespace verbs_kill_test {

using namespace softverbs_test;  // NOLINT: a test's helpers

/// What a victim does when it dies.
enum class Kind : std::uint32_t { datagrams, mapped_atomics, private_atomics, windows };
inline constexpr std::size_t kKinds = 4;

// Offsets in the memory of the survivor and of a victim.
inline constexpr std::size_t kCounterAt = 4096;
inline constexpr std::size_t kWindowAt = 64 * 1024;
inline constexpr std::uint32_t kWindowBytes = 64 * 1024;
inline constexpr std::size_t kReceivesAt = 256 * 1024;
inline constexpr std::size_t kSlot = 1024;
inline constexpr std::uint64_t kReceives = 64;
inline constexpr std::size_t kScratchAt = 512 * 1024;

/// The page that the victim shares with the survivor.
struct Page {
  std::atomic<std::uint32_t> inside{0};      ///< it is inside a verb of its kind
  std::atomic<std::uint64_t> operations{0};  ///< completed operations of its kind
  std::atomic<std::uint64_t> added{0};       ///< completed additions to the survivor's counter
  std::atomic<std::uint64_t> struck_at{0};   ///< ns of CLOCK_MONOTONIC
  std::atomic<std::uint32_t> key{0};         ///< of the survivor's window; 0: none
};

/// The survivor's orders, sent before the victim begins.
struct Terms {
  std::uint32_t datagrams_to;
  std::uint64_t operations;  ///< before the strike
  std::uint32_t delay_ns;    ///< delay of the strike after those
  std::uint64_t seed;
};

inline std::uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(t.tv_nsec);
}

inline NodeOptions options_of(Kind kind) {
  NodeOptions options;
  options.memory = 1u << 20;
  options.private_memory = kind == Kind::private_atomics;
  return options;
}

inline int reset(Node& node, ibv_qp* qp, const Endpoint& peer) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  int error = EBUSY;
  for (int i = 0; error == EBUSY && i < 1'000'000; ++i)
    error = sv::modify_qp(qp, &attr, IBV_QP_STATE);
  return error != 0 ? error : node.init(qp) + node.rtr(qp, peer) + node.rts(qp);
}

class Victim {
 public:
  Victim(int socket, Kind kind, Page& page)
      : kind_(kind),
        page_(page),
        node_(options_of(kind)),
        qp_(node_.make_qp()),
        owner_(meet(node_, qp_, socket)),
        ud_(ready_ud(node_, true)) {
    meet(node_, node_.make_qp(), socket);  // for the survivor's own operations
    put(socket, ud_->qp_num);
    terms_ = get<Terms>(socket);
    dice_ = spinwire::base::Random(terms_.seed);
    way_ = std::make_unique<Handle>(node_, way_to(owner_.endpoint.gid));
    for (std::uint64_t i = 0; i < kReceives; ++i)
      must(node_.post_recv(i, kReceivesAt + i * kSlot, kSlot) == 0, "post_recv");
  }

  /// Runs until it is killed.
  [[noreturn]] void run() {
    for (std::uint64_t n = 0;; ++n) {
      act(n);
      page_.operations.store(n + 1, std::memory_order_relaxed);
      if (n == terms_.operations) arm();
      if (n % 16 != 0) continue;
      sv::control_device(node_.context);
      poll();
    }
  }

 private:
  /// The kernel kills the process at any instruction.
  void arm() const {
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGKILL;
    timer_t timer{};
    itimerspec when{};
    when.it_value.tv_nsec = terms_.delay_ns + 1;
    page_.struck_at = now_ns() + terms_.delay_ns;
    must(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 &&
             timer_settime(timer, 0, &when, nullptr) == 0,
         "timer");
  }

  void act(std::uint64_t n) {
    switch (kind_) {
      case Kind::datagrams:
        return send_datagram(n);
      case Kind::mapped_atomics:
      case Kind::private_atomics:
        return add();
      case Kind::windows:
        return use_windows();
    }
  }

  /// Posts a work request of the victim's kind and waits for its completion.
  ibv_wc_status run_inside(ibv_send_wr& wr, ibv_qp* qp) {
    page_.inside.store(1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    ibv_send_wr* bad = nullptr;
    must(ibv_post_send(qp, &wr, &bad) == 0, "post_send");
    done_ = false;
    for (int i = 0; !done_; ++i) {
      poll();
      if (i % 1024 == 1023) sv::control_device(node_.context);
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);
    page_.inside.store(0, std::memory_order_relaxed);
    return status_;
  }

  void send_datagram(std::uint64_t n) {
    const auto size = static_cast<std::uint32_t>(8 + 8 * dice_.below(48));
    const std::uint64_t key = terms_.seed ^ n;
    std::memcpy(&node_.memory[kScratchAt], &key, sizeof key);
    fill(node_.bytes(kScratchAt + sizeof key, size), key);
    Datagram d(1, node_.sge(kScratchAt, size + 8), *way_, terms_.datagrams_to);
    must(run_inside(d.wr, ud_) == IBV_WC_SUCCESS, "a datagram fails");
  }

  void add() {
    Send send(1, node_.sge(kScratchAt, 8), IBV_WR_ATOMIC_FETCH_AND_ADD);
    send.wr.wr.atomic = {owner_.memory + kCounterAt, 1, 0, owner_.key};
    must(run_inside(send.wr, qp_) == IBV_WC_SUCCESS, "an atomic fails");
    page_.added.fetch_add(1, std::memory_order_relaxed);
  }

  /// Writes through the survivor's window while it is open, and binds and invalidates a window of
  /// its own.
  void use_windows() {
    const std::uint32_t key = page_.key.load(std::memory_order_acquire);
    if (key != 0) {
      Send send(1, node_.sge(kScratchAt, kWindowBytes), IBV_WR_RDMA_WRITE);
      send.to(owner_.memory + kWindowAt, key);
      const ibv_wc_status status = run_inside(send.wr, qp_);
      // A refused write also fails the survivor's queue pair, which then no longer responds.
      must(status == IBV_WC_SUCCESS || status == IBV_WC_REM_ACCESS_ERR ||
               status == IBV_WC_RETRY_EXC_ERR,
           ibv_wc_status_str(status));
      if (status != IBV_WC_SUCCESS) must(reset(node_, qp_, owner_.endpoint) == 0, "reset");
    }
    if (mw_ == nullptr) mw_ = sv::alloc_mw(node_.pd, IBV_MW_TYPE_2);
    ibv_send_wr bind{};
    bind.wr_id = 1;
    bind.opcode = IBV_WR_BIND_MW;
    bind.send_flags = IBV_SEND_SIGNALED;
    mw_->rkey = ibv_inc_rkey(mw_->rkey);
    bind.bind_mw = {mw_, mw_->rkey, {node_.mr, node_.address(0), 64, IBV_ACCESS_REMOTE_READ}};
    must(run_inside(bind, qp_) == IBV_WC_SUCCESS, "a bind fails");
    ibv_send_wr invalidate{};
    invalidate.wr_id = 1;
    invalidate.opcode = IBV_WR_LOCAL_INV;
    invalidate.send_flags = IBV_SEND_SIGNALED;
    invalidate.invalidate_rkey = mw_->rkey;
    must(run_inside(invalidate, qp_) == IBV_WC_SUCCESS, "an invalidation fails");
  }

  void poll() {
    ibv_wc wc{};
    if (!node_.poll(wc)) return;
    if (wc.opcode == IBV_WC_RECV && wc.status == IBV_WC_SUCCESS) {
      must(node_.post_recv(wc.wr_id, kReceivesAt + wc.wr_id * kSlot, kSlot) == 0, "post_recv");
      return;
    }
    done_ = true;
    status_ = wc.status;
  }

  Kind kind_;
  Page& page_;
  Node node_;
  ibv_qp* qp_;
  Card owner_;
  ibv_qp* ud_;
  Terms terms_{};
  spinwire::base::Random dice_{0};
  std::unique_ptr<Handle> way_;
  ibv_mw* mw_ = nullptr;
  bool done_ = false;
  ibv_wc_status status_{};
};

}  // namespace verbs_kill_test
