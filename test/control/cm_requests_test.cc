// Control ports that get requests through rdma_cm, without its identifiers.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "control/authentication_fixture.h"
#include "wire/cm_data.h"

namespace authentication_test {
namespace {

/// Requests through rdma_cm, without its identifiers.
class CmRequests : public Authentication {
 protected:
  CmRequests() { use(kKey); }
  void request(std::span<const std::byte> data) {
    auto made = std::make_unique<control::CmRequest>();
    made->peer = *control::Address::parse("10.0.0.1:5");
    made->listener = listening_;
    made->event.qp_num = 0x333;
    made->event.size = data.size();
    std::copy(data.begin(), data.end(), made->event.storage.begin());
    server_.port.take_request(std::move(made));
  }
  /// Sends the next request of a client, and reads the rejection, which equal bytes get again.
  bool ask(control::CmClientProof& client) {
    control::CmEnds ends;
    ends.client_qp = 0x333;
    const auto data = client.next_request(wire::encode_cm(endpoint(0x333, 9)), ends);
    EXPECT_TRUE(data);
    request(*data);
    if (server_.port.cm_proofs().size() == 0) return false;
    const auto again = server_.port.cm_proofs().on_request(*data, {}, ends);
    return client.read_rejection(again->answer.value().bytes()).goes_on;
  }
};

TEST_F(CmRequests, AStrangersRequestReachesNobody) {
  request(wire::encode_cm(endpoint(1, 9)));
  request({});
  const KeyRing other = ring(line("2026", 'b'));
  control::AuthenticationCounts counts;
  control::CmClientProof stranger(other, counts);
  EXPECT_FALSE(ask(stranger));
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.refusals(), 3u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::no_proof), 2u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::unknown_key), 1u);
}

TEST_F(CmRequests, TheLastRequestOfAPeerWithTheKeyReachesTheOwner) {
  const auto client = client_.port.make_cm_proof();
  EXPECT_TRUE(ask(*client));
  EXPECT_TRUE(ask(*client));
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_FALSE(ask(*client));
  EXPECT_TRUE(server_owner_was_asked());
  EXPECT_EQ(server_.port.handshakes(), 1u);
  EXPECT_EQ(server_.port.key_of(listener_->handshake), "2026");
  EXPECT_NE(server_.port.take_cm_proof(listener_->handshake), nullptr);
  EXPECT_EQ(server_.port.take_cm_proof(listener_->handshake), nullptr);
  EXPECT_EQ(server_.port.refusals(), 0u);
}

TEST_F(CmRequests, AProofThatNothingFollowsIsCountedInTime) {
  const auto client = client_.port.make_cm_proof();
  EXPECT_TRUE(ask(*client));
  server_.pass(499ms);
  server_.step();
  EXPECT_EQ(server_.port.cm_proofs().size(), 1u);
  server_.pass(1ms);
  server_.step();
  EXPECT_EQ(server_.port.cm_proofs().size(), 0u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::unconfirmed_proof), 1u);
}

}  // namespace
}  // namespace authentication_test
