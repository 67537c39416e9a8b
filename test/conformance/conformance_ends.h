// Queue pairs with their objects, and the fixtures of most cases.
#pragma once

#include <arpa/inet.h>

#include "conformance/conformance_device.h"
#include "conformance/known_departures.h"

namespace conformance {

struct EndOptions {
  ibv_qp_type type = IBV_QPT_RC;
  std::uint32_t send_wr = 16;
  std::uint32_t recv_wr = 16;
  std::uint32_t sges = 4;
  std::uint32_t inline_bytes = 64;
  int cqe = 64;
  bool signal_all = false;
  ibv_srq* srq = nullptr;
  ibv_comp_channel* channel = nullptr;  ///< of both completion queues
  std::size_t memory = 64 << 10;
  int memory_access = kLocalWrite | kRemote | kBind;
  // Attributes of the connection.
  int qp_access = kRemote;
  std::uint8_t timeout = 8;  ///< 1 ms
  std::uint8_t retries = 2;
  std::uint8_t rnr_retries = 7;  ///< forever
  std::uint8_t rnr_timer = 1;    ///< 10 us
  std::uint32_t qkey = 0x1234;
};

constexpr int kInitMask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kRtrMask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                         IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kRtsMask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                         IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
constexpr int kUdInitMask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
constexpr int kUdRtrMask = IBV_QP_STATE;
constexpr int kUdRtsMask = IBV_QP_STATE | IBV_QP_SQ_PSN;

/// One queue pair with its own completion queues and memory.
class End {
 public:
  End(ibv_context* on, ibv_pd* domain, const EndOptions& wanted = {})
      : options(wanted),
        context(on),
        pd(domain),
        send_cq(ibv_create_cq(on, wanted.cqe, nullptr, wanted.channel, 0)),
        recv_cq(ibv_create_cq(on, wanted.cqe, nullptr, wanted.channel, 0)),
        memory(domain, wanted.memory, wanted.memory_access) {
    must(send_cq != nullptr && recv_cq != nullptr, "ibv_create_cq");
    ibv_qp_init_attr init{};
    init.send_cq = send_cq.get();
    init.recv_cq = recv_cq.get();
    init.srq = wanted.srq;
    init.qp_type = wanted.type;
    init.sq_sig_all = wanted.signal_all ? 1 : 0;
    init.cap.max_send_wr = wanted.send_wr;
    init.cap.max_recv_wr = wanted.srq != nullptr ? 0 : wanted.recv_wr;
    init.cap.max_send_sge = wanted.sges;
    init.cap.max_recv_sge = wanted.srq != nullptr ? 0 : wanted.sges;
    init.cap.max_inline_data = wanted.inline_bytes;
    qp.reset(ibv_create_qp(domain, &init));
    must(qp != nullptr, "ibv_create_qp");
    cap = init.cap;
    gid_index = choose_gid(on);
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  [[nodiscard]] std::uint32_t psn() const { return 0xfffff0 + (qp->qp_num & 7); }  // wraps soon
  [[nodiscard]] ibv_gid gid() const {
    ibv_gid value{};
    must(ibv_query_gid(context, settings.port, gid_index, &value) == 0, "ibv_query_gid");
    return value;
  }

  // ---- states
  [[nodiscard]] ibv_qp_attr init_attr() const {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = settings.port;
    attr.qp_access_flags = static_cast<unsigned>(options.qp_access);
    attr.qkey = options.qkey;
    return attr;
  }
  [[nodiscard]] ibv_qp_attr rtr_attr(const End& peer) const {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer.qp->qp_num;
    attr.rq_psn = peer.psn();
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = options.rnr_timer;
    attr.ah_attr = address_of(peer);
    return attr;
  }
  [[nodiscard]] ibv_qp_attr rts_attr() const {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = options.timeout;
    attr.retry_cnt = options.retries;
    attr.rnr_retry = options.rnr_retries;
    attr.sq_psn = psn();
    attr.max_rd_atomic = 1;
    return attr;
  }
  [[nodiscard]] ibv_ah_attr address_of(const End& peer) const {
    ibv_ah_attr attr{};
    attr.is_global = 1;
    attr.port_num = settings.port;
    attr.grh.dgid = peer.gid();
    attr.grh.sgid_index = static_cast<std::uint8_t>(gid_index);
    attr.grh.hop_limit = 64;
    return attr;
  }
  int modify(ibv_qp_attr attr, int mask) const { return ibv_modify_qp(qp.get(), &attr, mask); }
  int move_to(ibv_qp_state state) const {
    ibv_qp_attr attr{};
    attr.qp_state = state;
    return modify(attr, IBV_QP_STATE);
  }
  [[nodiscard]] bool datagrams() const { return options.type == IBV_QPT_UD; }
  void to_init() const {
    must(modify(init_attr(), datagrams() ? kUdInitMask : kInitMask) == 0, "INIT");
  }
  void to_rtr(const End& peer) const {
    must(modify(rtr_attr(peer), datagrams() ? kUdRtrMask : kRtrMask) == 0, "RTR");
  }
  void to_rts() const { must(modify(rts_attr(), datagrams() ? kUdRtsMask : kRtsMask) == 0, "RTS"); }
  void to_error() const { must(move_to(IBV_QPS_ERR) == 0, "ERR"); }
  [[nodiscard]] ibv_qp_attr query(int mask = IBV_QP_STATE) const {
    ibv_qp_attr attr{};
    ibv_qp_init_attr init{};
    must(ibv_query_qp(qp.get(), &attr, mask, &init) == 0, "ibv_query_qp");
    return attr;
  }
  [[nodiscard]] ibv_qp_state state() const { return query().qp_state; }
  /// Waits until the state is `wanted`, which may need a message from the peer.
  [[nodiscard]] bool gets_into(ibv_qp_state wanted) const {
    for (Deadline deadline; deadline.look();) {
      if (state() == wanted) return true;
      (void)ibv_poll_cq(recv_cq.get(), 0, nullptr);
    }
    return false;
  }

  /// Waits until the drain that SQD began has ended. Until then the only legal transition is to
  /// ERR.
  [[nodiscard]] bool is_drained() const {
    for (Deadline deadline; deadline.look();) {
      if (query().sq_draining == 0) return true;
    }
    return false;
  }

  // ---- work
  int post(ibv_send_wr& wr) const {
    ibv_send_wr* bad = nullptr;
    return ibv_post_send(qp.get(), &wr, &bad);
  }
  int receive_into(std::uint64_t id, std::vector<ibv_sge> sges) const {
    ibv_recv_wr wr{id, nullptr, sges.data(), static_cast<int>(sges.size())};
    ibv_recv_wr* bad = nullptr;
    return ibv_post_recv(qp.get(), &wr, &bad);
  }
  void receive(std::uint64_t id, std::size_t offset, std::uint32_t length) const {
    must(receive_into(id, {memory.sge(offset, length)}) == 0, "ibv_post_recv");
  }
  [[nodiscard]] ibv_wc sent() const { return one(send_cq.get()); }
  [[nodiscard]] ibv_wc received() const { return one(recv_cq.get()); }

  EndOptions options;
  ibv_context* context;
  ibv_pd* pd;
  int gid_index = 0;
  ibv_qp_cap cap{};
  Cq send_cq;
  Cq recv_cq;
  Memory memory;
  Qp qp;  // last: destroyed first
};

/// A send work request that owns its elements.
struct Send {
  std::vector<ibv_sge> sges;
  ibv_send_wr wr{};

  Send(std::uint64_t id, ibv_wr_opcode opcode, std::vector<ibv_sge> elements = {},
       unsigned flags = IBV_SEND_SIGNALED)
      : sges(std::move(elements)) {
    wr.wr_id = id;
    wr.opcode = opcode;
    wr.send_flags = flags;
    wr.sg_list = sges.data();
    wr.num_sge = static_cast<int>(sges.size());
  }
  Send(const Send&) = delete;
  Send& operator=(const Send&) = delete;

  Send& imm(std::uint32_t host_order) {
    wr.imm_data = htonl(host_order);
    return *this;
  }
  Send& invalidate(std::uint32_t rkey) {
    wr.invalidate_rkey = rkey;
    return *this;
  }
  Send& at(std::uint64_t address, std::uint32_t rkey) {
    wr.wr.rdma.remote_addr = address;
    wr.wr.rdma.rkey = rkey;
    return *this;
  }
  Send& atomic(std::uint64_t address, std::uint32_t rkey, std::uint64_t compare_add,
               std::uint64_t swap = 0) {
    wr.wr.atomic.remote_addr = address;
    wr.wr.atomic.rkey = rkey;
    wr.wr.atomic.compare_add = compare_add;
    wr.wr.atomic.swap = swap;
    return *this;
  }
  Send& to(ibv_ah* ah, std::uint32_t qpn, std::uint32_t qkey) {
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = qpn;
    wr.wr.ud.remote_qkey = qkey;
    return *this;
  }
  Send& bind(ibv_mw* mw, std::uint32_t rkey, ibv_mr* mr, std::uint64_t address,
             std::uint64_t length, int access) {
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = {mr, address, length, static_cast<unsigned>(access)};
    return *this;
  }
  void on(const End& end) { must(end.post(wr) == 0, "ibv_post_send"); }
};

/// Links work requests into one list.
inline void chain(std::vector<std::unique_ptr<Send>>& list) {
  for (std::size_t i = 0; i + 1 < list.size(); ++i) list[i]->wr.next = &list[i + 1]->wr;
}

inline void connect(const End& a, const End& b) {
  a.to_init();
  b.to_init();
  a.to_rtr(b);
  b.to_rtr(a);
  a.to_rts();
  b.to_rts();
}

/// Two connected ends, by default in one context.
struct Pair {
  End a;
  End b;
  Pair(ibv_context* context, ibv_pd* pd, const EndOptions& left = {}, const EndOptions& right = {})
      : a(context, pd, left), b(context, pd, right) {
    connect(a, b);
  }
};

/// Checks a completion; `opcode` counts only with success.
inline void expect_wc(const ibv_wc& wc, const End& end, std::uint64_t id, ibv_wc_status status,
                      ibv_wc_opcode opcode = IBV_WC_SEND) {
  EXPECT_EQ(wc.wr_id, id);
  EXPECT_EQ(wc.status, status) << ibv_wc_status_str(wc.status);
  EXPECT_EQ(wc.qp_num, end.qp->qp_num);
  // Verbs define no other fields of a completion with an error.
  if (status == IBV_WC_SUCCESS && wc.status == status) {
    EXPECT_EQ(wc.opcode, opcode);
  }
}
inline void expect_recv(const ibv_wc& wc, const End& end, std::uint64_t id, std::uint32_t length,
                        unsigned flags = 0, ibv_wc_opcode opcode = IBV_WC_RECV) {
  expect_wc(wc, end, id, IBV_WC_SUCCESS, opcode);
  EXPECT_EQ(wc.byte_len, length);
  // IBV_WC_GRH is meaningful for datagrams only (11.4.2.1); Soft-RoCE sets it for connections.
  const unsigned grh = end.datagrams() ? unsigned{IBV_WC_GRH} : 0u;
  EXPECT_EQ(wc.wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV | grh), flags);
}

/// An opened device with a protection domain.
class Verbs : public Case {
 protected:
  Verbs() : context(open_device()), pd(ibv_alloc_pd(context.get())) {
    must(pd != nullptr, "ibv_alloc_pd");
    do_not_block(context->async_fd);
    must(ibv_query_device(context.get(), &device) == 0, "ibv_query_device");
  }
  [[nodiscard]] Pair pair(const EndOptions& left = {}, const EndOptions& right = {}) const {
    return Pair(context.get(), pd.get(), left, right);
  }
  [[nodiscard]] End end(const EndOptions& options = {}) const {
    return End(context.get(), pd.get(), options);
  }
  [[nodiscard]] Srq make_srq(std::uint32_t depth = 16, std::uint32_t limit = 0) const {
    ibv_srq_init_attr init{};
    init.attr = {depth, 2, limit};
    Srq srq(ibv_create_srq(pd.get(), &init));
    must(srq != nullptr, "ibv_create_srq");
    return srq;
  }
  Context context;
  Pd pd;
  ibv_device_attr device{};
};

/// A fixture with one connection.
class Connected : public Verbs {
 protected:
  Connected() : link(context.get(), pd.get()), a(link.a), b(link.b) {}
  Pair link;
  End& a;
  End& b;
};

}  // namespace conformance
