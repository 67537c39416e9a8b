#include "control/socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>

#include <string>

#include "loopback.h"

namespace socket_test {

using spinwire::Status;
using spinwire::base::UniqueFd;
using spinwire::control::Address;
using spinwire::control::Connecting;
using spinwire::control::ListenSocket;

bool is_prepared(int fd) {
  return (::fcntl(fd, F_GETFL) & O_NONBLOCK) != 0 && (::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0;
}

bool has_no_delay(int fd) {
  int value = 0;
  socklen_t size = sizeof(value);
  return ::getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &size) == 0 && value != 0;
}

spinwire::Result<bool> finish(const Connecting& connecting, const Address& remote) {
  spinwire::Result<bool> result = false;
  EXPECT_TRUE(loopback::eventually([&] {
    result = spinwire::control::finish_connect(connecting, remote);
    return !result || *result;
  }));
  return result;
}

TEST(Socket, ConnectsAndAcceptsOverLoopback) {
  ListenSocket listener = loopback::listener();
  EXPECT_TRUE(is_prepared(listener.fd()));
  ASSERT_NE(listener.local().port(), 0);
  const auto idle = listener.accept();
  ASSERT_TRUE(idle) << idle.error().message();
  EXPECT_FALSE(idle->has_value());

  auto connecting = spinwire::control::begin_connect(listener.local());
  ASSERT_TRUE(connecting) << connecting.error().message();
  const auto connected = finish(*connecting, listener.local());
  ASSERT_TRUE(connected) << connected.error().message();
  EXPECT_TRUE(*connected);
  const auto accepted = loopback::accept_one(listener);
  ASSERT_TRUE(accepted);
  EXPECT_TRUE(is_prepared(connecting->fd.get()));
  EXPECT_TRUE(is_prepared(accepted->fd.get()));
  EXPECT_TRUE(has_no_delay(connecting->fd.get()));
  EXPECT_TRUE(has_no_delay(accepted->fd.get()));
  EXPECT_EQ(*spinwire::control::local_address(connecting->fd.get()), accepted->peer);
  EXPECT_EQ(*spinwire::control::local_address(accepted->fd.get()), listener.local());
}

TEST(Socket, ListensOnIpv6) {
  auto listener = ListenSocket::open(*Address::parse("[::1]:0"), 4);
  if (!listener) GTEST_SKIP() << "no IPv6 loopback: " << listener.error().message();
  // IPv6 only: IPv4-mapped addresses must not be accepted.
  const auto mapped = ListenSocket::open(*Address::parse("[::ffff:127.0.0.1]:0"), 4);
  ASSERT_FALSE(mapped);
  EXPECT_EQ(mapped.error().status, Status::invalid_argument);
  auto connecting = spinwire::control::begin_connect(listener->local());
  ASSERT_TRUE(connecting);
  ASSERT_TRUE(finish(*connecting, listener->local()));
  const auto accepted = loopback::accept_one(*listener);
  ASSERT_TRUE(accepted);
  EXPECT_EQ(accepted->peer.str().substr(0, 6), "[::1]:");
}

TEST(Socket, AddressInUseIsNamed) {
  ListenSocket first = loopback::listener();
  const auto second = ListenSocket::open(first.local(), 4);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().status, Status::in_use);
  EXPECT_NE(second.error().asked.find(first.local().str()), std::string::npos);
  EXPECT_NE(second.error().found.find("EADDRINUSE"), std::string::npos);
  EXPECT_FALSE(second.error().remedy.empty());
}

TEST(Socket, AddressIsFreeAgainAfterConnectionsOnIt) {
  Address address;
  {
    ListenSocket first = loopback::listener();
    address = first.local();
    const UniqueFd client = loopback::plain_client(address);
    auto accepted = loopback::accept_one(first);
    ASSERT_TRUE(accepted);
    accepted.reset();  // the listener's side closes first, so the address stays in TIME_WAIT
    char byte = 0;
    ASSERT_EQ(::read(client.get(), &byte, 1), 0);
  }
  const auto again = ListenSocket::open(address, 4);
  EXPECT_TRUE(again) << again.error().message();
}

TEST(Socket, ForeignAddressCannotBeListenedOn) {
  const auto listener = ListenSocket::open(*Address::parse("192.0.2.1:0"), 4);
  ASSERT_FALSE(listener);
  EXPECT_EQ(listener.error().status, Status::invalid_argument);
}

TEST(Socket, RefusedConnectionNamesTheAddress) {
  const loopback::DeadPort dead;
  auto connecting = spinwire::control::begin_connect(dead.address());
  ASSERT_TRUE(connecting) << "the network's answer is told by finish_connect alone";
  const auto connected = finish(*connecting, dead.address());
  ASSERT_FALSE(connected);
  EXPECT_EQ(connected.error().status, Status::refused);
  EXPECT_EQ(connected.error().asked, "connect to " + dead.address().str());
}

TEST(Socket, ConnectionToItselfCountsAsRefused) {
  // A socket that connects to its own port connects to itself.
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const Address wanted = loopback::any_port();
  ASSERT_EQ(::bind(fd.get(), wanted.data(), wanted.size()), 0);
  const Address self = *spinwire::control::local_address(fd.get());
  ASSERT_EQ(::connect(fd.get(), self.data(), self.size()), 0);
  const auto connected = finish(Connecting{std::move(fd), 0}, self);
  ASSERT_FALSE(connected);
  EXPECT_EQ(connected.error().status, Status::refused);
}

TEST(Socket, PortZeroCannotBeConnectedTo) {
  const auto connecting = spinwire::control::begin_connect(loopback::any_port());
  ASSERT_FALSE(connecting);
  EXPECT_EQ(connecting.error().status, Status::invalid_argument);
}

TEST(Socket, WithoutDescriptorsAcceptAnswersLimitAndDropsThePeer) {
  ListenSocket listener = loopback::listener();
  const UniqueFd first = loopback::plain_client(listener.local());
  const UniqueFd second = loopback::plain_client(listener.local());
  ASSERT_TRUE(loopback::wait_ready(listener.fd(), POLLIN));
  {
    const loopback::NoDescriptors none;
    for (const UniqueFd* dropped : {&first, &second}) {
      const auto accepted = listener.accept();
      ASSERT_FALSE(accepted);
      EXPECT_EQ(accepted.error().status, Status::limit);
      EXPECT_NE(accepted.error().remedy.find("ulimit -n"), std::string::npos);
      ASSERT_TRUE(loopback::wait_ready(dropped->get(), POLLIN));
      char byte = 0;
      EXPECT_LE(::read(dropped->get(), &byte, 1), 0) << "the peer learns at once";
    }
    // Nothing keeps the listener readable.
    pollfd waiting{listener.fd(), POLLIN, 0};
    EXPECT_EQ(::poll(&waiting, 1, 0), 0);
    const auto connecting = spinwire::control::begin_connect(listener.local());
    ASSERT_FALSE(connecting);
    EXPECT_EQ(connecting.error().status, Status::limit);
    const auto other = ListenSocket::open(loopback::any_port(), 4);
    ASSERT_FALSE(other);
    EXPECT_EQ(other.error().status, Status::limit);
  }
  const UniqueFd third = loopback::plain_client(listener.local());
  EXPECT_TRUE(loopback::accept_one(listener)) << "it recovers once descriptors are free";
}

TEST(Socket, ClosedListenerAnswersAnError) {
  ListenSocket closed;
  EXPECT_FALSE(closed);
  const auto accepted = closed.accept();
  ASSERT_FALSE(accepted);
  EXPECT_EQ(accepted.error().status, Status::system);
}

}  // namespace socket_test
