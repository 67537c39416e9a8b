// An object of the process that forked children find in order. Cold.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <mutex>
#include <new>

namespace spinwire::base {

/// Base of objects that process_wide() makes.
struct ProcessWide {
  std::mutex mutex;
  int atfork_error = 0;  ///< errno value of pthread_atfork(); 0: a fork is prepared for
  /// A forked child calls it before it unlocks the mutex.
  void after_fork() noexcept {}
};

/// The process's only object of type T, which derives from ProcessWide. It is never destroyed,
/// because its users may outlive other statics, and takes no heap. A fork holds the mutex, so that
/// the child finds the object consistent and unlocked.
template <typename T>
T& process_wide() noexcept {
  alignas(T) static std::byte storage[sizeof(T)];
  static T* const instance = [] {
    auto* const made = new (storage) T;
    made->atfork_error = ::pthread_atfork([] { process_wide<T>().mutex.lock(); },
                                          [] { process_wide<T>().mutex.unlock(); },
                                          [] {
                                            process_wide<T>().after_fork();
                                            process_wide<T>().mutex.unlock();
                                          });
    return made;
  }();
  return *instance;
}

}  // namespace spinwire::base
