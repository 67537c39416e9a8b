#include "control/helper_thread.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <utility>

#include "control/control_port.h"

namespace spinwire::control {

Result<pthread_t> start_helper_thread(const char* asked, void* (*run)(void*), void* argument,
                                      std::size_t stack_bytes) {
  pthread_attr_t attributes;
  int error = ::pthread_attr_init(&attributes);
  if (error != 0) return tl::unexpected(system_error(asked, "pthread_attr_init", error));
  if (stack_bytes != 0) error = ::pthread_attr_setstacksize(&attributes, stack_bytes);
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread{};
  if (error == 0) error = ::pthread_create(&thread, &attributes, run, argument);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_attr_destroy(&attributes);
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
