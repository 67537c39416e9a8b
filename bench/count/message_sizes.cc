// Counts round trips of messages of one size, client and server on one thread. Both ends send the
// received buffer back: count-message-sizes WINDOW SIZE OPERATIONS.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <utility>

#include "common/setup.h"
#include "spinwire/spinwire.h"

using namespace spinwire;

namespace {

constexpr unsigned long kMostWindow = 64;
constexpr unsigned long kMostSize = 1u << 20;

/// Messages of one end that wait for credit, oldest first.
class Sender {
 public:
  void send(Connection to, Buffer body) {
    if (waiting_.empty() && is_sent(to.send(body))) return;
    waiting_.emplace_back(to, std::move(body));
  }
  void go_on() {
    while (!waiting_.empty()) {
      auto& [to, body] = waiting_.front();
      if (!is_sent(to.send(body))) return;
      waiting_.pop_front();
    }
  }

 private:
  static bool is_sent(Status status) {
    if (status != Status::ok && status != Status::would_block)
      bench::give_up("the library refused a message");
    return status == Status::ok;
  }

  std::deque<std::pair<Connection, Buffer>> waiting_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const unsigned long window = argc == 4 ? std::strtoul(argv[1], nullptr, 10) : 0;
  const unsigned long size = argc == 4 ? std::strtoul(argv[2], nullptr, 10) : 0;
  if (window == 0 || window > kMostWindow || operations % window != 0 || size > kMostSize)
    bench::give_up("arguments: WINDOW (1 to 64) SIZE (up to 1 MiB) OPERATIONS (a multiple)");
  const Config config = bench::hot_path_config();
  Engine server = bench::open_engine(config);
  Engine client = bench::open_engine(config);
  Sender replies, requests;
  std::uint64_t done = 0;
  ListenOptions listen;
  listen.handlers.on_message = [&](Connection c, Message& m) { replies.send(c, m.take()); };
  const Listener listener = bench::must(server.listen("127.0.0.1:0", listen));
  ConnectOptions options;
  options.handlers.on_message = [&](Connection c, Message& m) {
    if (m.size() != size) bench::give_up("a message has a wrong length");
    ++done;
    requests.send(c, m.take());
  };
  const Connection connection = bench::must(client.connect(listener.address(), options));
  while (!connection.ready()) {
    bench::drive(client);
    bench::drive(server);
  }
  for (unsigned long i = 0; i < window; ++i) {
    Buffer body = client.allocate(std::max(size, 1ul));
    (void)body.resize(size);
    requests.send(connection, std::move(body));
  }
  std::uint64_t end = 10 * std::uint64_t{window};
  const auto work = [&] {
    bench::advance_time();
    end += window;
    do {
      (void)client.poll();
      requests.go_on();
      (void)server.poll();
      replies.go_on();
    } while (done < end);
  };
  work();
  bench::measured(operations / window, work);
}
