// Calls of a session that reconnects, whose requests found no room to be sent before their server
// was lost: their handlers cannot have run.
#include <algorithm>

#include "rpc/leaving_server.h"

namespace rpc_session_reconnect_test {
namespace {

namespace rpc = spinwire::rpc;

class RpcUnsentCalls : public RpcLeavingServer {
 protected:
  /// A session with a wide window, whose server polls no more.
  void begin_session(const Reconnect& reconnect = kManyAttempts) {
    serve_at("127.0.0.1:0");
    SessionOptions how = options(reconnect);
    how.when_not_ready = WhenNotReady::wait;
    how.window = 64;
    ASSERT_NO_FATAL_FAILURE(open(how));
    ASSERT_EQ(begin(kCount, filled(20, 999)), Status::ok);  // its reply opens the whole window
    ASSERT_TRUE(until([&] { return all_ended(); }));
    ended_.clear();
    runs_.clear();
    server_->order.clear();
    last_id_ = record().last_call_id;
    hung_ = std::move(server_);
  }
  enum class Place : std::uint8_t { sent, unsent, backlog };
  /// Where the calls of begin() are.
  [[nodiscard]] std::vector<Place> places() const {
    std::vector<Place> found(ended_.size(), Place::backlog);
    const auto note = [&](std::uint32_t id, bool is_sent) {
      found.at(id - last_id_ - 1) = is_sent ? Place::sent : Place::unsent;
    };
    const rpc::ClientSession& c = record();
    for (std::uint32_t slot = 0; slot < c.window; ++slot) {
      if ((c.free_slots >> slot & 1) == 0)
        note(c.slots[slot].id, c.slots[slot].resends != rpc::kNotSent);
    }
    const rpc::ConnectionClient* const b = c.connection.get();
    for (std::uint32_t slot = 0; b != nullptr && slot < b->window; ++slot) {
      using Sent = rpc::ConnectionClientSlot::Sent;
      if ((b->active >> slot & 1) != 0)
        note(b->slots[slot].call.id, b->slots[slot].sent != Sent::nothing);
    }
    return found;
  }

  /// Whether a call may wait for the next server: every second one.
  static bool may_wait(std::size_t number) { return number % 2 == 0; }
  /// Begins calls until the backlog is full, and learns where they are.
  void begin_calls() {
    CallOptions at_once;
    at_once.when_not_ready = WhenNotReady::fail;
    // Longer than the MTU, so that only a direct datagram carries it; or within a message's header.
    const std::size_t size = record().transport == rpc::Transport::datagram ? 20'000 : 1000;
    for (std::uint32_t i = 0;; ++i) {
      requests_.push_back(filled(size, i));
      if (begin(kCount, requests_[i], may_wait(i) ? CallOptions() : at_once) != Status::ok) break;
    }
    turns(20);
    places_ = places();
    for (const Place place : {Place::sent, Place::unsent, Place::backlog})
      ASSERT_GT(std::count(places_.begin(), places_.end(), place), 4);
  }
  void cut_connection() {
    rpc::Rpc& calls = *client_->core->calls;
    spinwire::agent::fail(calls.context, *rpc::agent_of(calls, *record().connection),
                          {Status::peer_lost, "test", "cut", "none"});
    ASSERT_TRUE(until([&] { return ended_[0].times == 1; }));
    client_->expect_clean();
  }
  /// The numbers of the calls for which `chosen` holds.
  template <typename Chosen>
  [[nodiscard]] std::vector<std::size_t> numbers(Chosen&& chosen) const {
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (chosen(i)) found.push_back(i);
    }
    return found;
  }
  /// The numbers of the calls that the server has run, in their order.
  [[nodiscard]] std::vector<std::size_t> ran() const {
    std::vector<std::size_t> found;
    for (const Bytes& bytes : server_->order) {
      const auto at = std::find(requests_.begin(), requests_.end(), bytes);
      found.push_back(static_cast<std::size_t>(at - requests_.begin()));
    }
    return found;
  }

  std::uint32_t last_id_ = 0;
  std::vector<Bytes> requests_;  ///< of the calls by their numbers, and one more
  std::vector<Place> places_;
  std::unique_ptr<Server> hung_;
};

INSTANTIATE_TEST_SUITE_P(Transports, RpcUnsentCalls,
                         testing::Values(RpcTransport::automatic, RpcTransport::connection),
                         name_of_transport);

TEST_P(RpcUnsentCalls, WaitForTheNextServerIfTheyMay) {
  ASSERT_NO_FATAL_FAILURE(begin_session());
  ASSERT_NO_FATAL_FAILURE(begin_calls());
  ASSERT_TRUE(until([&] { return !interrupted_.empty(); }, kMillisecond));
  EXPECT_EQ(interrupted_[0].status, Status::peer_lost) << interrupted_[0].message();
  const auto waits = [this](std::size_t i) { return places_[i] != Place::sent && may_wait(i); };
  for (std::size_t i = 0; i < ended_.size(); ++i) {
    EXPECT_EQ(ended_[i].times, waits(i) ? 0 : 1) << i;
    const bool was_sent = places_[i] == Place::sent;
    if (!waits(i)) {
      EXPECT_EQ(ended_[i].status, was_sent ? Status::peer_lost : Status::not_connected) << i;
    }
  }
  EXPECT_EQ(session_.snapshot().backlog, numbers(waits).size());
  client_->expect_clean();
  hung_->silence();
  hung_.reset();
  serve_at(address_);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  for (std::size_t i = 0; i < ended_.size(); ++i) {
    if (waits(i)) {
      EXPECT_EQ(ended_[i].status, Status::ok) << i;
    }
  }
  EXPECT_EQ(ran(), numbers(waits)) << "in their order, and no other call";
  finish();
}

/// The connection is lost, but not the server: the session stays ready, so all calls may wait.
TEST_P(RpcUnsentCalls, GoOverTheNextConnection) {
  ASSERT_NO_FATAL_FAILURE(begin_session());
  if (record().transport != rpc::Transport::connection) GTEST_SKIP() << "datagrams alone";
  ASSERT_NO_FATAL_FAILURE(begin_calls());
  ASSERT_NO_FATAL_FAILURE(cut_connection());
  server_ = std::move(hung_);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  const auto was_sent = [this](std::size_t i) { return places_[i] == Place::sent; };
  for (std::size_t i = 0; i < ended_.size(); ++i)
    EXPECT_EQ(ended_[i].status, was_sent(i) ? Status::peer_lost : Status::ok) << i;
  std::vector<std::size_t> later = ran();
  std::erase_if(later, was_sent);  // the server has got these, too, and may have run them
  EXPECT_EQ(later, numbers([&](std::size_t i) { return !was_sent(i); }));
  EXPECT_TRUE(interrupted_.empty());
  finish();
}

/// The backlog of such a session has no room for them beside the calls that wait already.
TEST_P(RpcUnsentCalls, EndWithTheConnectionOfASessionThatIsNotOpenedAgain) {
  ASSERT_NO_FATAL_FAILURE(begin_session({}));
  if (record().transport != rpc::Transport::connection) GTEST_SKIP() << "datagrams alone";
  ASSERT_NO_FATAL_FAILURE(begin_calls());
  ASSERT_NO_FATAL_FAILURE(cut_connection());
  const auto waits = [this](std::size_t i) { return places_[i] == Place::backlog; };
  for (std::size_t i = 0; i < ended_.size(); ++i) EXPECT_EQ(ended_[i].times, waits(i) ? 0 : 1) << i;
  server_ = std::move(hung_);
  ASSERT_TRUE(until([&] { return all_ended(); }, kMillisecond));
  for (std::size_t i = 0; i < ended_.size(); ++i)
    EXPECT_EQ(ended_[i].status, waits(i) ? Status::ok : Status::peer_lost) << i;
  finish();
}

}  // namespace
}  // namespace rpc_session_reconnect_test
