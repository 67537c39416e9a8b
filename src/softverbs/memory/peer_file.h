// Opens shared memory, or a pipe, of another process. That process supplies the descriptor's
// number, which may name any file: a terminal, a network file, memory that shrinks. Cold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/unique_fd.h"

namespace spinwire::softverbs {

/// The files that a peer's descriptor may name.
enum class PeerFileKind : std::uint8_t {
  ordinary_pages,  ///< a memfd of ordinary pages
  any_pages,       ///< a memfd of ordinary pages or of hugepages
};

struct PeerFile {
  base::UniqueFd fd;  ///< open for reading and writing
  std::uint64_t size = 0;
  std::uint64_t inode = 0;
  std::uint64_t hugepage = 0;  ///< size of its pages; 0: ordinary pages
};

/// Opens descriptor `fd` of process `pid`, if it is a memfd of this user that can never shrink.
/// Opens nothing else, so that no driver, file lease or remote file system gets involved. On
/// failure `fd` is empty and errno is set. EPERM: of another user; ENODEV: not such a memfd;
/// others: as open().
[[nodiscard]] PeerFile open_peer_file(std::uint32_t pid, std::uint32_t fd,
                                      PeerFileKind kind) noexcept;

/// Opens descriptor `fd` of process `pid`, if it is the pipe of this user with that inode, so that
/// a write neither blocks nor raises SIGPIPE. Opens nothing else, as above. On failure the result
/// is empty and errno is set. EPERM: of another user; ENODEV: not that pipe; others: as open().
[[nodiscard]] base::UniqueFd open_peer_pipe(std::uint32_t pid, std::uint32_t fd,
                                            std::uint64_t inode) noexcept;

}  // namespace spinwire::softverbs
