// Calls of the simulations' workload: how they are begun, served and judged.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

namespace {

/// The bytes 7 * i, whose period is 256, twice: a piece of 256 bytes may begin anywhere in the
/// first.
constexpr std::array<std::byte, 512> kPattern = [] {
  std::array<std::byte, 512> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(7 * i);
  return bytes;
}();

}  // namespace

std::span<const std::byte, 256> SimWorld::piece_of(std::uint64_t number, std::size_t at,
                                                   bool of_reply) noexcept {
  const std::uint64_t begin = number * 131 + (at >> 8) * 13 + (of_reply ? 89 : 0);
  return std::span<const std::byte, 256>(&kPattern[begin & 0xff], 256);
}

void SimWorld::fill(std::span<std::byte> bytes, std::uint64_t number, bool of_reply) {
  for (std::size_t at = 0; at < bytes.size(); at += 256)
    std::memcpy(&bytes[at], piece_of(number, at, of_reply).data(),
                std::min<std::size_t>(256, bytes.size() - at));
  if (!of_reply && bytes.size() >= sizeof number) std::memcpy(bytes.data(), &number, sizeof number);
}

bool SimWorld::holds(std::span<const std::byte> bytes, std::uint64_t number, bool of_reply) {
  std::size_t skipped = 0;
  if (!of_reply && bytes.size() >= sizeof number) {
    if (std::memcmp(bytes.data(), &number, sizeof number) != 0) return false;
    skipped = sizeof number;
  }
  for (std::size_t at = 0; at < bytes.size(); at += 256, skipped = 0) {
    const std::size_t length = std::min<std::size_t>(256, bytes.size() - at);
    if (length > skipped &&
        std::memcmp(&bytes[at + skipped], &piece_of(number, at, of_reply)[skipped],
                    length - skipped) != 0)
      return false;
  }
  return true;
}

// ---- the client -------------------------------------------------------------------------------

std::uint32_t SimWorld::pick_size(std::size_t longest) {
  switch (sim_.random(6)) {
    case 0:
    case 1:
      return static_cast<std::uint32_t>(8 + sim_.random(kSlotPayloadBytes - 7));
    case 2:
      return static_cast<std::uint32_t>(kSlotPayloadBytes - 2 + sim_.random(6));
    case 3:
    case 4:
      return static_cast<std::uint32_t>(8 + sim_.random(600));
    default:
      return static_cast<std::uint32_t>(8 + sim_.random(longest - 7));
  }
}

void SimWorld::choose_call(std::uint32_t session) {
  constexpr std::array<Method, 16> kMix = {kSimEcho,   kSimEcho,   kSimEcho,    kSimEcho,
                                           kSimEcho,   kSimEcho,   kSimLater,   kSimLater,
                                           kSimLater,  kSimNested, kSimNested,  kSimTiny,
                                           kSimRefuse, kSimSilent, kSimTooLong, kSimUnserved};
  const Method method = kMix[sim_.random(kMix.size())];
  Nanoseconds timeout = 4s;
  if (sim_.chance(0.1)) timeout = 30us + below(3ms);
  (void)begin_call(session, method, timeout);
}

bool SimWorld::begin_call(std::uint32_t session, Method method, Nanoseconds timeout,
                          const PendingCall* outer, std::uint64_t asked_for) {
  SimSession& s = sessions_[session];
  const std::uint64_t number = calls_.size();
  SimCall& c = calls_.emplace_back();
  // While the session is opened again, the longest inline call is not known.
  const std::size_t longest = std::max<std::size_t>(s.handle.max_inline_call(), 600);
  c.session = session;
  c.method = method;
  c.size = method == kSimTiny ? static_cast<std::uint32_t>(sim_.random(8)) : pick_size(longest);
  c.reply_size = method == kSimTiny ? c.size : pick_size(longest) - 8;
  if (outer == nullptr && method != kSimTiny && method != kSimUnserved && sim_.chance(long_calls_))
    make_long(c, s.from);
  c.begun = sim_.now();
  c.deadline = c.begun + timeout;
  c.has_long_timeout = timeout >= 3s;  // long enough for many retransmissions, whatever the rto is
  c.asked_for = asked_for;
  ReplyCallback done = [this, number](Reply& r) { on_reply(number, r); };
  if (outer != nullptr) {
    done = [this, number, outer = *outer](Reply& r) {
      on_reply(number, r);
      on_nested(number, outer);
    };
  }
  const Status status = post_call(s, number, done);
  sim_.note(number << 8 | static_cast<std::uint64_t>(status));
  if (status != Status::ok) {
    c.into = {};
    const bool ends = status == Status::not_connected && (s.leaving || s.moved);
    if (status != Status::would_block && !ends)
      fail("call {} of {} bytes was refused: {}", number, c.size, to_string(status));
    return false;
  }
  c.accepted = true;
  c.name = s.handle.last_call();
  open_calls_.push_back(number);
  ++outcome_.calls;
  ++unended_;
  tiny_begun_ += method == kSimTiny ? 1 : 0;
  return true;
}

/// Makes a call that needs a connection: for its request, its reply, or both.
void SimWorld::make_long(SimCall& c, NodeId from) {
  c.is_long = true;
  const std::uint64_t which = sim_.random(3);
  if (which != 0) c.size = static_cast<std::uint32_t>(5000 + sim_.random(60'000));
  if (which == 1) return;
  const auto room = static_cast<std::uint32_t>(1 + sim_.random(60'000));
  const Buffer buffer = sim_.engine(from).allocate(room);
  if (!buffer) return;
  c.into = buffer.slice();
  c.reply_size = static_cast<std::uint32_t>(sim_.random(room + 1));
}

Status SimWorld::post_call(SimSession& s, std::uint64_t number, const ReplyCallback& done) {
  SimCall& c = calls_[number];
  CallOptions options;
  options.timeout = c.deadline - c.begun;
  if (sim_.chance(0.1)) options.post = Post::defer;
  if (c.into) options.reply_into = c.into;
  if (c.size <= kSlotPayloadBytes && sim_.chance(0.5)) {
    std::array<std::byte, kSlotPayloadBytes> bytes;
    fill(std::span(bytes).first(c.size), number, false);
    return s.handle.call(c.method, std::span<const std::byte>(bytes).first(c.size), done, options);
  }
  Buffer buffer = sim_.engine(s.from).allocate(std::max(c.size, 1u));
  if (!buffer) return sim_.engine(s.from).allocate_status();
  fill(buffer.bytes().first(c.size), number, false);
  return s.handle.call(c.method, buffer.slice(0, c.size), done, options);
}

/// Whether the session's connection may have been lost for another reason than the network.
bool SimWorld::is_shaken(const SimSession& s) const {
  return s.shaken || hosts_[home(s.from)].shaky ||
         std::any_of(s.targets.begin(), s.targets.end(),
                     [this](const auto& target) { return hosts_[target.first].shaky; });
}
/// Whether the call goes over a connection, whatever its length.
bool SimWorld::is_connected(const SimCall& c) const {
  return c.is_long || sessions_[c.session].connected;
}

bool SimWorld::excused(const SimCall& c) const {
  const SimSession& s = sessions_[c.session];
  return s.troubled || worst_loss_ > 0.15 || is_cut_off(s) || (is_connected(c) && is_shaken(s));
}

void SimWorld::on_reply(std::uint64_t number, Reply& reply) {
  SimCall& c = calls_[number];
  const SimSession& s = sessions_[c.session];
  if (!sim_.alive(s.from)) return;
  sim_.note(number << 8 | static_cast<std::uint64_t>(reply.status()));
  if (c.orphan) return fail("call {} ends, but its caller has died", number);
  if (!c.accepted) return fail("call {} ends, but was refused", number);
  if (++c.ended != 1) return fail("call {} ends for the {}th time", number, c.ended);
  --unended_;
  c.status = reply.status();
  ++outcome_.ended[static_cast<std::size_t>(c.status)];
  judge_reply(c, number, reply);
  if (c.status == Status::ok) count(c.is_long ? SimEvent::long_calls : SimEvent::inline_calls);
  if (c.status == Status::cancelled) count(SimEvent::cancelled);
  if (c.status == Status::timed_out) count(SimEvent::timed_out);
  if (c.is_long && c.status != Status::ok) sessions_[c.session].shaken = true;
  c.into = {};
  rouse_inside(s.from);
  if (c.status == Status::ok && !reply.bytes().empty() && c.method != kSimTiny && sim_.chance(0.1))
    keep(s.from, reply.keep(), number, true);
}

void SimWorld::judge_reply(const SimCall& c, std::uint64_t number, Reply& reply) {
  const auto told = [&](const char* what) {
    fail("call {} (method {}, {} bytes) from {} to {} ends with {}, {} ns after its deadline: {}",
         number, c.method, c.size, sessions_[c.session].from, sessions_[c.session].to(),
         to_string(c.status), (sim_.now() - c.deadline).count(), what);
  };
  const SimSession& s = sessions_[c.session];
  const bool numbered = c.method != kSimTiny;
  const Nanoseconds now = sim_.now();
  // The memory of a long call stays in use until its connection is closed.
  if (now > c.deadline + slack_ + (is_connected(c) ? 2s : 0s)) told("too late");
  if (c.cancelling && !is_connected(c) && c.status != Status::cancelled)
    return told("though it was cancelled before");
  switch (c.status) {
    case Status::ok: {
      const bool answers = c.method == kSimTiny || c.method == kSimEcho || c.method == kSimLater ||
                           c.method == kSimNested;
      if (!answers) return told("which its handler never returns");
      if (numbered && c.runs != 1) return told("but its handler did not run exactly once");
      if (reply.bytes().size() != c.reply_size) return told("with another length");
      if (!holds(reply.bytes(), number, numbered)) return told("with other bytes");
      if (c.into && c.reply_size != 0 && reply.bytes().data() != c.into.data())
        return told("in the wrong memory");
      return;
    }
    case Status::refused:
      if (c.method == kSimRefuse && reply.text() != fmt::format("no {}", number))
        return told("with another text");
      if (c.method == kSimSilent && reply.text() != "the handler has not answered")
        return told("with another text");
      if (c.method != kSimRefuse && c.method != kSimSilent && c.method != kSimNested &&
          c.method != kSimTooLong)
        return told("which its handler never returns");
      if (c.runs != 1) return told("but its handler did not run exactly once");
      return;
    case Status::unsupported:
      if (c.method != kSimUnserved) return told("but it is served");
      return;
    case Status::cancelled:
      if (!c.cancelling) return told("but it was not cancelled");
      return;
    case Status::flushed:
      if (!s.closing && !(s.leaving && excused(c))) return told("but the session was not closed");
      return;
    case Status::timed_out:
      if (now < c.deadline) return told("before its deadline");
      if (c.has_long_timeout && !c.forgotten && !excused(c)) return told("without a reason");
      return;
    case Status::peer_lost:
      if (!excused(c)) return told("without a reason");
      return;
    case Status::not_connected:
      if (c.runs != 0) return told("though it was sent");
      // Otherwise the session waits for its server, or a long call's connection cannot be made.
      if (!s.leaving && !s.moved && !((s.reconnects || c.is_long) && excused(c)))
        return told("without a reason");
      return;
    case Status::limit:
      // The server's send pool was exhausted, and the reply had to make room.
      if (c.runs != 1) return told("but its handler did not run exactly once");
      if (sim_.engine(hosts_[s.to()].current).rpc_stats().dropped_replies == 0)
        return told("but the server has dropped no reply");
      return;
    case Status::no_buffer:
      // The server's pool had no block for a long request.
      if (!is_connected(c) || c.runs != 0 || !excused(c)) return told("without a reason");
      return;
    default:
      return told("which no call may");
  }
}

void SimWorld::cancel_one(NodeId node) {
  std::erase_if(open_calls_, [this](std::uint64_t number) {
    return calls_[number].ended != 0 || calls_[number].orphan;
  });
  if (open_calls_.empty()) return;
  const std::uint64_t number = open_calls_[sim_.random(open_calls_.size())];
  SimCall& c = calls_[number];
  SimSession& s = sessions_[c.session];
  if (s.from != node || s.over) return;
  if (c.cancelling) return;
  s.shaken = s.shaken || c.is_long;
  const Status status = s.handle.cancel(c.name);
  c.cancelling = status == Status::ok;
  // A call past its deadline may already be ending, once its memory is released.
  const bool late = is_connected(c) && sim_.now() >= c.deadline;
  if (status != Status::ok && !late && !s.closing)  // closing the session has ended its calls
    fail("call {} cannot be cancelled: {}", number, to_string(status));
  if (c.ended != 0) fail("call {} ended inside of cancel()", number);
}

// ---- the server -------------------------------------------------------------------------------

void SimWorld::serve(NodeId node) {
  const MethodHandler handler = [this, node](Request& r) { on_request(node, r); };
  for (Method method = kSimTiny; method < kSimUnserved; ++method) {
    if (auto served = sim_.engine(node).serve(method, handler); !served)
      fail("node {} cannot serve: {}", node, served.error().message());
  }
}

void SimWorld::on_request(NodeId node, Request& request) {
  if (!sim_.alive(node)) return;
  if (std::exchange(actors_[node].dies_in_handler, false)) return kill(node);
  if (actors_[node].is_drained) return fail("node {} is drained, and gets a call", node);
  if (request.method() == kSimTiny) {
    ++tiny_runs_;
    (void)request.reply(request.bytes());
    return;
  }
  std::uint64_t number = 0;
  if (request.bytes().size() < sizeof number)
    return fail("node {} got a call of {} bytes", node, request.bytes().size());
  std::memcpy(&number, request.bytes().data(), sizeof number);
  if (number >= calls_.size()) return fail("node {} got a call that was never made", node);
  SimCall& c = calls_[number];
  sim_.note(number);
  if (++c.runs != 1) return fail("the handler of call {} runs for the {}th time", number, c.runs);
  if (!sessions_[c.session].may_reach(home(node)))
    return fail("call {} comes to node {}", number, node);
  if (request.method() != c.method || request.bytes().size() != c.size)
    return fail("call {} comes with another method or length", number);
  if (!holds(request.bytes(), number, false)) return fail("call {} comes with other bytes", number);
  rouse_inside(node);
  if (sim_.chance(0.05)) keep(node, request.keep(), number, false);
  answer(number, node, request);
}

void SimWorld::answer(std::uint64_t number, NodeId node, Request& request) {
  switch (request.method()) {
    case kSimEcho:
      return check_answered(number, give_reply(number, node, request.defer()));
    case kSimLater:
      return answer_later(number, node, request.defer());
    case kSimRefuse:
      return check_answered(number, request.refuse(fmt::format("no {}", number)));
    case kSimTooLong: {
      const Buffer buffer = sim_.engine(node).allocate(request.max_reply() + 1);
      if (request.reply(buffer.slice()) != Status::message_too_long)
        fail("a reply of {} bytes was accepted", buffer.size());
      return check_answered(number, request.refuse("too long"));
    }
    case kSimNested: {
      for (std::size_t tries = 0; tries < 4; ++tries) {
        const auto i = static_cast<std::uint32_t>(sim_.random(sessions_.size()));
        const SimSession& s = sessions_[i];
        const bool ours = s.from == node && !s.over && s.handle.ready();
        const PendingCall outer = request.defer();
        if (ours && begin_call(i, kSimEcho, 200ms, &outer, number)) return;
      }
      return check_answered(number, request.refuse("no session to call back"));
    }
    default:
      return;  // silent
  }
}

void SimWorld::answer_later(std::uint64_t number, NodeId node, const PendingCall& call) {
  // Only calls with short timeouts: others would keep their session's slots for seconds.
  if (!calls_[number].has_long_timeout && sim_.chance(0.5)) {
    calls_[number].forgotten = true;
    return;
  }
  sim_.at(sim_.now() + below(pace_ * 4),
          [this, number, node, call, incarnation = sim_.incarnation(node)] {
            if (!is_incarnation(node, incarnation)) return;
            const Status status = give_reply(number, node, call);
            check_answered(number, status);
            rouse(node);
            if (status == Status::ok && sim_.chance(0.2) &&
                call.reply(std::span<const std::byte>()) != Status::not_connected)
              fail("call {} was answered twice", number);
          });
}

void SimWorld::on_nested(std::uint64_t inner, const PendingCall& outer) {
  const std::uint64_t number = calls_[inner].asked_for;
  const SimSession& s = sessions_[calls_[inner].session];
  if (!is_incarnation(s.from, s.incarnation)) return;
  const Status status = calls_[inner].status == Status::ok
                            ? give_reply(number, s.from, outer)
                            : outer.refuse(to_string(calls_[inner].status));
  check_answered(number, status);
}

Status SimWorld::give_reply(std::uint64_t number, NodeId node, const PendingCall& call) {
  const std::uint32_t size = calls_[number].reply_size;
  Buffer buffer = sim_.engine(node).allocate(std::max(size, 1u));
  if (!buffer) return sim_.engine(node).allocate_status();
  fill(buffer.bytes().first(size), number, true);
  if (sim_.chance(0.5)) return call.reply(buffer.slice(0, size));
  return call.reply(std::span<const std::byte>(buffer.bytes().first(size)));
}

/// A server may get an error for its reply, but only if the client no longer waits.
void SimWorld::check_answered(std::uint64_t number, Status status) {
  const SimCall& c = calls_[number];
  if (status == Status::ok) return;
  const bool told =
      is_connected(c) &&
      (c.cancelling || sim_.now() >= c.deadline);  // the client is releasing the memory
  const bool over = told || c.ended != 0 || c.orphan || excused(c) || sessions_[c.session].closing;
  if (status != Status::not_connected || !over)
    fail("call {} could not be answered: {}", number, to_string(status));
}

// ---- bytes that are kept ----------------------------------------------------------------------

void SimWorld::keep(NodeId node, BufferSlice slice, std::uint64_t number, bool of_reply) {
  actors_[node].kept.push_back({std::move(slice), number, of_reply});
  if (actors_[node].kept.size() > 8) drop_kept(actors_[node], 4);
}

void SimWorld::drop_kept(SimActor& actor, std::size_t leave) {
  for (; actor.kept.size() > leave; actor.kept.pop_front()) {
    const SimKept& k = actor.kept.front();
    if (!holds(k.slice.bytes(), k.number, k.of_reply))
      fail("the kept bytes of call or lease {} have changed", k.number);
  }
}

}  // namespace spinwire::tools
