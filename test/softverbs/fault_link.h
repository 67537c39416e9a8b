// Test helpers: devices with a fault plan, and a time that the test moves.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "softverbs/faults/fault_plan.h"
#include "softverbs/rc_link.h"
#include "softverbs/ud_link.h"

namespace softverbs_test {

inline constexpr std::uint8_t kFaultRnrTimer = 14;  // 1.28 ms
inline constexpr std::uint64_t kFaultRnrNs = 1'280'000;
inline constexpr std::uint8_t kFaultTimeout = 8;
inline constexpr std::uint64_t kFaultTimeoutNs = 4096u << 8;
inline constexpr ConnectOptions kFaultConnection{.rnr_timer = kFaultRnrTimer,
                                                 .timeout = kFaultTimeout};

inline NodeOptions timed(const std::uint64_t* clock, const sv::FaultPlan* plan = nullptr) {
  NodeOptions o;
  o.clock = spinwire::Clock::manual(clock);
  o.faults = plan;
  o.srq_depth = 512;
  o.send_depth = 256;
  return o;
}

/// Connected queue pairs; end `a` has the plan.
struct FaultyLink {
  std::uint64_t now = 1'000'000'000;
  sv::FaultPlan plan;
  Link link;
  Node& a = link.a;
  Node& b = link.b;
  explicit FaultyLink(const sv::FaultPlan& p, const ConnectOptions& how = kFaultConnection)
      : plan(p), link(timed(&now, &plan), timed(&now), how) {}
  /// Polls until nothing more happens without time passing.
  void settle() { link.steps(2); }
  void pass(std::uint64_t ns) {
    now += ns;
    settle();
  }
  [[nodiscard]] sv::FaultStatistics statistics() const { return sv::fault_statistics(a.context); }
  /// Posts receives of 4 KiB, numbered by their place in b's memory.
  void receive(std::uint64_t first, std::uint64_t count) {
    for (std::uint64_t i = first; i < first + count; ++i)
      must(b.post_recv(i, i % 512 * 4096, 4096) == 0, "post_recv");
  }
  /// Sends a message whose bytes follow from `id`.
  int send(std::uint64_t id, std::uint32_t length = 32, unsigned flags = IBV_SEND_SIGNALED) {
    const std::size_t at = id % 512 * 4096;
    fill(a.bytes(at, length), id + 1);
    return Send(id, a.sge(at, length), IBV_WR_SEND, flags).post(link.qa);
  }
  [[nodiscard]] bool arrived(std::uint64_t receive, std::uint64_t id, std::uint32_t length = 32) {
    return holds(b.bytes(receive % 512 * 4096, length), id + 1);
  }
};

/// Datagrams from `a`, which has the plan, to `b`. Each carries a number.
struct FaultyDatagrams {
  std::uint64_t now = 1'000'000'000;
  sv::FaultPlan plan;
  Node a;
  Node b;
  ibv_qp* qa;
  ibv_qp* qb;
  Handle way;
  std::vector<std::uint64_t> arrived;  ///< numbers, in the order of arrival
  std::vector<std::uint64_t> when;     ///< the time of each arrival
  std::vector<ibv_wc> sent;            ///< completions of sends

  explicit FaultyDatagrams(const sv::FaultPlan& p)
      : plan(p),
        a(timed(&now, &plan)),
        b(timed(&now)),
        qa(ready_ud(a, false)),
        qb(ready_ud(b, true)),
        way(a, b) {
    for (std::uint64_t i = 0; i < 512; ++i) receive(i);
  }
  void receive(std::uint64_t slot) { must(b.post_recv(slot, slot * 4096, 4096) == 0, "recv"); }
  int send(std::uint64_t number, std::uint32_t length = 8) {
    std::memcpy(a.memory.data(), &number, sizeof number);
    return Datagram(number, a.sge(0, length), way, qb->qp_num).post(qa);
  }
  void poll() {
    ibv_wc wc{};
    while (a.poll(wc)) sent.push_back(wc);
    while (b.poll(wc)) {
      std::uint64_t number = 0;
      std::memcpy(&number, &b.memory[wc.wr_id * 4096 + kGrh], sizeof number);
      arrived.push_back(number);
      when.push_back(now);
      receive(wc.wr_id);
    }
    (void)a.poll(wc);
  }
  void send_and_poll(std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      must(send(i) == 0, "send");
      poll();
    }
  }
  void pass(std::uint64_t ns) {
    now += ns;
    poll();
  }
  [[nodiscard]] sv::FaultStatistics statistics() const { return sv::fault_statistics(a.context); }
};

}  // namespace softverbs_test
