// Clients of long calls that grant no credit for the replies. They cost a poll little, whatever
// their number, and the server gives them up in time.
#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "agent/raw_peer.h"
#include "rpc/bare_engine.h"
#include "rpc/long_calls.h"
#include "rpc/server_session.h"
#include "rpc/transport/connection_transport.h"

namespace rpc_owed_replies_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using raw_peer::message;
using raw_peer::Peer;
using spinwire::Endpoint;
using spinwire::agent::Agent;
using spinwire::rpc::ConnectionEnd;
using spinwire::rpc::kBlockedPerPoll;
using spinwire::wire::MessageKind;
using spinwire::wire::RpcMessageHeader;
using spinwire::wire::RpcMessageKind;
namespace control = spinwire::control;
namespace memory = spinwire::memory;
namespace rpc = spinwire::rpc;

constexpr std::uint32_t kWindow = 64;
constexpr spinwire::Method kUnknown = 99;
constexpr spinwire::Method kWritten =
    50;  ///< replies with kWrittenBytes, longer than an eager message
constexpr spinwire::Method kOffered = 51;         ///< replies with kOfferedBytes, the same
constexpr spinwire::Method kPlaced = 52;          ///< the same, for memory without a key
constexpr spinwire::Method kKept = 53;            ///< keeps the request, and never replies
constexpr std::size_t kWrittenBytes = 1'000'000;  ///< has a second besides the timeout
constexpr std::size_t kOfferedBytes = 3000;
constexpr Nanoseconds kTimeout = 2s;
constexpr Nanoseconds kBlockTimeout = 600ms;

/// Keeps all requests of a queue pair from its first WRITE of a reply on until release(), as a slow
/// network does.
struct HeldRequests {
  struct Request {
    ibv_qp* qp;
    ibv_send_wr wr;
    std::vector<ibv_sge> pieces;
  };
  explicit HeldRequests(ibv_context* device) : ops(device->ops) {
    self = this;
    plain = std::exchange(ops.post_send, [](ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
      return self->holds(qp, wr) ? 0 : self->plain(qp, wr, bad);
    });
  }
  HeldRequests(const HeldRequests&) = delete;
  HeldRequests& operator=(const HeldRequests&) = delete;
  ~HeldRequests() { release(); }
  bool holds(ibv_qp* qp, const ibv_send_wr* wr) {
    if (held.empty() && wr->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) return false;
    if (!held.empty() && held.front().qp != qp) return false;
    for (; wr != nullptr; wr = wr->next)
      held.push_back({qp, *wr, {wr->sg_list, wr->sg_list + wr->num_sge}});
    return true;
  }
  void release() {
    ops.post_send = plain;
    for (Request& each : held) {
      each.wr.next = nullptr;
      each.wr.sg_list = each.pieces.data();
      ibv_send_wr* bad = nullptr;
      EXPECT_EQ(plain(each.qp, &each.wr, &bad), 0);
    }
    held.clear();
  }
  ibv_context_ops& ops;
  int (*plain)(ibv_qp*, ibv_send_wr*, ibv_send_wr**) = nullptr;
  std::deque<Request> held;
  static inline HeldRequests* self = nullptr;
};

/// A client of long calls that grants what the test says, and the server's end of its connection.
struct Client {
  explicit Client(const std::uint64_t* ticks) : peer(Clock::manual(ticks)) {}
  Peer peer;
  Connection served;
  std::uint32_t session = 0;
  std::uint32_t sent = 0;
  std::uint32_t granted = 1;

  [[nodiscard]] bool grant(std::uint32_t more) { return peer.write_granted(granted += more); }
};

class RpcOwedReplies : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "the raw peer is its own device";
    Config c = long_call_config();
    c.connections.peer_timeout = kTimeout;
    c.connections.keepalive_interval = 100ms;
    c.connections.rendezvous_timeout = kBlockTimeout;
    server_ = std::make_unique<Bare>(c, &now_);
    ASSERT_TRUE(server_->core->serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
    for (const auto& [method, size] :
         {std::pair(kWritten, kWrittenBytes), {kOffered, kOfferedBytes}, {kPlaced, kOfferedBytes}})
      ASSERT_TRUE(server_->core->serve(
          method, [size = size](Request& r) { EXPECT_EQ(r.reply(Bytes(size)), Status::ok); }));
  }
  void TearDown() override {
    if (server_ == nullptr) return;
    for (auto& each : clients_) each->peer.close();
    server_->expect_clean();
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({}, [&] {
      now_ += 1000;
      (void)server_->core->poll();
      for (auto& each : clients_) {
        each->peer.poll();
        each->peer.control();
      }
      return done();
    });
  }
  void settle(int rounds = 100) {
    int left = rounds;
    (void)until([&] { return left-- == 0; });
  }
  [[nodiscard]] rpc::Rpc& calls() const { return *server_->core->calls; }
  [[nodiscard]] Agent* agent_of(const Client& c) const {
    return spinwire::agent::find_by_qpn(server_->core->context, c.served.endpoint()->qp_num);
  }
  /// A session of another host, all of whose calls use a connection. The client grants one credit.
  Client& add() {
    clients_.push_back(std::make_unique<Client>(&now_));
    Client& c = *clients_.back();
    const auto end = rpc::local_session_end(calls(), ++name_, kWindow, 0, false);
    const auto made = calls().dialogues.accept({}, *control::Address::parse("10.0.0.1:5"), end, {});
    EXPECT_TRUE(made) << made.error().message();
    c.session = static_cast<std::uint32_t>(made->subject);
    c.served = server_->core->prepare({}).value();
    EXPECT_TRUE(until([&] { return c.served.endpoint().has_value(); }));
    Endpoint mine = c.peer.open();
    mine.credits = 1;
    mine.eager_bytes = 1024;
    c.peer.join(*c.served.endpoint());
    EXPECT_TRUE(c.served.join(mine));
    EXPECT_TRUE(until([&] { return c.served.ready(); }));
    rpc::join_session(calls(), *rpc::find_server(calls(), c.session), *agent_of(c));
    return c;
  }
  /// Calls a method that is refused. The calls of a slot have numbers that grow by the window.
  void call(Client& c, std::uint32_t number, spinwire::Method method = kUnknown,
            const Bytes& request = {}) {
    ASSERT_TRUE(until([&] { return c.peer.granted() > c.sent; }));
    ++c.sent;
    const auto size = static_cast<std::uint32_t>(request.size());
    RpcMessageHeader call{number, method, RpcMessageKind::call, 0, size, 0, 0, 0};
    if (method == kPlaced) call.reply_capacity = 1u << 20;
    if (method == kWritten) {
      call.reply_capacity = kWrittenBytes;
      call.address = c.peer.offer(0, 0).address;
      call.rkey = c.peer.rkey();
    }
    const auto head = spinwire::wire::encode(call);
    Bytes body(head.begin(), head.end());
    body.insert(body.end(), request.begin(), request.end());
    ASSERT_TRUE(
        c.peer.send(message(MessageKind::data, body, spinwire::wire::message_flag::kWantCredit)));
  }
  /// Keeps why the connection ends.
  void watch(const Client& c) {
    auto& on_closed = agent_of(c)->handlers.on_closed;
    on_closed_ = on_closed;
    on_closed = [this](Connection which, const Error& error) {
      why_ = error.message();
      on_closed_(which, error);
    };
  }
  void expect_lost(const Client& c,
                   const char* why = "granted no credit for the replies to its calls") {
    EXPECT_NE(why_.find(why), std::string::npos) << why_;
    EXPECT_EQ(c.served.state(), ConnectionState::closed);
  }
  /// A long reply that waits for the client to fetch it uses the only credit; another reply waits.
  void call_for_offer(Client& c) {
    call(c, kWindow - 1, kOffered);
    ASSERT_TRUE(until([&] { return c.peer.heard.size() == 1; }));
    ASSERT_TRUE(spinwire::wire::is_offer(c.peer.heard[0].header.kind));
    call(c, kWindow);
    ASSERT_TRUE(until([&] { return end_of(c)->waiting == 1; }));
    watch(c);
  }
  /// Answers an offer, which is the message with this index.
  void answer(Client& c, std::size_t heard) {
    spinwire::wire::LocalOffer offer;
    const std::span<const std::byte> body = c.peer.heard[heard].body;
    ASSERT_TRUE(spinwire::wire::decode(body, offer));
    ASSERT_GT(c.peer.granted(), c.sent++);
    ASSERT_TRUE(c.peer.send(MessageKind::rendezvous_answer,
                            spinwire::wire::encode(spinwire::wire::RendezvousAnswer{offer.id})));
  }
  /// The first refusal uses the only credit; the one of the next call waits, in the last slot.
  void call_twice(Client& c) {
    call(c, kWindow - 1);
    ASSERT_TRUE(until([&] { return c.peer.heard.size() == 1; }));
    call(c, 2 * kWindow - 1);
    ASSERT_TRUE(until([&] { return end_of(c)->waiting == std::uint64_t{1} << (kWindow - 1); }));
  }
  [[nodiscard]] rpc::ConnectionServer* end_of(const Client& c) const {
    const rpc::ServerSession* const s = rpc::find_server(calls(), c.session);
    return s != nullptr ? s->connection.get() : nullptr;
  }
  /// The connections that wait for their turns, in order.
  [[nodiscard]] std::vector<const ConnectionEnd*> blocked() const {
    std::vector<const ConnectionEnd*> all;
    for (const ConnectionEnd& each : calls().blocked_connections) all.push_back(&each);
    return all;
  }
  [[nodiscard]] std::uint64_t allocations() const {
    const memory::Arena& arena = *server_->core->context.arena;
    return arena.stats(memory::PoolId::send).allocations +
           arena.stats(memory::PoolId::control).allocations;
  }
  /// Lets time pass in which the clients are heard. `each` runs in each step.
  template <typename Each>
  void rest(Nanoseconds time, Each&& each) {
    for (Nanoseconds passed{}; passed < time; passed += 20ms) {
      now_ += static_cast<std::uint64_t>(Nanoseconds(20ms).count());
      for (auto& c : clients_) (void)c->grant(0);
      settle(4);
      each();
    }
  }
  void rest(Nanoseconds time) {
    rest(time, [] {});
  }

  std::uint64_t now_ = 1'000'000'000;
  decltype(Agent::handlers.on_closed) on_closed_;
  std::string why_;  ///< the end of the connection whose callback on_closed_ was
  std::unique_ptr<Bare> server_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::uint32_t name_ = 0;
};

TEST_F(RpcOwedReplies, APollLooksAtFewConnectionsThatWaitForCredit) {
  constexpr std::size_t kClients = 3 * kBlockedPerPoll;
  for (std::size_t i = 0; i < kClients; ++i) call_twice(add());
  settle();
  // Each poll gives the first few their turns, which are in vain. They come last then.
  std::vector<const ConnectionEnd*> order = blocked();
  ASSERT_EQ(order.size(), kClients);
  for (int i = 0; i < 7; ++i) {
    (void)server_->core->poll();
    std::rotate(order.begin(), order.begin() + kBlockedPerPoll, order.end());
    EXPECT_TRUE(blocked() == order) << i;
    EXPECT_TRUE(calls().connection_queue.empty());
  }
  const std::uint64_t before = allocations();
  settle();
  EXPECT_EQ(allocations(), before) << "blocks for refusals that cannot be sent";
  server_->expect_clean();
}

TEST_F(RpcOwedReplies, CreditIsFoundWhileOthersWaitForTheirTurns) {
  constexpr std::size_t kClients = 3 * kBlockedPerPoll;
  for (std::size_t i = 0; i < kClients; ++i) call_twice(add());
  for (auto& each : clients_) {
    ASSERT_TRUE(each->grant(1));
    settle();
    EXPECT_EQ(each->peer.heard.size(), 2u);
    EXPECT_EQ(end_of(*each)->turn, ConnectionEnd::Turn::none);
    EXPECT_EQ(end_of(*each)->waiting, 0u);
  }
  EXPECT_TRUE(blocked().empty());
}

TEST_F(RpcOwedReplies, AMessageOfTheClientBringsItsTurnForward) {
  for (std::size_t i = 0; i < 3 * kBlockedPerPoll; ++i) call_twice(add());
  Client& c = *clients_.back();
  const rpc::ConnectionServer* const end = end_of(c);
  const auto head = spinwire::wire::encode(
      RpcMessageHeader{kWindow, kUnknown, RpcMessageKind::call, 0, 0, 0, 0, 0});
  ASSERT_GT(c.peer.granted(), c.sent);
  const auto taken = [&] { return spinwire::agent::messages_received(*agent_of(c)); };
  const std::uint64_t before = taken();
  ASSERT_TRUE(c.peer.send(message(MessageKind::data, head, 0, 4)));  // grants three more
  ASSERT_TRUE(until([&] {
    // So that it has no turn of its own in the poll that comes.
    if (taken() == before && end->turn == ConnectionEnd::Turn::blocked) {
      calls().blocked_connections.erase(*end_of(c));
      calls().blocked_connections.push_back(*end_of(c));
    }
    return taken() != before;
  }));
  EXPECT_EQ(end->waiting, 0u);
  ASSERT_TRUE(until([&] { return c.peer.heard.size() == 3; }));
}

TEST_F(RpcOwedReplies, SlotsTakeTurns) {
  Client& c = add();
  call(c, kWindow - 1);
  ASSERT_TRUE(until([&] { return c.peer.heard.size() == 1; }));
  for (const std::uint32_t slot : {2u, 1u, 0u, 5u, 4u}) call(c, kWindow + slot);
  ASSERT_TRUE(until([&] { return end_of(c)->waiting == 0b110111u; }));
  std::vector<std::uint32_t> numbers;
  for (std::size_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(c.grant(1));
    ASSERT_TRUE(until([&] { return c.peer.heard.size() == 2 + i; }));
    RpcMessageHeader header;
    std::span<const std::byte> payload;
    ASSERT_TRUE(spinwire::wire::decode(std::span(c.peer.heard.back().body), header, payload));
    numbers.push_back(header.number - kWindow);
    // A new call in a slot whose reply has gone does not go before those that wait.
    if (i == 0) call(c, 2 * kWindow);
  }
  EXPECT_EQ(numbers, (std::vector<std::uint32_t>{0, 1, 2, 4, 5}));
}

TEST_F(RpcOwedReplies, AReplyWaitsForCreditNoLongerThanTheTimeout) {
  Client& stuck = add();
  Client& other = add();
  call(other, kWindow - 1);
  call_twice(stuck);
  watch(stuck);
  rest(kTimeout - 200ms);
  EXPECT_TRUE(stuck.served.ready());
  rest(600ms);
  expect_lost(stuck);
  EXPECT_EQ(end_of(stuck), nullptr);
  EXPECT_TRUE(blocked().empty());
  EXPECT_TRUE(other.served.ready()) << "it is owed nothing";
}

TEST_F(RpcOwedReplies, AClientThatGrantsALittleKeepsItsConnection) {
  Client& c = add();
  call_twice(c);
  for (std::uint32_t slot = 0; slot < 8; ++slot) call(c, kWindow + slot);
  for (std::size_t i = 0; i < 4; ++i) {
    rest(kTimeout - 400ms);
    ASSERT_TRUE(c.served.ready()) << agent_of(c)->cause.message();
    ASSERT_TRUE(c.grant(1));
    ASSERT_TRUE(until([&] { return c.peer.heard.size() == 2 + i; }));
  }
}

// A client gives the credit back when it has the whole reply.
TEST_F(RpcOwedReplies, TheTimeOfALongWriteDoesNotCount) {
  Client& c = add();
  HeldRequests network(server_->core->context.device->context());
  call(c, kWindow - 1, kWritten);
  ASSERT_TRUE(until([&] { return !network.held.empty(); }));
  call(c, kWindow);
  ASSERT_TRUE(until([&] { return end_of(c)->waiting == 1; }));
  watch(c);
  rest(kTimeout + 600ms);
  ASSERT_TRUE(c.served.ready()) << why_;
  network.release();
  rest(kTimeout - 200ms);
  ASSERT_TRUE(c.served.ready()) << why_;
  rest(600ms);
  expect_lost(c);
}

TEST_F(RpcOwedReplies, AClientThatFetchesNoLongReplyHasMoreTime) {
  Client& c = add();
  call_for_offer(c);
  rest(kTimeout + kBlockTimeout - 200ms);
  ASSERT_TRUE(c.served.ready()) << why_;
  rest(600ms);
  expect_lost(c);
}

TEST_F(RpcOwedReplies, AnAnswerToAnOfferBeginsTheTimeAnew) {
  Client& c = add();
  call_for_offer(c);
  rest(kTimeout + kBlockTimeout - 200ms);
  answer(c, 0);
  rest(kTimeout - 200ms);
  ASSERT_TRUE(c.served.ready()) << why_;
  rest(600ms);
  expect_lost(c);
}

// Few offers wait, and the client has credit, so that nothing else is short.
TEST_F(RpcOwedReplies, AClientThatFetchesNoPlacedReplyIsLost) {
  Client& stuck = add();
  Client& other = add();
  ASSERT_TRUE(stuck.grant(8));
  call(stuck, kWindow - 1, kPlaced);
  ASSERT_TRUE(until([&] { return stuck.peer.heard.size() == 1; }));
  ASSERT_TRUE(spinwire::wire::is_offer(stuck.peer.heard[0].header.kind));
  EXPECT_FALSE(agent_of(stuck)->liveness.owes_replies);
  watch(stuck);
  std::uint32_t calls = 0;
  const auto serve_other = [&] {
    call(other, kWindow - 1 + calls++ * kWindow);
    EXPECT_TRUE(until([&] { return other.peer.heard.size() == calls; })) << calls;
    EXPECT_TRUE(other.grant(1));  // one at a time, as it would return more
  };
  serve_other();
  rest(kTimeout + kBlockTimeout - 200ms);
  EXPECT_TRUE(stuck.served.ready()) << why_;
  serve_other();
  rest(600ms);
  expect_lost(stuck, "answered no offer of a rendezvous message");
  serve_other();
  EXPECT_TRUE(other.served.ready());
}

// Its answer needs credit, which we do not grant meanwhile.
TEST_F(RpcOwedReplies, AClientHasTimeWhileWeLackReceivesForItsAnswers) {
  std::vector<spinwire::BufferSlice> kept;
  ASSERT_TRUE(server_->core->serve(kKept, [&kept](Request& r) {
    (void)r.defer();
    kept.push_back(r.keep());
  }));
  Client& c = add();
  ASSERT_TRUE(c.grant(8));
  call(c, kWindow - 1, kPlaced);
  ASSERT_TRUE(until([&] { return c.peer.heard.size() == 1; }));
  ASSERT_TRUE(spinwire::wire::is_offer(c.peer.heard[0].header.kind));
  watch(c);
  const auto lacks = [&] { return agent_of(c)->credit.waits_for_receives; };
  memory::Arena& arena = *server_->core->context.arena;
  const std::size_t bytes = server_->core->context.config.connections.eager_bytes;
  std::vector<spinwire::detail::Block*> others;
  while (auto* const block = arena.allocate(memory::PoolId::receive, bytes))
    others.push_back(block);
  for (std::uint32_t slot = 0; slot + 1 < kWindow && !lacks(); ++slot) {
    ASSERT_NO_FATAL_FAILURE(call(c, kWindow + slot, kKept, Bytes(100)));
    ASSERT_TRUE(until([&] { return kept.size() == slot + 1; }));
  }
  ASSERT_TRUE(lacks());
  rest(2 * (kTimeout + kBlockTimeout));
  ASSERT_TRUE(c.served.ready()) << why_;
  EXPECT_TRUE(lacks());
  kept.clear();
  for (auto* const block : others) spinwire::detail::release(block);
  settle();
  EXPECT_FALSE(lacks());
  rest(kTimeout + kBlockTimeout - 200ms);
  ASSERT_TRUE(c.served.ready()) << why_;
  rest(600ms);
  expect_lost(c, "answered no offer of a rendezvous message");
}

TEST_F(RpcOwedReplies, AClientThatFetchesPlacedRepliesSlowlyIsNotLost) {
  Client& c = add();
  ASSERT_TRUE(c.grant(8));
  constexpr std::uint32_t kCalls = 4;
  for (std::uint32_t i = 0; i < kCalls; ++i) call(c, kWindow + i, kPlaced);
  ASSERT_TRUE(until([&] { return c.peer.heard.size() == kCalls; }));
  watch(c);
  for (std::uint32_t i = 0; i < kCalls; ++i) {
    rest(kTimeout + kBlockTimeout - 400ms);
    ASSERT_TRUE(c.served.ready()) << why_;
    answer(c, i);
  }
  rest(2 * kTimeout);
  EXPECT_TRUE(c.served.ready()) << why_;
}

// A poll looks at the clock when it begins, so what it sends after a check is older than the check.
TEST_F(RpcOwedReplies, AReplyAfterACheckIsProgress) {
  Client& c = add();
  call_twice(c);
  call(c, kWindow);
  watch(c);
  for (std::size_t i = 0; i < 2; ++i) {
    rest(kTimeout - 400ms);
    ASSERT_TRUE(c.served.ready()) << why_;
    Agent* const a = agent_of(c);
    ++now_;
    spinwire::agent::check_liveness(server_->core->context, *a);
    ASSERT_TRUE(c.grant(1));
    rpc::run_connection_queue(calls());
    ASSERT_LT(a->activity.last_sent, a->liveness.last_check);
    ASSERT_EQ(spinwire::agent::visible_credits(*a), 0u);
    ASSERT_TRUE(until([&] { return c.peer.heard.size() == 2 + i; }));
  }
}

TEST_F(RpcOwedReplies, AClientThatIsOwedNothingMayGrantNothing) {
  Client& c = add();
  call(c, kWindow - 1);
  ASSERT_TRUE(until([&] { return c.peer.heard.size() == 1; }));
  rest(2 * kTimeout);
  EXPECT_TRUE(c.served.ready());
}

}  // namespace
}  // namespace rpc_owed_replies_test
