// softroce-two-way-exchange serve ADDRESS [NAME]: sends messages back and exposes memory, over both
// ways to connect (ports 7471 and 7472), until two clients have come and gone.
// softroce-two-way-exchange connect ADDRESS: over each way sends messages of all lengths up to the
// longest, and writes and reads. Every message returns, and every write and read has the right
// bytes, once and in order.
#include <cstring>
#include <memory>
#include <vector>

#include "softroce/programs/common.h"

namespace {

using namespace softroce;

constexpr std::size_t kRegion = 256 << 10;

std::string port_of(Via via) { return via == Via::rdma_cm ? ":7472" : ":7471"; }

Config exchange_config() {
  Config c = config();
  c.connections.eager_bytes = c.connections.max_message_bytes = 32768;
  c.memory.receive_bytes = 16u << 20;
  return c;
}

int serve(const std::string& address) {
  int gone = 0;
  Engine engine = must(Engine::open(exchange_config()), "open");
  const Buffer memory = engine.allocate(kRegion, Pool::lease);
  must(static_cast<bool>(memory), "allocate");
  const RemoteRegion region =
      must(engine.expose(memory.slice(0, kRegion), Access::remote_read_write), "expose");
  ListenOptions options;
  struct Context {
    const RemoteRegion* region;
    int* gone;
  } context{&region, &gone};
  options.handlers.on_ready = [x = &context](Connection c) {
    must(c.send_copy(std::as_bytes(std::span(x->region, 1))) == Status::ok, "send the region");
  };
  options.handlers.on_message = [](Connection c, Message& m) {
    const auto immediate = m.immediate();
    const Buffer whole = m.take();
    const Status sent =
        immediate ? c.send_with_imm(whole.slice(0, whole.size()), *immediate) : c.send(whole);
    must(sent == Status::ok, "send back");
  };
  options.handlers.on_closed = [x = &context](Connection, const Error& e) {
    must(e.status == Status::ok, e.message());
    ++*x->gone;
  };
  options.via = Via::tcp;
  const Listener by_tcp = must(engine.listen(address + port_of(options.via), options), "listen");
  options.via = Via::rdma_cm;
  const Listener by_cm = must(engine.listen(address + port_of(options.via), options), "listen");
  std::puts("serving");
  std::fflush(stdout);
  must(until([&] { (void)engine.poll(); }, [&] { return gone == 2; }, 200s), "clients");
  (void)until([&] { (void)engine.poll(); }, [&] { return engine.stats().connections == 0; });
  return 0;
}

class Client {
 public:
  explicit Client(Engine& engine) : engine_(engine) {}

  void connect(const std::string& address, Via via) {
    ConnectOptions options;
    options.via = via;
    options.handlers.on_message = [this](Connection, Message& m) { take(m); };
    options.handlers.on_closed = [this](Connection, const Error& e) {
      must(e.status == Status::ok, e.message());
      closed_ = true;
    };
    connection_ = must(engine_.connect(address + port_of(via), options), "connect");
    wait("the region", [&] { return region_.length != 0; });
  }
  /// All lengths to 70, those around powers of two, and the longest; each twice, many in flight.
  void send_messages() {
    const std::size_t longest = connection_.max_message();
    must(longest == exchange_config().connections.eager_bytes, "max_message");
    for (int round = 0; round < 2; ++round) {
      for (std::size_t n = 0; n <= 70; ++n) lengths_.push_back(n);
      for (std::size_t n = 128; n < longest; n *= 2)
        lengths_.insert(lengths_.end(), {n - 1, n, n + 1});
      lengths_.insert(lengths_.end(), {longest - 1, longest});
    }
    std::size_t sent = 0;
    wait("the messages back", [&] {
      while (sent < lengths_.size() && sent - back_ < 8 && send(sent)) ++sent;
      return back_ == lengths_.size() && completed_ == lengths_.size();
    });
  }
  void write_and_read() {
    Buffer out = engine_.allocate(kRegion / 2), in = engine_.allocate(kRegion / 2);
    must(out && in, "allocate");
    int ended = 0, begun = 0;
    const auto done = [x = &ended](const Completion& c) {
      must(c.status == Status::ok, "a write or read: " + std::string(to_string(c.status)));
      ++*x;
    };
    for (const std::size_t n : {1, 64, 4095, 4096, 4097, 65536, 131072}) {
      const auto seed = static_cast<std::uint32_t>(n);
      fill({out.data(), n}, seed);
      std::memset(in.data(), 0, n);
      const RemoteRegion part = region_.slice(512, n);
      must(connection_.write(out.slice(0, n), part, done) == Status::ok, "write");
      must(connection_.read(in.slice(0, n), part, done) == Status::ok, "read");
      begun += 2;
      wait("a write and a read", [&] { return ended == begun; });
      must(holds({in.data(), n}, seed), "what was read is not what was written");
    }
  }
  void close() {
    must(connection_.close() == Status::ok, "close");
    wait("the end", [&] { return closed_; });
    must(back_ == lengths_.size() && completed_ == lengths_.size(), "once each");
  }

 private:
  template <typename Done>
  void wait(const char* what, Done&& done) {
    must(until([&] { (void)engine_.poll(); }, done, 60s), std::string("waiting for ") + what);
  }
  [[nodiscard]] bool send(std::size_t i) {
    Buffer b = engine_.allocate(std::max<std::size_t>(lengths_[i], 1));
    if (!b) return false;
    (void)b.resize(lengths_[i]);
    const auto seed = static_cast<std::uint32_t>(i);
    fill({b.data(), lengths_[i]}, seed);
    const auto done = [this](const Completion& c) {
      must(c.status == Status::ok, "a message: " + std::string(to_string(c.status)));
      ++completed_;
    };
    const Status s = i % 3 == 0 ? connection_.send_with_imm(b.slice(0, lengths_[i]), seed, done)
                                : connection_.send(b, done);
    must(s == Status::ok || s == Status::would_block, "send");
    return s == Status::ok;
  }
  void take(Message& m) {
    if (region_.length == 0) {
      must(m.size() == sizeof region_, "the region");
      std::memcpy(&region_, m.data(), sizeof region_);
      return;
    }
    const auto seed = static_cast<std::uint32_t>(back_);
    must(back_ < lengths_.size() && m.size() == lengths_[back_], "a message of another length");
    must(holds(m.bytes(), seed), "a message of other bytes");
    must(m.immediate().has_value() == (seed % 3 == 0) && m.immediate().value_or(seed) == seed,
         "its immediate");
    ++back_;
  }

  Engine& engine_;
  Connection connection_;
  RemoteRegion region_;
  std::vector<std::size_t> lengths_;
  std::size_t back_ = 0;
  std::size_t completed_ = 0;
  bool closed_ = false;
};

int connect(const std::string& address) {
  std::vector<std::unique_ptr<Client>> clients;  // callbacks use them until the engine is gone
  Engine engine = must(Engine::open(exchange_config()), "open");
  for (const Via via : {Via::tcp, Via::rdma_cm}) {
    clients.push_back(std::make_unique<Client>(engine));
    Client& client = *clients.back();
    client.connect(address, via);
    client.send_messages();
    client.write_and_read();
    client.close();
    std::printf("all exchanged by %s\n", via == Via::tcp ? "tcp" : "rdma_cm");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  must(argc == 3, "usage: softroce-two-way-exchange serve|connect ADDRESS");
  return std::string_view(argv[1]) == "serve" ? serve(argv[2]) : connect(argv[2]);
}
