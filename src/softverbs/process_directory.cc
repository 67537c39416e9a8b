#include "softverbs/process_directory.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/process_wide.h"
#include "base/random.h"
#include "softverbs/context_gid.h"
#include "softverbs/memory/peer_file.h"
#include "softverbs/refusal.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint64_t kDirectoryMagic = 0x31726944'77697053;  // "SpiwDir1"
constexpr std::uint32_t kDirectorySlots = 256;
constexpr unsigned kNonceBits = 40;

/// Peers read this memory; only its own process writes it.
struct Directory {
  std::uint64_t magic;
  ibv_gid gid;
  /// By slot: descriptor << 40 | nonce of the context; 0: none.
  std::array<std::atomic<std::uint64_t>, kDirectorySlots> contexts;
};

struct OwnDirectory : base::ProcessWide {
  std::weak_ptr<base::SharedMemory> memory;

  void after_fork() noexcept { memory.reset(); }  // the child makes its own directory
};

OwnDirectory& own_directory() noexcept { return base::process_wide<OwnDirectory>(); }

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

/// Calls `visit` with the directory that the GID names, of this process or another. False if there
/// is none.
template <typename Visit>
bool with_directory(const GidParts& parts, const ibv_gid& gid, Visit&& visit) noexcept {
  const auto checked = [&](const Directory& directory) {
    return directory.magic == kDirectoryMagic && same_gid(directory.gid, gid) && visit(directory);
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

DirectorySlot& DirectorySlot::operator=(DirectorySlot&& other) noexcept {
  std::swap(directory_, other.directory_);
  std::swap(number_, other.number_);
  return *this;
}

DirectorySlot::~DirectorySlot() {
  if (directory_ == nullptr) return;
  Directory& directory = directory_in(*directory_);
  if (parse_gid(directory.gid, GidKind::process)->pid != static_cast<std::uint32_t>(getpid()))
    return;
  directory.contexts[number_].store(0, std::memory_order_release);
}

Result<DirectorySlot> DirectorySlot::take(const ibv_gid& context) {
  OwnDirectory& own = own_directory();
  const std::lock_guard<std::mutex> lock(own.mutex);
  DirectorySlot taken;
  taken.directory_ = own.memory.lock();
  if (taken.directory_ == nullptr) {
    auto made = make_directory();
    if (!made) return tl::unexpected(made.error());
    own.memory = taken.directory_ = std::move(*made);
  }
  const GidParts parts = *parse_gid(context, GidKind::context);
  auto& contexts = directory_in(*taken.directory_).contexts;
  for (std::uint32_t i = 0; i < kDirectorySlots; ++i) {
    if (contexts[i].load(std::memory_order_relaxed) != 0) continue;
    contexts[i].store(std::uint64_t{parts.fd} << kNonceBits | parts.nonce,
                      std::memory_order_release);
    taken.number_ = i;
    return taken;
  }
  taken.directory_.reset();  // it took no slot
  return base::fail(Status::limit, "open the softverbs device",
                    base::format("this process has {} contexts open, as many as its queue-pair "
                                 "numbers can tell apart",
                                 kDirectorySlots),
                    "close contexts that are not used");
}

ibv_gid DirectorySlot::gid() const noexcept { return directory_in(*directory_).gid; }

bool names_process(const ibv_gid& gid) noexcept {
  return parse_gid(gid, GidKind::process).has_value();
}

bool process_is_there(const ibv_gid& gid, std::string& why) noexcept {
  const auto parts = parse_gid(gid, GidKind::process);
  if (parts && with_directory(*parts, gid, [](const Directory&) { return true; })) return true;
  const std::uint32_t pid = parts ? parts->pid : 0;
  return refuse_with(ENODEV, why,
                     base::format("process {} is gone, or has closed its devices", pid)),
         false;
}

bool find_context(const ibv_gid& given, std::uint32_t qpn, ibv_gid& context,
                  std::string& why) noexcept {
  const auto parts = parse_gid(given, GidKind::process);
  if (!parts) {
    context = own_gid(given);
    return true;
  }
  std::uint64_t word = 0;
  const bool found = with_directory(*parts, given, [&](const Directory& directory) {
    word = directory.contexts[directory_slot_of(qpn)].load(std::memory_order_acquire);
    return word != 0;
  });
  if (!found)
    return refuse_with(
               ENODEV, why,
               base::format("process {} has no device open with queue pair {}", parts->pid, qpn)),
           false;
  context =
      make_gid({parts->pid, static_cast<std::uint32_t>(word >> kNonceBits), word & kNonceMask});
  return true;
}

}  // namespace spinwire::softverbs
