#include "verbs/device.h"

#include <errno.h>
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>

#include "base/error.h"
#include "verbs/providers.h"

namespace spinwire::verbs {
namespace {

Error refused(const char* asked, const char* call, int error, std::string remedy) {
  return base::fail_errno(Status::system, asked, call, error, std::move(remedy)).value();
}

tl::unexpected<Error> over_limit(const char* setting, std::uint64_t asked, std::uint64_t has,
                                 const std::string& device) {
  return base::fail(Status::limit, fmt::format("{} = {}", setting, asked),
                    fmt::format("device {} has {}", device, has),
                    fmt::format("lower {} to at most {}", setting, has));
}

}  // namespace

ibv_mtu mtu_code(std::uint32_t bytes) noexcept {
  if (bytes >= 4096) return IBV_MTU_4096;
  if (bytes >= 2048) return IBV_MTU_2048;
  if (bytes >= 1024) return IBV_MTU_1024;
  return bytes >= 512 ? IBV_MTU_512 : IBV_MTU_256;
}

std::uint32_t mtu_bytes(ibv_mtu code) noexcept { return 128u << static_cast<unsigned>(code); }

Result<std::unique_ptr<Device>> Device::open(const DeviceOptions& options) {
  const Provider& provider = softverbs_provider();
  const std::vector<std::string> names = provider.device_names();
  if (std::find(names.begin(), names.end(), options.name) == names.end()) {
    return base::fail(Status::no_device, fmt::format("open device \"{}\"", options.name),
                      fmt::format("there are: {}", fmt::join(names, ", ")),
                      "set device.name to one of them");
  }
  std::unique_ptr<Device> device(new Device(provider));
  device->name_ = options.name;
  if (auto done = device->set_up(options); !done) return tl::unexpected(done.error());
  return device;
}

Result<void> Device::choose_port(const DeviceOptions& options) {
  ibv_port_attr port{};
  if (const int error = provider_.query_port(context_, options.port, &port); error != 0) {
    return tl::unexpected(refused("query the device's port", "ibv_query_port", error,
                                  fmt::format("device.port = {} may not exist", options.port)));
  }
  port_ = options.port;
  lid_ = port.lid;
  mtu_ = mtu_bytes(port.active_mtu);
  gid_index_ = std::max(options.gid_index, 0);
  if (gid_index_ >= port.gid_tbl_len)
    return over_limit("device.gid_index", static_cast<std::uint64_t>(gid_index_),
                      static_cast<std::uint64_t>(port.gid_tbl_len - 1), name_);
  if (const int error = provider_.query_gid(context_, port_, gid_index_, &gid_); error != 0) {
    return tl::unexpected(refused("read the device's GID", "ibv_query_gid", error,
                                  "choose another device.gid_index"));
  }
  return {};
}

Result<void> Device::set_up(const DeviceOptions& options) {
  auto opened = provider_.open_device(options.name, options.clock);
  if (!opened) return tl::unexpected(opened.error());
  context_ = *opened;
  ibv_device_attr attr{};
  if (const int error = provider_.query_device(context_, &attr); error != 0)
    return tl::unexpected(refused("query the device", "ibv_query_device", error, ""));
  if (options.completion_depth > static_cast<std::uint32_t>(attr.max_cqe))
    return over_limit("queues.completion_depth", options.completion_depth,
                      static_cast<std::uint64_t>(attr.max_cqe), name_);
  if (options.receive_depth > static_cast<std::uint32_t>(attr.max_srq_wr))
    return over_limit("queues.receive_depth", options.receive_depth,
                      static_cast<std::uint64_t>(attr.max_srq_wr), name_);
  rd_atomic_ = static_cast<std::uint8_t>(
      std::clamp(std::min(attr.max_qp_rd_atom, attr.max_qp_init_rd_atom), 1, 128));
  if (auto port = choose_port(options); !port) return port;

  const char* memory = "raise the locked-memory limit (ulimit -l) or lower the depths";
  pd_ = provider_.alloc_pd(context_);
  if (pd_ == nullptr)
    return tl::unexpected(refused("make a protection domain", "ibv_alloc_pd", errno, memory));
  cq_ = provider_.create_cq(context_, static_cast<int>(options.completion_depth));
  if (cq_ == nullptr)
    return tl::unexpected(refused("make a completion queue", "ibv_create_cq", errno, memory));
  ibv_srq_init_attr srq{};
  srq.attr.max_wr = options.receive_depth;
  srq.attr.max_sge = 1;
  srq_ = provider_.create_srq(pd_, &srq);
  if (srq_ == nullptr)
    return tl::unexpected(refused("make a shared receive queue", "ibv_create_srq", errno, memory));
  return {};
}

Device::~Device() {
  // A peer may be in the midst of an access to the slab; one that is stopped there costs the slab.
  constexpr int kAttempts = 2000;
  for (int i = 0; !leaving_.empty() && i < kAttempts; ++i) {
    destroy_left();
    sched_yield();
  }
  if (srq_ != nullptr) provider_.destroy_srq(srq_);
  for (int i = 0; slab_ != nullptr && i < kAttempts; ++i) {
    if (provider_.dereg_mr(slab_) != EBUSY) break;
    sched_yield();
  }
  if (cq_ != nullptr) provider_.destroy_cq(cq_);
  if (pd_ != nullptr) provider_.dealloc_pd(pd_);
  if (context_ != nullptr) provider_.close_device(context_);
}

Result<ibv_mr*> Device::register_slab(std::span<std::byte> slab) {
  slab_ =
      provider_.reg_mr(pd_, slab.data(), slab.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  if (slab_ == nullptr) {
    const int error = errno;
    return base::fail_errno(Status::no_memory,
                            fmt::format("register the slab of {} bytes", slab.size()), "ibv_reg_mr",
                            error, "raise the locked-memory limit (ulimit -l) or lower the pools");
  }
  return slab_;
}

Result<ibv_qp*> Device::create_qp(const QueuePairOptions& options) {
  destroy_left();
  leaving_.reserve(queue_pairs_ + 1);
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.srq = srq_;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = options.send_depth;
  init.cap.max_send_sge = 2;
  init.cap.max_inline_data = options.inline_bytes;
  ibv_qp* qp = provider_.create_qp(pd_, &init);
  if (qp == nullptr)
    return tl::unexpected(refused("make a queue pair", "ibv_create_qp", errno,
                                  "lower queues.send_depth or queues.inline_bytes"));
  ++queue_pairs_;
  return qp;
}

Result<void> Device::to_init(ibv_qp* qp, int access) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = port_;
  attr.qp_access_flags = static_cast<unsigned>(access);
  const int error = provider_.modify_qp(
      qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0)
    return tl::unexpected(refused("bring a queue pair to INIT", "ibv_modify_qp", error, ""));
  return {};
}

Result<void> Device::to_rtr(ibv_qp* qp, const RemoteQueuePair& remote, const RetryOptions& retry) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = mtu_code(remote.mtu);
  attr.dest_qp_num = remote.qp_num;
  attr.rq_psn = remote.psn;
  attr.max_dest_rd_atomic = rd_atomic_;
  attr.min_rnr_timer = retry.min_rnr_timer;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = port_;
  attr.ah_attr.dlid = remote.lid;
  attr.ah_attr.grh.dgid = remote.gid;
  attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(gid_index_);
  attr.ah_attr.grh.hop_limit = 255;
  const int error =
      provider_.modify_qp(qp, &attr,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                              IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  // A peer of the embedded device that died in the handshake, or has closed its device.
  if (error == ENOENT || error == ESRCH || error == ENODEV)
    return base::fail_errno(Status::peer_lost, "reach the peer's device (RTR)", "ibv_modify_qp",
                            error, "see whether the peer's process still runs");
  if (error != 0)
    return tl::unexpected(refused("reach the peer's device (RTR)", "ibv_modify_qp", error,
                                  "both ends must use the same kind of device, on one network"));
  return {};
}

Result<void> Device::to_rts(ibv_qp* qp, std::uint32_t psn, const RemoteQueuePair& remote,
                            const RetryOptions& retry) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = retry.ack_timeout;
  attr.retry_cnt = retry.retry_count;
  attr.rnr_retry = retry.rnr_retry;
  attr.sq_psn = psn;
  attr.max_rd_atomic = std::max<std::uint8_t>(std::min(rd_atomic_, remote.rd_atomic), 1);
  const int error =
      provider_.modify_qp(qp, &attr,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error != 0)
    return tl::unexpected(refused("bring a queue pair to RTS", "ibv_modify_qp", error, ""));
  return {};
}

bool Device::to_error(ibv_qp* qp) noexcept {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_ERR;
  return provider_.modify_qp(qp, &attr, IBV_QP_STATE) == 0;
}

void Device::destroy_qp(ibv_qp* qp) noexcept {
  leaving_.push_back(qp);  // NOLINT(bugprone-exception-escape): reserved at its creation
  destroy_left();
}

void Device::destroy_left() noexcept {
  queue_pairs_ -=
      std::erase_if(leaving_, [this](ibv_qp* qp) { return provider_.destroy_qp(qp) != EBUSY; });
}

}  // namespace spinwire::verbs
