#include "control/epoll_set.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <set>
#include <vector>

#include "loopback.h"

namespace epoll_set_test {

using spinwire::Status;
using spinwire::base::UniqueFd;
using spinwire::control::EpollSet;
using spinwire::control::Event;
using spinwire::control::Interest;

struct Pair {
  UniqueFd near;
  UniqueFd far;
};

Pair socket_pair() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

TEST(EpollSet, TellsWhatIsReadyByItsToken) {
  auto set = EpollSet::open();
  ASSERT_TRUE(set) << set.error().message();
  Pair a = socket_pair();
  Pair b = socket_pair();
  ASSERT_TRUE(set->add(a.near.get(), 0xfeedfacecafebeefu, Interest::read));
  ASSERT_TRUE(set->add(b.near.get(), 2, Interest::read));
  std::array<Event, 8> events;
  EXPECT_EQ(set->wait(events), 0u);
  ASSERT_EQ(::write(a.far.get(), "x", 1), 1);
  for (int i = 0; i < 2; ++i) {  // level-triggered: reported until it is read
    ASSERT_EQ(set->wait(events), 1u);
    EXPECT_EQ(events[0].token, 0xfeedfacecafebeefu);
    EXPECT_TRUE(events[0].readable);
    EXPECT_FALSE(events[0].writable);
    EXPECT_FALSE(events[0].failed);
  }
  char byte = 0;
  ASSERT_EQ(::read(a.near.get(), &byte, 1), 1);
  EXPECT_EQ(set->wait(events), 0u);
}

TEST(EpollSet, InterestCanChangeAndEnd) {
  auto set = EpollSet::open();
  ASSERT_TRUE(set);
  Pair a = socket_pair();
  std::array<Event, 8> events;
  ASSERT_TRUE(set->add(a.near.get(), 1, Interest::none));
  EXPECT_EQ(set->wait(events), 0u);
  ASSERT_TRUE(set->modify(a.near.get(), 5, Interest::read_write));
  ASSERT_EQ(set->wait(events), 1u);
  EXPECT_EQ(events[0].token, 5u);
  EXPECT_TRUE(events[0].writable);
  EXPECT_FALSE(events[0].readable);
  set->remove(a.near.get());
  EXPECT_EQ(set->wait(events), 0u);
  set->remove(a.near.get());
  EXPECT_EQ(set->modify(a.near.get(), 5, Interest::read).error().status, Status::invalid_argument);
}

TEST(EpollSet, HangUpIsToldWithoutInterest) {
  auto set = EpollSet::open();
  ASSERT_TRUE(set);
  Pair a = socket_pair();
  ASSERT_TRUE(set->add(a.near.get(), 1, Interest::none));
  a.far.reset();
  std::array<Event, 8> events;
  ASSERT_EQ(set->wait(events), 1u);
  EXPECT_TRUE(events[0].failed);
  EXPECT_TRUE(events[0].readable);
}

TEST(EpollSet, ReadyDescriptorsTakeTurns) {
  auto set = EpollSet::open();
  ASSERT_TRUE(set);
  std::vector<Pair> pairs;
  for (std::uint64_t i = 0; i < 100; ++i) {
    pairs.push_back(socket_pair());
    ASSERT_TRUE(set->add(pairs.back().near.get(), i, Interest::write));
  }
  std::array<Event, 128> many;
  EXPECT_EQ(set->wait(many), EpollSet::kEventsMax);
  std::array<Event, 8> few;
  std::set<std::uint64_t> seen;
  for (int round = 0; round < 26; ++round) {
    ASSERT_EQ(set->wait(few), few.size());
    for (const Event& e : few) seen.insert(e.token);
  }
  EXPECT_EQ(seen.size(), pairs.size());
  EXPECT_EQ(set->wait({}), 0u);
}

TEST(EpollSet, WhoFollowsACountLooksWhenItHasChanged) {
  auto set = EpollSet::open();
  ASSERT_TRUE(set) << set.error().message();
  std::uint64_t changes = 0;
  set->follow(&changes);
  Pair a = socket_pair();
  ASSERT_TRUE(set->add(a.near.get(), 1, Interest::read));
  std::array<Event, 8> events;
  EXPECT_EQ(set->wait(events), 0u);
  ASSERT_EQ(::write(a.far.get(), "x", 1), 1);
  EXPECT_EQ(set->wait(events), 0u);  // the set was not told yet
  ++changes;
  EXPECT_EQ(set->wait(events), 1u);
  EXPECT_EQ(set->wait(events), 1u);  // it is still readable
  char byte = 0;
  ASSERT_EQ(::read(a.near.get(), &byte, 1), 1);
  EXPECT_EQ(set->wait(events), 0u);
  // Changes of the set itself count as well.
  ASSERT_TRUE(set->modify(a.near.get(), 1, Interest::write));
  EXPECT_EQ(set->wait(events), 1u);
}

TEST(EpollSet, MisuseIsAnError) {
  auto set = EpollSet::open();
  ASSERT_TRUE(set);
  Pair a = socket_pair();
  ASSERT_TRUE(set->add(a.near.get(), 1, Interest::read));
  EXPECT_EQ(set->add(a.near.get(), 2, Interest::read).error().status, Status::in_use);
  EXPECT_EQ(set->add(-1, 2, Interest::read).error().status, Status::system);

  EpollSet empty;
  EXPECT_FALSE(empty.add(a.near.get(), 1, Interest::read));
  std::array<Event, 1> events;
  EXPECT_EQ(empty.wait(events), 0u);

  const loopback::NoDescriptors none;
  const auto refused = EpollSet::open();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::limit);
}

}  // namespace epoll_set_test
