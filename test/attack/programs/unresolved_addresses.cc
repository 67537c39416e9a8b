// softroce-unresolved-addresses serve ADDRESS [ANOTHER]: serves calls and connections on port 7471
// until a client tells it to end; with ANOTHER, connections use the GID of that address. Prints the
// longest poll of each phase, how many system calls a poll made, and how often and for how long
// polls slept; fails if they slept more often under attack than before, or if in each attack a poll
// slept for longer than a millisecond, or ran for several times as long as any before; and if a
// poll under attack made more system calls than fit into a millisecond. An emulated machine cannot
// tell the time that a poll ran from the time that its host took from it, so that no bound on the
// time itself would hold.
//
// softroce-unresolved-addresses attack ADDRESS: strangers name RDMA addresses that answer no ARP,
// in several attacks; an honest engine connects and calls meanwhile, and again once the strangers
// are refused.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <vector>

#include "base/unique_fd.h"
#include "control/socket.h"
#include "softroce/programs/common.h"
#include "wire/endpoints.h"
#include "wire/handshake.h"

namespace {

using namespace softroce;
using Clock = std::chrono::steady_clock;

constexpr Method kEcho = 1;
// Lengths of the messages that end a phase at the server, and say which it was.
constexpr std::size_t kWarm = 2;      // what comes for the first time may take long
constexpr std::size_t kBaseline = 3;  // the same without an attack
constexpr std::size_t kAttacked = 4;
constexpr std::size_t kEnd = 5;  // ends the server, too
constexpr const char* kPort = ":7471";
constexpr int kStrangersOfAKind = 16;
constexpr int kBaselines = 4;
constexpr int kAttacks = 3;
constexpr Clock::duration kLongestSleep = 1ms;
constexpr int kMostTimesAsLong = 4;  // a poll under attack runs
// Of a poll under attack: ten for each of the 16 frames that it takes. One that does not sleep
// takes a few microseconds at most.
constexpr std::uint64_t kMostSystemCalls = 160;
// Where threads resolve, each has its stack, its signals and its start besides.
constexpr std::uint64_t kMostWithThreads = 320;

/// What this thread has done so far.
struct Times {
  Clock::time_point at;
  Clock::duration ran{0};     ///< on a processor
  Clock::duration waited{0};  ///< for a processor
  long sleeps = 0;            ///< voluntary context switches
};

/// A poll that waits for ARP sleeps in the kernel; one that is only kept from running does not. So
/// the time that a poll sleeps is what is left of its duration without running and waiting, however
/// busy the machine is.
class Meter {
 public:
  Meter() : fd_(::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {
    must(fd_.get() >= 0, "the kernel has no schedstat");
  }
  [[nodiscard]] Times now() const {
    Times now;
    rusage usage{};
    must(::getrusage(RUSAGE_THREAD, &usage) == 0, "getrusage");
    now.sleeps = usage.ru_nvcsw;
    std::array<char, 128> text{};
    unsigned long long ran = 0, waited = 0;
    must(::pread(fd_.get(), text.data(), text.size() - 1, 0) > 0 &&
             std::sscanf(text.data(), "%llu %llu", &ran, &waited) == 2,
         "schedstat");
    now.waited = std::chrono::nanoseconds(waited);
    timespec running{};  // exact, while that of schedstat is some ticks old
    must(::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &running) == 0, "clock_gettime");
    now.ran = std::chrono::seconds(running.tv_sec) + std::chrono::nanoseconds(running.tv_nsec);
    now.at = Clock::now();
    return now;
  }

 private:
  base::UniqueFd fd_;
};

/// Counts the system calls of this thread.
class SystemCalls {
 public:
  SystemCalls() {
    constexpr const char* kTracing = "/sys/kernel/tracing";
    (void)::mount("none", kTracing, "tracefs", 0, nullptr);  // it may be mounted already
    perf_event_attr event{};
    event.size = sizeof event;
    event.type = PERF_TYPE_TRACEPOINT;
    std::ifstream id(std::string(kTracing) + "/events/raw_syscalls/sys_enter/id");
    must(static_cast<bool>(id >> event.config), "the kernel does not trace system calls");
    constexpr int kThisThread = 0, kAnyProcessor = -1, kNoGroup = -1;
    fd_ = base::UniqueFd(static_cast<int>(::syscall(
        SYS_perf_event_open, &event, kThisThread, kAnyProcessor, kNoGroup, PERF_FLAG_FD_CLOEXEC)));
    must(fd_.get() >= 0, "the kernel does not count system calls");
  }
  /// So far. Asking is a system call, too, and counts the next time.
  [[nodiscard]] std::uint64_t count() const {
    std::uint64_t count = 0;
    must(::read(fd_.get(), &count, sizeof count) == sizeof count, "the count of system calls");
    return count;
  }

 private:
  base::UniqueFd fd_;
};

/// Sleeps that have another cause, such as a lock that another processor of a busy host holds. An
/// address that is resolved inside of a poll costs one sleep or more.
constexpr long kByChance = 3;

/// Whether one kind of stranger alone, if its addresses were resolved inside of polls, would be
/// told from `most` sleeps without an attack and those by chance.
bool shows_one_kind(long most) { return 2 * (most + kByChance) < kStrangersOfAKind; }

/// Of the polls of one phase that slept.
struct Sleeps {
  long count = 0;  ///< voluntary context switches
  Clock::duration longest{0};
  void add(const Times& begun, const Times& ended) {
    if (ended.sleeps == begun.sleeps) return;
    count += ended.sleeps - begun.sleeps;
    longest = std::max(
        longest, (ended.at - begun.at) - (ended.ran - begun.ran) - (ended.waited - begun.waited));
  }
};

/// The index of the GID that is this IPv4 address, mapped to IPv6.
std::uint32_t gid_index_of(const std::string& address) {
  const auto wanted = must(control::Address::parse(address + ":1"), "the other address").as_v6();
  for (std::uint32_t i = 0; i < 16; ++i) {
    std::ifstream entry("/sys/class/infiniband/rxe0/ports/1/gids/" + std::to_string(i));
    std::string text;
    std::array<std::uint8_t, 16> gid{};
    if (entry >> text && ::inet_pton(AF_INET6, text.c_str(), gid.data()) == 1 && gid == wanted)
      return i;
  }
  must(false, "rxe0 has no GID for " + address);
  return 0;
}

int serve(const std::string& address, const std::string& another) {
  Engine engine = must(Engine::open(calls_config()), "open");
  const auto served = engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); });
  must(served.has_value(), served ? "" : served.error().message());
  std::size_t order = 0;
  ListenOptions options;
  options.handlers.on_message = [&order](Connection, Message& m) { order = m.size(); };
  if (!another.empty()) options.settings.gid_index = gid_index_of(another);
  const bool by_threads = !another.empty() || ::access("/dev/infiniband/rdma_cm", F_OK) != 0;
  const Listener listener = must(engine.listen(address + kPort, options), "listen");
  std::puts("serving");
  std::fflush(stdout);
  long most = 0;                  // sleeps of a phase without attack
  Clock::duration ran_before{0};  // the longest poll of those phases
  // The longest sleep of the attack in which it was shortest, and likewise the longest run. A lock
  // whose holder the host keeps from running makes polls of one attack sleep. A resolution within a
  // poll would do so in each, because each names other addresses.
  Clock::duration shortest = Clock::duration::max(), ran_attacked = Clock::duration::max();
  const Meter meter;
  const SystemCalls system_calls;
  while (order != kEnd) {
    order = 0;
    Sleeps now;
    Clock::duration longest{0}, ran{0};
    std::uint64_t calls = 0;
    const auto poll = [&] {
      const Times begun = meter.now();
      const std::uint64_t before = system_calls.count();
      (void)engine.poll();
      calls = std::max(calls, system_calls.count() - before - 1);
      const Times ended = meter.now();
      longest = std::max(longest, ended.at - begun.at);
      ran = std::max(ran, ended.ran - begun.ran);
      now.add(begun, ended);
    };
    must(until(
             poll, [&] { return order != 0; }, 120s),
         "nobody ended the server");
    std::printf(
        "longest poll: %lld us, %lld us of a processor, %llu system calls; slept %ld times, for "
        "%lld us at most\n",
        static_cast<long long>(longest / 1us), static_cast<long long>(ran / 1us),
        static_cast<unsigned long long>(calls), now.count,
        static_cast<long long>(now.longest / 1us));
    if (order == kBaseline) {
      most = std::max(most, now.count);
      ran_before = std::max(ran_before, ran);
    }
    if (order == kAttacked) {
      shortest = std::min(shortest, now.longest);
      ran_attacked = std::min(ran_attacked, ran);
    }
    must(order < kAttacked || shows_one_kind(most),
         "polls slept too often without an attack: more strangers are needed");
    must(order < kAttacked || calls <= (by_threads ? kMostWithThreads : kMostSystemCalls),
         "strangers made a poll do more than fits into a millisecond");
    must(order < kAttacked || now.count <= most + kByChance,
         "strangers made polls sleep more often");
  }
  must(shortest <= kLongestSleep, "in each attack a poll slept for longer than a millisecond");
  must(ran_attacked <= kMostTimesAsLong * ran_before,
       "in each attack a poll ran for several times as long as any before");
  return 0;
}

/// An address of the network without a host.
std::array<std::uint8_t, 16> nobody(int number) {
  return {0, 0, 0,    0,    0,  0,  0, 0,
          0, 0, 0xff, 0xff, 10, 77, 0, static_cast<std::uint8_t>(100 + number)};
}

wire::Frame hello(int number) {
  Endpoint e = wire_test::valid_endpoint();
  e.gid = nobody(number);
  return wire::encode(wire::Hello{e});
}

wire::Frame open_session(int number) {
  wire::SessionEnd end = wire_test::valid_session_end();
  end.gid = nobody(number);
  end.qkey = 1;
  end.window = 8;
  return wire::encode(wire::OpenSession{end});
}

base::UniqueFd stranger(const control::Address& to, const wire::Frame& frame) {
  base::UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
  must(::connect(fd.get(), to.data(), to.size()) == 0, "a stranger connects");
  must(::send(fd.get(), frame.bytes().data(), frame.bytes().size(), 0) ==
           static_cast<ssize_t>(frame.bytes().size()),
       "a stranger speaks");
  return fd;
}

/// Whether the server has refused the stranger or closed its connection.
bool is_over(const base::UniqueFd& fd) {
  std::byte first{};
  return ::recv(fd.get(), &first, 1, MSG_DONTWAIT | MSG_PEEK) >= 0 || errno != EAGAIN;
}

/// Connects, calls, and gives the server an order.
void call_and_connect(Engine& engine, const std::string& address, const char* when,
                      std::size_t order) {
  const auto begun = Clock::now();
  const auto wait = [&](const char* what, auto&& done) {
    must(until([&] { (void)engine.poll(); }, done), std::string(what) + ", " + when);
  };
  Connection connection = must(engine.connect(address, {}), "connect");
  Session session = must(engine.open_session(address, {}), "open_session");
  wait("the connection", [&] { return connection.ready() && session.ready(); });
  Buffer bytes = engine.allocate(32);
  must(bytes.resize(32), "resize");
  bool answered = false, sent = false;
  const auto on_reply = [&answered](const Reply& r) { answered = r.status() == Status::ok; };
  must(session.call(kEcho, bytes.slice(), on_reply) == Status::ok, "call");
  wait("the answer", [&] { return answered; });
  std::printf("%s: connected and answered after %lld ms\n", when,
              static_cast<long long>((Clock::now() - begun) / 1ms));
  const auto on_sent = [&sent](const Completion& c) { sent = c.status == Status::ok; };
  must(connection.send(bytes.slice(0, order), on_sent) == Status::ok, "send");
  wait("the order", [&] { return sent; });
  (void)session.close();  // the server may have ended after the last order
  (void)connection.close();
  wait("the end", [&] { return engine.stats().connections == 0; });
}

int attack(const std::string& host) {
  const std::string address = host + kPort;
  const control::Address to = must(control::Address::parse(address), "the address");
  Engine engine = must(Engine::open(calls_config()), "open");
  call_and_connect(engine, address, "before", kWarm);
  for (int i = 0; i < kBaselines; ++i)
    call_and_connect(engine, address, "before, again", kBaseline);
  for (int attack = 0; attack < kAttacks; ++attack) {
    std::vector<base::UniqueFd> strangers;
    for (int i = attack * kStrangersOfAKind; i < (attack + 1) * kStrangersOfAKind; ++i) {
      strangers.push_back(stranger(to, hello(2 * i)));
      strangers.push_back(stranger(to, open_session(2 * i + 1)));
    }
    call_and_connect(engine, address, "during the attack", kAttacked);
    const auto over = [&] { return std::all_of(strangers.begin(), strangers.end(), is_over); };
    must(until([&] { (void)engine.poll(); }, over, 90s), "a stranger is not refused");
  }
  call_and_connect(engine, address, "afterwards", kEnd);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  must(argc == 3 || argc == 4,
       "usage: softroce-unresolved-addresses serve|attack ADDRESS [ANOTHER]");
  return std::string_view(argv[1]) == "serve" ? serve(argv[2], argc == 4 ? argv[3] : "")
                                              : attack(argv[2]);
}
