// What it costs a port without room to take a new peer, in instructions.
#include <sys/resource.h>

#include <csignal>
#include <cstdio>

#include "control/control_port_fixture.h"
#include "control/pair_network.h"

namespace accept_cost_test {
namespace {

using namespace control_port_test;  // the names of a test namespace
using pair_network::PairNetwork;

volatile std::uint64_t instructions = 0;

void on_instruction(int) { instructions = instructions + 1; }

/// Counts the instructions of this thread, outside the kernel, that `work()` runs: the processor
/// traps after each.
template <typename Work>
std::uint64_t instructions_of(Work&& work) {
  struct sigaction trap {};
  struct sigaction before {};
  trap.sa_handler = on_instruction;
  EXPECT_EQ(::sigaction(SIGTRAP, &trap, &before), 0);
  instructions = 0;
#if defined(__x86_64__)
  // The trap flag. The compiler may use 128 bytes below the stack pointer.
  asm volatile(
      "lea -128(%%rsp), %%rsp; pushfq; orl $0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::
          : "memory", "cc");
  work();
  asm volatile(
      "lea -128(%%rsp), %%rsp; pushfq; andl $~0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::
          : "memory", "cc");
#else
  work();
#endif
  EXPECT_EQ(::sigaction(SIGTRAP, &before, nullptr), 0);
  return instructions;
}

/// A port whose handshakes are all in use by silent strangers. `source_of(i)` is the i-th's.
class FullPort {
 public:
  template <typename SourceOf>
  FullPort(std::uint32_t handshakes, SourceOf&& source_of)
      : timers_(1, 0), port_({handshakes, handshakes, 1s, 1, true}, clock_, timers_) {
    EXPECT_TRUE(port_.open(&network_));
    EXPECT_TRUE(port_.listen(*control::Address::parse("10.255.0.1:1"),
                             std::make_shared<ListenerRecord>(owner_)));
    for (std::uint32_t i = 0; i < handshakes; ++i) {
      call(source_of(i));
      if (i % 8 == 7) poll();
    }
    for (int i = 0; i < 1000 && port_.handshakes() < handshakes; ++i) poll();
    EXPECT_EQ(port_.handshakes(), handshakes);
    for (int ms = 0; ms < 60; ++ms) poll();
  }

  /// Of one that takes the place of another, and of its part of the poll.
  std::uint64_t instructions_of_an_accept() {
    constexpr std::uint32_t kAccepts = 8;
    for (std::uint32_t i = 0; i < kAccepts; ++i) call(1u << 20);
    const std::uint64_t before = port_.refusals();
    const std::uint64_t count = instructions_of([&] { port_.poll(); });
    EXPECT_EQ(port_.refusals() - before, kAccepts);
    EXPECT_EQ(network_.waiting(), 0u);
    const auto clean = port_.audit();
    EXPECT_TRUE(clean) << clean.error().message();
    return count / kAccepts;
  }

 private:
  void poll() {
    now_ += 1'000'000;
    port_.poll();
  }
  void call(std::uint32_t source) {
    network_.call_in_silence(*control::Address::parse("10." + std::to_string(source >> 16) + '.' +
                                                      std::to_string(source >> 8 & 255) + '.' +
                                                      std::to_string(source & 255) + ":5"));
  }

  std::uint64_t now_ = 0;
  spinwire::Clock clock_ = spinwire::Clock::manual(&now_);
  spinwire::base::TimerWheel timers_;
  PairNetwork network_;
  Owner owner_;
  ControlPort port_;
};

class AcceptCost : public testing::Test {
 protected:
  static constexpr std::uint32_t kFew = 64, kMany = 4096;

  void SetUp() override {
#if !defined(__x86_64__)
    GTEST_SKIP() << "the count needs the trap flag of x86-64";
#endif
    rlimit files{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
    if (files.rlim_max < kMany + 64) GTEST_SKIP() << "a process may open few files here";
    files.rlim_cur = files.rlim_max;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  }
  template <typename SourceOf>
  static void expect_little_growth(const char* what, SourceOf&& source_of) {
    const std::uint64_t few = FullPort(kFew, source_of).instructions_of_an_accept();
    const std::uint64_t many = FullPort(kMany, source_of).instructions_of_an_accept();
    std::printf("%s: %llu instructions with %u handshakes, %llu with %u\n", what,
                static_cast<unsigned long long>(few), kFew, static_cast<unsigned long long>(many),
                kMany);
    EXPECT_LE(many, 2 * few) << "64 times as many handshakes";
  }
};

TEST_F(AcceptCost, OfASourceThatHoldsAll) {
  expect_little_growth("one source", [](std::uint32_t) { return 1u; });
}

TEST_F(AcceptCost, OfManySources) {
  expect_little_growth("a source for each", [](std::uint32_t i) { return i; });
}

// One source with one, one with two, and so on.
TEST_F(AcceptCost, OfSourcesThatHoldDifferentNumbers) {
  expect_little_growth("sources that differ", [](std::uint32_t i) {
    std::uint32_t source = 0;
    while (i > source) i -= ++source;
    return source;
  });
}

}  // namespace
}  // namespace accept_cost_test
