// What the control port does with frames whose addresses have to be resolved first. The resolver is
// a recorder; the one through rdma_cm is tried on Soft-RoCE.
#include "control/address_resolver.h"

#include "control/control_port_fixture.h"

namespace control_port_test {
namespace {

using control::Resolution;
using Gid = std::array<std::uint8_t, 16>;

/// Answers when the test says so.
struct ResolverRecord : control::AddressResolver {
  std::vector<Resolution> begun;
  std::vector<Resolution> cancelled;
  Gid last{};
  bool knows = false;  ///< the address already
  bool has_route = true;

  Result<bool> begin(const Resolution& what, const Gid& gid, GidType) override {
    last = gid;
    if (!has_route) return tl::unexpected(unreachable());
    if (!knows) begun.push_back(what);
    return knows;
  }
  void cancel(const Resolution& what) noexcept override { cancelled.push_back(what); }
  static Error unreachable() { return {Status::peer_lost, "reach", "nobody answers there", ""}; }
};

class AddressResolution : public ControlPortTest {
 protected:
  static ResolverRecord& record(ControlPort& port) {
    auto resolver = std::make_unique<ResolverRecord>();
    ResolverRecord& record = *resolver;
    port.set_resolver(std::move(resolver));
    return record;
  }
  void steps(int count = 20) {
    for (int i = 0; i < count; ++i) {
      client_.step();
      server_.step();
    }
  }
};

TEST_F(AddressResolution, AnOwnerSeesAHelloWhenItsAddressIsResolved) {
  ResolverRecord& resolver = record(server_.port);
  hello();
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  EXPECT_EQ(resolver.last, endpoint(101, kClientIncarnation).gid);
  steps();
  EXPECT_FALSE(listener_->handshake);
  server_.port.on_resolved(resolver.begun[0], {});
  EXPECT_TRUE(listener_->handshake);
  EXPECT_EQ(listener_->client.qp_num, 101u);
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return client_owner_.saw("accept 11"); }));
  server_.port.on_resolved(resolver.begun[0], {});  // once more: does nothing
  EXPECT_EQ(resolver.begun.size(), 1u);
}

TEST_F(AddressResolution, AnUnreachableAddressIsRefusedAndTheOwnerHearsNothing) {
  ResolverRecord& resolver = record(server_.port);
  hello();
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  server_.port.on_resolved(resolver.begun[0], tl::unexpected(ResolverRecord::unreachable()));
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_NE(client_owner_.error.found.find("nobody answers there"), std::string::npos);
  EXPECT_FALSE(listener_->handshake);
  EXPECT_TRUE(until([&] { return server_.port.handshakes() == 0; }));
}

TEST_F(AddressResolution, AnAddressWithoutARouteIsRefusedAtOnce) {
  record(server_.port).has_route = false;
  hello();
  ASSERT_TRUE(until([&] { return client_owner_.saw("refused 11"); }));
  EXPECT_FALSE(listener_->handshake);
}

TEST_F(AddressResolution, ASessionWaitsAtBothEnds) {
  ResolverRecord& servers = record(server_.port);
  ResolverRecord& clients = record(client_.port);
  ASSERT_TRUE(client_.port.open_session(server_address(), session_end(5, 1), client_owner_, 12)
                  .has_value());
  ASSERT_TRUE(until([&] { return servers.begun.size() == 1; }));
  server_.port.on_resolved(servers.begun[0], {});
  ASSERT_TRUE(until([&] { return clients.begun.size() == 1; }));
  EXPECT_FALSE(client_owner_.saw("opened 12"));
  client_.port.on_resolved(clients.begun[0], {});
  EXPECT_TRUE(client_owner_.saw("opened 12"));
  EXPECT_TRUE(until([&] { return server_.port.handshakes() + client_.port.handshakes() == 0; }));
}

TEST_F(AddressResolution, AClientHearsThatItsServerIsUnreachable) {
  ResolverRecord& resolver = record(client_.port);
  ASSERT_TRUE(client_.port.open_session(server_address(), session_end(5, 1), client_owner_, 12)
                  .has_value());
  hello();
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  server_.port.answer(listener_->handshake, endpoint(202, kServerIncarnation));
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 2; }));
  for (const Resolution& each : std::vector(resolver.begun))
    client_.port.on_resolved(each, tl::unexpected(ResolverRecord::unreachable()));
  EXPECT_TRUE(client_owner_.saw("open_failed 12"));
  EXPECT_TRUE(client_owner_.saw("failed 11"));
  EXPECT_FALSE(client_owner_.saw("accept 11"));
  EXPECT_EQ(client_owner_.error.status, Status::peer_lost);
}

TEST_F(AddressResolution, WhoHasNoDatagramsHasNoAddressToResolve) {
  ResolverRecord& resolver = record(server_.port);
  wire::SessionEnd end = session_end(5, 1);
  end.qp_num = 0;
  ASSERT_TRUE(client_.port.open_session(server_address(), end, client_owner_, 12).has_value());
  ASSERT_TRUE(until([&] { return client_owner_.saw("opened 12"); }));
  EXPECT_TRUE(resolver.begun.empty());
}

TEST_F(AddressResolution, AHandshakeThatEndsMeanwhileIsCancelled) {
  ResolverRecord& resolver = record(server_.port);
  hello();
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  server_.pass(600ms);  // the handshake time-out of one that has no owner yet
  server_.step();
  EXPECT_EQ(server_.port.handshakes(), 0u);
  ASSERT_EQ(resolver.cancelled.size(), 1u);
  EXPECT_EQ(resolver.cancelled[0].handshake, resolver.begun[0].handshake);
  server_.port.on_resolved(resolver.begun[0], {});
  EXPECT_FALSE(listener_->handshake);
}

TEST_F(AddressResolution, ThosePendingGiveWayToNewPeers) {
  ResolverRecord& resolver = record(server_.port);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 4; ++i) {
    strangers.push_back(plain_peer());
    say(strangers.back(), wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
  }
  ASSERT_TRUE(until([&] { return resolver.begun.size() == 4; }));
  resolver.knows = true;  // the next one's address
  hello();
  server_.pass(100ms);
  ASSERT_TRUE(until([&] { return static_cast<bool>(listener_->handshake); }));
  EXPECT_EQ(resolver.cancelled.size(), 1u);
}

TEST_F(AddressResolution, APeerThatClosesMeanwhileIsSeenAfterwards) {
  ResolverRecord& resolver = record(server_.port);
  {
    const UniqueFd peer = plain_peer();
    say(peer, wire::encode(wire::Hello{endpoint(101, 9)}).bytes());
    ASSERT_TRUE(until([&] { return resolver.begun.size() == 1; }));
  }
  steps();
  EXPECT_EQ(server_.port.handshakes(), 1u);  // the frame stays, and nothing is read
  server_.port.on_resolved(resolver.begun[0], {});
  ASSERT_TRUE(until([&] { return server_owner_.saw("failed 77"); }));
  EXPECT_EQ(server_.port.handshakes(), 0u);
}

}  // namespace
}  // namespace control_port_test
