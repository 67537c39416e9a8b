// Counts remote calls whose request and reply have SIZE bytes, client and server on one thread:
// count-call WINDOW SIZE [verbs] OPERATIONS. With `verbs`, datagrams use work requests, as on
// devices without direct datagrams.
#include <array>
#include <chrono>
#include <cstdlib>
#include <string_view>

#include "common/setup.h"
#include "spinwire/spinwire.h"

using namespace spinwire;

namespace {

/// Makes a new call whenever one ends.
struct Caller {
  void next() {
    const std::span<const std::byte> bytes(request.data(), size);
    const Status status = session.call(1, bytes, [this](Reply& reply) { take(reply); });
    if (status != Status::ok) bench::give_up("the library refused a call");
  }
  void take(const Reply& reply) {
    if (reply.status() == Status::flushed) return;  // the engine is closing
    if (reply.bytes().size() != size) bench::give_up("a call got no valid reply");
    ++done;
    next();
  }

  Session session;
  std::size_t size = 0;
  std::array<std::byte, 16384> request{};
  std::uint64_t done = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const bool verbs = argc == 5 && std::string_view(argv[3]) == "verbs";
  const auto window =
      static_cast<std::uint32_t>(argc == 4 || verbs ? std::strtoul(argv[1], nullptr, 10) : 0);
  if (window == 0 || window > 64 || operations % window != 0)
    bench::give_up(
        "arguments: WINDOW (a power of two, 1 to 64) SIZE [verbs] OPERATIONS (a multiple)");
  Caller caller;  // outlives the engines
  caller.size = std::strtoul(argv[2], nullptr, 10);
  if (caller.size > caller.request.size()) bench::give_up("SIZE is at most 16384");
  Config config = bench::hot_path_config();
  config.rpc.backlog = 64;
  if (verbs) config.rpc.direct_datagrams = DirectPath::off;
  config.rpc.target_rtt = std::chrono::seconds(1);  // delays here do not show congestion
  Engine server = bench::open_engine(config);
  Engine client = bench::open_engine(config);
  const Listener listener = bench::must(server.listen("127.0.0.1:0", {}));
  if (auto served = server.serve(1, [](Request& r) { (void)r.reply(r.bytes()); }); !served)
    bench::give_up(served.error().message().c_str());
  SessionOptions options;
  options.window = window;
  caller.session = bench::must(client.open_session(listener.address(), options));
  while (!caller.session.ready()) {
    bench::drive(client);
    bench::drive(server);
  }
  for (std::uint32_t i = 0; i < window; ++i) caller.next();
  std::uint64_t end = 10 * std::uint64_t{window};
  const auto work = [&] {
    bench::advance_time();
    for (end += window; caller.done < end;) {
      (void)client.poll();
      (void)server.poll();
    }
  };
  work();
  bench::measured(operations / window, work);
}
