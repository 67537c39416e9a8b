// The surviving process: one engine, a connection to each victim, and a record of every accepted
// operation and its completion.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string_view>

#include "kill/victim_orders.h"
#include "softverbs/softverbs_device.h"

namespace kill_test {

/// The page that all victims share, and the code that starts them.
class Nursery {
 public:
  Nursery() {
    descriptor_ = memfd_create("spinwire-kill", MFD_CLOEXEC);
    if (descriptor_ < 0 || ftruncate(descriptor_, kSlots * sizeof(Slot)) != 0) return;
    void* at =
        mmap(nullptr, kSlots * sizeof(Slot), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (at != MAP_FAILED) slots_ = static_cast<Slot*>(at);
  }
  Nursery(const Nursery&) = delete;
  Nursery& operator=(const Nursery&) = delete;
  ~Nursery() {
    if (slots_ != nullptr) munmap(slots_, kSlots * sizeof(Slot));
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  explicit operator bool() const { return slots_ != nullptr; }
  Slot& slot(std::uint32_t i) { return slots_[i]; }

  /// Executes this program as the victim of slot `i`. Returns its pid, or -1. It inherits only the
  /// page and standard error: a plain fork would keep the survivor's mappings alive.
  pid_t start(std::uint32_t i) {
    const std::string order =
        std::string(kVictimVariable) + "=" + std::to_string(descriptor_) + ":" + std::to_string(i);
    std::vector<char*> variables;
    for (char** v = environ; *v != nullptr; ++v) {
      if (std::string_view(*v).substr(0, 6) != "GTEST_") variables.push_back(*v);
    }
    variables.push_back(const_cast<char*>(order.c_str()));
    variables.push_back(nullptr);
    const char* arguments[] = {"spinwire-victim", "--gtest_filter=KillVictim.main",
                               "--gtest_brief=1", nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, descriptor_, descriptor_);  // clears close-on-exec
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    pid_t pid = -1;
    const int error = posix_spawn(&pid, "/proc/self/exe", &actions, nullptr,
                                  const_cast<char**>(arguments), variables.data());
    posix_spawn_file_actions_destroy(&actions);
    return error == 0 ? pid : -1;
  }

 private:
  int descriptor_ = -1;
  Slot* slots_ = nullptr;
};

struct Plan {
  Phase phase = Phase::idle;
  Role role = Role::connects;
  Strike strike = Strike::by_survivor;
  std::uint64_t seed = 1;
  std::uint32_t most_progress = 2000;  ///< of the victim in its phase before the strike
  bool reap_late = false;  ///< leaves the dead victim a zombie until its connection has closed
};

class Target;

/// One connection and its accepted operations.
struct Link {
  Target* target = nullptr;
  spinwire::Connection connection;
  bool ready = false;
  std::uint32_t closed = 0;  ///< number of on_closed callbacks
  spinwire::Error why;
  std::uint64_t closed_at = 0;
  std::uint32_t left_at_close = 0;
  std::vector<std::uint8_t> ended;  ///< completions by operation
  std::uint32_t outstanding = 0;
  std::uint64_t last_end = 0;
  std::uint64_t succeeded = 0;
  std::uint64_t failed = 0;
  std::uint64_t sent = 0;
  std::uint64_t taken = 0;
};

/// Shared by all targets of a survivor.
struct Common {
  spinwire::Engine engine;
  Nursery nursery;
  spinwire::Buffer source;  ///< kAreaBytes of the pattern
  spinwire::Buffer sink;
  std::vector<std::string> faults;

  void fault(std::string text) {
    if (faults.size() < 20) faults.push_back(std::move(text));
  }
  bool open(const spinwire::Config& config) {
    if (!nursery) return fault("no page to share"), false;
    auto opened = spinwire::Engine::open(config);
    if (!opened) return fault(opened.error().message()), false;
    engine = std::move(*opened);
    source = engine.allocate(kAreaBytes);
    sink = engine.allocate(kAreaBytes);
    if (!source || !sink) return fault("the send pool is dry"), false;
    std::memcpy(source.data(), area_pattern().data(), kAreaBytes);
    return true;
  }
};

/// The survivor's side of one victim after another.
class Target {
 public:
  Target(Common& common, std::uint32_t slot) : common_(common), index_(slot) {}
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;
  ~Target() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  bool listen() {
    spinwire::ListenOptions options;
    options.on_accept = [this](spinwire::Connection c) {
      Link& link = new_link();
      link.connection = c;
      if (c.set_handlers(handlers(link)) != spinwire::Status::ok) fault("set_handlers() refuses");
    };
    auto made = common_.engine.listen("127.0.0.1:0", options);
    if (!made) return fault(made.error().message()), false;
    listener_ = std::move(*made);
    return true;
  }

  /// Starts a victim.
  bool start(const Plan& plan);
  /// Does the survivor's part of the phase. Call it once after each poll.
  void step();
  /// Kills the victim if the survivor is to strike and the phase is under way: at once with `now`,
  /// else some polls later.
  void strike(bool now);
  /// While held, does not strike.
  void hold(bool held) { held_ = held; }
  /// Whether the victim is dead and the survivor has ended everything it had with it.
  [[nodiscard]] bool over();
  /// Reaps the victim and checks the results. Call it after over().
  void finish();

  [[nodiscard]] Slot& slot() { return common_.nursery.slot(index_); }
  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] bool dead();
  [[nodiscard]] bool under_way() {
    return slot().stage.load() >= Stage::in_phase ||
           (plan_.phase == Phase::handshake && slot().stage.load() == Stage::handshake);
  }
  /// Whether the victim died in the planned phase.
  [[nodiscard]] bool hit();
  [[nodiscard]] const std::vector<std::unique_ptr<Link>>& links() const { return links_; }
  [[nodiscard]] Link* ready_link() {
    for (auto& link : links_) {
      if (link->ready && link->closed == 0) return link.get();
    }
    return nullptr;
  }
  /// Time in ns from the strike to the last completion, and to the last on_closed.
  [[nodiscard]] std::uint64_t completed_after() const { return completed_after_; }
  [[nodiscard]] std::uint64_t closed_after() const { return closed_after_; }
  /// When the victim was found dead.
  [[nodiscard]] std::uint64_t died_at() const { return died_at_; }

  void fault(const std::string& text);

 private:
  Link& new_link() {
    links_.push_back(std::make_unique<Link>());
    links_.back()->target = this;
    return *links_.back();
  }
  spinwire::ConnectionHandlers handlers(Link& link);
  void connect();
  void take(Link& link, const spinwire::Message& m);
  bool accepted(Link& link, std::uint32_t id, spinwire::Status status);
  void end(Link& link, std::uint32_t id, spinwire::Status status);
  void send_messages(Link& link);
  void access_victim_memory(Link& link);
  void check(Link& link);
  bool expose_memory();
  void revoke_memory(Area& area, bool written);

  Common& common_;
  std::uint32_t index_;
  spinwire::Listener listener_;
  Plan plan_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  bool connecting_ = false;
  bool close_asked_ = false;
  bool held_ = false;
  std::uint32_t polls_left_ = 0;  ///< polls until the survivor strikes
  std::uint64_t died_at_ = 0;
  std::uint64_t completed_after_ = 0, closed_after_ = 0;
  spinwire::base::Random dice_{0};
  std::vector<std::unique_ptr<Link>> links_;
  Area into_, from_;
};

}  // namespace kill_test
