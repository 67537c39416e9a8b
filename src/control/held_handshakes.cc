// Inbound requests that wait at the port for room: for a resolution of their address, or for a
// connection of their listener. handshake_eviction.cc says which of them give way to new peers.
// When room is free, the port goes on with the source that has the fewest handshakes.
#include <algorithm>

#include "base/error.h"
#include "base/log_message.h"
#include "control/control_port.h"
#include "wire/cm_data.h"

namespace spinwire::control {

/// Nothing is read meanwhile: the frame stays where it is. The peer's end is noticed.
void ControlPort::hold(Handshake& h, HeldFor what) noexcept {
  if (h.held_for == HeldFor::nothing) held_.push_back(h.id.index);  // has capacity for all
  h.held_for = what;
  if (what == HeldFor::connection) ++held_for_connections_;
  update_eviction(h);
  watch(h);
}

void ControlPort::unhold(Handshake& h) noexcept {
  if (h.held_for == HeldFor::nothing) return;
  if (h.held_for == HeldFor::connection) --held_for_connections_;
  h.held_for = HeldFor::nothing;
  update_eviction(h);
  std::erase(held_, h.id.index);
}

bool ControlPort::admit(Handshake& h, ListenerOwner& owner, const Endpoint* endpoint) {
  const auto room = owner.admit(h.peer(), endpoint);
  if (!room) {
    refuse(h, room.error());
    return false;
  }
  h.counted_for = room->source;
  if (room->now) return true;
  hold(h, HeldFor::connection);
  h.needs_own_source = room->needs_own_source;
  // One half-open connection ends for each request that waits.
  if (room->ending >= waiting_like(h)) return false;
  Handshake* const victim = h.needs_own_source ? find_half_open_of_own(h) : find_half_open_victim();
  if (victim != nullptr) evict(*victim);
  return false;
}

/// The requests that wait for what this one waits for.
std::uint32_t ControlPort::waiting_like(const Handshake& h) noexcept {
  if (!h.needs_own_source) return held_for_connections_;
  return static_cast<std::uint32_t>(
      std::count_if(held_.begin(), held_.end(), [&](std::uint32_t index) {
        const Handshake& other = handshakes_.at(index);
        return other.held_for == HeldFor::connection && other.counted_for == h.counted_for;
      }));
}

/// The request that goes on next: of the source with the fewest handshakes, the oldest. Null: none
/// can.
Handshake* ControlPort::next_held(bool with_connections) noexcept {
  Handshake* found = nullptr;
  for (const std::uint32_t index : held_) {
    Handshake& h = handshakes_.at(index);
    if (h.was_asked) continue;
    const bool can_go_on =
        h.held_for == HeldFor::connection ? with_connections
        : h.held_for == HeldFor::challenge
            ? validated_.contains(h.source, h.resolving) || challenge_limits_.may_begin(h.source)
            : resolution_limits_.may_begin(h.source);
    if (!can_go_on) continue;
    const auto ahead = [&] {
      const std::uint32_t fewest = eviction_order_.count_beside(found->id.index);
      const std::uint32_t count = eviction_order_.count_beside(index);
      return count != fewest ? count < fewest : h.waits_since < found->waits_since;
    };
    if (found == nullptr || ahead()) found = &h;
  }
  return found;
}

void ControlPort::resume(Handshake& h) noexcept {
  with_dialogue(h, [&](auto& dialogue) {
    if constexpr (requires { dialogue.resume(*this, h); }) dialogue.resume(*this, h);
  });
}

bool ControlPort::resume_held() noexcept {
  constexpr int kMostPerPoll = 4;
  bool with_connections = true;
  for (int i = 0; i < kMostPerPoll; ++i) {
    Handshake* h = next_held(with_connections);
    if (h == nullptr) break;
    const HandshakeId id = h->id;
    unhold(*h);
    resume(*h);
    h = find(id);
    if (h == nullptr) continue;
    // Those that need their own source must not have all turns of each poll.
    h->was_asked = h->held_for == HeldFor::connection && h->needs_own_source;
    if (h->held_for == HeldFor::connection && !h->needs_own_source)
      with_connections = false;  // others find no room either
    watch(*h);
  }
  if (next_held(with_connections) != nullptr) return true;
  for (const std::uint32_t index : held_) handshakes_.at(index).was_asked = false;
  return false;
}

// ---- requests through rdma_cm that have no handshake yet ----

// Equals the backlog of a TCP listener, which the kernel keeps.
constexpr std::size_t kKeptRequests = 512;

namespace {

void uncount(SourceCounts& counts, const Source& source) noexcept {
  const auto found = counts.find(source);
  if (found != counts.end() && --found->second == 0) counts.erase(found);
}

}  // namespace

bool ControlPort::collect(CmRequest& request) {
  const CmEvent& event = request.event;
  auto outcome = cm_proofs_.on_request(event.data(), request.peer.source(),
                                       ends_of(request.id, event.qp_num, false));
  if (outcome && outcome->is_plain) {
    request.number = outcome->number;
    return true;
  }
  if (outcome && outcome->client != nullptr) {
    take_said(request, std::move(outcome->client));
    if (!outcome->malformed) outcome->malformed = check_listener(request);
    if (outcome->malformed) reject(request, *outcome->malformed);
    return !outcome->malformed;
  }
  if (outcome && outcome->answer) {
    if (request.id) request.id.reject(outcome->answer->bytes());
    return false;
  }
  const std::string& found = outcome ? outcome->refused : outcome.error().found;
  count_refusal(request.peer, found);
  if (has_keys()) report_unproved(request.peer, found, {});
  // With a key, equal for every peer and every reason, as over TCP.
  control::reject(
      request.id, nullptr,
      wire::make_refuse(Status::refused,
                        has_keys() ? std::string_view("authentication required") : found));
  return false;
}

void ControlPort::take_said(CmRequest& request, std::unique_ptr<CmServer> client) {
  const CmData endpoint = client->endpoint();
  request.event.size = endpoint.size();
  std::copy(endpoint.begin(), endpoint.end(), request.event.storage.begin());
  request.key = client->key();
  if (const PrivateData* const ours = client->decision(); ours != nullptr) request.ours = *ours;
  request.client = std::move(client);
}

/// Another listener may have other rules for its peers.
std::optional<Error> ControlPort::check_listener(const CmRequest& request) {
  if (request.client->decision() == nullptr) return std::nullopt;
  const ListenerId asked = request.client->listener();
  if (asked.index == request.listener.index && asked.generation == request.listener.generation)
    return std::nullopt;
  return Error{Status::protocol, "accept a connection through rdma_cm",
               "another listener has accepted this client", base::kProtocolRemedy};
}

/// What the owner gives to a client exceeds an answer, which therefore waits for another request.
void ControlPort::send_more(Handshake& h) {
  CmRequest& request = *h.request;
  if (request.client == nullptr) {
    CmData said{};
    std::copy_n(request.event.storage.begin(), said.size(), said.begin());
    request.client = std::make_unique<CmServer>(said, request.peer.source(),
                                                ends_of(request.id, request.event.qp_num, false),
                                                request.number);
  }
  request.client->decide(*request.ours, request.listener);
  const std::optional<CmMessage> first = cm_proofs_.send_more(std::move(request.client));
  if (!first) {
    return refuse(h, {Status::refused, "accept a connection through rdma_cm",
                      "the client has begun another handshake since",
                      "none is needed: the newer handshake goes on"});
  }
  if (request.id) request.id.reject(first->bytes());
  drop(h);
}

void ControlPort::take_request(std::unique_ptr<CmRequest> request) {
  if (!collect(*request)) return;
  request->came_at = clock_.now();
  if (inbound_ >= options_.handshakes) {
    Handshake* last = find_victim();
    if (last == nullptr) last = find_request_victim(request->peer);
    if (last != nullptr) evict(*last);
  }
  if (begin_request(request)) return;
  const auto count = kept_of_.try_emplace(request->peer.source(), 0).first;
  kept_requests_.push_back(std::move(request));
  ++count->second;
  if (kept_requests_.size() > kKeptRequests) reject_kept_request();
}

std::unique_ptr<CmServer> ControlPort::take_cm_server(HandshakeId id) noexcept {
  Handshake* const h = find(id);
  return h != nullptr && h->request != nullptr ? std::move(h->request->client) : nullptr;
}

/// False: there is no handshake for it.
bool ControlPort::begin_request(std::unique_ptr<CmRequest>& request) noexcept {
  Handshake* const h = begin_inbound(request->peer, CmIncoming{request->listener});
  if (h == nullptr) return false;
  h->is_authenticated = !request->key.empty();
  if (h->is_authenticated) ++proved_;
  h->request = std::move(request);
  update_eviction(*h);
  schedule_timeout(*h);
  resume(*h);
  return true;
}

void ControlPort::reject(CmRequest& request, const Error& why) noexcept {
  count_refusal(request.peer, why.found);
  base::log(LogLevel::info, "{} is refused: {}", request.peer.text().view(), why.message());
  auto refusal = wire::make_refuse(why.status, why.message());
  if (wire::takes_goodbyes(request.event.data())) refusal.goodbye = why.goodbye;
  control::reject(request.id, request.client.get(), refusal);
}

/// Goes on with the kept requests as long as there are handshakes: of the source with the fewest
/// handshakes, the oldest. Rejects those that have waited for too long.
void ControlPort::begin_kept_requests() noexcept {
  const auto handshakes_of = [this](const std::unique_ptr<CmRequest>& request) {
    return eviction_order_.count_of(request->peer.source());
  };
  const std::uint64_t timeout = clock_.ticks(options_.handshake_timeout);
  while (!kept_requests_.empty() && clock_.now() - kept_requests_.front()->came_at >= timeout) {
    reject(*kept_requests_.front(),
           {Status::limit, "accept a connection through rdma_cm",
            base::format("connections.handshakes = {} were under way for the whole "
                         "connections.handshake_timeout",
                         options_.handshakes),
            "try again, or raise connections.handshakes at the server"});
    erase_kept(kept_requests_.begin());
  }
  constexpr int kMostPerPoll = 4;
  for (int i = 0; i < kMostPerPoll && !kept_requests_.empty(); ++i) {
    if (inbound_ >= options_.handshakes) {
      Handshake* const last = find_victim();
      if (last == nullptr) return;
      evict(*last);
    }
    const auto next = std::min_element(
        kept_requests_.begin(), kept_requests_.end(),
        [&](const auto& a, const auto& b) { return handshakes_of(a) < handshakes_of(b); });
    const Source source = (*next)->peer.source();
    if (!begin_request(*next)) return;
    kept_requests_.erase(next);
    uncount(kept_of_, source);
  }
}

void ControlPort::erase_kept(std::vector<std::unique_ptr<CmRequest>>::iterator request) noexcept {
  uncount(kept_of_, (*request)->peer.source());
  kept_requests_.erase(request);
}

/// Makes room among the kept requests: of the source with the most of them, the newest goes.
void ControlPort::reject_kept_request() {
  const auto most =
      std::max_element(kept_of_.begin(), kept_of_.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  const auto found =
      std::find_if(kept_requests_.rbegin(), kept_requests_.rend(),
                   [&](const auto& each) { return each->peer.source() == most->first; })
          .base() -
      1;
  reject(**found, {Status::limit, "accept a connection through rdma_cm",
                   base::format("{} requests wait already, most of them from there", kKeptRequests),
                   "try again later"});
  erase_kept(found);
}

}  // namespace spinwire::control
