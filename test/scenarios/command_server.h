// The end of a scenario that carries out commands. Commands are messages on the first connection
// that it accepts; results return on the same connection. It exposes and leases memory, uses memory
// leased to it, and logs the events of all other connections ("lines", counted from 1) in order.
// The driving end reads the log, so a scenario also runs with each end in its own process.
#pragma once

#include <sched.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/harness.h"

namespace scenarios {

using namespace engine_test;  // the names of a test namespace
using spinwire::ConnectionSettings;
using spinwire::LeaseCallback;
using spinwire::LeaseId;
using spinwire::LeaseOptions;
using spinwire::LeaseRefusal;
using spinwire::LeaseReply;
using spinwire::Nanoseconds;
using spinwire::RemoteMemory;
using spinwire::Returned;
using spinwire::ReturnedBy;

using Bytes = std::vector<std::byte>;

/// A digest of all bytes and their positions.
inline std::uint64_t digest(std::span<const std::byte> bytes) {
  std::uint64_t sum = 0x9e37'79b9'7f4a'7c15 ^ bytes.size();
  for (std::size_t at = 0; at < bytes.size(); at += sizeof sum) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof word, bytes.size() - at));
    sum = (sum ^ word) * 0xff51'afd7'ed55'8ccd;
    sum ^= sum >> 29;
  }
  return sum;
}

/// The commands of a server, and the fields of a command that each uses.
enum class Do : std::uint8_t {
  report,     ///< the log from `index` on
  greet,      ///< ok once `line` is ready here
  configure,  ///< `access`, `own_domain`: lines accepted from now on
  calculate,  ///< from now on it adds two numbers, see CommandServer::add()
  expose,     ///< exposes `length` bytes to the peer of `line`, filled by `seed`
  look,       ///< `length` bytes at `offset` of the exposed memory `index`
  lease,      ///< leases such memory to the peer of `line`, for `time`
  read,       ///< reads `length` bytes at `offset` of lease `index`
  write,      ///< writes them, by `seed`
  give_back,  ///< gives back lease `index`
  release,    ///< releases lease `index`
  send,       ///< sends a message of `length` bytes by `seed` on `line`
  close,      ///< closes `line`
  clean,      ///< forgets all memory; then the books must balance
};
struct Command {
  Do what = Do::report;
  Access access = Access::remote_read_write;
  bool own_domain = false;
  bool own_memory = false;  ///< memory of the application, not of a pool
  std::uint32_t line = 1;
  std::uint32_t index = 0;
  std::uint32_t seed = 0;  ///< 0: all bytes zero
  std::uint32_t alignment = 8;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::int64_t time = 60'000'000'000;
};
/// The response to a command; bytes may follow.
struct Report {
  Status status = Status::ok;
  LeaseRefusal refusal = LeaseRefusal::none;
  std::uint32_t index = 0;  ///< of new memory
  RemoteRegion region{};
};

enum class Saw : std::uint8_t { message, notice, leased, returned, closed };

/// An entry of the log.
struct Event {
  static constexpr std::size_t kHead = 64;

  Saw what = Saw::message;
  Status status = Status::ok;            ///< closed: the reason
  ReturnedBy how = ReturnedBy::release;  ///< returned
  bool requested = false;                ///< returned
  bool has_immediate = false;            ///< message, notice
  std::uint32_t immediate = 0;
  std::uint32_t line = 0;
  std::uint64_t size = 0;
  /// The bytes of a message, of returned memory, or, for a notification, of the memory exposed
  /// last: their digest and the first of them.
  std::uint64_t sum = 0;
  std::array<std::byte, kHead> head{};

  void hold(std::span<const std::byte> bytes) {
    sum = digest(bytes);
    std::copy_n(bytes.begin(), std::min(bytes.size(), kHead), head.begin());
  }
};
static_assert(std::is_trivially_copyable_v<Command> && std::is_trivially_copyable_v<Report> &&
              std::is_trivially_copyable_v<Event> && std::is_trivially_copyable_v<RemoteRegion>);

/// Fills in bytes that follow from a seed, the same at both ends; zeroes for seed 0.
inline void fill(std::span<std::byte> bytes, std::uint32_t seed) {
  if (seed == 0) return std::fill(bytes.begin(), bytes.end(), std::byte{0});
  std::uint64_t word = seed * 0x9e37'79b9'7f4a'7c15;
  for (std::size_t at = 0; at < bytes.size(); at += sizeof word) {
    word = (word ^ word >> 27) * 0x94d0'49bb'1331'11eb + 1;
    std::memcpy(bytes.data() + at, &word, std::min(sizeof word, bytes.size() - at));
  }
}
inline Bytes filled(std::size_t size, std::uint32_t seed) {
  Bytes bytes(size);
  fill(bytes, seed);
  return bytes;
}

class CommandServer {
 public:
  explicit CommandServer(const Config& config, const std::uint64_t* ticks = nullptr)
      : node_(config, ticks) {
    node_.on_accept = [this](Connection c) {
      if (!lines_.empty()) {
        const auto configured = c.configure(settings_);
        EXPECT_TRUE(configured) << configured.error().message();
      }
      lines_.push_back(c);
    };
    node_.on_message = [this](Connection c, Message& m) {
      const std::uint32_t line = line_of(c);
      if (line == 0) return obey(m);
      if (calculates_ && !m.is_write()) return add(c, m.bytes());
      log_message(line, m);
    };
    node_.on_lease = [this](Connection c, RemoteMemory& memory) {
      log_.push_back({.what = Saw::leased, .line = line_of(c), .size = memory.size()});
      held_.push_back(std::move(memory));
    };
    node_.on_returned = [this](Connection c, const Returned& r) {
      if (calculates_ && r.how == ReturnedBy::give_back) return add(c, r.memory);
      log_returned(line_of(c), r);
    };
    node_.on_closed = [this](Connection c, const Error& e) {
      log_.push_back({.what = Saw::closed, .status = e.status, .line = line_of(c)});
    };
    node_.listen();
  }

  [[nodiscard]] std::string address() const { return node_.listener.address(); }
  [[nodiscard]] Node& node() { return node_; }
  int step() {
    const int events = node_.poll();
    while (!answers_.empty() && lines_[0].send_copy(answers_.front()) == Status::ok) {
      answers_.pop_front();
    }
    return events;
  }
  /// Messages that it was told to send. Those of earlier steps are with the device.
  [[nodiscard]] std::uint64_t sent() const { return sent_; }
  [[nodiscard]] bool alone() const { return node_.engine.stats().connections == 0; }
  /// Checks that the connections ended without errors other than those reported.
  void leave() {
    for (int i = 0; i < 8; ++i) (void)step();
    for (std::size_t i = reported_; i < log_.size(); ++i) {
      EXPECT_EQ(log_[i].what, Saw::closed) << i;
      EXPECT_EQ(log_[i].status, Status::ok) << to_string(log_[i].status);
    }
    node_.stale_allowed = true;  // failed connections may leave some
    node_.expect_clean();
  }

 private:
  struct Memory {
    Buffer buffer;
    Bytes own;
    MemoryRegion registered;
    RemoteRegion region;
    [[nodiscard]] BufferSlice slice() const { return buffer ? buffer.slice() : registered.slice(); }
  };

  [[nodiscard]] std::uint32_t line_of(const Connection& c) const {
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      if (lines_[i] == c) return static_cast<std::uint32_t>(i);
    }
    ADD_FAILURE() << "a connection that nobody accepted";
    return 0;
  }
  void log_message(std::uint32_t line, Message& m) {
    Event e{.what = m.is_write() ? Saw::notice : Saw::message, .line = line, .size = m.size()};
    e.has_immediate = m.immediate().has_value();
    e.immediate = m.immediate().value_or(0);
    if (!m.is_write()) {
      e.hold(m.bytes());
    } else if (!memory_.empty()) {
      e.hold(memory_.back().slice().bytes());
    }
    log_.push_back(e);
  }
  void log_returned(std::uint32_t line, const Returned& r) {
    Event e{.what = Saw::returned,
            .how = r.how,
            .requested = r.requested,
            .line = line,
            .size = r.memory.size()};
    e.hold(r.memory.bytes());
    log_.push_back(e);
  }

  /// The sum of two numbers. For numbers in a message the sum returns in a message. For numbers
  /// written into requested memory that is given back, it returns with a lease of that memory.
  static std::int32_t sum_of(std::span<const std::byte> bytes) {
    std::array<std::int32_t, 2> numbers{};
    EXPECT_EQ(bytes.size(), sizeof numbers);
    std::memcpy(numbers.data(), bytes.data(), std::min(sizeof numbers, bytes.size()));
    return numbers[0] + numbers[1];
  }
  static void add(Connection c, std::span<const std::byte> message) {
    const std::int32_t sum = sum_of(message);
    EXPECT_EQ(c.send_copy(std::as_bytes(std::span(&sum, 1))), Status::ok);
  }
  static void add(Connection c, const BufferSlice& memory) {
    const std::int32_t sum = sum_of(memory.bytes());
    std::memcpy(memory.data(), &sum, sizeof sum);
    EXPECT_EQ(c.lease(memory, {.access = Access::remote_read}), Status::ok);
  }

  void answer(const Report& report, std::span<const std::byte> bytes = {}) {
    Bytes all(sizeof report + bytes.size());
    std::memcpy(all.data(), &report, sizeof report);
    std::copy(bytes.begin(), bytes.end(), all.begin() + sizeof report);
    answers_.push_back(std::move(all));
  }
  void answer(Status status) { answer(Report{.status = status}); }
  /// Responds when an operation ends, or at once if it was refused.
  void answer_later(Status status) {
    if (status != Status::ok) answer(status);
  }

  void obey(const Message& m) {
    Command c;
    ASSERT_EQ(m.size(), sizeof c);
    std::memcpy(&c, m.data(), sizeof c);
    ASSERT_TRUE(c.line < lines_.size() || c.what == Do::configure || c.what == Do::calculate ||
                c.what == Do::report || c.what == Do::clean);
    switch (c.what) {
      case Do::report:
        return report(c.index);
      case Do::greet:
        return answer(lines_[c.line].ready() ? Status::ok : Status::would_block);
      case Do::configure:
        return configure(c);
      case Do::calculate:
        calculates_ = true;
        return answer(Status::ok);
      case Do::expose:
        return expose(c);
      case Do::look:
        return look(c);
      case Do::lease:
        return lease(c);
      case Do::read:
      case Do::write:
      case Do::give_back:
      case Do::release:
        return use(c);
      case Do::send:
        ++sent_;
        return answer(lines_[c.line].send_copy(filled(c.length, c.seed)));
      case Do::close:
        return answer(lines_[c.line].close());
      case Do::clean:
        return clean();
    }
  }
  void report(std::size_t from) {
    constexpr std::size_t kMost = 16;
    ASSERT_LE(from, log_.size());
    const std::size_t count = std::min(kMost, log_.size() - from);
    answer(Report{}, std::as_bytes(std::span(log_).subspan(from, count)));
    reported_ = std::max(reported_, from + count);
  }
  void configure(const Command& c) {
    settings_ = {};
    settings_.access = c.access;
    settings_.own_domain = c.own_domain;
    answer(Status::ok);
  }
  Memory make(const Command& c) {
    Memory made;
    if (c.own_memory) {
      made.own = filled(c.length, c.seed);
      auto registered = lines_[c.line].register_memory(made.own, c.access);
      EXPECT_TRUE(registered) << registered.error().message();
      if (registered) made.registered = std::move(*registered);
      made.region = made.registered.remote();
    } else {
      made.buffer = node_.buffer(c.length, Pool::lease);
      fill(made.buffer.bytes(), c.seed);
    }
    return made;
  }
  void expose(const Command& c) {
    Memory made = make(c);
    if (made.buffer) {
      const auto region = lines_[c.line].expose(made.slice(), c.access);
      if (!region) return answer(region.error().status);
      made.region = *region;
    }
    memory_.push_back(std::move(made));
    answer(Report{.index = static_cast<std::uint32_t>(memory_.size() - 1),
                  .region = memory_.back().region});
  }
  void look(const Command& c) {
    ASSERT_LT(c.index, memory_.size());
    const BufferSlice part = memory_[c.index].slice().slice(c.offset, c.length);
    ASSERT_TRUE(part);
    answer(Report{}, part.bytes());
  }
  void lease(const Command& c) {
    memory_.push_back(make(c));
    const LeaseOptions options{.access = c.access, .duration = Nanoseconds(c.time), .alignment = 8};
    answer_later(lines_[c.line].lease(memory_.back().slice(), options, [this](const LeaseReply& r) {
      answer(Report{.status = r.status,
                    .refusal = r.refusal,
                    .index = static_cast<std::uint32_t>(memory_.size() - 1)});
    }));
  }
  void use(const Command& c) {
    ASSERT_LT(c.index, held_.size());
    RemoteMemory& memory = held_[c.index];
    if (c.what == Do::release) {
      memory.release();
      return answer(Status::ok);
    }
    if (c.what == Do::give_back) {
      return answer_later(memory.give_back([this](const LeaseReply& r) { answer(r.status); }));
    }
    const bool reads = c.what == Do::read;
    moved_ = node_.buffer(c.length);
    fill(moved_.bytes(), c.seed);
    const auto done = [this, reads](const Completion& end) {
      answer(Report{.status = end.status}, reads ? moved_.bytes() : std::span<std::byte>());
      moved_.reset();
    };
    Connection line = lines_[c.line];
    const RemoteRegion there = memory.slice(c.offset, c.length);
    answer_later(reads ? line.read(moved_.slice(), there, done)
                       : line.write(moved_.slice(), there, done));
  }
  void clean() {
    for (const Memory& memory : memory_) {
      if (!memory.buffer || !memory.region) continue;
      const Status status = node_.engine.revoke(memory.region);
      // Memory exposed to a line with its own domain is revoked with the line.
      EXPECT_TRUE(status == Status::ok || status == Status::invalid_argument) << to_string(status);
    }
    memory_.clear();
    held_.clear();
    answer(Status::ok);
  }

  std::vector<Connection> lines_;  ///< [0]: the command connection
  std::vector<Event> log_;
  std::size_t reported_ = 0;
  std::uint64_t sent_ = 0;
  std::deque<Bytes> answers_;
  std::deque<Memory> memory_;
  std::deque<RemoteMemory> held_;
  Buffer moved_;
  ConnectionSettings settings_;
  bool calculates_ = false;
  Node node_;  ///< last: its destructor's callbacks use the log
};

/// Runs a server in its own process until it is told to quit.
inline int serve(int in, int out, const Config& config) {
  CommandServer server(config);
  write_line(out, server.address());
  std::uint64_t told = 0;
  for (unsigned i = 1;; ++i) {
    if (server.step() == 0 && i % 16 == 0) (void)sched_yield();
    for (; told != server.sent(); ++told) write_line(out, "sent");
    if (i % 256 == 0 && command(in) == 'q') break;
  }
  EXPECT_TRUE(until({&server.node()}, [&] { return server.alone(); }));
  server.leave();
  return 0;
}

}  // namespace scenarios
