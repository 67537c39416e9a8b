// The contexts of one process work for each other.
#include <linux/kcmp.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <vector>

#include "preload/host.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::preload {

namespace {

/// All contexts that the program has open.
struct Process {
  std::mutex mutex;  ///< taken before the lock of a context
  std::vector<Host*> hosts;

  static Process& get() {
    static Process process;
    return process;
  }

  /// A forked child shares its parent's segments, which the parent still uses, so it forgets them.
  Process() {
    const int error = ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                                       [] {
                                         get().hosts.clear();
                                         get().mutex.unlock();
                                       });
    if (error != 0) throw std::bad_alloc();  // ENOMEM is its only error
  }
};

}  // namespace

void join_process(Host& host) {
  Process& process = Process::get();
  const std::lock_guard<std::mutex> lock(process.mutex);
  process.hosts.push_back(&host);
}

void remove_host(Host& host) noexcept {
  Process& process = Process::get();
  const std::lock_guard<std::mutex> lock(process.mutex);
  std::erase(process.hosts, &host);
}

void drive(Host& host) noexcept {
  // Acknowledgements without a packet are checked for only once in so many polls.
  constexpr int kPolls = 50;
  softverbs::control_device(&host.device->verbs);
  for (int i = 0; i < kPolls; ++i) (void)host.bare.poll_cq(host.idle_cq, 0, nullptr);
}

void drive_others(const Host* self) noexcept {
  Process& process = Process::get();
  const std::unique_lock<std::mutex> lock(process.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread drives them
  for (Host* const host : process.hosts) {
    const std::uint32_t polls = host->polls.load(std::memory_order_relaxed);
    const bool polled = std::exchange(host->polls_seen, polls) != polls;
    if (host == self || polled || !host->lock.try_lock()) continue;
    const Guard guard(*host, std::adopt_lock);
    drive(*host);
  }
}

bool is_command_descriptor(int fd) noexcept {
  // A duplicate has another number, but refers to the same open file. Where the system refuses
  // kcmp(), only the number is compared.
  const auto same_file = [fd](int other) {
    const pid_t self = ::getpid();
    return fd == other || ::syscall(SYS_kcmp, self, self, KCMP_FILE, fd, other) == 0;
  };
  Process& process = Process::get();
  const std::lock_guard<std::mutex> lock(process.mutex);
  return std::any_of(process.hosts.begin(), process.hosts.end(), [&same_file](const Host* host) {
    return same_file(host->device->verbs.cmd_fd);
  });
}

}  // namespace spinwire::preload
