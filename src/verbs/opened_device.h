// An opened device of either provider, with its queues. All calls are set-up; the hot path uses
// cq() and srq() with the ibv_* calls.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spinwire/clock.h"
#include "spinwire/device.h"
#include "spinwire/status.h"
#include "verbs/provider.h"
#include "verbs/providers.h"
#include "verbs/selection.h"

namespace spinwire::verbs {

/// Path attributes of a queue pair.
struct PathOptions {
  std::uint16_t pkey_index = 0;
  std::uint8_t service_level = 0;
  std::uint8_t traffic_class = 0;
  std::uint8_t hop_limit = 255;
  std::uint8_t src_path_bits = 0;
  std::uint8_t static_rate = 0;
  std::uint32_t flow_label = 0;
};

/// A port of the device, and one of its GIDs.
struct Place {
  std::uint8_t port = 0;
  int gid_index = 0;
  ibv_gid gid{};
  GidType gid_type = GidType::unknown;
  LinkLayer link_layer = LinkLayer::unknown;
  std::uint16_t lid = 0;
  std::uint32_t mtu = 0;    ///< active, bytes
  std::uint32_t pkeys = 0;  ///< entries in the table of partition keys

  /// Whether both are the same port and GID of one device.
  [[nodiscard]] bool is_at(const Place& other) const noexcept {
    return port == other.port && gid_index == other.gid_index;
  }
};

/// Fewest scatter/gather elements of a send work request: a header and a payload.
inline constexpr std::uint32_t kSendElements = 2;

struct DeviceOptions {
  DeviceWish wish;
  std::uint32_t completion_depth = 0;
  std::uint32_t receive_depth = 0;
  bool shared_receives = true;        ///< preferred; otherwise each queue pair has its own
  std::uint32_t own_receives = 0;     ///< receives of each queue pair then, if the device allows as
                                      ///< many
  std::uint32_t domain_receives = 0;  ///< with a shared queue: receives of a queue pair in its own
                                      ///< domain
  std::uint32_t send_depth = 0;       ///< of each queue pair
  std::uint32_t inline_bytes = 0;     ///< wanted; fewer will do
  std::uint32_t initiator_depth = 128;          ///< wanted; fewer will do
  std::uint32_t responder_depth = 128;          ///< wanted; fewer will do
  std::uint32_t send_elements = kSendElements;  ///< of a send work request; wanted
  std::uint16_t pkey_index = 0;
  Clock clock = Clock::real();
};
struct RemoteQueuePair {
  ibv_gid gid{};
  std::uint16_t lid = 0;
  std::uint32_t qp_num = 0;
  std::uint32_t psn = 0;
  std::uint32_t mtu = 0;             ///< bytes
  std::uint8_t responder_depth = 1;  ///< READs and atomics that it accepts
};
struct RetryOptions {
  std::uint8_t ack_timeout = 14;
  std::uint8_t retry_count = 7;
  std::uint8_t rnr_retry = 7;
  std::uint8_t min_rnr_timer = 12;
};

/// Attributes of a queue pair that do not depend on its peer.
struct QueuePairOptions {
  std::uint32_t send_depth = 0;
  std::uint32_t inline_bytes = 0;
  std::uint8_t initiator_depth = 1;  ///< outstanding READs and atomics of ours
  std::uint8_t responder_depth = 1;  ///< of the peer
  int access = 0;                    ///< IBV_ACCESS_*
  std::uint32_t send_elements = kSendElements;
  std::uint32_t receive_elements = 1;
  std::uint32_t receive_depth = 0;  ///< depth of a raw queue pair's own receive queue; 0: not raw
  Place place;
  PathOptions path;
  RetryOptions retry;
};

/// A queue pair for unreliable datagrams.
struct DatagramOptions {
  std::uint32_t send_depth = 0;
  std::uint32_t receive_depth = 0;
  std::uint32_t inline_bytes = 0;
  std::uint32_t qkey = 0;
  std::uint32_t psn = 0;
};

/// A protection domain for one connection.
struct Domain {
  ibv_pd* pd = nullptr;
  ibv_mr* slab = nullptr;  ///< the slab, registered in this domain
};

class Device {
 public:
  /// Selects a device, opens it and makes its queues. Errors: no_device, with the devices and why
  /// none was chosen; limit, with the value asked for and the limit; no_memory, with the limit on
  /// locked memory; system.
  static Result<std::unique_ptr<Device>> open(const DeviceOptions& options,
                                              std::span<const Provider* const> from = providers());
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();

  [[nodiscard]] const Provider& provider() const noexcept { return *selected_.provider; }
  [[nodiscard]] ibv_context* context() const noexcept { return selected_.context; }
  [[nodiscard]] ibv_pd* pd() const noexcept { return pd_; }  ///< the engine's protection domain
  [[nodiscard]] ibv_cq* cq() const noexcept { return cq_; }
  /// Null: each queue pair has info().own_receives receives of its own.
  [[nodiscard]] ibv_srq* srq() const noexcept { return srq_; }
  /// Name, place and capabilities.
  [[nodiscard]] const DeviceInfo& info() const noexcept { return info_; }
  /// Scatter/gather elements of a send work request, unless its queue pair has other options.
  [[nodiscard]] std::uint32_t send_elements() const noexcept { return send_elements_; }

  /// The slab's registration, for local use and for memory windows if the device has them. On
  /// failure register_slab() returns null and sets errno.
  [[nodiscard]] ibv_mr* slab() const noexcept { return slab_; }
  ibv_mr* register_slab(std::span<std::byte> slab) noexcept;

  // Domains, in domain.cc. One control verb each.
  /// Errors: limit, with the number of domains in use and the device's limit; system.
  Result<void> make_domain(Domain& domain);
  /// Registers the slab in `domain`, for local use. Null and errno on failure.
  ibv_mr* register_slab(Domain& domain, std::span<std::byte> slab) noexcept;
  /// Takes the next step of closing; `pd` is null after the last. False: an object in the domain is
  /// still in use. Then call retire_domain(): the device keeps the domain and
  /// poll_retired_domains() retries.
  bool end_domain(Domain& domain) noexcept;
  void retire_domain(const Domain& domain) noexcept;
  /// Tries again to destroy the queue pairs that could not be, then takes the next step of closing
  /// a domain given to retire_domain(); false if there is none.
  bool poll_retired_domains() noexcept;
  /// Waits until no thread of this process accesses this device's memory. Call it before memory is
  /// unmapped, when no queue pair responds any more. False: an access took too long; do not unmap.
  bool wait_for_local_accesses() noexcept;
  [[nodiscard]] std::size_t domains() const noexcept { return domains_; }  ///< not ended
  /// Receives of a queue pair in its own domain.
  [[nodiscard]] std::uint32_t domain_receives() const noexcept {
    return srq_ != nullptr ? options_.domain_receives : info_.own_receives;
  }

  /// The engine's port and GID.
  [[nodiscard]] const Place& place() const noexcept { return place_; }
  /// Finds another port or GID of this device; a `gid_index` of -1 takes the port's best GID.
  /// Errors: limit; no_device, with the reason; system.
  Result<Place> find_place(std::uint8_t port, int gid_index);
  /// Asks the device for the present place of a port that exists; `gid_index` as above. Errors:
  /// no_device, also if the link is down; system.
  Result<Place> query_place(std::uint8_t port, int gid_index);
  [[nodiscard]] std::uint32_t ports() const noexcept { return ports_; }
  /// Entries of the tables of a port, usable or not.
  struct TableSizes {
    std::uint32_t gids = 0;
    std::uint32_t pkeys = 0;
  };
  /// Asks for those of a port that exists. Errors: system.
  Result<TableSizes> table_sizes(std::uint8_t port);
  /// Whether the link of a port is up now. False also if the device does not tell.
  [[nodiscard]] bool is_link_up(std::uint8_t port);
  /// Checks that the device supports these options. Makes a queue pair to test options beyond those
  /// of the engine's own queue pairs. Errors: limit, with the member of ConnectionSettings, the
  /// value asked for and the limit.
  Result<void> check(const QueuePairOptions& asked);

  // One control verb each.
  /// Makes a queue pair in the engine's protection domain, or in `domain` with its own receives.
  Result<ibv_qp*> create_qp(const QueuePairOptions& options, ibv_pd* domain = nullptr);
  Result<void> to_init(ibv_qp* qp, const QueuePairOptions& options);
  Result<void> to_rtr(ibv_qp* qp, const QueuePairOptions& options, const RemoteQueuePair& remote);
  Result<void> to_rts(ibv_qp* qp, const QueuePairOptions& options, std::uint32_t psn,
                      const RemoteQueuePair& remote);
  /// Modifies a queue pair with the caller's attributes. `asked`: the purpose, for the error.
  Result<void> modify_qp(ibv_qp* qp, ibv_qp_attr attr, int mask,
                         const char* asked = "bring a queue pair up");
  /// False if the device refused; then destroy the queue pair.
  bool to_error(ibv_qp* qp) noexcept;
  /// Destroys the queue pair. While a peer's access is in progress, it waits in a list.
  void destroy_qp(ibv_qp* qp) noexcept;
  Result<ibv_qp_state> query_state(ibv_qp* qp);

  // Datagrams, in device_datagrams.cc. Destroy their queue pairs with destroy_qp().
  /// Makes a queue pair at the engine's place, with its own receives, ready to send: several
  /// control verbs. Errors: no_memory, system.
  Result<ibv_qp*> create_datagram_qp(const DatagramOptions& options);
  /// Returns a queue pair from SQE to RTS after a failed send; false if the device refused.
  bool restart_sends(ibv_qp* qp) noexcept;
  Result<ibv_ah*> create_ah(const QueuePairOptions& options, const RemoteQueuePair& remote);
  void destroy_ah(ibv_ah* ah) noexcept;
  /// Waits until the kernel knows the neighbour at `gid`, as seen from `from`. Returns 0 or an
  /// errno value. Any thread.
  int wait_for_neighbour(const Place& from, const ibv_gid& gid) noexcept;
  /// Whether the device knows that the peer's process has ended.
  [[nodiscard]] bool peer_has_ended(const ibv_ah* ah) const noexcept;

 private:
  explicit Device(const DeviceOptions& options) : options_(options) {}
  Result<void> set_up();
  Result<void> make_queues();
  Result<void> make_shared_receives();
  Result<void> probe_queue_pair();
  void probe_memory_windows() noexcept;
  void probe_datagrams() noexcept;
  void make_thread_domain() noexcept;
  [[nodiscard]] ibv_pd* queue_pd() const noexcept { return domain_ != nullptr ? domain_ : pd_; }
  ibv_qp* try_qp(const QueuePairOptions& options, ibv_pd* domain = nullptr) noexcept;
  void destroy_left() noexcept;
  int raise_datagram_qp(ibv_qp* qp, const DatagramOptions& options) noexcept;

  DeviceOptions options_;
  Selection selected_;
  ibv_pd* pd_ = nullptr;
  ibv_td* td_ = nullptr;
  ibv_pd* domain_ = nullptr;  ///< the parent domain that holds `td_`
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  ibv_mr* slab_ = nullptr;
  std::vector<ibv_qp*> leaving_;         ///< waiting to be destroyed; has room for all queue pairs
  std::size_t queue_pairs_ = 0;          ///< made and not destroyed
  std::vector<Domain> retired_domains_;  ///< waiting to be closed; has room for all
  std::size_t domains_ = 0;              ///< made and not closed
  int max_domains_ = 0;
  Place place_;
  std::uint32_t ports_ = 0;
  std::uint32_t max_send_depth_ = 0;  ///< also the limit of receives
  std::uint32_t max_initiator_depth_ = 0;
  std::uint32_t max_responder_depth_ = 0;
  std::uint32_t send_elements_ = kSendElements;
  DeviceInfo info_;
};

/// Whether the device has shared receive queues.
bool shares_receives(const ibv_device_attr& device) noexcept;

Place place_of(std::uint8_t port, const ibv_port_attr& attr, const GidEntry& gid) noexcept;

/// The address vector of a peer, from the place and path of `options`.
ibv_ah_attr address_of(const QueuePairOptions& options, const RemoteQueuePair& remote) noexcept;

/// A setting and the limit of the device for it.
struct Limit {
  const char* setting;
  std::uint64_t asked;
  std::uint64_t has;
};
/// The Error for a setting above the limit of the device named `device`.
tl::unexpected<Error> over_limit(const Limit& limit, const std::string& device);
/// Errors: limit, for the first setting above its limit.
Result<void> check_each(std::span<const Limit> limits, const std::string& device);

/// The largest IBV_MTU_* that does not exceed `bytes`.
ibv_mtu mtu_code(std::uint32_t bytes) noexcept;
std::uint32_t mtu_bytes(ibv_mtu code) noexcept;

/// Checks `asked` against the device's limits; `name` is for the error. Errors: limit, with the
/// setting, the value asked for and the limit.
Result<void> check_limits(const ibv_device_attr& device, const DeviceOptions& asked,
                          const std::string& name);

}  // namespace spinwire::verbs
