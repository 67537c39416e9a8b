// Counts remote calls of 32 bytes, client and server on one thread: count-call WINDOW [verbs]
// OPERATIONS. With `verbs`, datagrams go by work requests, as on devices that have nothing else.
#include <array>
#include <chrono>
#include <cstdlib>
#include <string_view>

#include "common/setup.h"
#include "spinwire/spinwire.h"

using namespace spinwire;

namespace {

/// Calls again whenever one has ended.
struct Caller {
  void next() {
    const std::span<const std::byte> bytes(request);
    const Status status = session.call(1, bytes, [this](Reply& reply) { take(reply); });
    if (status != Status::ok) bench::give_up("a call was refused");
  }
  void take(const Reply& reply) {
    if (reply.status() == Status::flushed) return;  // the engine ends
    if (reply.bytes().size() != request.size()) bench::give_up("a call was not answered");
    ++done;
    next();
  }

  Session session;
  std::array<std::byte, 32> request{};
  std::uint64_t done = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  const bool verbs = argc == 4 && std::string_view(argv[2]) == "verbs";
  const auto window =
      static_cast<std::uint32_t>(argc == 3 || verbs ? std::strtoul(argv[1], nullptr, 10) : 0);
  if (window == 0 || window > 64 || operations % window != 0)
    bench::give_up("arguments: WINDOW (a power of two, 1 to 64) [verbs] OPERATIONS (a multiple)");
  Caller caller;  // outlives the engines
  Config config = bench::hot_path_config();
  config.rpc.backlog = 64;
  if (verbs) config.rpc.direct_datagrams = DirectDatagrams::off;
  config.rpc.target_rtt = std::chrono::seconds(1);  // whatever is slow here is no network
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
