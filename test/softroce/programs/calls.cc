// softroce-calls serve ADDRESS: serves calls until a client has come and gone, and counts how often
// each ran.
// softroce-calls call ADDRESS COUNT [connections]: makes COUNT calls over several sessions. Each
// must get its own reply, and the server must run each once. Calls use datagrams, unless the last
// argument makes the client one without datagrams.
#include <cstring>
#include <vector>

#include "softroce/programs/common.h"

namespace {

using namespace softroce;

constexpr Method kWork = 1, kReport = 2;
constexpr std::uint32_t kSessions = 8;
constexpr const char* kPort = ":7471";
constexpr auto kLongest = std::chrono::minutes(30);  // the caller has a shorter limit

Config lossy_config() {
  Config c = calls_config();
  c.rpc.sessions = 2 * kSessions;  // one host may have half of them
  c.rpc.window = 16;
  c.rpc.target_rtt = 20ms;
  c.rpc.call_timeout = 120s;
  c.connections.peer_timeout = 60s;
  return c;
}

std::size_t length_of(std::uint32_t id) { return sizeof id + id * 37 % 1000; }

struct Report {
  std::uint32_t once = 0;
  std::uint32_t more = 0;
};

/// Counts how often each call has run.
struct Runs {
  void add(std::uint32_t id) {
    if (id >= times.size()) times.resize(id + std::size_t{1});
    ++times[id];
  }
  [[nodiscard]] Report report() const {
    Report r;
    for (const std::uint32_t n : times) {
      r.once += n == 1 ? 1 : 0;
      r.more += n > 1 ? 1 : 0;
    }
    return r;
  }
  std::vector<std::uint32_t> times;
};

int serve(const std::string& address) {
  Runs runs;
  Engine engine = must(Engine::open(lossy_config()), "open");
  auto work = engine.serve(kWork, [x = &runs](Request& r) {
    std::uint32_t id = 0;
    must(r.bytes().size() >= sizeof id, "a request is too short");
    std::memcpy(&id, r.bytes().data(), sizeof id);
    must(r.bytes().size() == length_of(id) && holds(r.bytes().subspan(sizeof id), id),
         "a request of other bytes");
    x->add(id);
    must(r.reply(r.bytes()) == Status::ok, "reply");
  });
  must(work.has_value(), "serve");
  auto report = engine.serve(kReport, [x = &runs](Request& r) {
    const Report told = x->report();
    must(r.reply(std::as_bytes(std::span(&told, 1))) == Status::ok, "report");
  });
  must(report.has_value(), "serve");
  const Listener listener = must(engine.listen(address + kPort, {}), "listen");
  std::puts("serving");
  std::fflush(stdout);
  bool came = false;
  must(until([&] { (void)engine.poll(); },
             [&] {
               const std::uint32_t sessions = engine.rpc_stats().served_sessions;
               came = came || sessions == kSessions;
               return came && sessions == 0;
             },
             kLongest),
       "a client that comes and goes");
  const RpcStats s = engine.rpc_stats();
  std::printf("server: %llu ran, %llu replies sent again, %llu requests dropped as repeated\n",
              static_cast<unsigned long long>(s.served),
              static_cast<unsigned long long>(s.retransmitted_replies),
              static_cast<unsigned long long>(s.duplicates));
  return 0;
}

class Client {
 public:
  Client(const Config& config, const std::string& address, std::uint32_t count)
      : engine_(must(Engine::open(config), "open")), answers_(count) {
    SessionOptions options;
    options.on_closed = [](Session, const Error& e) {
      must(e.status == Status::ok, "a session: " + e.message());
    };
    for (std::uint32_t i = 0; i < kSessions; ++i)
      sessions_.push_back(must(engine_.open_session(address + kPort, options), "open a session"));
    wait("sessions", [&] {
      for (const Session& s : sessions_) {
        if (!s.ready()) return false;
      }
      return true;
    });
  }
  void call_all() {
    std::uint32_t next = 0;
    wait("answers", [&] {
      for (Session& s : sessions_) {
        while (next < answers_.size() && call(s, next)) ++next;
      }
      return ended_ == answers_.size();
    });
    for (const std::uint32_t n : answers_) must(n == 1, "each is answered once");
  }
  void compare() {
    Report told;
    bool there = false;
    const auto done = [&](Reply& r) {
      must(r.status() == Status::ok && r.bytes().size() == sizeof told, "the report");
      std::memcpy(&told, r.bytes().data(), sizeof told);
      there = true;
    };
    must(sessions_[0].call(kReport, std::span<const std::byte>{}, done) == Status::ok, "call");
    wait("the report", [&] { return there; });
    must(told.once == answers_.size() && told.more == 0, "each has run once");
    const RpcStats s = engine_.rpc_stats();
    const bool datagrams = engine_.config().rpc.transport != spinwire::RpcTransport::connection;
    must((s.retransmitted_requests != 0) == datagrams,
         "something was sent again, by who it is for");
    must(s.long_calls == (datagrams ? 0 : s.calls), "calls take the way that they are to");
    std::printf("%zu calls ran and were answered once each, %llu sent again, %llu late answers\n",
                answers_.size(), static_cast<unsigned long long>(s.retransmitted_requests),
                static_cast<unsigned long long>(s.late_replies));
  }
  void close() {
    for (Session& s : sessions_) must(s.close() == Status::ok, "close");
    wait("the end", [&] { return engine_.rpc_stats().sessions == 0; });
    const auto good = engine_.audit();
    must(good.has_value(), good ? "" : good.error().message());
  }

 private:
  template <typename Done>
  void wait(const char* what, Done&& done) {
    must(until([&] { (void)engine_.poll(); }, done, kLongest), std::string("waiting for ") + what);
  }
  bool call(Session& s, std::uint32_t id) {
    const auto done = [this, id](Reply& r) {
      if (r.status() == Status::peer_lost) return;  // on_closed says why
      must(r.status() == Status::ok, "a call: " + std::string(to_string(r.status())));
      must(r.bytes().size() == length_of(id) && holds(r.bytes().subspan(sizeof id), id),
           "an answer of other bytes");
      ++answers_[id];
      ++ended_;
    };
    Buffer b = engine_.allocate(length_of(id));
    if (!b) return false;
    std::memcpy(b.data(), &id, sizeof id);
    fill({b.data() + sizeof id, length_of(id) - sizeof id}, id);
    const Status status = s.call(kWork, b.slice(0, length_of(id)), done);
    must(status == Status::ok || status == Status::would_block, "call");
    return status == Status::ok;
  }

  Engine engine_;
  std::vector<Session> sessions_;
  std::vector<std::uint32_t> answers_;
  std::size_t ended_ = 0;
};

int call(const std::string& address, std::uint32_t count, bool connections) {
  Config config = lossy_config();
  if (connections) config.rpc.transport = spinwire::RpcTransport::connection;
  Client client(config, address, count);
  client.call_all();
  client.compare();
  client.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "serve" && argc == 3) return serve(argv[2]);
  const bool connections = argc == 5 && std::string_view(argv[4]) == "connections";
  must(what == "call" && (argc == 4 || connections),
       "usage: softroce-calls serve ADDRESS | call ADDRESS COUNT [connections]");
  return call(argv[2], static_cast<std::uint32_t>(std::stoul(argv[3])), connections);
}
