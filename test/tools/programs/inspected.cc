// inspected: two engines in one thread, with one of each handle, for debuggers. A test has gdb stop
// in the functions inspect...() and print what they get, and at the probes.
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "spinwire/spinwire.h"

using namespace spinwire;  // NOLINT: a program of one file
using namespace std::chrono_literals;

namespace {

template <typename T>
T must(Result<T> result) {
  if (result) return std::move(*result);
  std::fprintf(stderr, "%s\n", result.error().message().c_str());
  std::exit(1);
}
void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

struct World {
  Engine server;
  Engine client;
  Engine closed_engine;
  Listener listener;
  Timer timer;
  Connection connection;
  Connection accepted;
  Connection empty_connection;
  Connection closed_connection;
  Connection of_closed_engine;
  Session session;
  Session closed_session;
  ServedSession served;
  PendingCall pending;
  Buffer buffer;
  Buffer empty_buffer;
  BufferSlice slice;
  MemoryRegion registered;
  RemoteRegion region;
  RemoteMemory leased;
  RemoteMemory not_leased;
  OperationId operation{7};
  CallId no_call;
  Status status = Status::would_block;
  Status unknown_status = static_cast<Status>(200);
  Access access = Access::remote_read | Access::remote_atomic;
  ConnectionState state = ConnectionState::draining;
  Error error{Status::in_use, "listen at port 1", "another program listens there", "use port 0"};
  Goodbye goodbye{GoodbyeReason::draining, 200ms};
  Result<int> number = 5;
  Result<void> nothing;
  Result<Session> failed = tl::unexpected<Error>(Error(Status::limit, "asked", "found", ""));
  ConnectionSnapshot snapshot;
};

}  // namespace

// Not in the unnamed namespace, so that a debugger finds them by their names.
[[gnu::noinline]] void inspect(World& world);
void inspect(World& world) { asm volatile("" : : "g"(&world) : "memory"); }
[[gnu::noinline]] void inspect_message(Message& message);
void inspect_message(Message& message) { asm volatile("" : : "g"(&message) : "memory"); }
[[gnu::noinline]] void inspect_request(Request& request);
void inspect_request(Request& request) { asm volatile("" : : "g"(&request) : "memory"); }
[[gnu::noinline]] void inspect_reply(Reply& reply);
void inspect_reply(Reply& reply) { asm volatile("" : : "g"(&reply) : "memory"); }

namespace {

Config config() {
  Config c;
  c.device.name = "softverbs";
  c.memory.hugepages = HugepagePolicy::off;
  c.observability.directory = "";  // probes need no file
  return c;
}

class Program {
 public:
  void run() {
    open();
    connect();
    call();
    lend();
    fill();
    inspect(w_);
    refuse();
  }

 private:
  template <typename Done>
  void until(Done&& done) {
    while (!done()) must(w_.server.poll() >= 0 && w_.client.poll() >= 0, "polls succeed");
  }
  void open();
  void connect();
  void call();
  void lend();
  void fill();
  void refuse();

  // Callbacks use these, so the engines end first.
  bool refuses_ = false;
  bool received_ = false;
  bool replied_ = false;
  std::optional<Error> refusal_;
  World w_;
};

void Program::open() {
  w_.server = must(Engine::open(config()));
  w_.client = must(Engine::open(config()));
  must(w_.server
           .serve(3,
                  [this](Request& r) {
                    inspect_request(r);
                    if (r.bytes().size() == 1) {
                      w_.served = r.session();
                      w_.pending = r.defer();
                    } else {
                      must(r.reply(r.bytes()) == Status::ok, "a reply is accepted");
                    }
                  })
           .has_value(),
       "a method is served");
  ListenOptions options;
  options.on_accept = [this](Connection c) { w_.accepted = c; };
  options.handlers.on_message = [this](Connection, Message& m) {
    inspect_message(m);
    received_ = true;
  };
  options.on_connect_request = [this](PeerRequest& request) {
    if (refuses_) return request.refuse(403, "not today");
    request.accept();
  };
  w_.listener = must(w_.server.listen("127.0.0.1:0", options));
}

void Program::connect() {
  const std::string address = w_.listener.address();
  w_.closed_connection = must(w_.client.connect(address, {}));
  until([this] { return w_.closed_connection.ready(); });
  must(w_.closed_connection.close() == Status::ok, "a connection closes");
  until([this] {
    return w_.closed_connection.state() == ConnectionState::closed &&
           w_.accepted.state() == ConnectionState::closed;
  });
  w_.connection = must(w_.client.connect(address, {}));
  until([this] { return w_.connection.ready() && w_.accepted.ready(); });
  {
    Engine third = must(Engine::open(config()));
    w_.of_closed_engine = must(third.connect(address, {}));
  }
  w_.session = must(w_.client.open_session(address, {}));
  until([this] { return w_.session.ready(); });
  w_.closed_session = must(w_.client.open_session(address, {}));
  until([this] { return w_.closed_session.ready(); });
  must(w_.closed_session.close() == Status::ok, "a session closes");
  until([this] { return w_.closed_session.state() == SessionState::closed; });
}

void Program::call() {
  const std::string_view text = "twelve bytes";
  must(w_.connection.send_copy(std::as_bytes(std::span(text))) == Status::ok, "a send is accepted");
  const auto done = [this](Reply& reply) {
    inspect_reply(reply);
    replied_ = true;
  };
  must(w_.session.call(3, std::as_bytes(std::span(text)), done) == Status::ok,
       "a call is accepted");
  until([this] { return received_ && replied_; });
  const auto later = [](Reply&) {};
  must(w_.session.call(3, std::as_bytes(std::span(text.substr(1, 1))), later) == Status::ok,
       "a call is accepted");
  until([this] { return static_cast<bool>(w_.served); });
}

void Program::lend() {
  const auto granted = [this](LeaseReply& reply) { w_.leased = std::move(reply.memory); };
  must(w_.connection.request_memory(4096, {}, granted) == Status::ok, "a request is accepted");
  until([this] { return static_cast<bool>(w_.leased); });
}

void Program::fill() {
  static std::byte memory[8192];
  w_.timer = must(w_.client.after(1h, [] {}));
  w_.buffer = w_.client.allocate(100);
  w_.slice = w_.buffer.slice(10, 20);
  w_.registered = must(w_.client.register_memory(memory, Access::remote_read));
  w_.region = must(w_.connection.expose(w_.buffer, Access::remote_read_write));
  w_.snapshot = w_.connection.snapshot();
}

void Program::refuse() {
  refuses_ = true;
  ConnectOptions options;
  options.handlers.on_closed = [this](Connection, const Error& why) { refusal_ = why; };
  (void)must(w_.client.connect(w_.listener.address(), options));
  until([this] { return refusal_.has_value(); });
}

}  // namespace

int main() {
  Program().run();
  return 0;
}
