// An engine that many raw peers besiege: they do not answer, or grant nothing.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "agent/hostile_peer.h"

namespace hostile_peer {

using spinwire::agent::Agent;
using spinwire::control::Address;

/// A raw peer, and the engine's end of its connection.
struct Stranger {
  Peer peer;
  Connection victim;
};

/// An engine with an honest connection, and many to raw peers.
struct Besieged : Attacked {
  explicit Besieged(const Config& c = hostile_config()) : Attacked(c) {}

  template <typename Done>
  bool until(Done&& done) {
    return Attacked::until([&] {
      for (auto& each : strangers) {
        each->peer.poll();
        each->peer.control();
      }
      return done();
    });
  }
  /// Connects one more raw peer; `change` may change its endpoint.
  template <typename Change>
  Stranger& add(Change&& change) {
    auto made = std::make_unique<Stranger>();
    Stranger& s = *made;
    strangers.push_back(std::move(made));
    PrepareOptions options;
    options.handlers = node.handlers();
    s.victim = *node.engine.prepare(options);
    EXPECT_TRUE(until([&] { return s.victim.endpoint().has_value(); }));
    Endpoint mine = s.peer.open();
    change(mine);
    s.peer.join(*s.victim.endpoint());
    EXPECT_TRUE(s.victim.join(mine));
    EXPECT_TRUE(until([&] { return s.victim.ready(); }));
    return s;
  }
  Stranger& add() {
    return add([](Endpoint&) {});
  }
  Stranger& add_without_credit() {
    return add([](Endpoint& e) { e.credits = 1; });
  }
  /// Counts a raw peer for one and the same host of the network.
  Stranger& join_host(Stranger& s) {
    spinwire::agent::use_account_of(context(), agent_of(s), *Address::parse("10.0.0.1:7"));
    return s;
  }
  Stranger& add_of_host() { return join_host(add()); }
  Agent& agent_of(const Stranger& s) {
    Agent* const a = spinwire::agent::find_by_qpn(context(), s.victim.endpoint()->qp_num);
    EXPECT_NE(a, nullptr);
    return *a;
  }
  /// Asks for memory that the engine refuses, so that it owes an answer.
  static bool ask(Stranger& s) {
    return s.peer.send(MessageKind::lease_request,
                       wire::encode(wire::LeaseRequest{1ull << 40, 1'000'000, 1, 8, 3}));
  }
  /// The first answer uses the only credit; the second waits.
  void ask_twice(Stranger& s) {
    ASSERT_TRUE(ask(s));
    ASSERT_TRUE(until([&] { return s.peer.granted() == 2; }));
    ASSERT_TRUE(ask(s));
  }
  [[nodiscard]] spinwire::agent::EngineContext& context() {
    return spinwire::detail::core_of(node.engine)->context;
  }
  /// Checks that the honest connection still gets answers to its control messages.
  void borrow() {
    std::optional<Status> got;
    spinwire::LeaseRefusal refusal{};
    ASSERT_TRUE(until([&] {
      return honest.client.request_memory(64, {}, [&](spinwire::LeaseReply& r) {
        got = r.status;
        refusal = r.refusal;
      }) == Status::ok;
    }));
    ASSERT_TRUE(until([&] { return got.has_value(); }));
    EXPECT_EQ(*got, Status::ok) << to_string(refusal);
  }
  void leave() {
    for (auto& each : strangers) each->peer.close();
    for (auto& each : strangers) (void)each->victim.close();
    EXPECT_TRUE(until([&] { return node.engine.stats().connections == 1; }));
    finish();
  }

  std::vector<std::unique_ptr<Stranger>> strangers;
};

class BesiegedEngine : public HostilePeer {
 protected:
  /// A victim with short time-outs.
  static Config short_timeouts() {
    Config c = hostile_config();
    c.connections.peer_timeout = 50ms;
    c.connections.keepalive_interval = 10ms;
    c.connections.rendezvous_timeout = 50ms;
    return c;
  }
  /// The stranger's process is alive, since it grants what is granted already. Its connection ends
  /// all the same, because of what it holds up.
  static void expect_lost(Besieged& t, Stranger& s, std::uint32_t granted, const char* why) {
    ASSERT_TRUE(t.until([&] {
      (void)s.peer.write_granted(granted);
      return !t.node.closed.empty();
    }));
    EXPECT_EQ(t.node.closed[0].status, Status::peer_lost);
    EXPECT_NE(t.node.closed[0].message().find(why), std::string::npos)
        << t.node.closed[0].message();
  }
};

/// Loses all requests of some queue pairs from the first of a kind on, as adapters of peers that
/// never answer.
struct LostRequests {
  LostRequests(Besieged& t, ibv_wr_opcode of, std::uint32_t most)
      : ops(t.context().device->context()->ops), opcode(of), limit(most) {
    self = this;
    plain = std::exchange(ops.post_send, [](ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
      return self->loses(qp->qp_num, wr) ? 0 : self->plain(qp, wr, bad);
    });
  }
  LostRequests(const LostRequests&) = delete;
  LostRequests& operator=(const LostRequests&) = delete;
  ~LostRequests() { ops.post_send = plain; }
  bool loses(std::uint32_t qp_num, const ibv_send_wr* wr) {
    const bool is_dead = std::find(dead.begin(), dead.end(), qp_num) != dead.end();
    if (!is_dead && (wr->opcode != opcode || dead.size() == limit)) return false;
    if (!is_dead) dead.push_back(qp_num);
    for (; wr != nullptr; wr = wr->next) lost += wr->opcode == opcode ? 1 : 0;
    return true;
  }
  ibv_context_ops& ops;
  ibv_wr_opcode opcode;
  std::size_t limit;
  int (*plain)(ibv_qp*, ibv_send_wr*, ibv_send_wr**) = nullptr;
  std::vector<std::uint32_t> dead;
  std::uint32_t lost = 0;
  static inline LostRequests* self = nullptr;
};

}  // namespace hostile_peer
