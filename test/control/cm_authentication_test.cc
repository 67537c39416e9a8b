// The handshake of two ends with a key through rdma_cm, without rdma_cm: an attacker between them
// alters, cuts, repeats, reorders, reflects and replays what they say.
#include "control/cm_authentication.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "control/cm_ends.h"

namespace cm_authentication_test {
namespace {

using namespace cm_ends;  // the names of a test namespace

/// What the two ends say when nobody disturbs them.
struct Conversation {
  Bytes proof, authenticated, first_half, next, second_half, answer;
};

/// Runs the handshake up to the server's answer, and records it.
Conversation converse(Client& client, Server& server) {
  Conversation said;
  said.proof = client.request();
  said.authenticated = copy(server.take(said.proof).answer.value().bytes());
  EXPECT_TRUE(client.proof.read_rejection(said.authenticated).goes_on);
  said.first_half = client.request();
  said.next = copy(server.take(said.first_half).answer.value().bytes());
  EXPECT_TRUE(client.proof.read_rejection(said.next).goes_on);
  said.second_half = client.request();
  const auto outcome = server.take(said.second_half);
  EXPECT_NE(outcome.client, nullptr);
  if (outcome.client == nullptr) return said;
  EXPECT_EQ(outcome.client->endpoint(), wire::encode_cm(wire_test::valid_endpoint()));
  EXPECT_EQ(outcome.client->key(), "2026");
  said.answer =
      copy(outcome.client
               ->answer(wire::encode_cm(wire_test::valid_endpoint(), {{1, 1}, 7}), {}, kServerQp)
               .bytes());
  return said;
}

TEST(CmAuthentication, ThreeRequestsProveBothEndsAndBringTheEndpoints) {
  Client client(kKey);
  Server server(line("other", 'c') + kKey);
  const Conversation said = converse(client, server);
  const auto opened = client.proof.open_answer(said.answer, kServerQp);
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->endpoint, wire::encode_cm(wire_test::valid_endpoint(), {{1, 1}, 7}));
  EXPECT_EQ(client.counts.authenticated, 1u);
  EXPECT_EQ(server.counts.authenticated, 1u);
  EXPECT_EQ(all_failures(client.counts) + all_failures(server.counts), 0u);
  EXPECT_EQ(server.proofs.size(), 0u);
}

// Each end takes other keys after each message of the client's.
TEST(CmAuthentication, AHandshakeUnderWayKeepsTheKeyOfItsProof) {
  for (int messages = 1; messages <= 3; ++messages) {
    Client client(kKey);
    Server server(kKey);
    const auto rekey = [&](int said) {
      if (said == messages) client.keys = server.keys = ring(line("new", 'b'));
    };
    const auto proof = server.take(client.request()).answer;
    rekey(1);
    ASSERT_TRUE(client.proof.read_rejection(proof.value().bytes()).goes_on);
    const auto next = server.take(client.request()).answer;
    rekey(2);
    ASSERT_TRUE(client.proof.read_rejection(next.value().bytes()).goes_on);
    const auto outcome = server.take(client.request());
    rekey(3);
    ASSERT_NE(outcome.client, nullptr);
    EXPECT_EQ(outcome.client->key(), "2026");
    const auto answer =
        outcome.client->answer(wire::encode_cm(wire_test::valid_endpoint()), {}, kServerQp);
    EXPECT_TRUE(client.proof.open_answer(answer.bytes(), kServerQp));
    EXPECT_EQ(client.proof.key(), "2026");
  }
}

TEST(CmAuthentication, TheFirstRequestProvesTheKeyOfItsTime) {
  Client client(kKey);
  Server server(line("new", 'b'));
  client.keys = ring(line("new", 'b') + kKey);
  EXPECT_TRUE(server.take(client.request()).answer);
  EXPECT_EQ(client.proof.key(), "new");
  // A proof by a key that is gone by then is one by no key.
  Client late(kKey);
  EXPECT_FALSE(server.take(late.request()).answer);
  EXPECT_EQ(server.count(AuthenticationFailure::unknown_key), 1u);
}

TEST(CmAuthentication, NothingOfAnEndpointIsReadable) {
  Client client(kKey);
  Server server(kKey);
  const Conversation said = converse(client, server);
  const auto endpoint = wire::encode_cm(wire_test::valid_endpoint());
  const Bytes authenticated(said.authenticated.begin() + wire::kHeaderBytes,
                            said.authenticated.end());  // the header has our versions
  for (const Bytes& bytes :
       {said.proof, authenticated, said.first_half, said.next, said.second_half, said.answer}) {
    for (std::size_t i = 0; i + 8 <= endpoint.size(); ++i) {
      const auto part = std::span(endpoint).subspan(i, 8);
      if (std::all_of(part.begin(), part.end(), [](std::byte b) { return b == std::byte{0}; }))
        continue;
      EXPECT_EQ(std::search(bytes.begin(), bytes.end(), part.begin(), part.end()), bytes.end());
    }
  }
}

TEST(CmAuthentication, EachHandshakeIsSealedByKeysOfItsOwn) {
  Client first(kKey), second(kKey);
  Server server(kKey);
  const Conversation a = converse(first, server), b = converse(second, server);
  EXPECT_NE(a.proof, b.proof);
  EXPECT_NE(a.authenticated, b.authenticated);
  EXPECT_FALSE(std::equal(a.first_half.begin() + 8, a.first_half.end(), b.first_half.begin() + 8));
  EXPECT_NE(a.next, b.next);
  EXPECT_NE(a.answer, b.answer);
}

TEST(CmAuthentication, AnotherKeyAndAnotherNameAreRefused) {
  Client client(kKey);
  Server other_key(line("2026", 'b')), other_name(line("2027", 'a'));
  const Bytes proof = client.request();
  EXPECT_FALSE(other_key.take(proof).refused.empty());
  EXPECT_EQ(other_key.count(AuthenticationFailure::unknown_key), 1u);
  EXPECT_FALSE(other_name.take(proof).refused.empty());
  EXPECT_EQ(other_name.count(AuthenticationFailure::wrong_proof), 1u);
  EXPECT_EQ(other_key.proofs.size() + other_name.proofs.size(), 0u);
}

TEST(CmAuthentication, ARequestWithoutAProofIsRefused) {
  Server server(kKey);
  EXPECT_FALSE(server.take(wire::encode_cm(wire_test::valid_endpoint())).refused.empty());
  EXPECT_FALSE(server.take(Bytes(56)).refused.empty());
  EXPECT_FALSE(server.take({}).refused.empty());
  EXPECT_EQ(server.count(AuthenticationFailure::no_proof), 3u);
}

TEST(CmAuthentication, AServerWithoutAProofIsNotUsed) {
  const wire::Frame refusal =
      wire::encode_cm_refusal(wire::make_refuse(Status::protocol, "what is this"));
  Client refused(kKey);
  (void)refused.request();
  const auto rejection = refused.proof.read_rejection(refusal.bytes());
  ASSERT_TRUE(rejection.failure);
  EXPECT_EQ(rejection.failure->status, Status::unauthenticated);
  EXPECT_NE(rejection.failure->found.find("what is this"), std::string::npos);
  EXPECT_EQ(refused.count(AuthenticationFailure::unproven_server), 1u);

  // It accepts at once, as if there were no key.
  Client accepted(kKey);
  (void)accepted.request();
  const auto opened =
      accepted.proof.open_answer(wire::encode_cm(wire_test::valid_endpoint()), kServerQp);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().status, Status::unauthenticated);
  EXPECT_EQ(accepted.count(AuthenticationFailure::unproven_server), 1u);
}

/// Takes the handshake through `alter`, which changes one of the six messages. Answers whether
/// either end believes it.
template <typename Alter>
bool succeeds(Client& client, Server& server, Alter&& alter) {
  Bytes message = client.request();
  for (int request = 0; request < 2; ++request) {
    alter(2 * request, message);
    const auto outcome = server.take(message);
    if (!outcome.answer) return outcome.client != nullptr;
    message = copy(outcome.answer->bytes());
    alter(2 * request + 1, message);
    const auto rejection = client.proof.read_rejection(message);
    EXPECT_EQ(rejection.goes_on, !rejection.failure);
    if (!rejection.goes_on) return false;
    message = client.request();
  }
  alter(4, message);
  const auto outcome = server.take(message);
  if (outcome.client == nullptr) return false;
  message = copy(
      outcome.client->answer(wire::encode_cm(wire_test::valid_endpoint()), {}, kServerQp).bytes());
  alter(5, message);
  return client.proof.open_answer(message, kServerQp).has_value();
}

/// The end that refuses a message, and its count.
void expect_failure(const Client& client, const Server& server, int message, std::size_t at) {
  const bool at_client = message % 2 == 1;
  EXPECT_EQ(all_failures(client.counts), at_client ? 1u : 0u) << message << ", byte " << at;
  EXPECT_EQ(all_failures(server.counts), at_client ? 0u : 1u) << message << ", byte " << at;
  using enum AuthenticationFailure;
  const bool in_clear = at < 8 && message % 2 == 0;  // what names the struct, and the handshake
  const std::array why{
      at < 4     ? no_proof
      : in_clear ? unknown_key
                 : wrong_proof,
      unproven_server,
      in_clear ? no_proof : unconfirmed_proof,
      altered_frame,
      in_clear ? no_proof : altered_frame,
      altered_frame,
  };
  const auto index = static_cast<std::size_t>(message);
  EXPECT_EQ(at_client ? client.count(why.at(index)) : server.count(why.at(index)), 1u)
      << message << ", byte " << at;
}

class AlteredCmRequests : public testing::TestWithParam<int> {};

TEST_P(AlteredCmRequests, AnyOtherByteIsRefused) {
  const std::size_t size =
      std::array<std::size_t, 6>{56, 80, 56, 20, 56, 76}.at(static_cast<std::size_t>(GetParam()));
  for (std::size_t at = 0; at < size; ++at) {
    Client client(kKey);
    Server server(kKey);
    EXPECT_FALSE(succeeds(client, server, [&](int message, Bytes& bytes) {
      if (message != GetParam()) return;
      EXPECT_EQ(bytes.size(), size);
      bytes.at(at) ^= std::byte{0x10};
    })) << at;
    expect_failure(client, server, GetParam(), at);
  }
}

TEST_P(AlteredCmRequests, AnyShorterOneIsRefused) {
  const std::size_t size =
      std::array<std::size_t, 6>{56, 80, 56, 20, 56, 76}.at(static_cast<std::size_t>(GetParam()));
  for (std::size_t left = 0; left < size; ++left) {
    Client client(kKey);
    Server server(kKey);
    EXPECT_FALSE(succeeds(client, server, [&](int message, Bytes& bytes) {
      if (message == GetParam()) bytes.resize(left);
    })) << left;
    EXPECT_EQ(all_failures(client.counts) + all_failures(server.counts), 1u);
  }
}

INSTANTIATE_TEST_SUITE_P(Messages, AlteredCmRequests, testing::Range(0, 6));

TEST(CmAuthentication, PaddingIsSkipped) {
  Client client(kKey);
  Server server(kKey);
  EXPECT_TRUE(succeeds(client, server, [](int message, Bytes& bytes) {
    bytes.resize(message % 2 == 0 ? wire::kCmRequestMax : message == 5 ? 196 : wire::kCmRejectMax);
  }));
}

TEST(CmAuthentication, ReplayedRequestsOpenNothing) {
  Client client(kKey);
  Server server(kKey);
  const Conversation said = converse(client, server);
  // The proof is a good one, and is answered; what follows belongs to the earlier answer.
  const auto again = server.take(said.proof);
  ASSERT_TRUE(again.answer);
  EXPECT_NE(copy(again.answer->bytes()), said.authenticated);
  EXPECT_FALSE(server.take(said.first_half).refused.empty());
  EXPECT_FALSE(server.take(said.second_half).refused.empty());
  EXPECT_EQ(server.count(AuthenticationFailure::no_proof), 2u);
  EXPECT_EQ(server.counts.authenticated, 1u);
  server.now += 500'000'000;
  server.proofs.expire();
  EXPECT_EQ(server.count(AuthenticationFailure::unconfirmed_proof), 1u);
  EXPECT_EQ(server.proofs.size(), 0u);
}

TEST(CmAuthentication, ReplayedAnswersProveNothing) {
  Client first(kKey);
  Server server(kKey);
  const Conversation said = converse(first, server);
  Client second(kKey);
  (void)second.request();
  EXPECT_FALSE(second.proof.read_rejection(said.authenticated).goes_on);
  Client third(kKey);
  const auto outcome = server.take(third.request());
  EXPECT_TRUE(third.proof.read_rejection(outcome.answer.value().bytes()).goes_on);
  (void)third.request();
  EXPECT_FALSE(third.proof.read_rejection(said.next).goes_on);
  Client fourth(kKey);
  (void)converse(fourth, server);
  EXPECT_FALSE(fourth.proof.open_answer(said.answer, kServerQp));
}

// Either end may get back what it has said itself.
TEST(CmAuthentication, ReflectedMessagesAreRefused) {
  Client client(kKey);
  Server server(kKey);
  const Bytes proof = client.request();
  const Bytes authenticated = copy(server.take(proof).answer.value().bytes());
  EXPECT_FALSE(server.take(authenticated).answer);
  ASSERT_TRUE(client.proof.read_rejection(authenticated).goes_on);
  const Bytes half = client.request();
  const Bytes next = copy(server.take(half).answer.value().bytes());
  EXPECT_FALSE(server.take(next).answer);
  EXPECT_FALSE(client.proof.read_rejection(half).goes_on);
  Client other(kKey);
  EXPECT_FALSE(other.proof.read_rejection(other.request()).goes_on);
}

TEST(CmAuthentication, HalvesOutOfOrderOrOfAnotherHandshakeAreRefused) {
  Client client(kKey), other(kKey);
  Server server(kKey);
  const auto begin = [&](Client& c) {
    const auto outcome = server.take(c.request());
    EXPECT_TRUE(c.proof.read_rejection(outcome.answer.value().bytes()).goes_on);
    return c.request();
  };
  const Bytes ours = begin(client), theirs = begin(other);
  Bytes crossed = theirs;
  std::copy_n(ours.begin(), 8, crossed.begin());
  EXPECT_FALSE(server.take(crossed).refused.empty());
  EXPECT_EQ(server.count(AuthenticationFailure::unconfirmed_proof), 1u);
  // The handshake itself is not disturbed.
  const Bytes next = copy(server.take(ours).answer.value().bytes());
  ASSERT_TRUE(client.proof.read_rejection(next).goes_on);
  const Bytes second = client.request();
  Bytes swapped = second;
  std::copy_n(theirs.begin(), 8, swapped.begin());
  EXPECT_FALSE(server.take(swapped).refused.empty());
  EXPECT_NE(server.take(second).client, nullptr);
}

// The answer was lost on its way, and rdma_cm repeats the request.
TEST(CmAuthentication, ARepeatedRequestGetsTheSameAnswer) {
  Client client(kKey);
  Server server(kKey);
  for (int request = 0; request < 2; ++request) {
    const Bytes bytes = client.request();
    const auto first = server.take(bytes), again = server.take(bytes);
    EXPECT_EQ(copy(first.answer.value().bytes()), copy(again.answer.value().bytes()));
    EXPECT_TRUE(client.proof.read_rejection(again.answer->bytes()).goes_on);
  }
  EXPECT_NE(server.take(client.request()).client, nullptr);
  EXPECT_EQ(server.counts.authenticated, 1u);
}

// A host on the way gives the sealed request another queue pair, or leads it to another host.
TEST(CmAuthentication, OtherEndsThanTheClientNamesAreRefused) {
  for (int which = 0; which < 3; ++which) {
    Client client(kKey);
    Server server(kKey);
    for (int request = 0; request < 2; ++request) {
      const auto outcome = server.take(client.request());
      ASSERT_TRUE(client.proof.read_rejection(outcome.answer.value().bytes()).goes_on);
    }
    CmEnds other = the_ends();
    if (which == 0) other.client_qp ^= 1;
    if (which == 1) other.client_gid[15] ^= 1;
    if (which == 2) other.server_gid[0] ^= 1;
    const Bytes request = client.request();
    EXPECT_FALSE(server.take(request, other).refused.empty()) << which;
    EXPECT_EQ(server.count(AuthenticationFailure::altered_frame), 1u);
    EXPECT_NE(server.take(request).client, nullptr) << which;
  }
}

TEST(CmAuthentication, AnotherQueuePairThanTheServerNamesIsRefused) {
  Client client(kKey);
  Server server(kKey);
  const Conversation said = converse(client, server);
  EXPECT_FALSE(client.proof.open_answer(said.answer, kServerQp + 1));
  EXPECT_EQ(client.count(AuthenticationFailure::altered_frame), 1u);
}

/// A client that has sent its last request, and what the server has to answer.
std::unique_ptr<control::CmServer> asked(Client& client, Server& server) {
  for (int request = 0; request < 2; ++request) {
    const auto outcome = server.take(client.request());
    EXPECT_TRUE(client.proof.read_rejection(outcome.answer.value().bytes()).goes_on);
  }
  return std::move(server.take(client.request()).client);
}

TEST(CmAuthentication, ARefusalOfAnAuthenticatedPeerIsSealedAndHasItsReason) {
  Client client(kKey);
  Server server(kKey);
  const auto proof = asked(client, server);
  ASSERT_NE(proof, nullptr);
  const auto refusal =
      copy(proof->refuse(wire::make_refuse(Status::refused, std::string(200, 'x'), 4711)).bytes());
  const auto& said = refusal;
  EXPECT_EQ(std::search_n(said.begin(), said.end(), 8, std::byte{'x'}), said.end());
  const auto rejection = client.proof.read_rejection(refusal);
  ASSERT_TRUE(rejection.refusal);
  EXPECT_EQ(rejection.refusal->code, 4711u);
  EXPECT_EQ(rejection.refusal->message(), std::string(107, 'x'));
}

TEST(CmAuthentication, ARefusalInTheClearCountsForNothingAfterTheProof) {
  Client client(kKey);
  Server server(kKey);
  (void)asked(client, server);
  const auto rejection = client.proof.read_rejection(
      wire::encode_cm_refusal(wire::make_refuse(Status::limit, "full")).bytes());
  ASSERT_TRUE(rejection.failure);
  EXPECT_EQ(rejection.failure->status, Status::unauthenticated);
  EXPECT_EQ(client.count(AuthenticationFailure::altered_frame), 1u);
}

TEST(CmAuthentication, TheSourceWithTheMostRecordsGivesWay) {
  Server server(kKey, 4);
  std::vector<std::unique_ptr<Client>> clients;
  const auto begin = [&](std::uint8_t host) {
    clients.push_back(std::make_unique<Client>(kKey));
    return copy(server.take(clients.back()->request(), the_ends(), host).answer.value().bytes());
  };
  const Bytes honest = begin(7);
  for (int i = 0; i < 10; ++i) (void)begin(8);
  EXPECT_EQ(server.proofs.size(), 4u);
  EXPECT_EQ(server.count(AuthenticationFailure::unconfirmed_proof), 7u);
  ASSERT_TRUE(clients[0]->proof.read_rejection(honest).goes_on);
  EXPECT_TRUE(server.take(clients[0]->request(), the_ends(), 7).answer);
}

TEST(CmAuthentication, AClientThatHasProvedTheKeyGivesWayLast) {
  Server server(kKey, 2);
  Client proved(kKey);
  const auto outcome = server.take(proved.request());
  ASSERT_TRUE(proved.proof.read_rejection(outcome.answer.value().bytes()).goes_on);
  const Bytes next = copy(server.take(proved.request()).answer.value().bytes());
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(server.take(Client(kKey).request()).answer);
  ASSERT_TRUE(proved.proof.read_rejection(next).goes_on);
  EXPECT_NE(server.take(proved.request()).client, nullptr);
}

}  // namespace
}  // namespace cm_authentication_test
