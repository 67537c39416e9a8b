// The survivor's handling of one victim.
#pragma once

#include "kill/survivor.h"

namespace kill_test {

/// A dead peer's operations and its connection end within this: milliseconds on an idle machine. No
/// time-out of the settings is as short, so that it is the device that notices.
inline constexpr std::uint64_t kDetectionMax = 60'000'000'000;

inline void Target::fault(const std::string& text) {
  const auto phase = static_cast<std::size_t>(plan_.phase);
  common_.fault(std::string(kPhaseNames[phase]) +
                (plan_.role == Role::connects ? ", victim connects" : ", victim listens") +
                ", strike " + std::to_string(static_cast<unsigned>(plan_.strike)) + ", seed " +
                std::to_string(plan_.seed) + ": " + text);
}

inline bool Target::expose_memory() {
  using spinwire::Access;
  std::string why;
  if (into_.open(common_.engine, slot().private_memory, Access::remote_write, why) &&
      from_.open(common_.engine, slot().private_memory, Access::remote_read, why)) {
    slot().survivor_into = into_.remote;
    slot().survivor_from = from_.remote;
    return true;
  }
  fault(why);
  return false;
}

inline bool Target::start(const Plan& plan) {
  plan_ = plan;
  dice_ = spinwire::base::Random(plan.seed);
  links_.clear();
  connecting_ = close_asked_ = held_ = reaped_ = false;
  died_at_ = completed_after_ = closed_after_ = 0;
  Slot& s = slot();
  std::memset(static_cast<void*>(&s), 0, sizeof s);
  s.phase = plan.phase;
  s.role = plan.role;
  s.strike = plan.strike;
  s.seed = plan.seed;
  const bool few = plan.phase == Phase::one_sided || plan.phase == Phase::closing;
  s.threshold = static_cast<std::uint32_t>(
      1 + dice_.below(few ? std::min(plan.most_progress, 50u) : plan.most_progress));
  // A connection takes five control verbs at each end; draining takes few polls.
  s.steps = static_cast<std::uint32_t>(dice_.below(plan.phase == Phase::handshake ? 6 : 8));
  s.delay_ns =
      static_cast<std::uint32_t>(dice_.below(plan.phase == Phase::closing ? 60'000 : 300'000));
  s.private_memory = dice_.below(2) == 0;
  s.survivor_closes = dice_.below(2) == 0;
  constexpr std::array<std::uint64_t, kPhases> kTimeout = {30, 1000, 1000, 1000, 300, 4};
  polls_left_ =
      static_cast<std::uint32_t>(dice_.below(kTimeout[std::size_t(plan.phase) % kPhases]));
  if (plan.phase == Phase::one_sided && !expose_memory()) return false;
  const std::string address = listener_.address();
  s.survivor_port = static_cast<std::uint32_t>(std::stoul(address.substr(address.rfind(':') + 1)));
  pid_ = common_.nursery.start(index_);
  if (pid_ < 0) return fault("cannot start a victim"), false;
  return true;
}

inline spinwire::ConnectionHandlers Target::handlers(Link& l) {
  Link* link = &l;
  spinwire::ConnectionHandlers h;
  h.on_ready = [link](spinwire::Connection c) {
    link->connection = c;
    link->ready = true;
  };
  h.on_message = [link](spinwire::Connection, spinwire::Message& m) {
    link->target->take(*link, m);
  };
  h.on_closed = [link](spinwire::Connection, const spinwire::Error& why) {
    ++link->closed;
    link->why = why;
    link->closed_at = now_ns();
    link->left_at_close = link->outstanding;
  };
  return h;
}

inline void Target::connect() {
  const std::uint32_t port = slot().port.load(std::memory_order_acquire);
  if (port == 0 || died_at_ != 0) return;
  connecting_ = true;
  Link& link = new_link();
  spinwire::ConnectOptions options;
  options.handlers = handlers(link);
  auto made = common_.engine.connect("127.0.0.1:" + std::to_string(port), options);
  if (!made) {
    links_.pop_back();
    return fault(made.error().message());
  }
  link.connection = *made;
  slot().connecting.store(1, std::memory_order_release);
}

inline void Target::take(Link& link, const spinwire::Message& m) {
  if (link.closed != 0) fault("a message after on_closed");
  const std::uint64_t key = message_key(~plan_.seed, link.taken++);
  if (m.size() != message_size(key) || !same_bytes(m.bytes(), key))
    fault("message " + std::to_string(link.taken - 1) + " is not what the victim sent");
}

inline bool Target::accepted(Link& link, std::uint32_t id, spinwire::Status status) {
  if (status != spinwire::Status::ok) {
    link.ended.pop_back();
    if (status != spinwire::Status::would_block && status != spinwire::Status::not_connected)
      fault("an operation is refused: " + std::string(to_string(status)));
    return false;
  }
  if (id + 1 != link.ended.size()) fault("operations are not counted rightly");
  ++link.outstanding;
  return true;
}

inline void Target::end(Link& link, std::uint32_t id, spinwire::Status status) {
  if (link.ended[id]++ != 0) return fault("operation " + std::to_string(id) + " ended twice");
  if (link.closed != 0) fault("a completion after on_closed");
  --link.outstanding;
  link.last_end = now_ns();
  ++(status == spinwire::Status::ok ? link.succeeded : link.failed);
  using spinwire::Status;
  if (status != Status::ok && status != Status::peer_lost && status != Status::flushed)
    fault("an operation ended as " + std::string(to_string(status)));
}

/// Keeps a window of messages in flight.
inline void Target::send_messages(Link& link) {
  constexpr std::uint32_t kWindow = 48;
  while (link.outstanding < kWindow) {
    const std::uint64_t key = message_key(plan_.seed, link.sent);
    const std::size_t size = message_size(key);
    spinwire::Buffer buffer = common_.engine.allocate(kLongestMessage);
    if (!buffer) return fault("the send pool is dry");
    (void)buffer.resize(size);
    fill_bytes(buffer.bytes(), key);
    const auto id = static_cast<std::uint32_t>(link.ended.size());
    link.ended.push_back(0);
    Link* l = &link;
    const auto done = [l, id](const spinwire::Completion& c) { l->target->end(*l, id, c.status); };
    // Posts at once or at the end of the poll, at random.
    const auto post = dice_.below(2) == 0 ? spinwire::Post::now : spinwire::Post::defer;
    if (!accepted(link, id, link.connection.send(buffer, done, post))) return;
    ++link.sent;
  }
}

/// Keeps a few reads and writes of the victim's memory in flight.
inline void Target::access_victim_memory(Link& link) {
  constexpr std::uint32_t kWindow = 4;
  if (slot().lent.load(std::memory_order_acquire) == 0) return;
  while (link.outstanding < kWindow) {
    const std::uint64_t length = 1 + dice_.below(dice_.below(2) == 0 ? 4096 : kAreaBytes);
    const auto offset = static_cast<std::uint32_t>(dice_.below(kAreaBytes - length + 1));
    const bool writes = dice_.below(2) == 0;
    const auto id = static_cast<std::uint32_t>(link.ended.size());
    link.ended.push_back(0);
    Link* l = &link;
    const auto done = [l, id, offset, writes](const spinwire::Completion& c) {
      const std::byte* sink = l->target->common_.sink.data();
      if (!writes && c.status == spinwire::Status::ok &&
          std::memcmp(sink + offset, area_pattern().data() + offset, c.bytes) != 0)
        l->target->fault("a read brought wrong bytes");
      l->target->end(*l, id, c.status);
    };
    const auto status = writes ? link.connection.write(common_.source.slice(offset, length),
                                                       slot().into.slice(offset, length), done)
                               : link.connection.read(common_.sink.slice(offset, length),
                                                      slot().from.slice(offset, length), done);
    if (!accepted(link, id, status)) return;
  }
}

inline void Target::step() {
  if (plan_.role == Role::listens && !connecting_) connect();
  Link* link = ready_link();
  if (link == nullptr) return;
  switch (plan_.phase) {
    case Phase::sending:
    case Phase::closing:
      send_messages(*link);
      break;
    case Phase::one_sided:
      access_victim_memory(*link);
      break;
    default:
      break;
  }
  if (plan_.phase == Phase::closing && slot().survivor_closes && !close_asked_ &&
      slot().armed.load(std::memory_order_acquire) != 0) {
    close_asked_ = true;
    slot().closing.store(1, std::memory_order_release);
    (void)link->connection.close();
  }
}

inline void Target::strike(bool now) {
  if (plan_.strike != Strike::by_survivor || died_at_ != 0 || held_ || pid_ < 0) return;
  if (plan_.phase == Phase::closing && slot().survivor_closes && !close_asked_) return;
  if (slot().armed.load(std::memory_order_acquire) == 0 || slot().struck_at.load() != 0) return;
  if (!now && polls_left_ != 0) {
    --polls_left_;
    return;
  }
  slot().struck_at.store(now_ns());
  kill(pid_, SIGKILL);
}

inline bool Target::dead() {
  if (died_at_ != 0) return true;
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid != pid_)
    return false;
  died_at_ = now_ns();
  const bool asked = plan_.strike == Strike::never;
  if (asked ? info.si_code != CLD_EXITED || info.si_status != 0
            : info.si_code != CLD_KILLED || info.si_status != SIGKILL)
    fault("the victim ended by itself, status " + std::to_string(info.si_status));
  if (slot().faults.load() != 0) fault("the victim says: " + std::string(slot().fault));
  if (!plan_.reap_late) {
    waitpid(pid_, nullptr, 0);
    reaped_ = true;
  }
  return true;
}

inline bool Target::over() {
  if (!dead()) return false;
  for (const auto& link : links_) {
    if (link->closed == 0) return false;
  }
  return true;
}

inline bool Target::hit() {
  const Stage stage = slot().stage.load();
  if (plan_.phase == Phase::handshake) return stage == Stage::handshake;
  if (plan_.phase == Phase::closing && slot().closing.load() != 0) return stage < Stage::closed;
  return stage == Stage::in_phase;
}

inline void Target::check(Link& link) {
  using spinwire::Status;
  if (link.closed > 1) fault("on_closed ran " + std::to_string(link.closed) + " times");
  if (link.left_at_close != 0 || link.outstanding != 0)
    fault(std::to_string(link.left_at_close) + " operations had not ended at on_closed");
  for (const std::uint8_t ended : link.ended) {
    if (ended != 1) return fault("an operation ended " + std::to_string(ended) + " times");
  }
  const std::uint64_t struck = slot().struck_at.load();
  if (plan_.strike == Strike::never) {
    if (link.why.status != Status::ok) fault("closed: " + link.why.message());
    return;
  }
  const bool may_be_regular = plan_.phase == Phase::closing;
  if (link.why.status != Status::peer_lost && !(may_be_regular && link.why.status == Status::ok))
    fault("closed, but not as lost: " + std::string(to_string(link.why.status)) + ", " +
          link.why.message());
  if (link.last_end > struck) completed_after_ = std::max(completed_after_, link.last_end - struck);
  if (link.closed_at > struck) closed_after_ = std::max(closed_after_, link.closed_at - struck);
}

/// Revokes the memory and checks that peers wrote only where allowed.
inline void Target::revoke_memory(Area& area, bool written) {
  if (!area.intact(written)) fault("memory was changed that was not to be");
  if (!area.region) {
    const std::uint64_t deadline = now_ns() + kDetectionMax;
    spinwire::Status status = common_.engine.revoke(area.remote);
    while (status == spinwire::Status::would_block && now_ns() < deadline) {
      (void)common_.engine.poll();
      status = common_.engine.revoke(area.remote);
    }
    if (status != spinwire::Status::ok)
      fault("a dead peer's access cannot be revoked: " + std::string(to_string(status)));
  }
  area.close();
}

inline void Target::finish() {
  if (!reaped_) waitpid(pid_, nullptr, 0);
  pid_ = -1;
  for (const auto& link : links_) check(*link);
  if (completed_after_ > kDetectionMax || closed_after_ > kDetectionMax)
    fault("noticed after " + std::to_string(closed_after_ / 1'000'000) + " ms");
  if (plan_.phase == Phase::one_sided) {
    revoke_memory(into_, true);
    revoke_memory(from_, false);
  }
}

}  // namespace kill_test
