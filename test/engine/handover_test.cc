// A listening socket that is handed to a successor: Listener::release() and
// Engine::adopt_listener().
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "engine/harness.h"

namespace handover_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Goodbye;
using spinwire::base::UniqueFd;

ListenOptions options_of(Node& node) {
  ListenOptions options;
  options.handlers = node.handlers();
  options.on_accept = [n = &node](Connection) { ++n->accepts; };
  return options;
}

void adopt(Node& node, int fd) {
  auto adopted = node.engine.adopt_listener(fd, options_of(node));
  ASSERT_TRUE(adopted) << adopted.error().message();
  node.listener = std::move(*adopted);
}

TEST(EngineHandover, TheSuccessorListensAtTheSameAddress) {
  Node before, after, client;
  before.listen();
  const std::string address = before.listener.address();
  auto fd = before.listener.release();
  ASSERT_TRUE(fd) << fd.error().message();
  EXPECT_FALSE(before.listener);
  EXPECT_EQ(before.listener.address(), "");
  EXPECT_EQ(before.listener.release().error().status, Status::not_connected);
  EXPECT_EQ(::fcntl(*fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  // Between the two: the kernel keeps the peer.
  (void)client.begin(address);
  for (int i = 0; i < 200; ++i) (void)(client.poll() + before.poll() + after.poll());
  EXPECT_EQ(client.closed.size(), 0u);
  adopt(after, *fd);
  EXPECT_EQ(after.listener.address(), address);
  ASSERT_TRUE(until({&client, &after, &before},
                    [&] { return client.ready.size() == 1 && after.ready.size() == 1; }));
  EXPECT_EQ(before.accepts, 0u);
  finish(client, after);
}

TEST(EngineHandover, PeersThatWereAcceptedBeforeAreServedOn) {
  Node before, client;
  before.listen();
  (void)client.begin(before);
  // The socket is accepted, but no frame has come through it.
  ASSERT_TRUE(until({&before}, [&] { return before.engine.stats().control_steps > 100; }));
  const UniqueFd socket(*before.listener.release());
  const std::uint64_t steps = before.engine.stats().control_steps + 100;
  ASSERT_TRUE(until({&before}, [&] { return before.engine.stats().control_steps > steps; }));
  ASSERT_TRUE(until({&client, &before}, [&] { return client.ready.size() == 1; }));
  EXPECT_EQ(before.accepts, 1u);
  for (int i = 0; i < 100; ++i) (void)before.poll();
  finish(client, before);
}

TEST(EngineHandover, UnderALoadOfConnectsNoneIsLost) {
  Config config = small_config();
  config.connections.handshakes = 64;
  Node client(config);
  std::deque<Node> servers;
  servers.emplace_back(config).listen();
  const std::string address = servers[0].listener.address();
  // A slow machine must not come to half-open connections that give way, a quarter of the maximum.
  constexpr std::size_t kRounds = 8, kConnects = 160, kAtOnce = 12;
  std::size_t begun = 0;
  const auto poll = [&] {
    (void)client.poll();
    for (Node& server : servers) (void)server.poll();
  };
  client.on_ready = [](Connection c) {
    EXPECT_EQ(c.close(), Status::ok);
  };  // makes room for others
  ASSERT_TRUE(until({}, [&] {
    if (begun < kConnects && begun - client.closed.size() < kAtOnce) {
      (void)client.begin(address);
      ++begun;
    }
    poll();
    if (servers.size() < kRounds && begun * kRounds > kConnects * servers.size()) {
      auto fd = servers.back().listener.release();
      EXPECT_TRUE(fd) << fd.error().message();
      for (int i = 0; i < 20; ++i) poll();  // nobody accepts
      adopt(servers.emplace_back(config), *fd);
    }
    return client.closed.size() == kConnects;
  }));
  EXPECT_EQ(client.ready.size(), kConnects);
  for (const Error& e : client.closed) EXPECT_EQ(e.status, Status::ok) << e.message();
  std::uint64_t accepted = 0;
  for (const Node& server : servers) accepted += server.accepts;
  EXPECT_EQ(accepted, kConnects);
  EXPECT_GT(servers.back().accepts, 0u);
}

/// A message of a byte and a descriptor.
struct DescriptorMessage {
  DescriptorMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = room.data();
    message.msg_controllen = room.size();
  }
  char byte = 1;
  iovec data{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> room{};
  msghdr message{};
};

/// Sends a descriptor through a socket, or receives one.
void send_descriptor(int through, int fd) {
  DescriptorMessage sent;
  cmsghdr* const header = CMSG_FIRSTHDR(&sent.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  EXPECT_EQ(::sendmsg(through, &sent.message, 0), 1);
}
int receive_descriptor(int through) {
  DescriptorMessage received;
  if (::recvmsg(through, &received.message, 0) != 1) return -1;
  int fd = -1;
  if (const cmsghdr* const header = CMSG_FIRSTHDR(&received.message); header != nullptr)
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return fd;
}

/// The successor: adopts what comes, and serves until it is told to end.
int serve_on(int through, int in, int out) {
  Node node;
  adopt(node, receive_descriptor(through));
  write_line(out, node.listener.address());
  while (command(in) == 0) (void)node.poll();
  return testing::Test::HasFailure() ? 1 : static_cast<int>(node.accepts > 0 ? 0 : 2);
}

TEST(EngineHandover, AnotherProcessTakesOverWhileThePredecessorDrains) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const UniqueFd ours(ends[0]);
  Child successor([&](int in, int out) { return serve_on(ends[1], in, out); });
  ::close(ends[1]);

  Node before, client;
  before.listen();
  const std::string address = before.listener.address();
  ConnectOptions options;
  options.handlers = client.handlers();
  options.reconnect = {1000, 1ms, 10ms};
  Connection c = *client.engine.connect(address, options);
  ASSERT_TRUE(until({&client, &before}, [&] { return c.ready() && before.ready.size() == 1; }));

  {
    const UniqueFd fd(*before.listener.release());
    send_descriptor(ours.get(), fd.get());
  }
  ASSERT_TRUE(before.engine.drain(1h));
  ASSERT_TRUE(until({&client, &before}, [&] { return before.engine.drained(); }));
  before.engine = Engine();
  EXPECT_EQ(successor.line(), address);
  ASSERT_TRUE(until({&client}, [&] { return client.ready.size() == 2; }));
  EXPECT_EQ(client.closed.size(), 0u);
  ASSERT_EQ(c.close(), Status::ok);
  ASSERT_TRUE(until({&client}, [&] { return client.closed.size() == 1; }));
  successor.tell('q');
  EXPECT_EQ(successor.wait(), 0);
}

UniqueFd socket_of(int domain, int type, bool listens, bool only_v6 = true) {
  UniqueFd fd(::socket(domain, type, 0));
  const int on = only_v6 ? 1 : 0;
  if (domain == AF_INET6) (void)::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  // The kernel does not ask the option of a socket with an address of its own.
  v6.sin6_addr = only_v6 ? in6addr_loopback : in6addr_any;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool is_v6 = domain == AF_INET6;
  auto* const address = is_v6 ? reinterpret_cast<sockaddr*>(&v6) : reinterpret_cast<sockaddr*>(&v4);
  if (domain != AF_UNIX) (void)::bind(fd.get(), address, is_v6 ? sizeof v6 : sizeof v4);
  if (listens) (void)::listen(fd.get(), 8);
  return fd;
}

TEST(EngineHandover, OnlyAListeningTcpSocketIsAdopted) {
  Node node;
  const auto expect_refused = [&node](const UniqueFd& fd, const char* why) {
    const auto adopted = node.engine.adopt_listener(fd.get(), {});
    ASSERT_FALSE(adopted);
    EXPECT_EQ(adopted.error().status, Status::invalid_argument) << adopted.error().message();
    EXPECT_NE(adopted.error().message().find(why), std::string::npos) << adopted.error().message();
    if (fd) {
      EXPECT_GE(::fcntl(fd.get(), F_GETFD), 0) << "it is still the caller's";
    }
  };
  expect_refused(UniqueFd(), "it is no socket");
  expect_refused(UniqueFd(::open("/dev/null", O_RDONLY)), "it is no socket");
  expect_refused(socket_of(AF_INET, SOCK_STREAM, false), "it does not listen");
  expect_refused(socket_of(AF_INET, SOCK_DGRAM, false), "it is no TCP socket");
  expect_refused(socket_of(AF_UNIX, SOCK_STREAM, false), "it is no TCP socket");
  if (const UniqueFd v6 = socket_of(AF_INET6, SOCK_STREAM, true, false); v6)
    expect_refused(v6, "IPv4");
  const UniqueFd good = socket_of(AF_INET, SOCK_STREAM, true);
  ListenOptions options;
  options.via = spinwire::Via::rdma_cm;
  const auto by_cm = node.engine.adopt_listener(good.get(), options);
  ASSERT_FALSE(by_cm);
  EXPECT_EQ(by_cm.error().status, Status::unsupported);
}

TEST(EngineHandover, AnAdoptedSocketIsMadeNonBlockingAndCloseOnExec) {
  Node node, client;
  UniqueFd fd = socket_of(AF_INET, SOCK_STREAM, true);
  const int number = fd.get();
  adopt(node, fd.release());
  EXPECT_NE(::fcntl(number, F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(::fcntl(number, F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(*node.listener.fd(), number);
  (void)client.begin(node);
  ASSERT_TRUE(until({&client, &node}, [&] { return client.ready.size() == 1; }));
  node.listener = Listener();
  EXPECT_LT(::fcntl(number, F_GETFD), 0) << "the engine closes what it owns";
  finish(client, node);
}

TEST(EngineHandover, AListenerThatIsGoneHasNoDescriptor) {
  Listener none;
  EXPECT_EQ(none.fd().error().status, Status::not_connected);
  EXPECT_EQ(none.release().error().status, Status::not_connected);
  Node node;
  node.listen();
  node.engine = Engine();
  EXPECT_EQ(node.listener.fd().error().status, Status::not_connected);
}

}  // namespace
}  // namespace handover_test
