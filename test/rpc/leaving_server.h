// A session that reconnects, over either transport, and whose server ends it in order.
#pragma once

#include <memory>
#include <string>

#include "rpc/reconnecting_session.h"
#include "rpc/session_goodbye.h"

namespace rpc_session_reconnect_test {

using spinwire::Buffer;
using spinwire::Goodbye;
using spinwire::GoodbyeReason;

/// What a server that drains tells its clients.
constexpr Goodbye kGoodbye{GoodbyeReason::draining, 300ms};

inline void drain(const Bare& engine) {
  engine.core->drain.begin(1h, {.retry_after = kGoodbye.retry_after, .on_drained = {}});
}

class RpcLeavingServer : public RpcSessionReconnect,
                         public testing::WithParamInterface<RpcTransport> {
 protected:
  [[nodiscard]] static Config server_config() { return over(GetParam(), reconnect_config()); }
  void serve_at(const std::string& address) { start(address, server_config()); }
  /// For a session that is not opened again: alternatives alone are tried only until the first
  /// success.
  [[nodiscard]] SessionOptions options_for_one_opening() {
    SessionOptions how = options({});
    how.alternatives = {address_};
    how.when_not_ready = WhenNotReady::wait;
    return how;
  }
  /// A call is in progress at the server.
  void begin_long_work() {
    ASSERT_EQ(begin(kLater, filled(20, 1)), Status::ok);
    ASSERT_TRUE(until([&] { return server_->later.size() == 1; }));
  }
  /// A call is in progress at the server, which drains; the client does not know that yet.
  void begin_drain() {
    ASSERT_NO_FATAL_FAILURE(begin_long_work());
    drain(server_->engine);
    ASSERT_TRUE(session_.ready());
  }
  template <typename Work>
  void for_each_served(Work&& work) const {
    server_->engine.core->calls->servers.for_each(work);
  }
  /// The server ends its sessions in order. It does not drain, so they can be opened again.
  void send_goodbye(const Goodbye& why) const {
    for_each_served([&](spinwire::rpc::ServerSession& s) {
      s.advertised_window &= ~spinwire::rpc::kTakesNoCalls;  // after refuse_without_goodbye()
      spinwire::rpc::begin_leaving(*server_->engine.core->calls, s, why, ~std::uint64_t{0});
    });
  }
  /// The server refuses further calls, but says no goodbye.
  void refuse_without_goodbye() const {
    spinwire::rpc::Rpc& calls = *server_->engine.core->calls;
    for_each_served([&calls](spinwire::rpc::ServerSession& s) {
      s.advertised_window |= spinwire::rpc::kTakesNoCalls;
      s.leaving.deadline = ~std::uint64_t{0};
      calls.context.timers.cancel(s.timer);
    });
  }
  void turns(int count, std::uint64_t step = kMillisecond / 10) {
    for (int i = 0; i < count; ++i) turn(step);
  }
  /// Answers the calls in progress. Returns when the session has lost the server, which has
  /// drained.
  void finish_drain() {
    answer_all();
    ASSERT_TRUE(until([&] { return !interrupted_.empty(); }));
    interrupted_at_ = now_;
    EXPECT_EQ(interrupted_.back().goodbye, kGoodbye);
    ASSERT_TRUE(until([&] { return server_->engine.core->drain.is_over(); }));
  }
  void replace_server() {
    ASSERT_NO_FATAL_FAILURE(finish_drain());
    server_.reset();
    serve_at(address_);
  }
  [[nodiscard]] Buffer buffer(std::size_t size) const {
    spinwire::detail::Block* const block =
        client_->core->context.arena->allocate(spinwire::memory::PoolId::send, size);
    return block != nullptr ? spinwire::detail::make<Buffer>(block, size) : Buffer();
  }

  std::uint64_t interrupted_at_ = 0;
};

inline std::string name_of_transport(const testing::TestParamInfo<RpcTransport>& of) {
  return of.param == RpcTransport::automatic ? "Automatic" : "Connection";
}

}  // namespace rpc_session_reconnect_test
