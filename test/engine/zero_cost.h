// Proves that code neither allocates from the heap nor calls the system.
#pragma once

#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>

#include "base/sanitizers.h"
#include "engine/harness.h"

// A sanitizer has its own allocator, which must not be replaced.
#if !SPINWIRE_ASAN && !SPINWIRE_TSAN
#define SPINWIRE_TEST_COUNTS_HEAP 1
#else
#define SPINWIRE_TEST_COUNTS_HEAP 0
#endif

namespace zero_cost_test {

/// While armed, heap calls are counted, and the bytes allocated and freed.
inline std::atomic<bool> armed{false};
inline std::atomic<std::uint64_t> heap_calls{0};
inline std::atomic<std::int64_t> heap_bytes{0};

/// Unless 0, every fail_every-th allocation of this thread fails.
inline thread_local std::uint32_t fail_every = 0;
[[nodiscard]] inline bool is_to_fail() noexcept {
  thread_local std::uint32_t calls = 0;
  return fail_every != 0 && ++calls % fail_every == 0;
}

enum class Moved : std::uint8_t { taken, given_back };
inline void* count_heap_call(void* block, Moved moved) noexcept {
  if (armed.load(std::memory_order_relaxed) && block != nullptr) {
    heap_calls.fetch_add(1, std::memory_order_relaxed);
    const auto bytes = static_cast<std::int64_t>(malloc_usable_size(block));
    heap_bytes.fetch_add(moved == Moved::taken ? bytes : -bytes, std::memory_order_relaxed);
  }
  return block;
}

}  // namespace zero_cost_test

namespace zero_cost_test {

/// From now on any system call but write and exit ends the process.
inline bool forbid_system_calls() {
  const auto allow = [](unsigned number) {
    return std::array<sock_filter, 2>{sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
                                      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  };
  const auto a = allow(SYS_write);
  const auto b = allow(SYS_exit_group);
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      a[0],
      a[1],
      b[0],
      b[1],
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// A Load has run(turns), and worked(), which tells whether the turns did all their work. Each turn
// polls, with or without control steps.

enum class Turns : std::uint8_t { polls, polls_and_control_steps };

/// Polls both ends once on a device that works inside polls. Another device works in parallel, so
/// it gets several polls to finish a turn's work.
inline void turn(Turns turns, spinwire::Engine& a, spinwire::Engine& b) {
  static const int polls = engine_test::on_softverbs() ? 1 : 50;  // the check uses heap memory
  for (int i = polls; i > 0; --i) {
    (void)(a.poll() + b.poll());
    if (turns == Turns::polls_and_control_steps) (void)(a.poll_control() + b.poll_control());
  }
}

template <typename Load>
void expect_no_heap(Turns turns = Turns::polls) {
  Load load(turns);
  load.run(engine_test::amount(5000));
  heap_calls = 0;
  armed = true;
  load.run(engine_test::amount(100000));
  armed = false;
  EXPECT_EQ(heap_calls, 0u);
  EXPECT_TRUE(load.worked());
  // Proves that the counter works.
  armed = true;
  delete new volatile int(5);
  std::free(std::malloc(10));
  armed = false;
  EXPECT_GE(heap_calls, 2u);
}

template <typename Load>
void expect_no_system_calls() {
  if (!engine_test::on_softverbs())
    GTEST_SKIP() << engine_test::kSoftverbsOnly
                 << "other devices post through the kernel or as they like";
#if !SPINWIRE_TEST_COUNTS_HEAP
  GTEST_SKIP() << "this sanitizer calls the system by itself";
#endif
  engine_test::Child child([](int, int out) {
    auto* load = new Load(Turns::polls);  // its destructor must not run
    load->run(5000);
    if (!forbid_system_calls()) return 77;
    load->run(100000);
    engine_test::write_line(out, load->worked() ? "worked" : "did not work");
    _exit(0);
  });
  const std::string line = child.line();
  const int code = child.wait();
  if (code == 77) GTEST_SKIP() << "no system-call filter may be set here";
  EXPECT_EQ(code, 0);
  EXPECT_EQ(line, "worked");
}

}  // namespace zero_cost_test
