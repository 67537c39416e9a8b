// Control ports that get requests through rdma_cm, without its identifiers.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "control/authentication_fixture.h"
#include "wire/cm_data.h"

namespace authentication_test {
namespace {

const control::Address& peer() {
  static const control::Address address = *control::Address::parse("10.0.0.1:5");
  return address;
}

/// Requests through rdma_cm, without its identifiers.
class CmRequests : public Authentication {
 protected:
  CmRequests() { use(kKey); }
  void request(std::span<const std::byte> data) {
    auto made = std::make_unique<control::CmRequest>();
    made->peer = peer();
    made->listener = listening_;
    made->event.qp_num = 0x333;
    made->event.size = data.size();
    std::copy(data.begin(), data.end(), made->event.storage.begin());
    server_.port.take_request(std::move(made));
  }
  /// Sends the next request of a client, and reads the rejection, which equal bytes get again.
  bool ask(control::CmClient& client) {
    control::CmEnds ends;
    ends.client_qp = 0x333;
    const auto data = client.next_request(wire::encode_cm(endpoint(0x333, 9)), {}, ends);
    EXPECT_TRUE(data);
    request(*data);
    if (server_.port.cm_proofs().size() == 0) return false;
    const auto again = server_.port.cm_proofs().on_request(*data, peer().source(), ends);
    return client.read_rejection(again->answer.value().bytes()).goes_on;
  }
};

TEST_F(CmRequests, AStrangersRequestReachesNobody) {
  request(wire::encode_cm(endpoint(1, 9)));
  request({});
  const KeyRing other = ring(line("2026", 'b'));
  control::AuthenticationCounts counts;
  control::CmClient stranger(other, counts);
  EXPECT_FALSE(ask(stranger));
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.refusals(), 3u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::no_proof), 2u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::unknown_key), 1u);
}

TEST_F(CmRequests, TheLastRequestOfAPeerWithTheKeyReachesTheOwner) {
  const auto client = client_.port.make_cm_client();
  EXPECT_TRUE(ask(*client));
  EXPECT_TRUE(ask(*client));
  EXPECT_FALSE(server_owner_was_asked());
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_FALSE(ask(*client));
  EXPECT_TRUE(server_owner_was_asked());
  EXPECT_EQ(server_.port.handshakes(), 1u);
  EXPECT_EQ(server_.port.key_of(listener_->handshake), "2026");
  EXPECT_NE(server_.port.take_cm_server(listener_->handshake), nullptr);
  EXPECT_EQ(server_.port.take_cm_server(listener_->handshake), nullptr);
  EXPECT_EQ(server_.port.refusals(), 0u);
}

// The port takes other keys after each request of a client, as Engine::reload_keys() does.
TEST_F(CmRequests, AReloadOfTheKeysHarmsNoClientThatHasProvedAFormerOne) {
  for (int reload_after = 1; reload_after <= 3; ++reload_after) {
    SCOPED_TRACE(reload_after);
    use(kKey);
    const auto client = client_.port.make_cm_client();
    for (int requests = 1; requests <= 3; ++requests) {
      EXPECT_EQ(ask(*client), requests < 3);
      if (requests == reload_after) use(line("new", 'b'));
    }
    ASSERT_EQ(server_.port.handshakes(), 1u);
    const HandshakeId id = listener_->handshake;
    EXPECT_EQ(server_.port.key_of(id), "2026");
    const auto server = server_.port.take_cm_server(id);
    ASSERT_NE(server, nullptr);
    const auto answer = server->answer(wire::encode_cm(endpoint(7, 8)), {}, 7);
    EXPECT_TRUE(client->open_answer(answer.bytes(), 7));
    EXPECT_EQ(client->key(), "2026");
    server_.port.drop(id);
  }
  // A client that has not proved anything yet must prove a key of the new ring.
  const KeyRing former = ring(kKey);
  control::AuthenticationCounts counts;
  control::CmClient late(former, counts);
  EXPECT_FALSE(ask(late));
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::unknown_key), 1u);
  const auto client = client_.port.make_cm_client();
  for (int requests = 1; requests <= 3; ++requests) EXPECT_EQ(ask(*client), requests < 3);
  EXPECT_EQ(server_.port.key_of(listener_->handshake), "new");
}

TEST_F(CmRequests, AProofThatNothingFollowsIsCountedInTime) {
  const auto client = client_.port.make_cm_client();
  EXPECT_TRUE(ask(*client));
  server_.pass(499ms);
  server_.step();
  EXPECT_EQ(server_.port.cm_proofs().size(), 1u);
  server_.pass(1ms);
  server_.step();
  EXPECT_EQ(server_.port.cm_proofs().size(), 0u);
  EXPECT_EQ(failures(server_, AuthenticationFailure::unconfirmed_proof), 1u);
}

spinwire::PrivateData data_of(std::size_t size, char fill) {
  const std::string bytes(size, fill);
  spinwire::PrivateData data;
  EXPECT_EQ(data.assign(std::as_bytes(std::span(bytes))), Status::ok);
  return data;
}

/// With a key and without.
class CmRequestsWithData : public Authentication, public testing::WithParamInterface<bool> {
 protected:
  CmRequestsWithData() {
    if (GetParam()) use(kKey);
    client_data_ = data_of(200, 'c');
    ends_.client_qp = 0x333;
  }
  [[nodiscard]] std::vector<std::byte> next_request(control::CmClient& client) {
    const auto data = client.next_request(
        wire::encode_cm(endpoint(0x333, 9), {.features = features_}), client_data_, ends_);
    EXPECT_TRUE(data);
    return {data->begin(), data->end()};
  }
  void request(std::span<const std::byte> data, control::ListenerId at) {
    auto made = std::make_unique<control::CmRequest>();
    made->peer = peer();
    made->listener = at;
    made->event.qp_num = 0x333;
    made->event.size = data.size();
    std::copy(data.begin(), data.end(), made->event.storage.begin());
    server_.port.take_request(std::move(made));
    server_.step();
  }
  /// Sends a client's requests until the last one, whose rejection nobody sees. Then equal bytes
  /// get no answer.
  int ask(control::CmClient& client) {
    for (int requests = 1;; ++requests) {
      const auto data = next_request(client);
      request(data, listening_);
      if (server_.port.cm_proofs().size() == 0) return requests;
      const auto again = server_.port.cm_proofs().on_request(data, peer().source(), ends_);
      if (!again->answer || !client.read_rejection(again->answer->bytes()).goes_on) return requests;
    }
  }
  spinwire::PrivateData client_data_;
  control::CmEnds ends_;
  std::uint32_t features_ = wire::feature::cm_private_data;
};

TEST_P(CmRequestsWithData, TheOwnerIsAskedOnceAndSeesWhatTheClientGives) {
  for (const std::size_t size : {0u, 118u, 119u, 256u}) {
    SCOPED_TRACE(size);
    listener_->cm_asked.clear();
    listener_->cm_data = data_of(size, 's');
    const auto client = client_.port.make_cm_client();
    const int more = size <= 118 ? 0 : size <= 244 ? 1 : 2;
    EXPECT_EQ(ask(*client), (GetParam() ? 1 : 0) + 9 + more);
    EXPECT_EQ(listener_->cm_asked, std::vector{client_data_});
    EXPECT_EQ(listener_->cm_client, client_data_);
    EXPECT_EQ(listener_->cm_given, listener_->cm_data);
    ASSERT_EQ(server_.port.handshakes(), 1u);
    const auto server = server_.port.take_cm_server(listener_->handshake);
    ASSERT_NE(server, nullptr);
    const auto answer = server->answer(wire::encode_cm(endpoint(7, 8)), listener_->cm_given, 7);
    const auto opened = client->open_answer(answer.bytes(), 7);
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_EQ(opened->private_data, listener_->cm_data);
    server_.port.drop(listener_->handshake);
  }
}

TEST_P(CmRequestsWithData, ARefusalComesAfterAllDataAndBeforeAnythingIsMade) {
  Error no{Status::refused, "accept a peer", "not you", ""};
  no.code = 4711;
  listener_->cm_refusal = no;
  const auto client = client_.port.make_cm_client();
  EXPECT_EQ(ask(*client), (GetParam() ? 1 : 0) + 9);
  EXPECT_EQ(listener_->cm_asked, std::vector{client_data_});
  EXPECT_FALSE(listener_->handshake) << "it was not taken";
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.refusals(), 1u);
}

TEST_P(CmRequestsWithData, AClientOfAnOlderReleaseGetsNone) {
  features_ = 0;
  client_data_ = {};
  listener_->cm_data = data_of(256, 's');
  const auto client = client_.port.make_cm_client();
  EXPECT_EQ(ask(*client), GetParam() ? 3 : 1);
  EXPECT_EQ(server_.port.handshakes(), 1u);
  EXPECT_TRUE(listener_->cm_given.empty());
}

// Another listener may refuse whom this one accepts.
TEST_P(CmRequestsWithData, AnotherListenerDoesNotTakeWhatOneHasAccepted) {
  listener_->cm_data = data_of(200, 's');
  const auto client = client_.port.make_cm_client();
  std::vector<std::byte> data;
  while (listener_->cm_asked.empty()) {
    data = next_request(*client);
    request(data, listening_);
    const auto again = server_.port.cm_proofs().on_request(data, peer().source(), ends_);
    ASSERT_TRUE(again->answer);
    ASSERT_TRUE(client->read_rejection(again->answer->bytes()).goes_on);
  }
  auto other = std::make_shared<ListenerRecord>(server_owner_);
  const auto at = server_.port.listen(*control::Address::parse("127.0.0.1:0"), other);
  ASSERT_TRUE(at);
  request(next_request(*client), *at);
  EXPECT_TRUE(other->cm_asked.empty());
  EXPECT_FALSE(other->handshake);
  EXPECT_FALSE(listener_->handshake);
  EXPECT_EQ(server_.port.refusals(), 1u);
  EXPECT_EQ(server_.port.cm_proofs().size(), 0u);
}

TEST_P(CmRequestsWithData, AClientThatDoesNotComeBackKeepsNothing) {
  listener_->cm_data = data_of(200, 's');
  const auto client = client_.port.make_cm_client();
  while (listener_->cm_asked.empty()) {
    const auto data = next_request(*client);
    request(data, listening_);
    const auto again = server_.port.cm_proofs().on_request(data, peer().source(), ends_);
    ASSERT_TRUE(client->read_rejection(again->answer.value().bytes()).goes_on);
  }
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.cm_proofs().size(), 1u);
  server_.pass(500ms);
  server_.step();
  EXPECT_EQ(server_.port.cm_proofs().size(), 0u);
}

// The older request has waited for room, and its client has given it up. With a key, handshakes
// have names of their own.
TEST_P(CmRequestsWithData, AnOlderRequestThatGoesOnLateEndsNoNewerHandshake) {
  listener_->cm_data = data_of(256, 's');
  listener_->has_room = false;
  const auto older = client_.port.make_cm_client();
  (void)ask(*older);
  ASSERT_EQ(server_.port.handshakes(), 1u);
  const auto newer = client_.port.make_cm_client();
  const auto first = next_request(*newer);
  request(first, listening_);
  const auto again = server_.port.cm_proofs().on_request(first, peer().source(), ends_);
  ASSERT_TRUE(newer->read_rejection(again->answer.value().bytes()).goes_on);
  listener_->has_room = true;
  for (int i = 0; i < 4; ++i) server_.step();
  EXPECT_EQ(listener_->cm_asked.size(), 1u);
  EXPECT_EQ(server_.port.handshakes(), 0u);
  EXPECT_EQ(server_.port.refusals(), GetParam() ? 0u : 1u);
  EXPECT_EQ(1 + ask(*newer), (GetParam() ? 1 : 0) + 9 + 2);
  EXPECT_EQ(listener_->cm_given, listener_->cm_data);
  EXPECT_EQ(server_.port.handshakes(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Keys, CmRequestsWithData, testing::Bool(),
                         [](const auto& key) { return key.param ? "One" : "None"; });

}  // namespace
}  // namespace authentication_test
