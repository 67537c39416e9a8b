// Peers of spinwire-doctor that say what a test tells them, or nothing.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tools/doctor_link.h"

namespace tools_test {

/// Listens at a free port of loopback until the destructor. The kernel takes the clients; nobody
/// answers them.
class SilentPeer {
 public:
  SilentPeer() {
    sockaddr_in address{};
    listener_ = tcp_socket(address, 0);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener_, SOMAXCONN), 0);
    socklen_t length = sizeof address;
    EXPECT_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }
  SilentPeer(const SilentPeer&) = delete;
  SilentPeer& operator=(const SilentPeer&) = delete;
  ~SilentPeer() { ::close(listener_); }
  [[nodiscard]] int fd() const { return listener_; }
  [[nodiscard]] int port() const { return port_; }
  [[nodiscard]] std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int listener_ = -1;
  int port_ = 0;
};

/// A thread answers each client that has said something, and waits for none: a client of another
/// test, which dials a port that was free before, keeps no doctor out.
class ScriptedPeer {
 public:
  /// `bytes` answer what a client says first. Without `later` that is all; else `later` answers
  /// each further message, after `delay`.
  explicit ScriptedPeer(std::string bytes, std::string later = {},
                        std::chrono::milliseconds delay = {})
      : bytes_(std::move(bytes)), later_(std::move(later)), delay_(delay) {
    thread_ = std::thread([this] { run(); });
  }
  ScriptedPeer(const ScriptedPeer&) = delete;
  ScriptedPeer& operator=(const ScriptedPeer&) = delete;
  ~ScriptedPeer() {
    EXPECT_EQ(::eventfd_write(stop_, 1), 0);
    thread_.join();
    ::close(stop_);
  }
  [[nodiscard]] int port() const { return listener_.port(); }
  [[nodiscard]] std::string address() const { return listener_.address(); }
  /// How many further messages it has answered.
  [[nodiscard]] int answered_later() const { return answered_later_; }

 private:
  void run() {
    std::vector<pollfd> polled{{stop_, POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
    std::set<int> answered;
    while (::poll(polled.data(), polled.size(), -1) > 0 && polled[0].revents == 0) {
      for (std::size_t i = polled.size(); --i > 1;) {
        if (polled[i].revents == 0 || hear(polled[i].fd, answered)) continue;
        answered.erase(polled[i].fd);
        ::close(polled[i].fd);
        polled.erase(polled.begin() + static_cast<std::ptrdiff_t>(i));
      }
      if (polled[1].revents == 0) continue;
      const int client = ::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC);
      if (client >= 0) polled.push_back({client, POLLIN, 0});
    }
    for (std::size_t i = 2; i < polled.size(); ++i) ::close(polled[i].fd);
  }
  /// False: the client has closed.
  bool hear(int client, std::set<int>& answered) {
    char some[65536];
    if (::recv(client, some, sizeof some, 0) <= 0) return false;
    if (answered.insert(client).second) {
      (void)!::send(client, bytes_.data(), bytes_.size(), MSG_NOSIGNAL);
      if (later_.empty()) ::shutdown(client, SHUT_WR);
    } else if (!later_.empty()) {
      pollfd stopped{stop_, POLLIN, 0};  // the pace of a slow peer, until the test ends
      (void)::poll(&stopped, 1, static_cast<int>(delay_.count()));
      if (::send(client, later_.data(), later_.size(), MSG_NOSIGNAL) > 0) ++answered_later_;
    }
    return true;
  }

  const std::string bytes_;
  const std::string later_;
  const std::chrono::milliseconds delay_;
  std::atomic<int> answered_later_{0};
  SilentPeer listener_;
  int stop_ = ::eventfd(0, EFD_CLOEXEC);
  std::thread thread_;
};

}  // namespace tools_test
