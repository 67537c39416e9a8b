#include "softverbs/process_directory.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/process_wide.h"
#include "base/random.h"
#include "base/shared_memory.h"
#include "softverbs/context_gid.h"
#include "softverbs/memory/peer_file.h"
#include "softverbs/refusal.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint64_t kDirectoryMagic = 0x31726944'77697053;  // "SpiwDir1"
constexpr std::uint32_t kDirectorySlots = 256;
constexpr unsigned kNonceBits = 40;

/// By slot: descriptor << 40 | nonce of the context; 0: none.
using Slots = std::array<std::atomic<std::uint64_t>, kDirectorySlots>;

/// What peers read. Any process of the user can write it, so its owner never reads it.
struct Directory {
  std::uint64_t magic;
  ibv_gid gid;
  Slots contexts;
};

}  // namespace

/// The directory of a process, and the private copy of what it says.
struct PublishedDirectory {
  base::SharedMemory memory;
  std::uint32_t pid = 0;
  ibv_gid gid{};
  Slots contexts{};
};

namespace {

struct OwnDirectory : base::ProcessWide {
  std::weak_ptr<PublishedDirectory> published;

  void after_fork() noexcept { published.reset(); }  // the child makes its own directory
};

OwnDirectory& own_directory() noexcept { return base::process_wide<OwnDirectory>(); }

/// Sets a slot, in private and for peers.
void set_slot(PublishedDirectory& own, std::uint32_t number, std::uint64_t word) noexcept {
  own.contexts[number].store(word, std::memory_order_release);
  reinterpret_cast<Directory*>(own.memory.data())
      ->contexts[number]
      .store(word, std::memory_order_release);
}

Result<std::shared_ptr<PublishedDirectory>> make_directory() {
  base::SharedMemoryOptions options;
  options.name = "spinwire-process";
  auto memory = base::SharedMemory::create(sizeof(Directory), options);
  if (!memory) return tl::unexpected(memory.error());
  auto made = std::make_shared<PublishedDirectory>();
  made->memory = std::move(*memory);
  made->pid = static_cast<std::uint32_t>(getpid());
  made->gid = make_gid(
      {made->pid, static_cast<std::uint32_t>(made->memory.fd()), base::random_seed() & kNonceMask},
      GidKind::process);
  auto* const directory = new (made->memory.data()) Directory{};
  directory->magic = kDirectoryMagic;
  directory->gid = made->gid;
  return made;
}

/// The word of a slot in the directory that the GID names, of this process or another. None if
/// there is no such directory.
std::optional<std::uint64_t> find_word(const GidParts& parts, const ibv_gid& gid,
                                       std::uint32_t slot) noexcept {
  if (parts.pid == static_cast<std::uint32_t>(getpid())) {
    OwnDirectory& own = own_directory();
    const std::lock_guard<std::mutex> lock(own.mutex);
    const auto published = own.published.lock();
    if (published == nullptr || !same_gid(published->gid, gid)) return std::nullopt;
    return published->contexts[slot].load(std::memory_order_acquire);
  }
  const PeerFile file = open_peer_file(parts.pid, parts.fd, PeerFileKind::ordinary_pages);
  if (!file.fd || file.size < sizeof(Directory)) return std::nullopt;
  void* const at = mmap(nullptr, sizeof(Directory), PROT_READ, MAP_SHARED, file.fd.get(), 0);
  if (at == MAP_FAILED) return std::nullopt;
  const auto& directory = *static_cast<const Directory*>(at);
  std::optional<std::uint64_t> word;
  if (directory.magic == kDirectoryMagic && same_gid(directory.gid, gid))
    word = directory.contexts[slot].load(std::memory_order_acquire);
  munmap(at, sizeof(Directory));
  return word;
}

}  // namespace

DirectorySlot& DirectorySlot::operator=(DirectorySlot&& other) noexcept {
  std::swap(directory_, other.directory_);
  std::swap(number_, other.number_);
  return *this;
}

DirectorySlot::~DirectorySlot() {
  if (directory_ == nullptr || directory_->pid != static_cast<std::uint32_t>(getpid())) return;
  // take() on another thread would find the slot free before its word is gone for peers, too.
  const std::lock_guard<std::mutex> lock(own_directory().mutex);
  set_slot(*directory_, number_, 0);
}

Result<DirectorySlot> DirectorySlot::take(const ibv_gid& context) {
  OwnDirectory& own = own_directory();
  const std::lock_guard<std::mutex> lock(own.mutex);
  DirectorySlot taken;
  taken.directory_ = own.published.lock();
  if (taken.directory_ == nullptr) {
    auto made = make_directory();
    if (!made) return tl::unexpected(made.error());
    own.published = taken.directory_ = std::move(*made);
  }
  const GidParts parts = *parse_gid(context, GidKind::context);
  for (std::uint32_t i = 0; i < kDirectorySlots; ++i) {
    if (taken.directory_->contexts[i].load(std::memory_order_relaxed) != 0) continue;
    set_slot(*taken.directory_, i, std::uint64_t{parts.fd} << kNonceBits | parts.nonce);
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

ibv_gid DirectorySlot::gid() const noexcept { return directory_->gid; }

bool names_process(const ibv_gid& gid) noexcept {
  return parse_gid(gid, GidKind::process).has_value();
}

bool process_is_there(const ibv_gid& gid, std::string& why) noexcept {
  const auto parts = parse_gid(gid, GidKind::process);
  if (parts && find_word(*parts, gid, 0)) return true;
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
  const std::uint64_t word = find_word(*parts, given, directory_slot_of(qpn)).value_or(0);
  if (word == 0)
    return refuse_with(
               ENODEV, why,
               base::format("process {} has no device open with queue pair {}", parts->pid, qpn)),
           false;
  context =
      make_gid({parts->pid, static_cast<std::uint32_t>(word >> kNonceBits), word & kNonceMask});
  return true;
}

}  // namespace spinwire::softverbs
