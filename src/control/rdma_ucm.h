// The kernel's rdma_cm without librdmacm, only for resolving addresses. librdmacm opens the RDMA
// device of each identifier that it resolves and keeps it open, so that the device cannot be
// removed (librdmacm/cma.c: ucma_init_device). The commands are those of the kernel's
// rdma/rdma_user_cm.h, which do not change. Never blocks. Cold.
#pragma once

#include <rdma/rdma_cma.h>

#include <cstdint>
#include <optional>

#include "base/unique_fd.h"
#include "control/address.h"
#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::control {

/// An event of an identifier from the kernel.
struct UcmEvent {
  std::uint64_t key = 0;  ///< the key of resolve()
  rdma_cm_event_type kind = RDMA_CM_EVENT_ADDR_ERROR;
  int status = 0;  ///< 0, or an errno value
};

class UcmChannel {
 public:
  /// Errors: no_device if the system has no rdma_cm; limit, no_memory, system.
  static Result<UcmChannel> open();
  UcmChannel() noexcept = default;

  [[nodiscard]] explicit operator bool() const noexcept { return fd_.get() >= 0; }
  /// Readable when there is an event.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

  /// Begins to resolve; an event with `key` reports the outcome. Returns the identifier, which
  /// lasts until destroy(). Errors: no_device if no RDMA device leads there; limit, no_memory,
  /// system.
  Result<std::uint32_t> resolve(std::uint64_t key, const Address& to, const Address& from,
                                Nanoseconds timeout);
  /// Destroys the identifier and drops its unread events.
  void destroy(std::uint32_t id) noexcept;
  /// The next event, if there is one.
  std::optional<UcmEvent> next() noexcept;

 private:
  base::UniqueFd fd_;
};

}  // namespace spinwire::control
