// Test helpers: a second process, and how the two connect.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>

#include "base/unique_fd.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/rc_link.h"

namespace softverbs_test {

/// What each side sends the other about itself.
struct Card {
  Endpoint endpoint;
  std::uint64_t memory;
  std::uint32_t key;
};

template <typename T>
void put(int fd, const T& value) {
  must(::write(fd, &value, sizeof value) == static_cast<ssize_t>(sizeof value), "write");
}
template <typename T>
T get(int fd) {
  T value{};
  must(::recv(fd, &value, sizeof value, MSG_WAITALL) == static_cast<ssize_t>(sizeof value), "recv");
  return value;
}

/// A child that runs `body` with its end of a socket. The destructor kills and reaps it.
class Child {
 public:
  explicit Child(const std::function<void(int)>& body) {
    int ends[2];
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
    pid_ = fork();
    must(pid_ >= 0, "fork");
    if (pid_ == 0) {
      close(ends[0]);
      int code = 0;
      try {
        body(ends[1]);
      } catch (const std::exception& e) {
        (void)std::fprintf(stderr, "child: %s\n", e.what());
        code = 1;
      }
      _exit(code);
    }
    close(ends[1]);
    socket_.reset(ends[0]);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() { kill_and_reap(); }

  /// Kills the child without reaping it.
  void kill_only() const {
    (void)kill(pid_, SIGKILL);
    siginfo_t info{};
    (void)waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }
  void kill_and_reap() {
    if (pid_ <= 0) return;
    (void)kill(pid_, SIGKILL);
    (void)waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  /// Returns the exit code, or -1 if a signal ended the child.
  int wait() {
    socket_.reset();
    int status = 0;
    (void)waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  [[nodiscard]] int socket() const { return socket_.get(); }
  [[nodiscard]] pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  spinwire::base::UniqueFd socket_;
};

/// Exchanges cards over the socket and connects. Returns the other's card.
inline Card meet(Node& node, ibv_qp* qp, int socket, const ConnectOptions& how = {}) {
  put(socket, Card{node.endpoint(qp), node.address(0), node.mr->rkey});
  const Card theirs = get<Card>(socket);
  must(node.init(qp) == 0, "INIT");
  must(node.rtr(qp, theirs.endpoint, how.rnr_timer) == 0, "RTR");
  must(node.rts(qp, how.timeout, how.retries, how.rnr_retry) == 0, "RTS");
  put(socket, 'x');
  (void)get<char>(socket);  // both are ready
  sv::control_device(node.context);
  return theirs;
}

/// A child whose queue pair is connected to ours. It stays in an access to our memory until it is
/// killed.
struct AccessingPeer {
  AccessingPeer(Node& node, ibv_qp* qp, const NodeOptions& options = {})
      : child([&options](int socket) {
          Node theirs(options);
          (void)meet(theirs, theirs.make_qp(), socket);
          sv::begin_access(*theirs.internals().peers[0]);
          put(socket, 'd');
          (void)get<char>(socket);
        }) {
    (void)meet(node, qp, child.socket());
    (void)get<char>(child.socket());
  }
  Child child;
};

/// Whether the peer has closed its end of the socket.
inline bool hung_up(int socket) {
  pollfd end{socket, POLLIN, 0};
  return poll(&end, 1, 0) == 1;
}

/// Whether a child may access this process's memory, as tests of private memory need.
inline bool children_may_look() {
  std::uint64_t word = 1;
  Child child([&](int) {
    std::uint64_t copy = 0;
    const iovec here{&copy, sizeof copy}, there{&word, sizeof word};
    must(process_vm_readv(getppid(), &here, 1, &there, 1, 0) == sizeof copy, "process_vm_readv");
  });
  return child.wait() == 0;
}

}  // namespace softverbs_test
