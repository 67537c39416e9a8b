// The agent as a whole: whatever a peer sends, in any order and at any time, must affect only its
// own connection.
#include <array>

#include "fuzz/agent_world.h"
#include "fuzz/fuzz.h"
#include "wire/lease_messages.h"
#include "wire/message_header.h"
#include "wire/rendezvous_messages.h"

namespace fuzz {
namespace {

using raw_peer::How;
using wire::MessageKind;

/// An input is a sequence of acts: a byte that names one of these, then its arguments.
enum class Act : std::uint8_t {
  bytes,      ///< length, bytes: unchanged
  data,       ///< length: a message of the application
  header,     ///< any header, length, payload
  control,    ///< kind, a body of the right size
  offer,      ///< length, number: of existing memory
  answer,     ///< verdict: to the engine's last offer
  foreign,    ///< number, verdict: to any offer
  request,    ///< for a lease that can be granted
  push,       ///< existing memory
  granted,    ///< the engine's last request
  call,       ///< about the engine's last lease to us
  reply,      ///< to its last call
  goodbye,    ///< or the answer to one
  give_back,  ///< credit
  notice,     ///< a WRITE with immediate and no bytes
  write,      ///< with immediate, to the given address
  cell,       ///< any value
  credit,     ///< for existing receives
  immediate,  ///< for the next message
  invalid,    ///< the next one invalidates this key
  known_key,  ///< or the one that the engine told last
  poll,       ///< a number of times
  time,       ///< advances
  app_sends,
  app_offers,
  app_requests,
  app_leases,
  app_uses,
  app_recalls,
  app_forgets,
  app_closes,
  ends,  ///< fails or closes the queue pair
  count
};

class Attack {
 public:
  Attack(World& world, Application& application, Input& in)
      : world_(world), peer_(world.peer), app_(application), in_(in) {}

  void act(Act what) {
    switch (what) {
      case Act::bytes:
        return say(in_.bytes(in_.take<std::uint8_t>()));
      case Act::data:
        return say(raw_peer::message(MessageKind::data, Bytes(in_.take<std::uint16_t>() % 1100),
                                     in_.take<std::uint8_t>() & 1));
      case Act::header:
        return send_header();
      case Act::control: {
        const auto kind = static_cast<MessageKind>(in_.take<std::uint8_t>() % 17);
        Bytes body = alone(in_.bytes(wire::body_bytes(kind)));
        body.resize(wire::body_bytes(kind));
        return say(raw_peer::message(kind, body));
      }
      case Act::goodbye:
        return say(raw_peer::message(MessageKind::goodbye));
      case Act::give_back:
        return say(raw_peer::message({MessageKind::credit_return, 0, 0, in_.take<std::uint8_t>()}));
      case Act::immediate:
        how_.opcode = IBV_WR_SEND_WITH_IMM;
        how_.immediate = 0x01020304;
        return;
      case Act::invalid:
      case Act::known_key:
        how_.opcode = IBV_WR_SEND_WITH_INV;
        how_.invalidate = what == Act::invalid ? in_.take<std::uint32_t>() : key_;
        return;
      case Act::notice:
      case Act::write:
      case Act::cell:
      case Act::credit:
        return write(what);
      default:
        return what < Act::goodbye ? answer(what) : act_otherwise(what);
    }
  }

 private:
  void say(std::span<const std::byte> bytes) {
    (void)peer_.send(bytes, std::exchange(how_, {}));
    listen();
  }
  template <typename Body>
  void say(MessageKind kind, const Body& body) {
    say(raw_peer::message(kind, wire::encode(body)));
  }

  void send_header() {
    wire::MessageHeader h{};
    h.kind = static_cast<MessageKind>(in_.take<std::uint8_t>());
    h.flags = in_.take<std::uint8_t>();
    h.granted = in_.take<std::uint16_t>();
    h.length = in_.take<std::uint32_t>();
    say(raw_peer::message(h, in_.bytes(in_.take<std::uint8_t>())));
  }

  /// Grants, pushes and requests, with a tag or without.
  static bool decode_grant(const raw_peer::Heard& h, wire::LeaseGrant& grant) {
    const MessageKind kind = h.header.kind;
    if (kind == MessageKind::lease_grant || kind == MessageKind::lease_push)
      return wire::decode(h.body, grant);
    wire::TaggedLeaseGrant tagged;
    if (kind != MessageKind::tagged_lease_grant && kind != MessageKind::tagged_lease_push)
      return false;
    if (!wire::decode(h.body, tagged)) return false;
    grant = tagged;
    return true;
  }
  static bool decode_request(const raw_peer::Heard& h, wire::LeaseRequest& request) {
    if (h.header.kind == MessageKind::lease_request) return wire::decode(h.body, request);
    wire::TaggedLeaseRequest tagged;
    if (h.header.kind != MessageKind::tagged_lease_request || !wire::decode(h.body, tagged))
      return false;
    request = tagged;
    return true;
  }

  /// Records numbers and keys of the engine's messages, to answer them.
  void listen() {
    for (; heard_ < peer_.heard.size(); ++heard_) {
      const raw_peer::Heard& h = peer_.heard[heard_];
      wire::RendezvousOffer offer;
      wire::LeaseGrant grant;
      wire::LeaseRequest request;
      wire::LeaseCall call;
      if (h.header.kind == MessageKind::rendezvous_offer && wire::decode(h.body, offer)) {
        offered_ = offer.id;
        key_ = offer.rkey;
      } else if (decode_grant(h, grant)) {
        leased_ = grant.lease;
        key_ = grant.rkey;
      } else if (decode_request(h, request)) {
        asked_ = request;
      } else if (h.header.kind == MessageKind::lease_call && wire::decode(h.body, call)) {
        called_ = call.id;
      }
    }
  }

  void answer(Act what) {
    const auto detail = in_.take<std::uint8_t>();
    switch (what) {
      case Act::offer: {
        const std::uint32_t length = in_.take<std::uint32_t>() % (1u << 21);
        wire::RendezvousOffer offer = peer_.offer(length, detail & 15);
        offer.invalidate = (detail & 0x40) != 0;
        return say(MessageKind::rendezvous_offer, offer);
      }
      case Act::answer:
        return say(
            MessageKind::rendezvous_answer,
            wire::RendezvousAnswer{offered_, static_cast<wire::RendezvousVerdict>(detail % 4)});
      case Act::foreign:
        return say(MessageKind::rendezvous_answer,
                   wire::RendezvousAnswer{in_.take<std::uint32_t>(),
                                          static_cast<wire::RendezvousVerdict>(detail % 4)});
      case Act::request: {
        wire::LeaseRequest r;
        r.bytes = std::uint64_t{detail} * 300 + 1;
        r.time = in_.take<std::uint8_t>() * std::uint64_t{400'000} + 1;
        r.id = detail;
        r.alignment = 1u << (detail % 14);
        r.access = 1 + detail % 7;
        if ((detail & 0x80) == 0) return say(MessageKind::lease_request, r);
        r.tag = detail;
        return say(MessageKind::tagged_lease_request, wire::TaggedLeaseRequest{r});
      }
      case Act::call: {
        wire::LeaseCall c;
        c.lease = leased_;
        c.id = detail;
        c.action = static_cast<wire::LeaseAction>(detail % 5);
        c.verdict = static_cast<wire::LeaseVerdict>(detail / 8 % 11);
        c.time = in_.take<std::uint8_t>() * std::uint64_t{400'000};
        return say(MessageKind::lease_call, c);
      }
      case Act::reply:
        return say(MessageKind::lease_reply,
                   wire::LeaseReply{detail * std::uint64_t{200'000}, called_,
                                    static_cast<wire::LeaseVerdict>(detail % 11)});
      default:
        return grant(what, detail);
    }
  }

  void grant(Act what, std::uint8_t detail) {
    wire::LeaseGrant g;
    g.address = peer_.offer(1, 0).address;
    g.bytes = what == Act::granted ? asked_.bytes : std::uint64_t{detail} * 64 + 1;
    g.time = what == Act::granted ? asked_.time : detail * std::uint64_t{300'000} + 1;
    g.id = asked_.id;
    g.lease = detail;
    g.rkey = peer_.rkey();
    g.access = what == Act::granted ? asked_.access : std::uint8_t{3};
    g.verdict = static_cast<wire::LeaseVerdict>(detail < 11 ? detail : 0);
    g.invalidate = (detail & 0x80) != 0;
    const bool answers = what == Act::granted;
    if (answers && detail == 11) return deny();
    if ((detail & 1) == 0)
      return say(answers ? MessageKind::lease_grant : MessageKind::lease_push, g);
    g.tag = asked_.tag != 0 ? asked_.tag : detail;
    say(answers ? MessageKind::tagged_lease_grant : MessageKind::tagged_lease_push,
        wire::TaggedLeaseGrant{g});
  }

  void deny() {
    wire::LeaseDenial denial;
    denial.id = asked_.id;
    denial.code = 5;
    wire::set_text(denial, "denied");
    say(MessageKind::lease_denial, denial);
  }

  void write(Act what) {
    const auto value = in_.take<std::uint16_t>();
    switch (what) {
      case Act::notice:
        return (void)peer_.send({}, {IBV_WR_RDMA_WRITE_WITH_IMM, value});
      case Act::write: {
        const Endpoint& e = peer_.engine();
        const Bytes bytes(value % 64);
        return (void)peer_.send(bytes, {IBV_WR_RDMA_WRITE_WITH_IMM, 5, 0,
                                        e.credit_cell_address + in_.take<std::uint8_t>() % 16,
                                        e.credit_cell_rkey + (value >> 15)});
      }
      case Act::cell:
        return (void)peer_.write_cell(in_.take<std::uint64_t>());
      default:
        return (void)peer_.grant(value % 16);
    }
  }

  void act_otherwise(Act what) {
    const auto detail = in_.take<std::uint8_t>();
    switch (what) {
      case Act::poll:
        for (int i = detail % 16; i >= 0; --i) world_.poll();
        return listen();
      case Act::time:
        world_.pass(detail * 100us);
        // Polls so often that honest ends have answered before the connection goes on closing.
        for (int i = 0; i < softverbs_test::kLook + 14; ++i) world_.poll();
        return;
      case Act::app_sends:
        return app_.send(detail * std::size_t{4}, (detail & 1) != 0);
      case Act::app_offers:
        return app_.send(1025 + detail * std::size_t{2000}, (detail & 1) != 0);
      case Act::app_requests:
        return app_.request(detail * std::size_t{64} + 1, 2ms + detail * 300us);
      case Act::app_leases:
        return app_.lease(detail * std::size_t{64} + 1, 2ms + detail * 300us);
      case Act::app_uses:
        return app_.use_memory(detail);
      case Act::app_recalls:
        return app_.recall();
      case Act::app_forgets:
        return app_.forget();
      case Act::app_closes:
        return (void)app_.connection().close();
      default:
        return detail % 2 == 0 ? peer_.fail() : peer_.close();
    }
  }

  World& world_;
  raw_peer::Peer& peer_;
  Application& app_;
  Input& in_;
  How how_;
  std::size_t heard_ = 0;
  std::uint32_t offered_ = 65536;
  std::uint32_t key_ = 1;
  std::uint32_t leased_ = 65537;
  std::uint32_t called_ = 65537;
  wire::LeaseRequest asked_{1, 1'000'000, 65537, 8, 3};
};

constexpr auto kActs = static_cast<std::uint8_t>(Act::count);
/// More acts per input find nothing new.
constexpr int kMostActs = 96;

World& world() {
  static World only;
  return only;
}

/// From the application's hello to the end of the connection.
void connect(World& w, Application& app) {
  const Endpoint mine = w.peer.open();
  const Endpoint its = w.endpoint_of(app.connection());
  w.peer.join(its);
  must(app.connection().join(mine).map([] { return 0; }));
  expect(w.until([&] { return app.connection().ready(); }), "the raw peer is connected");
}

}  // namespace

void run(std::span<const std::byte> data) {
  World& w = world();
  Input in(data);
  Application app(w, {in.take<std::uint8_t>()});
  connect(w, app);
  Attack attack(w, app, in);
  for (int i = 0; i < kMostActs && !in.empty(); ++i)
    attack.act(static_cast<Act>(in.take<std::uint8_t>() % kActs));
  for (int i = 0; i < 8; ++i) w.poll();
  app.forget();
  (void)app.connection().close();
  expect(w.until([&] { return app.closed(); }), "a connection ends in time");
  expect(app.settled(), "every operation has ended");
  w.peer.close();
  app.forget();
  w.expect_at_rest();
}

void sow(Seeds& seeds) {
  const auto a = [](Act act) { return static_cast<std::byte>(act); };
  const auto b = [](int value) { return static_cast<std::byte>(value); };
  const auto poll = a(Act::poll);
  const auto add = [&](std::vector<std::byte> bytes) { seeds.add(bytes); };
  for (const int manners : {0x00, 0x01, 0x02, 0x04, 0x08, 0x0c, 0x10, 0x11, 0x20, 0xc0}) {
    const auto m = b(manners);
    add({m, a(Act::data), b(9), b(0), b(1), poll, b(9), a(Act::data), b(99), b(3), b(0), poll,
         b(9)});
    add({m, a(Act::offer), b(1), b(0), b(0), b(2), b(0), a(Act::data), b(5), b(0), b(0),
         a(Act::goodbye), a(Act::goodbye), poll, b(15), poll, b(15)});
    add({m, a(Act::request), b(16), b(90), poll, b(9), a(Act::call), b(3), b(9), poll, b(5),
         a(Act::known_key), a(Act::call), b(1), b(0), poll, b(9)});
    add({m,    a(Act::push),  b(200), poll, b(9), a(Act::app_uses), b(0), poll,
         b(9), a(Act::reply), b(22),  poll, b(9), a(Act::app_uses), b(1), poll,
         b(9), a(Act::reply), b(0),   poll, b(9)});
  }
  const auto none = b(0);
  add({none, a(Act::app_offers), b(7), poll, b(9), a(Act::known_key), a(Act::answer), none, poll,
       b(9), a(Act::answer), none, poll, b(9)});
  add({none, a(Act::app_offers), b(7), a(Act::app_closes), none, poll, b(9), a(Act::answer), none,
       poll, b(9)});
  add({none, a(Act::app_requests), b(9), poll, b(9), a(Act::granted), b(99), poll, b(9),
       a(Act::app_uses), b(4), poll, b(5), a(Act::app_uses), b(1), poll, b(9), a(Act::reply),
       none});
  // With tags.
  add({none, a(Act::app_requests), b(129), poll, b(9), a(Act::granted), b(99), poll, b(9),
       a(Act::app_uses), b(1), poll, b(9), a(Act::reply), none});
  add({none, a(Act::app_requests), b(129), poll, b(9), a(Act::granted), b(11), poll, b(9),
       a(Act::granted), b(11), poll, b(9)});
  add({none, a(Act::app_leases), b(129), poll, b(9), a(Act::call), b(0), none, poll, b(9),
       a(Act::call), b(1), none, poll, b(9)});
  add({none, a(Act::request), b(0x90), b(90), poll, b(9), a(Act::call), b(3), b(9), poll, b(5)});
  add({none, a(Act::app_leases), b(9), poll, b(9), a(Act::call), b(0), none, poll, b(9),
       a(Act::app_recalls), none, poll, b(9), a(Act::call), b(1), none, poll, b(9)});
  add({none, a(Act::notice), b(1), b(1), a(Act::write), b(8), none, none, poll, b(9)});
  add({none, a(Act::cell), none, none, b(0xff), b(0xff), b(0xff), b(0xff), poll, b(3),
       a(Act::app_sends), b(4), poll, b(3)});
  add({none, a(Act::give_back), b(3), poll, b(3), a(Act::ends), none, poll, b(9)});
  add({none, a(Act::header), b(1), b(2), none, none, none, none, none, none, none, poll, b(3)});
  add({none, a(Act::credit), b(9), none, a(Act::app_sends), b(40), a(Act::time), b(250), poll, b(3),
       a(Act::time), b(250), a(Act::ends), b(1), poll, b(3)});
}

}  // namespace fuzz
