// Prints how many thousand ticks the processor's time stamp counter makes a second. A machine that
// QEMU emulates reads this very counter; were it to find out the rate by itself, it would be wrong
// by factors on a busy host.
#include <x86intrin.h>

#include <cstdint>
#include <cstdio>
#include <ctime>

namespace {

struct Instant {
  int64_t ns;
  int64_t ticks;
};

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC_RAW, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

// Both clocks at one time: of many tries the one that was interrupted least.
Instant read_both() {
  Instant best{};
  int64_t shortest = INT64_MAX;
  for (int i = 0; i < 1000; ++i) {
    const int64_t before = now_ns();
    const auto ticks = static_cast<int64_t>(__rdtsc());
    const int64_t after = now_ns();
    if (after - before >= shortest) continue;
    shortest = after - before;
    best = {before + shortest / 2, ticks};
  }
  return best;
}

}  // namespace

int main() {
  const Instant start = read_both();
  const timespec pause{0, 200'000'000};
  nanosleep(&pause, nullptr);
  const Instant end = read_both();
  const double ticks_per_ns =
      static_cast<double>(end.ticks - start.ticks) / static_cast<double>(end.ns - start.ns);
  std::printf("%.0f\n", ticks_per_ns * 1e6);
}
