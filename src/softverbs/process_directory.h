// The GID that the contexts of a process share, and the table by which a peer finds the context
// that one of their queue pairs belongs to. A program for libibverbs takes the GID for its host's
// port, whatever context it asked: queue pairs are found by GID and number. Cold.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/shared_memory.h"
#include "spinwire/status.h"

namespace spinwire::softverbs {

/// A context's place in the directory of its process. Its queue pairs have the seat's number in
/// bits 16 to 23 of theirs, so no two contexts of a process have a queue pair of one number.
class ProcessSeat {
 public:
  ProcessSeat() noexcept = default;
  ProcessSeat(ProcessSeat&& other) noexcept;
  ProcessSeat& operator=(ProcessSeat&& other) noexcept;
  /// Leaves the directory; a forked child leaves its parent's alone.
  ~ProcessSeat();

  /// Enters the context with this GID of its own. Errors: limit if 256 contexts are open; those of
  /// SharedMemory::create().
  static Result<ProcessSeat> take(const ibv_gid& context);

  explicit operator bool() const noexcept { return directory_ != nullptr; }
  [[nodiscard]] std::uint32_t number() const noexcept { return number_; }
  /// The GID of the process.
  [[nodiscard]] ibv_gid gid() const noexcept;

 private:
  std::shared_ptr<base::SharedMemory> directory_;
  std::uint32_t number_ = 0;
};

/// The number of the seat of a queue pair's context.
constexpr std::uint32_t seat_of(std::uint32_t qpn) noexcept { return (qpn >> 16) & 0xff; }

/// Whether this is the GID of a process.
bool names_process(const ibv_gid& gid) noexcept;

/// False, errno and the reason if the process with this GID is gone or has closed its contexts.
bool process_is_there(const ibv_gid& gid, std::string& why) noexcept;

/// Finds the context's own GID for one that a program gave with a queue pair's number: that of its
/// process, or its own already. False, errno and the reason in `why` if there is no such context.
bool find_context(const ibv_gid& given, std::uint32_t qpn, ibv_gid& context,
                  std::string& why) noexcept;

}  // namespace spinwire::softverbs
