// Which refusals end a connection or session that reconnects, and which are retried.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/internals.h"
#include "control/loopback.h"
#include "engine/engine_core.h"
#include "rpc/rpc_ends.h"
#include "wire/handshake.h"

namespace refused_attempts_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using spinwire::Goodbye;
using spinwire::GoodbyeReason;
using spinwire::PeerRequest;
using spinwire::Reconnect;
using spinwire::control::ListenSocket;
using spinwire::detail::core_of;
using spinwire::wire::Refuse;

constexpr Reconnect kTwoAttempts{2, 1ms, 2ms};
constexpr Reconnect kManyAttempts{1'000'000, 1ms, 4ms};

/// What is tried. Either is to behave in the same way.
enum class Kind { connection, session };

std::string name_of(const testing::TestParamInfo<Kind>& info) {
  return info.param == Kind::connection ? "Connection" : "Session";
}

/// A client whose connection or session reconnects.
struct Client : Node {
  explicit Client(Kind what, const Config& config = rpc_config()) : Node(config), kind(what) {}
  void begin(const std::string& address, const Reconnect& reconnect) {
    const auto interrupted = [this](auto, const Error& e) { interruptions.push_back(e); };
    const auto is_ready = [this](auto) { ++times_ready; };
    const auto ended = [this](auto, const Error& e) { ends.push_back(e); };
    if (kind == Kind::connection) {
      ConnectOptions options;
      options.handlers.on_ready = is_ready;
      options.handlers.on_closed = ended;
      options.handlers.on_interrupted = interrupted;
      options.reconnect = reconnect;
      const auto made = engine.connect(address, options);
      ASSERT_TRUE(made) << made.error().message();
      connection = *made;
    } else {
      SessionOptions options;
      options.on_ready = is_ready;
      options.on_closed = ended;
      options.on_interrupted = interrupted;
      options.reconnect = reconnect;
      const auto made = engine.open_session(address, options);
      ASSERT_TRUE(made) << made.error().message();
      session = *made;
    }
  }
  [[nodiscard]] bool is_ready() const {
    return kind == Kind::connection ? connection.ready() : session.ready();
  }
  void close() {
    EXPECT_EQ(kind == Kind::connection ? connection.close() : session.close(), Status::ok);
  }
  const Kind kind;
  Connection connection;
  Session session;
  int times_ready = 0;
  std::vector<Error> ends, interruptions;
};

/// A server that gives each attempt the same refusal.
class RefusingServer {
 public:
  explicit RefusingServer(const Refuse& refusal)
      : refusal_(refusal), socket_(loopback::listener()) {}
  std::string address() { return socket_.local().str(); }
  /// Answers what came. Returns the number of attempts that were refused.
  std::size_t answer() {
    for (;;) {
      auto guest = socket_.accept();
      EXPECT_TRUE(guest);
      if (!guest || !*guest) break;
      guests_.push_back(std::move((*guest)->fd));
    }
    for (; refused_ < guests_.size(); ++refused_) {
      std::array<std::byte, 1024> request;
      if (::recv(guests_[refused_].get(), request.data(), request.size(), MSG_DONTWAIT) <= 0) break;
      const auto frame = spinwire::wire::encode(refusal_);
      const auto bytes = frame.bytes();
      EXPECT_EQ(::send(guests_[refused_].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(bytes.size()));
    }
    return refused_;
  }

 private:
  Refuse refusal_;
  ListenSocket socket_;
  std::vector<spinwire::base::UniqueFd> guests_;
  std::size_t refused_ = 0;
};

class EngineRefusedAttempts : public testing::TestWithParam<Kind> {
 protected:
  /// The attempts that a refusal gets of a client that makes up to three; `end` is how it ended.
  static std::size_t attempts_at(const Refuse& refusal, Error& end) {
    RefusingServer server(refusal);
    Client client(GetParam());
    client.begin(server.address(), kTwoAttempts);
    std::size_t attempts = 0;
    EXPECT_TRUE(until({&client}, [&] {
      attempts = server.answer();
      return !client.ends.empty();
    }));
    if (client.ends.empty()) return 0;
    end = client.ends[0];
    EXPECT_EQ(client.ends.size(), 1u);
    EXPECT_EQ(client.times_ready, 0);
    return attempts;
  }
};

INSTANTIATE_TEST_SUITE_P(Kinds, EngineRefusedAttempts,
                         testing::Values(Kind::connection, Kind::session), name_of);

TEST_P(EngineRefusedAttempts, EachStatusIsFinalOrRetried) {
  constexpr Status kRetried[] = {
      Status::would_block,  Status::no_buffer,   Status::not_connected,  Status::flushed,
      Status::peer_lost,    Status::timed_out,   Status::refused,        Status::no_memory,
      Status::in_use,       Status::limit,       Status::system,         Status::remote_access,
      Status::remote_error, Status::local_error, Status::unauthenticated};
  for (int i = 1; i < spinwire::kStatusCount; ++i) {
    const auto status = static_cast<Status>(i);
    const bool is_retried =
        std::find(std::begin(kRetried), std::end(kRetried), status) != std::end(kRetried);
    Error end;
    const std::size_t attempts =
        attempts_at(spinwire::wire::make_refuse(status, "some reason"), end);
    EXPECT_EQ(attempts, is_retried ? 3u : 1u) << to_string(status);
    EXPECT_EQ(end.status, status);
    EXPECT_EQ(is_retryable(end), is_retried) << end.message();
    EXPECT_NE(end.found.find("some reason"), std::string::npos) << end.message();
  }
}

TEST_P(EngineRefusedAttempts, AnApplicationsRefusalIsFinalUnlessItInvitesBack) {
  for (const Status status : {Status::refused, Status::limit, Status::peer_lost}) {
    Refuse refusal = spinwire::wire::make_refuse(status, "not you", 0);
    Error end;
    EXPECT_EQ(attempts_at(refusal, end), 1u) << to_string(status);
    EXPECT_EQ(end.code, 0u);
    EXPECT_FALSE(is_retryable(end));
    refusal.goodbye = {GoodbyeReason::overloaded, 1ms};
    EXPECT_EQ(attempts_at(refusal, end), 3u) << to_string(status);
    EXPECT_EQ(end.code, 0u);
    EXPECT_TRUE(is_retryable(end));
  }
}

/// A server whose application accepts nobody, if it is told so.
struct Server : Node {
  Server() : Node(rpc_config()) {
    EXPECT_TRUE(engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
  }
  void listen_at(const std::string& address) {
    ListenOptions options;
    options.handlers = handlers();
    const auto ask = [this](PeerRequest& request) {
      if (is_unwilling) return request.refuse(7, "no more of you");
      request.accept();
    };
    options.on_connect_request = ask;
    options.on_session_request = ask;
    auto made = engine.listen(address, options);
    ASSERT_TRUE(made) << made.error().message();
    listener = std::move(*made);
  }
  bool is_unwilling = false;
};

// A request that came just before it finds no listener, and is refused with "try again".
TEST_P(EngineRefusedAttempts, AListenerThatComesBackIsFoundAgain) {
  Server server;
  server.listen_at("127.0.0.1:0");
  const std::string address = server.listener.address();
  Client client(GetParam());
  client.begin(address, kManyAttempts);
  // Accepts the TCP connection: until the client polls, nothing else comes.
  ASSERT_TRUE(until({&server}, [&] { return core_of(server.engine)->control.handshakes() == 1; }));
  server.listener = Listener();
  ASSERT_TRUE(
      until({&server, &client}, [&] { return server.engine.stats().handshakes_refused == 1; }));
  for (int i = 0; i < 1000; ++i) (void)(server.poll() + client.poll());
  EXPECT_TRUE(client.ends.empty());
  server.listen_at(address);
  ASSERT_TRUE(until({&server, &client}, [&] { return client.is_ready(); }));
  EXPECT_EQ(client.times_ready, 1);
  EXPECT_TRUE(client.interruptions.empty());
  client.close();
  EXPECT_TRUE(until({&server, &client}, [&] { return client.ends.size() == 1; }));
}

TEST_P(EngineRefusedAttempts, AListenerThatIsGoneForGoodCostsTheAttempts) {
  std::string address;
  {
    Server server;
    server.listen_at("127.0.0.1:0");
    address = server.listener.address();
  }
  Client client(GetParam());
  client.begin(address, kTwoAttempts);
  ASSERT_TRUE(until({&client}, [&] { return client.ends.size() == 1; }));
  EXPECT_EQ(client.ends[0].status, Status::refused) << client.ends[0].message();
  EXPECT_TRUE(is_retryable(client.ends[0]));
  EXPECT_NE(client.ends[0].found.find("2 attempts to reconnect failed"), std::string::npos)
      << client.ends[0].message();
}

TEST_P(EngineRefusedAttempts, TheFinalReasonIsToldAndWhatCameBefore) {
  Client client(GetParam());
  std::string address;
  {
    Server server;
    server.listen_at("127.0.0.1:0");
    address = server.listener.address();
    client.begin(address, kManyAttempts);
    ASSERT_TRUE(until({&server, &client}, [&] { return client.is_ready(); }));
    const auto begun = server.engine.drain(1h, {});
    ASSERT_TRUE(begun) << begun.error().message();
    ASSERT_TRUE(until({&server, &client}, [&] { return client.interruptions.size() == 1; }));
  }
  Server server;
  server.is_unwilling = true;
  server.listen_at(address);
  ASSERT_TRUE(until({&server, &client}, [&] { return client.ends.size() == 1; }));
  const Error& end = client.ends[0];
  EXPECT_EQ(end.status, Status::refused) << end.message();
  EXPECT_EQ(end.code, 7u);
  EXPECT_EQ(end.goodbye, Goodbye{});
  EXPECT_FALSE(is_retryable(end));
  EXPECT_NE(end.found.find("no more of you"), std::string::npos) << end.message();
  // The goodbye to a connection was no error.
  EXPECT_EQ(end.found.find("before that: ") != std::string::npos, GetParam() == Kind::session)
      << end.message();
  EXPECT_EQ(server.engine.stats().handshakes_refused, 1u);
}

}  // namespace
}  // namespace refused_attempts_test
