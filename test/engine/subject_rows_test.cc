// Which subjects have rows, if there are more of them than rows.
#include "engine/subject_rows.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>

namespace subject_rows_test {
namespace {

using spinwire::engine::SubjectRows;

constexpr std::uint32_t kRows = 4, kSubjects = 64;

/// Rows that all have subjects without trouble: 0 to 3, of which 3 came last.
struct FullRows : SubjectRows {
  FullRows() {
    open(kRows, kSubjects);
    for (std::uint32_t i = 0; i < kRows; ++i) EXPECT_NE(claim(i, 1, 10, false), nullptr);
  }
};

TEST(EngineSubjectRows, ASubjectKeepsItsRow) {
  FullRows rows;
  std::set<std::uint32_t> used;
  for (std::uint32_t i = 0; i < kRows; ++i) {
    const SubjectRows::Subject* const subject = rows.claim(i, 1, 20, false);
    ASSERT_NE(subject, nullptr);
    EXPECT_EQ(subject->index, i);
    EXPECT_EQ(subject->seen_at, 10u);
    used.insert(rows.row_of(*subject));
  }
  EXPECT_EQ(used.size(), kRows);
  EXPECT_EQ(rows.claim(kRows, 1, 20, false), nullptr) << "it is well, and so are the others";
  EXPECT_EQ(rows.claim(kSubjects, 1, 20, true), nullptr) << "no such index";
}

TEST(EngineSubjectRows, ALaterSubjectOfAnIndexIsAnother) {
  FullRows rows;
  SubjectRows::Subject* const first = rows.claim(2, 1, 20, true);
  ASSERT_NE(first, nullptr);
  first->blocker = 3;
  first->is_block_recorded = true;
  const std::uint32_t row = rows.row_of(*first);
  const SubjectRows::Subject* const later = rows.claim(2, 2, 30, false);
  ASSERT_NE(later, nullptr);
  EXPECT_EQ(rows.row_of(*later), row);
  EXPECT_EQ(later->generation, 2u);
  EXPECT_EQ(later->seen_at, 30u);
  EXPECT_EQ(later->blocker, 0u);
  EXPECT_FALSE(later->is_block_recorded);
}

TEST(EngineSubjectRows, AReleasedRowGoesToTheNext) {
  FullRows rows;
  const std::uint32_t row = rows.row_of(*rows.claim(1, 1, 20, false));
  EXPECT_EQ(rows.release(1), row);
  EXPECT_EQ(rows.release(1), SubjectRows::kNone);
  EXPECT_EQ(rows.release(kSubjects), SubjectRows::kNone);
  const SubjectRows::Subject* const next = rows.claim(40, 1, 20, false);
  ASSERT_NE(next, nullptr);
  EXPECT_EQ(rows.row_of(*next), row);
}

TEST(EngineSubjectRows, TroubleTakesTheRowsOfThoseThatNeverHadAny) {
  FullRows rows;
  // 3 and 2 were in trouble; 2 later.
  for (const std::uint32_t i : {3u, 2u}) {
    ASSERT_NE(rows.claim(i, 1, 20, true), nullptr);
    ASSERT_NE(rows.claim(i, 1, 21, false), nullptr);
  }
  for (const std::uint32_t i : {10u, 11u}) ASSERT_NE(rows.claim(i, 1, 30, true), nullptr);
  EXPECT_NE(rows.claim(2, 1, 30, false), nullptr);
  EXPECT_NE(rows.claim(3, 1, 30, false), nullptr);
  for (const std::uint32_t i : {0u, 1u}) EXPECT_EQ(rows.claim(i, 1, 30, false), nullptr) << i;
  ASSERT_NE(rows.claim(12, 1, 30, true), nullptr);
  EXPECT_NE(rows.claim(2, 1, 30, false), nullptr) << "its trouble was the last";
  EXPECT_EQ(rows.claim(3, 1, 30, false), nullptr);
  ASSERT_NE(rows.claim(13, 1, 30, true), nullptr);
  EXPECT_EQ(rows.claim(2, 1, 30, false), nullptr);
  EXPECT_EQ(rows.claim(14, 1, 30, true), nullptr) << "all rows are of subjects in trouble";
  ASSERT_NE(rows.claim(11, 1, 40, false), nullptr);
  EXPECT_NE(rows.claim(14, 1, 41, true), nullptr);
  EXPECT_EQ(rows.claim(11, 1, 42, false), nullptr);
}

TEST(EngineSubjectRows, WithoutRowsThereIsNone) {
  SubjectRows rows;
  EXPECT_EQ(rows.claim(0, 1, 1, true), nullptr);
  rows.open(0, kSubjects);
  EXPECT_EQ(rows.claim(0, 1, 1, true), nullptr);
  EXPECT_EQ(rows.release(0), SubjectRows::kNone);
}

}  // namespace
}  // namespace subject_rows_test
