// The control port as a whole, without an engine, with and without keys: whatever strangers and
// servers send, in any order and at any time, and whatever owners do inside of their calls,
// handshakes keep their limits, none is lost, an honest peer gets through, and with keys nobody
// else is heard or told anything.
#include <array>

#include "base/random.h"
#include "base/timer_wheel.h"
#include "fuzz/control_port_owner.h"
#include "fuzz/control_port_seeds.h"
#include "fuzz/fuzz.h"

namespace fuzz {
namespace {

using wire::FrameKind;

constexpr auto kActs = static_cast<std::uint8_t>(Act::count);
/// More acts per input find nothing new.
constexpr int kMostActs = 128;
constexpr std::size_t kMostPeers = 40;
constexpr Nanoseconds kTimeout = 500ms;
constexpr std::array<std::uint32_t, 4> kHandshakes{4, 1, 2, 12};

/// The keys of the port and of its peers. Made once, since that takes as long as a short input.
const std::array<control::KeyRing, 4>& rings() {
  static const auto made = [] {
    const auto ring = [](const std::string& text) {
      return std::move(*control::KeyRing::parse(text, "keys"));
    };
    const std::string a = "a " + std::string(64, 'a') + '\n', b = "b " + std::string(64, 'b');
    return std::array{ring(b + '\n' + a), ring(a), ring(b), ring(a + b)};
  }();
  return made;
}

class World {
 public:
  explicit World(Input& in)
      : in_(in), settings_(in.take<std::uint8_t>()), most_(kHandshakes[settings_ & 3]) {
    expect(port_.open(&network_).has_value(), "the port opens");
    if ((settings_ & (keys::one | keys::two)) != 0) {
      network_.has_keys = true;
      reload((settings_ & keys::two) != 0 ? 3 : 1);
    }
    if ((settings_ & 4) != 0) {
      auto resolver = std::make_unique<Resolver>();
      resolver_ = resolver.get();
      port_.set_resolver(std::move(resolver));
    }
    owner_.listen();
  }

  void act(Act what) {
    switch (what) {
      case Act::calls:
        if (network_.peers.size() < kMostPeers)
          network_.call(static_cast<std::uint8_t>(2 + in_.take<std::uint8_t>() % 4));
        return;
      case Act::polls:
        for (int i = in_.take<std::uint8_t>() % 8; i >= 0; --i) step();
        return;
      case Act::time:
        return pass();
      case Act::stops:
        return owner_.stop_listening();
      case Act::listens:
        return owner_.listen();
      case Act::admission: {
        const auto mode = in_.take<std::uint8_t>();
        owner_.has_room = mode % 2 == 0;
        owner_.ending = mode / 2 % 4;
        owner_.needs_own_source = mode / 64 % 2 == 1;
        owner_.refuses_to_admit = mode / 8 % 8 == 7;
        return;
      }
      case Act::validation:
        owner_.validates_paths = !owner_.validates_paths;
        return;
      case Act::stale:
        return act_on_stale();
      case Act::proves:
        return act_on_peer(what);
      case Act::reloads:
        return reload(in_.take<std::uint8_t>());
      default:
        if (what < Act::polls) return act_on_peer(what);
        if (what < Act::ask) return begin(what);
        if (what < Act::stops) return act_on_record(what);
        return act_on_resources(what);
    }
  }

  /// What must hold after every act.
  void check() {
    const std::uint32_t outbound = most_ - port_.outbound_room();
    expect(port_.outbound_room() <= most_, "outbound handshakes have their limit");
    expect(port_.handshakes() >= outbound, "a count of handshakes");
    const std::uint32_t inbound = port_.handshakes() - outbound;
    expect(inbound <= most_, "inbound handshakes have their limit");
    expect(owner_.live(true) <= outbound, "an outbound handshake ends with a call");
    expect(owner_.live(false) <= inbound, "an inbound handshake ends with a call");
    expect(port_.refusals() >= refusals_, "refusals are counted up");
    refusals_ = port_.refusals();
    expect(timers_.size() <= port_.handshakes(), "a timer belongs to a handshake");
    if (resolver_ != nullptr)
      expect(resolver_->pending.size() <= port_.handshakes(), "so does a resolution");
    expect(owner_.cm_requests <= requests_, "a request is passed on once");
    expect(port_.audit().has_value(), "counts and lists agree with the handshakes");
  }

  /// Ends everything as an engine does, and expects that nothing is left.
  void end() {
    if ((settings_ & 8) != 0) return close();
    owner_.is_calm = true;
    if ((settings_ & 16) != 0) expect_honest_peer();
    for (auto& [subject, record] : owner_.records) {
      if (!record.is_live || record.kind == Kind::serve || record.kind == Kind::probe) continue;
      (settings_ & 32) != 0 ? owner_.refuse(record) : owner_.drop(record);
    }
    owner_.refuses_to_admit = true;  // no connection begins any more
    if (resolver_ != nullptr) resolver_->mode = Resolver::Mode::has_no_route;
    // Each round takes most_ connections that wait, 4 requests that were kept, and so on.
    for (int round = 0; round < 400 && !is_at_rest(); ++round) {
      now_ += static_cast<std::uint64_t>(Nanoseconds(kTimeout).count());
      step();
    }
    expect(is_at_rest(), "every handshake ends after its time-out");
    check();
    for (const auto& [subject, record] : owner_.records) {
      expect(!record.is_live || record.kind == Kind::serve, "an owner learns the outcome");
      if (record.is_live)
        expect(record.peer->has_said(kOurs), "only a confirmed session ends without a call");
    }
    for (const auto& peer : network_.peers) peer->listen();
    close();
  }

 private:
  void close() {
    const std::uint64_t calls = owner_.calls;
    port_.close();
    expect(owner_.calls == calls, "close() calls no owner");
    expect(port_.handshakes() == 0 && timers_.size() == 0, "nothing is left after close()");
    expect(port_.outbound_room() == most_, "all outbound handshakes are free");
  }
  [[nodiscard]] bool is_at_rest() const {
    return port_.handshakes() == 0 && timers_.size() == 0 &&
           (!owner_.listener || network_.waiting() == 0);
  }

  void reload(std::uint8_t number) {
    ring_ = number % rings().size();
    if (network_.has_keys) port_.set_keys(rings()[ring_]);
  }

  void step() {
    const std::uint64_t calls = owner_.calls, accepts = network_.accepts;
    port_.poll();
    expect(network_.accepts - accepts <= 8, "a poll accepts no more than 8 connections");
    expect(owner_.calls - calls <= 256, "a poll is bounded");
    timers_.advance(now_, 64, [this](base::Timer& timer) {
      expect(timer.kind == control::kHandshakeTimer, "a timer of the port");
      port_.on_timer(timer);
    });
    check();
  }
  void pass() {
    constexpr std::array<std::uint32_t, 8> kMicroseconds{100,    1'000,   2'500,   5'000,
                                                         20'000, 100'000, 250'000, 500'000};
    now_ += std::uint64_t{kMicroseconds[in_.take<std::uint8_t>() % 8]} * 1000;
  }

  // ---- peers ----

  void act_on_peer(Act what) {
    const auto number = in_.take<std::uint8_t>();
    if (network_.peers.empty()) return;
    // The latest first, which are more likely connected.
    Peer& peer = *network_.peers[network_.peers.size() - 1 - number % network_.peers.size()];
    switch (what) {
      case Act::says:
        return say(peer);
      case Act::says_bytes:
        return peer.say(in_.bytes(in_.take<std::uint8_t>()));
      case Act::proves: {
        const auto& ring = rings()[in_.take<std::uint8_t>() % rings().size()];
        if (network_.has_keys) peer.prove(ring);
        return;
      }
      case Act::flushes:
        return peer.flush();
      case Act::reads:
        return peer.listen();
      case Act::shuts:
        return peer.shut();
      case Act::closes:
        peer.listen();
        return peer.close();
      default:
        return peer.close();
    }
  }

  void say(Peer& peer) {
    const auto said = static_cast<Said>(in_.take<std::uint8_t>() % static_cast<int>(Said::count));
    const auto manner = in_.take<std::uint8_t>();
    const wire::Frame frame = encode(peer, said, manner);
    Bytes bytes = peer.dress(frame);
    if ((manner & how::mutated) != 0)
      bytes[in_.take<std::uint8_t>() % bytes.size()] = std::byte{in_.take<std::uint8_t>()};
    if ((manner & (how::cut | how::split)) == 0) return peer.say(bytes);
    const std::size_t first = in_.take<std::uint8_t>() % bytes.size();
    peer.say(std::span(bytes).first(first));
    if ((manner & how::split) != 0) peer.set_aside(std::span(bytes).subspan(first));
  }

  static wire::Frame encode(const Peer& peer, Said said, std::uint8_t manner) {
    const wire::Capabilities capabilities =
        (manner & how::newer) != 0 ? wire::Capabilities{{1, 9}, 0x54} : wire::Capabilities{};
    Endpoint endpoint = sample_endpoint();
    wire::SessionEnd session = sample_session();
    endpoint.incarnation = session.incarnation = kTheirs;
    if ((manner & how::own_address) != 0) endpoint.gid = session.gid = peer.address().as_v6();
    const bool has_data = (manner & how::application_data) != 0;
    endpoint.application_fields = session.application_fields = has_data;
    if (has_data) endpoint.private_data = session.private_data = sample_private_data(70);
    switch (said) {
      case Said::hello:
        return wire::encode(wire::Hello{endpoint}, capabilities);
      case Said::accept:
        return wire::encode(wire::Accept{endpoint}, capabilities);
      case Said::refuse:
        return wire::encode(
            wire::make_refuse((manner & 32) != 0 ? Status::peer_lost : Status::limit,
                              "a peer's reason",
                              has_data ? std::optional<std::uint32_t>(5) : std::nullopt),
            capabilities);
      case Said::ready:
        return wire::encode(wire::Ready{kOurs}, capabilities);
      case Said::foreign_ready:
        return wire::encode(wire::Ready{kTheirs}, capabilities);
      case Said::without_datagrams:
        session.qp_num = 0;
        [[fallthrough]];
      case Said::open_session:
        return wire::encode(wire::OpenSession{session}, capabilities);
      case Said::session_opened:
        session.token = 5;
        return wire::encode(wire::SessionOpened{session}, capabilities);
      case Said::join_session:
        return wire::encode(wire::JoinSession{endpoint, 5, 6}, capabilities);
      case Said::path_response:
        if (peer.path_token != 0)
          return wire::encode(wire::PathResponse{peer.path_token}, capabilities);
        [[fallthrough]];
      default:
        return wire::encode(wire::PathResponse{0x99aa}, capabilities);
    }
  }

  // ---- owners ----

  void begin(Act what) {
    const auto detail = in_.take<std::uint8_t>();
    const Address to =
        MemoryNetwork::address_of(9, 1 + detail % (static_cast<int>(Place::count) - 1));
    if (network_.peers.size() >= kMostPeers) return;
    switch (what) {
      case Act::connect:
      case Act::join:
        owner_.connect(to, what == Act::join);
        if (detail >= 128) ask(0);
        return;
      case Act::open:
        return owner_.open(to);
      default:
        return owner_.probe(to, in_.take<std::uint8_t>() * 4ms);
    }
  }
  void ask(std::uint8_t number) {
    if (Record* const r = owner_.at(number)) owner_.ask(*r);
  }
  void act_on_record(Act what) {
    Record* const r = owner_.at(in_.take<std::uint8_t>());
    if (r == nullptr) return;
    switch (what) {
      case Act::ask:
        return owner_.ask(*r);
      case Act::answer:
        return owner_.answer(*r);
      case Act::confirm:
        return owner_.confirm(*r);
      case Act::respond:
        return owner_.respond(*r, 1 + in_.take<std::uint8_t>());
      case Act::refuse:
        return owner_.refuse(*r);
      default:
        return owner_.drop(*r);
    }
  }
  /// Names of other generations have no effect.
  void act_on_stale() {
    const auto detail = in_.take<std::uint8_t>();
    const HandshakeId id{detail / 4u % (2 * most_), 0xffff0000};
    const std::uint32_t before = port_.handshakes();
    const std::uint64_t calls = owner_.calls;
    switch (detail % 4) {
      case 0:
        port_.drop(id);
        port_.answer(id, sample_endpoint());
        break;
      case 1:
        port_.refuse(id, {Status::refused, "", "", ""});
        port_.confirm(id, kTheirs);
        break;
      case 2:
        port_.ask(id, sample_endpoint());
        port_.on_cm_answered(id);
        break;
      default:
        port_.on_resolved({id, 0}, {});
        port_.respond(id, 1);
        if (!owner_.listener) port_.stop_listening(owner_.last_listener);
        break;
    }
    expect(port_.handshakes() == before && owner_.calls == calls, "a stale name has no effect");
  }

  // ---- resolver, rdma_cm ----

  void act_on_resources(Act what) {
    const auto detail = in_.take<std::uint8_t>();
    if (what == Act::request) return request(detail);
    if (resolver_ == nullptr) return;
    if (what == Act::resolver) {
      resolver_->mode =
          static_cast<Resolver::Mode>(detail % static_cast<int>(Resolver::Mode::count));
    } else if (!resolver_->pending.empty()) {
      const auto chosen = resolver_->pending.begin() +
                          detail / 2 % static_cast<std::ptrdiff_t>(resolver_->pending.size());
      const control::Resolution over = *chosen;
      resolver_->pending.erase(chosen);
      detail % 2 == 0 ? port_.on_resolved(over, {}, detail < 128)
                      : port_.on_resolved(over, tl::unexpected(Resolver::unreachable()));
    }
  }
  void request(std::uint8_t detail) {
    // The last of them go beyond the backlog, which takes long and so happens once.
    const bool is_crowd = detail >= 252 && requests_ < 512;
    const int count = is_crowd ? 600 : 1 + detail / 64;
    for (int i = 0; i < count; ++i) {
      auto made = std::make_unique<control::CmRequest>();
      made->peer = MemoryNetwork::address_of(static_cast<std::uint8_t>(2 + detail % 4), 5);
      made->listener = owner_.last_listener;
      made->gid = made->peer.as_v6();
      if (detail / 4 % 2 != 0) made->gid = {};  // or another's address
      if (detail / 8 % 2 != 0) {  // a client that takes more than an answer has room for
        const auto said =
            wire::encode_cm(sample_endpoint(), {.features = wire::feature::cm_private_data});
        std::copy(said.begin(), said.end(), made->event.storage.begin());
        made->event.size = said.size();
      }
      ++requests_;
      port_.take_request(std::move(made));
    }
  }

  // ---- the end ----

  /// Whatever the others hold, an honest peer of another source is accepted soon.
  void expect_honest_peer() {
    owner_.has_room = true;
    owner_.refuses_to_admit = false;
    if (resolver_ != nullptr) resolver_->mode = Resolver::Mode::knows;
    owner_.listen();
    Peer* const honest = network_.call(200);
    if (network_.has_keys) honest->prove(rings()[ring_]);
    bool has_asked = false;
    for (int i = 0; i < 200 && !honest->has_heard(FrameKind::accept); ++i) {
      if (!has_asked && honest->has_proved() == network_.has_keys) {
        honest->say(honest->dress(encode(*honest, Said::hello, how::own_address)));
        has_asked = true;
      }
      step();
      for (auto& [subject, record] : owner_.records) {
        if (record.is_live && !record.answered) owner_.answer(record);
      }
      honest->listen();
      expect(!honest->has_heard(FrameKind::refuse), "an honest peer is not refused");
      now_ += 101'000'000;
    }
    expect(honest->has_heard(FrameKind::accept), "an honest peer is accepted");
  }

  Input& in_;
  std::uint8_t settings_;
  std::uint32_t most_;
  std::uint64_t now_ = 1'000'000;
  Clock clock_ = Clock::manual(&now_);
  base::TimerWheel timers_{1, now_};
  MemoryNetwork network_;
  ControlPort port_{{most_, most_, kTimeout, kOurs}, clock_, timers_};
  Owner owner_{port_, network_, now_, in_};
  Resolver* resolver_ = nullptr;
  std::uint64_t refusals_ = 0;
  std::uint64_t requests_ = 0;
  std::size_t ring_ = 0;
};

}  // namespace

void run(std::span<const std::byte> data) {
  const base::SeedSource source(1);
  Input in(data);
  World world(in);
  for (int i = 0; i < kMostActs && !in.empty(); ++i) {
    world.act(static_cast<Act>(in.take<std::uint8_t>() % kActs));
    world.check();
  }
  world.end();
}

void sow(Seeds& seeds) {
  for (const int settings : {0x00, 0x10, 0x15, 0x23, 0x36, 0x3f}) {
    for (const auto& part : {strangers(), sessions_and_probes(), crowds()}) {
      for (const Seed& seed : part)
        seeds.add(std::string(1, static_cast<char>(settings | seed.settings)) + seed.script);
    }
    for (const Seed& seed : proofs())
      seeds.add(std::string(1, static_cast<char>(settings | seed.settings)) + seed.script);
  }
}

}  // namespace fuzz
