// Resolves the address in a peer's frame before a verb uses it. On RoCE, ibv_create_ah() and the
// step to RTR wait inside the kernel for ARP or neighbour discovery, a second if there is no answer
// (rdma_core: ib_resolve_eth_dmac). The kernel's rdma_cm does the same work without blocking its
// caller. Afterwards the kernel knows the neighbour, and the verbs find it at once. Cold.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "control/owners.h"
#include "control/rdma_ucm.h"
#include "spinwire/device.h"

namespace spinwire::control {

class ControlPort;

/// The purpose of a resolution: a handshake, or without one, a connection's subject.
struct Resolution {
  HandshakeId handshake;
  std::uint64_t subject = 0;
};

class AddressResolver {
 public:
  virtual ~AddressResolver() = default;
  /// Begins a resolution. True: a verb may use the address now. False: ControlPort::on_resolved()
  /// reports the outcome. `type`: unknown for that of our device. Errors: peer_lost if there is no
  /// route; limit, no_memory, system.
  virtual Result<bool> begin(const Resolution& what, const std::array<std::uint8_t, 16>& gid,
                             GidType type) = 0;
  /// Drops a resolution whose outcome is not needed any more.
  virtual void cancel(const Resolution& what) noexcept = 0;
};

/// Resolves through rdma_cm. On a system without rdma_cm, the verbs resolve, and wait.
class CmAddressResolver final : public AddressResolver, public DescriptorOwner {
 public:
  /// `local`: the GID of our device; `interface`: the number of its network interface.
  CmAddressResolver(ControlPort& port, const std::array<std::uint8_t, 16>& local, GidType type,
                    std::uint32_t interface)
      : port_(port), local_(local), type_(type), interface_(interface) {
    // Opened at once, so that no peer makes us open anything. A failure is retried when needed.
    (void)open();
  }
  CmAddressResolver(const CmAddressResolver&) = delete;
  CmAddressResolver& operator=(const CmAddressResolver&) = delete;
  ~CmAddressResolver() override;

  Result<bool> begin(const Resolution& what, const std::array<std::uint8_t, 16>& gid,
                     GidType type) override;
  void cancel(const Resolution& what) noexcept override;
  void on_readable() override;

 private:
  struct Pending {
    std::uint32_t id;  ///< the kernel's id
    Resolution what;
    std::string address;
  };

  /// Opens the channel. Returns false if the system has no rdma_cm. Errors: limit, no_memory,
  /// system.
  Result<bool> open();

  ControlPort& port_;
  std::array<std::uint8_t, 16> local_;
  GidType type_;
  std::uint32_t interface_;
  bool has_rdma_cm_ = true;
  UcmChannel channel_;
  std::uint64_t last_key_ = 0;
  std::map<std::uint64_t, Pending> pending_;
};

}  // namespace spinwire::control
