// A network in memory, whose peers come from any address: each connection is a pair of sockets.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "base/unique_fd.h"
#include "control/socket.h"

namespace pair_network {

namespace control = spinwire::control;
using spinwire::Result;
using spinwire::base::UniqueFd;

inline std::pair<UniqueFd, UniqueFd> socket_pair() {
  std::array<int, 2> ends{-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

/// A host with one listener, which must be stopped before the network ends.
class PairNetwork final : public control::Network {
 public:
  Result<Listening> listen(const control::Address& address) override {
    waits_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE));
    EXPECT_TRUE(waits_);
    queue_ = std::make_shared<Queue>();
    return Listening{UniqueFd(::dup(waits_.get())), address, queue_};
  }
  /// A client's connection, from `next_source`.
  Result<control::Connecting> connect(const control::Address&) override {
    auto [near, far] = socket_pair();
    add(std::move(far), next_source);
    return control::Connecting{std::move(near), 0};
  }
  [[nodiscard]] const std::uint64_t* change_count() const noexcept override { return nullptr; }

  /// A stranger's connection. The caller may send bytes, or close it.
  UniqueFd call(const control::Address& from) {
    auto [near, far] = socket_pair();
    add(std::move(far), from);
    return std::move(near);
  }
  /// The connection of a stranger who is silent for ever. It takes one descriptor.
  void call_in_silence(const control::Address& from) {
    add(UniqueFd(::fcntl(silent_.second.get(), F_DUPFD_CLOEXEC, 0)), from);
  }
  [[nodiscard]] std::size_t waiting() const { return queue_->waiting.size(); }

  control::Address next_source;

 private:
  struct Queue final : control::AcceptQueue {
    Result<std::optional<control::Accepted>> accept(int fd) override {
      std::uint64_t one = 0;
      if (::read(fd, &one, sizeof one) != sizeof one || waiting.empty())
        return std::optional<control::Accepted>();
      control::Accepted first = std::move(waiting.front());
      waiting.pop_front();
      return std::optional<control::Accepted>(std::move(first));
    }
    std::deque<control::Accepted> waiting;
  };

  void add(UniqueFd fd, const control::Address& from) {
    EXPECT_TRUE(fd);
    queue_->waiting.push_back({std::move(fd), from});
    const std::uint64_t one = 1;
    EXPECT_EQ(::write(waits_.get(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }

  UniqueFd waits_;
  std::shared_ptr<Queue> queue_;
  std::pair<UniqueFd, UniqueFd> silent_ = socket_pair();
};

}  // namespace pair_network
