// Test helpers: embedded devices and connected queue pairs, through plain ibv_* calls.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/random.h"
#include "base/shared_memory.h"
#include "softverbs/context_gid.h"
#include "softverbs/faults/fault_plan.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/softverbs_device.h"
#include "spinwire/clock.h"

namespace softverbs_test {

namespace sv = spinwire::softverbs;

struct NodeOptions {
  std::uint32_t srq_depth = 64;  ///< 0: a receive queue per queue pair
  std::uint32_t recv_depth = 64;
  std::uint32_t send_depth = 64;
  std::uint32_t max_inline = 256;
  std::uint32_t sges = 4;
  int cq_entries = 1024;
  std::size_t memory = 4u << 20;
  bool private_memory = false;
  /// Private memory is reached; none: the device decides.
  std::optional<sv::PageTrust> page_trust = sv::PageTrust::all;
  bool signal_all = false;
  spinwire::Clock clock = spinwire::Clock::real();
  sv::Driving driving = sv::Driving::by_user;
  const sv::FaultPlan* faults = nullptr;
};

/// What a queue pair needs to know of its peer.
struct Endpoint {
  ibv_gid gid;
  std::uint32_t qpn;
  std::uint32_t psn;
};

inline void must(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

/// A context with a PD, a CQ, optionally an SRQ, and one registered range of memory.
class Node {
 public:
  explicit Node(const NodeOptions& options = {}) : options_(options) {
    auto opened = sv::open_device(options.clock, options.driving, options.faults);
    must(opened.has_value(), "open_device");
    context = *opened;
    if (options.page_trust) internals().page_trust = *options.page_trust;
    pd = sv::alloc_pd(context);
    cq = sv::create_cq(context, options.cq_entries);
    if (options.srq_depth != 0) {
      ibv_srq_init_attr attr{};
      attr.attr.max_wr = options.srq_depth;
      attr.attr.max_sge = options.sges;
      srq = sv::create_srq(pd, &attr);
      must(srq != nullptr, "create_srq");
    }
    if (options.private_memory) {
      heap_ = std::make_unique<std::byte[]>(options.memory);
      memory = {heap_.get(), options.memory};
    } else {
      auto shared = spinwire::base::SharedMemory::create(options.memory);
      must(shared.has_value(), "SharedMemory");
      shared_ = std::move(*shared);
      memory = {shared_.data(), options.memory};
    }
    mr = sv::reg_mr(pd, memory.data(), memory.size(), kAllAccess);
    must(pd != nullptr && cq != nullptr && mr != nullptr, "objects");
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  ~Node() {
    for (ibv_qp* qp : qps) sv::destroy_qp(qp);
    if (mr != nullptr) sv::dereg_mr(mr);
    if (srq != nullptr) sv::destroy_srq(srq);
    sv::destroy_cq(cq);
    sv::dealloc_pd(pd);
    sv::close_device(context);
  }

  static constexpr int kAllAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                                    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC |
                                    IBV_ACCESS_MW_BIND;

  /// Uses the node's own PD, CQ and SRQ.
  ibv_qp* make_qp() {
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.srq = srq;
    init.qp_type = IBV_QPT_RC;
    init.sq_sig_all = options_.signal_all ? 1 : 0;
    init.cap.max_send_wr = options_.send_depth;
    init.cap.max_recv_wr = options_.recv_depth;
    init.cap.max_send_sge = init.cap.max_recv_sge = options_.sges;
    init.cap.max_inline_data = options_.max_inline;
    ibv_qp* qp = sv::create_qp(pd, &init);
    must(qp != nullptr, "create_qp");
    qps.push_back(qp);
    return qp;
  }

  [[nodiscard]] Endpoint endpoint(const ibv_qp* qp) const {
    Endpoint e{};
    sv::query_gid(context, 1, 0, &e.gid);
    e.qpn = qp->qp_num;
    e.psn = 0xffff00 - (qp->qp_num & 0x7f);  // each its own, and wraps soon
    return e;
  }

  int init(ibv_qp* qp, unsigned access = kAllAccess) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = access;
    return sv::modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  }
  int rtr(ibv_qp* qp, const Endpoint& remote, std::uint8_t rnr_timer = 1) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_4096;
    attr.dest_qp_num = remote.qpn;
    attr.rq_psn = remote.psn;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = rnr_timer;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = remote.gid;
    return sv::modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                             IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  }
  int rts(ibv_qp* qp, std::uint8_t timeout = 4, std::uint8_t retries = 3,
          std::uint8_t rnr_retry = 7) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = timeout;
    attr.retry_cnt = retries;
    attr.rnr_retry = rnr_retry;
    attr.sq_psn = endpoint(qp).psn;
    attr.max_rd_atomic = 1;
    return sv::modify_qp(qp, &attr,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  }

  void destroy(ibv_qp* qp) {
    must(sv::destroy_qp(qp) == 0, "destroy_qp");
    std::erase(qps, qp);
  }
  void fail(ibv_qp* qp) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    const int error = sv::modify_qp(qp, &attr, IBV_QP_STATE);
    must(error == 0 || error == EBUSY, "ERR");  // EBUSY: done, but a peer still uses it
  }
  [[nodiscard]] sv::Context& internals() const { return sv::context_of(context); }
  [[nodiscard]] std::uint64_t address(std::size_t offset) const {
    return reinterpret_cast<std::uint64_t>(memory.data() + offset);
  }
  [[nodiscard]] std::span<std::byte> bytes(std::size_t offset, std::size_t length) const {
    return memory.subspan(offset, length);
  }

  [[nodiscard]] ibv_sge sge(std::size_t offset, std::uint32_t length) const {
    return {reinterpret_cast<std::uint64_t>(memory.data() + offset), length, mr->lkey};
  }
  int post_recv(std::uint64_t id, std::size_t offset, std::uint32_t length, ibv_qp* qp = nullptr) {
    ibv_sge s = sge(offset, length);
    ibv_recv_wr wr{id, nullptr, &s, 1};
    ibv_recv_wr* bad = nullptr;
    return qp != nullptr ? ibv_post_recv(qp, &wr, &bad) : ibv_post_srq_recv(srq, &wr, &bad);
  }
  /// Takes one completion, if any.
  bool poll(ibv_wc& wc) const { return ibv_poll_cq(cq, 1, &wc) == 1; }

  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;
  ibv_srq* srq = nullptr;
  ibv_mr* mr = nullptr;
  std::span<std::byte> memory;
  std::vector<ibv_qp*> qps;

 private:
  NodeOptions options_;
  spinwire::base::SharedMemory shared_;
  std::unique_ptr<std::byte[]> heap_;
};

/// A send work request with one element.
struct Send {
  ibv_send_wr wr{};
  ibv_sge sge{};
  Send(std::uint64_t id, ibv_sge s, ibv_wr_opcode opcode = IBV_WR_SEND,
       unsigned flags = IBV_SEND_SIGNALED)
      : sge(s) {
    wr.wr_id = id;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = flags;
  }
  Send& to(std::uint64_t address, std::uint32_t rkey) {
    wr.wr.rdma.remote_addr = address;
    wr.wr.rdma.rkey = rkey;
    return *this;
  }
  int post(ibv_qp* qp) {
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp, &wr, &bad);
  }
};

/// Fills in bytes that follow from a seed.
inline void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  spinwire::base::Random random(seed);
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random.next();
    std::memcpy(&bytes[at], &word, std::min(sizeof word, bytes.size() - at));
  }
}
inline bool holds(std::span<const std::byte> bytes, std::uint64_t seed) {
  spinwire::base::Random random(seed);
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random.next();
    if (std::memcmp(&bytes[at], &word, std::min(sizeof word, bytes.size() - at)) != 0) return false;
  }
  return true;
}
inline bool all_are(std::span<const std::byte> bytes, int value) {
  return std::all_of(bytes.begin(), bytes.end(),
                     [&](std::byte b) { return b == std::byte(value); });
}

/// Repeats `step` until `done()`. Returns false after a deadline that only a failure reaches.
template <typename Step, typename Done>
bool until(Step&& step, Done&& done, std::chrono::seconds limit = std::chrono::minutes(10)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    for (int i = 0; i < 16 && !done(); ++i) step();
  }
  return true;
}

struct ConnectOptions {
  std::uint8_t rnr_timer = 1;
  std::uint8_t timeout = 4;
  std::uint8_t retries = 3;
  std::uint8_t rnr_retry = 7;
};

/// Brings both ends to RTS.
inline void connect(Node& a, ibv_qp* qa, Node& b, ibv_qp* qb, const ConnectOptions& o = {}) {
  const Endpoint ea = a.endpoint(qa), eb = b.endpoint(qb);
  must(a.init(qa) == 0 && b.init(qb) == 0, "INIT");
  must(a.rtr(qa, eb, o.rnr_timer) == 0 && b.rtr(qb, ea, o.rnr_timer) == 0, "RTR");
  must(a.rts(qa, o.timeout, o.retries, o.rnr_retry) == 0 &&
           b.rts(qb, o.timeout, o.retries, o.rnr_retry) == 0,
       "RTS");
  sv::control_device(a.context);
  sv::control_device(b.context);
}

/// Polls after which a sender has checked for acknowledgements without a packet.
inline constexpr int kLook = static_cast<int>(sv::kAckInterval) + 2;

/// Two nodes in one thread with one connected pair of queue pairs.
struct Link {
  Node a;
  Node b;
  ibv_qp* qa;
  ibv_qp* qb;
  std::vector<ibv_wc> at_a;  ///< completions that step() took
  std::vector<ibv_wc> at_b;
  int batch = 16;  ///< completions that step() asks for

  explicit Link(const NodeOptions& options = {}, const ConnectOptions& how = {})
      : Link(options, options, how) {}
  Link(const NodeOptions& left, const NodeOptions& right, const ConnectOptions& how = {})
      : a(left), b(right), qa(a.make_qp()), qb(b.make_qp()) {
    connect(a, qa, b, qb, how);
  }
  explicit Link(const ConnectOptions& how) : Link(NodeOptions{}, how) {}
  /// Opens each end's lane at the other.
  void control() const {
    sv::control_device(a.context);
    sv::control_device(b.context);
  }
  void poll_a() { take(a, at_a); }
  void poll_b() { take(b, at_b); }
  /// Polls both ends once.
  void step() {
    poll_a();
    poll_b();
  }
  /// Polls both ends until each has checked `n` times for acknowledgements.
  void steps(int n) {
    for (n *= kLook; n > 0; --n) step();
  }
  /// Polls until a has `from_a` completions and b has `from_b`.
  bool run(std::size_t from_a, std::size_t from_b) {
    return until([&] { step(); }, [&] { return at_a.size() >= from_a && at_b.size() >= from_b; });
  }

 private:
  void take(const Node& node, std::vector<ibv_wc>& into) const {
    ibv_wc wc[64];
    const int n = ibv_poll_cq(node.cq, std::min(batch, 64), wc);
    if (n > std::min(batch, 64)) throw std::logic_error("more completions than asked for");
    into.insert(into.end(), wc, wc + n);
  }
};

inline ibv_qp_state state_of(ibv_qp* qp) {
  ibv_qp_attr attr{};
  must(sv::query_qp(qp, &attr, IBV_QP_STATE, nullptr) == 0, "query_qp");
  return attr.qp_state;
}

/// The type and element of the next async event; type -1 if there is none.
struct Event {
  int type = -1;
  const void* element = nullptr;
};
inline Event next_event(const Node& node) {
  ibv_async_event event{};
  if (sv::get_async_event(node.context, &event) != 0) return {};
  const bool of_cq = event.event_type == IBV_EVENT_CQ_ERR;
  return {event.event_type, of_cq ? static_cast<const void*>(event.element.cq) : event.element.qp};
}

}  // namespace softverbs_test
