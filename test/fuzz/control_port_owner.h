// The owners of the control port's fuzzer. They keep a record of each handshake, check every call
// of the port against it, and act inside of calls as the input says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "control/control_port.h"
#include "fuzz/control_port_network.h"
#include "fuzz/samples.h"

namespace fuzz {

using control::ControlPort;
using control::HandshakeId;
using namespace std::chrono_literals;

/// The incarnation of the port's engine, which strangers have to know for some frames.
inline constexpr std::uint64_t kOurs = 0x6f75727365'6c66;
/// The incarnation of every other engine.
inline constexpr std::uint64_t kTheirs = 0x74686569'7273;

enum class Kind : std::uint8_t { connect, accept, cm_accept, open, serve, probe };

/// A handshake as its owner knows it.
struct Record {
  Kind kind;
  HandshakeId id;                 ///< none for sessions that are served, and for probes
  bool is_live = true;            ///< the port may call its owner
  bool asked = false;             ///< connect: after ask()
  bool accepted = false;          ///< connect: after on_accept()
  bool answered = false;          ///< accept: after answer()
  bool confirmed = false;         ///< connect: after confirm()
  bool is_new = false;            ///< accept: inside of on_hello()
  bool is_moving = false;         ///< accept: the address is being resolved again
  std::uint64_t answered_at = 0;  ///< tick
  Peer* peer = nullptr;           ///< accept, serve: the client
};

/// What an owner does inside of a call.
enum class Inside : std::uint8_t {
  accepts,
  errs,   ///< answers an error, if it can
  drops,  ///< its own handshake
  drops_and_errs,
  refuses,   ///< its own handshake
  replaces,  ///< drops its own handshake and begins another
  replaces_and_errs,
  drops_another,
  connects,
  opens,
  stops_listening,
  confirms,  ///< connect and open
  moves,     ///< accept: to another port, from which the address is resolved again
  count
};

/// Answers when the input says so.
class Resolver final : public control::AddressResolver {
 public:
  enum class Mode : std::uint8_t { knows, asks, has_no_route, count };

  Result<bool> begin(const control::Resolution& what, const control::Gid&, GidType,
                     const verbs::Place*) override {
    if (mode == Mode::has_no_route) return tl::unexpected(unreachable());
    if (mode == Mode::knows) return true;
    for (const auto& each : pending) expect(each.handshake != what.handshake, "resolved once");
    pending.push_back(what);
    return false;
  }
  void cancel(const control::Resolution& what) noexcept override {
    const auto erased =
        std::erase_if(pending, [&](const auto& each) { return each.handshake == what.handshake; });
    expect(erased == 1, "a resolution is cancelled while it is pending");
  }
  static Error unreachable() { return {Status::peer_lost, "reach", "nobody answers there", ""}; }

  Mode mode = Mode::knows;
  std::vector<control::Resolution> pending;
};

class Owner final : public control::ConnectionOwner,
                    public control::SessionOwner,
                    public control::ServedSessionOwner,
                    public control::ProbeOwner {
 public:
  Owner(ControlPort& port, MemoryNetwork& network, const std::uint64_t& now, Input& in)
      : port_(port), network_(network), now_(now), in_(in) {}

  // ---- connections ----

  Result<void> on_accept(std::uint64_t subject, const Endpoint& peer) override {
    Record& r = called(subject, Kind::connect);
    expect(r.asked && !r.accepted && !r.confirmed, "a peer accepts once, after it was asked");
    expect(wire::check(peer).has_value(), "a peer's endpoint is in order");
    r.accepted = true;
    const bool errs = act(&r);
    if (!errs) return {};
    r.is_live = false;
    return tl::unexpected(no());
  }
  void on_confirmed(std::uint64_t subject) override {
    Record& r = called(subject);
    if (r.kind == Kind::connect) {
      expect(r.accepted && r.confirmed, "both ends have confirmed");
    } else {
      expect(r.kind == Kind::accept, "a connection is confirmed");
      expect(r.answered, "a peer confirms what was answered");
      expect(r.peer->has_said(kOurs), "a peer confirms our incarnation");
    }
    end(r);
  }
  void on_refused(std::uint64_t subject, const wire::Refuse& refusal) override {
    Record& r = called(subject);
    expect(r.kind == Kind::connect || r.kind == Kind::accept, "a connection is refused");
    expect(refusal.status != Status::ok, "a refusal has a reason");
    end(r);
  }
  void on_address_resolved(std::uint64_t subject, const Result<void>& outcome) override {
    Record& r = called(subject, Kind::accept);
    expect(std::exchange(r.is_moving, false), "an owner hears once of what it has asked for");
    expect(!r.answered, "an owner waits for the address");
    if (!outcome) {
      expect(!outcome.error().found.empty(), "a failure has a reason");
      return refuse(r);
    }
    act(&r);
  }
  [[nodiscard]] const verbs::Place* own_place(std::uint64_t) const noexcept override {
    return nullptr;
  }
  void on_failed(std::uint64_t subject, const Error& why) override {
    Record& r = called(subject);
    expect(r.kind <= Kind::cm_accept, "a connection fails");
    expect(why.status != Status::ok && !why.found.empty(), "a failure has a reason");
    if (r.kind == Kind::accept && why.status == Status::limit)
      expect(r.answered && now_ - r.answered_at >= 5'000'000, "a peer has its time");
    end(r);
  }

  // ---- sessions ----

  void on_opened(std::uint64_t subject, HandshakeId id, const wire::SessionEnd& server) override {
    Record& r = called(subject, Kind::open);
    expect(id == r.id, "the session's handshake");
    expect(server.name != 0 && server.token != 0, "the session's end is in order");
    end(r);
  }
  void on_open_refused(std::uint64_t subject, const wire::Refuse&) override {
    end(called(subject, Kind::open));
  }
  void on_open_failed(std::uint64_t subject, const Error& why) override {
    expect(why.status != Status::ok, "a failure has a reason");
    end(called(subject, Kind::open));
  }
  void on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) override {
    expect(opened_at == subject + 7, "the tick of the session");
    end(called(subject, Kind::serve));
  }
  void on_challenge_due(std::uint64_t subject, std::uint64_t token) override {
    const Record& r = called(subject, Kind::serve);
    expect(r.peer->path_token == token && token != 0, "the session's challenge");
    act(nullptr);
  }
  void on_path_validated(std::uint64_t subject) override {
    const Record& r = called(subject, Kind::serve);
    expect(r.peer->path_token != 0, "the session was challenged");
  }
  void on_probe_ended(const control::ProbedEngine& probed, control::ProbeOutcome) override {
    end(called(probed.incarnation, Kind::probe));
  }

  // ---- listeners ----

  Result<control::Admission> admit(const Address& peer) {
    ++calls;
    admitted_.reset();
    if (refuses_to_admit) return tl::unexpected(no());
    if (has_room) admitted_ = peer;
    return control::Admission{has_room, ending, needs_own_source, peer.source()};
  }
  Result<control::AcceptedConnection> on_hello(HandshakeId id, const Address& peer,
                                               const Endpoint& endpoint) {
    expect(wire::check(endpoint).has_value(), "a peer's endpoint is in order");
    return take(Kind::accept, id, peer);
  }
  Result<control::AcceptedConnection> on_join_session(HandshakeId id, const Address& peer,
                                                      const wire::JoinSession& join) {
    expect(join.session != 0 && join.token != 0, "a session's reference is in order");
    return take(Kind::accept, id, peer);
  }
  Result<PrivateData> on_cm_hello(HandshakeId, const control::CmHello& hello) {
    if (act(nullptr)) return tl::unexpected(no());
    return sample_private_data(hello.takes_private_data ? 200 : 10);
  }
  Result<control::AcceptedConnection> on_cm_request(HandshakeId id) {
    ++cm_requests;
    return take(Kind::cm_accept, id, requester);
  }
  Result<control::AcceptedSession> on_open_session(HandshakeId id, const Address& peer,
                                                   const wire::SessionEnd& client) {
    ++calls;
    const std::uint64_t subject = add({Kind::serve, {}});
    Record& r = records.at(subject);
    r.peer = network_.find(peer);
    expect(r.peer != nullptr, "a peer's address");
    expect_key(id, *r.peer);
    if (act(nullptr)) {
      r.is_live = false;
      return tl::unexpected(no());
    }
    wire::SessionEnd ours = sample_session();
    ours.first = client.first;
    ours.token = 99;
    ours.incarnation = kOurs;
    ours.private_data = sample_private_data(33);
    if (validates_paths) r.peer->path_token = 0x70617468'0000'0000 + subject;
    return control::AcceptedSession{ours, this, subject, subject + 7, r.peer->path_token};
  }

  // ---- beginning ----

  void connect(const Address& to, bool joins) {
    const auto id = joins ? port_.join_session(to, *this, {5, 6}) : port_.connect(to, *this);
    if (!id) return expect_refusal(id.error());
    const std::uint64_t subject = add({Kind::connect, *id});
    port_.assign(*id, subject);
  }
  void open(const Address& to) {
    const auto id = port_.open_session(to, sample_session(), *this, next_subject_);
    if (!id) return expect_refusal(id.error());
    add({Kind::open, *id});
  }
  void probe(const Address& to, Nanoseconds limit) {
    const auto begun = port_.probe(to, next_subject_, *this, limit);
    if (!begun) return expect_refusal(begun.error());
    add({Kind::probe, {}});
  }
  void listen() {
    if (listener) return;
    const auto made = port_.listen(*Address::parse("10.0.0.1:7"), std::make_shared<Door>(*this));
    expect(made.has_value(), "a listener");
    listener = *made;
    last_listener = *made;
  }
  void stop_listening() {
    if (listener) port_.stop_listening(*listener);
    listener.reset();
  }

  // ---- acting on handshakes ----

  void ask(Record& r) {
    if (r.kind != Kind::connect) return;
    if (r.is_live) r.asked = true;
    port_.ask(r.id, sample_endpoint());
  }
  void answer(Record& r) {
    if (r.kind == Kind::accept) {
      if (r.is_live && r.is_moving) return;
      if (r.is_live && !r.answered) {
        r.answered = true;
        r.answered_at = now_;
      }
      Endpoint ours = sample_endpoint();
      ours.incarnation = kOurs;
      ours.private_data = sample_private_data(kPrivateDataMax);
      port_.answer(r.id, ours);
    } else if (r.kind == Kind::cm_accept) {
      r.answered = true;
      port_.on_cm_answered(r.id);
    }
  }
  void confirm(Record& r) {
    if (r.kind != Kind::connect || (r.is_live && !r.accepted)) return;
    r.confirmed = true;
    port_.confirm(r.id, kTheirs);
  }
  void respond(const Record& r, std::uint64_t token) {
    if (r.kind == Kind::open) port_.respond(r.id, token);
  }
  void drop(Record& r) {
    if (!r.id) return;
    r.is_live = false;
    port_.drop(r.id);
  }
  void refuse(Record& r) {
    if (!r.id) return;
    r.is_live = false;
    port_.refuse(r.id, no());
  }
  /// The record that a number names; null if there is none.
  Record* at(std::uint8_t number) {
    if (records.empty()) return nullptr;
    // The latest first, which are more likely live.
    auto found = records.rbegin();
    std::advance(found, number % records.size());
    return &found->second;
  }
  [[nodiscard]] std::uint32_t live(bool outbound) const {
    std::uint32_t count = 0;
    for (const auto& [subject, r] : records) {
      const bool is_outbound =
          r.kind == Kind::connect || r.kind == Kind::open || r.kind == Kind::probe;
      // A session that is served may have been confirmed, which the owner does not learn.
      if (r.is_live && is_outbound == outbound && r.kind != Kind::serve) ++count;
    }
    return count;
  }

  std::map<std::uint64_t, Record> records;
  std::optional<control::ListenerId> listener;
  control::ListenerId last_listener;
  bool is_calm = false;  ///< accepts everything
  bool has_room = true;
  bool needs_own_source = false;
  bool refuses_to_admit = false;
  bool validates_paths = false;
  std::uint32_t ending = 0;
  std::uint64_t calls = 0;        ///< of the port
  std::uint64_t cm_requests = 0;  ///< seen
  Address requester;              ///< of requests through rdma_cm

 private:
  /// The owner of one listener, which may end inside of its own calls.
  struct Door final : control::ListenerOwner {
    explicit Door(Owner& to) : owner(to) {}
    Owner& owner;
    std::uint64_t calls = 0;
    verbs::Place place;

    [[nodiscard]] const verbs::Place* own_place() const noexcept override {
      return calls % 2 == 0 ? nullptr : &place;
    }

    template <typename T>
    T counted(T result) {  // touches the object after the call
      ++calls;
      return result;
    }
    Result<control::Admission> admit(const Address& peer, const Endpoint*) override {
      return counted(owner.admit(peer));
    }
    Result<control::AcceptedConnection> on_hello(HandshakeId id, const Address& peer,
                                                 const Endpoint& endpoint) override {
      return counted(owner.on_hello(id, peer, endpoint));
    }
    Result<control::AcceptedConnection> on_join_session(HandshakeId id, const Address& peer,
                                                        const wire::JoinSession& join) override {
      return counted(owner.on_join_session(id, peer, join));
    }
    Result<PrivateData> on_cm_hello(HandshakeId id, control::CmId&,
                                    const control::CmHello& hello) override {
      return counted(owner.on_cm_hello(id, hello));
    }
    Result<control::AcceptedConnection> on_cm_request(HandshakeId id, control::CmId&,
                                                      const control::CmHello&,
                                                      const PrivateData& ours) override {
      expect(ours.empty() || ours == sample_private_data(200), "what the owner gives");
      return counted(owner.on_cm_request(id));
    }
    Result<control::AcceptedSession> on_open_session(HandshakeId id, const Address& peer,
                                                     const wire::SessionEnd& client) override {
      return counted(owner.on_open_session(id, peer, client));
    }
  };

  /// An owner hears of a client that has proved its key, if there is one, and gets its name.
  void expect_key(HandshakeId id, const Peer& peer) {
    expect(peer.has_proved() == network_.has_keys, "with keys, a client proves one first");
    expect(port_.key_of(id).view() == peer.proved_key(), "and has the name of that key");
  }
  static Error no() {
    Error why{Status::refused, "shake hands", "the owner does not want to", ""};
    why.code = 7;
    return why;
  }
  static void expect_refusal(const Error& error) {
    expect(error.status == Status::limit, "only limits keep a handshake from beginning");
  }
  std::uint64_t add(Record record) {
    records.emplace(next_subject_, record);
    return next_subject_++;
  }
  /// The record of a call of the port.
  Record& called(std::uint64_t subject) {
    ++calls;
    const auto found = records.find(subject);
    expect(found != records.end(), "the port names a subject of its owner");
    expect(found->second.is_live, "an owner hears of live handshakes only");
    return found->second;
  }
  Record& called(std::uint64_t subject, Kind kind) {
    Record& r = called(subject);
    expect(r.kind == kind, "a call fits its handshake");
    return r;
  }
  void end(Record& r) {
    r.is_live = false;
    act(&r);
  }
  Result<control::AcceptedConnection> take(Kind kind, HandshakeId id, const Address& peer) {
    ++calls;
    expect(admitted_.has_value() && (kind == Kind::cm_accept || *admitted_ == peer),
           "a connection is admitted first");
    admitted_.reset();
    for (const auto& [other, r] : records)
      expect(!r.is_live || r.id != id, "a handshake is offered once");
    const std::uint64_t subject = add({kind, id});
    Record& r = records.at(subject);
    r.peer = network_.find(peer);
    expect(kind == Kind::cm_accept || r.peer != nullptr, "a peer's address");
    expect(kind != Kind::cm_accept || !network_.has_keys, "a request without a key is rejected");
    if (r.peer != nullptr) expect_key(id, *r.peer);
    r.is_new = kind == Kind::accept;
    const bool errs = act(&r);
    r.is_new = false;
    if (!errs) return control::AcceptedConnection{this, subject};
    r.is_live = r.is_moving = false;
    return tl::unexpected(no());
  }
  static Address server() { return MemoryNetwork::address_of(9, 1); }

  /// What the input wants to happen inside of a call. `own`: the handshake of the call, if the
  /// owner knows its id. Answers whether the call is to answer an error.
  bool act(Record* own) {
    if (is_calm) return false;
    const std::uint8_t choice = in_.take<std::uint8_t>();
    const auto inside = static_cast<Inside>(choice % static_cast<std::uint8_t>(Inside::count));
    switch (inside) {
      case Inside::errs:
        return true;
      case Inside::drops:
      case Inside::drops_and_errs:
        if (own != nullptr) drop(*own);
        return inside == Inside::drops_and_errs;
      case Inside::refuses:
        if (own != nullptr) refuse(*own);
        return false;
      case Inside::replaces:
      case Inside::replaces_and_errs:
        if (own != nullptr) drop(*own);
        connect(server(), false);
        return inside == Inside::replaces_and_errs;
      case Inside::drops_another:
        if (Record* const other = at(choice / 16); other != nullptr && other != own) drop(*other);
        return false;
      case Inside::connects:
        connect(server(), true);
        return false;
      case Inside::opens:
        open(server());
        return false;
      case Inside::stops_listening:
        stop_listening();
        return false;
      case Inside::confirms:
        if (own != nullptr && own->kind == Kind::open) {
          port_.confirm(own->id, kTheirs);
        } else if (own != nullptr) {
          confirm(*own);
        }
        return false;
      case Inside::moves:
        return own != nullptr && !moves(*own);
      default:
        return false;
    }
  }
  /// What an owner may do inside of on_hello() alone. False: the port refuses it.
  bool moves(Record& r) {
    if (!r.is_new) return true;
    static const verbs::Place kElsewhere;
    const auto known = port_.resolve_again(r.id, sample_endpoint(), &kElsewhere);
    r.is_moving = known && !*known;
    return known.has_value();
  }

  ControlPort& port_;
  MemoryNetwork& network_;
  const std::uint64_t& now_;
  Input& in_;
  std::uint64_t next_subject_ = 1;
  std::optional<Address> admitted_;
};

}  // namespace fuzz
