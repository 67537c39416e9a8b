// librdmacm without its blocking: identifiers that own an rdma_cm_id, and one channel whose events
// arrive one by one, already acknowledged. rdma_cm provides the attributes of a queue pair. The
// owner of the queue pair makes and modifies it on its own opened device. Cold.
#pragma once

#include <rdma/rdma_cma.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "control/address.h"
#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::control {

/// Parameters of a connection's end besides addresses.
struct CmParameters {
  std::uint32_t qp_num = 0;
  bool shared_receives = true;
  std::uint8_t responder_resources = 1;  ///< READs and atomics served at once
  std::uint8_t initiator_depth = 1;      ///< READs and atomics started at once
  std::uint8_t retry_count = 7;
  std::uint8_t rnr_retry = 7;
  std::span<const std::byte> data;  ///< private data
};

/// An event taken from the channel.
struct CmEvent {
  rdma_cm_event_type kind = RDMA_CM_EVENT_ADDR_ERROR;
  int status = 0;                  ///< errno value, negative, or a rejection's reason
  rdma_cm_id* id = nullptr;        ///< for a request: a new identifier
  rdma_cm_id* listener = nullptr;  ///< for a request
  std::uint32_t qp_num = 0;        ///< for a request or answer: the peer's
  std::size_t size = 0;            ///< bytes of `storage`
  std::array<std::byte, 256> storage;
  [[nodiscard]] std::span<const std::byte> data() const noexcept { return {storage.data(), size}; }
  /// Describes the event, for an Error.
  [[nodiscard]] std::string found() const noexcept;
};

/// The channel that all identifiers of one engine report to.
class CmChannel {
 public:
  /// Opens librdmacm. Errors: no_device if the system has no rdma_cm; limit, no_memory, system.
  static Result<CmChannel> open();
  CmChannel() noexcept = default;

  [[nodiscard]] explicit operator bool() const noexcept { return channel_ != nullptr; }
  [[nodiscard]] int fd() const noexcept { return channel_->fd; }
  [[nodiscard]] rdma_event_channel* get() const noexcept { return channel_.get(); }
  /// Takes the next event. Returns false if there is none. Never blocks.
  bool next(CmEvent& event) noexcept;

 private:
  struct Close {
    void operator()(rdma_event_channel* channel) const noexcept {
      rdma_destroy_event_channel(channel);
    }
  };
  std::unique_ptr<rdma_event_channel, Close> channel_;
};

/// One end of a connection, or a listener. Destroying it drops its unread events.
class CmId {
 public:
  /// Makes an identifier with `context` in rdma_cm_id::context. Errors: limit, no_memory, system.
  static Result<CmId> create(const CmChannel& channel, void* context);
  /// Takes over a request's identifier.
  static CmId adopt(rdma_cm_id* id, void* context) noexcept {
    id->context = context;
    return CmId(id);
  }
  CmId() noexcept = default;

  [[nodiscard]] explicit operator bool() const noexcept { return id_ != nullptr; }
  [[nodiscard]] rdma_cm_id* get() const noexcept { return id_.get(); }

  /// Each of these begins a step, whose event reports the outcome. Errors: invalid_argument,
  /// no_device, in_use, system; each names the call. `from`: the address of this host to use; null:
  /// by the routes.
  Result<void> resolve_address(const Address& to, Nanoseconds timeout,
                               const Address* from = nullptr);
  Result<void> resolve_route(Nanoseconds timeout);
  Result<void> listen(const Address& at, int backlog);
  Result<void> connect(const CmParameters& offer);
  Result<void> accept(const CmParameters& offer);
  /// Reports that the answer has arrived and our queue pair is up.
  Result<void> establish();
  void reject(std::span<const std::byte> data) noexcept;
  void disconnect() noexcept;

  /// The attributes for the queue pair's next state. Errors: system.
  Result<void> attributes(ibv_qp_state state, ibv_qp_attr& attr, int& mask) const;
  /// The device of the addresses; empty before they are resolved.
  [[nodiscard]] std::string device() const;
  [[nodiscard]] std::uint8_t port() const noexcept { return id_->port_num; }
  [[nodiscard]] const ibv_gid& own_gid() const noexcept { return id_->route.addr.addr.ibaddr.sgid; }
  [[nodiscard]] const ibv_gid& peer_gid() const noexcept {
    return id_->route.addr.addr.ibaddr.dgid;
  }
  [[nodiscard]] Result<Address> local_address() const;
  [[nodiscard]] Result<Address> peer_address() const;

 private:
  explicit CmId(rdma_cm_id* id) noexcept : id_(id) {}
  struct Destroy {
    void operator()(rdma_cm_id* id) const noexcept { (void)rdma_destroy_id(id); }
  };
  std::unique_ptr<rdma_cm_id, Destroy> id_;
};

}  // namespace spinwire::control
