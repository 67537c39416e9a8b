// Prints the rate of the processor's time stamp counter in kHz. A machine that QEMU emulates reads
// this very counter. If it measured the rate itself, a busy host would make it wrong by factors.
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

// Reads both clocks. Of many tries, takes the one with the least interruption.
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
