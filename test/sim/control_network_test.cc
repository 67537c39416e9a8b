// The network of simulations: sockets whose bytes arrive on command.
#include "sim/control_network.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <string>

namespace control_network_test {
namespace {

using namespace spinwire::control;  // NOLINT: what it is made of
using namespace spinwire::sim;      // NOLINT: what is tested
using spinwire::Status;

struct TestLinks final : LinkModel {
  bool is_up(std::uint32_t, std::uint32_t) override { return passes; }
  std::uint64_t draw_control_delay(std::uint32_t, std::uint32_t) override { return ticks; }
  bool passes = true;
  std::uint64_t ticks = 0;
};

struct Two {
  Two() {
    EXPECT_TRUE(network.open());
    auto socket = ListenSocket::open(b.address(7000), 8, &b);
    EXPECT_TRUE(socket);
    listening = std::move(*socket);
    auto begun = begin_connect(b.address(7000), &a);
    EXPECT_TRUE(begun);
    caller = std::move(*begun);
  }
  /// The accepted peer, once it has connected.
  int accepted() {
    if (!taken.fd) {
      auto got = listening.accept();
      EXPECT_TRUE(got);
      if (*got) taken = std::move(**got);
    }
    return taken.fd.get();
  }
  static std::string read(int fd) {
    std::array<char, 64> text{};
    const ssize_t got = ::recv(fd, text.data(), text.size(), MSG_DONTWAIT);
    if (got == 0) return "end";
    return got < 0 ? "nothing" : std::string(text.data(), static_cast<std::size_t>(got));
  }
  TestLinks model;
  ControlNetwork network{model};
  SimulatedHost& a = network.add_host();
  SimulatedHost& b = network.add_host();
  ListenSocket listening;
  Connecting caller;
  Accepted taken;
};

TEST(ControlNetwork, CarriesBytesBothWaysAndTheirEnd) {
  Two t;
  EXPECT_EQ(t.caller.error, 0);
  EXPECT_EQ(t.accepted(), -1);
  EXPECT_EQ(t.network.next(), 0u);
  t.network.run(1);
  const int end = t.accepted();
  ASSERT_NE(end, -1);
  EXPECT_EQ(t.taken.peer.str().substr(0, 9), "10.0.0.1:");
  ASSERT_EQ(::send(t.caller.fd.get(), "hello", 5, 0), 5);
  EXPECT_EQ(Two::read(end), "nothing");
  t.network.run(2);
  EXPECT_EQ(Two::read(end), "hello");
  ASSERT_EQ(::send(end, "there", 5, 0), 5);
  t.network.run(3);
  EXPECT_EQ(Two::read(t.caller.fd.get()), "there");
  t.caller.fd.reset();
  t.network.run(4);
  EXPECT_EQ(Two::read(end), "end");
  t.taken.fd.reset();
  t.network.run(5);
  EXPECT_EQ(t.network.next(), ControlNetwork::kNever);
}

TEST(ControlNetwork, DelaysAndCuts) {
  Two t;
  t.model.ticks = 10;
  t.network.run(100);
  EXPECT_EQ(t.network.next(), 110u);
  t.network.run(109);
  EXPECT_EQ(t.accepted(), -1);
  t.network.run(110);
  const int end = t.accepted();
  ASSERT_NE(end, -1);
  ASSERT_EQ(::send(t.caller.fd.get(), "x", 1, 0), 1);
  t.network.run(111);
  t.model.passes = false;
  EXPECT_EQ(t.network.next(), ControlNetwork::kNever);
  t.network.run(200);
  EXPECT_EQ(Two::read(end), "nothing");
  t.model.passes = true;
  EXPECT_EQ(t.network.next(), 121u);
  t.network.run(201);
  EXPECT_EQ(Two::read(end), "x");
}

TEST(ControlNetwork, ACallerThatGivesUpIsForgotten) {
  Two t;
  t.model.passes = false;
  t.network.run(1);
  t.caller.fd.reset();
  t.network.run(2);
  t.model.passes = true;
  t.network.run(3);
  EXPECT_EQ(t.accepted(), -1);
}

TEST(ControlNetwork, AListenerThatEndsEndsWhatWaitedThere) {
  Two t;
  t.network.run(1);
  t.listening = ListenSocket();
  t.network.run(2);
  EXPECT_EQ(Two::read(t.caller.fd.get()), "end");
  const auto refused = begin_connect(t.b.address(7000), &t.a);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->error, ECONNREFUSED);
}

TEST(ControlNetwork, AReleasedListenerKeepsWhatWaitsUntilItIsAdopted) {
  Two t;
  t.network.run(1);
  const int fd = t.listening.release();
  auto second = begin_connect(t.b.address(7000), &t.a);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->error, 0);
  t.network.run(2);
  EXPECT_EQ(ListenSocket::open(t.b.address(7000), 8, &t.b).error().status, Status::in_use);
  EXPECT_EQ(ListenSocket::adopt(fd, &t.a).error().status, Status::invalid_argument);
  auto adopted = ListenSocket::adopt(fd, &t.b);
  ASSERT_TRUE(adopted) << adopted.error().message();
  EXPECT_EQ(adopted->local().str(), t.b.address(7000).str());
  EXPECT_EQ(ListenSocket::adopt(fd, &t.b).error().status, Status::invalid_argument);
  t.listening = std::move(*adopted);
  ASSERT_NE(t.accepted(), -1);
  const auto next = t.listening.accept();
  ASSERT_TRUE(next && *next);
  EXPECT_FALSE(*t.listening.accept());
}

TEST(ControlNetwork, AddressesAreCheckedAndGivenOut) {
  Two t;
  EXPECT_EQ(ListenSocket::open(t.b.address(7000), 8, &t.b).error().status, Status::in_use);
  EXPECT_EQ(ListenSocket::open(t.b.address(7001), 8, &t.a).error().status,
            Status::invalid_argument);
  const auto first = ListenSocket::open(*Address::parse("127.0.0.1:0"), 8, &t.a);
  const auto second = ListenSocket::open(*Address::parse("0.0.0.0:0"), 8, &t.a);
  ASSERT_TRUE(first && second);
  EXPECT_NE(first->local().port(), second->local().port());
  EXPECT_NE(first->local().port(), 0);
}

}  // namespace
}  // namespace control_network_test
