#include "base/random.h"

#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

namespace spinwire::base {
namespace {

thread_local SeedSource* source = nullptr;

}  // namespace

SeedSource::SeedSource(std::uint64_t seed) noexcept : random_(seed) { source = this; }
SeedSource::~SeedSource() { source = nullptr; }
bool SeedSource::there() noexcept { return source != nullptr; }

std::uint64_t random_seed() noexcept {
  if (source != nullptr) return source->next();
  std::uint64_t seed = 0;
  ssize_t got = -1;
  do {
    got = ::getrandom(&seed, sizeof seed, GRND_NONBLOCK);
  } while (got < 0 && errno == EINTR);
  if (got == static_cast<ssize_t>(sizeof seed)) return seed;

  // The call fails early in boot, or where a filter forbids it.
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  Random mix(static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u +
             static_cast<std::uint64_t>(time.tv_nsec));
  seed = mix.next() ^ Random::mix(static_cast<std::uint64_t>(::getpid()));
  return seed ^ Random::mix(reinterpret_cast<std::uintptr_t>(&seed));
}

}  // namespace spinwire::base
