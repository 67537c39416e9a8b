#include "base/random.h"

#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace spinwire::base {
namespace {

thread_local SeedSource* source = nullptr;

/// Fills at most 256 bytes, which the kernel does in one piece. Returns false, and sets errno, if
/// the kernel gives none.
bool get_random(void* to, std::size_t size) noexcept {
  ssize_t got = -1;
  do {
    got = ::getrandom(to, size, GRND_NONBLOCK);
  } while (got < 0 && errno == EINTR);
  return got == static_cast<ssize_t>(size);
}
bool get_random(std::uint64_t& bits) noexcept { return get_random(&bits, sizeof bits); }

tl::unexpected<Error> no_random(int reason) {
  return fail(
      Status::system, "make a secret", format("getrandom: {}", errno_text(reason)),
      "let the process call getrandom(), and start it once the kernel's generator is ready");
}

}  // namespace

SeedSource::SeedSource(std::uint64_t seed) noexcept : random_(seed) { source = this; }
SeedSource::~SeedSource() { source = nullptr; }
bool SeedSource::there() noexcept { return source != nullptr; }

Result<std::uint64_t> random_secret() {
  std::uint64_t secret = source != nullptr ? source->next() : 0;
  if (source == nullptr && !get_random(secret)) return no_random(errno);
  return secret | 1;
}

Result<void> random_bytes(std::span<std::byte> bytes) {
  if (source == nullptr) {
    if (!get_random(bytes.data(), bytes.size())) return no_random(errno);
    return {};
  }
  for (std::size_t done = 0; done < bytes.size();) {
    const std::uint64_t next = source->next();
    const std::size_t part = std::min(sizeof next, bytes.size() - done);
    std::memcpy(bytes.data() + done, &next, part);
    done += part;
  }
  return {};
}

std::uint64_t random_seed() noexcept {
  if (source != nullptr) return source->next();
  std::uint64_t seed = 0;
  if (get_random(seed)) return seed;

  // The call fails early in boot, or where a filter forbids it.
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  Random mix(static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u +
             static_cast<std::uint64_t>(time.tv_nsec));
  seed = mix.next() ^ Random::mix(static_cast<std::uint64_t>(::getpid()));
  return seed ^ Random::mix(reinterpret_cast<std::uintptr_t>(&seed));
}

}  // namespace spinwire::base
