#include "base/intrusive_list.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <deque>
#include <random>
#include <utility>
#include <vector>

namespace intrusive_list_test {

using spinwire::base::IntrusiveLinks;
using spinwire::base::IntrusiveList;
using spinwire::base::IntrusiveQueue;
using spinwire::base::IntrusiveStack;
using spinwire::base::RoundQueue;

// Declared before its record is complete, for layers that only know the record's name.
struct Late;
Late*& next_late(Late& late) noexcept;
struct Owner {
  IntrusiveQueue<next_late> queue;
};
struct Late {
  int value = 0;
  struct {
    Late* next = nullptr;
  } part;
};
inline Late*& next_late(Late& late) noexcept { return late.part.next; }

struct Record {
  int value = 0;
  Record* next = nullptr;
  Record* next_other = nullptr;
  IntrusiveLinks<Record> links = {};
};
using Queue = IntrusiveQueue<&Record::next>;
using OtherQueue = IntrusiveQueue<&Record::next_other>;
using Stack = IntrusiveStack<&Record::next>;
using List = IntrusiveList<&Record::links>;

namespace {

template <typename Any>
std::vector<int> values_of(const Any& list) {
  std::vector<int> values;
  for (const Record& record : list) values.push_back(record.value);
  return values;
}

using Values = std::vector<int>;

TEST(IntrusiveStack, IsLastInFirstOut) {
  std::array<Record, 3> records{Record{1}, Record{2}, Record{3}};
  Stack stack;
  EXPECT_TRUE(stack.empty());
  for (int round = 0; round < 2; ++round) {
    for (Record& record : records) stack.push_front(record);
    EXPECT_EQ(values_of(stack), (Values{3, 2, 1}));
    for (int value = 3; value != 0; --value) EXPECT_EQ(stack.pop_front().value, value);
    EXPECT_TRUE(stack.empty());
  }
}

TEST(IntrusiveStack, GivesUpARecordFromAnyPlace) {
  for (std::size_t erased = 0; erased < 3; ++erased) {
    std::array<Record, 3> records{Record{1}, Record{2}, Record{3}};
    Stack stack;
    for (Record& record : records) stack.push_front(record);
    Values left{3, 2, 1};
    left.erase(left.begin() + (2 - static_cast<std::ptrdiff_t>(erased)));
    stack.erase(records[erased]);
    EXPECT_EQ(values_of(stack), left);
    stack.push_front(records[erased]);
    left.insert(left.begin(), records[erased].value);
    EXPECT_EQ(values_of(stack), left);
  }
}

TEST(IntrusiveQueue, IsFirstInFirstOut) {
  std::array<Record, 3> records{Record{1}, Record{2}, Record{3}};
  Queue queue;
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(queue.front(), nullptr);
  for (int round = 0; round < 2; ++round) {
    for (Record& record : records) queue.push_back(record);
    EXPECT_EQ(values_of(queue), (Values{1, 2, 3}));
    EXPECT_EQ(&queue.back(), &records[2]);
    for (Record& record : records) {
      EXPECT_EQ(queue.front(), &record);
      EXPECT_EQ(&queue.pop_front(), &record);
    }
    EXPECT_TRUE(queue.empty());
  }
}

TEST(IntrusiveQueue, PutsAnUrgentRecordFirst) {
  std::array<Record, 3> records{Record{1}, Record{2}, Record{3}};
  Queue queue;
  queue.push_front(records[1]);
  queue.push_back(records[2]);
  queue.push_front(records[0]);
  EXPECT_EQ(values_of(queue), (Values{1, 2, 3}));
}

TEST(IntrusiveQueue, ErasesAtEveryPlace) {
  for (std::size_t erased = 0; erased < 3; ++erased) {
    std::array<Record, 4> records{Record{0}, Record{1}, Record{2}, Record{9}};
    Queue queue;
    Values left;
    for (std::size_t i = 0; i < 3; ++i) {
      queue.push_back(records[i]);
      if (i != erased) left.push_back(static_cast<int>(i));
    }
    queue.erase(records[erased]);
    EXPECT_EQ(values_of(queue), left);
    queue.push_back(records[3]);
    left.push_back(9);
    EXPECT_EQ(values_of(queue), left);
  }
  Record alone{5};
  Queue queue;
  queue.push_back(alone);
  queue.erase(alone);
  EXPECT_TRUE(queue.empty());
  queue.push_back(alone);
  EXPECT_EQ(values_of(queue), Values{5});
}

TEST(IntrusiveQueue, KeepsARecordInOneQueuePerLink) {
  std::array<Record, 2> records{Record{1}, Record{2}};
  Queue queue;
  OtherQueue other;
  queue.push_back(records[0]);
  queue.push_back(records[1]);
  other.push_back(records[1]);
  other.push_back(records[0]);
  EXPECT_EQ(values_of(queue), (Values{1, 2}));
  EXPECT_EQ(values_of(other), (Values{2, 1}));
}

TEST(IntrusiveQueue, IsTakenWholeByExchange) {
  std::array<Record, 3> records{Record{1}, Record{2}, Record{3}};
  Queue queue;
  queue.push_back(records[0]);
  queue.push_back(records[1]);
  Queue taken = std::exchange(queue, {});
  EXPECT_TRUE(queue.empty());
  queue.push_back(records[2]);
  EXPECT_EQ(values_of(taken), (Values{1, 2}));
  EXPECT_EQ(values_of(queue), Values{3});
}

TEST(IntrusiveQueue, FollowsALinkThatAFunctionNames) {
  std::array<Late, 2> records{Late{1, {}}, Late{2, {}}};
  Owner owner;
  for (Late& record : records) owner.queue.push_back(record);
  EXPECT_EQ(owner.queue.pop_front().value, 1);
  EXPECT_EQ(owner.queue.pop_front().value, 2);
  EXPECT_TRUE(owner.queue.empty());
}

TEST(IntrusiveList, PushesAndPopsAtBothEnds) {
  std::array<Record, 3> records{Record{1}, Record{2}, Record{3}};
  List list;
  EXPECT_TRUE(list.empty());
  EXPECT_EQ(list.front(), nullptr);
  EXPECT_EQ(list.back(), nullptr);
  list.push_back(records[1]);
  list.push_front(records[0]);
  list.push_back(records[2]);
  EXPECT_EQ(values_of(list), (Values{1, 2, 3}));
  EXPECT_EQ(list.front(), &records[0]);
  EXPECT_EQ(list.back(), &records[2]);
  for (Record& record : records) EXPECT_EQ(&list.pop_front(), &record);
  EXPECT_TRUE(list.empty());
  EXPECT_EQ(list.back(), nullptr);
}

TEST(IntrusiveList, AgreesWithADequeUnderRandomUse) {
  std::mt19937 random(7);
  std::vector<Record> records(20);
  for (int i = 0; i < 20; ++i) records[static_cast<std::size_t>(i)].value = i;
  std::vector<bool> in_list(records.size());
  List list;
  std::deque<int> model;
  for (int step = 0; step < 5000; ++step) {
    const std::size_t i = random() % records.size();
    const int value = static_cast<int>(i);
    if (in_list[i]) {
      list.erase(records[i]);
      std::erase(model, value);
    } else if (random() % 2 == 0) {
      list.push_back(records[i]);
      model.push_back(value);
    } else {
      list.push_front(records[i]);
      model.push_front(value);
    }
    in_list[i] = !in_list[i];
    ASSERT_EQ(values_of(list), Values(model.begin(), model.end()));
    ASSERT_EQ(list.back() == nullptr, model.empty());
    if (!model.empty()) {
      ASSERT_EQ(list.back()->value, model.back());
    }
  }
}

using Round = RoundQueue<&Record::next>;

Values values_of(const Round& queue) {
  Values values;
  queue.for_each([&](const Record& record) {
    values.push_back(record.value);
    return true;
  });
  return values;
}

TEST(RoundQueue, VisitsInOrderAndLeavesNewRecordsToTheNextRound) {
  std::array<Record, 4> records{};
  for (int i = 0; i < 4; ++i) records[static_cast<std::size_t>(i)].value = i;
  Round queue;
  EXPECT_TRUE(queue.empty());
  queue.run_round([](Record&) { ADD_FAILURE() << "there is no record"; });
  queue.push_back(records[0]);
  queue.push_back(records[1]);
  queue.push_back(records[2]);
  Values visited;
  queue.run_round([&](Record& record) {
    visited.push_back(record.value);
    // The first visit adds a new record, the second one adds itself again.
    if (record.value == 0) queue.push_back(records[3]);
    if (record.value != 1) return;
    queue.push_back(record);
    EXPECT_EQ(values_of(queue), (Values{2, 3, 1}));
  });
  EXPECT_EQ(visited, (Values{0, 1, 2}));
  EXPECT_EQ(values_of(queue), (Values{3, 1}));
  EXPECT_FALSE(queue.empty());
  visited.clear();
  queue.run_round([&](Record& record) { visited.push_back(record.value); });
  EXPECT_EQ(visited, (Values{3, 1}));
  EXPECT_TRUE(queue.empty());
}

TEST(RoundQueue, ErasesBeforeAndDuringARound) {
  std::array<Record, 5> records{};
  for (int i = 0; i < 5; ++i) records[static_cast<std::size_t>(i)].value = i;
  Round queue;
  for (Record& record : records) queue.push_back(record);
  queue.erase(records[1]);
  Values visited;
  queue.run_round([&](Record& record) {
    visited.push_back(record.value);
    if (record.value != 0) return;
    queue.push_back(records[0]);
    queue.push_back(records[1]);
    queue.erase(records[4]);  // waits for this round
    queue.erase(records[0]);  // waits for the next one
  });
  EXPECT_EQ(visited, (Values{0, 2, 3}));
  EXPECT_EQ(values_of(queue), Values{1});
}

}  // namespace
}  // namespace intrusive_list_test
