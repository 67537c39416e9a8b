// Sessions and the calls on them: what client and server of one engine share. Hot fields first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/engine_context.h"
#include "base/copy.h"
#include "base/random.h"
#include "base/timer_wheel.h"
#include "rpc/retransmission_queue.h"
#include "rpc/session_table.h"
#include "rpc/transport/datagram_port.h"
#include "spinwire/rpc.h"
#include "wire/handshake.h"
#include "wire/rpc_datagram.h"

namespace spinwire::rpc {

inline constexpr std::uint32_t kNone = agent::kNone;
inline constexpr std::uint32_t kWindowMax = wire::kSessionWindowMax;

/// In a PendingCall's name of a session: the call is a long one. No session's own name has it.
inline constexpr std::uint32_t kConnectionCall = 0x80000000;

/// The timers of sessions, told apart by Timer::kind; those of agents and handshakes are lower.
inline constexpr std::uint16_t kClientTimer = 32;
inline constexpr std::uint16_t kServerTimer = 33;
inline constexpr std::uint16_t kRetransmissionTimer = 34;  ///< the engine's, see watch.cc

/// A payload of up to kShortCall bytes, or where a longer one lies, with a reference to its block.
/// The peer may see all of `text`, whatever the size: nothing is ever in it but what it was sent
/// before, or may know.
struct Payload {
  Block* block = nullptr;  ///< null: short
  union {
    const std::byte* data;
    std::byte text[kShortCall];
    std::uint64_t arrived_at;  ///< tick at which a request came that is not answered yet
  };
  Payload() noexcept : text{} {}
};

/// One of the calls that a session may have under way.
struct alignas(64) ClientSlot {
  std::uint32_t number = 0;  ///< of this one, or the next; its low bits are the slot
  Method method = 0;
  std::uint16_t size = 0;
  std::uint64_t sent_at = 0;
  std::uint64_t deadline = 0;  ///< tick
  ReplyCallback done;
  std::uint32_t id = 0;      ///< as the application calls it
  std::uint8_t resends = 0;  ///< times sent again
  bool on_session_timer =
      false;  ///< the session's timer looks at it, too: it is due before the watch
  Payload payload;
};
static_assert(sizeof(ClientSlot) == 128);

/// What a session may send, as congestion.cc has it; in parts of a call.
inline constexpr std::uint32_t kCwndPerCall = 256;
struct CongestionWindow {
  std::uint32_t cwnd = 0;
  std::uint32_t max_cwnd = 0;       ///< what it may grow to; 0: nobody asks for congestion control
  std::uint64_t last_decrease = 0;  ///< tick
  std::uint64_t next_send = 0;      ///< tick before which no call goes out; 0: none such
};
/// So often the patience with a call is doubled at most.
inline constexpr unsigned kMaxBackoffShift = 6;
/// How long a server had a request is told in so many nanoseconds, shifted; kHeldMost: or longer.
inline constexpr unsigned kServerTimeShift = 10;
inline constexpr std::uint16_t kServerTimeMax = UINT16_MAX - 1;
/// Of an answer that is sent again.
inline constexpr std::uint16_t kServerTimeUnknown = UINT16_MAX;

/// One that waits for its turn.
struct BackloggedCall {
  Method method = 0;
  std::uint32_t size = 0;
  std::uint32_t id = 0;
  std::uint64_t deadline = 0;
  ReplyCallback done;
  Payload payload;
};
/// Takes number `i` of the `count` that wait in a ring out of it; those behind it move up.
template <typename Entry>
Entry remove_from_ring(Entry* ring, std::uint32_t room, std::uint32_t& first, std::uint32_t& count,
                       std::uint32_t i) noexcept {
  Entry taken = std::exchange(ring[(first + i) % room], {});
  --count;
  if (i == 0) {
    first = (first + 1) % room;
  } else {
    for (; i != count; ++i)
      ring[(first + i) % room] = std::exchange(ring[(first + i + 1) % room], {});
  }
  return taken;
}

/// How the calls of a session travel.
enum class Transport : std::uint8_t {
  datagram,    ///< short calls as datagrams, long ones over a connection made when first needed
  connection,  ///< all calls over a connection: one of the two engines has no datagrams
};

/// A peer engine, shared by all sessions with it. With Transport::datagram it has an address handle
/// and a source filter; with Transport::connection the numbers only identify the peer.
struct PeerAddress {
  Transport transport = Transport::connection;
  base::DatagramAddress destination;
  SourceFilter source_filter;
  std::uint64_t direct_source = 0;  ///< the same in a base::DirectRun; 0: not seen yet
  ibv_gid gid{};
  std::uint16_t lid = 0;
  std::uint32_t references = 0;
  std::uint64_t incarnation = 0;
  std::uint64_t next_probe_at = 0;  ///< tick from which silence is a reason to ask who is there
  std::uint32_t silent_session =
      0;  ///< a session of ours by whose address the engine is to ask; 0: none
};

// Calls that are longer than a datagram, or that no datagrams are there for, see bulk.h.
struct ConnectionEnd;
struct ConnectionClient;
struct ConnectionServer;
struct ConnectionDeleter {
  void operator()(ConnectionClient* connection) const noexcept;
  void operator()(ConnectionServer* connection) const noexcept;
};

/// The first cacheline is what a call needs, the second what its reply needs besides.
struct alignas(64) ClientSession {
  static constexpr std::size_t kHotBytes = 128;
  PeerAddress* peer_address = nullptr;  ///< the server; null until it has answered
  std::uint32_t name = 0;               ///< what we call it; 0: a free record
  std::uint32_t generation = 0;         ///< and which use of the record this is, for handles
  std::uint64_t free_slots = 0;         ///< slots without a call
  std::uint64_t last_heard = 0;         ///< tick of the last reply; see last_sign()
  ClientSlot* slots = nullptr;          ///< right behind this record
  std::uint32_t backlog_count = 0;
  std::uint32_t last_call_id = 0;
  std::uint32_t peer_session = 0;  ///< what the server calls it
  std::uint16_t max_inline_call = 0;
  std::uint16_t window = 0;
  std::uint16_t in_flight = 0;      ///< calls active
  std::uint16_t send_window = 0;    ///< of `window`, now; 0 unless ready: see allow()
  std::uint16_t server_window = 1;  ///< of `window`, as the server has room for
  SessionState state = SessionState::closed;
  bool is_blocked = false;  ///< in Rpc::stalled

  alignas(64) CongestionWindow congestion;
  std::uint16_t retransmission_place = 0;  ///< its place in Rpc::watch, while calls are under way
  // Ticks; see measure().
  std::uint64_t srtt = 0;
  std::uint64_t rttvar = 0;
  std::uint64_t rto = 0;      ///< until a request is sent again, the first time
  std::uint64_t min_rtt = 0;  ///< round trip; see congestion.cc
  // Cold. Those that wait: a ring of `backlog` entries, in a block that is there while it is
  // needed.
  BackloggedCall* backlog = nullptr;
  Block* backlog_block = nullptr;
  std::uint32_t backlog_first = 0;
  std::uint32_t next_blocked = kNone;
  base::Timer timer;
  std::uint64_t slow_since = 0;  ///< tick since when no more than one call was under way, and slow
  std::uint64_t recent_min_rtt = 0;       ///< the shortest round trip since then
  std::uint64_t last_control = 0;         ///< tick at which anything else was heard
  std::uint64_t deadline = 0;             ///< tick; of opening or closing
  std::uint64_t last_liveness_check = 0;  ///< tick of the timer's last look
  std::uint64_t silent_ticks = 0;  ///< ticks of silence seen while something was to be answered
  Callback<void(Session)> on_ready;
  Callback<void(Session, const Error&)> on_closed;
  std::uint32_t handshake = kNone;  ///< the engine's exchange that opens it
  std::uint32_t aligned_at_call =
      kNone;  ///< last_call when all slots were seen to have as many uses
  std::string address;
  Transport transport = Transport::datagram;                        ///< known with peer_address
  std::unique_ptr<ConnectionClient, ConnectionDeleter> connection;  ///< once it was needed
};
static_assert(offsetof(ClientSession, congestion) == 64);

enum class ServerSlotState : std::uint8_t { none, running, answered };

/// The server's end of a slot: what it was last asked, and the answer.
struct alignas(64) ServerSlot {
  std::uint32_t number = 0;
  ServerSlotState state = ServerSlotState::none;
  Status status = Status::ok;
  std::uint16_t size = 0;
  Payload payload;
};
static_assert(sizeof(ServerSlot) == 64);

/// Memory that a reply is written into where it is sent from.
struct ReplyBuffer {
  Block* block = nullptr;    ///< stays, for the next call in the same place, until it is idle
  std::uint32_t number = 0;  ///< of the call that has asked
  std::uint32_t size = 0;    ///< for so many bytes
};
inline void release_reply_buffer(ReplyBuffer& space) noexcept {
  if (space.block != nullptr) detail::release(std::exchange(space.block, nullptr));
}

struct alignas(64) ServerSession {
  static constexpr std::size_t kHotBytes = 64;
  PeerAddress* peer_address = nullptr;  ///< to the client
  std::uint32_t peer_session = 0;       ///< what the client calls it
  std::uint32_t name = 0;               ///< what we do; 0: a free record
  std::uint32_t window = 0;
  std::uint32_t advertised_window = 1;  ///< calls at once that there are receives for
  std::uint32_t mtu = 0;
  ServerSlot* slots = nullptr;                   ///< right behind this record
  std::uint64_t last_heard = 0;                  ///< tick of the last request; see last_sign()
  std::unique_ptr<ReplyBuffer[]> reply_buffers;  ///< once asked for: of each service
  // Cold.
  base::Timer timer;
  std::uint64_t last_control = 0;  ///< tick at which anything else was heard
  std::uint64_t last_liveness_check = 0;
  std::uint64_t silent_ticks = 0;
  Transport transport = Transport::datagram;
  std::uint32_t forgotten = 0;  ///< calls below this number are, see forget_calls()
  std::unique_ptr<ConnectionServer, ConnectionDeleter>
      connection;  ///< while the client has a connection for that
};

/// The call whose handler runs: most are answered there.
struct CurrentCall {
  std::uint64_t call = 0;  ///< name_of() it; 0: none
  ServerSession* session = nullptr;
  ServerSlot* service = nullptr;
};
constexpr std::uint64_t call_key(std::uint32_t session, std::uint32_t number) noexcept {
  return session | std::uint64_t{number} << 32;
}

/// When the peer was there. Pings tell that, and nothing about calls.
template <typename Session>
std::uint64_t last_heard_from(const Session& s) noexcept {
  return std::max(s.last_heard, s.last_control);
}

/// How this engine names itself to the peers of its sessions.
struct LocalAddress {
  std::uint32_t qp_num = 0;  ///< 0: no datagrams
  std::uint32_t qkey = 0;
  std::uint32_t mtu = 0;
};

/// A session that a server has forgotten, for when its client is heard again.
struct ForgottenSession {
  std::uint32_t name = 0;  ///< as it was called here; 0: none
  std::uint32_t peer_session = 0;
  PeerAddress* peer_address = nullptr;  ///< used by this
  std::uint64_t notified_at = 0;        ///< tick
};
/// By their names: of more than these, some are not remembered.
using ForgottenSessions = std::array<ForgottenSession, 4096>;

struct Rpc {
  explicit Rpc(agent::EngineContext& s);
  Rpc(const Rpc&) = delete;
  Rpc& operator=(const Rpc&) = delete;
  ~Rpc();

  agent::EngineContext& context;
  std::unique_ptr<DatagramPort> port;  ///< null: this engine has no datagrams
  std::vector<MethodHandler> handlers;
  std::uint32_t method_count = 0;  ///< their number, which takes a multiplication to tell
  SessionTable<ClientSession, ClientSlot> clients;
  SessionTable<ServerSession, ServerSlot> servers;
  /// Tick since when what a poll has found may have waited: the poll's own, unless we were away.
  std::uint64_t oldest_arrival = 0;
  std::uint64_t target_delay = ~std::uint64_t{0};  ///< ticks: a longer round trip is congestion
  std::uint64_t min_rto = 0;                       ///< ticks
  std::uint32_t reserved_receives = 0;             ///< receives that replies and requests may need
  std::uint32_t posted_receives = 0;           ///< for so many, up to the budget, they are posted
  std::uint32_t receive_budget = 0;            ///< of those that there are
  std::uint32_t server_reserved_receives = 0;  ///< of the promised, to sessions that we serve
  std::uint32_t blocked_first = kNone;  ///< sessions whose calls wait for room that all share
  std::uint32_t blocked_last = kNone;
  ConnectionEnd* queue_first = nullptr;  ///< of long calls, what waits for credit or other room
  ConnectionEnd* queue_last = nullptr;
  CurrentCall current_call;
  RpcStats stats;
  RetransmissionQueue retransmission_queue;
  base::Timer retransmission_timer;
  // Cold.
  std::uint32_t connections_wanted = 0;  ///< sessions that want a connection for long calls
  bool has_silent_peers = false;         ///< a route has a silent session
  LocalAddress local;
  base::Random numbers;  ///< where those of new sessions' calls begin
  std::vector<std::unique_ptr<PeerAddress>> peer_addresses;
  std::unique_ptr<ForgottenSessions> forgotten;  ///< once there are any
  // Ticks.
  std::uint64_t idle_timeout = 0;  ///< after which a server takes back what receives it granted
  std::uint64_t keepalive_interval = 0;
  std::uint64_t peer_timeout = 0;
  std::uint64_t close_timeout = 0;
  std::uint64_t call_timeout = 0;
};

/// Where a session's calls begin to be numbered: names come again after some thousand sessions, and
/// what is left of an earlier one, such as a PendingCall, shall not fit a call of another.
inline std::uint32_t random_call_number(Rpc& r) noexcept {
  return static_cast<std::uint32_t>(r.numbers.next()) & ~(kWindowMax - 1);
}

// In rpc.cc.
/// Whether calls may go over datagrams here.
inline bool uses_datagrams(const agent::EngineContext& s) noexcept {
  return s.config.rpc.carrier != RpcCarrier::connections && s.device->info().datagrams;
}
/// Makes the port. Errors: as Port::open().
Result<std::unique_ptr<Rpc>> open(agent::EngineContext& s);
/// The engine ends: all calls end with `flushed`, each on_closed runs, servers' peers are told.
void end(Rpc& r) noexcept;
/// No callback of the application's runs any more. Cold.
void abort(Rpc& r) noexcept;
/// The end of a poll: calls that waited for room, then everything that was sent. Hot.
void finish_poll(Rpc& r) noexcept;
/// Posts the datagrams that were sent since the last time.
void flush(Rpc& r) noexcept;
/// Has receives posted for all that are promised and one more, within the budget. Cold: what is
/// posted doubles at least, until all are.
void post_reserved_receives(Rpc& r) noexcept;
/// A part of the control step.
void upkeep(Rpc& r) noexcept;
void on_timer(Rpc& r, base::Timer& timer) noexcept;
[[nodiscard]] Result<void> audit(Rpc& r);
[[nodiscard]] RpcStats stats(const Rpc& r) noexcept;
/// The route to a peer's datagrams, made if need be: a control verb, unless one of us has none.
/// Errors: no_memory, system.
Result<PeerAddress*> acquire_peer_address(Rpc& r, const wire::SessionEnd& peer);
void release_peer_address(Rpc& r, PeerAddress* peer_address) noexcept;

/// Our end of a session, for the peer.
wire::SessionEnd local_session_end(const Rpc& r, std::uint32_t name, std::uint32_t window,
                                   std::uint32_t first) noexcept;

// In arrivals.cc.
/// Takes the completions that are of the port's queue pair, the first of which is, up to the first
/// of another or the end, which it answers. Adds to the number of events. Hot.
const ibv_wc* process_completions(Rpc& r, const ibv_wc* wcs, const ibv_wc* end,
                                  std::uint32_t& events) noexcept;

// In client.cc.
/// A record for a session that is being opened; null if rpc.sessions are open. May throw.
ClientSession* make_client_session(Rpc& r, std::uint32_t window);
/// What the calls of one that is being opened are numbered from.
inline std::uint32_t first_call_number(const ClientSession& c) noexcept {
  return c.slots[0].number - c.window;
}
/// The server's end is known: the session is ready, or will be when its connection is.
void set_peer(Rpc& r, ClientSession& c, const wire::SessionEnd& peer,
              PeerAddress* peer_address) noexcept;
void mark_ready(Rpc& r, ClientSession& c) noexcept;
/// Ends it at once: its calls, with the status or, if that is ok, as `flushed`; then on_closed.
void fail_session(Rpc& r, ClientSession& c, const Error& why) noexcept;
void fail_session(Rpc& r, ClientSession& c, Status status, const char* found) noexcept;
/// Ends a session that was closed in order: calls end with `flushed`, on_closed gets ok.
void close_session(Rpc& r, ClientSession& c) noexcept;
inline ClientSession* find_client(Rpc& r, std::uint32_t name) noexcept {
  ClientSession* const c = r.clients.find(wire::RpcName::index(name));
  return c != nullptr && c->name == name ? c : nullptr;
}
/// What a handle names: the same comes again after 2^32 uses of a record.
inline std::uint64_t id_of(const ClientSession& c) noexcept {
  return c.name | std::uint64_t{c.generation} << 32;
}
/// By when the session has to be looked at again, if not earlier.
inline void schedule_check(Rpc& r, ClientSession& c, std::uint64_t tick) noexcept {
  if (!c.timer.scheduled() || c.timer.deadline > tick) [[unlikely]]
    r.context.timers.reschedule(c.timer, tick);
}
/// Brings `allowed` in line with what server and network grant.
inline void update_send_window(ClientSession& c) noexcept {
  if (c.state != SessionState::ready || c.transport != Transport::datagram) {
    c.send_window = 0;
    return;
  }
  const std::uint32_t flow =
      c.congestion.max_cwnd == 0 ? c.server_window : std::max(1u, c.congestion.cwnd / kCwndPerCall);
  const std::uint32_t most = c.congestion.next_send != 0 ? 0 : flow;
  c.send_window = static_cast<std::uint16_t>(std::min<std::uint32_t>(c.server_window, most));
}
// In congestion.cc.
/// A reply took `trip` ticks, some of which the server had the request. Cold unless congested.
[[gnu::cold]] void adjust_cwnd(Rpc& r, ClientSession& c, std::uint64_t trip,
                               std::uint16_t held) noexcept;
/// A request or its reply got lost.
[[gnu::cold]] void on_loss(Rpc& r, ClientSession& c) noexcept;
/// How long the server had the request, ticks; at least, if that is kHeldMost.
[[nodiscard]] inline std::uint64_t server_time_ticks(const Rpc& r, std::uint16_t held) noexcept {
  return r.context.clock.ticks(Nanoseconds(std::int64_t{held} << kServerTimeShift));
}

// In watch.cc.
/// The watch is full.
[[gnu::cold]] void grow_retransmission_queue(Rpc& r) noexcept;
/// The first of a session's calls goes out now.
[[gnu::always_inline]] inline void queue_for_retransmission(Rpc& r, ClientSession& c,
                                                            std::uint64_t now) noexcept {
  if (r.retransmission_queue.full()) [[unlikely]]
    grow_retransmission_queue(r);
  c.retransmission_place = r.retransmission_queue.add(now, c.name);
  if (!r.retransmission_timer.scheduled()) [[unlikely]]
    r.context.timers.schedule(r.retransmission_timer, now + r.min_rto);
}
/// A call has to end, or to be sent again, before the watch looks at it.
[[gnu::cold, gnu::noinline]] void schedule_early_check(Rpc& r, ClientSession& c,
                                                       ClientSlot& call) noexcept;
/// Ends a call that is too late, or sends it again if it seems lost. Answers the tick of the next
/// look, or the end of time if the watch has it in time. The session may be gone afterwards.
std::uint64_t check_slot(Rpc& r, ClientSession& c, std::uint32_t slot, std::uint64_t now) noexcept;
void on_retransmission_timer(Rpc& r) noexcept;

// In client.cc.
/// A call as the application asks for it. Handed on by value: else it would be in memory for the
/// cold ways alone.
struct CallRequest {
  Method method;
  const std::byte* data;
  std::size_t size;
  Block* block;            ///< null: to be copied
  std::uint64_t now;       ///< tick
  std::uint64_t deadline;  ///< tick
};
/// One that may not start yet. Cold unless the window is full.
Status enqueue_call(Rpc& r, ClientSession& c, CallRequest call, const ReplyCallback& done) noexcept;
Status cancel(Rpc& r, ClientSession& c, std::uint32_t number) noexcept;
Status close(Rpc& r, ClientSession& c) noexcept;
void on_server_control(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept;
/// Sends what waits and may go.
void send_backlog(Rpc& r, ClientSession& c) noexcept;
void on_client_timer(Rpc& r, ClientSession& c) noexcept;
/// Of a server that is silent, a session by whose address it can be asked for; null if none is.
ClientSession* next_session_to_probe(Rpc& r) noexcept;
/// At their address is another engine than this one, which is silent: they end.
void fail_silent_sessions(Rpc& r, std::uint64_t incarnation) noexcept;

// In server.cc.
/// Room for a reply, of the call's own slot; empty if there is none.
std::span<std::byte> reserve_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                   std::size_t size) noexcept;
/// The same in a block of `most` bytes, after `offset` of them.
std::span<std::byte> prepare_reply_buffer(Rpc& r, ReplyBuffer& space, std::uint32_t number,
                                          std::size_t size, std::size_t most,
                                          std::size_t offset) noexcept;
/// Where that is.
struct ReservedReply {
  Block* block = nullptr;
  const std::byte* data = nullptr;
};
/// No block if this call has not asked for as many bytes.
ReservedReply find_reserved_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                  std::size_t size) noexcept;
/// Null if rpc.sessions are there. May throw.
ServerSession* accept_session(Rpc& r, const wire::SessionEnd& peer, PeerAddress* peer_address);
inline ServerSession* find_server(Rpc& r, std::uint32_t name) noexcept {
  ServerSession* const s = r.servers.find(wire::RpcName::index(name));
  return s != nullptr && s->name == name ? s : nullptr;
}
void release_server_session(Rpc& r, ServerSession& s) noexcept;
/// The same without its client's having said so, which is told when it is heard again.
void forget_session(Rpc& r, ServerSession& s) noexcept;
/// A datagram of no session that we have.
[[gnu::cold]] void on_unknown_session(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                                      const std::byte* grh) noexcept;
void on_client_control(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept;
void on_server_timer(Rpc& r, ServerSession& s) noexcept;

/// Copies what has no block to be referred to into one of the send pool; null if that is dry.
Block* copy_to_send_block(Rpc& r, const std::byte* data, std::size_t size) noexcept;
/// Fills an empty payload: copied if short, else referred to. False if the send pool is dry.
[[gnu::always_inline]] inline bool store_payload(Rpc& r, Payload& payload, const std::byte* data,
                                                 std::size_t size, Block* block) noexcept {
  if (size <= kShortCall) [[likely]] {
    base::copy_small(payload.text, data, size);
    return true;
  }
  if (block != nullptr) {
    detail::retain(block);
  } else if (block = copy_to_send_block(r, data, size), block != nullptr) {
    data = block->payload;
  }
  payload.block = block;
  payload.data = data;
  return block != nullptr;
}
inline void release_payload(Payload& payload) noexcept {
  if (payload.block == nullptr) [[likely]]
    return;
  detail::release(std::exchange(payload.block, nullptr));
  payload.data = nullptr;
}
/// Sends header and payload; false, and nothing sent, if the port is full.
bool send(Rpc& r, const base::DatagramAddress& to, const wire::RpcHeader& header,
          const Payload& payload) noexcept;

}  // namespace spinwire::rpc
