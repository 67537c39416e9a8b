// An attacker between a client and a server that have keys: it passes frames on, alters, drops,
// repeats and replays them, and says what it likes to either end. An end hears only what the other
// end has said, in that order and without gaps, and nothing at all unless the server has the key
// that the client proves. Both then know the other by the name of that key.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/random.h"
#include "control/exchange.h"
#include "fuzz/fuzz.h"
#include "fuzz/samples.h"
#include "wire/codec.h"

namespace fuzz {
namespace {

using namespace spinwire;
using control::Exchange;
using control::KeyRing;
using control::Progress;
using wire::FrameKind;

constexpr int kMostActs = 64;
constexpr std::size_t kMostFrames = 256;
constexpr wire::KindSet kAny =
    wire::kinds(FrameKind::hello, FrameKind::accept, FrameKind::ready, FrameKind::open_session,
                FrameKind::session_opened, FrameKind::join_session, FrameKind::path_response);

/// What the attacker does; the numbers are those of the seeds.
enum class Act : std::uint8_t {
  pass,    ///< the next frame goes on
  speak,   ///< an end sends a frame
  alter,   ///< the next frame goes on with one other byte
  drop,    ///< the next frame does not go on
  repeat,  ///< the next frame goes on twice
  replay,  ///< an earlier frame, of either end, goes to one of them
  say,     ///< bytes of the attacker's
  cut,     ///< a stream ends
  refuse,  ///< an end refuses
  claim,   ///< the next frame goes on; if it is a proof, it names another key of the server
  count,
};

/// Gives connections whose other end is the attacker's.
class Network : public control::Network {
 public:
  Result<Listening> listen(const control::Address&) override {
    return tl::unexpected(Error{Status::system, "listen", "nobody listens here", ""});
  }
  Result<control::Connecting> connect(const control::Address&) override {
    std::array<int, 2> ends{};
    expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0,
           "a pair of sockets");
    other.reset(ends[1]);
    control::Connecting made;
    made.fd.reset(ends[0]);
    return made;
  }
  [[nodiscard]] const std::uint64_t* change_count() const noexcept override { return &changes_; }

  base::UniqueFd other;

 private:
  std::uint64_t changes_ = 0;
};

/// One end, and the attacker's side of its stream.
struct End {
  Exchange exchange;
  base::UniqueFd line;
  bool is_over = false;
  std::vector<Bytes> said;  ///< frames that the end's owner has sent
  std::size_t heard = 0;    ///< of the other end's frames
  Bytes buffer;             ///< what the end has put on its line
  bool is_refusing = false;
};

/// A ring of the keys with these names, in this order.
KeyRing ring(std::string_view names) {
  std::string text;
  for (const char name : names) text += name + (' ' + std::string(64, name)) + '\n';
  return std::move(*KeyRing::parse(text, "keys"));
}

class World {
 public:
  /// Bits of the settings: the server lacks the key that the client proves; the client proves the
  /// key `b`, not `a`. Both ends have the key `c`, which the client does not prove.
  explicit World(std::uint8_t settings)
      : shares_key_((settings & 1) == 0),
        proves_((settings & 2) == 0 ? 'a' : 'b'),
        client_keys_(ring(proves_ == 'a' ? "ac" : "bc")),
        server_keys_(ring(shares_key_      ? "acb"
                          : proves_ == 'a' ? "bc"
                                           : "ca")) {
    const auto address = *control::Address::parse("127.0.0.1:7");
    expect(client_.exchange.connect(address, kAny, &network_, &client_keys_).has_value(),
           "a connection begins");
    client_.line = std::move(network_.other);
    expect(network_.connect(address)
               .map([&](control::Connecting made) {
                 server_.exchange.adopt(std::move(made.fd), address, kAny, &server_keys_);
               })
               .has_value(),
           "a connection comes");
    server_.line = std::move(network_.other);
    step();
  }

  void act(Act what, Input& in) {
    const auto detail = in.take<std::uint8_t>();
    End& from = detail % 2 == 0 ? client_ : server_;
    End& to = detail % 2 == 0 ? server_ : client_;
    switch (what) {
      case Act::speak:
        speak(from, detail);
        break;
      case Act::say:
        put(to, in.bytes(in.take<std::uint8_t>()));
        break;
      case Act::cut:
        (void)::shutdown(from.line.get(), SHUT_WR);
        break;
      case Act::replay:
        if (!passed_.empty()) put(to, passed_[in.take<std::uint8_t>() % passed_.size()]);
        break;
      case Act::refuse:
        from.is_refusing = true;
        (void)from.exchange.refuse(wire::make_refuse(Status::limit, "no more"));
        break;
      default:
        forward(what, from, to, in);
        break;
    }
    step();
  }

 private:
  static void put(const End& to, std::span<const std::byte> bytes) {
    (void)::send(to.line.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  static void speak(End& end, std::uint8_t detail) {
    const Endpoint e = sample_endpoint();
    const std::array frames{wire::encode(wire::Hello{e}),
                            wire::encode(wire::Accept{e}),
                            wire::encode(wire::Ready{1u + detail}),
                            wire::encode(wire::PathResponse{1u + detail}),
                            wire::encode(wire::JoinSession{e, 5, 6}),
                            wire::encode(wire::OpenSession{sample_session()})};
    const wire::Frame& frame = frames[detail / 2 % frames.size()];
    if (end.exchange.send(frame) == Status::ok)
      end.said.emplace_back(frame.bytes().begin(), frame.bytes().end());
  }

  void forward(Act what, End& from, End& to, Input& in) {
    const std::optional<Bytes> next = take_frame(from);
    if (!next) return;
    Bytes frame = *next;
    if (what == Act::drop) return;
    if (what == Act::alter) frame[in.take<std::uint8_t>() % frame.size()] ^= std::byte{0x10};
    if (what == Act::claim && kind_of(frame) == FrameKind::authenticate) {
      const auto& keys = server_keys_.all();
      const control::KeyId& id = keys[in.take<std::uint8_t>() % keys.size()].id;
      std::copy_n(std::as_bytes(std::span(id)).begin(), id.size(),
                  frame.begin() + wire::kHeaderBytes);
    }
    put(to, frame);
    if (what == Act::repeat) put(to, frame);
  }

  std::optional<Bytes> take_frame(End& from) {
    if (from.buffer.size() < wire::kHeaderBytes) return std::nullopt;
    const std::size_t size =
        wire::kHeaderBytes + wire::get_number<std::uint16_t>(from.buffer.data() + 10);
    expect(from.buffer.size() >= size, "an end sends whole frames");
    const auto at = from.buffer.begin() + static_cast<std::ptrdiff_t>(size);
    Bytes frame(from.buffer.begin(), at);
    from.buffer.erase(from.buffer.begin(), at);
    check_frame(from, frame);
    if (passed_.size() < kMostFrames) passed_.push_back(frame);
    return frame;
  }

  static FrameKind kind_of(std::span<const std::byte> frame) {
    return static_cast<FrameKind>(wire::get_number<std::uint16_t>(frame.data() + 8));
  }

  /// No end says anything in the clear but its proof, and the refusal of strangers.
  void check_frame(const End& from, std::span<const std::byte> frame) const {
    const FrameKind kind = kind_of(frame);
    const bool is_client = &from == &client_;
    if (kind == FrameKind::refuse) {
      const auto refusal =
          wire::encode(wire::make_refuse(Status::refused, "authentication required"));
      expect(!is_client && same(frame, refusal.bytes()), "a refusal says nothing");
      return;
    }
    expect(kind == FrameKind::sealed ||
               kind == (is_client ? FrameKind::authenticate : FrameKind::authenticated),
           "a proof or a sealed frame");
    expect(shares_key_ || (is_client && kind == FrameKind::authenticate),
           "without a common key there is no answer");
  }

  void step() {
    for (int round = 0; round < 4; ++round) {
      step(client_, server_);
      step(server_, client_);
    }
  }
  void step(End& end, const End& other) {
    if (!end.is_over) {
      const Progress progress = end.exchange.advance();
      if (progress == Progress::frame && !end.is_refusing) hear(end, other);
      if (progress == Progress::failed) {
        expect(!end.exchange.error().message().empty(), "a failure has its reason");
        (void)end.exchange.refuse(wire::make_refuse(Status::protocol, "failed"));
        end.is_refusing = true;
      }
      if (progress == Progress::closed) end.is_over = true;
    }
    std::array<std::byte, 4096> bytes;
    const ssize_t got = ::recv(end.line.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) end.buffer.insert(end.buffer.end(), bytes.begin(), bytes.begin() + got);
  }

  void hear(End& end, const End& other) const {
    expect(shares_key_, "strangers hear nothing of each other");
    expect(end.exchange.proved_key() == std::string_view(&proves_, 1),
           "a frame comes from a peer with the key that the client proves");
    expect(end.heard < other.said.size(), "a frame was sent");
    const auto& received = end.exchange.received();
    const wire::Frame again = std::visit(
        [&](const auto& body) {
          if constexpr (requires { wire::encode(body); }) return wire::encode(body);
          return wire::Frame();
        },
        received.body);
    expect(same(again.bytes(), other.said[end.heard++]), "and it is the next one");
    end.exchange.expect(kAny);
  }

  bool shares_key_;
  char proves_;  ///< the name of the client's first key
  KeyRing client_keys_, server_keys_;
  Network network_;
  End client_, server_;
  std::vector<Bytes> passed_;
};

}  // namespace

void run(std::span<const std::byte> data) {
  const base::SeedSource source(1);
  Input in(data);
  World world(in.take<std::uint8_t>());
  for (int i = 0; i < kMostActs && !in.empty(); ++i) {
    const auto what = in.take<std::uint8_t>() % static_cast<std::uint8_t>(Act::count);
    world.act(static_cast<Act>(what), in);
  }
}

void sow(Seeds& seeds) {
  using namespace std::string_literals;
  const auto act = [](Act what, int detail, std::string more = "") {
    return std::string{static_cast<char>(what), static_cast<char>(detail)} + more;
  };
  const std::string proof = act(Act::speak, 0) + act(Act::pass, 0) + act(Act::pass, 1);
  const std::string talk = proof + act(Act::pass, 0) + act(Act::speak, 3) + act(Act::pass, 1) +
                           act(Act::speak, 4) + act(Act::pass, 0);
  for (const char settings : {'\0', '\1', '\2', '\3'}) {
    const std::string first(1, settings);
    seeds.add(first + talk);
    seeds.add(first + act(Act::alter, 0, "\x20"s) + act(Act::pass, 1));
    seeds.add(first + act(Act::pass, 0) + act(Act::alter, 1, "\x20"s));
    for (int key = 0; key < 3; ++key)
      seeds.add(first + act(Act::speak, 0) +
                act(Act::claim, 0, std::string(1, static_cast<char>(key))) + act(Act::pass, 1) +
                act(Act::pass, 0));
    seeds.add(first + proof + act(Act::alter, 0, "\x20"s));
    seeds.add(first + proof + act(Act::repeat, 0));
    seeds.add(first + proof + act(Act::speak, 2) + act(Act::drop, 0) + act(Act::pass, 0));
    for (int i = 0; i < 4; ++i)
      seeds.add(first + talk + act(Act::replay, i % 2, std::string(1, static_cast<char>(i))));
    seeds.add(first + proof + act(Act::cut, 0) + act(Act::cut, 1));
    seeds.add(first + act(Act::refuse, 1) + act(Act::pass, 1));
    seeds.add(first + proof + act(Act::refuse, 1) + act(Act::pass, 1));
    seeds.add(first + act(Act::say, 0, "\x10SPNW\1\0\1\0\1\0\x46\0\0\0\0\0"s));
    const wire::Frame hello = wire::encode(wire::Hello{sample_endpoint()});
    seeds.add(first + act(Act::say, 0, std::string(1, static_cast<char>(hello.size))) +
              std::string(text_of(hello.bytes())));
  }
}

}  // namespace fuzz
