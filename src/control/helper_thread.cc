#include "control/helper_thread.h"

#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "control/control_port.h"

namespace spinwire::control {

namespace {

/// Whether our thread has a real-time priority: one that inherited it, or shared the processor
/// with it, might never run.
bool is_urgent() noexcept {
  const int policy = ::sched_getscheduler(0) & ~SCHED_RESET_ON_FORK;
  return policy != SCHED_OTHER && policy != SCHED_BATCH && policy != SCHED_IDLE;
}

bool is_bound() noexcept {
  cpu_set_t ours;
  return ::sched_getaffinity(0, sizeof ours, &ours) == 0 && CPU_COUNT(&ours) == 1;
}

class Attributes {
 public:
  Attributes() noexcept { ::pthread_attr_init(&attributes_); }  // cannot fail on Linux
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;
  ~Attributes() { ::pthread_attr_destroy(&attributes_); }

  void set_stack(std::size_t bytes) noexcept {
    // Fails if it is less than the least; then the default stays.
    if (bytes != 0) (void)::pthread_attr_setstacksize(&attributes_, bytes);
  }
  void set_usual_priority() noexcept {
    const sched_param usual{};
    ::pthread_attr_setinheritsched(&attributes_, PTHREAD_EXPLICIT_SCHED);
    ::pthread_attr_setschedpolicy(&attributes_, SCHED_OTHER);
    ::pthread_attr_setschedparam(&attributes_, &usual);
  }
  /// Any processor but the caller's.
  void avoid_own_processor() noexcept {
    const int ours = ::sched_getcpu();
    if (ours < 0 || ours >= CPU_SETSIZE) return;
    cpu_set_t others;
    std::memset(&others, 0xff, sizeof others);
    CPU_CLR(static_cast<std::size_t>(ours), &others);
    ::pthread_attr_setaffinity_np(&attributes_, sizeof others, &others);
  }
  [[nodiscard]] int create(pthread_t& thread, void* (*run)(void*), void* argument) const noexcept {
    return ::pthread_create(&thread, &attributes_, run, argument);
  }

 private:
  pthread_attr_t attributes_;
};

/// This process may use no other processor. A failed move makes the caller wait for the end of the
/// thread, so it is not tried again.
std::atomic<bool> cannot_move{false};

/// 0 or an errno value.
int create(pthread_t& thread, void* (*run)(void*), void* argument,
           std::size_t stack_bytes) noexcept {
  const bool urgent = is_urgent();
  const auto try_to = [&](bool moves, std::size_t stack) {
    Attributes attributes;
    attributes.set_stack(stack);
    if (urgent) attributes.set_usual_priority();
    if (moves) attributes.avoid_own_processor();
    return attributes.create(thread, run, argument);
  };
  const bool moves = urgent && is_bound() && !cannot_move;
  int error = try_to(moves, stack_bytes);
  if (error == EINVAL && moves) {
    cannot_move = true;
    error = try_to(false, stack_bytes);
  }
  // Thread-local variables may leave too little of the stack.
  return error == EINVAL ? try_to(false, 0) : error;
}

}  // namespace

Result<pthread_t> start_helper_thread(const char* asked, void* (*run)(void*), void* argument,
                                      std::size_t stack_bytes) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread{};
  const int error = create(thread, run, argument, stack_bytes);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error == 0) return thread;
  return base::fail_errno(error == ENOMEM ? Status::no_memory : Status::limit, asked,
                          "pthread_create", error,
                          "raise the limit of threads (ulimit -u, TasksMax=, pids.max)");
}

Result<HelperEvent> open_helper_event(const char* asked, ControlPort& port,
                                      DescriptorOwner& owner) {
  base::UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) return tl::unexpected(system_error(asked, "eventfd", errno));
  auto event = std::make_shared<const base::UniqueFd>(std::move(fd));
  if (auto watched = port.watch(event->get(), owner); !watched)
    return tl::unexpected(watched.error());
  return event;
}

void raise(const HelperEvent& event) noexcept {
  const std::uint64_t one = 1;
  (void)!::write(event->get(), &one, sizeof one);
}

void clear(const HelperEvent& event) noexcept {
  std::uint64_t count = 0;
  (void)!::read(event->get(), &count, sizeof count);
}

}  // namespace spinwire::control
