// The contexts of one process work for each other.
#include <pthread.h>

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

  /// A forked child shares the segments of its parent, which still works with them.
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

void leave_process(Host& host) noexcept {
  Process& process = Process::get();
  const std::lock_guard<std::mutex> lock(process.mutex);
  std::erase(process.hosts, &host);
}

void drive(Host& host) noexcept {
  // Acknowledgements that came without a packet are looked for every so many polls.
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
  Process& process = Process::get();
  const std::lock_guard<std::mutex> lock(process.mutex);
  return std::any_of(process.hosts.begin(), process.hosts.end(),
                     [fd](const Host* host) { return host->device->verbs.cmd_fd == fd; });
}

}  // namespace spinwire::preload
