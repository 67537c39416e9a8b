// softroce-connection-cycles WAY COUNT ADDRESS: opens and closes COUNT connections between two
// engines by the TCP exchange (tcp), rdma_cm (cm) or out-of-band endpoints (hand), with a message
// on each. Afterwards the device must have no more objects than before.
#include <memory>
#include <vector>

#include "softroce/programs/common.h"

namespace {

using namespace softroce;

/// The depth of rdma_cm's own queue, which drops further messages and repeats them after seconds.
constexpr int kAtOnce = 6;

struct Cycles {
  explicit Cycles(std::string_view by)
      : way(by),
        server(must(Engine::open(config()), "open")),
        client(must(Engine::open(config()), "open")) {}

  void poll() { (void)(server.poll() + client.poll()); }
  [[nodiscard]] bool at_rest() const {
    return server.stats().connections == 0 && client.stats().connections == 0;
  }
  ConnectionHandlers of_server() {
    ConnectionHandlers h;
    h.on_message = [this](Connection c, Message& m) {
      good = good && holds(m.bytes(), static_cast<std::uint32_t>(m.size()));
      ++messages;
      (void)c.close();
    };
    h.on_closed = [this](Connection, const Error& e) { ended(e); };
    return h;
  }
  ConnectionHandlers of_client() {
    ConnectionHandlers h;
    h.on_ready = [](Connection c) {
      std::array<std::byte, 100> bytes{};
      fill(bytes, static_cast<std::uint32_t>(bytes.size()));
      must(c.send_copy(bytes) == Status::ok, "send");
    };
    h.on_closed = [this](Connection, const Error& e) {
      ended(e);
      ++closed;
    };
    return h;
  }
  void ended(const Error& e) const { must(e.status == Status::ok, e.message()); }

  void listen(const std::string& address) {
    if (way == "hand") return;
    ListenOptions options;
    options.handlers = of_server();
    options.via = via();
    listener = must(server.listen(address + ":0", options), "listen");
  }
  [[nodiscard]] Via via() const { return way == "cm" ? Via::rdma_cm : Via::tcp; }

  void begin() {
    if (way == "hand") return begin_out_of_band();
    ConnectOptions options;
    options.handlers = of_client();
    options.via = via();
    (void)must(client.connect(listener.address(), options), "connect");
  }

  /// Both ends, which join once both exist.
  struct ByHand {
    Connection ends[2];
    Endpoint endpoints[2];
    int told = 0;
    bool joined = false;
  };
  void begin_out_of_band() {
    pairs.push_back(std::make_unique<ByHand>());
    ByHand* const pair = pairs.back().get();
    const auto prepare = [&](Engine& engine, ConnectionHandlers handlers, int side) {
      PrepareOptions options;
      options.handlers = handlers;
      options.on_endpoint = [pair, side](Connection c, const Endpoint& e) {
        pair->ends[side] = c;
        pair->endpoints[side] = e;
        ++pair->told;
      };
      (void)must(engine.prepare(options), "prepare");
    };
    prepare(server, of_server(), 0);
    prepare(client, of_client(), 1);
  }
  void join_those_told() {
    for (auto& pair : pairs) {
      if (pair->told < 2 || pair->joined) continue;
      pair->joined = true;
      // The end that sends joins last, so that the other can receive.
      must(pair->ends[0].join(pair->endpoints[1]).has_value(), "join");
      must(pair->ends[1].join(pair->endpoints[0]).has_value(), "join");
    }
    while (!pairs.empty() && pairs.front()->joined) pairs.erase(pairs.begin());
  }

  void run(int count) {
    closed = messages = 0;
    int begun = 0;
    must(until(
             [&] {
               for (; begun < count && begun - closed < kAtOnce; ++begun) begin();
               poll();
               join_those_told();
             },
             [&] { return closed == count && at_rest(); }, 300s),
         "it took too long: " + std::to_string(closed) + " of " + std::to_string(count));
    must(messages == count, "messages: " + std::to_string(messages));
    must(good, "what arrived is not what was sent");
  }

  std::string_view way;
  int closed = 0;
  int messages = 0;
  bool good = true;
  std::vector<std::unique_ptr<ByHand>> pairs;
  Engine server;
  Engine client;
  Listener listener;
};

}  // namespace

int main(int argc, char** argv) {
  must(argc == 4, "usage: softroce-connection-cycles tcp|cm|hand COUNT ADDRESS");
  Cycles cycles(argv[1]);
  cycles.listen(argv[3]);
  const std::string before = output_of("rdma resource show");
  const auto begin = std::chrono::steady_clock::now();
  cycles.run(std::atoi(argv[2]));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const std::string after = output_of("rdma resource show");
  must(before == after, "objects were left: before " + before + "after " + after);
  std::printf("%s: %s connections in %.1f s, then %s", argv[1], argv[2], took.count(),
              after.c_str());
  return 0;
}
