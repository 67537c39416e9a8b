// Peers that hang, die, or are replaced at their address, while operations and calls are under way.
// Each costs its own connection and session, in time, and nothing else. Peers that a network cuts
// off, and two machines, are in programs/lost_peers.cc.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attack/victim.h"

namespace attack_test::lost_peers {
namespace {

constexpr auto kPeerTimeout = 60s;
constexpr auto kKeepalive = 1s;
// The client's time hardly moves while its peers live, however long they are off their processors.
constexpr std::uint64_t kSlowStep = 1'000;  // ns at each turn; what is lost is sent again
constexpr std::uint64_t kStep = 5'000'000;

Config watchful() {
  Config c = rpc_test::rpc_config();
  c.connections.keepalive_interval = kKeepalive;
  c.connections.peer_timeout = kPeerTimeout;
  c.rpc.call_timeout = 1h;
  return c;
}

/// Echoes calls, and takes others and messages without an answer, until it is killed.
int serve(const std::string& address, int in, int out) {
  Config config = rpc_test::rpc_config();
  config.connections.peer_timeout = 1h;  // the client's time is not this process's
  std::vector<spinwire::PendingCall> held;
  Node node(config);
  node.listen(address);
  EXPECT_TRUE(node.engine.serve(kEcho, [](spinwire::Request& r) { (void)r.reply(r.bytes()); }));
  EXPECT_TRUE(
      node.engine.serve(kHold, [&held](spinwire::Request& r) { held.push_back(r.defer()); }));
  write_line(out, node.listener.address());
  while (command(in) != 'q')
    for (int i = 0; i < 64; ++i) (void)node.poll();
  return 0;
}

/// A connection and a session with one server, and how they ended.
struct Relation {
  Relation(Node& client, const std::string& address, const std::uint64_t& now) {
    spinwire::ConnectOptions to_server;
    to_server.handlers.on_closed = [&](Connection, const Error& e) {
      note(connection_end, e, now);
    };
    auto connected = client.engine.connect(address, to_server);
    EXPECT_TRUE(connected) << connected.error().message();
    if (connected) connection = *connected;
    spinwire::SessionOptions options;
    options.on_closed = [&](spinwire::Session, const Error& e) { note(session_end, e, now); };
    auto opened = client.engine.open_session(address, options);
    EXPECT_TRUE(opened) << opened.error().message();
    if (opened) session = *opened;
  }
  [[nodiscard]] bool is_ready() const { return connection.ready() && session.ready(); }
  [[nodiscard]] bool is_over() const { return connection_end && session_end; }
  /// Starts a call. Its end is in `answers`.
  void call(spinwire::Method method) {
    const auto word = std::byte{7};
    EXPECT_EQ(session.call(method, {&word, 1},
                           [this](const spinwire::Reply& r) { answers.push_back(r.status()); }),
              Status::ok);
  }

  struct End {
    Error error;
    std::uint64_t at;
  };
  Connection connection;
  spinwire::Session session;
  std::optional<End> connection_end, session_end;
  std::vector<Status> answers;

 private:
  static void note(std::optional<End>& end, const Error& e, std::uint64_t now) {
    EXPECT_FALSE(end.has_value()) << "it ends twice";
    end = End{e, now};
  }
};

enum class Loss : char { hangs, is_killed, is_replaced };

/// A client of an honest server and of one that it loses.
class AttackBySilence : public testing::TestWithParam<Loss> {
 protected:
  void SetUp() override {
    honest_.listen();
    ASSERT_TRUE(
        honest_.engine.serve(kEcho, [](spinwire::Request& r) { (void)r.reply(r.bytes()); }));
    address_ = server_.line();
    ASSERT_NE(address_, "");
    stays_ = std::make_unique<Relation>(client_, honest_.listener.address(), now_);
    goes_ = std::make_unique<Relation>(client_, address_, now_);
    ASSERT_TRUE(turn_until(kSlowStep, [&] { return stays_->is_ready() && goes_->is_ready(); }));
  }
  template <typename Done>
  bool turn_until(std::uint64_t step, Done&& done) {
    return until({&client_, &honest_}, [&] {
      now_ += step;
      return done();
    });
  }
  /// A call and a message that succeed, then some whose end the server does not live to see.
  void use() {
    goes_->call(kEcho);
    ASSERT_TRUE(turn_until(kSlowStep, [&] { return goes_->answers.size() == 1; }));
    ASSERT_EQ(goes_->answers[0], Status::ok);
    const Buffer b = client_.filled(200, 1);
    const auto send = [&] {
      return client_.tally.run(
          [&](CompletionCallback done) { return goes_->connection.send(b.slice(), done); });
    };
    ASSERT_EQ(send(), Status::ok);
    ASSERT_TRUE(turn_until(kSlowStep, [&] { return client_.tally.idle(); }));
    for (int i = 0; i < 4; ++i) goes_->call(kHold);
    lose();
    for (int i = 0; i < 4; ++i) (void)send();  // on an adapter their credit may not be back yet
  }
  /// The server is lost when this returns.
  void lose() {
    if (GetParam() == Loss::hangs) {
      server_.signal(SIGSTOP);
      int status = 0;
      ASSERT_EQ(::waitpid(server_.pid(), &status, WUNTRACED), server_.pid());
      ASSERT_TRUE(WIFSTOPPED(status));
      return;
    }
    server_.kill(SIGKILL);
    if (GetParam() == Loss::is_killed) return;
    successor_ = std::make_unique<Child>([&](int in, int out) { return serve(address_, in, out); });
    ASSERT_EQ(successor_->line(), address_);
  }
  void expect_lost(const Relation::End& end, std::uint64_t since) const {
    const std::string text = end.error.message();
    EXPECT_EQ(end.error.status, Status::peer_lost) << text;
    // An interval until the silence begins to count, one until the last check, and the time for a
    // question to the control port at the peer's address.
    const std::chrono::nanoseconds most = kPeerTimeout + 2 * kKeepalive + kPeerTimeout / 8;
    EXPECT_LE(end.at - since, static_cast<std::uint64_t>(most.count()) + 20 * kStep) << text;
    const bool says_hangs = text.find("hangs") != text.npos;
    EXPECT_EQ(says_hangs, GetParam() == Loss::hangs) << text;
    const bool says_gone = text.find("process is gone") != text.npos ||
                           text.find("process has ended") != text.npos ||
                           text.find("another engine") != text.npos;
    EXPECT_EQ(says_gone, GetParam() != Loss::hangs) << text;
  }

  // Their callbacks run until the client's engine is destroyed.
  std::uint64_t now_ = 1'000'000'000;
  std::string address_;
  std::unique_ptr<Relation> stays_, goes_;
  Child server_{[](int in, int out) { return serve("127.0.0.1:0", in, out); }};
  std::unique_ptr<Child> successor_;
  Node honest_{watchful(), &now_};
  Node client_{watchful(), &now_};
};

TEST_P(AttackBySilence, EndsItsOwnConnectionAndSessionInTimeAndNoOther) {
  ASSERT_NO_FATAL_FAILURE(use());
  const std::uint64_t since = now_;
  ASSERT_TRUE(turn_until(kStep, [&] { return goes_->is_over() && client_.tally.idle(); }));
  expect_lost(*goes_->connection_end, since);
  expect_lost(*goes_->session_end, since);
  ASSERT_EQ(goes_->answers.size(), 5u) << "each call ends once";
  for (std::size_t i = 1; i < goes_->answers.size(); ++i)
    EXPECT_EQ(goes_->answers[i], Status::peer_lost);
  // A direct message ends when it is sent, so more than the first may have succeeded.
  EXPECT_GE(client_.tally.ended(Status::ok), 1u);
  client_.tally.expect_exact();

  EXPECT_TRUE(stays_->is_ready());
  stays_->call(kEcho);
  ASSERT_TRUE(turn_until(kSlowStep, [&] { return stays_->answers.size() == 1; }));
  EXPECT_EQ(stays_->answers[0], Status::ok);
  if (successor_ != nullptr) {
    Relation again(client_, address_, now_);
    ASSERT_TRUE(turn_until(kSlowStep, [&] { return again.is_ready(); }));
    again.call(kEcho);
    ASSERT_TRUE(turn_until(kSlowStep, [&] { return !again.answers.empty(); }));
    EXPECT_EQ(again.answers[0], Status::ok);
    EXPECT_EQ(again.session.close(), Status::ok);
    EXPECT_EQ(again.connection.close(), Status::ok);
    ASSERT_TRUE(turn_until(kSlowStep, [&] { return again.is_over(); }));
  }
  const auto audit = client_.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
}

INSTANTIATE_TEST_SUITE_P(OfAPeerThat, AttackBySilence,
                         testing::Values(Loss::hangs, Loss::is_killed, Loss::is_replaced),
                         [](const auto& way) {
                           return way.param == Loss::hangs       ? "Hangs"
                                  : way.param == Loss::is_killed ? "IsKilled"
                                                                 : "IsReplaced";
                         });

}  // namespace
}  // namespace attack_test::lost_peers
