// The client's end of sessions whose frames a test sends itself: a datagram queue pair on an
// engine's device, which the test reads.
#pragma once

#include <cstring>
#include <vector>

#include "rpc/bare_engine.h"
#include "wire/rpc_datagram.h"

namespace rpc_test {

class RawDatagrams {
 public:
  /// The engine must have no other traffic, and must not be polled while a test reads: both share
  /// one completion queue, and reading and the destructor drop the completions of others.
  explicit RawDatagrams(EngineCore& core) : core_(core) {
    spinwire::verbs::Device& device = *core.context.device;
    bytes_.resize(kReceives * kBytes);
    mr_ =
        device.provider().reg_mr(device.pd(), bytes_.data(), bytes_.size(), IBV_ACCESS_LOCAL_WRITE);
    EXPECT_NE(mr_, nullptr);
    spinwire::verbs::DatagramOptions options;
    options.send_depth = 1;
    options.receive_depth = kReceives;
    options.qkey = kQkey;
    auto qp = device.create_datagram_qp(options);
    EXPECT_TRUE(qp) << qp.error().message();
    qp_ = *qp;
    for (std::uint32_t i = 0; i < kReceives; ++i) post(i);
  }
  RawDatagrams(const RawDatagrams&) = delete;
  RawDatagrams& operator=(const RawDatagrams&) = delete;
  ~RawDatagrams() {
    spinwire::verbs::Device& device = *core_.context.device;
    device.destroy_qp(qp_);
    // An adapter keeps completions of a queue pair that is gone. The engine must not get them.
    ibv_wc wc{};
    while (ibv_poll_cq(device.cq(), 1, &wc) == 1) {
    }
    (void)device.provider().dereg_mr(mr_);
  }

  /// The client's end of session `name`, with this queue pair's address.
  [[nodiscard]] spinwire::wire::SessionEnd end(std::uint32_t name) const {
    const spinwire::verbs::Place& place = core_.context.device->place();
    spinwire::wire::SessionEnd end;
    std::memcpy(end.gid.data(), &place.gid, sizeof place.gid);
    end.gid_type = place.gid_type;
    end.lid = place.lid;
    end.qp_num = qp_->qp_num;
    end.qkey = kQkey;
    end.name = name;
    end.window = 8;
    end.mtu = 1024;
    end.incarnation = core_.context.incarnation;
    end.token = kToken;
    return end;
  }
  /// The token of a challenge for session `name`; 0 if none has arrived. Drops all other datagrams.
  [[nodiscard]] std::uint64_t challenge(std::uint32_t name) {
    std::uint64_t token = 0;
    const std::uint64_t proof = spinwire::wire::session_proof(kToken);
    return find(spinwire::wire::RpcKind::path_challenge, name, proof, token) ? token : 0;
  }
  /// Whether a datagram of this kind has arrived for session `name`. Drops all others.
  [[nodiscard]] bool has(spinwire::wire::RpcKind kind, std::uint32_t name) {
    std::uint64_t ignored = 0;
    return find(kind, name, 0, ignored);
  }

 private:
  static constexpr std::uint32_t kReceives = 64, kBytes = 2048, kQkey = 0x1234;
  static constexpr std::uint64_t kToken = 0x1122334455667788;

  /// `proof` 0: any.
  bool find(spinwire::wire::RpcKind kind, std::uint32_t name, std::uint64_t proof,
            std::uint64_t& payload) {
    ibv_wc wc{};
    spinwire::verbs::Device& device = *core_.context.device;
    // Adapters have no such work.
    if (device.provider().control != nullptr) device.provider().control(device.context());
    while (ibv_poll_cq(device.cq(), 1, &wc) == 1) {
      if (wc.qp_num != qp_->qp_num || (wc.opcode & IBV_WC_RECV) == 0) continue;
      const auto at = static_cast<std::uint32_t>(wc.wr_id);
      const std::byte* const datagram = bytes_.data() + at * kBytes + 40;
      spinwire::wire::RpcHeader header{};
      const bool found = wc.status == IBV_WC_SUCCESS &&
                         spinwire::wire::decode(datagram, wc.byte_len - 40, header) &&
                         header.kind == kind && header.session == name &&
                         (proof == 0 || spinwire::wire::proof_of(header) == proof);
      std::memcpy(&payload, datagram + spinwire::wire::kRpcHeaderBytes, sizeof payload);
      post(at);
      if (found) return true;
    }
    return false;
  }

  void post(std::uint32_t at) {
    ibv_sge place{reinterpret_cast<std::uint64_t>(bytes_.data() + at * kBytes), kBytes, mr_->lkey};
    ibv_recv_wr wr{};
    wr.wr_id = at;
    wr.sg_list = &place;
    wr.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_recv(qp_, &wr, &bad), 0);
  }

  EngineCore& core_;
  std::vector<std::byte> bytes_;
  ibv_mr* mr_ = nullptr;
  ibv_qp* qp_ = nullptr;
};

}  // namespace rpc_test
