#include "verbs/opened_device.h"

#include <errno.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/available_memory.h"
#include "base/error.h"
#include "base/log_message.h"
#include "base/memlock.h"

namespace spinwire::verbs {
namespace {

tl::unexpected<Error> verb_failed(const char* asked, const char* call, int error) {
  return base::fail_errno(Status::system, asked, call, error, "");
}

/// Estimated size of a work request or completion.
constexpr std::uint64_t kEntryBytes = 128;

/// The error of a call that may have run out of memory. Queues are pinned, so the limit on locked
/// memory may be the cause.
tl::unexpected<Error> short_of_memory(std::string asked, const char* call, int error,
                                      std::uint64_t bytes) {
  if (error == ENOMEM) {
    return tl::unexpected(base::lock_error(std::move(asked), call, error, bytes, base::LockUse::pin,
                                           base::lock_limits()));
  }
  return base::fail_errno(Status::system, std::move(asked), call, error,
                          "lower the depths under queues, or the number of connections");
}

}  // namespace

tl::unexpected<Error> over_limit(const Limit& limit, const std::string& device) {
  return base::fail(Status::limit, base::format("{} = {}", limit.setting, limit.asked),
                    base::format("device {} has {}", device, limit.has),
                    base::format("lower {} to at most {}", limit.setting, limit.has));
}

Result<void> check_each(std::span<const Limit> limits, const std::string& device) {
  for (const Limit& limit : limits) {
    if (limit.asked > limit.has) return over_limit(limit, device);
  }
  return {};
}

bool shares_receives(const ibv_device_attr& device) noexcept {
  return device.max_srq > 0 && device.max_srq_wr > 0;
}

ibv_mtu mtu_code(std::uint32_t bytes) noexcept {
  if (bytes >= 4096) return IBV_MTU_4096;
  if (bytes >= 2048) return IBV_MTU_2048;
  if (bytes >= 1024) return IBV_MTU_1024;
  return bytes >= 512 ? IBV_MTU_512 : IBV_MTU_256;
}

std::uint32_t mtu_bytes(ibv_mtu code) noexcept { return 128u << static_cast<unsigned>(code); }

Result<void> check_limits(const ibv_device_attr& device, const DeviceOptions& asked,
                          const std::string& name) {
  const bool shared = asked.shared_receives && shares_receives(device);
  const auto limit = [](int has) { return static_cast<std::uint64_t>(std::max(has, 0)); };
  const Limit limits[] = {
      {"queues.completion_depth", asked.completion_depth, limit(device.max_cqe)},
      {"queues.receive_depth", shared ? asked.receive_depth : 0, limit(device.max_srq_wr)},
      {"queues.send_depth", asked.send_depth, limit(device.max_qp_wr)},
  };
  if (auto good = check_each(limits, name); !good) return good;
  if (device.max_sge < static_cast<int>(kSendElements)) {
    return base::fail(Status::limit, base::format("{} elements a work request", kSendElements),
                      base::format("device {} has {}", name, device.max_sge), "use another device");
  }
  return {};
}

Result<std::unique_ptr<Device>> Device::open(const DeviceOptions& options,
                                             std::span<const Provider* const> from) {
  std::unique_ptr<Device> device(new Device(options));
  auto selected = select_device(from, options.wish, options.clock);
  if (!selected) return tl::unexpected(selected.error());
  device->selected_ = std::move(*selected);
  if (auto done = device->set_up(); !done) return tl::unexpected(done.error());
  return device;
}

Result<void> Device::set_up() {
  Selection& s = selected_;
  ibv_device_attr attr{};
  if (const int error = provider().query_device(context(), &attr); error != 0)
    return verb_failed("query the device", "ibv_query_device", error);
  if (auto fits = check_limits(attr, options_, s.name); !fits) return fits;
  if (options_.pkey_index >= s.port_attr.pkey_tbl_len) {
    return over_limit({"queue_pair.pkey_index", options_.pkey_index,
                       std::max<std::uint64_t>(s.port_attr.pkey_tbl_len, 1) - 1},
                      s.name);
  }
  const auto chosen = std::find_if(s.candidates.begin(), s.candidates.end(),
                                   [](const DeviceCandidate& c) { return c.chosen; });
  info_.provider = provider().name;
  info_.name = s.name;
  info_.guid = guid_of(attr);
  info_.port = s.port;
  info_.gid_index = s.gid.index;
  info_.gid = chosen->gid;
  info_.netdev = s.gid.netdev;
  info_.link_layer = chosen->link_layer;
  info_.gid_type = s.gid.type;
  info_.mtu = mtu_bytes(s.port_attr.active_mtu);
  constexpr std::uint32_t kSpecified = 1u << 31;  // IB specification volume 1, 9.7.7
  info_.max_operation_bytes = std::min(s.port_attr.max_msg_sz, kSpecified);
  max_initiator_depth_ = static_cast<std::uint32_t>(std::max(attr.max_qp_init_rd_atom, 1));
  max_responder_depth_ = static_cast<std::uint32_t>(std::max(attr.max_qp_rd_atom, 1));
  info_.initiator_depth = std::min(max_initiator_depth_, options_.initiator_depth);
  info_.responder_depth = std::min(max_responder_depth_, options_.responder_depth);
  max_send_depth_ = static_cast<std::uint32_t>(std::max(attr.max_qp_wr, 0));
  ports_ = attr.phys_port_cnt;
  place_ = place_of(s.port, s.port_attr, s.gid);
  info_.max_sge = static_cast<std::uint32_t>(attr.max_sge);
  info_.atomics = attr.atomic_cap != IBV_ATOMIC_NONE;
  if (provider().memory_flags != nullptr) info_.memory_flags = provider().memory_flags(context());
  info_.memory_windows = (attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0;
  info_.shared_receives = options_.shared_receives && shares_receives(attr);
  options_.own_receives = std::min(options_.own_receives, max_send_depth_);
  options_.domain_receives = std::min(options_.domain_receives, max_send_depth_);
  max_domains_ = attr.max_pd;
  info_.candidates = std::move(s.candidates);
  return make_queues();
}

Result<void> Device::make_queues() {
  pd_ = provider().alloc_pd(context());
  if (pd_ == nullptr) return short_of_memory("make a protection domain", "ibv_alloc_pd", errno, 0);
  make_thread_domain();
  if (info_.memory_windows) probe_memory_windows();
  const std::string asked =
      base::format("make a completion queue of {} entries", options_.completion_depth);
  if (auto there = base::check_available_memory(
          options_.completion_depth * sizeof(ibv_wc), asked,
          "lower queues.completion_depth, or free memory of this machine or its cgroup");
      !there)
    return there;
  const CompletionQueueOptions queue{static_cast<int>(options_.completion_depth),
                                     /*single_threaded=*/true, domain_};
  cq_ = provider().create_cq(context(), queue);
  if (cq_ == nullptr) {
    return short_of_memory(asked, "ibv_create_cq", errno,
                           std::uint64_t{options_.completion_depth} * kEntryBytes);
  }
  if (auto made = make_shared_receives(); !made) return made;
  probe_datagrams();
  return probe_queue_pair();
}

/// Makes the shared receive queue. A device may report shared receive queues but refuse to make
/// one.
Result<void> Device::make_shared_receives() {
  if (info_.shared_receives) {
    ibv_srq_init_attr srq{};
    srq.attr.max_wr = options_.receive_depth;
    srq.attr.max_sge = 1;
    srq_ = provider().create_srq(queue_pd(), &srq);
    if (srq_ != nullptr) return {};
    const int error = errno;
    if (error != EOPNOTSUPP && error != ENOSYS) {
      return short_of_memory(
          base::format("make a shared receive queue of {}", options_.receive_depth),
          "ibv_create_srq", error, std::uint64_t{options_.receive_depth} * kEntryBytes);
    }
  }
  info_.shared_receives = false;
  info_.own_receives = options_.own_receives;
  if (options_.shared_receives) {
    base::log(LogLevel::warning,
              "device {} has no shared receive queue: each connection has {} receives of its own, "
              "so that queues.receive_depth = {} allows {} connections",
              info_.name, info_.own_receives, options_.receive_depth,
              options_.receive_depth / std::max(info_.own_receives, 1u));
  }
  return {};
}

/// Makes a thread domain, so that the device can omit locks: one thread drives all queues.
void Device::make_thread_domain() noexcept {
  if (provider().alloc_td == nullptr) return;
  td_ = provider().alloc_td(context());
  if (td_ == nullptr) return;
  domain_ = provider().alloc_parent_domain(context(), pd_, td_);
  info_.single_threaded = domain_ != nullptr;
}

/// Tests whether the device makes memory windows: it may report them, but refuse to make one.
void Device::probe_memory_windows() noexcept {
  ibv_mw* window = provider().alloc_mw(pd_, IBV_MW_TYPE_2);
  info_.memory_windows = window != nullptr;
  if (window != nullptr) (void)provider().dealloc_mw(window);
}

ibv_qp* Device::try_qp(const QueuePairOptions& options, ibv_pd* domain) noexcept {
  // A shared queue's receives are in the engine's domain; some devices do not use them for a queue
  // pair of another domain.
  const bool raw = options.receive_depth != 0;
  ibv_srq* const shared = domain == nullptr && !raw ? srq_ : nullptr;
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.srq = shared;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = options.send_depth;
  init.cap.max_send_sge = options.send_elements;
  init.cap.max_recv_wr = raw                 ? options.receive_depth
                         : domain != nullptr ? domain_receives()
                                             : info_.own_receives;
  init.cap.max_recv_sge = shared == nullptr ? options.receive_elements : 0;
  init.cap.max_inline_data = options.inline_bytes;
  return provider().create_qp(domain != nullptr ? domain : queue_pd(), &init);
}

/// Makes a queue pair to test its options, because no attribute reports which go together. Elements
/// above the fewest and inline data are optional, so less of them is tried in turn.
Result<void> Device::probe_queue_pair() {
  QueuePairOptions tried;
  tried.send_depth = options_.send_depth;
  tried.send_elements = std::min(options_.send_elements, info_.max_sge);
  tried.inline_bytes = options_.inline_bytes;
  for (;;) {
    ibv_qp* qp = try_qp(tried);
    if (qp != nullptr) {
      (void)provider().destroy_qp(qp);
      break;
    }
    if (tried.send_elements > kSendElements) {
      tried.send_elements = kSendElements;
    } else if (tried.inline_bytes != 0) {
      tried.inline_bytes /= 2;
    } else {
      return short_of_memory(
          base::format("make a queue pair with queues.send_depth = {} and {} receives of its own",
                       options_.send_depth, info_.own_receives),
          "ibv_create_qp", errno,
          std::uint64_t{options_.send_depth + info_.own_receives} * kEntryBytes);
    }
  }
  info_.inline_bytes = tried.inline_bytes;
  send_elements_ = tried.send_elements;
  if (send_elements_ != options_.send_elements) {
    base::log(LogLevel::info, "queues.max_send_sge = {}: device {} has {}, which is used",
              options_.send_elements - 1, info_.name, send_elements_ - 1);
  }
  if (info_.inline_bytes != options_.inline_bytes) {
    base::log(LogLevel::warning, "queues.inline_bytes = {}: device {} has {}, which is used",
              options_.inline_bytes, info_.name, info_.inline_bytes);
  }
  return {};
}

bool Device::wait_for_local_accesses() noexcept {
  constexpr Nanoseconds kLongest = std::chrono::seconds(5);
  return provider().wait_for_local_accesses == nullptr ||
         provider().wait_for_local_accesses(context(), kLongest);
}

Device::~Device() {
  if (selected_.context == nullptr) return;
  // A peer may be accessing memory. If it was stopped there, its object is leaked.
  constexpr int kAttempts = 2000;
  for (int i = 0; !leaving_.empty() && i < kAttempts; ++i) {
    destroy_left();
    sched_yield();
  }
  for (int i = 0; poll_retired_domains() && i < kAttempts; ++i) {
  }
  if (srq_ != nullptr) provider().destroy_srq(srq_);
  for (int i = 0; slab_ != nullptr && i < kAttempts; ++i) {
    if (provider().dereg_mr(slab_) != EBUSY) break;
    sched_yield();
  }
  if (cq_ != nullptr) provider().destroy_cq(cq_);
  if (domain_ != nullptr) provider().dealloc_pd(domain_);
  if (td_ != nullptr) provider().dealloc_td(td_);
  if (pd_ != nullptr) provider().dealloc_pd(pd_);
  provider().close_device(context());
}

ibv_mr* Device::register_slab(std::span<std::byte> slab) noexcept {
  const int windows = info_.memory_windows ? IBV_ACCESS_MW_BIND : 0;
  slab_ = provider().reg_mr(pd_, slab.data(), slab.size(), IBV_ACCESS_LOCAL_WRITE | windows);
  return slab_;
}

Result<ibv_qp*> Device::create_qp(const QueuePairOptions& options, ibv_pd* domain) {
  destroy_left();
  leaving_.reserve(queue_pairs_ + 1);
  ibv_qp* qp = try_qp(options, domain);
  if (qp == nullptr) {
    return short_of_memory(
        "make a queue pair", "ibv_create_qp", errno,
        (std::uint64_t{options.send_depth} + options.receive_depth) * kEntryBytes);
  }
  ++queue_pairs_;
  return qp;
}

Result<void> Device::to_init(ibv_qp* qp, const QueuePairOptions& options) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = options.place.port;
  attr.pkey_index = options.path.pkey_index;
  attr.qp_access_flags = static_cast<unsigned>(options.access);
  return modify_qp(qp, attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
                   "bring a queue pair to INIT");
}

namespace {

/// Within an InfiniBand subnet the LID is enough; everywhere else the GID addresses the peer.
bool needs_route(const Place& place, const ibv_gid& peer) noexcept {
  return place.link_layer != LinkLayer::infiniband ||
         peer.global.subnet_prefix != place.gid.global.subnet_prefix;
}

}  // namespace

ibv_ah_attr address_of(const QueuePairOptions& options, const RemoteQueuePair& remote) noexcept {
  ibv_ah_attr attr{};
  attr.is_global = needs_route(options.place, remote.gid) ? 1 : 0;
  attr.port_num = options.place.port;
  attr.dlid = remote.lid;
  attr.sl = options.path.service_level;
  attr.src_path_bits = options.path.src_path_bits;
  attr.static_rate = options.path.static_rate;
  attr.grh.dgid = remote.gid;
  attr.grh.sgid_index = static_cast<std::uint8_t>(options.place.gid_index);
  attr.grh.hop_limit = options.path.hop_limit;
  attr.grh.traffic_class = options.path.traffic_class;
  attr.grh.flow_label = options.path.flow_label;
  return attr;
}

Result<void> Device::to_rtr(ibv_qp* qp, const QueuePairOptions& options,
                            const RemoteQueuePair& remote) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = mtu_code(remote.mtu);
  attr.dest_qp_num = remote.qp_num;
  attr.rq_psn = remote.psn;
  attr.max_dest_rd_atomic = options.responder_depth;
  attr.min_rnr_timer = options.retry.min_rnr_timer;
  attr.ah_attr = address_of(options, remote);
  const int error =
      provider().modify_qp(qp, &attr,
                           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                               IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  // On the embedded device: the peer died during the handshake, or closed its device.
  if (error == ENOENT || error == ESRCH || error == ENODEV)
    return base::fail_errno(Status::peer_lost, "reach the peer's device (RTR)", "ibv_modify_qp",
                            error, "see whether the peer's process still runs");
  if (error == 0) return {};
  return base::fail_errno(Status::system, "reach the peer's device (RTR)", "ibv_modify_qp", error,
                          "both ends must use the same kind of device, on one network");
}

Result<void> Device::to_rts(ibv_qp* qp, const QueuePairOptions& options, std::uint32_t psn,
                            const RemoteQueuePair& remote) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = options.retry.ack_timeout;
  attr.retry_cnt = options.retry.retry_count;
  attr.rnr_retry = options.retry.rnr_retry;
  attr.sq_psn = psn;
  attr.max_rd_atomic = std::clamp<std::uint8_t>(remote.responder_depth, 1, options.initiator_depth);
  return modify_qp(qp, attr,
                   IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
                   "bring a queue pair to RTS");
}

Result<void> Device::modify_qp(ibv_qp* qp, ibv_qp_attr attr, int mask, const char* asked) {
  const int error = provider().modify_qp(qp, &attr, mask);
  if (error == 0) return {};
  return verb_failed(asked, "ibv_modify_qp", error);
}

bool Device::to_error(ibv_qp* qp) noexcept {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_ERR;
  return provider().modify_qp(qp, &attr, IBV_QP_STATE) == 0;
}

void Device::destroy_qp(ibv_qp* qp) noexcept {
  leaving_.push_back(qp);  // NOLINT(bugprone-exception-escape): reserved at its creation
  destroy_left();
}

void Device::destroy_left() noexcept {
  queue_pairs_ -=
      std::erase_if(leaving_, [this](ibv_qp* qp) { return provider().destroy_qp(qp) != EBUSY; });
}

Result<ibv_qp_state> Device::query_state(ibv_qp* qp) {
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  if (const int error = provider().query_qp(qp, &attr, IBV_QP_STATE, &init); error != 0)
    return verb_failed("query a queue pair", "ibv_query_qp", error);
  return attr.qp_state;
}

}  // namespace spinwire::verbs
