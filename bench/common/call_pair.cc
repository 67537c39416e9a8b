#include "common/call_pair.h"

#include <cstring>
#include <span>

namespace spinwire::bench {
namespace {

void answer_call(Request& request) {
  EchoBody body{};
  if (request.bytes().size() != sizeof body) [[unlikely]]
    give_up("a call has a wrong length");
  std::memcpy(&body, request.bytes().data(), sizeof body);
  ++body.number;
  if (request.reply(std::as_bytes(std::span(&body, 1))) != Status::ok) [[unlikely]]
    give_up("the library refused a reply");
}

}  // namespace

CallServer::CallServer(const Config& config) : engine_(open_engine(config)) {
  if (auto served = engine_.serve(kEcho, answer_call); !served) give_up(served.error().message());
  listener_ = must(engine_.listen("127.0.0.1:0", {}));
}

CallClient::CallClient(Config config, std::string_view address) {
  // Calls wait in the backlog until the server has granted the whole window.
  config.rpc.backlog = kMostWindow;
  engine_ = open_engine(config);
  SessionOptions options;
  options.window = kMostWindow;
  options.on_closed = [](Session, const Error& why) {
    if (why.status != Status::ok) give_up(why.message());
  };
  session_ = must(engine_.open_session(address, options));
}

void CallClient::start(std::uint32_t window) noexcept {
  running_ = true;
  for (; window != 0; --window) call_next();
}

void CallClient::call_next() noexcept {
  const EchoBody body{sent_, {1, 2, 3}};
  const auto done = [this, number = sent_](Reply& reply) { take(number, reply); };
  const Status status = session_.call(kEcho, std::as_bytes(std::span(&body, 1)), done);
  if (status != Status::ok) [[unlikely]]
    give_up(to_string(status));
  ++sent_;
}

void CallClient::take(std::uint64_t number, const Reply& reply) noexcept {
  ++done_;
  if (reply.status() == Status::flushed) return;  // the engine is closing
  std::uint64_t answer = 0;
  if (reply.bytes().size() == sizeof(EchoBody)) [[likely]]
    std::memcpy(&answer, reply.bytes().data(), sizeof answer);
  if (answer != number + 1) [[unlikely]]
    give_up("a reply does not match its call");
  if (running_) call_next();
}

CallPair::CallPair(const Config& config) : server(config), client(config, server.address()) {
  run_until(
      "the session is being opened",
      [this] {
        drive(client.engine());
        drive(server.engine());
      },
      [this] { return client.ready(); });
}

}  // namespace spinwire::bench
