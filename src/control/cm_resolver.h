// Resolves addresses through the kernel's rdma_cm, and through threads where it cannot: on a system
// without rdma_cm, and from a port or GID other than the engine's. Cold.
#pragma once

#include <cstdint>
#include <map>

#include "control/rdma_ucm.h"
#include "control/threaded_resolver.h"

namespace spinwire::control {

class CmResolver final : public AddressResolver, public DescriptorOwner {
 public:
  /// `own`: the engine's port and GID; `interface`: the number of its network interface.
  CmResolver(ControlPort& port, const verbs::Place& own, std::uint32_t interface,
             WaitForNeighbour wait);
  CmResolver(const CmResolver&) = delete;
  CmResolver& operator=(const CmResolver&) = delete;
  ~CmResolver() override;

  Result<bool> begin(const Resolution& what, const Gid& gid, GidType type,
                     const verbs::Place* from) override;
  void cancel(const Resolution& what) noexcept override;
  void on_readable() override;

 private:
  struct Pending {
    std::uint32_t id;  ///< the kernel's id
    Resolution what;
    Gid gid;
  };

  /// Opens the channel. Returns false if the system has no rdma_cm. Errors: limit, no_memory,
  /// system.
  Result<bool> open();

  ControlPort& port_;
  const verbs::Place own_;
  const std::uint32_t interface_;
  bool has_rdma_cm_ = true;
  UcmChannel channel_;
  std::uint64_t last_key_ = 0;
  std::map<std::uint64_t, Pending> pending_;
  ThreadedResolver threads_;
};

}  // namespace spinwire::control
