// Private data of applications through rdma_cm, with a key and without, and an attacker between
// the ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "control/cm_ends.h"
#include "wire/codec.h"

namespace cm_private_data_test {
namespace {

using namespace cm_ends;  // the names of a test namespace
using control::CmMessage;
using control::CmServer;
using spinwire::kPrivateDataMax;

PrivateData data_of(std::size_t size, std::uint8_t first) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = std::byte{static_cast<std::uint8_t>(first++ | 1)};
  PrivateData data;
  EXPECT_EQ(data.assign(bytes), Status::ok);
  return data;
}

CmData endpoint_data() {
  return wire::encode_cm(wire_test::valid_endpoint(), {.features = wire::feature::cm_private_data});
}

/// What an attacker does with the messages on their way, in their order; counts them.
struct Passing {
  std::function<void(std::size_t number, Bytes&)> alter = [](std::size_t, Bytes&) {};
  std::size_t count = 0;
  std::size_t requests = 0;

  Bytes pass(std::span<const std::byte> message, bool is_request) {
    Bytes bytes = copy(message);
    alter(count++, bytes);
    if (is_request) ++requests;
    return bytes;
  }
};

/// A client and a server that tell each other private data.
struct Pair {
  explicit Pair(const std::string& key, std::size_t ours = 0, std::size_t theirs = 0)
      : own(std::make_unique<Server>(key)), client(key), server(*own) {
    give(ours, theirs);
  }
  /// Without a key.
  Pair(Server& at, std::size_t ours, std::size_t theirs) : client(""), server(at) {
    give(ours, theirs);
  }
  void give(std::size_t ours, std::size_t theirs) {
    client.ours = data_of(ours, 1);
    client.capabilities.features = wire::feature::cm_private_data;
    given = data_of(theirs, 100);
  }
  /// What the server has to answer once the client has said all; null: one end has refused, or
  /// without a key all was said in one request.
  std::unique_ptr<CmServer> say(Passing& passing) {
    for (;;) {
      const Bytes request = passing.pass(client.request(), true);
      auto outcome = server.take(request);
      if (outcome.malformed) return nullptr;
      if (outcome.is_plain) {
        CmData said{};
        std::copy(request.begin(), request.end(), said.begin());
        return std::make_unique<CmServer>(said, source_of(1), the_ends(), outcome.number);
      }
      if (outcome.client != nullptr) return std::move(outcome.client);
      if (!outcome.answer || !goes_on(outcome.answer->bytes(), passing)) return nullptr;
    }
  }
  bool goes_on(std::span<const std::byte> rejection, Passing& passing) {
    return client.proof.read_rejection(passing.pass(rejection, false)).goes_on;
  }
  /// Answers the client that has said all.
  spinwire::Result<CmClient::Answer> answer(std::unique_ptr<CmServer> said, Passing& passing) {
    if (given.bytes().size() > wire::kCmAnswerData) {
      said->decide(given, {});
      CmMessage more = server.proofs.send_more(std::move(said)).value();
      while (said == nullptr) {
        if (!goes_on(more.bytes(), passing)) return tl::unexpected(Error{});
        auto outcome = server.take(passing.pass(client.request(), true));
        if (outcome.answer)
          more = *outcome.answer;
        else if (outcome.client == nullptr || outcome.malformed)
          return tl::unexpected(Error{});
        said = std::move(outcome.client);
      }
      EXPECT_EQ(*said->decision(), given);
    }
    EXPECT_TRUE(said->endpoint() == client.endpoint_data());
    const CmMessage all = said->answer(endpoint_data(), given, kServerQp);
    return client.proof.open_answer(passing.pass(all.bytes(), false), kServerQp);
  }
  /// Whether both ends believe what they have.
  bool run(Passing& passing) {
    auto said = say(passing);
    if (said == nullptr) return false;
    EXPECT_EQ(said->private_data(), client.ours);
    const auto got = answer(std::move(said), passing);
    if (!got) return false;
    EXPECT_EQ(got->private_data, given);
    return true;
  }

  using Error = spinwire::Error;
  std::unique_ptr<Server> own;
  Client client;
  Server& server;
  PrivateData given;
};

class CmPrivateData : public testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] static bool has_key() { return !GetParam().empty(); }
};

TEST_P(CmPrivateData, GoesBothWaysInAsFewRequestsAsItNeeds) {
  constexpr std::array<std::size_t, 12> kSizes{0, 1, 6, 7, 38, 39, 118, 119, 244, 245, 255, 256};
  for (const std::size_t ours : kSizes) {
    for (const std::size_t theirs : kSizes) {
      SCOPED_TRACE(testing::Message() << ours << " and " << theirs << " bytes");
      Pair pair(GetParam(), ours, theirs);
      Passing passing;
      EXPECT_TRUE(pair.run(passing));
      const std::size_t parts = ours == 0 && !has_key() ? 1 : (56 + 2 + ours + 31) / 32;
      const std::size_t more = theirs <= 118 ? 0 : theirs <= 244 ? 1 : 2;
      EXPECT_EQ(passing.requests, (has_key() ? 1 : 0) + parts + more);
      EXPECT_EQ(pair.server.proofs.size(), 0u);
      EXPECT_EQ(all_failures(pair.server.counts) + all_failures(pair.client.counts), 0u);
    }
  }
}

// With a key, their lengths are those of ends that know no private data. Without one, their bytes
// are, but for the bit that says that an end takes some.
TEST_P(CmPrivateData, WithoutAnyTheMessagesAreAsBefore) {
  Pair pair(GetParam());
  Passing passing;
  std::vector<std::size_t> sizes;
  const CmData before = wire::encode_cm(wire_test::valid_endpoint());
  passing.alter = [&](std::size_t number, Bytes& bytes) {
    sizes.push_back(bytes.size());
    if (has_key()) return;
    Bytes masked = bytes;
    constexpr std::size_t kFeaturesAt = 8;
    const auto features = wire::get_number<std::uint32_t>(&masked.at(kFeaturesAt));
    wire::put_number(&masked.at(kFeaturesAt), features & ~wire::feature::cm_private_data);
    EXPECT_EQ(masked, copy(before)) << number;
  };
  EXPECT_TRUE(pair.run(passing));
  EXPECT_EQ(sizes, has_key() ? (std::vector<std::size_t>{56, 80, 56, 20, 56, 76})
                             : (std::vector<std::size_t>{56, 56}));
}

TEST_P(CmPrivateData, ARepeatedRequestGetsTheSameAnswer) {
  Pair pair(GetParam(), 100, 256);
  Passing passing;
  std::vector<Bytes> requests;
  auto said = pair.say(passing);
  ASSERT_NE(said, nullptr);
  said->decide(pair.given, {});
  const Bytes more = copy(pair.server.proofs.send_more(std::move(said)).value().bytes());
  ASSERT_TRUE(pair.goes_on(more, passing));
  const Bytes request = pair.client.request();
  const auto first = pair.server.take(request), again = pair.server.take(request);
  ASSERT_TRUE(first.answer && again.answer);
  EXPECT_EQ(copy(first.answer->bytes()), copy(again.answer->bytes()));
  EXPECT_TRUE(pair.goes_on(again.answer->bytes(), passing));
  EXPECT_NE(pair.server.take(pair.client.request()).client, nullptr);
}

TEST_P(CmPrivateData, PartsOutOfOrderRepeatedOrMissingAreRefused) {
  Pair pair(GetParam(), 256);
  Passing passing;
  std::vector<Bytes> requests;
  passing.alter = [&](std::size_t number, Bytes& bytes) {
    if (number % 2 != 0) return;
    requests.push_back(bytes);
    if (requests.size() < 5) return;
    // Two before: the last one is repeated, and gets its answer again.
    Bytes earlier = requests[requests.size() - 3];
    EXPECT_FALSE(pair.server.take(earlier).refused.empty());
    Bytes later = bytes;
    if (!has_key()) {
      later[40] ^= std::byte{2};  // its number
      EXPECT_FALSE(pair.server.take(later).refused.empty());
    }
  };
  EXPECT_TRUE(pair.run(passing)) << "the handshake itself is not disturbed";
  // Nothing of it serves a second time.
  for (std::size_t i = has_key() ? 1 : 2; i < requests.size(); ++i)
    EXPECT_FALSE(pair.server.take(requests[i]).refused.empty()) << i;
}

// Each request of a program that polls seldom takes a while; all of them take longer than the
// time-out.
TEST_P(CmPrivateData, EachRequestHasTheWholeTimeOut) {
  Pair pair(GetParam(), 256, 256);
  Passing passing;
  passing.alter = [&](std::size_t number, Bytes&) {
    if (number % 2 == 0) pair.server.now += 499'000'000;
  };
  EXPECT_TRUE(pair.run(passing));
  EXPECT_EQ(pair.server.proofs.size(), 0u);
  EXPECT_EQ(all_failures(pair.server.counts) + all_failures(pair.client.counts), 0u);
}

TEST_P(CmPrivateData, ARecordEndsWhenItsClientHasSaidNothingNewForTheTimeOut) {
  constexpr std::uint64_t kPause = 100'000'000;
  Server server(GetParam());
  Client goes_on(GetParam()), stops(GetParam());
  CmEnds other = the_ends();
  other.client_qp ^= 1;
  goes_on.ours = stops.ours = data_of(256, 1);
  const auto ask = [&](Client& client, const CmEnds& ends) {
    const Bytes request = client.request(ends);
    EXPECT_TRUE(
        client.proof.read_rejection(server.take(request, ends).answer.value().bytes()).goes_on);
    server.now += kPause;
    return request;
  };
  (void)ask(goes_on, the_ends());
  (void)ask(stops, other);
  const Bytes last = ask(goes_on, the_ends());
  server.now += 3 * kPause;  // 0.6 s after the first, 0.5 s after the second, 0.4 s after the third
  EXPECT_TRUE(server.take(last).answer) << "it is repeated, which is nothing new";
  EXPECT_EQ(server.proofs.size(), 1u);
  server.now += kPause;
  server.proofs.expire();
  EXPECT_EQ(server.proofs.size(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Keys, CmPrivateData, testing::Values(kKey, std::string()),
                         [](const auto& key) { return key.param.empty() ? "None" : "One"; });

TEST(CmPrivateDataWithAKey, NothingOfItIsReadable) {
  Pair pair(kKey, 256, 256);
  Passing passing;
  const auto unreadable = [](const Bytes& bytes, const PrivateData& data) {
    for (std::size_t i = 0; i + 6 <= data.bytes().size(); ++i) {
      const auto part = data.bytes().subspan(i, 6);
      EXPECT_EQ(std::search(bytes.begin(), bytes.end(), part.begin(), part.end()), bytes.end());
    }
  };
  passing.alter = [&](std::size_t, Bytes& bytes) {
    unreadable(bytes, pair.client.ours);
    unreadable(bytes, pair.given);
  };
  EXPECT_TRUE(pair.run(passing));
  EXPECT_EQ(passing.count, 2u * (11 + 2));
}

TEST(CmPrivateDataWithAKey, AnyOtherByteIsRefused) {
  std::vector<std::size_t> sizes;
  {
    Pair pair(kKey, 40, 250);
    Passing passing;
    passing.alter = [&](std::size_t, Bytes& bytes) { sizes.push_back(bytes.size()); };
    ASSERT_TRUE(pair.run(passing));
  }
  for (std::size_t message = 6; message < sizes.size(); ++message) {
    for (std::size_t at = 0; at < sizes[message]; at += 3) {
      Pair pair(kKey, 40, 250);
      Passing passing;
      passing.alter = [&](std::size_t number, Bytes& bytes) {
        if (number == message) bytes.at(at) ^= std::byte{0x10};
      };
      EXPECT_FALSE(pair.run(passing)) << message << ", byte " << at;
      EXPECT_EQ(all_failures(pair.server.counts) + all_failures(pair.client.counts), 1u)
          << message << ", byte " << at;
    }
  }
}

// With the name of the one handshake, or of the other.
TEST(CmPrivateDataWithAKey, PartsOfAnotherHandshakeAreRefused) {
  Pair pair(kKey, 256);
  Client other(kKey);
  other.ours = data_of(256, 77);
  Passing passing;
  passing.alter = [&](std::size_t number, Bytes& bytes) {
    if (number % 2 != 0) return;
    const Bytes theirs = other.request();
    if (number >= 4) {
      Bytes crossed = theirs;
      std::copy_n(bytes.begin(), 8, crossed.begin());
      EXPECT_FALSE(pair.server.take(crossed).refused.empty()) << number;
      crossed = bytes;
      std::copy_n(theirs.begin(), 8, crossed.begin());
      EXPECT_FALSE(pair.server.take(crossed).refused.empty()) << number;
    }
    const auto outcome = pair.server.take(theirs);
    if (outcome.client != nullptr) return;
    EXPECT_TRUE(other.proof.read_rejection(outcome.answer.value().bytes()).goes_on);
  };
  EXPECT_TRUE(pair.run(passing));
}

TEST(CmPrivateDataWithAKey, OtherEndsThanTheClientNamesAreRefused) {
  Pair pair(kKey, 256);
  Passing passing;
  passing.alter = [&](std::size_t number, Bytes& bytes) {
    if (number % 2 != 0 || number < 4) return;
    CmEnds other = the_ends();
    other.server_gid[3] ^= 1;
    EXPECT_FALSE(pair.server.take(bytes, other).refused.empty()) << number;
  };
  EXPECT_TRUE(pair.run(passing));
}

// Either end may get back what it has said itself.
TEST(CmPrivateDataWithAKey, ReflectedMessagesAreRefused) {
  Pair pair(kKey, 60, 256);
  Passing passing;
  auto said = pair.say(passing);
  ASSERT_NE(said, nullptr);
  said->decide(pair.given, {});
  const Bytes more = copy(pair.server.proofs.send_more(std::move(said)).value().bytes());
  EXPECT_FALSE(pair.server.take(more).answer);
  ASSERT_TRUE(pair.goes_on(more, passing));
  const Bytes request = pair.client.request();
  EXPECT_FALSE(pair.client.proof.read_rejection(more).goes_on) << "it comes a second time";
  EXPECT_TRUE(pair.server.take(request).answer);
}

/// What a server of a release without private data answers to a proof.
Bytes older_answer(std::span<const std::byte> proof) {
  const KeyRing keys = ring(kKey);
  control::NoiseHandshake noise;
  std::byte none{};
  control::begin_noise(noise, keys.first(), "spinwire rdma_cm", proof.first(8));
  EXPECT_TRUE(noise.read_first(proof.subspan(8), &none));
  wire::Authenticated said;
  const wire::Frame headed = wire::encode(said);
  const auto ephemeral = control::make_ephemeral();
  EXPECT_TRUE(noise.write_second(*ephemeral, headed.bytes().first(wire::kHeaderBytes),
                                 std::as_writable_bytes(std::span(said.message)).data()));
  return copy(wire::encode(said).bytes());
}

TEST(CmPrivateDataWithAKey, AServerOfAnOlderReleaseGetsNone) {
  for (const std::size_t size : {0u, 1u}) {
    Client client(kKey);
    client.ours = data_of(size, 1);
    const auto rejection = client.proof.read_rejection(older_answer(client.request()));
    EXPECT_EQ(rejection.goes_on, size == 0);
    if (size == 0) continue;
    ASSERT_TRUE(rejection.failure);
    EXPECT_EQ(rejection.failure->status, Status::unsupported);
    EXPECT_EQ(rejection.failure->asked, "connect through rdma_cm with 1 bytes of private data");
    EXPECT_NE(rejection.failure->remedy.find("Via::tcp"), std::string::npos);
    EXPECT_EQ(all_failures(client.counts), 0u);
  }
}

TEST(CmPrivateDataWithoutAKey, AServerOfAnOlderReleaseGetsNone) {
  Client client("");
  client.ours = data_of(1, 1);
  const Bytes request = client.request();
  // It takes the request for what it knows.
  spinwire::Endpoint none = wire_test::valid_endpoint();
  const auto decoded = wire::decode_cm(request, none);
  ASSERT_FALSE(decoded);
  const auto rejection = client.proof.read_rejection(
      wire::encode_cm_refusal(wire::make_refuse(decoded.error(), false)).bytes());
  ASSERT_TRUE(rejection.failure);
  EXPECT_EQ(rejection.failure->status, Status::unsupported);
}

TEST(CmPrivateDataWithoutAKey, OtherRefusalsStayWhatTheyAre) {
  Client client("");
  client.ours = data_of(1, 1);
  (void)client.request();
  const auto rejection = client.proof.read_rejection(
      wire::encode_cm_refusal(wire::make_refuse(Status::limit, "full")).bytes());
  ASSERT_TRUE(rejection.refusal);
  EXPECT_EQ(rejection.refusal->status, Status::limit);
}

/// A part without a key.
Bytes clear_part(std::span<const std::byte> text, std::uint8_t number) {
  wire::CmPart part;
  std::transform(text.begin(), text.end(), part.sealed.begin(),
                 [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
  part.sealed[wire::kCmPartBytes] = number;
  return copy(wire::encode(part));
}

Bytes first_text() {
  const CmData endpoint = endpoint_data();
  return copy(std::span(endpoint).first(32));
}

/// What a server says to a client whose bytes behind the endpoint are these.
CmProofs::Outcome outcome_of(const Bytes& behind) {
  Server server("");
  Bytes all = copy(endpoint_data());
  all.insert(all.end(), behind.begin(), behind.end());
  CmProofs::Outcome outcome;
  for (std::size_t i = 0; i * 32 < all.size(); ++i)
    outcome =
        server.take(clear_part(std::span(all).subspan(i * 32, 32), static_cast<std::uint8_t>(i)));
  return outcome;
}

TEST(CmPrivateDataWithoutAKey, MalformedLengthsAndBytesBehindAreRefused) {
  Bytes behind(8);
  EXPECT_NE(outcome_of(behind).client, nullptr);
  EXPECT_FALSE(outcome_of(behind).malformed);
  behind[0] = std::byte{5};
  behind[6] = std::byte{1};
  EXPECT_FALSE(outcome_of(behind).malformed);
  behind[7] = std::byte{1};
  ASSERT_TRUE(outcome_of(behind).malformed) << "one byte behind the five";
  EXPECT_EQ(outcome_of(behind).malformed->status, Status::protocol);
  behind = Bytes(8);
  behind[0] = std::byte{1};
  behind[1] = std::byte{1};
  EXPECT_TRUE(outcome_of(behind).malformed) << "257 bytes";
}

TEST(CmPrivateDataWithoutAKey, APartThatIsNotTheFirstBeginsNothing) {
  Server server("");
  const Bytes text = first_text();
  EXPECT_FALSE(server.take(clear_part(text, 1)).refused.empty());
  EXPECT_FALSE(server.take(clear_part(Bytes(32), 0)).refused.empty());
  EXPECT_EQ(server.proofs.size(), 0u);
  EXPECT_TRUE(server.take(clear_part(text, 0)).answer);
  EXPECT_EQ(server.proofs.size(), 1u);
  // The client begins again.
  EXPECT_TRUE(server.take(clear_part(text, 0)).answer);
  EXPECT_EQ(server.proofs.size(), 1u);
  server.now += 500'000'000;
  server.proofs.expire();
  EXPECT_EQ(server.proofs.size(), 0u);
  EXPECT_EQ(all_failures(server.counts), 0u);
}

TEST(CmPrivateDataWithoutAKey, PartsOfOtherEndsArePartsOfAnotherHandshake) {
  Pair pair("", 256);
  Passing passing;
  passing.alter = [&](std::size_t number, Bytes& bytes) {
    if (number % 2 != 0 || number == 0) return;
    CmEnds other = the_ends();
    other.client_qp ^= 1;
    EXPECT_FALSE(pair.server.take(bytes, other).refused.empty()) << number;
  };
  EXPECT_TRUE(pair.run(passing));
}

TEST(CmPrivateDataWithoutAKey, AHostThatBeginsMuchGivesWayItself) {
  Server server("", 4);
  Client honest("");
  honest.ours = data_of(100, 1);
  const auto first = server.take(honest.request(), the_ends(), 7);
  const Bytes text = first_text();
  for (std::uint32_t i = 0; i < 10; ++i) {
    CmEnds ends = the_ends();
    ends.client_qp = i;
    EXPECT_TRUE(server.take(clear_part(text, 0), ends, 8).answer);
  }
  EXPECT_EQ(server.proofs.size(), 4u);
  ASSERT_TRUE(honest.proof.read_rejection(first.answer.value().bytes()).goes_on);
  EXPECT_TRUE(server.take(honest.request(), the_ends(), 7).answer);
}

TEST(CmPrivateDataWithoutAKey, ARequestForMoreHasNothingElse) {
  Pair pair("", 0, 256);
  Passing passing;
  auto said = pair.say(passing);
  said->decide(pair.given, {});
  (void)pair.server.proofs.send_more(std::move(said));
  Bytes text(32);
  text[31] = std::byte{1};
  wire::CmPart part = wire::decode_cm_part(clear_part(text, 0)).value();
  const CmData endpoint = endpoint_data();
  for (std::size_t i = 0; i < 4; ++i)
    part.handshake.at(i) = std::to_integer<std::uint8_t>(endpoint.at(wire::kCmIncarnationAt + i));
  EXPECT_TRUE(pair.server.take(wire::encode(part)).malformed);
}

/// A client that leaves in the middle of its handshake, and keeps a record at the server.
void leave(Server& server, std::size_t ours, std::size_t requests) {
  Pair pair(server, ours, 256);
  Passing passing;
  passing.alter = [&](std::size_t, Bytes& bytes) {
    if (passing.requests == requests) bytes.clear();  // it sends this one no more
  };
  auto said = pair.say(passing);
  if (said != nullptr) (void)pair.answer(std::move(said), passing);
  ASSERT_EQ(server.proofs.size(), 1u);
}

/// The same client, which has other words now, and gets other bytes.
void come_again(Server& server, std::size_t ours, std::size_t theirs) {
  Pair pair(server, ours, theirs);
  pair.client.endpoint.credits ^= 1;
  pair.given = data_of(theirs, 7);
  Passing passing;
  EXPECT_TRUE(pair.run(passing));
  EXPECT_EQ(server.proofs.size(), 0u);
}

TEST(CmPrivateDataWithoutAKey, AClientThatSaidNothingAndComesAgainSaysNothingAgain) {
  for (const std::size_t requests : {1u, 2u}) {
    for (const std::size_t theirs : {119u, 256u}) {
      SCOPED_TRACE(testing::Message() << requests << " requests, then " << theirs << " bytes");
      Server server("");
      leave(server, 0, requests);
      come_again(server, 0, theirs);
    }
  }
}

TEST(CmPrivateDataWithoutAKey, AClientThatSaidNothingAndComesAgainSaysSomething) {
  for (const std::size_t requests : {1u, 2u}) {
    SCOPED_TRACE(requests);
    Server server("");
    leave(server, 0, requests);
    come_again(server, 100, 256);
  }
}

TEST(CmPrivateDataWithoutAKey, AClientThatSaidSomethingAndComesAgainSaysNothing) {
  for (const std::size_t requests : {1u, 3u, 5u, 6u}) {
    SCOPED_TRACE(requests);
    Server server("");
    leave(server, 100, requests);
    come_again(server, 0, 256);
  }
}

// Two requests of one client may have come before the application was asked.
TEST(CmPrivateDataWithoutAKey, AClientHasOneRecord) {
  Pair pair("", 0, 256);
  Passing passing;
  auto first = pair.say(passing), second = pair.say(passing);
  for (auto* const said : {&first, &second}) {
    (*said)->decide(pair.given, {});
    (void)pair.server.proofs.send_more(std::move(*said));
    EXPECT_EQ(pair.server.proofs.size(), 1u);
  }
}

// The older request waited for room at the server, and its client has given it up.
TEST(CmPrivateDataWithoutAKey, AnOlderRequestThatGoesOnLateEndsNoNewerHandshake) {
  for (const std::size_t ours : {0u, 100u}) {
    for (const std::size_t request : {1u, 2u}) {
      SCOPED_TRACE(testing::Message() << ours << " bytes, at request " << request);
      Pair older("", ours, 256);
      Passing passing;
      auto held = older.say(passing);
      ASSERT_NE(held, nullptr);
      Pair newer(*older.own, 100, 256);
      Passing meanwhile;
      meanwhile.alter = [&](std::size_t, Bytes&) {
        if (meanwhile.requests != request || held == nullptr) return;
        ASSERT_EQ(older.server.proofs.size(), 1u);
        held->decide(older.given, {});
        EXPECT_FALSE(older.server.proofs.send_more(std::move(held)));
      };
      EXPECT_TRUE(newer.run(meanwhile));
      EXPECT_EQ(held, nullptr);
      EXPECT_EQ(older.server.proofs.size(), 0u);
    }
  }
}

TEST(CmPrivateDataWithoutAKey, AnotherHostThatClaimsTheSameEndsChangesNothing) {
  Pair pair("", 60, 256);
  Passing passing;
  passing.alter = [&](std::size_t number, Bytes& bytes) {
    if (number % 2 != 0) return;
    EXPECT_EQ(pair.server.take(bytes, the_ends(), 2).refused.empty(), number == 0);
    EXPECT_TRUE(pair.server.take(pair.client.endpoint_data(), the_ends(), 2).is_plain);
  };
  EXPECT_TRUE(pair.run(passing));
}

TEST(CmPrivateDataWithoutAKey, AnAnswerBeforeAllIsSaidIsRefused) {
  Client client("");
  client.ours = data_of(100, 1);
  (void)client.request();
  const auto opened = client.proof.open_answer(endpoint_data(), kServerQp);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().status, Status::protocol);
}

}  // namespace
}  // namespace cm_private_data_test
