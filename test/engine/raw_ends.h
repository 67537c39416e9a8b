// Ends of raw connections: engines, and a program that uses libibverbs only.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/harness.h"
#include "verbs/opened_device.h"
#include "verbs/provider.h"
#include "verbs/providers.h"

namespace raw_test {

using namespace engine_test;
using spinwire::ConnectionSettings;
using spinwire::Endpoint;
using spinwire::PrepareOptions;
using spinwire::RawReceive;
using spinwire::RawSettings;
using Elements = std::span<const BufferSlice>;

inline ConnectionSettings raw_settings(const RawSettings& sizes = {}) {
  ConnectionSettings settings;
  settings.raw = sizes;
  return settings;
}

/// Accepted receives and their completions: each completes once, in the order of posting.
class Receives {
 public:
  struct One {
    int posted = 0;
    int ended = 0;
    bool posted_first = false;
    RawReceive how;
  };
  Status post(Connection c, Elements into, Post post = Post::automatic) {
    const std::size_t id = all_.size();
    all_.emplace_back();
    const Status status = c.post_receive(
        into,
        [this, id](const RawReceive& r) {
          One& one = all_[id];
          ++one.ended;
          one.posted_first = one.posted == 1;
          one.how = r;
          in_order_ = in_order_ && id == next_;
          next_ = id + 1;
          ++ended;
          ok += r.status == Status::ok ? 1 : 0;
          flushed += r.status == Status::flushed ? 1 : 0;
        },
        [this, id] { ++all_[id].posted; }, post);
    if (status != Status::ok) {
      all_.pop_back();
    }
    return status;
  }
  Status post(Connection c, const BufferSlice& into, Post how = Post::automatic) {
    return post(c, Elements(&into, 1), how);
  }
  [[nodiscard]] const One& operator[](std::size_t i) const { return all_[i]; }
  [[nodiscard]] std::size_t accepted() const { return all_.size(); }
  [[nodiscard]] std::size_t posted() const {
    std::size_t n = 0;
    for (const One& one : all_) n += one.posted == 1 ? 1 : 0;
    return n;
  }
  void expect_exact() const {
    EXPECT_TRUE(in_order_);
    for (std::size_t i = 0; i < all_.size(); ++i) {
      EXPECT_EQ(all_[i].ended, 1) << "receive " << i;
      EXPECT_LE(all_[i].posted, 1) << "receive " << i;
      if (all_[i].how.status == Status::ok) {
        EXPECT_TRUE(all_[i].posted_first) << "receive " << i;
      }
    }
  }
  std::size_t ended = 0;
  std::size_t ok = 0;
  std::size_t flushed = 0;

 private:
  std::deque<One> all_;
  std::size_t next_ = 0;
  bool in_order_ = true;
};

/// Two engines and a raw connection set up over TCP.
struct RawPair {
  explicit RawPair(const RawSettings& sizes = {}, const Config& config = small_config())
      : RawPair(raw_settings(sizes), raw_settings(sizes), config) {}
  RawPair(const ConnectionSettings& servers, const ConnectionSettings& clients,
          const Config& config, const std::uint64_t* ticks = nullptr)
      : server(config, ticks), client(config, ticks) {
    listen(servers);
    begin(clients);
    EXPECT_TRUE(until([&] { return a.ready() && server.ready.size() == 1; }))
        << to_string(a.state());
    if (server.ready.size() == 1) b = server.ready[0];
  }
  void listen(const ConnectionSettings& settings) {
    ListenOptions options;
    options.handlers = server.handlers();
    options.settings = settings;
    auto made = server.engine.listen("127.0.0.1:0", options);
    ASSERT_TRUE(made) << made.error().message();
    server.listener = std::move(*made);
  }
  void begin(const ConnectionSettings& settings) {
    ConnectOptions options;
    options.handlers = client.handlers();
    options.settings = settings;
    auto made = client.engine.connect(server.listener.address(), options);
    ASSERT_TRUE(made) << made.error().message();
    a = *made;
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&client, &server}, std::forward<Done>(done));
  }
  void settle(int rounds = 200) {
    for (int i = 0; i < rounds; ++i) (void)(client.poll() + server.poll());
  }
  void audit() {
    for (Node* node : {&client, &server}) {
      const auto good = node->engine.audit();
      EXPECT_TRUE(good) << good.error().message();
    }
  }
  // Memory for the test, kept until finish().
  Buffer& keep(Buffer buffer) { return kept_.emplace_back(std::move(buffer)); }
  Buffer& at_client(std::size_t size) { return keep(client.buffer(size)); }
  Buffer& at_server(std::size_t size) { return keep(server.buffer(size)); }
  Buffer& data(std::size_t size, std::uint32_t seed) { return keep(client.filled(size, seed)); }
  /// Raw connections have no goodbye, so each end closes its own.
  void finish() {
    kept_.clear();
    audit();
    (void)a.close();
    (void)b.close();
    EXPECT_TRUE(until([&] {
      return client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
    }));
    for (int i = 0; i < 8; ++i) (void)(client.poll() + server.poll());
    client.expect_clean();
    server.expect_clean();
    at_a.expect_exact();
    at_b.expect_exact();
  }

  Receives at_a, at_b;
  Node server;
  Node client;
  Connection a;  ///< the client's end
  Connection b;

 private:
  std::deque<Buffer> kept_;
};

/// A queue pair of a libibverbs program, on the device that an engine has open.
class PlainEnd {
 public:
  static constexpr std::size_t kBytes = 8192;
  explicit PlainEnd(const Engine& engine) : info_(engine.device()) {
    for (const spinwire::verbs::Provider* each : spinwire::verbs::providers()) {
      if (info_.provider == each->name) provider_ = each;
    }
    context_ = provider_->open_device(info_.name, Clock::real()).value();
    pd_ = provider_->alloc_pd(context_);
    cq_ = provider_->create_cq(context_, {64, false, nullptr});
    mr_ = provider_->reg_mr(
        pd_, memory_.data(), kBytes,
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.qp_type = IBV_QPT_RC;
    init.cap = {16, 16, 4, 4, 0};
    qp_ = provider_->create_qp(pd_, &init);
    EXPECT_TRUE(pd_ != nullptr && cq_ != nullptr && mr_ != nullptr && qp_ != nullptr);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = info_.port;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    modify(attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  }
  PlainEnd(const PlainEnd&) = delete;
  PlainEnd& operator=(const PlainEnd&) = delete;
  ~PlainEnd() {
    (void)provider_->destroy_qp(qp_);
    (void)provider_->dereg_mr(mr_);
    (void)provider_->destroy_cq(cq_);
    (void)provider_->dealloc_pd(pd_);
    (void)provider_->close_device(context_);
  }
  /// The endpoint that such a program would send us out-of-band.
  [[nodiscard]] Endpoint endpoint() const {
    Endpoint e;
    ibv_gid gid{};
    EXPECT_EQ(provider_->query_gid(context_, info_.port, info_.gid_index, &gid), 0);
    std::copy_n(gid.raw, e.gid.size(), e.gid.begin());
    ibv_port_attr port{};
    EXPECT_EQ(provider_->query_port(context_, info_.port, &port), 0);
    e.gid_type = info_.gid_type;
    e.lid = port.lid;
    e.qp_num = qp_->qp_num;
    e.psn = 77;
    e.mtu = 1024;
    e.max_rd_atomic = 1;
    e.raw = true;
    return e;
  }
  void join(const Endpoint& peer) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer.qp_num;
    attr.rq_psn = peer.psn;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = 12;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = info_.port;
    attr.ah_attr.dlid = peer.lid;
    std::copy_n(peer.gid.begin(), peer.gid.size(), attr.ah_attr.grh.dgid.raw);
    attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(info_.gid_index);
    attr.ah_attr.grh.hop_limit = 64;
    modify(attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = 6;
    attr.rnr_retry = 6;
    attr.sq_psn = 77;
    attr.max_rd_atomic = 1;
    modify(attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  }
  void receive(std::size_t at, std::uint32_t bytes) {
    ibv_sge sge = element(at, bytes);
    ibv_recv_wr wr{7, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_recv(qp_, &wr, &bad), 0);
  }
  void send(std::size_t at, std::uint32_t bytes, ibv_wr_opcode opcode, std::uint32_t immediate = 0,
            const RemoteRegion& remote = {}) {
    ibv_sge sge = element(at, bytes);
    ibv_send_wr wr{};
    wr.wr_id = 8;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.imm_data = htobe32(immediate);
    wr.wr.rdma.remote_addr = remote.address;
    wr.wr.rdma.rkey = remote.rkey;
    ibv_send_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_send(qp_, &wr, &bad), 0);
  }
  /// The next completion, if any.
  std::optional<ibv_wc> poll() {
    if (provider_->control != nullptr) provider_->control(context_);
    ibv_wc wc{};
    return ibv_poll_cq(cq_, 1, &wc) == 1 ? std::optional<ibv_wc>(wc) : std::nullopt;
  }
  [[nodiscard]] std::span<std::byte> bytes(std::size_t at, std::size_t size) {
    return std::span(memory_).subspan(at, size);
  }
  [[nodiscard]] RemoteRegion region() const {
    return {reinterpret_cast<std::uint64_t>(memory_.data()), kBytes, mr_->rkey,
            Access::remote_read_write};
  }

 private:
  ibv_sge element(std::size_t at, std::uint32_t bytes) {
    return {reinterpret_cast<std::uint64_t>(memory_.data()) + at, bytes, mr_->lkey};
  }
  void modify(ibv_qp_attr attr, int mask) {
    EXPECT_EQ(provider_->modify_qp(qp_, &attr, mask), 0) << "to " << attr.qp_state;
  }
  spinwire::DeviceInfo info_;
  const spinwire::verbs::Provider* provider_ = nullptr;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_qp* qp_ = nullptr;
  std::vector<std::byte> memory_ = std::vector<std::byte>(kBytes);
};

}  // namespace raw_test
