// Shared by the tests of sockets: loopback listeners, plain peers, and waiting for the kernel.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "base/unique_fd.h"
#include "control/address.h"
#include "control/socket.h"
#include "eventually.h"

namespace loopback {

using waiting::eventually;

/// Waits until `fd` reports one of `events`. Waits for the kernel only, never for a period of time.
inline bool wait_ready(int fd, short events) {
  pollfd waiting{fd, events, 0};
  return ::poll(&waiting, 1, 10000) == 1;
}

inline spinwire::control::Address any_port() {
  return *spinwire::control::Address::parse("127.0.0.1:0");
}

inline spinwire::control::ListenSocket listener(int backlog = 16) {
  auto socket = spinwire::control::ListenSocket::open(any_port(), backlog);
  EXPECT_TRUE(socket) << socket.error().message();
  return socket ? std::move(*socket) : spinwire::control::ListenSocket();
}

/// A plain blocking socket connected to `address`, from `source` if that is given: each address of
/// 127.0.0.0/8 is a source of its own.
inline spinwire::base::UniqueFd plain_client(const spinwire::control::Address& address,
                                             const char* source = nullptr) {
  spinwire::base::UniqueFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (source != nullptr) {
    const auto from = *spinwire::control::Address::parse(source);
    // The port is chosen at connect(), so that ports of other destinations can be used again.
    const int late = 1;
    (void)::setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &late, sizeof late);
    EXPECT_EQ(::bind(fd.get(), from.data(), from.size()), 0);
  }
  EXPECT_EQ(::connect(fd.get(), address.data(), address.size()), 0) << ::strerror(errno);
  return fd;
}

inline std::optional<spinwire::control::Accepted> accept_one(
    spinwire::control::ListenSocket& socket) {
  if (!wait_ready(socket.fd(), POLLIN)) return std::nullopt;
  auto accepted = socket.accept();
  return accepted ? std::move(*accepted) : std::nullopt;
}

/// A port without a listener. A bound socket that does not listen keeps others from taking it.
class DeadPort {
 public:
  DeadPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const auto wanted = any_port();
    EXPECT_EQ(::bind(fd_.get(), wanted.data(), wanted.size()), 0);
  }
  [[nodiscard]] spinwire::control::Address address() const {
    return *spinwire::control::local_address(fd_.get());
  }

 private:
  spinwire::base::UniqueFd fd_;
};

/// Uses up the free descriptors of the process during its lifetime.
class NoDescriptors {
 public:
  NoDescriptors() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const int lowest = ::dup(STDOUT_FILENO);
    ::close(lowest);
    rlimit tight = before_;
    tight.rlim_cur = static_cast<rlim_t>(lowest);
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_{};
};

}  // namespace loopback
