#include "control/helper_thread.h"

#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "control/control_port.h"

namespace spinwire::control {

namespace {

/// Whether our thread is bound to one of several processors.
bool is_bound() noexcept {
  cpu_set_t ours;
  return ::sched_getaffinity(0, sizeof ours, &ours) == 0 && CPU_COUNT(&ours) == 1 &&
         ::sysconf(_SC_NPROCESSORS_ONLN) > 1;
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
    ::pthread_attr_setinheritsched(&attributes_, PTHREAD_EXPLICIT_SCHED);
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

/// 0 or an errno value.
int create(pthread_t& thread, void* (*run)(void*), void* argument,
           std::size_t stack_bytes) noexcept {
  Attributes all;
  all.set_stack(stack_bytes);
  // A loop that is bound or urgent may never let the thread run. Only then, because the kernel may
  // make us wait while it moves the thread.
  const bool bound = is_bound(), urgent = ::sched_getscheduler(0) != SCHED_OTHER;
  if (bound) all.avoid_own_processor();
  if (urgent) all.set_usual_priority();
  int error = all.create(thread, run, argument);
  if (error == EINVAL && bound) {  // it may use no other processor
    Attributes some;
    some.set_stack(stack_bytes);
    if (urgent) some.set_usual_priority();
    error = some.create(thread, run, argument);
  }
  // Thread-local variables leave too little of the stack.
  return error == EINVAL ? Attributes().create(thread, run, argument) : error;
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
  if (error != 0) return tl::unexpected(system_error(asked, "pthread_create", error));
  return thread;
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
