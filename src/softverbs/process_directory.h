// The GID that the contexts of a process share, and the table in which a peer finds a queue pair's
// context. A program for libibverbs takes any context's GID for that of its host's port; so peers
// find queue pairs by GID and number. Cold.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "spinwire/status.h"

namespace spinwire::softverbs {

struct PublishedDirectory;

/// A context's place in the directory of its process. Bits 16 to 23 of its queue pairs' numbers
/// hold the slot's number, so queue-pair numbers are unique in the process.
class DirectorySlot {
 public:
  DirectorySlot() noexcept = default;
  DirectorySlot(DirectorySlot&& other) noexcept { *this = std::move(other); }
  DirectorySlot& operator=(DirectorySlot&& other) noexcept;
  /// Leaves the directory; a forked child leaves its parent's alone.
  ~DirectorySlot();

  /// Enters the context whose own GID is `context`. Errors: limit if 256 contexts are open; those
  /// of SharedMemory::create().
  static Result<DirectorySlot> take(const ibv_gid& context);

  explicit operator bool() const noexcept { return directory_ != nullptr; }
  [[nodiscard]] std::uint32_t number() const noexcept { return number_; }
  /// The GID of the process.
  [[nodiscard]] ibv_gid gid() const noexcept;

 private:
  std::shared_ptr<PublishedDirectory> directory_;
  std::uint32_t number_ = 0;
};

/// The number of the slot of a queue pair's context.
constexpr std::uint32_t directory_slot_of(std::uint32_t qpn) noexcept { return (qpn >> 16) & 0xff; }

/// Whether `gid` is the GID of a process.
bool names_process(const ibv_gid& gid) noexcept;

/// Whether the process with this GID has open contexts. If not, sets errno and the reason in `why`.
bool process_is_there(const ibv_gid& gid, std::string& why) noexcept;

/// Finds a context's own GID. `given` is the GID of a process, with the number of a queue pair, or
/// already that of a context's port. If there is no such context, returns false and sets errno and
/// the reason in `why`.
bool find_context(const ibv_gid& given, std::uint32_t qpn, ibv_gid& context,
                  std::string& why) noexcept;

}  // namespace spinwire::softverbs
