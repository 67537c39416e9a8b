// softroce-lost-peers serve ADDRESS: three servers in processes of their own, which send messages
//   back and answer calls. One stops (SIGSTOP) when it is told to, one dies (SIGKILL), one cuts its
//   machine off the network; that one notices the loss of its client, and so ends the program.
// softroce-lost-peers client ADDRESS DEVICE: has a connection and a session with each. Each of them
//   ends with peer_lost within the configured time, and nothing tells but the peer's silence.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <memory>
#include <optional>

#include "softroce/programs/common.h"

namespace {

using namespace softroce;
using Clock = std::chrono::steady_clock;

constexpr Method kEcho = 1;
// A processor that the machine shares may be away for a second or two, which is no loss yet.
constexpr auto kPeerTimeout = 6s;
// From the order on: until it is carried out, the silence, and what is needed to say so.
constexpr auto kLongest = kPeerTimeout + 4s;

/// What a server does, told by a message as long as its number.
enum class Order : std::size_t { stop = 1, die = 2, cut = 3 };
constexpr std::size_t kMessage = 100;

std::string port_of(Order order) { return ":747" + std::to_string(static_cast<int>(order)); }

Config lost_config() {
  Config c = config();
  c.connections.keepalive_interval = 200ms;
  c.connections.peer_timeout = kPeerTimeout;
  c.connections.handshake_timeout = 2s;  // a probe that nobody answers is over before
  c.memory.receive_bytes = 8u << 20;
  c.queues.completion_depth = 8192;
  c.rpc.sessions = 64;
  c.rpc.window = 8;
  c.rpc.receive_depth = 512;
  c.rpc.min_rto = 20ms;  // the machine is emulated
  return c;
}

/// Nothing leaves the machine any more, whichever way it comes.
void cut(const std::string& device) {
  (void)output_of("tc qdisc replace dev " + device + " root netem loss 100%");
}
void mend(const std::string& device) { (void)output_of("tc qdisc del dev " + device + " root"); }

long long ms_since(Clock::time_point begun) { return (Clock::now() - begun) / 1ms; }

int serve_one(const std::string& address, Order order, int tell) {
  Engine engine = must(Engine::open(lost_config()), "open");
  const auto served = engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); });
  must(served.has_value(), served ? "" : served.error().message());
  Clock::time_point cut_at;
  std::optional<Error> closed;
  ListenOptions options;
  options.handlers.on_message = [&](Connection c, Message& m) {
    if (m.size() == kMessage) return static_cast<void>(c.send(m.take()));
    must(m.size() == static_cast<std::size_t>(order), "another's order");
    if (order == Order::stop) ::raise(SIGSTOP);
    if (order == Order::die) ::raise(SIGKILL);
    cut_at = Clock::now();
    cut("eth0");
  };
  options.handlers.on_closed = [&](Connection, const Error& e) { closed = e; };
  const Listener listener = must(engine.listen(address + port_of(order), options), "listen");
  char ready = 'r';
  must(::write(tell, &ready, 1) == 1, "tell");
  const bool noticed =
      until([&] { (void)engine.poll(); },
            [&] { return closed && engine.rpc_stats().served_sessions == 0; }, 180s);
  must(noticed, "the server does not notice that its client is gone");
  std::printf("its client: %s after %lld ms\n", std::string(to_string(closed->status)).c_str(),
              ms_since(cut_at));
  must(closed->status == Status::peer_lost, closed->message());
  must(ms_since(cut_at) <= kLongest / 1ms, "that took too long");
  mend("eth0");
  return 0;
}

int serve(const std::string& address) {
  std::array<pid_t, 3> pids{};
  std::array<int, 2> pipe{};
  must(::pipe(pipe.data()) == 0, "pipe");
  for (const Order order : {Order::stop, Order::die, Order::cut}) {
    pid_t& pid = pids[static_cast<std::size_t>(order) - 1];
    pid = ::fork();
    must(pid >= 0, "fork");
    if (pid != 0) continue;
    (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::exit(serve_one(address, order, pipe[1]));
  }
  (void)::close(pipe[1]);
  std::array<char, 1> ready{};
  for (int i = 0; i < 3; ++i) must(::read(pipe[0], ready.data(), 1) == 1, "a server is missing");
  std::puts("all serve");
  int status = 0;
  must(::waitpid(pids[2], &status, 0) == pids[2], "wait");
  for (const pid_t pid : {pids[0], pids[1]}) (void)::kill(pid, SIGKILL);
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
    data_.resize(kMessage);
  }
  void poll() { (void)engine_.poll(); }
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
    begun_ = Clock::now();
  }
  [[nodiscard]] bool sent() const { return sent_; }
  [[nodiscard]] bool over() const { return connection_end_ && session_end_; }
  void expect_lost(const char* what) const {
    for (const auto& [kind, end] :
         {std::pair{"connection", &connection_end_}, std::pair{"session", &session_end_}}) {
      must(end->has_value(), std::string("the ") + kind + " goes on: the peer is " + what);
      const auto after = ((*end)->at - begun_) / 1ms;
      std::printf("%s, its %s: %s after %lld ms: %s\n", what, kind,
                  std::string(to_string((*end)->error.status)).c_str(),
                  static_cast<long long>(after), (*end)->error.message().c_str());
      must((*end)->error.status == Status::peer_lost, "another status is expected");
      must((*end)->at - begun_ <= kLongest, "that took too long");
    }
    must(engine_.stats().peers_lost > 0 && engine_.stats().operations == 0, "what is left");
  }

 private:
  struct End {
    Error error;
    Clock::time_point at;
  };
  static void note(std::optional<End>& end, const Error& e) {
    must(!end.has_value(), "it ends twice");
    end = End{e, Clock::now()};
  }

  Order order_;
  std::uint64_t back_ = 0;
  bool answered_ = false;
  bool sent_ = false;
  Clock::time_point begun_;
  std::optional<End> connection_end_;
  std::optional<End> session_end_;
  Engine engine_;
  Buffer data_;
  Connection connection_;
  Session session_;
};

int client(const std::string& address, const std::string& device) {
  Peer stopped(address, Order::stop), killed(address, Order::die), away(address, Order::cut);
  const auto wait = [&](const char* what, auto&& done) {
    const auto poll = [&] {
      for (Peer* p : {&stopped, &killed, &away}) p->poll();
    };
    must(until(poll, done, 60s), std::string("waiting for ") + what);
  };
  const auto all = [&](auto&& holds) { return holds(stopped) && holds(killed) && holds(away); };
  wait("connections and sessions", [&] { return all([](const Peer& p) { return p.ready(); }); });
  for (Peer* p : {&stopped, &killed, &away}) p->exchange_once();
  wait("answers", [&] { return all([](const Peer& p) { return p.heard(); }); });

  stopped.order();
  killed.order();
  wait("two losses", [&] { return stopped.over() && killed.over(); });
  stopped.expect_lost("stopped");
  killed.expect_lost("killed");

  must(away.ready(), "the third is there");
  away.order();
  wait("the last order", [&] { return away.sent(); });
  cut(device);
  wait("the third loss", [&] { return away.over(); });
  away.expect_lost("cut off");
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
