#include "common/echo_pair.h"

#include <cstring>
#include <utility>

namespace spinwire::bench {
namespace {

void check_sent(Status status) {
  if (status != Status::ok && status != Status::would_block) give_up(to_string(status));
}

}  // namespace

EchoServer::EchoServer(const Config& config) : engine_(open_engine(config)) {
  for (Buffer& reply : replies_) {
    reply = engine_.allocate(sizeof(EchoBody));
    if (!reply) give_up("the send pool is too small for the replies");
  }
  ListenOptions options;
  options.handlers.on_message = [this](Connection c, Message& m) { answer(c, m); };
  listener_ = must(engine_.listen("127.0.0.1:0", options));
}

void EchoServer::answer(Connection connection, Message& request) {
  if (request.size() != sizeof(EchoBody)) [[unlikely]]
    give_up("a request has a wrong length");
  // Into a buffer of the server's own, as in the programs that are compared.
  Buffer& reply = replies_[next_reply_++ % kReplies];
  std::memcpy(reply.data(), request.data(), sizeof(EchoBody));
  std::uint64_t number = 0;
  std::memcpy(&number, reply.data(), sizeof number);
  ++number;
  std::memcpy(reply.data(), &number, sizeof number);
  const Status status = unsent_.empty() ? connection.send(reply) : Status::would_block;
  if (status != Status::ok) [[unlikely]] {
    check_sent(status);
    Buffer kept = request.take();
    std::memcpy(kept.data(), reply.data(), sizeof(EchoBody));
    unsent_.push_back({connection, std::move(kept)});
  }
}

void EchoServer::send_unsent() {
  while (!unsent_.empty()) {
    const Status status = unsent_.front().to.send(unsent_.front().body);
    if (status == Status::would_block) return;
    if (status == Status::not_connected)
      unsent_.clear();
    else
      unsent_.pop_front();
  }
}

EchoClient::EchoClient(const Config& config, std::string_view address)
    : engine_(open_engine(config)) {
  for (Buffer& request : requests_) {
    request = engine_.allocate(sizeof(EchoBody));
    if (!request) give_up("the send pool is too small for the requests");
    std::memset(request.data(), 0x5a, sizeof(EchoBody));
  }
  ConnectOptions options;
  options.handlers.on_message = [this](Connection, Message& m) { take(m); };
  options.handlers.on_closed = [](Connection, const Error& why) {
    if (why.status != Status::ok) give_up(why.message());
  };
  connection_ = must(engine_.connect(address, options));
}

void EchoClient::start(std::uint32_t window) noexcept {
  running_ = true;
  unsent_ = window;
  send_unsent();
}

void EchoClient::take(const Message& reply) noexcept {
  std::uint64_t number = 0;
  std::memcpy(&number, reply.data(), sizeof number);
  if (reply.size() != sizeof(EchoBody) || number != done_ + 1) [[unlikely]]
    give_up("a reply does not match its request");
  ++done_;
  if (!running_) return;
  if (unsent_ != 0 || !send_next()) ++unsent_;
}

bool EchoClient::send_next() noexcept {
  // The device no longer uses this request, as it was answered.
  Buffer& request = requests_[sent_ % kMostWindow];
  std::memcpy(request.data(), &sent_, sizeof sent_);
  const Status status = connection_.send(request);
  if (status != Status::ok) [[unlikely]] {
    check_sent(status);
    return false;
  }
  ++sent_;
  return true;
}

void EchoClient::send_unsent() noexcept {
  if (!running_) unsent_ = 0;
  while (unsent_ != 0 && send_next()) --unsent_;
}

EchoPair::EchoPair(const Config& config) : server(config), client(config, server.address()) {
  run_until(
      "the echo client is connecting",
      [this] {
        drive(client.engine());
        drive(server.engine());
      },
      [this] { return client.ready() && server.engine().stats().accepted == 1; });
}

void EchoPair::warm_up(std::uint32_t window) {
  client.start(window);
  const std::uint64_t enough = client.done() + 64 * std::uint64_t{window};
  run_until(
      "the window is filling", [this] { poll(); }, [&] { return client.done() >= enough; });
}

void EchoPair::settle() {
  client.stop();
  run_until(
      "the window is emptied", [this] { poll(); }, [this] { return client.outstanding() == 0; });
}

}  // namespace spinwire::bench
