// The control port of an engine: its listeners, the TCP exchanges that set connections and sessions
// up, rdma_cm's channel, and the epoll set that watches all of them, with their timers and limits.
// It knows no connection and no session: what a handshake is for, its owner knows. Never blocks;
// one thread. Cold.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/index_pool.h"
#include "base/timer_wheel.h"
#include "control/address_resolver.h"
#include "control/dialogues.h"
#include "control/epoll_set.h"
#include "control/owners.h"
#include "control/rdma_cm.h"
#include "control/socket.h"
#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::control {

struct ControlOptions {
  std::uint32_t handshakes = 0;      ///< under way at once, in each direction
  Nanoseconds handshake_timeout{0};  ///< of a peer that asks for something
  std::uint64_t incarnation = 0;     ///< of this engine
};

/// Timer::kind of handshakes in the wheel that the port shares.
inline constexpr std::uint16_t kHandshakeTimer = 3;

class ControlPort {
 public:
  /// `clock` and `timers` outlive the port; their user gives timers of kHandshakeTimer to
  /// on_timer().
  ControlPort(const ControlOptions& options, const Clock& clock, base::TimerWheel& timers);
  ControlPort(const ControlPort&) = delete;
  ControlPort& operator=(const ControlPort&) = delete;
  ~ControlPort() { close(); }

  /// `network`: a simulated one; null: the system's. Errors: limit, no_memory, system.
  Result<void> open(Network* network = nullptr);
  /// Drops every handshake and listener without a word.
  void close() noexcept;

  /// Handles what the sockets, rdma_cm and other descriptors report. One system call if that is
  /// nothing.
  void poll() noexcept;
  void on_timer(base::Timer& timer) noexcept;

  // Listeners. Errors of listen(): those of ListenSocket::open() and CmId::listen().
  Result<ListenerId> listen(const Address& at, std::shared_ptr<ListenerOwner> owner);
  Result<ListenerId> listen_cm(const Address& at, std::shared_ptr<ListenerOwner> owner);
  /// Handshakes that have passed their first frame go on.
  void stop_listening(ListenerId id) noexcept;
  /// Where a listener listens; empty once it is stopped.
  [[nodiscard]] std::string address_of(ListenerId id) const;

  // Outbound handshakes. Errors: limit (connections.handshakes), and those of Exchange::connect().
  /// Begins to connect; assign() and ask() follow.
  Result<HandshakeId> connect(const Address& to, ConnectionOwner& owner);
  /// The same for a connection that is for a session's calls.
  Result<HandshakeId> join_session(const Address& to, ConnectionOwner& owner,
                                   const SessionReference& session);
  Result<HandshakeId> open_session(const Address& to, const wire::SessionEnd& client,
                                   SessionOwner& owner, std::uint64_t subject);
  Result<void> probe(const Address& to, std::uint64_t incarnation, ProbeOwner& owner);

  // What owners do with their handshakes. Each does nothing for a handshake that is over, or is
  // past that step.
  void assign(HandshakeId id, std::uint64_t subject) noexcept;
  /// Outbound: says hello.
  void ask(HandshakeId id, const Endpoint& endpoint) noexcept;
  /// Inbound: says accept.
  void answer(HandshakeId id, const Endpoint& endpoint) noexcept;
  /// Outbound: shows the server of a session that its challenge has come.
  void respond(HandshakeId id, std::uint64_t path_token) noexcept;
  /// Outbound: says ready to the peer of that incarnation. A session's handshake is over then.
  void confirm(HandshakeId id, std::uint64_t peer_incarnation) noexcept;
  /// Tells the peer why not. The owner hears no more of it.
  void refuse(HandshakeId id, const Error& why) noexcept;
  /// Closes without a word. The owner hears no more of it.
  void drop(HandshakeId id) noexcept;

  // rdma_cm.
  /// Sets the receiver of the events of all identifiers, those of accepted requests included.
  /// Set-up: before the first listener or make_cm_id().
  void set_cm_owner(CmOwner& owner) noexcept { cm_owner_ = &owner; }
  /// Addresses that frames name are resolved before their owners see them. Set-up: before the first
  /// listener or handshake. Without a resolver none has to be.
  void set_resolver(std::unique_ptr<AddressResolver> resolver) noexcept {
    resolver_ = std::move(resolver);
  }
  /// Resolves an address for a connection without a handshake. As AddressResolver::begin();
  /// CmOwner::on_address_resolved() tells later.
  Result<bool> resolve(std::uint64_t subject, const Endpoint& peer);
  void on_resolved(const Resolution& what, const Result<void>& outcome) noexcept;
  /// Makes an identifier. Errors: those of CmChannel::open() and CmId::create().
  Result<CmId> make_cm_id();
  /// What on_cm_event() is told with the identifier's events. Call it before poll().
  static void set_cm_subject(const CmId& id, std::uint64_t subject) noexcept;
  /// The bits of a subject that rdma_cm carries.
  static constexpr std::uint64_t kCmSubjectBits = ~std::uint64_t{0} >> 1;

  /// Calls `owner` when `fd` is readable. Errors: those of EpollSet::add().
  Result<void> watch(int fd, DescriptorOwner& owner);
  /// Call it before closing `fd`.
  void unwatch(int fd) noexcept { epoll_.remove(fd); }

  /// Outbound handshakes that may begin now.
  [[nodiscard]] std::uint32_t outbound_room() const noexcept {
    return options_.handshakes - outbound_;
  }
  [[nodiscard]] std::uint32_t handshakes() const noexcept { return inbound_ + outbound_; }
  /// Peers refused, or dropped because they said nothing valid.
  [[nodiscard]] std::uint64_t refusals() const noexcept { return refusals_; }
  [[nodiscard]] std::uint64_t incarnation() const noexcept { return options_.incarnation; }

 private:
  friend struct Incoming;
  friend struct Connect;
  friend struct Accept;
  friend struct OpenSession;
  friend struct ValidatePath;
  friend struct ServeSession;
  friend struct ProbePeer;
  friend struct Refusing;

  struct Listener {
    ListenSocket socket;  ///< or
    CmId cm;
    std::shared_ptr<ListenerOwner> owner;
    std::uint32_t generation = 0;
  };

  // What dialogues use.
  void begin(Handshake& h, const Dialogue& next) noexcept {
    h.dialogue = next;
    h.waits_since = clock_.now();
  }
  void advance(Handshake& h) noexcept;
  void send(Handshake& h, const wire::Frame& frame) noexcept;
  void watch(Handshake& h) noexcept;
  void refuse(Handshake& h, const Error& why) noexcept;
  void drop(Handshake& h) noexcept;
  void give_up(Handshake& h) noexcept;
  /// Resolves what the peer's frame names. False: Dialogue::on_resolved() tells later, and the
  /// frame stays until then.
  Result<bool> resolve(Handshake& h, const Endpoint& peer);
  Result<bool> resolve(Handshake& h, const wire::SessionEnd& peer);
  Result<bool> resolve(Handshake& h, const std::array<std::uint8_t, 16>& gid, GidType type);
  void stop_resolving(Handshake& h) noexcept;
  void answer_probe(Handshake& h, std::uint64_t incarnation) noexcept;
  void schedule_timeout(Handshake& h) noexcept;
  void validate_path(Handshake& h, const AcceptedSession& session) noexcept;
  void send_opened(Handshake& h, const AcceptedSession& session) noexcept;
  void cancel_timeout(Handshake& h) noexcept { timers_.cancel(h.timer); }
  void count_refusal() noexcept { ++refusals_; }
  [[nodiscard]] std::shared_ptr<ListenerOwner> owner_of(ListenerId id) const noexcept;

  [[nodiscard]] Handshake* find(HandshakeId id) noexcept {
    return handshakes_.find(id.index, id.generation);
  }
  /// The dialogue of a handshake, if it is one of type T.
  template <typename T>
  [[nodiscard]] T* find(HandshakeId id) noexcept {
    Handshake* const h = find(id);
    return h != nullptr ? std::get_if<T>(&h->dialogue) : nullptr;
  }
  [[nodiscard]] Listener* find_listener(std::uint32_t index,
                                        std::uint32_t generation) const noexcept;
  Result<ListenerId> add_listener(std::unique_ptr<Listener> listener,
                                  Result<void> (ControlPort::*bind)(Listener&, std::uint32_t,
                                                                    const Address&),
                                  const Address& at);
  Result<void> open_socket(Listener& listener, std::uint32_t index, const Address& at);
  Result<void> open_cm_id(Listener& listener, std::uint32_t index, const Address& at);
  Result<void> open_cm_channel();
  Handshake* begin_handshake(bool inbound) noexcept;
  [[nodiscard]] bool may_give_up(const Handshake& h) const noexcept;
  Result<Handshake*> dial(const Address& to, wire::KindSet expected, const Dialogue& dialogue);
  [[nodiscard]] Handshake* find_to_give_up() noexcept;
  void accept(Accepted&& accepted, ListenerId listener) noexcept;
  void accept_from(std::uint32_t index, std::uint32_t generation) noexcept;
  void poll_cm() noexcept;
  void on_cm_request(const CmEvent& request);

  ControlOptions options_;
  const Clock& clock_;
  base::TimerWheel& timers_;
  Network* network_ = nullptr;
  EpollSet epoll_;
  CmChannel cm_;  ///< once it was asked for
  CmOwner* cm_owner_ = nullptr;
  std::unique_ptr<AddressResolver> resolver_;
  base::IndexPool<Handshake> handshakes_;
  std::uint32_t inbound_ = 0;
  SourceCounts sources_;  ///< of the inbound ones
  std::uint32_t outbound_ = 0;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::uint32_t listener_generation_ = 0;
  std::vector<DescriptorOwner*> descriptors_;
  std::uint64_t refusals_ = 0;
};

}  // namespace spinwire::control
