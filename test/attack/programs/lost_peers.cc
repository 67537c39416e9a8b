// softroce-lost-peers serve ADDRESS: four servers in processes of their own, which send messages
// back and answer calls. On order, one stops (SIGSTOP), one dies (SIGKILL), one dies and is
// replaced at its address, and one cuts its machine off the network. The last one then notices the
// loss of its client and ends the program.
// softroce-lost-peers client ADDRESS DEVICE: has a connection and a session with each server. Each
// must end with peer_lost within the guaranteed time (kGuaranteed), and the error must name the
// cause.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>

#include "softroce/programs/common.h"

namespace {

using namespace softroce;
using Clock = std::chrono::steady_clock;

constexpr Method kEcho = 1;
// A processor that the machine shares may be away for seconds, which is no loss yet.
constexpr auto kPeerTimeout = 10s;
constexpr auto kKeepalive = 200ms;
// What is guaranteed: an end that polls notices peer_timeout of silence at one of its next checks.
// It then asks the peer's address for the cause, for at most an eighth of peer_timeout.
constexpr auto kGuaranteed = kPeerTimeout + 2 * kKeepalive + kPeerTimeout / 8;
// The measured time is that in which the measuring end polled, so its own machine may stand still
// for as long as it likes. The time of the other machine cannot be left out: it begins to be silent
// when it carries out the order, and its host may keep it from running until then.
constexpr auto kOtherMachine = 6s;
constexpr auto kLongest = kGuaranteed + kOtherMachine;

/// How long this process has polled. A pause between two polls counts as 100 ms at most.
class PollingTime {
 public:
  using Duration = Clock::duration;
  /// Call it at each poll.
  void count() {
    const Clock::time_point now = Clock::now();
    passed_ += std::min<Duration>(now - last_, 100ms);
    last_ = now;
  }
  [[nodiscard]] Duration passed() const { return passed_; }

 private:
  Clock::time_point last_ = Clock::now();
  Duration passed_{0};
};

/// An order to a server: a message whose length is the number.
enum class Order : std::size_t { stop = 1, die = 2, restart = 3, cut = 4 };
constexpr std::size_t kServers = 4;
constexpr std::size_t kMessage = 100;

std::string port_of(Order order) { return ":747" + std::to_string(static_cast<int>(order)); }

Config lost_config() {
  Config c = calls_config();
  c.connections.keepalive_interval = kKeepalive;
  c.connections.peer_timeout = kPeerTimeout;
  c.connections.handshake_timeout = 30s;  // four engines start at once on an emulated machine
  c.connections.connect_timeout = 30s;
  return c;
}

/// Drops all outgoing packets of the machine.
void cut(const std::string& device) {
  (void)output_of("tc qdisc replace dev " + device + " root netem loss 100%");
}
void mend(const std::string& device) { (void)output_of("tc qdisc del dev " + device + " root"); }

/// Listens at once or, as the successor of a server, after a byte at `turn`.
int serve_one(const std::string& address, Order order, int tell, int turn = -1) {
  Engine engine = must(Engine::open(lost_config()), "open");
  if (turn >= 0) {
    char byte = 0;
    must(::write(tell, "o", 1) == 1 && ::read(turn, &byte, 1) == 1, "the successor's turn");
  }
  const auto served = engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); });
  must(served.has_value(), served ? "" : served.error().message());
  PollingTime time;
  PollingTime::Duration cut_at{0};
  std::optional<Error> closed;
  ListenOptions options;
  options.handlers.on_message = [&](Connection c, Message& m) {
    if (m.size() == kMessage) return static_cast<void>(c.send(m.take()));
    must(m.size() == static_cast<std::size_t>(order), "another's order");
    if (order == Order::stop) ::raise(SIGSTOP);
    if (order == Order::die || order == Order::restart) ::raise(SIGKILL);
    cut_at = time.passed();
    cut("eth0");
  };
  options.handlers.on_closed = [&](Connection, const Error& e) { closed = e; };
  const Listener listener = must(engine.listen(address + port_of(order), options), "listen");
  char ready = 'r';
  must(::write(tell, &ready, 1) == 1, "tell");
  const auto poll = [&] {
    (void)engine.poll();
    time.count();
  };
  const bool noticed = until(
      poll, [&] { return closed && engine.rpc_stats().served_sessions == 0; }, 180s);
  must(noticed, "the server does not notice that its client is gone");
  const PollingTime::Duration took = time.passed() - cut_at;
  std::printf("its client: %s after %lld ms\n", std::string(to_string(closed->status)).c_str(),
              static_cast<long long>(took / 1ms));
  must(closed->status == Status::peer_lost, closed->message());
  must(took <= kLongest, "that took too long");
  mend("eth0");
  return 0;
}

template <typename Run>
pid_t begin_process(Run&& run) {
  const pid_t pid = ::fork();
  must(pid >= 0, "fork");
  if (pid != 0) return pid;
  (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::exit(run());
}

int serve(const std::string& address) {
  std::array<int, 2> ready{}, turn{};
  must(::pipe(ready.data()) == 0 && ::pipe(turn.data()) == 0, "pipe");
  std::array<pid_t, kServers> pids{};
  for (const Order order : {Order::stop, Order::die, Order::restart, Order::cut}) {
    pids[static_cast<std::size_t>(order) - 1] =
        begin_process([&] { return serve_one(address, order, ready[1]); });
  }
  const pid_t successor =
      begin_process([&] { return serve_one(address, Order::restart, ready[1], turn[0]); });
  std::array<char, 1> byte{};
  for (std::size_t i = 0; i < kServers + 1; ++i)
    must(::read(ready[0], byte.data(), 1) == 1, "a server is missing");
  std::puts("all serve");
  int status = 0;
  for (pid_t pid = 0; pid != pids[3];) {
    pid = ::waitpid(-1, &status, 0);
    must(pid > 0, "wait");
    if (pid == pids[2]) must(::write(turn[1], "t", 1) == 1, "the successor");
  }
  for (const pid_t pid : {pids[0], successor}) (void)::kill(pid, SIGKILL);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

/// A connection and a session with one of the servers.
class Peer {
 public:
  Peer(const std::string& address, Order order)
      : order_(order), engine_(must(Engine::open(lost_config()), "open")) {
    ConnectOptions options;
    options.handlers.on_message = [this](Connection, Message&) { ++back_; };
    options.handlers.on_closed = [this](Connection, const Error& e) { note(connection_end_, e); };
    connection_ = must(engine_.connect(address + port_of(order), options), "connect");
    SessionOptions session;
    session.on_closed = [this](Session, const Error& e) { note(session_end_, e); };
    session_ = must(engine_.open_session(address + port_of(order), session), "open_session");
    data_ = engine_.allocate(kMessage);
  }
  void poll() {
    (void)engine_.poll();
    time_.count();
  }
  [[nodiscard]] bool ready() const { return connection_.ready() && session_.ready(); }
  void exchange_once() {
    must(connection_.send(data_.slice()) == Status::ok, "send");
    const auto on_reply = [this](const Reply& r) { answered_ = r.status() == Status::ok; };
    must(session_.call(kEcho, data_.slice(), on_reply) == Status::ok, "call");
  }
  [[nodiscard]] bool heard() const { return back_ > 0 && answered_; }
  void order() {
    const BufferSlice slice = data_.slice(0, static_cast<std::size_t>(order_));
    must(connection_.send(slice, [this](const Completion& c) { sent_ = c.status == Status::ok; }) ==
             Status::ok,
         "the order");
    begun_ = time_.passed();
  }
  [[nodiscard]] bool sent() const { return sent_; }
  [[nodiscard]] bool over() const { return connection_end_ && session_end_; }
  void print_ends() const {
    for (const auto* end : {&connection_end_, &session_end_})
      if (end->has_value()) std::printf("over: %s\n", (*end)->error.message().c_str());
  }
  /// Checks the status, the time, and the words in the error that name the cause.
  void expect_lost(const char* what, std::string_view words) const {
    for (const auto& [kind, end] :
         {std::pair{"connection", &connection_end_}, std::pair{"session", &session_end_}}) {
      must(end->has_value(), std::string("the ") + kind + " goes on: the peer is " + what);
      const auto after = ((*end)->at - begun_) / 1ms;
      std::printf("%s, its %s: %s after %lld ms: %s\n", what, kind,
                  std::string(to_string((*end)->error.status)).c_str(),
                  static_cast<long long>(after), (*end)->error.message().c_str());
      must((*end)->error.status == Status::peer_lost, "another status is expected");
      must((*end)->error.message().find(words) != std::string::npos,
           "the error does not say: " + std::string(words));
      must((*end)->at - begun_ <= kLongest, "that took too long");
    }
    must(engine_.stats().peers_lost > 0 && engine_.stats().operations == 0, "what is left");
  }

 private:
  struct End {
    Error error;
    PollingTime::Duration at;
  };
  void note(std::optional<End>& end, const Error& e) const {
    must(!end.has_value(), "it ends twice");
    end = End{e, time_.passed()};
  }

  Order order_;
  std::uint64_t back_ = 0;
  bool answered_ = false;
  bool sent_ = false;
  PollingTime time_;
  PollingTime::Duration begun_{0};
  std::optional<End> connection_end_;
  std::optional<End> session_end_;
  Engine engine_;
  Buffer data_;
  Connection connection_;
  Session session_;
};

int client(const std::string& address, const std::string& device) {
  Peer stopped(address, Order::stop), killed(address, Order::die);
  Peer restarted(address, Order::restart), away(address, Order::cut);
  const std::array<Peer*, kServers> peers{&stopped, &killed, &restarted, &away};
  const auto wait = [&](const char* what, auto&& done) {
    const auto poll = [&] {
      for (Peer* p : peers) p->poll();
    };
    const bool came = until(poll, done, 60s);
    for (const Peer* p : peers) {
      if (!came) p->print_ends();
    }
    must(came, std::string("waiting for ") + what);
  };
  const auto all = [&](auto&& holds) {
    return std::all_of(peers.begin(), peers.end(), [&](Peer* p) { return holds(*p); });
  };
  wait("connections and sessions", [&] { return all([](const Peer& p) { return p.ready(); }); });
  for (Peer* p : peers) p->exchange_once();
  wait("answers", [&] { return all([](const Peer& p) { return p.heard(); }); });

  for (Peer* p : {&stopped, &killed, &restarted}) p->order();
  wait("three losses", [&] { return stopped.over() && killed.over() && restarted.over(); });
  stopped.expect_lost("stopped", "hangs");
  killed.expect_lost("killed", "nobody listens at its address");
  restarted.expect_lost("restarted", "another engine, or the next incarnation");

  must(away.ready(), "the last is there");
  away.order();
  wait("the last order", [&] { return away.sent(); });
  cut(device);
  wait("the last loss", [&] { return away.over(); });
  away.expect_lost("cut off", "its host does not answer");
  mend(device);
  std::puts("all were noticed");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc == 3 && std::string_view(argv[1]) == "serve") return serve(argv[2]);
  must(argc == 4, "usage: softroce-lost-peers serve ADDRESS | client ADDRESS DEVICE");
  return client(argv[2], argv[3]);
}
