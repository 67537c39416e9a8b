// Peers die by SIGKILL at any point of their work. All operations of the survivor must end once and
// soon, its other connections must go on, and nothing may stay behind.
#include <gtest/gtest.h>
#include <sched.h>

#include <array>
#include <cinttypes>
#include <cstdlib>
#include <map>

#include "kill/echo_connection.h"
#include "kill/kill_victim.h"
#include "kill/resources.h"
#include "kill/survivor.h"
#include "kill/target.h"
#include "memory/hugepage_setting.h"
#include "trust_pages.h"

namespace kill_test {
namespace {

// In a victim's process, this is the only test that runs.
class VictimsLife : public testing::Test {
 public:
  explicit VictimsLife(const char* order) : order_(order) {}
  void TestBody() override { _exit(victim_main(order_)); }

 private:
  const char* order_;
};

[[maybe_unused]] const bool is_victim = [] {
  const char* order = std::getenv(kVictimVariable);
  if (order == nullptr) return false;
  testing::RegisterTest("KillVictim", "main", nullptr, nullptr, __FILE__, __LINE__,
                        [order]() -> testing::Test* { return new VictimsLife(order); });
  return true;
}();

/// The results of kills by phase, the victim's role and the killer.
struct Tally {
  std::array<std::array<std::array<std::uint32_t, 3>, 2>, kPhases> hits{};
  std::array<std::uint32_t, kPhases> misses{};
  std::array<std::uint64_t, kPhases> completed_max{};
  std::array<std::uint64_t, kPhases> closed_max{};
  std::array<std::array<std::uint32_t, 8>, 2> handshake_steps{};
  std::uint64_t succeeded = 0;
  std::uint64_t failed = 0;

  [[nodiscard]] std::uint32_t of(std::size_t phase) const {
    std::uint32_t sum = 0;
    for (const auto& by_role : hits[phase]) {
      for (const std::uint32_t n : by_role) sum += n;
    }
    return sum;
  }

  void add(Target& target) {
    const auto phase = static_cast<std::size_t>(target.plan().phase);
    const auto role = static_cast<std::size_t>(target.plan().role);
    if (target.hit()) {
      ++hits[phase][role][static_cast<std::size_t>(target.plan().strike)];
      if (target.plan().phase == Phase::handshake)
        ++handshake_steps[role][std::min(target.slot().step.load(), 7u)];
    } else {
      ++misses[phase];
    }
    completed_max[phase] = std::max(completed_max[phase], target.completed_after());
    closed_max[phase] = std::max(closed_max[phase], target.closed_after());
    for (const auto& link : target.links()) {
      succeeded += link->succeeded;
      failed += link->failed;
    }
  }

  void print() const {
    std::printf("%-10s %18s %18s %7s %12s %12s\n", "phase", "victim connects", "victim listens",
                "missed", "completed ms", "closed ms");
    std::printf("%-10s %6s%6s%6s %6s%6s%6s\n", "", "step", "timer", "kill", "step", "timer",
                "kill");
    for (std::size_t i = 0; i < kPhases; ++i) {
      if (of(i) + misses[i] == 0) continue;
      std::printf("%-10s", kPhaseNames[i]);
      for (const auto& by_role : hits[i])
        std::printf(" %6u%6u%6u", by_role[0], by_role[1], by_role[2]);
      std::printf(" %7u %12.1f %12.1f\n", misses[i], static_cast<double>(completed_max[i]) / 1e6,
                  static_cast<double>(closed_max[i]) / 1e6);
    }
    for (std::size_t role = 0; role < 2 && of(0) != 0; ++role) {
      std::printf("handshake, victim %s, hits by control verbs done:",
                  role == 0 ? "connects" : "listens");
      for (const std::uint32_t n : handshake_steps[role]) std::printf(" %u", n);
      std::printf("\n");
    }
    std::printf("operations: %" PRIu64 " succeeded, %" PRIu64 " failed\n", succeeded, failed);
    std::fflush(stdout);
  }
};

class Survivor {
 public:
  explicit Survivor(std::uint32_t targets, const spinwire::Config& config)
      : echo_(common_), config_(config) {
    for (std::uint32_t i = 0; i < targets; ++i)
      targets_.push_back(std::make_unique<Target>(common_, i));
  }
  Survivor(const Survivor&) = delete;
  Survivor& operator=(const Survivor&) = delete;
  ~Survivor() { common_.engine = spinwire::Engine(); }  // while the callbacks' objects live

  bool open() {
    if (!common_.open(config_)) return false;
    for (auto& target : targets_) {
      if (!target->listen()) return false;
    }
    // Until it has mapped all that it will use.
    return echo_.start() && until(kDetectionMax, [this] { return echo_.copies() > 1; });
  }

  /// One turn of the survivor's loop.
  void turn() {
    const int events = common_.engine.poll();
    if (events < 0) common_.fault("poll() answers " + std::to_string(events));
    echo_.step();
    for (auto& target : targets_) target->step();
    if (events == 0) sched_yield();
    ++turns_;
  }

  /// Turns until `done`, which is checked now and then; false after `most` ns. May strike at any
  /// turn.
  template <typename Done>
  bool until(std::uint64_t most, Done done) {
    const std::uint64_t deadline = now_ns() + most;
    for (std::uint32_t i = 1;; ++i) {
      turn();
      for (auto& target : targets_) target->strike(false);
      if (i % 32 != 0) continue;
      if (done()) return true;
      if (now_ns() > deadline) return false;
    }
  }

  /// One victim's life and death.
  void round(const Plan& plan) {
    constexpr std::uint64_t kLife = 120'000'000'000;
    Target& target = *targets_[0];
    if (!target.start(plan)) return;
    const bool died = until(kLife, [&] { return target.dead(); });
    if (!died) return target.fault("does not get to die");
    const std::uint64_t messages = echo_.messages();
    const std::uint64_t copies = echo_.copies();
    const bool over = until(2 * kDetectionMax, [&] {
      return target.over() && common_.engine.stats().connections == 1;
    });
    if (!over) target.fault("its connection is not over");
    const bool unharmed = until(kDetectionMax, [&] {
      return echo_.messages() > messages + 8 && echo_.copies() > copies + 1;
    });
    if (!unharmed) target.fault("the echo process's traffic stands still");
    target.finish();
  }

  /// The resources held while idle. With `expected`, waits until they are the same again.
  Resources resources(const Resources* expected) {
    echo_.pause(true);
    if (expected == nullptr) touch_hugepages();
    Resources now;
    // The echo process's credit has gone back, too: one is left.
    (void)until(kDetectionMax, [&] {
      if (!echo_.quiet() || common_.engine.stats().reserved_receives > 1) return false;
      now = count_resources(common_.engine);
      const long lanes = device_name() == "softverbs" ? 1 : 0;  // the echo process's
      return expected == nullptr ? now.operations == 0 && now.lanes == lanes
                                 : back_at(*expected, now);
    });
    now = count_resources(common_.engine);
    echo_.pause(false);
    return now;
  }

  [[nodiscard]] Common& common() { return common_; }
  [[nodiscard]] EchoConnection& echo() { return echo_; }
  [[nodiscard]] std::vector<std::unique_ptr<Target>>& targets() { return targets_; }
  [[nodiscard]] std::string faults() const {
    std::string all;
    for (const std::string& fault : common_.faults) all += fault + "\n";
    return all;
  }

 private:
  TrustPages trust_{"1"};  // some of the memory is private
  Common common_;
  EchoConnection echo_;
  spinwire::Config config_;
  std::vector<std::unique_ptr<Target>> targets_;
  std::uint64_t turns_ = 0;
};

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 0) : otherwise;
}

/// The i-th kill: phases, roles and killers alternate, the rest follows from the seed.
Plan plan_of(std::uint32_t i, std::uint64_t seed) {
  Plan plan;
  plan.phase = static_cast<Phase>(i % kPhases);
  plan.role = static_cast<Role>(i / kPhases % 2);
  plan.strike = static_cast<Strike>((i / (2 * kPhases) + i / kPhases % 2 + i) % 3);
  plan.seed = mixed(seed + i);
  plan.reap_late = (plan.seed & 1) != 0;
  return plan;
}

/// Reserves hugepages for a survivor and its victims, where root runs this and there are any.
/// Others may take them first, so that it reserves twice as many.
class SomeHugepages {
 public:
  [[nodiscard]] bool there() const { return there_; }

 private:
  static constexpr unsigned long kPages = 96;
  hugepage_setting::Lock lock_;
  std::string before_ = hugepage_setting::read_text(hugepage_setting::kNrHugepages);
  unsigned long wanted_ = std::strtoul(before_.c_str(), nullptr, 10) + kPages;
  hugepage_setting::Setting setting_{hugepage_setting::kNrHugepages, before_,
                                     std::to_string(wanted_)};
  bool there_ =
      setting_ && std::strtoul(hugepage_setting::read_text(hugepage_setting::kNrHugepages).c_str(),
                               nullptr, 10) >= wanted_;
};

/// Victims one after the other until each phase had its share of `kills`.
void kill_one_by_one(std::uint32_t kills, std::uint32_t warm_up, bool hugepages = false) {
  const std::uint64_t seed = number_from("SPINWIRE_TEST_SEED", 20240607);
  spinwire::Config config = settings();
  config.queues.receive_depth = 1024;
  config.memory.receive_bytes = 16u << 20;
  config.memory.send_bytes = 16u << 20;
  Survivor survivor(1, config);
  ASSERT_TRUE(survivor.open()) << survivor.faults();
  Tally tally;
  // A victim on a busy machine may die before or after its phase: then another one takes its place.
  // With `failing`, victims die amid sending until an operation has failed, too.
  const auto run = [&](std::uint32_t share, std::uint64_t salt, bool failing) {
    for (std::uint32_t i = 0; i < 30 * share * kPhases && survivor.common().faults.empty(); ++i) {
      const Plan plan = plan_of(i, seed + salt);
      const bool more = failing && plan.phase == Phase::sending && tally.failed == 0;
      if (tally.of(static_cast<std::size_t>(plan.phase)) >= share && !more) continue;
      survivor.round(plan);
      tally.add(*survivor.targets()[0]);
    }
  };
  run(warm_up, 1'000'000, false);
  ASSERT_EQ(survivor.faults(), "") << "seed " << seed;
  const Resources before = survivor.resources(nullptr);
  if (hugepages) {
    EXPECT_GT(before.hugepages, 0) << "nothing to be given back";
  }
  tally = Tally{};
  const std::uint64_t began = now_ns();
  const auto share = static_cast<std::uint32_t>((kills + kPhases - 1) / kPhases);
  run(share, 0, true);
  const double seconds = static_cast<double>(now_ns() - began) / 1e9;
  EXPECT_EQ(survivor.faults(), "") << "seed " << seed;
  for (std::size_t phase = 0; phase < kPhases; ++phase)
    EXPECT_GE(tally.of(phase), share) << kPhaseNames[phase];
  const Resources after = survivor.resources(&before);
  EXPECT_TRUE(back_at(before, after)) << "before: " << before << "\nafter:  " << after;
  EXPECT_FALSE(survivor.echo().closed());
  tally.print();
  std::printf("%.1f s; echo: %" PRIu64 " messages, %" PRIu64 " copies\n", seconds,
              survivor.echo().messages(), survivor.echo().copies());
  survivor.echo().close();
  EXPECT_EQ(survivor.faults(), "");
  EXPECT_GT(tally.failed, 0u) << "no kill struck while operations were outstanding";
}

/// Half of the victims, those with an even number, die at the same moment. The others continue and
/// close normally.
class HalfKill {
 public:
  explicit HalfKill(std::uint32_t count) : count_(count), survivor_(count, half_settings()) {}

  void run() {
    ASSERT_TRUE(survivor_.open()) << survivor_.faults();
    const Resources before = survivor_.resources(nullptr);
    ASSERT_NO_FATAL_FAILURE(start_victims());
    kill_half();
    ASSERT_NO_FATAL_FAILURE(close_others());
    finish(before);
  }

 private:
  static constexpr std::uint32_t kDying = 0;
  static constexpr std::uint32_t kLiving = 1;

  static spinwire::Config half_settings() {
    spinwire::Config config = settings();
    config.queues.receive_depth = 2048;
    config.memory.receive_bytes = 32u << 20;
    config.memory.send_bytes = 16u << 20;
    config.memory.lease_bytes = 64u << 20;
    return config;
  }

  [[nodiscard]] Target& target(std::uint32_t i) { return *survivor_.targets()[i]; }

  /// Whether a fact holds for all victims from `first` on, every other one.
  template <typename Fact>
  bool all(std::uint32_t first, Fact fact) {
    for (std::uint32_t i = first; i < count_; i += 2) {
      if (!fact(target(i))) return false;
    }
    return true;
  }

  void start_victims() {
    constexpr std::array<Phase, 4> kMix = {Phase::sending, Phase::one_sided, Phase::receiving,
                                           Phase::idle};
    for (std::uint32_t i = 0; i < count_; ++i) {
      Plan plan;
      plan.phase = kMix[i / 2 % kMix.size()];
      plan.role = static_cast<Role>(i / 8 % 2);
      plan.strike = i % 2 == kDying ? Strike::by_survivor : Strike::never;
      plan.seed = mixed(seed_ + i);
      plan.most_progress = 100;  // each of many processes gets little time
      ASSERT_TRUE(target(i).start(plan)) << survivor_.faults();
      target(i).hold(true);
    }
    const auto under_way = [](Target& t) { return t.ready_link() != nullptr && t.under_way(); };
    ASSERT_TRUE(survivor_.until(2 * kDetectionMax, [&] {
      return all(kDying, under_way) && all(kLiving, under_way);
    })) << survivor_.faults();
  }

  /// Kills, and waits until the living victims have continued.
  void kill_half() {
    for (std::uint32_t i = kDying; i < count_; i += 2) target(i).hold(false);
    for (std::uint32_t i = kDying; i < count_; i += 2) target(i).strike(true);
    std::vector<std::uint64_t> counters;
    for (auto& each : survivor_.targets()) counters.push_back(each->slot().counter.load());
    EXPECT_TRUE(survivor_.until(2 * kDetectionMax, [&] {
      return all(kDying, [](Target& t) { return t.over(); });
    })) << survivor_.faults();
    EXPECT_TRUE(survivor_.until(kDetectionMax,
                                [&] {
                                  bool moved = true;
                                  for (std::uint32_t i = kLiving; i < count_; i += 2)
                                    moved =
                                        moved && target(i).slot().counter.load() > counters[i] + 10;
                                  return moved;
                                }))
        << "living victims do not continue\n"
        << survivor_.faults();
  }

  void close_others() {
    for (std::uint32_t i = kLiving; i < count_; i += 2) {
      ASSERT_NE(target(i).ready_link(), nullptr) << "a living peer's connection is gone";
      EXPECT_EQ(target(i).ready_link()->connection.close(), spinwire::Status::ok);
    }
    EXPECT_TRUE(survivor_.until(2 * kDetectionMax, [&] {
      return all(kLiving, [](Target& t) { return t.over(); });
    })) << survivor_.faults();
  }

  void finish(const Resources& before) {
    Tally tally;
    for (auto& each : survivor_.targets()) {
      each->finish();
      if (each->plan().strike == Strike::by_survivor) tally.add(*each);
    }
    const Resources after = survivor_.resources(&before);
    EXPECT_TRUE(back_at(before, after)) << "before: " << before << "\nafter:  " << after;
    tally.print();
    survivor_.echo().close();
    EXPECT_EQ(survivor_.faults(), "") << "seed " << seed_;
  }

  const std::uint32_t count_;
  const std::uint64_t seed_ = number_from("SPINWIRE_TEST_SEED", 20240607);
  Survivor survivor_;
};

}  // namespace

TEST(Kill, AFewVictimsInEveryPhase) { kill_one_by_one(12, 1); }
TEST(Kill, VictimsHugepagesComeBack) {
  const SomeHugepages hugepages;
  if (!hugepages.there()) GTEST_SKIP() << "no hugepages can be reserved here";
  kill_one_by_one(6, 1, true);
}
TEST(Kill, HalfOfEightAtOnce) { HalfKill(8).run(); }

TEST(SlowKill, TwoHundredVictims) {
  kill_one_by_one(static_cast<std::uint32_t>(number_from("SPINWIRE_TEST_KILLS", 200)), 2);
}
TEST(SlowKill, HalfOfTwentyAtOnce) { HalfKill(20).run(); }

}  // namespace kill_test
