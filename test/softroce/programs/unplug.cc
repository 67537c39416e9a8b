// softroce-unplug serve ADDRESS: sends messages back on port 7471 until ordered to kill its
// machine.
// softroce-unplug client ADDRESS DEVICE: removes the network below its RDMA device, then the
// device, then the peer's machine, each with operations in flight. Every operation completes once,
// the connection ends, an event reports the loss (except the peer's), the loop goes on, and
// everything works again with what has returned.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "softroce/programs/common.h"

namespace {

using namespace softroce;

constexpr std::string_view kPort = ":7471";
constexpr std::size_t kMessage = 3000;
constexpr std::size_t kDie = 2;  // length of the message that orders the death

Config unplug_config() {
  Config c = config();
  c.connections.keepalive_interval = 200ms;
  c.connections.peer_timeout = 20s;  // a machine that waits for its processor is not lost
  return c;
}

/// Stops the machine as after a power failure.
void die() {
  std::ofstream("/proc/sysrq-trigger") << 'b';
  ::pause();
}

int serve(const std::string& address) {
  Engine engine = must(Engine::open(unplug_config()), "open");
  ListenOptions options;
  options.handlers.on_message = [](Connection c, Message& m) {
    // Dies amid the messages that follow the order.
    static int left = 0;
    if (m.size() == kDie) left = 200;
    if (left != 0 && --left == 0) die();
    (void)c.send(m.take());
  };
  const Listener listener = must(engine.listen(address + std::string(kPort), options), "listen");
  std::puts("serving");
  std::fflush(stdout);
  (void)until([&] { (void)engine.poll(); }, [] { return false; }, 240s);
  must(false, "nobody took the machine away");
  return 0;
}

/// An engine with one connection that has as much in flight as it may.
class Traffic {
 public:
  explicit Traffic(const std::string& address)
      : address_(address + std::string(kPort)),
        engine_(must(Engine::open(unplug_config()), "open")) {
    must(engine_.set_device_event_handler(
             [this](const DeviceEvent& e) { events_.push_back(e.kind); }) == Status::ok,
         "set_device_event_handler");
    data_ = engine_.allocate(kMessage);
  }
  void connect() {
    closed_ = false;
    ConnectOptions options;
    options.handlers.on_message = [this](Connection, Message& m) { back_ += m.size() == kMessage; };
    options.handlers.on_closed = [this](Connection, const Error& e) {
      closed_ = true;
      cause_ = e;
    };
    connection_ = must(engine_.connect(address_, options), "connect");
    wait("the connection", [&] { return connection_.ready() || closed_; });
    must(!closed_, "connect: " + cause_.message());
  }
  void flow() {
    const std::uint64_t enough = back_ + 50;
    wait("messages back", [&] {
      send_all();
      return back_ >= enough;
    });
  }
  /// Runs `command` while messages flow, until the connection has ended because of it.
  void lose(const std::string& command) {
    // All messages may be answered, and the next ones may wait for credit.
    wait("something under way", [&] {
      send_all();
      return completions_.size() > ended_;
    });
    std::thread outside([&] { (void)output_of(command); });
    wait("the loss", [&] {
      send_all();
      return closed_;
    });
    expect_end();
    finish_ = std::move(outside);
  }
  void await_peer_loss() {
    flow();
    wait("credit for the order", [&] { return send(kDie); });
    wait("the loss", [&] {
      send_all();
      return closed_;
    });
    expect_end();
  }
  void expect_event(DeviceEventKind kind) {
    wait("an event",
         [&] { return std::find(events_.begin(), events_.end(), kind) != events_.end(); });
    std::printf("event: %s\n", std::string(to_string(kind)).c_str());
  }
  /// A lost device returns only when no process has it open.
  std::thread command() { return std::move(finish_); }
  void join() {
    if (finish_.joinable()) finish_.join();
  }
  [[nodiscard]] const Error& cause() const { return cause_; }

 private:
  template <typename Done>
  void wait(const char* what, Done&& done) {
    must(until([&] { (void)engine_.poll(); }, done, 100s), std::string("waiting for ") + what);
  }
  [[nodiscard]] bool send(std::size_t length) {
    const std::size_t id = completions_.size();
    const Status s = connection_.send(data_.slice(0, length), [this, id](const Completion& c) {
      ++completions_[id];
      ++ended_;
      failed_ += c.status != Status::ok;
    });
    if (s == Status::ok) completions_.push_back(0);
    return s == Status::ok;
  }
  void send_all() {
    while (send(kMessage)) {
    }
  }
  void expect_end() {
    must(cause_.status != Status::ok, "the connection ends with a cause");
    for (const int times : completions_) must(times == 1, "every operation completes once");
    must(engine_.stats().operations == 0, "no operation is left");
    for (int i = 0; i < 1000; ++i) must(engine_.poll() >= 0, "poll() goes on");
    for (const int times : completions_) must(times == 1, "and never again");
    std::printf("%zu operations completed, %zu of them as failed: %s\n", completions_.size(),
                failed_, std::string(to_string(cause_.status)).c_str());
    completions_.clear();
    ended_ = failed_ = 0;
  }

  std::string address_;
  std::vector<DeviceEventKind> events_;
  std::vector<int> completions_;
  std::size_t ended_ = 0;
  std::size_t failed_ = 0;
  std::uint64_t back_ = 0;
  bool closed_ = false;
  Error cause_;
  std::thread finish_;
  Engine engine_;
  Buffer data_;
  Connection connection_;
};

int client(const std::string& address, const std::string& device) {
  auto traffic = std::make_unique<Traffic>(address);
  traffic->connect();
  traffic->flow();

  std::puts("the network goes");
  traffic->lose("ip link set " + device + " down");
  traffic->join();
  traffic->expect_event(DeviceEventKind::port_error);
  (void)output_of("ip link set " + device + " up");
  traffic->expect_event(DeviceEventKind::port_active);
  traffic->connect();
  traffic->flow();

  std::puts("the device goes");
  traffic->lose("rdma link delete rxe0");
  traffic->expect_event(DeviceEventKind::device_failed);
  std::thread deleting = traffic->command();
  traffic.reset();
  if (deleting.joinable()) deleting.join();
  must(!Engine::open(unplug_config()).has_value(), "there is no device to be opened");
  (void)output_of("rdma link add rxe0 type rxe netdev " + device);
  traffic = std::make_unique<Traffic>(address);
  traffic->connect();
  traffic->flow();

  std::puts("the peer goes");
  traffic->await_peer_loss();
  must(traffic->cause().status == Status::peer_lost, traffic->cause().message());
  std::puts("all survived");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc == 3 && std::string_view(argv[1]) == "serve") return serve(argv[2]);
  must(argc == 4, "usage: softroce-unplug serve ADDRESS | client ADDRESS DEVICE");
  return client(argv[2], argv[3]);
}
