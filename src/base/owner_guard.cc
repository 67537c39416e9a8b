#include "base/owner_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <new>
#include <vector>

#include "base/error.h"
#include "base/process_wide.h"

namespace spinwire::base {
namespace {

constexpr const char* kAsked = "take a page that a fork empties";

/// The page that slots come from, and the words that the fork handler clears on kernels without
/// MADV_WIPEONFORK.
struct GuardRegistry : ProcessWide {
  std::byte* page = nullptr;  ///< the newest page; slots are taken from its start
  std::size_t used = 0;       ///< bytes of `page`
  bool wiped = false;         ///< the kernel clears `page` in forked children
  std::vector<std::atomic<std::uintptr_t>*> words;
  void after_fork() noexcept {
    for (auto* word : words) word->store(0);
  }
};

GuardRegistry& guard_registry() noexcept { return process_wide<GuardRegistry>(); }

std::size_t page_bytes() noexcept { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

Result<void> add_to_registry(std::atomic<std::uintptr_t>* word) {
  return no_throw(kAsked, [&]() -> Result<void> {
    GuardRegistry& all = guard_registry();
    if (all.atfork_error != 0) {
      return fail_errno(Status::system, kAsked, "pthread_atfork", all.atfork_error,
                        "free memory of this process");
    }
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.words.push_back(word);
    return {};
  });
}

void remove_from_registry(const std::atomic<std::uintptr_t>* word) noexcept {
  GuardRegistry& all = guard_registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.words.erase(std::remove(all.words.begin(), all.words.end(), word), all.words.end());
}

}  // namespace

Result<OwnerGuard> OwnerGuard::create(ForkDetection detection) {
  GuardRegistry& all = guard_registry();
  const bool automatic = detection == ForkDetection::automatic;
  std::unique_lock<std::mutex> lock(all.mutex);
  if (all.page == nullptr || all.used == page_bytes() || all.wiped != automatic) {
    void* page =
        ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
      return fail_errno(Status::no_memory, kAsked, "mmap", errno, "free memory of this process");
    }
    bool wiped = false;
    if (automatic) {
      wiped = ::madvise(page, page_bytes(), MADV_WIPEONFORK) == 0;
      if (const int error = errno; !wiped && error != EINVAL) {
        ::munmap(page, page_bytes());
        return fail_errno(Status::system, kAsked, "madvise(MADV_WIPEONFORK)", error,
                          "allow the call in this process's system-call filter");
      }
    }
    all.page = static_cast<std::byte*>(page);
    all.used = 0;
    all.wiped = wiped;
  }
  auto* slot = new (all.page + all.used) spinwire::detail::EngineSlot;
  all.used += sizeof(spinwire::detail::EngineSlot);
  slot->word = thread_id();
  OwnerGuard guard(slot, false);
  const bool wiped = all.wiped;
  lock.unlock();
  if (wiped) return guard;
  if (auto added = add_to_registry(&slot->word); !added) return tl::unexpected(added.error());
  guard.registered_ = true;
  return guard;
}

OwnerGuard::~OwnerGuard() {
  if (slot_ == nullptr) return;
  if (registered_) remove_from_registry(&slot_->word);
  end();
}

void OwnerGuard::end() const noexcept {
  slot_->target = nullptr;
  slot_->word.store(kEnded, std::memory_order_relaxed);
}

Status OwnerGuard::diagnose(const spinwire::detail::EngineSlot& slot) noexcept {
  const std::uintptr_t word = slot.word.load(std::memory_order_relaxed);
  if (word == kEnded) return Status::not_connected;
  if (word == 0) return Status::forked_child;
  if ((word & ~kPolling) != thread_id()) return Status::wrong_thread;
  return (word & kPolling) != 0 ? Status::reentrant : Status::ok;
}

}  // namespace spinwire::base
