// Which subjects have rows, when there are more of them than rows.
#include "engine/subject_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

namespace subject_rows_test {
namespace {

using spinwire::engine::SubjectRows;

constexpr std::uint32_t kRows = 8, kFirst = 6, kSubjects = 40;
constexpr std::uint64_t kHarmless = 100, kWellFor = 100'000;
constexpr std::uint8_t kCredit = 4, kOperations = 3;

/// Eight rows for 40 subjects, which are visited in turn, one each tick.
struct Rows : SubjectRows {
  Rows() { open(kRows, kSubjects, kWellFor); }
  /// The row of the subject after a visit.
  std::uint32_t visit(std::uint32_t index) {
    Visit found{index, generations[index], now++, blockers[index]};
    if (blockers[index] != kOperations) found.harmless_for = kHarmless;
    found.is_silent = silent.contains(index);
    found.is_stranger = strangers.contains(index);
    found.source = sources[index];
    EXPECT_FALSE(has_former(index, generations[index]));
    const Subject* const subject = claim(found);
    rows[index] = kNone;
    if (subject == nullptr || subject->row == kNone) return kNone;
    // Another one may have lost this row.
    std::replace(rows.begin(), rows.end(), subject->row, kNone);
    return rows[index] = subject->row;
  }
  void visit_all(std::uint32_t rounds = 1) {
    for (std::uint32_t i = 0; i < rounds * kSubjects; ++i) (void)visit(i % kSubjects);
    check_counts();
  }
  /// Visits all until blocks that go on are no longer harmless.
  void visit_for_long() { visit_all(2 + kHarmless / kSubjects); }
  void leave(std::uint32_t index) {
    EXPECT_EQ(release(index), rows[index]);
    EXPECT_EQ(release(index), kNone) << "it is gone";
    rows[index] = kNone;
    ++generations[index];
  }
  /// No two have one row, and the counts are those of all that are known.
  void check_counts() const {
    ByBlocker all{}, without{};
    std::uint32_t silent_without = 0;
    std::set<std::uint32_t> used;
    for (std::uint32_t i = 0; i < kSubjects; ++i) {
      ++all[blockers[i]];
      if (rows[i] == kNone) {
        ++without[blockers[i]];
        silent_without += silent.contains(i) ? 1 : 0;
      } else {
        EXPECT_LT(rows[i], kRows);
        EXPECT_TRUE(used.insert(rows[i]).second) << rows[i];
      }
    }
    EXPECT_EQ(by_blocker(), all);
    EXPECT_EQ(without_row(), without);
    EXPECT_EQ(silent_without_row(), silent_without);
  }

  std::uint64_t now = 1000;
  std::array<std::uint8_t, kSubjects> blockers{};
  std::array<std::uint32_t, kSubjects> generations{};
  std::array<std::uintptr_t, kSubjects> sources{};
  std::set<std::uint32_t> silent, strangers;
  std::array<std::uint32_t, kSubjects> rows{};
};

/// Eight rows whose last quarter, of two rows, has gone to the subjects 10 and 20.
struct UsedUpRows : Rows {
  UsedUpRows() {
    visit_all();
    blockers[10] = blockers[20] = kCredit;
    visit_for_long();
    EXPECT_NE(rows[10], kNone);
    EXPECT_NE(rows[20], kNone);
  }
  /// Both are well, for about so many ticks.
  void make_well(std::uint64_t ticks) {
    blockers[10] = blockers[20] = 0;
    visit_all();
    now += ticks;
    visit_all();
  }
};

TEST(EngineSubjectRows, ThreeQuartersGoToThoseThatComeFirst) {
  Rows r;
  r.visit_for_long();
  for (std::uint32_t i = 0; i < kSubjects; ++i)
    EXPECT_EQ(r.rows[i], i < kFirst ? i : SubjectRows::kNone);
}

TEST(EngineSubjectRows, ALongBlockGetsARowOfTheLastQuarter) {
  Rows r;
  r.visit_all();
  r.blockers[33] = kCredit;
  const std::uint64_t blocked_at = r.now + 33;
  while (r.rows[33] == SubjectRows::kNone && r.now < 10'000) r.visit_all();
  EXPECT_GE(r.rows[33], kFirst);
  EXPECT_GE(r.now, blocked_at + kHarmless);
  EXPECT_LE(r.now, blocked_at + kHarmless + 2 * kSubjects);
}

TEST(EngineSubjectRows, ShortBlocksGetNone) {
  Rows r;
  for (int i = 0; i < 1000; ++i) {
    r.blockers[33] = i % 2 == 0 ? kCredit : 0;
    r.visit_all();
    EXPECT_EQ(r.rows[33], SubjectRows::kNone) << i;
  }
}

TEST(EngineSubjectRows, WhatTheWholeEngineLacksIsNoTroubleOfASubject) {
  Rows r;
  r.blockers.fill(kOperations);
  r.visit_for_long();
  EXPECT_EQ(std::count(r.rows.begin(), r.rows.end(), SubjectRows::kNone), kSubjects - kFirst);
  r.blockers[20] = kCredit;
  r.visit_for_long();
  EXPECT_GE(r.rows[20], kFirst);
  EXPECT_NE(r.rows[20], SubjectRows::kNone);
}

TEST(EngineSubjectRows, ASilentPeerGetsARowAtOnce) {
  Rows r;
  r.visit_all();
  r.silent = {7};
  r.visit_all();
  EXPECT_EQ(r.rows[7], kFirst);
}

TEST(EngineSubjectRows, AStrangerGetsNone) {
  Rows r;
  r.visit_all();
  for (std::uint32_t i = 10; i < 30; ++i) {
    r.blockers[i] = kCredit;
    r.silent.insert(i);
    r.strangers.insert(i);
  }
  r.visit_for_long();
  for (std::uint32_t i = 10; i < 30; ++i) EXPECT_EQ(r.rows[i], SubjectRows::kNone) << i;
  r.strangers.erase(20);
  r.visit_all();
  EXPECT_NE(r.rows[20], SubjectRows::kNone);
}

TEST(EngineSubjectRows, RowsDoNotFlap) {
  UsedUpRows r;
  const auto before = r.rows;
  std::uint32_t random = 1;
  for (int round = 0; round < 200; ++round) {  // 8,000 visits
    for (std::uint8_t& blocker : r.blockers)
      blocker = (random = random * 1664525 + 1013904223) >> 30 == 0 ? kCredit : 0;
    r.visit_all(4);
    ASSERT_EQ(r.rows, before) << round;
  }
}

TEST(EngineSubjectRows, ARowOfTheLastQuarterGoesToTheNextInTrouble) {
  Rows r;
  r.visit_all();
  for (const std::uint32_t i : {10, 20, 30}) r.blockers[i] = kCredit;
  r.visit_for_long();
  EXPECT_EQ(r.without_row()[kCredit], 1u);
  EXPECT_EQ(r.rows[30], SubjectRows::kNone);
  const std::uint32_t row = r.rows[10];
  r.leave(10);
  r.blockers[10] = 0;  // of the subject that has this index next
  r.visit_all();
  EXPECT_EQ(r.rows[30], row);
  EXPECT_EQ(r.rows[10], SubjectRows::kNone) << "it is in no trouble";
  EXPECT_EQ(r.without_row()[kCredit], 0u);
}

TEST(EngineSubjectRows, ARowIsPassedOnWhenItsSubjectHasBeenWellForLong) {
  UsedUpRows r;
  const std::uint32_t row = r.rows[10];
  r.blockers[10] = 0;  // 20 stays in trouble
  r.blockers[30] = r.blockers[31] = kCredit;
  r.visit_all();
  r.now += kWellFor - 10 * kSubjects;
  r.visit_all(5);
  EXPECT_EQ(r.rows[10], row) << "it has not been well for long enough";
  r.now += 10 * kSubjects;
  r.visit_all(2);
  EXPECT_EQ(r.rows[10], SubjectRows::kNone);
  EXPECT_EQ(r.rows[30], row);
  EXPECT_NE(r.rows[20], SubjectRows::kNone);
  EXPECT_EQ(r.rows[31], SubjectRows::kNone) << "nobody else is well";
  EXPECT_EQ(r.without_row()[kCredit], 1u);
}

TEST(EngineSubjectRows, ARowThatNobodyNeedsIsNotPassedOn) {
  UsedUpRows r;
  const auto before = r.rows;
  r.make_well(3 * kWellFor);
  r.visit_all(100);
  EXPECT_EQ(r.rows, before);
  // In trouble again, both keep their rows from others.
  for (const std::uint32_t i : {10, 20, 30}) r.blockers[i] = kCredit;
  r.visit_for_long();
  EXPECT_EQ(r.rows, before);
  EXPECT_EQ(r.without_row()[kCredit], 1u);
}

TEST(EngineSubjectRows, TheOneThatHasBeenWellForLongestLosesItsRow) {
  UsedUpRows r;
  r.blockers[20] = 0;
  r.visit_all();
  r.now += kWellFor;
  r.visit_all();
  r.make_well(kWellFor);  // 10, too
  const std::uint32_t row = r.rows[20];
  r.silent = {5, 30};  // 5 has another row
  r.visit_all(2);
  EXPECT_EQ(r.rows[30], row);
  EXPECT_EQ(r.rows[20], SubjectRows::kNone);
  EXPECT_NE(r.rows[10], SubjectRows::kNone);
}

TEST(EngineSubjectRows, ASubjectThatMayLoseItsRowLeaves) {
  UsedUpRows r;
  r.make_well(kWellFor);
  r.leave(20);
  r.silent = {30, 31, 32};
  r.visit_all(2);
  EXPECT_NE(r.rows[30], SubjectRows::kNone);
  EXPECT_NE(r.rows[31], SubjectRows::kNone);
  EXPECT_EQ(r.rows[32], SubjectRows::kNone);
  EXPECT_EQ(r.rows[10], SubjectRows::kNone);
  EXPECT_EQ(r.rows[20], SubjectRows::kNone);
}

// The publisher records the end of the block by what was kept.
TEST(EngineSubjectRows, ASubjectThatHasLostItsRowKeepsWhatWasRecorded) {
  UsedUpRows r;
  r.make_well(kWellFor);
  r.blockers[10] = kOperations;
  SubjectRows::Subject* subject = r.claim({10, 0, r.now, kOperations});
  ASSERT_NE(subject, nullptr);
  subject->recorded_blocker = kOperations;
  r.silent = {30, 31};
  r.visit_all();
  EXPECT_EQ(r.rows[10], SubjectRows::kNone);
  subject = r.claim({10, 0, r.now, kOperations});
  ASSERT_NE(subject, nullptr);
  EXPECT_EQ(subject->row, SubjectRows::kNone);
  EXPECT_EQ(subject->recorded_blocker, kOperations);
  r.check_counts();
}

TEST(EngineSubjectRows, AnotherRowGoesToTheNextThatIsVisited) {
  Rows r;
  r.visit_all();
  const std::uint32_t row = r.rows[3];
  r.leave(3);
  EXPECT_EQ(r.visit(17), row);
  EXPECT_EQ(r.visit(3), SubjectRows::kNone);
}

TEST(EngineSubjectRows, ALaterSubjectOfAnIndexIsAnother) {
  Rows r;
  r.blockers[3] = kCredit;
  r.visit_all();
  r.now += 5 * kHarmless;
  EXPECT_TRUE(r.has_former(3, r.generations[3] + 1));
  EXPECT_FALSE(r.has_former(3, r.generations[3]));
  r.leave(3);
  EXPECT_FALSE(r.has_former(3, r.generations[3]));
  const std::uint64_t seen_at = r.now;
  const SubjectRows::Subject* const later =
      r.claim({3, r.generations[3], r.now, kCredit, kHarmless});
  ASSERT_NE(later, nullptr);
  EXPECT_EQ(later->seen_at, seen_at);
  EXPECT_EQ(later->blocked_at, seen_at);
}

/// 64 rows, 16 of which are the last quarter.
TEST(EngineSubjectRows, ASourceLeavesRowsOfTheLastQuarterForOthers) {
  constexpr std::uint32_t kMany = 64, kOthers = 5;
  SubjectRows rows;
  rows.open(kMany, 1000, kWellFor);
  std::uint32_t index = 0;
  for (; index < kMany - kMany / 4; ++index) ASSERT_NE(rows.claim({index, 1, 10}), nullptr);
  const auto claim_for = [&](std::uintptr_t source) {
    SubjectRows::Visit found{index++, 1, 10};
    found.is_silent = true;
    found.source = source;
    return rows.claim(found)->row != SubjectRows::kNone;
  };
  const auto claim_many = [&] {
    std::uint32_t taken = 0;
    for (int i = 0; i < 400; ++i) taken += claim_for(0x1000) ? 1 : 0;
    return taken;
  };
  EXPECT_EQ(claim_many(), 12u) << "three quarters of it";
  for (std::uint32_t i = 0; i + 1 < kOthers; ++i) EXPECT_TRUE(claim_for(0)) << i;
  EXPECT_FALSE(claim_for(0)) << "all are taken";
  EXPECT_EQ(rows.silent_without_row(), 400u - 12 + 1);
  // What has left counts no longer.
  for (std::uint32_t i = 0; i < index; ++i) (void)rows.release(i);
  for (index = 0; index < kMany - kMany / 4; ++index) (void)rows.claim({index, 1, 10});
  EXPECT_EQ(claim_many(), 12u);
}

/// A source lets its rows go, takes others, and is in trouble with the first ones again.
TEST(EngineSubjectRows, ASourceDoesNotGetMoreInTurns) {
  constexpr std::uint32_t kMany = 64, kLast = kMany / 4, kSubjectsOfSource = 32;
  SubjectRows rows;
  rows.open(kMany, 1000, kWellFor);
  std::uint32_t first = 0;
  for (; first < kMany - kLast; ++first) ASSERT_NE(rows.claim({first, 1, 10}), nullptr);
  std::uint64_t now = 10;
  const auto visit = [&](std::uint32_t index, bool is_silent, std::uintptr_t source) {
    SubjectRows::Visit found{index, 1, now};
    found.is_silent = is_silent;
    found.source = source;
    return rows.claim(found)->row != SubjectRows::kNone;
  };
  const auto visit_source = [&](std::uint32_t begin, std::uint32_t end) {
    for (std::uint32_t i = 0; i < kSubjectsOfSource; ++i)
      (void)visit(first + i, i >= begin && i < end, 0x1000);
  };
  visit_source(0, 16);
  now += kWellFor;
  visit_source(0, 0);
  visit_source(16, 32);
  for (int i = 0; i < 10; ++i) visit_source(0, 32);
  std::uint32_t others = 0;
  for (std::uint32_t i = 0; i < kLast; ++i)
    others += visit(first + kSubjectsOfSource + i, true, 0) ? 1 : 0;
  EXPECT_EQ(others, kLast - 12);
}

TEST(EngineSubjectRows, WithARowForEachSubjectNoneIsKeptBack) {
  SubjectRows rows;
  rows.open(kRows, kRows, kWellFor);
  for (std::uint32_t i = 0; i < kRows; ++i) {
    const SubjectRows::Subject* const subject = rows.claim({i, 1, 10});
    ASSERT_NE(subject, nullptr) << i;
    EXPECT_EQ(subject->row, i);
  }
}

TEST(EngineSubjectRows, WithoutRowsSubjectsAreCounted) {
  SubjectRows rows;
  EXPECT_EQ(rows.claim({0, 1, 1, kCredit}), nullptr);
  EXPECT_EQ(rows.without_row()[kCredit], 0u) << "it was not opened";
  rows.open(0, kSubjects, kWellFor);
  SubjectRows::Visit found{0, 1, 1, kCredit, 0};
  found.source = 7;
  const SubjectRows::Subject* const subject = rows.claim(found);
  ASSERT_NE(subject, nullptr);
  EXPECT_EQ(subject->row, SubjectRows::kNone);
  EXPECT_EQ(rows.without_row()[kCredit], 1u);
  EXPECT_EQ(rows.release(0), SubjectRows::kNone);
  EXPECT_EQ(rows.without_row()[kCredit], 0u);
  EXPECT_EQ(rows.claim({kSubjects, 1, 1, kCredit}), nullptr) << "no such index";
}

}  // namespace
}  // namespace subject_rows_test
