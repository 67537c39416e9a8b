// A connection unrelated to the dying ones, whose traffic must go on.
#pragma once

#include "kill/survivor.h"

namespace kill_test {

/// Sends messages to an echo process, and writes and reads that process's memory.
class EchoConnection {
 public:
  explicit EchoConnection(Common& common) : common_(common) {}
  EchoConnection(const EchoConnection&) = delete;
  EchoConnection& operator=(const EchoConnection&) = delete;
  ~EchoConnection() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  /// Starts the process and connects to it; false after a minute.
  bool start() {
    Slot& s = common_.nursery.slot(kEchoSlot);
    std::memset(static_cast<void*>(&s), 0, sizeof s);
    s.phase = Phase::echo;
    s.role = Role::listens;
    s.strike = Strike::never;
    s.connecting.store(1);
    pid_ = common_.nursery.start(kEchoSlot);
    const std::uint64_t deadline = now_ns() + 60'000'000'000;
    while (s.port.load(std::memory_order_acquire) == 0 && now_ns() < deadline) sched_yield();
    spinwire::ConnectOptions options;
    options.handlers.on_ready = [this](spinwire::Connection) { ready_ = true; };
    options.handlers.on_message = [this](spinwire::Connection, spinwire::Message& m) { take(m); };
    options.handlers.on_closed = [this](spinwire::Connection, const spinwire::Error& why) {
      closed_ = true;
      if (!closing_ || why.status != spinwire::Status::ok)
        common_.fault("the echo process's connection closed: " + why.message());
    };
    auto made = common_.engine.connect("127.0.0.1:" + std::to_string(s.port.load()), options);
    if (!made) return common_.fault(made.error().message()), false;
    connection_ = *made;
    while (!ready_ && now_ns() < deadline) (void)common_.engine.poll();
    local_ = common_.engine.allocate(kBytes);
    back_ = common_.engine.allocate(kBytes);
    if (!ready_ || !local_ || !back_) return common_.fault("the echo process is not there"), false;
    return true;
  }

  /// Does its traffic. Call it once after each poll.
  void step() {
    if (paused_ || closed_) return;
    constexpr std::uint64_t kWindow = 8;
    while (sent_ - taken_ < kWindow) {
      const std::uint64_t key = message_key(kSeed, sent_);
      spinwire::Buffer buffer = common_.engine.allocate(kLongestMessage);
      if (!buffer) return common_.fault("the send pool is dry");
      (void)buffer.resize(message_size(key));
      fill_bytes(buffer.bytes(), key);
      if (send(buffer) != spinwire::Status::ok) break;
      ++sent_;
    }
    if (!copying_) copy();
  }

  void pause(bool paused) { paused_ = paused; }
  [[nodiscard]] bool quiet() const { return sent_ == taken_ && !copying_ && outstanding_ == 0; }
  /// Messages and copies that returned intact.
  [[nodiscard]] std::uint64_t messages() const { return taken_; }
  [[nodiscard]] std::uint64_t copies() const { return copies_; }
  [[nodiscard]] bool closed() const { return closed_; }

  /// Closes normally; the process then exits with success.
  void close() {
    closing_ = true;
    if (connection_.close() != spinwire::Status::ok)
      common_.fault("the echo process cannot be closed");
    const std::uint64_t deadline = now_ns() + 60'000'000'000;
    int status = -1;
    while (now_ns() < deadline && (!closed_ || pid_ > 0)) {
      if (common_.engine.poll() == 0) sched_yield();
      if (pid_ > 0 && waitpid(pid_, &status, WNOHANG) == pid_) pid_ = -1;
    }
    if (status != 0)
      common_.fault("the echo process says: " + std::string(common_.nursery.slot(kEchoSlot).fault));
  }

 private:
  static constexpr std::uint64_t kSeed = 77;
  static constexpr std::size_t kBytes = 32768;

  spinwire::Status send(const spinwire::Buffer& buffer) {
    const spinwire::Status status =
        connection_.send(buffer, [this](const spinwire::Completion& c) { ended(c); });
    if (status == spinwire::Status::ok) ++outstanding_;
    return status;
  }

  void ended(const spinwire::Completion& c) {
    --outstanding_;
    if (c.status != spinwire::Status::ok && !closing_)
      common_.fault("the echo process's operation: " + std::string(to_string(c.status)));
  }

  void take(const spinwire::Message& m) {
    const std::uint64_t key = message_key(kSeed, taken_++);
    if (m.size() != message_size(key) || !same_bytes(m.bytes(), key))
      common_.fault("the echo process's message came back wrong");
  }

  /// Writes new bytes, reads them back and compares.
  void copy() {
    const spinwire::RemoteRegion there = common_.nursery.slot(kEchoSlot).into;
    const std::uint64_t key = mixed(copies_);
    fill_bytes(local_.bytes(), key);
    const auto offset = (copies_ * 4096) % (kAreaBytes - kBytes);
    const auto written = [this](const spinwire::Completion& c) { ended(c); };
    const auto read = [this, key](const spinwire::Completion& c) {
      ended(c);
      copying_ = false;
      if (c.status == spinwire::Status::ok && !same_bytes(back_.bytes(), key))
        common_.fault("the echo process's memory is wrong");
      ++copies_;
    };
    if (connection_.write(local_.slice(), there.slice(offset, kBytes), written) !=
        spinwire::Status::ok)
      return;
    ++outstanding_;
    copying_ = true;
    if (connection_.read(back_.slice(), there.slice(offset, kBytes), read) ==
        spinwire::Status::ok) {
      ++outstanding_;
    } else {
      copying_ = false;
    }
  }

  Common& common_;
  pid_t pid_ = -1;
  spinwire::Connection connection_;
  spinwire::Buffer local_, back_;
  std::uint64_t sent_ = 0, taken_ = 0, copies_ = 0;
  std::uint32_t outstanding_ = 0;
  bool ready_ = false, closed_ = false, closing_ = false, paused_ = false, copying_ = false;
};

}  // namespace kill_test
