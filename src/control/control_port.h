// The control port of an engine: its listeners, the TCP exchanges that set up connections and
// sessions, rdma_cm's channel, and the epoll set that watches them all, with timers and limits. The
// port does not know connections or sessions; the owners of its handshakes do. Never blocks; one
// thread. Cold.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/index_pool.h"
#include "base/timer_wheel.h"
#include "control/address_resolver.h"
#include "control/dialogues.h"
#include "control/endpoint_proof.h"
#include "control/epoll_set.h"
#include "control/eviction_order.h"
#include "control/grace.h"
#include "control/key_ring.h"
#include "control/listeners.h"
#include "control/owners.h"
#include "control/rdma_cm.h"
#include "control/resolution_limits.h"
#include "control/socket.h"
#include "observe/recorder.h"
#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::control {

struct ControlOptions {
  std::uint32_t handshakes = 0;      ///< under way at once, in each direction
  std::uint32_t half_open = 0;       ///< inbound connections among them, which their owner limits
  Nanoseconds handshake_timeout{0};  ///< of a peer that asks for something
  std::uint64_t incarnation = 0;     ///< of this engine
  /// Without a key, other hosts may be reached, too.
  bool open = false;
  observe::Recorder* recorder = nullptr;  ///< gets the refusals; null: nobody does
};

/// Timer::kind of handshakes in the timer wheel that the port shares.
inline constexpr std::uint16_t kHandshakeTimer = 3;

class ControlPort {
 public:
  /// `clock` and `timers` must outlive the port. Their user passes timers of kHandshakeTimer to
  /// on_timer().
  ControlPort(const ControlOptions& options, const Clock& clock, base::TimerWheel& timers);
  ControlPort(const ControlPort&) = delete;
  ControlPort& operator=(const ControlPort&) = delete;
  ~ControlPort() { close(); }

  /// `network`: a simulated one; null: the system's. Errors: limit, no_memory, system.
  Result<void> open(Network* network = nullptr);
  /// Sets the keys: from now on every peer must prove one of them over TCP, and is shown the first
  /// of them. A port without keys takes some only before its first listener or handshake. A port
  /// with keys takes others at any time: it zeroes the secrets of the former ones, and a handshake
  /// whose proof was made or read goes on.
  void set_keys(KeyRing keys) noexcept { keys_ = std::move(keys); }
  /// What proves out-of-band endpoints. Null: no key. Valid as long as the port.
  [[nodiscard]] EndpointKeys* endpoint_keys() noexcept {
    return has_keys() ? &endpoint_keys_ : nullptr;
  }
  [[nodiscard]] bool has_keys() const noexcept { return !keys_.empty(); }
  [[nodiscard]] const KeyRing& key_ring() const noexcept { return keys_; }
  /// Whether connections that do not begin over TCP may be made by a device that reaches other
  /// hosts: with a key, or with ControlOptions::open. Errors: unauthenticated.
  [[nodiscard]] Result<void> check_adapter(const char* asked, const char* remedy) const;
  /// Whether rdma_cm may be used, as check_adapter(): it takes a loopback address for all devices.
  [[nodiscard]] Result<void> check_cm() const;
  /// Drops every handshake and listener without notice to peers.
  void close() noexcept;

  /// Handles events of the sockets, rdma_cm and other descriptors. One system call if there are
  /// none. A flood makes no long poll: events beyond kFramesPerPoll or kTimePerPoll wait for the
  /// next poll, and sources take turns.
  void poll() noexcept;
  static constexpr std::uint32_t kFramesPerPoll = 16;
  static constexpr Nanoseconds kTimePerPoll = std::chrono::microseconds(200);
  void on_timer(base::Timer& timer) noexcept;

  // Listeners. Errors of listen(): those of ListenSocket::open(), and unauthenticated: there is no
  // key, and other hosts reach the address. Of listen_cm(): those of check_cm() and CmId::listen().
  Result<ListenerId> listen(const Address& at, std::shared_ptr<ListenerOwner> owner);
  Result<ListenerId> listen_cm(const Address& at, std::shared_ptr<ListenerOwner> owner);
  /// Listens on a socket of the caller's that listens already, and owns it; after an error it is
  /// still the caller's. Errors: those of ListenSocket::adopt(), and unauthenticated.
  Result<ListenerId> adopt_listener(int fd, std::shared_ptr<ListenerOwner> owner);
  /// The socket of a listener that listens. Errors: unsupported (rdma_cm, a simulated network).
  Result<int> descriptor_of(ListenerId id);
  /// Stops a listener that listens, without closing its socket, which is the caller's from now on.
  /// Handshakes continue, also those without a first frame. Errors: unsupported (rdma_cm).
  Result<int> release_listener(ListenerId id);
  /// Stops a listener. Handshakes that have passed their first frame continue.
  void stop_listening(ListenerId id) noexcept { listeners_.stop(id); }
  /// Whether a listener has not been stopped.
  [[nodiscard]] bool listens(ListenerId id) const noexcept { return listeners_.contains(id); }
  /// The address of a listener; empty once it is stopped. May throw std::bad_alloc.
  [[nodiscard]] std::string address_of(ListenerId id) const { return listeners_.address_of(id); }
  [[nodiscard]] std::vector<std::string> listener_addresses() const {
    return listeners_.addresses();
  }

  // Outbound handshakes. Errors: limit (connections.handshakes), those of Exchange::connect(), and
  // unauthenticated: there is no key, and the address is of another host.
  /// Begins to connect; assign() and ask() follow.
  Result<HandshakeId> connect(const Address& to, ConnectionOwner& owner) {
    return dial_connection(to, {{&owner}});
  }
  /// Begins to connect for a session's calls.
  Result<HandshakeId> join_session(const Address& to, ConnectionOwner& owner,
                                   const SessionReference& session) {
    return dial_connection(to, {{&owner}, session});
  }
  Result<HandshakeId> open_session(const Address& to, const wire::SessionEnd& client,
                                   SessionOwner& owner, std::uint64_t subject);
  /// Probes an address for the engine of an incarnation. Ends after the smaller of `limit` and
  /// connections.handshake_timeout.
  Result<void> probe(const Address& to, std::uint64_t incarnation, ProbeOwner& owner,
                     Nanoseconds limit);

  // Calls of owners for their handshakes. A call has no effect if the handshake is over or past
  // that step.
  void assign(HandshakeId id, std::uint64_t subject) noexcept;
  /// Name of the key that the peer of a handshake has proved; empty: none.
  [[nodiscard]] KeyName key_of(HandshakeId id) noexcept;
  /// Outbound: sends hello.
  void ask(HandshakeId id, const Endpoint& endpoint) noexcept;
  /// Inbound: sends accept. Without the private data, if the peer does not take it.
  void answer(HandshakeId id, const Endpoint& endpoint) noexcept;
  /// Inbound, through rdma_cm: the owner has answered; the peer confirms next.
  void on_cm_answered(HandshakeId id) noexcept;
  /// Outbound: shows the server of a session that its challenge has come.
  void respond(HandshakeId id, std::uint64_t path_token) noexcept;
  /// Outbound: sends ready to the peer of that incarnation. Ends the handshake of a session.
  void confirm(HandshakeId id, std::uint64_t peer_incarnation) noexcept;
  /// Sends the peer a refusal with the reason. The owner gets no further calls.
  void refuse(HandshakeId id, const Error& why) noexcept;
  /// Closes without notice to the peer. The owner gets no further calls.
  void drop(HandshakeId id) noexcept;

  // rdma_cm.
  /// Sets the receiver of the events of all identifiers, including those of accepted requests.
  /// Set-up: before the first listener or make_cm_id().
  void set_cm_owner(CmOwner& owner) noexcept { cm_owner_ = &owner; }
  /// Sets the resolver of addresses in frames; owners see a frame after its address is resolved.
  /// Null: nothing needs resolving. Set-up: before the first listener or handshake.
  void set_resolver(std::unique_ptr<AddressResolver> resolver) noexcept {
    resolver_ = std::move(resolver);
  }
  /// `reaches_other_hosts`: clients of sessions may name other hosts, which would get our path
  /// challenges, so that these are limited. Not for `own`, our device's address. Set-up: before the
  /// first listener.
  void set_reach(bool reaches_other_hosts, const Gid& own) noexcept {
    reaches_other_hosts_ = reaches_other_hosts;
    own_address_ = own;
  }
  /// Takes a request for a connection: an inbound handshake with the limits of all others, or kept
  /// until there can be one. With a key, only once the peer has proved it; until then each request
  /// is rejected. Public for tests, which have no identifiers. May throw std::bad_alloc.
  void take_request(std::unique_ptr<CmRequest> request);
  /// Resolves an address for a connection without a handshake. As AddressResolver::begin();
  /// CmOwner::on_address_resolved() tells later.
  Result<bool> resolve(std::uint64_t subject, const Gid& gid, GidType type,
                       const verbs::Place* from);
  /// For the owner of an inbound handshake, inside of its on_hello(): the connection uses another
  /// port or GID than its listener. False: ConnectionOwner::on_address_resolved() reports
  /// the outcome. Errors also: limit.
  Result<bool> resolve_again(HandshakeId id, const Endpoint& peer, const verbs::Place* from);
  /// `is_answered`: unless `outcome` is an error, somebody has answered there. False, without an
  /// error: the resolver could not ask, and leaves it to the verb.
  void on_resolved(const Resolution& what, const Result<void>& outcome,
                   bool is_answered = true) noexcept;
  /// The client's end of a handshake through rdma_cm. May throw std::bad_alloc.
  [[nodiscard]] std::unique_ptr<CmClient> make_cm_client() {
    return std::make_unique<CmClient>(keys_, authentication_);
  }
  /// The clients through rdma_cm that have not sent their last request. For tests, which have no
  /// identifiers and so get no rejection.
  [[nodiscard]] CmProofs& cm_proofs() noexcept { return cm_proofs_; }
  /// The end of a request, for its owner; null: all was said in one request, without a key.
  [[nodiscard]] std::unique_ptr<CmServer> take_cm_server(HandshakeId id) noexcept;
  /// Makes an identifier. Errors: those of check_cm(), CmChannel::open() and CmId::create().
  Result<CmId> make_cm_id();
  /// Sets the subject that on_cm_event() gets with the identifier's events. Call it before poll().
  static void set_cm_subject(const CmId& id, std::uint64_t subject) noexcept;
  /// The bits of a subject that rdma_cm carries.
  static constexpr std::uint64_t kCmSubjectBits = ~std::uint64_t{0} >> 1;

  /// Calls `owner` when `fd` is readable. Errors: those of EpollSet::add().
  Result<void> watch(int fd, DescriptorOwner& owner);
  /// Readable when poll() has events to handle.
  [[nodiscard]] int descriptor() const noexcept { return epoll_.descriptor(); }
  /// Whether peers wait for what does not make descriptor() readable: room, or time that passes.
  [[nodiscard]] bool awaits_unannounced() const noexcept {
    return is_full_ || !held_.empty() || !kept_requests_.empty();
  }
  /// Whether the next poll() can go on with peers that wait, whatever comes.
  [[nodiscard]] bool can_go_on() const noexcept { return can_go_on_; }
  /// Ends the watch. Call it before closing `fd`.
  void unwatch(int fd) noexcept { epoll_.remove(fd); }

  /// Outbound handshakes that may begin now.
  [[nodiscard]] std::uint32_t outbound_room() const noexcept {
    return options_.handshakes - outbound_;
  }
  [[nodiscard]] std::uint32_t handshakes() const noexcept { return inbound_ + outbound_; }
  /// Peers that wait for a connection. Without the one that ListenerOwner::admit() is asked about.
  [[nodiscard]] std::uint32_t waiting_for_connections() const noexcept {
    return held_for_connections_;
  }
  /// Peers that were refused, or dropped because they sent nothing valid.
  [[nodiscard]] std::uint64_t refusals() const noexcept { return refusals_; }
  [[nodiscard]] const AuthenticationCounts& authentication() const noexcept {
    return authentication_;
  }
  [[nodiscard]] std::uint64_t incarnation() const noexcept { return options_.incarnation; }
  /// Checks the port's counts and lists against its handshakes, and which of them would give way
  /// against a search of all. Errors: system (with what is wrong), no_memory.
  [[nodiscard]] Result<void> audit() noexcept;

 private:
  friend struct Incoming;
  friend struct ConnectionDialogue;
  friend struct Connect;
  friend struct Accept;
  friend struct CmIncoming;
  friend struct CmAccept;
  friend struct OpenSession;
  friend struct ServedSessionDialogue;
  friend struct ValidatePath;
  friend struct ServeSession;
  friend struct ProbePeer;
  friend struct Refusing;
  friend class PortAuditor;

  // Functions for dialogues.
  void begin(Handshake& h, const Dialogue& next) noexcept {
    h.dialogue = next;
    restart_wait(h);
  }
  /// The peer has taken its last step now.
  void restart_wait(Handshake& h) noexcept {
    h.waits_since = heard_time_;
    update_eviction(h);
  }
  /// The peer has confirmed our answer.
  void on_confirmed(const Handshake& h) noexcept {
    grace_.on_answer(heard_time_, heard_time_ - h.waits_since);
  }
  /// Calls `function` with the handshake's dialogue, which may throw std::bad_alloc.
  template <typename Function>
  void with_dialogue(Handshake& h, Function&& function) noexcept {
    try {
      std::visit(function, h.dialogue);
    } catch (...) {
      report_no_memory(h);
    }
  }
  static void report_no_memory(const Handshake& h) noexcept;
  void advance(Handshake& h) noexcept;
  void count_authentication(Handshake& h, Progress progress) noexcept;
  void count_unproved(Handshake& h, std::string_view found, std::string_view remedy) noexcept;
  void report_unproved(const Address& peer, std::string_view found,
                       std::string_view remedy) noexcept;
  /// Whether the peer has said all, and has proved the key if there is one. Otherwise the request
  /// is answered.
  bool collect(CmRequest& request);
  /// Whether an inbound peer should have proved a key, and has not.
  [[nodiscard]] bool is_unproved(const Handshake& h) const noexcept {
    return has_keys() && h.inbound && h.request == nullptr && !h.is_authenticated;
  }
  [[nodiscard]] const KeyRing* keys() const noexcept { return has_keys() ? &keys_ : nullptr; }
  void send(Handshake& h, const wire::Frame& frame) noexcept;
  void watch(Handshake& h) noexcept;
  void refuse(Handshake& h, const Error& why) noexcept;
  void drop(Handshake& h) noexcept;
  void evict(Handshake& h) noexcept;
  /// Resolves the address in the peer's frame. False: Dialogue::on_resolved() reports the outcome,
  /// and the frame stays until then.
  Result<bool> resolve(Handshake& h, const Endpoint& peer, const verbs::Place* from);
  Result<bool> resolve(Handshake& h, const wire::SessionEnd& peer);
  Result<bool> resolve(Handshake& h, const Gid& gid, GidType type, const verbs::Place* from);
  /// The same for the address in a request through rdma_cm, from the GID that the request names.
  Result<bool> resolve_request(Handshake& h);
  void stop_resolving(Handshake& h) noexcept;
  void end_resolution(Handshake& h, bool answered) noexcept;
  /// The address that is being resolved has not answered in time.
  void forget_answered(const Handshake& h) noexcept {
    if (h.address == AddressState::pending && !h.is_seen_from_elsewhere)
      answered_.remove(h.resolving);
  }
  /// Whether the listener takes a connection now. False: it is refused, or waits.
  bool admit(Handshake& h, ListenerOwner& owner, const Endpoint* endpoint);
  void answer_probe(Handshake& h, ListenerId at, std::uint64_t incarnation) noexcept;
  void schedule_timeout(Handshake& h) noexcept;
  /// Whether an inbound peer that names this address names its own, or this host's.
  [[nodiscard]] bool is_of_peer_or_ours(const Handshake& h, const Gid& address) const noexcept {
    return address == h.peer().as_v6() || address == own_address_;
  }
  [[nodiscard]] bool may_challenge(Handshake& h, const Gid& client);
  void on_path_validated(const Handshake& h) noexcept;
  void on_path_not_validated(const Handshake& h) noexcept;
  void end_challenge(Handshake& h, bool answered) noexcept;
  void validate_path(Handshake& h, const AcceptedSession& session) noexcept;
  void send_more(Handshake& h);
  void send_opened(Handshake& h, const AcceptedSession& session) noexcept;
  void cancel_timeout(Handshake& h) noexcept { timers_.cancel(h.timer); }
  [[nodiscard]] bool is_shared(ListenerId id) const noexcept { return listeners_.is_shared(id); }
  /// Counts an inbound handshake that has failed, and records why.
  void count_refusal(const Address& peer, std::string_view why) noexcept {
    ++refusals_;
    if (options_.recorder != nullptr)
      options_.recorder->record(observe::EventKind::refused, observe::EventSubject::stranger, 0, 0,
                                {peer.text().view(), ": ", why});
  }
  [[nodiscard]] std::shared_ptr<ListenerOwner> owner_of(ListenerId id) const noexcept {
    return listeners_.owner_of(id);
  }

  [[nodiscard]] Handshake* find(HandshakeId id) noexcept {
    return handshakes_.find(id.index, id.generation);
  }
  /// The dialogue of a handshake, if it is one of type T.
  template <typename T>
  [[nodiscard]] T* find(HandshakeId id) noexcept {
    Handshake* const h = find(id);
    return h != nullptr ? std::get_if<T>(&h->dialogue) : nullptr;
  }
  /// Whether this end may listen at, or connect to, an address: without a key, only within this
  /// host, unless ControlOptions::open. A simulated network is within this host. Errors:
  /// unauthenticated.
  [[nodiscard]] Result<void> check_reach(std::string_view asked, std::string_view found,
                                         const Address& address) const;
  Result<void> open_cm_channel();
  Handshake* begin_handshake(bool inbound) noexcept;
  /// Null: no memory, or no room.
  Handshake* begin_inbound(const Address& peer, const Dialogue& dialogue) noexcept;
  Result<HandshakeId> dial_connection(const Address& to, const Connect& dialogue);
  Result<Handshake*> dial(const Address& to, wire::KindSet expected, const Dialogue& dialogue);

  // Eviction: handshake_eviction.cc.
  [[nodiscard]] static bool waits_for_peer(const Handshake& h) noexcept;
  /// Whether it may give way: it waits for its peer, or an unproved peer's address is resolved.
  [[nodiscard]] static bool may_give_way(const Handshake& h) noexcept;
  [[nodiscard]] static HandshakeGroup group_of(const Handshake& h) noexcept;
  /// To be called when group_of() an inbound handshake, or its waits_since, may have changed.
  void update_eviction(const Handshake& h) noexcept {
    if (h.inbound) eviction_order_.move(h.id.index, group_of(h), h.waits_since);
  }
  [[nodiscard]] bool is_of_heavy_source(const Handshake& h, std::uint32_t limit) const noexcept;
  [[nodiscard]] std::uint64_t time_of_source(bool is_heavy) const noexcept;
  [[nodiscard]] bool has_had_its_time(const Handshake& h, std::uint32_t limit) const noexcept;
  [[nodiscard]] bool is_of_many(const Handshake& h) const noexcept;
  template <typename IsEligible, typename KeepsItsPlace>
  [[nodiscard]] Handshake* find_silent(std::uint32_t limit, IsEligible&& is_eligible,
                                       KeepsItsPlace&& keeps_its_place) noexcept;
  [[nodiscard]] Handshake* find_victim() noexcept;
  /// How many inbound handshakes there may be now.
  [[nodiscard]] std::uint32_t inbound_limit() const noexcept {
    return lacks_descriptors() ? std::min(options_.handshakes, affordable_) : options_.handshakes;
  }
  [[nodiscard]] bool lacks_descriptors() const noexcept { return last_poll_ < lacks_until_; }
  void on_accept_failed(const Error& why) noexcept;
  [[nodiscard]] Handshake* find_half_open_victim() noexcept;
  [[nodiscard]] Handshake* find_half_open_of_own(const Handshake& newcomer) noexcept;
  [[nodiscard]] Handshake* find_request_victim(const Address& newcomer) noexcept;

  // Requests that wait for room: held_handshakes.cc.
  void hold(Handshake& h, HeldFor what) noexcept;
  void unhold(Handshake& h) noexcept;
  [[nodiscard]] std::uint32_t waiting_like(const Handshake& h) noexcept;
  [[nodiscard]] Handshake* next_held(bool with_connections) noexcept;
  void resume(Handshake& h) noexcept;
  /// Goes on with a few; returns whether it can go on with more.
  bool resume_held() noexcept;
  bool begin_request(std::unique_ptr<CmRequest>& request) noexcept;
  void begin_kept_requests() noexcept;
  void reject_kept_request();
  void erase_kept(std::vector<std::unique_ptr<CmRequest>>::iterator request) noexcept;
  void reject(CmRequest& request, const Error& why) noexcept;
  static void take_said(CmRequest& request, std::unique_ptr<CmServer> client);
  [[nodiscard]] static std::optional<Error> check_listener(const CmRequest& request);

  void collect_events() noexcept;
  void handle_events() noexcept;
  void handle(const Event& event) noexcept;
  [[nodiscard]] Handshake* find_named(std::uint64_t token) noexcept;
  /// Whether this poll may handle one more frame, or what may be as much work.
  [[nodiscard]] bool has_budget() const noexcept {
    return frames_left_ != 0 && clock_.now() < poll_end_;
  }
  void spend() noexcept { frames_left_ -= frames_left_ != 0 ? 1 : 0; }
  void accept(Accepted&& accepted, ListenerId listener) noexcept;
  void accept_from(ListenerId listener) noexcept;
  void stop_accepting() noexcept;
  /// Drops the released listeners that no handshake needs.
  void forget_released_listeners() noexcept;
  void look_for_room() noexcept;
  void poll_cm() noexcept;
  void on_cm_request(const CmEvent& event);

  ControlOptions options_;
  KeyRing keys_;
  OwnRequests own_requests_;
  AuthenticationCounts authentication_;
  EndpointKeys endpoint_keys_{keys_, authentication_};
  std::uint64_t unreported_failures_ = 0;  ///< to authenticate, since the last log message
  std::uint64_t next_failure_report_ = 0;  ///< tick
  const Clock& clock_;
  base::TimerWheel& timers_;
  CmProofs cm_proofs_;
  Network* network_ = nullptr;
  EpollSet epoll_;
  CmChannel cm_;  ///< open once it was needed
  CmOwner* cm_owner_ = nullptr;
  std::unique_ptr<AddressResolver> resolver_;
  bool reaches_other_hosts_ = true;
  Gid own_address_{};
  base::IndexPool<Handshake> handshakes_;
  std::uint32_t inbound_ = 0;
  std::uint32_t proved_ = 0;                ///< inbound ones whose peer has proved a key
  EvictionOrder eviction_order_;            ///< of the inbound ones
  std::vector<std::uint32_t> held_;         ///< inbound ones that wait for room
  std::uint32_t held_for_connections_ = 0;  ///< of these
  std::vector<std::unique_ptr<CmRequest>>
      kept_requests_;     ///< without a handshake, the oldest first
  SourceCounts kept_of_;  ///< requests there, of each source
  ResolutionLimits resolution_limits_;
  ResolutionLimits challenge_limits_;
  AnsweredAddresses answered_;
  AnsweredAddresses validated_;  ///< of clients that have confirmed a path challenge there
  std::uint32_t outbound_ = 0;
  Listeners listeners_{epoll_};
  std::vector<DescriptorOwner*> descriptors_;
  std::array<Event, EpollSet::kEventsMax> events_;  ///< the last that were reported
  std::size_t next_event_ = 0;                      ///< the first that is not handled
  std::size_t event_count_ = 0;
  bool is_full_ = false;           ///< no handshake for a new peer; the listeners report none
  bool can_go_on_ = false;         ///< see can_go_on()
  std::uint32_t frames_left_ = 0;  ///< of this poll
  std::uint64_t poll_end_ = 0;     ///< tick
  std::uint64_t last_poll_ = 0;    ///< tick
  Grace grace_;                    ///< in heard_time_
  /// Ticks for which peers could be heard, constant during a poll: a peer is not silent while this
  /// process does not run.
  std::uint64_t heard_time_ = 0;
  std::uint64_t lacks_until_ = 0;  ///< tick until which `affordable_` holds
  std::uint32_t affordable_ = 0;   ///< inbound handshakes for which there are descriptors
  std::uint64_t refusals_ = 0;
};

}  // namespace spinwire::control
