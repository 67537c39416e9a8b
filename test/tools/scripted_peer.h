// A peer of spinwire-doctor that answers every client with the same bytes.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tools/doctor_link.h"

namespace tools_test {

/// Listens at a free port of loopback until the destructor. A thread answers each client that has
/// said something, and waits for none: a client of another test, which dials a port that was free
/// before, keeps no doctor out.
class ScriptedPeer {
 public:
  explicit ScriptedPeer(std::string bytes) : bytes_(std::move(bytes)) {
    sockaddr_in address{};
    listener_ = tcp_socket(address, 0);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener_, SOMAXCONN), 0);
    socklen_t length = sizeof address;
    EXPECT_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  ScriptedPeer(const ScriptedPeer&) = delete;
  ScriptedPeer& operator=(const ScriptedPeer&) = delete;
  ~ScriptedPeer() {
    EXPECT_EQ(::eventfd_write(stop_, 1), 0);
    thread_.join();
    ::close(listener_);
    ::close(stop_);
  }
  [[nodiscard]] int port() const { return port_; }
  [[nodiscard]] std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  void run() const {
    std::vector<pollfd> polled{{stop_, POLLIN, 0}, {listener_, POLLIN, 0}};
    std::set<int> answered;
    while (::poll(polled.data(), polled.size(), -1) > 0 && polled[0].revents == 0) {
      for (std::size_t i = polled.size(); --i > 1;) {
        if (polled[i].revents == 0 || hear(polled[i].fd, answered)) continue;
        answered.erase(polled[i].fd);
        ::close(polled[i].fd);
        polled.erase(polled.begin() + static_cast<std::ptrdiff_t>(i));
      }
      if (polled[1].revents == 0) continue;
      const int client = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (client >= 0) polled.push_back({client, POLLIN, 0});
    }
    for (std::size_t i = 2; i < polled.size(); ++i) ::close(polled[i].fd);
  }
  /// Answers the first bytes of a client, and ignores later ones. False: it has closed.
  bool hear(int client, std::set<int>& answered) const {
    char some[65536];
    if (::recv(client, some, sizeof some, 0) <= 0) return false;
    if (!answered.insert(client).second) return true;
    (void)!::send(client, bytes_.data(), bytes_.size(), MSG_NOSIGNAL);
    ::shutdown(client, SHUT_WR);
    return true;
  }

  std::string bytes_;
  int stop_ = ::eventfd(0, EFD_CLOEXEC);
  int listener_ = -1;
  int port_ = 0;
  std::thread thread_;
};

}  // namespace tools_test
