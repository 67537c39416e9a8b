// A server and a client that exchange a message and a call.
//
//   @NAME@                    both ends, in one thread
//   @NAME@ server [ADDRESS]   waits for clients, until interrupted
//   @NAME@ client [ADDRESS]   sends a message, makes a call, and ends
//
// An Engine does nothing by itself: the loops below poll it, and every callback runs inside a poll.
#include <spinwire/spinwire.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

using namespace spinwire;

/// An error to show to the user.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
template <typename T>
T must(Result<T> result) {
  if (!result) throw Failure(result.error().message());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}
void must(Status status) {
  if (status != Status::ok) throw Failure(std::string(to_string(status)));
}

Engine open_engine() {
  return must(Engine::open(must(Config::load())));  // the defaults, then SPINWIRE_* variables
}

/// The method that adds two numbers. Its request is a Numbers, and its reply the sum.
constexpr Method kAdd = 1;
struct Numbers {
  std::int32_t a;
  std::int32_t b;
};

class Server {
 public:
  explicit Server(const std::string& address) : engine_(open_engine()) {
    must(engine_.serve(kAdd, &Server::on_add));
    ListenOptions options;
    options.handlers.on_message = [](Connection client, Message& message) {
      // Sends the received buffer back. A client that does not take its messages is disconnected.
      if (client.send(message.take()) != Status::ok) (void)client.close();
    };
    listener_ = must(engine_.listen(address, options));  // for connections and sessions
  }

  Engine& engine() { return engine_; }
  std::string address() const { return listener_.address(); }

 private:
  static void on_add(Request& request) {
    Numbers numbers{};
    if (request.bytes().size() != sizeof numbers) return (void)request.refuse("no two numbers");
    std::memcpy(&numbers, request.bytes().data(), sizeof numbers);
    const std::int64_t sum = std::int64_t{numbers.a} + numbers.b;
    (void)request.reply(std::as_bytes(std::span(&sum, 1)));
  }

  Engine engine_;
  Listener listener_;
};

class Client {
 public:
  explicit Client(const std::string& address) : engine_(open_engine()) {
    ConnectOptions connect;
    connect.handlers.on_ready = [](Connection server) {
      if (server.send_copy(std::as_bytes(std::span("hello", 5))) != Status::ok)
        (void)server.close();
    };
    connect.handlers.on_message = [this](Connection, Message& message) {
      std::printf("the message came back: %.*s\n", static_cast<int>(message.size()),
                  reinterpret_cast<const char*>(message.data()));
      has_message_ = true;
    };
    connect.handlers.on_closed = [this](Connection, const Error& error) { on_closed(error); };
    must(engine_.connect(address, connect));

    SessionOptions session;
    session.on_ready = [this](Session server) { call(server); };
    session.on_closed = [this](Session, const Error& error) { on_closed(error); };
    must(engine_.open_session(address, session));
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  Engine& engine() { return engine_; }
  bool is_done() const {
    if (!fault_.empty()) throw Failure(fault_);
    return has_message_ && has_sum_;
  }

 private:
  void call(Session server) {
    const Numbers numbers{40, 2};
    const auto on_reply = [this](Reply& reply) {
      std::int64_t sum = 0;
      if (reply.status() != Status::ok || reply.bytes().size() != sizeof sum)
        return (void)(fault_ = "the call failed: " + std::string(to_string(reply.status())));
      std::memcpy(&sum, reply.bytes().data(), sizeof sum);
      std::printf("the call answered: %lld\n", static_cast<long long>(sum));
      has_sum_ = true;
    };
    const Status status = server.call(kAdd, std::as_bytes(std::span(&numbers, 1)), on_reply);
    if (status != Status::ok) fault_ = "the call was not accepted";
  }

  void on_closed(const Error& error) {
    fault_ = error.status == Status::ok ? "the server has gone" : error.message();
  }

  // Declared before the engine, whose destructor still runs callbacks.
  bool has_message_ = false;
  bool has_sum_ = false;
  std::string fault_;
  Engine engine_;
};

volatile std::sig_atomic_t stop = 0;

void run_server(const std::string& address) {
  std::signal(SIGINT, [](int) { stop = 1; });
  std::signal(SIGTERM, [](int) { stop = 1; });
  Server server(address);
  std::printf("listening on %s\n", server.address().c_str());
  std::fflush(stdout);
  Idler idler;  // sleeps while there is nothing to do
  while (stop == 0) must(idler.idle(server.engine(), server.engine().poll()));
}

void run_client(const std::string& address) {
  Client client(address);
  Idler idler;
  while (!client.is_done()) must(idler.idle(client.engine(), client.engine().poll()));
}

void run_both() {
  Server server("127.0.0.1:0");
  Client client(server.address());
  Engine* const engines[] = {&server.engine(), &client.engine()};
  Idler idler;
  while (!client.is_done()) must(idler.turn(engines));
}

int main(int argc, char** argv) try {
  const std::string_view end = argc > 1 ? argv[1] : "both";
  const std::string address = argc > 2 ? argv[2] : "127.0.0.1:7000";
  if (end == "server") {
    run_server(address);
  } else if (end == "client") {
    run_client(address);
  } else if (argc == 1) {
    run_both();
  } else {
    std::fprintf(stderr, "usage: @NAME@ [server|client [ADDRESS]]\n");
    return 2;
  }
} catch (const Failure& failure) {
  std::fprintf(stderr, "@NAME@: %s\n", failure.what());
  return 1;
}
