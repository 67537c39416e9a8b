#include "base/owner_guard.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <new>
#include <vector>

#include "base/error.h"

namespace spinwire::base {
namespace {

constexpr const char* kAsked = "take a page that a fork empties";

/// Words that the fork handler empties, for kernels that do not do it themselves.
struct GuardRegistry {
  std::mutex mutex;
  std::vector<std::atomic<std::uintptr_t>*> words;
  int handler_error = 0;
};

/// Never destroyed: a fork may come late.
GuardRegistry& guard_registry() {
  static GuardRegistry* const instance = [] {
    auto* made = new GuardRegistry;
    made->handler_error = ::pthread_atfork([] { guard_registry().mutex.lock(); },
                                           [] { guard_registry().mutex.unlock(); },
                                           [] {
                                             for (auto* word : guard_registry().words)
                                               word->store(0);
                                             guard_registry().mutex.unlock();
                                           });
    return made;
  }();
  return *instance;
}

std::size_t page_bytes() noexcept { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

Result<void> add_to_registry(std::atomic<std::uintptr_t>* word) {
  return no_throw(kAsked, [&]() -> Result<void> {
    GuardRegistry& all = guard_registry();
    if (all.handler_error != 0) {
      return fail_errno(Status::system, kAsked, "pthread_atfork", all.handler_error,
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
  void* page =
      ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    return fail_errno(Status::no_memory, kAsked, "mmap", errno, "free memory of this process");
  }
  OwnerGuard guard(new (page) Word(thread_id()), false);
  if (detection == ForkDetection::automatic) {
    if (::madvise(page, page_bytes(), MADV_WIPEONFORK) == 0) return guard;
    if (errno != EINVAL) {
      return fail_errno(Status::system, kAsked, "madvise(MADV_WIPEONFORK)", errno,
                        "allow the call in this process's system-call filter");
    }
  }
  if (auto added = add_to_registry(guard.word_); !added) return tl::unexpected(added.error());
  guard.registered_ = true;
  return guard;
}

OwnerGuard::~OwnerGuard() {
  if (word_ == nullptr) return;
  if (registered_) remove_from_registry(word_);
  ::munmap(static_cast<void*>(word_), page_bytes());
}

Status OwnerGuard::diagnose() const noexcept {
  const std::uintptr_t word = word_->load(std::memory_order_relaxed);
  if (word == 0) return Status::forked_child;
  if ((word & ~kPolling) != thread_id()) return Status::wrong_thread;
  return (word & kPolling) != 0 ? Status::reentrant : Status::ok;
}

}  // namespace spinwire::base
