// Clock: the time-stamp counter with a rate measured once, CLOCK_MONOTONIC, or a counter that the
// owner steps.
#include "spinwire/clock.h"

#include <time.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace spinwire {
namespace {

__extension__ using Wide = unsigned __int128;

/// Markers for `source_`; only their addresses count. They select CLOCK_MONOTONIC, or the counter
/// plus an offset after it has stepped back. A counter that never stepped back has no source and is
/// read without an addition.
constexpr std::uint64_t kSystemClock = 0;
constexpr std::uint64_t kSteppedCounter = 0;

std::uint64_t system_nanoseconds() noexcept {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u +
         static_cast<std::uint64_t>(time.tv_nsec);
}

/// A rate as mantissa * 2^-shift. The form represents a double exactly, so products with the rate
/// are exact. Rates are between 1/64 and 64, so 46 < shift < 60.
struct Rate {
  explicit Rate(double rate) noexcept {
    int exponent = 0;
    mantissa = static_cast<std::uint64_t>(std::ldexp(std::frexp(rate, &exponent), 53));
    shift = 53 - exponent;
  }
  std::uint64_t mantissa;
  int shift;
};

#if defined(__x86_64__)

/// Whether the processor reports that the counter ticks evenly through all power states.
bool counter_is_invariant() noexcept {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & (1u << 8)) != 0;
}

/// Whether the kernel keeps time by the counter. In a virtual machine the kernel may trust a
/// counter that the virtual processor does not report as invariant. CLOCK_MONOTONIC is then as
/// accurate as the counter, but costs more.
bool kernel_trusts_counter() noexcept {
  try {
    std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    std::string name;
    return file >> name && name == "tsc";
  } catch (...) {
    return false;
  }
}

/// The two clocks read together, and the ticks that passed between the reads.
struct Pair {
  std::uint64_t ticks;
  std::uint64_t nanoseconds;
  std::uint64_t width;
};

std::uint64_t read_counter() noexcept {
  _mm_lfence();  // Keeps the read, and the code after it, from moving across.
  const std::uint64_t ticks = __rdtsc();
  _mm_lfence();
  return ticks;
}

/// The tightest of several pairs: an interrupt between the reads makes a pair wide.
Pair read_pair() noexcept {
  Pair best{0, 0, std::numeric_limits<std::uint64_t>::max()};
  for (int i = 0; i < 16; ++i) {
    const std::uint64_t before = read_counter();
    const std::uint64_t nanoseconds = system_nanoseconds();
    const std::uint64_t width = read_counter() - before;
    if (width < best.width) best = {before + width / 2, nanoseconds, width};
  }
  return best;
}

/// Ticks per nanosecond. Spins for 4 ms, and for up to 100 ms while the two pairs together are too
/// wide for an error of at most 20 parts in a million.
double measure_rate() noexcept {
  constexpr std::uint64_t kShortest = 4'000'000;
  constexpr std::uint64_t kLongest = 100'000'000;
  const Pair first = read_pair();
  Pair last = first;
  for (;;) {
    last = read_pair();
    const std::uint64_t elapsed = last.nanoseconds - first.nanoseconds;
    const double error = static_cast<double>(first.width + last.width) / 2 /
                         static_cast<double>(last.ticks - first.ticks + 1);
    if (elapsed >= kShortest && (error <= 20e-6 || elapsed >= kLongest)) break;
  }
  return static_cast<double>(last.ticks - first.ticks) /
         static_cast<double>(last.nanoseconds - first.nanoseconds);
}

/// Ticks per nanosecond, measured once per process; 0: use the system's clock.
double counter_rate() noexcept {
  static const double rate = [] {
    if (!counter_is_invariant() && !kernel_trusts_counter()) return 0.0;
    const double measured = measure_rate();
    return measured > 1.0 / 64 && measured < 64 ? measured : 0.0;
  }();
  return rate;
}

#else

double counter_rate() noexcept { return 0.0; }

#endif

}  // namespace

Clock Clock::real() noexcept {
  Clock clock;
  if (const double rate = counter_rate(); rate != 0.0) {
    clock.ticks_per_ns_ = rate;
  } else {
    clock.source_ = &kSystemClock;
  }
  return clock;
}

Clock Clock::manual(const std::uint64_t* ticks) noexcept {
  Clock clock;
  clock.source_ = ticks;
  return clock;
}

bool Clock::is_manual() const noexcept {
  return source_ != nullptr && source_ != &kSystemClock && source_ != &kSteppedCounter;
}

std::uint64_t Clock::ticks(Nanoseconds duration) const noexcept {
  if (duration.count() <= 0) return 0;
  if (ticks_per_ns_ == 1.0) return static_cast<std::uint64_t>(duration.count());
  const Rate rate(ticks_per_ns_);
  const Wide ticks =
      (static_cast<Wide>(static_cast<std::uint64_t>(duration.count())) * rate.mantissa) >>
      rate.shift;
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  return ticks > kMost ? kMost : static_cast<std::uint64_t>(ticks);
}

Nanoseconds Clock::duration(std::uint64_t ticks) const noexcept {
  if (ticks_per_ns_ == 1.0 && ticks <= static_cast<std::uint64_t>(Nanoseconds::max().count()))
    return Nanoseconds(static_cast<std::int64_t>(ticks));
  const Rate rate(ticks_per_ns_);
  const Wide nanoseconds = (static_cast<Wide>(ticks) << rate.shift) / rate.mantissa;
  constexpr auto kMost = Nanoseconds::max();
  if (nanoseconds > static_cast<Wide>(kMost.count())) return kMost;
  return Nanoseconds(static_cast<std::int64_t>(nanoseconds));
}

std::uint64_t Clock::read_slow() const noexcept {
#if defined(__x86_64__)
  if (source_ == &kSteppedCounter) return __rdtsc() + offset_;
#else
  if (source_ == nullptr) return system_nanoseconds() + offset_;
#endif
  if (source_ == &kSystemClock) return system_nanoseconds() + offset_;
  // Another thread may step the clock.
  return __atomic_load_n(source_, __ATOMIC_RELAXED) + offset_;
}

std::uint64_t Clock::resume_from(std::uint64_t last, std::uint64_t read) noexcept {
  offset_ += last - read;
#if defined(__x86_64__)
  if (source_ == nullptr) source_ = &kSteppedCounter;
#endif
  return last;
}

}  // namespace spinwire
