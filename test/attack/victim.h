// An engine in a process of its own that serves every peer, as the target of attacks, and the
// frames of an attacker.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "base/internals.h"
#include "base/unique_fd.h"
#include "control/loopback.h"
#include "engine/engine_core.h"
#include "rpc/rpc_ends.h"
#include "softverbs/context_gid.h"
#include "wire/endpoints.h"
#include "wire/handshake.h"

namespace attack_test {

using namespace engine_test;  // the names of a test namespace
using spinwire::base::UniqueFd;
namespace wire = spinwire::wire;

inline constexpr spinwire::Method kEcho = 1;     ///< replies with the first 8 bytes
inline constexpr spinwire::Method kHold = 2;     ///< replies when kRelease is called
inline constexpr spinwire::Method kRelease = 3;  ///< replies, also to all calls that are held

/// What a victim reports at its end.
struct VictimReport {
  std::uint64_t polls = 0;
  bool has_terminal = false;
};

/// How long this thread has had a processor.
inline std::chrono::nanoseconds thread_time() {
  timespec now{};
  EXPECT_EQ(::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now), 0);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

/// A daemon: the leader of a session without a terminal. It listens, accepts connections and serves
/// calls.
class Victim {
 public:
  /// `descriptors`: how many descriptors the victim may open after it listens; 0: no limit.
  explicit Victim(const Config& config, rlim_t descriptors = 0)
      : child_([this, config, descriptors](int in, int out) {
          return run(config, descriptors, in, out, *shown_);
        }),
        address_(child_.line()) {}
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;
  ~Victim() { (void)munmap(shown_, sizeof *shown_); }

  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  /// Polls that took a control step, so far. Time for measuring on a busy machine: these do not
  /// pass while the victim is kept from running. Also for processes that are forked from now on.
  [[nodiscard]] std::uint64_t control_steps() const noexcept {
    return shown_->control_steps.load();
  }
  /// Inbound handshakes under way, sessions, and connections, at the victim's last control step.
  /// For any process.
  [[nodiscard]] std::uint32_t handshakes() const noexcept { return shown_->handshakes.load(); }
  [[nodiscard]] std::uint32_t sessions() const noexcept { return shown_->sessions.load(); }
  [[nodiscard]] std::uint32_t connections() const noexcept { return shown_->connections.load(); }
  /// How long the victim has had a processor, so far. For any process.
  [[nodiscard]] std::chrono::nanoseconds processor_time() const { return shown_->ran.load(); }
  /// Waits until the victim has taken so many more control steps.
  void await_control_steps(std::uint64_t count) const {
    const std::uint64_t end = control_steps() + count;
    EXPECT_TRUE(until({}, [&] { return control_steps() >= end; }));
  }

  /// Stops the victim and returns its report. Fails if it has died.
  VictimReport stop() {
    VictimReport report;
    child_.tell('q');
    std::istringstream line(child_.line());
    line >> report.polls >> report.has_terminal;
    EXPECT_TRUE(line) << "the victim died";
    EXPECT_EQ(child_.wait(), 0);
    return report;
  }

 private:
  /// What it shows while it runs.
  struct Shown {
    std::atomic<std::uint64_t> control_steps{0};
    std::atomic<std::uint32_t> handshakes{0}, sessions{0}, connections{0};
    std::atomic<std::chrono::nanoseconds> ran{std::chrono::nanoseconds(0)};
  };

  static Shown* shared() {
    void* const at =
        mmap(nullptr, sizeof(Shown), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    return new (at) Shown;
  }
  /// Sets the limit so that exactly `more` numbers below it are free, whatever this process has
  /// inherited.
  static void limit_descriptors(rlim_t more) {
    rlimit files{};
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = 0;
    for (rlim_t free = 0; free < more; ++files.rlim_cur)
      free += ::fcntl(static_cast<int>(files.rlim_cur), F_GETFD) < 0 ? 1 : 0;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  }
  static bool serve(Node& node, std::vector<spinwire::PendingCall>& held) {
    const auto echo = [](spinwire::Request& r) {
      (void)r.reply(r.bytes().first(std::min<std::size_t>(r.bytes().size(), 8)));
    };
    const auto hold = [&held](spinwire::Request& r) { held.push_back(r.defer()); };
    const auto release = [&held](spinwire::Request& r) {
      for (spinwire::PendingCall& call : held) (void)call.reply(std::span<const std::byte>());
      held.clear();
      (void)r.reply(std::span<const std::byte>());
    };
    return node.engine.serve(kEcho, echo) && node.engine.serve(kHold, hold) &&
           node.engine.serve(kRelease, release);
  }
  static int run(const Config& config, rlim_t descriptors, int in, int out, Shown& shown) {
    (void)setsid();
    std::vector<spinwire::PendingCall> held;  // used by a handler to its end
    Node node(config);
    node.listen();
    if (!serve(node, held)) return 2;
    if (descriptors != 0) limit_descriptors(descriptors);
    write_line(out, node.listener.address());
    VictimReport report;
    while (command(in) != 'q') {
      for (int i = 0; i < 64; ++i) {
        (void)node.poll();
        ++report.polls;
      }
      const auto& core = *spinwire::detail::core_of(node.engine);
      shown.handshakes.store(core.control.handshakes());
      shown.sessions.store(core.calls->servers.size());
      shown.connections.store(core.context.agents.size());
      shown.control_steps.store(node.engine.stats().control_steps);
      shown.ran.store(thread_time());
    }
    report.has_terminal = UniqueFd(::open("/dev/tty", O_RDWR | O_CLOEXEC)).get() >= 0;
    const bool sound = node.engine.audit().has_value();
    write_line(out, std::to_string(report.polls) + ' ' + std::to_string(report.has_terminal));
    return sound ? 0 : 5;
  }

  Shown* shown_ = shared();
  Child child_;
  std::string address_;
};

/// One TCP stream to the victim.
class Stream {
 public:
  /// `source`: as for plain_client().
  explicit Stream(const std::string& address, const char* source = nullptr)
      : fd_(loopback::plain_client(*spinwire::control::Address::parse(address), source)) {}

  /// A send can fail because the victim has already closed.
  void send(const wire::Frame& frame) const {
    (void)::send(fd_.get(), frame.bytes().data(), frame.bytes().size(), MSG_NOSIGNAL);
  }
  void send_part(const wire::Frame& frame, std::size_t bytes) const {
    (void)::send(fd_.get(), frame.bytes().data(), std::min(bytes, frame.bytes().size()),
                 MSG_NOSIGNAL);
  }
  /// One byte of a frame.
  void send_byte(const wire::Frame& frame, std::size_t at) const {
    (void)::send(fd_.get(), frame.bytes().data() + at, 1, MSG_NOSIGNAL);
  }
  /// The victim's next frame; none if it is invalid or the victim has closed.
  [[nodiscard]] std::optional<wire::Received> receive() const {
    std::array<std::byte, wire::kFrameBytesMax> bytes{};
    if (!read_all(std::span(bytes).first(wire::kHeaderBytes))) return std::nullopt;
    const auto header = wire::decode_header(bytes);
    if (!header || !read_all(std::span(bytes).subspan(wire::kHeaderBytes, header->body_length)))
      return std::nullopt;
    auto got = wire::decode_body(*header,
                                 std::span(bytes).subspan(wire::kHeaderBytes, header->body_length));
    return got ? std::optional(std::move(*got)) : std::nullopt;
  }
  /// Waits until the victim has answered or closed. Whether it answered.
  [[nodiscard]] bool answered(int timeout_ms = 60'000) const {
    pollfd end{fd_.get(), POLLIN, 0};
    char first = 0;
    return ::poll(&end, 1, timeout_ms) == 1 && ::recv(fd_.get(), &first, 1, MSG_PEEK) == 1;
  }
  /// Whether the victim's first frame has come and is an accept. Reads nothing.
  [[nodiscard]] bool is_accepted() const {
    std::array<std::byte, wire::kHeaderBytes> head{};
    const ssize_t got = ::recv(fd_.get(), head.data(), head.size(), MSG_PEEK | MSG_DONTWAIT);
    if (got != static_cast<ssize_t>(head.size())) return false;
    const auto header = wire::decode_header(head);
    return header && header->kind == wire::FrameKind::accept;
  }
  /// Whether the victim has closed the stream, also if it said something before.
  [[nodiscard]] bool is_over() const {
    pollfd end{fd_.get(), POLLRDHUP, 0};
    return ::poll(&end, 1, 0) == 1;
  }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  [[nodiscard]] bool read_all(std::span<std::byte> to) const {
    while (!to.empty()) {
      pollfd ready{fd_.get(), POLLIN, 0};
      if (::poll(&ready, 1, 60'000) != 1) return false;
      const ssize_t got = ::recv(fd_.get(), to.data(), to.size(), 0);
      if (got <= 0) return false;
      to = to.subspan(static_cast<std::size_t>(got));
    }
    return true;
  }

  UniqueFd fd_;
};

/// A client's end of a session, with a GID that names its device.
inline wire::SessionEnd session_end(const ibv_gid& gid) {
  wire::SessionEnd end = wire_test::valid_session_end();
  std::memcpy(end.gid.data(), gid.raw, sizeof gid.raw);
  end.gid_type = spinwire::GidType::embedded;
  return end;
}

/// An endpoint of a connection, with a GID that names its device.
inline spinwire::Endpoint endpoint(const ibv_gid& gid) {
  spinwire::Endpoint e = wire_test::valid_endpoint();
  std::memcpy(e.gid.data(), gid.raw, sizeof gid.raw);
  e.gid_type = spinwire::GidType::embedded;
  return e;
}

/// The GID of a device whose segment is this process's descriptor `fd`.
inline ibv_gid gid_of_descriptor(int fd) {
  return spinwire::softverbs::make_gid(
      {static_cast<std::uint32_t>(getpid()), static_cast<std::uint32_t>(fd), 4711});
}

}  // namespace attack_test
