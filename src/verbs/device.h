// An opened device of either provider, with the objects that an engine has one of. Set-up, all of
// it; the hot path uses cq() and srq() with the ibv_* calls.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spinwire/clock.h"
#include "spinwire/status.h"
#include "verbs/provider.h"

namespace spinwire::verbs {

struct DeviceOptions {
  std::string name;
  std::uint8_t port = 1;
  int gid_index = -1;  ///< -1: chosen
  std::uint32_t completion_depth = 0;
  std::uint32_t receive_depth = 0;
  Clock clock = Clock::real();
};

/// What a reliable connection is brought up with.
struct QueuePairOptions {
  std::uint32_t send_depth = 0;
  std::uint32_t inline_bytes = 0;
  int access = 0;  ///< IBV_ACCESS_*
};
struct RemoteQueuePair {
  ibv_gid gid{};
  std::uint16_t lid = 0;
  std::uint32_t qp_num = 0;
  std::uint32_t psn = 0;
  std::uint32_t mtu = 0;  ///< bytes
  std::uint8_t rd_atomic = 1;
};
struct RetryOptions {
  std::uint8_t ack_timeout = 14;
  std::uint8_t retry_count = 7;
  std::uint8_t rnr_retry = 7;
  std::uint8_t min_rnr_timer = 12;
};

class Device {
 public:
  /// Errors: no_device naming those that there are; limit naming asked and available; system.
  static Result<std::unique_ptr<Device>> open(const DeviceOptions& options);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  [[nodiscard]] const Provider& provider() const noexcept { return provider_; }
  [[nodiscard]] ibv_context* context() const noexcept { return context_; }
  [[nodiscard]] ibv_pd* pd() const noexcept { return pd_; }
  [[nodiscard]] ibv_cq* cq() const noexcept { return cq_; }
  [[nodiscard]] ibv_srq* srq() const noexcept { return srq_; }
  [[nodiscard]] const ibv_gid& gid() const noexcept { return gid_; }
  [[nodiscard]] int gid_index() const noexcept { return gid_index_; }
  [[nodiscard]] std::uint16_t lid() const noexcept { return lid_; }
  [[nodiscard]] std::uint32_t mtu() const noexcept { return mtu_; }  ///< active, bytes
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::uint8_t rd_atomic() const noexcept { return rd_atomic_; }

  /// Registers the slab: local use and memory windows only.
  Result<ibv_mr*> register_slab(std::span<std::byte> slab);

  // One control verb each.
  Result<ibv_qp*> create_qp(const QueuePairOptions& options);
  Result<void> to_init(ibv_qp* qp, int access);
  Result<void> to_rtr(ibv_qp* qp, const RemoteQueuePair& remote, const RetryOptions& retry);
  Result<void> to_rts(ibv_qp* qp, std::uint32_t psn, const RemoteQueuePair& remote,
                      const RetryOptions& retry);
  /// False if the device refused, which leaves nothing to be done but to destroy it.
  bool to_error(ibv_qp* qp) noexcept;
  /// One that a peer is in the midst of an access through is kept aside until the peer has left.
  void destroy_qp(ibv_qp* qp) noexcept;

 private:
  explicit Device(const Provider& provider) : provider_(provider) {}
  Result<void> set_up(const DeviceOptions& options);
  Result<void> choose_port(const DeviceOptions& options);

  void destroy_left() noexcept;

  const Provider& provider_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  ibv_mr* slab_ = nullptr;
  std::vector<ibv_qp*> leaving_;  ///< to be destroyed; has room for all there are
  std::size_t queue_pairs_ = 0;   ///< there are
  ibv_gid gid_{};
  int gid_index_ = 0;
  std::uint8_t port_ = 1;
  std::uint16_t lid_ = 0;
  std::uint32_t mtu_ = 0;
  std::uint8_t rd_atomic_ = 1;
  std::string name_;
};

/// IBV_MTU_* of a path MTU in bytes, the largest that does not exceed it.
ibv_mtu mtu_code(std::uint32_t bytes) noexcept;
std::uint32_t mtu_bytes(ibv_mtu code) noexcept;

}  // namespace spinwire::verbs
