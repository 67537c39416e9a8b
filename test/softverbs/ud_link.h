// Test helpers: datagram queue pairs, address handles, and the header at the start of a receive.
#pragma once

#include <arpa/inet.h>

#include <vector>

#include "softverbs/rc_link.h"
#include "softverbs/ud/ud_datagram.h"

namespace softverbs_test {

inline constexpr std::uint32_t kQkey = 0x11223344;
inline constexpr std::uint32_t kGrh = 40;

/// A queue pair in RESET with the node's CQ, and its SRQ or a receive queue of its own.
inline ibv_qp* make_ud(Node& node, bool shared, std::uint32_t depth = 64, bool signal_all = false) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = node.cq;
  init.srq = shared ? node.srq : nullptr;
  init.qp_type = IBV_QPT_UD;
  init.sq_sig_all = signal_all ? 1 : 0;
  init.cap = {depth, 64, 4, 4, 256};
  ibv_qp* qp = sv::create_qp(node.pd, &init);
  must(qp != nullptr, "create_qp");
  node.qps.push_back(qp);
  return qp;
}

inline int ud_init(ibv_qp* qp, std::uint32_t qkey = kQkey) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  attr.qkey = qkey;
  return sv::modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
}
inline int ud_rtr(ibv_qp* qp) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  return sv::modify_qp(qp, &attr, IBV_QP_STATE);
}
inline int ud_rts(ibv_qp* qp, std::uint32_t psn = 7) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = psn;
  return sv::modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}
inline ibv_qp* ready_ud(Node& node, bool shared, std::uint32_t qkey = kQkey,
                        std::uint32_t depth = 64) {
  ibv_qp* qp = make_ud(node, shared, depth);
  must(ud_init(qp, qkey) == 0 && ud_rtr(qp) == 0 && ud_rts(qp) == 0, "RTS");
  return qp;
}

inline ibv_gid gid_of(const Node& node) {
  ibv_gid gid{};
  sv::query_gid(node.context, 1, 0, &gid);
  return gid;
}
inline ibv_ah_attr way_to(const ibv_gid& gid) {
  ibv_ah_attr attr{};
  attr.is_global = 1;
  attr.port_num = 1;
  attr.grh.dgid = gid;
  return attr;
}

/// An address handle that is destroyed at the end of the scope.
class Handle {
 public:
  Handle(const Node& from, ibv_ah_attr attr) : ah_(sv::create_ah(from.pd, &attr)) {
    must(ah_ != nullptr, "create_ah");
  }
  Handle(const Node& from, const Node& to) : Handle(from, way_to(gid_of(to))) {
    sv::control_device(to.context);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { sv::destroy_ah(ah_); }
  [[nodiscard]] ibv_ah* get() const { return ah_; }

 private:
  ibv_ah* ah_;
};

/// A datagram of one element.
struct Datagram : Send {
  Datagram(std::uint64_t id, ibv_sge s, const Handle& to, std::uint32_t qpn,
           std::uint32_t qkey = kQkey, unsigned flags = IBV_SEND_SIGNALED)
      : Send(id, s, IBV_WR_SEND, flags) {
    wr.wr.ud.ah = to.get();
    wr.wr.ud.remote_qpn = qpn;
    wr.wr.ud.remote_qkey = qkey;
  }
};

/// Builds the header's bytes independently of the device.
inline std::vector<std::uint8_t> route_header(const ibv_ah_attr& way, const ibv_gid& from,
                                              std::uint32_t payload, bool imm) {
  const std::uint32_t flow = way.grh.flow_label;
  const std::uint32_t length = (payload + 3) / 4 * 4 + 12 + 8 + 4 + (imm ? 4 : 0);
  const auto byte = [](std::uint32_t value) { return static_cast<std::uint8_t>(value); };
  std::vector<std::uint8_t> header = {byte(0x60 | way.grh.traffic_class >> 4),
                                      byte((way.grh.traffic_class & 15u) << 4 | flow >> 16),
                                      byte(flow >> 8),
                                      byte(flow),
                                      byte(length >> 8),
                                      byte(length),
                                      0x1b,
                                      way.grh.hop_limit};
  header.insert(header.end(), from.raw, from.raw + 16);
  header.insert(header.end(), way.grh.dgid.raw, way.grh.dgid.raw + 16);
  return header;
}

/// The node's datagrams that were dropped for this reason.
inline std::uint64_t dropped(const Node& node, sv::Drop reason) {
  return node.internals().drops[static_cast<std::size_t>(reason)];
}

/// Takes all completions.
inline std::vector<ibv_wc> completions(const Node& node) {
  std::vector<ibv_wc> all;
  ibv_wc wc{};
  for (int nothing = 0; nothing < 2 * kLook;) {
    if (node.poll(wc)) {
      all.push_back(wc);
    } else {
      ++nothing;
    }
  }
  return all;
}

}  // namespace softverbs_test
