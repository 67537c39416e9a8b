// An attacker between clients and a server that authenticate each other through rdma_cm: it passes
// messages on, alters, cuts, repeats, reflects and replays them, gives them to another handshake,
// and names other ends. A server believes only the endpoint and private data that a client with one
// of its keys has given for these ends, and knows which key; a client believes only the server's
// answer to it. Without a key, both believe anything, within their limits.
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/random.h"
#include "control/cm_authentication.h"
#include "fuzz/fuzz.h"
#include "fuzz/samples.h"
#include "wire/cm_data.h"

namespace fuzz {
namespace {

using namespace spinwire;
using control::CmData;
using control::CmEnds;

constexpr int kMostActs = 48;
constexpr std::size_t kMostMessages = 128;
constexpr std::uint32_t kMostRecords = 3;

/// What the attacker does; the numbers are those of the seeds.
enum class Act : std::uint8_t {
  ask,        ///< a client makes its next request
  pass,       ///< its last request goes to the server, and the rejection back
  alter,      ///< the same, with one other byte in the request
  answer,     ///< the same, with one other byte in what comes back
  replay,     ///< an earlier message, of either end, goes to the server
  reflect,    ///< an earlier message, of either end, goes to a client as a rejection
  accept,     ///< or as an answer
  say,        ///< bytes of the attacker's go to the server
  elsewhere,  ///< the last request goes to the server, with other ends
  wait,       ///< time passes
  count,
};

// Of the four clients, and for them.
constexpr std::array<std::size_t, 4> kSaid{0, 7, 38, 256};
constexpr std::array<std::size_t, 4> kGiven{0, 256, 118, 119};

struct Client {
  explicit Client(const control::KeyRing& keys, std::uint8_t number)
      : proof(keys, counts),
        sample(sample_endpoint()),
        ours(sample_private_data(kSaid.at(number - 1u))),
        given(sample_private_data(kGiven.at(number - 1u))) {
    sample.incarnation += number;
    ends.client_gid.fill(number);
    ends.server_gid.fill(0x77);
    ends.client_qp = number;
  }
  [[nodiscard]] CmData endpoint() const {
    return wire::encode_cm(sample, {.features = wire::feature::cm_private_data});
  }
  /// Requests until it has said all.
  [[nodiscard]] int most() const {
    return static_cast<int>(1 + wire::cm_parts(ours.bytes().size()));
  }

  control::AuthenticationCounts counts;
  control::CmClient proof;
  Endpoint sample;
  PrivateData ours;   ///< that it gives
  PrivateData given;  ///< to it
  CmEnds ends;
  std::optional<CmData> request;
  int requests = 0;  ///< in turn
  bool is_over = false;
};

/// A ring of the keys with these names, in this order.
control::KeyRing ring(std::string_view names) {
  if (names.empty()) return {};
  std::string text;
  for (const char name : names) text += name + (' ' + std::string(64, name)) + '\n';
  return std::move(*control::KeyRing::parse(text, "keys"));
}

class World {
 public:
  /// Bits of the settings: the server lacks the keys that the clients prove; nobody has a key. The
  /// first two clients prove the key `a`, the others `b`. All have the key `c`, which nobody
  /// proves.
  explicit World(std::uint8_t settings)
      : has_keys_((settings & 2) == 0),
        shares_key_(has_keys_ && (settings & 1) == 0),
        client_keys_{ring(has_keys_ ? "ac" : ""), ring(has_keys_ ? "bc" : "")},
        server_keys_(ring(!has_keys_    ? ""
                          : shares_key_ ? "acb"
                                        : "dc")) {}

  void act(Act what, Input& in) {
    const auto detail = in.take<std::uint8_t>();
    Client& client = clients_[detail % clients_.size()];
    switch (what) {
      case Act::ask:
        return ask(client);
      case Act::say:
        return (void)give(in.bytes(in.take<std::uint8_t>()), client.ends);
      case Act::replay:
        if (!said_.empty()) (void)give(earlier(in), client.ends);
        return;
      case Act::reflect:
        if (!said_.empty() && client.request) reject(client, earlier(in));
        return;
      case Act::accept:
        if (!said_.empty() && client.request) accept(client, earlier(in));
        return;
      case Act::wait:
        now_ += 100'000'000u * detail;
        return proofs_.expire();
      default:
        return pass(client, what, in);
    }
  }

 private:
  struct Answered {
    const Client* client = nullptr;
    Bytes answer;
  };
  /// What the server says to a request.
  struct Said {
    Bytes bytes;
    bool is_answer = false;
  };

  void note(std::span<const std::byte> bytes) {
    if (said_.size() < kMostMessages) said_.push_back(alone(bytes));
  }
  const Bytes& earlier(Input& in) { return said_[in.take<std::uint8_t>() % said_.size()]; }

  void ask(Client& client) {
    if (client.request || client.is_over) return;
    const auto made = client.proof.next_request(client.endpoint(), client.ours, client.ends);
    expect(made.has_value(), "a request is made");
    client.request = *made;
    ++client.requests;
    note(*made);
  }

  void pass(Client& client, Act what, Input& in) {
    if (!client.request) return;
    Bytes request = alone(*client.request);
    CmEnds ends = client.ends;
    if (what == Act::alter) request[in.take<std::uint8_t>() % request.size()] ^= std::byte{0x10};
    if (what == Act::elsewhere) ends.server_gid[in.take<std::uint8_t>() % 16] ^= 1;
    std::optional<Said> back = give(request, ends);
    if (!back) return;
    Bytes& bytes = back->bytes;
    if (what == Act::answer && !bytes.empty())
      bytes[in.take<std::uint8_t>() % bytes.size()] ^= std::byte{0x10};
    back->is_answer ? accept(client, bytes) : reject(client, bytes);
  }

  /// Gives a request to the server. Answers what it says in return.
  std::optional<Said> give(std::span<const std::byte> data, const CmEnds& ends) {
    const Bytes bytes = alone(data);
    const std::uint64_t failed = failures(counts_);
    auto outcome = proofs_.on_request(bytes, {}, ends);
    expect(outcome.has_value(), "there are random numbers");
    expect(proofs_.size() <= kMostRecords, "records have a limit");
    if (outcome->malformed) {
      expect(!has_keys_, "a client with the key says nothing malformed");
      return std::nullopt;
    }
    if (outcome->is_plain) {
      expect(!has_keys_, "with a key there is a proof");
      if (bytes.size() < wire::kCmDataBytes) return std::nullopt;
      CmData said{};
      std::copy_n(bytes.begin(), said.size(), said.begin());
      return answer(
          std::make_unique<control::CmServer>(said, control::Source{}, ends, outcome->number),
          nullptr);
    }
    if (outcome->client != nullptr) return believe(std::move(outcome->client), ends);
    expect(outcome->answer.has_value() != !outcome->refused.empty(), "an answer or a reason");
    if (!outcome->answer) {
      expect(failures(counts_) > failed || !has_keys_, "a refusal is counted");
      return std::nullopt;
    }
    expect(shares_key_ || !has_keys_, "strangers get no answer");
    note(outcome->answer->bytes());
    return Said{alone(outcome->answer->bytes()), false};
  }

  /// A client has said all to the server.
  Said believe(std::unique_ptr<control::CmServer> said, const CmEnds& ends) {
    expect(shares_key_ || !has_keys_, "strangers are not believed");
    if (!has_keys_) return answer(std::move(said), nullptr);
    const auto named = [&](const Client& client) {
      return client.requests >= client.most() && client.endpoint() == said->endpoint() &&
             client.ours == said->private_data() && client.ends.client_gid == ends.client_gid &&
             client.ends.server_gid == ends.server_gid && client.ends.client_qp == ends.client_qp;
    };
    const auto client = std::find_if(clients_.begin(), clients_.end(), named);
    expect(client != clients_.end(), "a client has said this for these ends");
    expect(said->key() == client->proof.key().view(), "and has proved this key");
    return answer(std::move(said), &*client);
  }

  /// `client` null: without a key, any client.
  Said answer(std::unique_ptr<control::CmServer> said, const Client* client) {
    const PrivateData given = client != nullptr ? client->given : clients_[1].given;
    if (said->decision() != nullptr) {
      expect(*said->decision() == given, "the decision is for this client");
    } else if (given.bytes().size() > wire::kCmAnswerData) {
      said->decide(given, {});
      const auto more = proofs_.send_more(std::move(said));
      expect(more.has_value(), "it is the newest handshake of its client");
      expect(proofs_.size() <= kMostRecords, "records have a limit");
      note(more->bytes());
      return {alone(more->bytes()), false};
    }
    const CmData ours = client != nullptr ? answer_for(*client) : answer_for(clients_[0]);
    Answered made{client, alone(said->answer(ours, given, 9).bytes())};
    answers_.push_back(made);
    note(made.answer);
    return {made.answer, true};
  }
  static CmData answer_for(const Client& client) {
    Endpoint server = sample_endpoint();
    server.credits += client.ends.client_qp;
    return wire::encode_cm(server);
  }

  void reject(Client& client, std::span<const std::byte> data) {
    const Bytes bytes = alone(data);
    const std::uint64_t failed = failures(client.counts);
    const auto rejection = client.proof.read_rejection(bytes);
    client.request.reset();
    expect(!rejection.refusal || !has_keys_, "the server refuses nobody that has the key");
    expect(rejection.goes_on != (rejection.failure.has_value() || rejection.refusal.has_value()),
           "it goes on, or has a reason");
    if (rejection.goes_on) {
      expect(shares_key_ || !has_keys_, "only a server with the key answers");
      expect(client.requests < client.most() + 2, "a client asks as often as it needs to");
      return;
    }
    expect(failures(client.counts) == failed + (has_keys_ ? 1u : 0u), "a failure is counted");
    client.is_over = true;
  }

  void accept(Client& client, std::span<const std::byte> data) {
    const Bytes bytes = alone(data);
    const auto opened = client.proof.open_answer(bytes, 9);
    client.request.reset();
    client.is_over = true;
    if (!has_keys_) return;
    if (!opened) return expect(failures(client.counts) == 1, "a failure is counted");
    expect(opened->endpoint == answer_for(client) && opened->private_data == client.given,
           "the answer is for this client");
    const auto its = [&](const Answered& made) {
      return made.client == &client &&
             same(std::span(bytes).first(made.answer.size()), made.answer);
    };
    expect(std::any_of(answers_.begin(), answers_.end(), its), "the server has answered it");
  }

  static std::uint64_t failures(const control::AuthenticationCounts& counts) {
    std::uint64_t sum = 0;
    for (const std::uint64_t count : counts.failures) sum += count;
    return sum;
  }

  bool has_keys_;
  bool shares_key_;
  std::uint64_t now_ = 1;
  Clock clock_ = Clock::manual(&now_);
  std::array<control::KeyRing, 2> client_keys_;
  control::KeyRing server_keys_;
  control::AuthenticationCounts counts_;
  control::CmProofs proofs_{server_keys_, counts_, clock_, kMostRecords,
                            std::chrono::milliseconds(500)};
  std::array<Client, 4> clients_{Client(client_keys_[0], 1), Client(client_keys_[0], 2),
                                 Client(client_keys_[1], 3), Client(client_keys_[1], 4)};
  std::vector<Bytes> said_;
  std::vector<Answered> answers_;
};

/// Each decoder, with bytes of any kind.
void decode(std::span<const std::byte> data) {
  const Bytes bytes = alone(data);
  const auto again = [&](const auto& decoded) {
    if (decoded)
      expect(same(wire::encode(*decoded), std::span(bytes).first(wire::encode(*decoded).size())),
             "what was decoded is encoded");
  };
  again(wire::decode_cm_proof(bytes));
  again(wire::decode_cm_part(bytes));
  again(wire::decode_cm_continue(bytes));
  again(wire::decode_cm_answer(bytes));
  again(wire::decode_cm_sealed_refusal(bytes));
  again(wire::decode_cm_more(bytes));
  again(wire::decode_cm_long_answer(bytes));
  wire::CmPieces pieces;
  if (pieces.add(bytes, true)) {
    const PrivateData got = pieces.data();
    Bytes made(bytes.size());
    expect(wire::encode_cm_piece(got, 0, made) == got.bytes().size() && same(made, bytes),
           "private data that was decoded is encoded");
  }
  const auto authenticated = wire::decode_cm_authenticated(bytes);
  if (authenticated)
    expect(same(authenticated->header, std::span(bytes).first(wire::kHeaderBytes)), "the header");
}

}  // namespace

void run(std::span<const std::byte> data) {
  const base::SeedSource source(1);
  decode(data);
  Input in(data);
  World world(in.take<std::uint8_t>());
  for (int i = 0; i < kMostActs && !in.empty(); ++i) {
    const auto what = in.take<std::uint8_t>() % static_cast<std::uint8_t>(Act::count);
    world.act(static_cast<Act>(what), in);
  }
}

void sow(Seeds& seeds) {
  const auto act = [](Act what, int detail, int more = -1) {
    std::string bytes{static_cast<char>(what), static_cast<char>(detail)};
    if (more >= 0) bytes.push_back(static_cast<char>(more));
    return bytes;
  };
  const auto round = [&](int client) { return act(Act::ask, client) + act(Act::pass, client); };
  const auto rounds = [&](int client, int count) {
    std::string all;
    for (int i = 0; i < count; ++i) all += round(client);
    return all;
  };
  const std::string whole = rounds(0, 3);
  for (const char settings : {'\0', '\1', '\2'}) {
    const std::string first(1, settings);
    seeds.add(first + whole);
    seeds.add(first + whole + round(1) + act(Act::replay, 0, 0) + act(Act::replay, 0, 2));
    seeds.add(first + act(Act::ask, 0) + act(Act::alter, 0, 20) + act(Act::pass, 0));
    seeds.add(first + round(0) + act(Act::ask, 0) + act(Act::alter, 0, 20) +
              act(Act::answer, 0, 9));
    seeds.add(first + round(0) + round(0) + act(Act::ask, 0) + act(Act::elsewhere, 0, 3) +
              act(Act::pass, 0));
    seeds.add(first + round(0) + round(0) + act(Act::ask, 0) + act(Act::answer, 0, 30));
    seeds.add(first + round(0) + act(Act::ask, 1) + act(Act::reflect, 1, 1));
    seeds.add(first + whole + act(Act::ask, 1) + act(Act::accept, 1, 5));
    seeds.add(first + round(0) + round(1) + round(2) + round(3) + act(Act::wait, 9) + round(0));
    // The others give private data, and get some.
    seeds.add(first + rounds(1, 6) + act(Act::replay, 1, 4) + act(Act::replay, 1, 8));
    seeds.add(first + rounds(2, 4) + rounds(3, 13));
    seeds.add(first + rounds(3, 4) + act(Act::ask, 3) + act(Act::alter, 3, 30) +
              act(Act::answer, 3, 30));
    seeds.add(first + rounds(1, 4) + act(Act::ask, 1) + act(Act::reflect, 1, 7) + rounds(1, 2));
    seeds.add(first + rounds(1, 3) + rounds(3, 3) + act(Act::ask, 1) + act(Act::elsewhere, 1, 3) +
              act(Act::wait, 9) + rounds(3, 3));
    const auto plain = wire::encode_cm(sample_endpoint());
    seeds.add(first + act(Act::say, 0, 56) + std::string(text_of(plain)));
  }
  seeds.add(wire::encode(wire::CmProof{{1, 2, 3, 4}, {5}}));
  seeds.add(wire::encode(wire::CmPart{{1, 2, 3, 4}, {5}}));
  seeds.add(wire::encode(wire::CmContinue{{1}}));
  seeds.add(wire::encode(wire::CmAnswer{{1}}));
  seeds.add(wire::encode(wire::CmRefusal{{1}}));
  seeds.add(wire::encode(wire::Authenticated{{1}}).bytes());
  seeds.add(wire::encode(wire::CmMore{{1}}));
  seeds.add(wire::encode(wire::CmLongAnswer{{1}}));
  std::array<std::byte, 20> piece;
  (void)wire::encode_cm_piece(sample_private_data(7), 0, piece);
  seeds.add(piece);
  (void)wire::encode_cm_piece(sample_private_data(256), 0, piece);
  seeds.add(piece);
}

}  // namespace fuzz
