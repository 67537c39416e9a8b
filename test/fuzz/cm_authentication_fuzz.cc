// An attacker between clients and a server that authenticate each other through rdma_cm: it passes
// messages on, alters, cuts, repeats, reflects and replays them, gives them to another handshake,
// and names other ends. A server believes only the endpoint that a client with its key has given
// for these ends, and a client only the server's answer to it.
#include <algorithm>
#include <array>
#include <optional>
#include <string>
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

struct Client {
  explicit Client(const control::KeyRing& keys, std::uint8_t number)
      : proof(keys, counts), sample(sample_endpoint()) {
    sample.incarnation += number;
    ends.client_gid.fill(number);
    ends.server_gid.fill(0x77);
    ends.client_qp = number;
  }
  [[nodiscard]] CmData endpoint() const { return wire::encode_cm(sample); }

  control::AuthenticationCounts counts;
  control::CmClientProof proof;
  Endpoint sample;
  CmEnds ends;
  std::optional<CmData> request;
  int requests = 0;  ///< in turn
  bool is_over = false;
};

control::KeyRing ring(char digit) {
  return std::move(*control::KeyRing::parse("key " + std::string(64, digit), "keys"));
}

class World {
 public:
  explicit World(std::uint8_t settings)
      : shares_key_((settings & 1) == 0),
        client_keys_(ring('a')),
        server_keys_(ring(shares_key_ ? 'a' : 'b')) {}

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

  void note(std::span<const std::byte> bytes) {
    if (said_.size() < kMostMessages) said_.push_back(alone(bytes));
  }
  const Bytes& earlier(Input& in) { return said_[in.take<std::uint8_t>() % said_.size()]; }

  void ask(Client& client) {
    if (client.request || client.is_over) return;
    const auto made = client.proof.next_request(client.endpoint(), client.ends);
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
    std::optional<Bytes> back = give(request, ends);
    if (!back) return;
    if (what == Act::answer && !back->empty())
      (*back)[in.take<std::uint8_t>() % back->size()] ^= std::byte{0x10};
    client.requests == 3 ? accept(client, *back) : reject(client, *back);
  }

  /// Gives a request to the server. Answers what it says in return.
  std::optional<Bytes> give(std::span<const std::byte> data, const CmEnds& ends) {
    const Bytes bytes = alone(data);
    const std::uint64_t failed = failures(counts_);
    auto outcome = proofs_.on_request(bytes, {}, ends);
    expect(outcome.has_value(), "there are random numbers");
    expect(proofs_.size() <= kMostRecords, "records have a limit");
    if (outcome->proof != nullptr) return believe(*outcome, ends);
    expect(outcome->answer.has_value() != !outcome->refused.empty(), "an answer or a reason");
    if (!outcome->answer) {
      expect(failures(counts_) > failed, "a refusal is counted");
      return std::nullopt;
    }
    expect(shares_key_, "strangers get no answer");
    note(outcome->answer->bytes());
    return alone(outcome->answer->bytes());
  }

  /// The server has the last request of a client.
  Bytes believe(control::CmProofs::Outcome& outcome, const CmEnds& ends) {
    expect(shares_key_, "strangers are not believed");
    const auto named = [&](const Client& client) {
      return client.requests == 3 && client.endpoint() == outcome.endpoint &&
             client.ends.client_gid == ends.client_gid &&
             client.ends.server_gid == ends.server_gid && client.ends.client_qp == ends.client_qp;
    };
    const auto client = std::find_if(clients_.begin(), clients_.end(), named);
    expect(client != clients_.end(), "a client has said this for these ends");
    Answered made{&*client, alone(wire::encode(outcome.proof->seal(answer_for(*client), 9)))};
    answers_.push_back(made);
    note(made.answer);
    return made.answer;
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
    expect(!rejection.refusal, "the server refuses nobody that has the key");
    expect(rejection.goes_on != rejection.failure.has_value(), "it goes on, or has a reason");
    if (rejection.goes_on) {
      expect(shares_key_ && client.requests < 3, "only a server with the key answers");
      return;
    }
    expect(failures(client.counts) == failed + 1, "a failure is counted");
    client.is_over = true;
  }

  void accept(Client& client, std::span<const std::byte> data) {
    const Bytes bytes = alone(data);
    const auto opened = client.proof.open_answer(bytes, 9);
    client.request.reset();
    client.is_over = true;
    if (!opened) return expect(failures(client.counts) == 1, "a failure is counted");
    expect(*opened == answer_for(client), "the answer is for this client");
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

  bool shares_key_;
  std::uint64_t now_ = 1;
  Clock clock_ = Clock::manual(&now_);
  control::KeyRing client_keys_, server_keys_;
  control::AuthenticationCounts counts_;
  control::CmProofs proofs_{server_keys_, counts_, clock_, kMostRecords,
                            std::chrono::milliseconds(500)};
  std::array<Client, 4> clients_{Client(client_keys_, 1), Client(client_keys_, 2),
                                 Client(client_keys_, 3), Client(client_keys_, 4)};
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
  again(wire::decode_cm_half(bytes));
  again(wire::decode_cm_continue(bytes));
  again(wire::decode_cm_answer(bytes));
  again(wire::decode_cm_sealed_refusal(bytes));
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
  const std::string whole = round(0) + round(0) + round(0);
  for (const char settings : {'\0', '\1'}) {
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
    const auto plain = wire::encode_cm(sample_endpoint());
    seeds.add(first + act(Act::say, 0, 56) + std::string(text_of(plain)));
  }
  seeds.add(wire::encode(wire::CmProof{{1, 2, 3, 4}, {5}}));
  seeds.add(wire::encode(wire::CmHalf{{1, 2, 3, 4}, {5}}));
  seeds.add(wire::encode(wire::CmContinue{{1}}));
  seeds.add(wire::encode(wire::CmAnswer{{1}}));
  seeds.add(wire::encode(wire::CmRefusal{{1}}));
  seeds.add(wire::encode(wire::Authenticated{{1}}).bytes());
}

}  // namespace fuzz
