// The process that is killed: one engine with one connection to the survivor, busy with its phase
// until it dies. It is a new execution of the test program, so that it inherits nothing of the
// survivor.
#pragma once

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <deque>

#include "kill/victim_orders.h"

namespace kill_test {

class Victim {
 public:
  explicit Victim(Slot& slot) : slot_(slot), dice_(slot.seed) {}

  /// Ends by itself only after a normal close, or after a time limit.
  int run() {
    if (!has_no_inherited_descriptors() || !open() || !connect_or_listen()) return 1;
    constexpr std::uint64_t kTimeout = 240'000'000'000;
    const std::uint64_t deadline = now_ns() + (is_echo() ? 40 * kTimeout : kTimeout);
    for (std::uint64_t spins = 1; !over_; ++spins) {
      const int events = engine_.poll();
      if (events < 0) return fault("poll() answers %d", events);
      if (events > 0 && stage() == Stage::handshake)
        slot_.step.fetch_add(1, std::memory_order_relaxed);
      work();
      strike();
      if (events == 0) sched_yield();
      if (spins % 4096 == 0 && now_ns() > deadline)
        return fault("nobody struck in %s", kPhaseNames[static_cast<std::size_t>(slot_.phase)]);
    }
    return slot_.faults.load() == 0 ? 0 : 1;
  }

 private:
  [[nodiscard]] bool is_echo() const { return slot_.phase == Phase::echo; }
  [[nodiscard]] Stage stage() const { return slot_.stage.load(std::memory_order_relaxed); }
  void enter(Stage stage) { slot_.stage.store(stage, std::memory_order_release); }
  void progress() { slot_.counter.fetch_add(1, std::memory_order_relaxed); }

  [[gnu::format(printf, 2, 3)]] int fault(const char* format, ...) {
    if (slot_.faults.fetch_add(1) == 0) {
      va_list list;
      va_start(list, format);
      std::vsnprintf(slot_.fault, sizeof slot_.fault, format, list);
      va_end(list);
    }
    over_ = true;
    return 1;
  }

  /// An inherited descriptor of the survivor's engine would keep its memory and connections alive.
  bool has_no_inherited_descriptors() {
    DIR* list = opendir("/proc/self/fd");
    if (list == nullptr) return true;
    bool clean = true;
    while (const dirent* entry = readdir(list)) {
      char target[256] = {};
      if (readlinkat(dirfd(list), entry->d_name, target, sizeof target - 1) <= 0) continue;
      if (std::strstr(target, "spinwire") == nullptr || std::strstr(target, "memfd:") == nullptr)
        continue;
      if (std::strstr(target, "memfd:spinwire-kill") != nullptr) continue;
      fault("inherited %s", target);
      clean = false;
    }
    closedir(list);
    return clean;
  }

  bool open() {
    auto opened = spinwire::Engine::open(settings());
    if (!opened) return fault("%s", opened.error().message().c_str()) == 0;
    engine_ = std::move(*opened);
    std::string why;
    if (slot_.phase != Phase::one_sided && !is_echo()) return true;
    using spinwire::Access;
    if (!into_.open(engine_, slot_.private_memory,
                    is_echo() ? Access::remote_read_write : Access::remote_write, why) ||
        !from_.open(engine_, slot_.private_memory, Access::remote_read, why)) {
      return fault("%s", why.c_str()) == 0;
    }
    slot_.into = into_.remote;
    slot_.from = from_.remote;
    slot_.lent.store(1, std::memory_order_release);
    source_ = engine_.allocate(kAreaBytes);
    sink_ = engine_.allocate(kAreaBytes);
    if (!source_ || !sink_) return fault("the send pool is dry") == 0;
    std::memcpy(source_.data(), area_pattern().data(), kAreaBytes);
    return true;
  }

  spinwire::ConnectionHandlers handlers() {
    spinwire::ConnectionHandlers h;
    h.on_ready = [this](spinwire::Connection c) {
      connection_ = c;
      enter(Stage::warm);
      if (slot_.phase == Phase::handshake && slot_.strike == Strike::at_step) die();
    };
    h.on_message = [this](spinwire::Connection, spinwire::Message& m) { take(m); };
    h.on_closed = [this](spinwire::Connection, const spinwire::Error& why) {
      // The survivor may give up a connection in its handshake; the victim still dies.
      if (slot_.strike == Strike::never) {
        if (why.status != spinwire::Status::ok) fault("closed: %s", why.message().c_str());
        over_ = true;
      }
      enter(Stage::closed);
    };
    return h;
  }

  bool connect_or_listen() {
    if (slot_.role == Role::connects) {
      enter(Stage::handshake);
      spinwire::ConnectOptions options;
      options.handlers = handlers();
      const std::string address = "127.0.0.1:" + std::to_string(slot_.survivor_port);
      auto made = engine_.connect(address, options);
      return made || fault("%s", made.error().message().c_str()) == 0;
    }
    spinwire::ListenOptions options;
    options.handlers = handlers();
    auto made = engine_.listen("127.0.0.1:0", options);
    if (!made) return fault("%s", made.error().message().c_str()) == 0;
    listener_ = std::move(*made);
    const std::string address = listener_.address();
    const auto port = std::stoul(address.substr(address.rfind(':') + 1));
    slot_.port.store(static_cast<std::uint32_t>(port), std::memory_order_release);
    return true;
  }

  void take(spinwire::Message& m) {
    if (is_echo()) {
      echoes_.push_back(m.take());
      progress();
      return;
    }
    const std::uint64_t key = message_key(slot_.seed, taken_++);
    if (m.size() != message_size(key) || !same_bytes(m.bytes(), key))
      fault("message %llu of the survivor is not what it sent",
            static_cast<unsigned long long>(taken_ - 1));
    if (slot_.phase == Phase::sending) progress();
  }

  /// Does the phase's work after one poll.
  void work() {
    if (stage() == Stage::starting && slot_.connecting.load(std::memory_order_acquire) != 0)
      enter(Stage::handshake);
    if (stage() < Stage::warm || stage() == Stage::closed) return;
    switch (slot_.phase) {
      case Phase::handshake:
      case Phase::sending:
        break;
      case Phase::idle:
        progress();
        break;
      case Phase::receiving:
        send_messages();
        break;
      case Phase::one_sided:
        access_survivor_memory();
        break;
      case Phase::closing:
        send_messages();
        close();
        return;
      case Phase::echo:
        while (!echoes_.empty() && connection_.send(echoes_.front()) == spinwire::Status::ok)
          echoes_.pop_front();
        return;
    }
    if (stage() == Stage::warm && slot_.counter.load() >= slot_.threshold &&
        slot_.phase != Phase::handshake)
      enter(Stage::in_phase);
  }

  /// Sends messages while there is credit.
  void send_messages() {
    for (int burst = 0; burst < 32; ++burst) {
      const std::uint64_t key = message_key(~slot_.seed, sent_);
      const std::size_t size = message_size(key);
      spinwire::Buffer buffer = engine_.allocate(kLongestMessage);
      if (!buffer) return;
      (void)buffer.resize(size);
      fill_bytes(buffer.bytes(), key);
      if (connection_.send(buffer, [this](const spinwire::Completion& c) {
            if (c.status == spinwire::Status::ok) progress();
          }) != spinwire::Status::ok) {
        return;
      }
      ++sent_;
    }
  }

  /// Keeps a few reads and writes of the survivor's memory in flight.
  void access_survivor_memory() {
    constexpr std::uint32_t kWindow = 4;
    while (accesses_in_flight_ < kWindow) {
      // Half of them are short, so that the kill strikes both within copies and between them.
      const std::uint64_t length = 1 + dice_.below(dice_.below(2) == 0 ? 4096 : kAreaBytes);
      const std::uint64_t offset = dice_.below(kAreaBytes - length + 1);
      const bool writes = dice_.below(2) == 0;
      const auto done = [this, offset, length, writes](const spinwire::Completion& c) {
        --accesses_in_flight_;
        if (c.status != spinwire::Status::ok) return;
        progress();
        if (!writes &&
            std::memcmp(sink_.data() + offset, area_pattern().data() + offset, length) != 0) {
          fault("a read brought wrong bytes");
        }
      };
      const spinwire::Status status =
          writes ? connection_.write(source_.slice(offset, length),
                                     slot_.survivor_into.slice(offset, length), done)
                 : connection_.read(sink_.slice(offset, length),
                                    slot_.survivor_from.slice(offset, length), done);
      if (status != spinwire::Status::ok) return;
      ++accesses_in_flight_;
    }
  }

  void close() {
    if (stage() == Stage::in_phase) return;
    if (slot_.counter.load() < slot_.threshold) return;
    if (slot_.survivor_closes) {
      slot_.armed.store(1, std::memory_order_release);
      if (slot_.closing.load(std::memory_order_acquire) == 0) return;
      enter(Stage::in_phase);
      return;
    }
    enter(Stage::in_phase);
    if (const auto status = connection_.close(); status != spinwire::Status::ok)
      fault("close() answers %s", std::string(to_string(status)).c_str());
  }

  // Dying.

  void die() {
    slot_.struck_at.store(now_ns());
    kill(getpid(), SIGKILL);
  }

  void arm_timer() {
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGKILL;
    timer_t timer{};
    itimerspec when{};
    when.it_value.tv_nsec = slot_.delay_ns + 1;
    slot_.struck_at.store(now_ns() + slot_.delay_ns);
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 ||
        timer_settime(timer, 0, &when, nullptr) != 0)
      fault("no timer: %s", std::strerror(errno));
  }

  void strike() {
    const bool handshake = slot_.phase == Phase::handshake;
    if (slot_.strike == Strike::never || stage() < Stage::handshake) return;
    if (!struck_ && (handshake || stage() >= Stage::in_phase)) {
      struck_ = true;
      if (slot_.strike == Strike::by_timer) arm_timer();
      slot_.armed.store(1, std::memory_order_release);
    }
    if (!struck_ || slot_.strike != Strike::at_step) return;
    // The steps of the handshake are control verbs; those of other phases are polls.
    if (handshake ? slot_.step.load() >= slot_.steps : polls_++ >= slot_.steps) die();
  }

  Slot& slot_;
  spinwire::base::Random dice_;
  spinwire::Engine engine_;
  spinwire::Listener listener_;
  spinwire::Connection connection_;
  Area into_, from_;
  spinwire::Buffer source_, sink_;
  std::deque<spinwire::Buffer> echoes_;
  std::uint64_t sent_ = 0, taken_ = 0;
  std::uint32_t accesses_in_flight_ = 0, polls_ = 0;
  bool over_ = false, struck_ = false;
};

/// Runs instead of the tests when the environment names a victim.
inline int victim_main(const char* order) {
  int descriptor = -1;
  unsigned slot = 0;
  if (std::sscanf(order, "%d:%u", &descriptor, &slot) != 2 || slot >= kSlots) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  void* at =
      mmap(nullptr, kSlots * sizeof(Slot), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return 2;
  return Victim(static_cast<Slot*>(at)[slot]).run();
}

}  // namespace kill_test
