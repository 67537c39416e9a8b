#include "softverbs/memory/private_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/log_message.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::softverbs {
namespace {

/// Logs the cause of the kernel's refusal, which a completion's status cannot name.
void explain_refusal(const Peer& peer) noexcept {
  base::log(LogLevel::warning,
            "softverbs: the kernel forbids access to the private memory of process {}: Yama "
            "(kernel.yama.ptrace_scope), capabilities of its file, or another PID namespace; "
            "register memory that lies in a memfd, or set kernel.yama.ptrace_scope=0",
            peer.pid);
}

/// Logs that the user of this process does not trust the pages of peers.
void explain_choice(const Peer& peer) noexcept {
  base::log(LogLevel::warning,
            "softverbs: an operation on the private memory of process {} is refused, because that "
            "process could make it last for ever; let the memory lie in a pool of its engine, or "
            "trust all processes of this user: set {}=1",
            peer.pid, kTrustPagesVariable);
}

/// Opens the address space of the peer's process. Unlike process_vm_writev(), the descriptor never
/// leads to a later process with the same pid.
bool open_address_space(Peer& peer) noexcept {
  if (peer.context->page_trust != PageTrust::all) {
    // The memory of a process that is ending cannot be mapped either.
    if (is_ending(peer.pid)) return errno = ESRCH, false;
    explain_choice(peer);
    return errno = EACCES, false;
  }
  PeerProcess& process = *peer.process;
  if (process.memory) return true;
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%u/mem", peer.pid);
  base::UniqueFd memory(::open(path, O_RDWR | O_CLOEXEC));
  if (!memory) {
    if (errno == ENOENT || (errno == EACCES && is_ending(peer.pid))) errno = ESRCH;
    if (errno == EPERM || errno == EACCES) explain_refusal(peer);
    return false;
  }
  // The pidfd is older. If its process is alive now, the pid was still its own at the open().
  if (!process.pidfd || has_ended(process.pidfd)) return errno = ESRCH, false;
  process.memory = std::move(memory);
  return true;
}

}  // namespace

bool copy_private_memory(Peer& peer, std::uint64_t address, const ibv_sge* sges,
                         std::uint32_t count, std::size_t length, Copy direction) noexcept {
  if (peer.same_process || !open_address_space(peer)) return false;
  const int memory = peer.process->memory.get();
  ScatterCursor local(sges, count);
  while (length != 0) {
    const ScatterCursor::Piece piece = local.next(std::min(length, kMostPerCall));
    if (piece.length == 0) return errno = EINVAL, false;
    const auto there = static_cast<off_t>(address);
    const ssize_t n = direction == Copy::to_peer ? ::pwrite(memory, piece.data, piece.length, there)
                                                 : ::pread(memory, piece.data, piece.length, there);
    if (n != static_cast<ssize_t>(piece.length)) {
      if (n == 0) errno = ESRCH;                  // the address space has ended
      if (n > 0 || errno == EIO) errno = EFAULT;  // the range is not wholly mapped
      return false;
    }
    address += piece.length;
    length -= piece.length;
  }
  return true;
}

}  // namespace spinwire::softverbs
