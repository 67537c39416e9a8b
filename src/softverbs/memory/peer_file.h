// Opens shared memory of another process. The number of a descriptor comes from that process, so it
// may name anything: a terminal, a pipe, a file on a network, memory that shrinks. Cold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/unique_fd.h"

namespace spinwire::softverbs {

/// What a peer's descriptor may be.
enum class PeerFileKind : std::uint8_t {
  ordinary_pages,  ///< a memfd of ordinary pages
  any_pages,       ///< or one of hugepages
};

struct PeerFile {
  base::UniqueFd fd;  ///< open for reading and writing
  std::uint64_t size = 0;
  std::uint64_t inode = 0;
};

/// Opens descriptor `fd` of process `pid`, if it is a memfd of this user that can never shrink.
/// Nothing else is opened, so that no driver, file lease or remote file system is asked. Without a
/// descriptor, errno says why: EPERM: of another user; ENODEV: not such a memfd; others: open().
[[nodiscard]] PeerFile open_peer_file(std::uint32_t pid, std::uint32_t fd,
                                      PeerFileKind kind) noexcept;

}  // namespace spinwire::softverbs
