#include "common/many_sessions.h"

#include <array>
#include <span>
#include <utility>

namespace spinwire::bench {
namespace {

constexpr std::size_t kBytes = 32;

Config with_sessions(Config config, std::uint32_t sessions) {
  config.rpc.sessions = sessions;
  config.rpc.backlog = 64;
  return config;
}

}  // namespace

ManySessions::ManySessions(Config config, std::uint32_t sessions, std::uint32_t window)
    : config_(with_sessions(std::move(config), sessions)),
      server_(open_engine(config_)),
      client_(open_engine(config_)) {
  const auto echo = [](Request& r) { (void)r.reply(r.bytes()); };
  if (auto served = server_.serve(kEcho, echo); !served) give_up(served.error().message());
  listener_ = must(server_.listen("127.0.0.1:0", {}));
  sessions_.reserve(sessions);
  open(sessions);
  next_ = sessions_.front();
  for (; window != 0; --window) call_next();
}

ManySessions::~ManySessions() {
  ending_ = true;
  client_ = Engine();
}

void ManySessions::open(std::uint32_t sessions) {
  constexpr std::uint32_t kAtOnce = 32;  // the server limits concurrent handshakes
  SessionOptions options;
  options.on_ready = [this](Session) { ++ready_; };
  options.on_closed = [](Session, const Error& why) {
    if (why.status != Status::ok) give_up(why.message());
  };
  const auto step = [this] {
    drive(client_);
    drive(server_);
  };
  while (sessions_.size() < sessions) {
    sessions_.push_back(must(client_.open_session(listener_.address(), options)));
    run_until("sessions are being opened", step,
              [&] { return sessions_.size() - ready_ < kAtOnce; });
  }
  run_until("sessions are being opened", step, [&] { return ready_ == sessions; });
}

void ManySessions::call_next() noexcept {
  static constexpr std::array<std::byte, kBytes> kRequest{};
  const auto done = [this](Reply& reply) { take(reply); };
  Session session = std::exchange(next_, sessions_[pick()]);
  next_.prefetch();
  const Status status = session.call(kEcho, std::span(kRequest), done);
  if (status != Status::ok) [[unlikely]]
    give_up(to_string(status));
}

void ManySessions::take(const Reply& reply) noexcept {
  if (ending_) return;
  if (reply.bytes().size() != kBytes) [[unlikely]]
    give_up("a call was not answered");
  ++done_;
  call_next();
}

}  // namespace spinwire::bench
