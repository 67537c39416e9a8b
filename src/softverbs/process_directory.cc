#include "softverbs/process_directory.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "softverbs/context_gid.h"
#include "softverbs/memory/peer_file.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint64_t kDirectoryMagic = 0x31726944'77697053;  // "SpiwDir1"
constexpr std::uint32_t kSeats = 256;
constexpr unsigned kNonceBits = 40;

/// The memory that peers read; only its own process writes it.
struct Directory {
  std::uint64_t magic;
  ibv_gid gid;
  /// By seat: descriptor << 40 | nonce of the context there; 0: none.
  std::array<std::atomic<std::uint64_t>, kSeats> contexts;
};

struct OwnDirectory {
  std::mutex mutex;
  std::weak_ptr<base::SharedMemory> memory;
};

/// Never destroyed, as contexts may outlive other statics. Locked across a fork, so that a child
/// finds it unlocked. A child makes a directory of its own.
OwnDirectory& own_directory() noexcept {
  alignas(OwnDirectory) static std::byte storage[sizeof(OwnDirectory)];
  static OwnDirectory* const instance = [] {
    auto* made = new (storage) OwnDirectory;
    ::pthread_atfork([] { own_directory().mutex.lock(); }, [] { own_directory().mutex.unlock(); },
                     [] {
                       own_directory().memory.reset();
                       own_directory().mutex.unlock();
                     });
    return made;
  }();
  return *instance;
}

Directory& directory_in(const base::SharedMemory& memory) noexcept {
  return *reinterpret_cast<Directory*>(memory.data());
}

Result<std::shared_ptr<base::SharedMemory>> make_directory() {
  base::SharedMemoryOptions options;
  options.name = "spinwire-process";
  auto made = base::SharedMemory::create(sizeof(Directory), options);
  if (!made) return tl::unexpected(made.error());
  auto memory = std::make_shared<base::SharedMemory>(std::move(*made));
  auto* const directory = new (memory->data()) Directory{};
  directory->magic = kDirectoryMagic;
  directory->gid =
      make_gid({static_cast<std::uint32_t>(getpid()), static_cast<std::uint32_t>(memory->fd()),
                base::random_seed() & kNonceMask},
               GidKind::process);
  return memory;
}

/// Runs `look` on the directory that the GID names, of this process or of another. False without
/// one.
template <typename Look>
bool look_into(const GidParts& parts, const ibv_gid& gid, Look&& look) noexcept {
  const auto checked = [&](const Directory& directory) {
    return directory.magic == kDirectoryMagic && same_gid(directory.gid, gid) && look(directory);
  };
  if (parts.pid == static_cast<std::uint32_t>(getpid())) {
    OwnDirectory& own = own_directory();
    const std::lock_guard<std::mutex> lock(own.mutex);
    const auto memory = own.memory.lock();
    return memory != nullptr && checked(directory_in(*memory));
  }
  const PeerFile file = open_peer_file(parts.pid, parts.fd, PeerFileKind::ordinary_pages);
  if (!file.fd || file.size < sizeof(Directory)) return false;
  void* const at = mmap(nullptr, sizeof(Directory), PROT_READ, MAP_SHARED, file.fd.get(), 0);
  if (at == MAP_FAILED) return false;
  const bool found = checked(*static_cast<const Directory*>(at));
  munmap(at, sizeof(Directory));
  return found;
}

}  // namespace

ProcessSeat::ProcessSeat(ProcessSeat&& other) noexcept
    : directory_(std::move(other.directory_)), number_(other.number_) {}

ProcessSeat& ProcessSeat::operator=(ProcessSeat&& other) noexcept {
  std::swap(directory_, other.directory_);
  std::swap(number_, other.number_);
  return *this;
}

ProcessSeat::~ProcessSeat() {
  if (directory_ == nullptr) return;
  Directory& directory = directory_in(*directory_);
  if (parse_gid(directory.gid, GidKind::process)->pid != static_cast<std::uint32_t>(getpid()))
    return;
  directory.contexts[number_].store(0, std::memory_order_release);
}

Result<ProcessSeat> ProcessSeat::take(const ibv_gid& context) {
  OwnDirectory& own = own_directory();
  const std::lock_guard<std::mutex> lock(own.mutex);
  ProcessSeat taken;
  taken.directory_ = own.memory.lock();
  if (taken.directory_ == nullptr) {
    auto made = make_directory();
    if (!made) return tl::unexpected(made.error());
    own.memory = taken.directory_ = std::move(*made);
  }
  const GidParts parts = *parse_gid(context, GidKind::context);
  auto& contexts = directory_in(*taken.directory_).contexts;
  for (std::uint32_t i = 0; i < kSeats; ++i) {
    if (contexts[i].load(std::memory_order_relaxed) != 0) continue;
    contexts[i].store(std::uint64_t{parts.fd} << kNonceBits | parts.nonce,
                      std::memory_order_release);
    taken.number_ = i;
    return taken;
  }
  taken.directory_.reset();  // none of its seats is ours
  return base::fail(Status::limit, "open the softverbs device",
                    base::format("this process has {} contexts open, as many as its queue-pair "
                                 "numbers can tell apart",
                                 kSeats),
                    "close contexts that are not used");
}

ibv_gid ProcessSeat::gid() const noexcept { return directory_in(*directory_).gid; }

bool names_process(const ibv_gid& gid) noexcept {
  return parse_gid(gid, GidKind::process).has_value();
}

bool process_is_there(const ibv_gid& gid, std::string& why) noexcept {
  const auto parts = parse_gid(gid, GidKind::process);
  if (parts && look_into(*parts, gid, [](const Directory&) { return true; })) return true;
  why = base::format("process {} is gone, or has closed its devices", parts ? parts->pid : 0);
  errno = ENODEV;
  return false;
}

bool find_context(const ibv_gid& given, std::uint32_t qpn, ibv_gid& context,
                  std::string& why) noexcept {
  const auto parts = parse_gid(given, GidKind::process);
  if (!parts) {
    context = given;
    return true;
  }
  std::uint64_t word = 0;
  const bool found = look_into(*parts, given, [&](const Directory& directory) {
    word = directory.contexts[seat_of(qpn)].load(std::memory_order_acquire);
    return word != 0;
  });
  if (!found) {
    why = base::format("process {} has no device open with queue pair {}", parts->pid, qpn);
    errno = ENODEV;
    return false;
  }
  context =
      make_gid({parts->pid, static_cast<std::uint32_t>(word >> kNonceBits), word & kNonceMask});
  return true;
}

}  // namespace spinwire::softverbs
