// A poll of the control port: the events of descriptors, in turn by source and within a budget; and
// the timers of handshakes. Cold.
#include <algorithm>
#include <array>
#include <utility>

#include "base/log_message.h"
#include "control/control_port.h"
#include "control/tokens.h"

namespace spinwire::control {

/// The most of the time between two polls that counts as silence of peers. Usually the port is
/// polled once per millisecond. An engine that sleeps also stands still when it should be awake; as
/// long as peers wait for room, it sleeps no longer than this.
constexpr Nanoseconds kLongestPause = std::chrono::milliseconds(2);

Handshake* ControlPort::find_named(std::uint64_t token) noexcept {
  const auto index = static_cast<std::uint32_t>(token);
  if (kind_of(token) != TokenKind::handshake || !handshakes_.in_use(index)) return nullptr;
  const bool same = (handshakes_.generation(index) & kGenerationBits) == generation_of(token);
  return same ? &handshakes_.at(index) : nullptr;
}

void ControlPort::handle(const Event& event) noexcept {
  const auto index = static_cast<std::uint32_t>(event.token);
  switch (kind_of(event.token)) {
    case TokenKind::handshake:
      // An event of a paused handshake is the peer's end, or older than the pause.
      if (Handshake* const h = find_named(event.token);
          h != nullptr && (event.failed || !h->is_paused())) {
        spend();
        advance(*h);
      }
      break;
    case TokenKind::listener:
      accept_from({index, generation_of(event.token)});
      break;
    case TokenKind::descriptor:
      descriptors_[index]->on_readable();
      break;
    case TokenKind::cm:
      poll_cm();
      break;
  }
}

/// Asks for the present events. Descriptors of other parts are handled at once: their owner may be
/// gone in the next poll. If one poll might not handle all others, puts them in order: our own
/// first, then the first of each source, then the second of each, and so on.
void ControlPort::collect_events() noexcept {
  next_event_ = event_count_ = 0;
  const std::size_t count = epoll_.wait(events_);
  for (std::size_t i = 0; i < count; ++i) {
    const Event event = events_[i];
    kind_of(event.token) == TokenKind::descriptor ? handle(event)
                                                  : void(events_[event_count_++] = event);
  }
  if (event_count_ <= kFramesPerPoll) return;
  struct Turn {
    std::size_t turn = 0;  ///< 0: ours
    const Source* source = nullptr;
    Event event;
  };
  std::array<Turn, EpollSet::kEventsMax> turns;
  for (std::size_t i = 0; i < event_count_; ++i) {
    turns[i].event = events_[i];
    const Handshake* const h = find_named(events_[i].token);
    if (h == nullptr || !h->inbound) continue;
    turns[i].source = &h->source;
    const auto same = [&](const Turn& t) { return t.source != nullptr && *t.source == h->source; };
    turns[i].turn =
        1 + static_cast<std::size_t>(std::count_if(turns.data(), turns.data() + i, same));
  }
  // Insertion keeps the order of equals, and needs no memory.
  for (std::size_t i = 1; i < event_count_; ++i) {
    for (std::size_t at = i; at != 0 && turns[at].turn < turns[at - 1].turn; --at)
      std::swap(turns[at], turns[at - 1]);
  }
  for (std::size_t i = 0; i < event_count_; ++i) events_[i] = turns[i].event;
}

/// A token of an event that waited for this poll may name what is gone.
void ControlPort::handle_events() noexcept {
  while (next_event_ != event_count_ && has_budget()) handle(events_[next_event_++]);
}

void ControlPort::poll() noexcept {
  frames_left_ = kFramesPerPoll;
  const std::uint64_t now = clock_.now();
  poll_end_ = now + clock_.ticks(kTimePerPoll);
  heard_time_ += std::min(now - std::min(last_poll_, now), clock_.ticks(kLongestPause));
  last_poll_ = now;
  if (is_full_) look_for_room();
  handle_events();
  if (next_event_ == event_count_) {
    collect_events();
    handle_events();
  }
  can_go_on_ = !held_.empty() && resume_held();
  if (!kept_requests_.empty()) begin_kept_requests();
  cm_proofs_.expire();
  if (listeners_.has_released()) forget_released_listeners();
}

void ControlPort::report_no_memory(const Handshake& h) noexcept {
  base::log(LogLevel::error, "{}: out of memory in a handshake", h.peer().text().view());
}

void ControlPort::advance(Handshake& h) noexcept {
  with_dialogue(h, [&](auto& dialogue) {
    const Progress progress = h.exchange.advance();
    if (has_keys()) count_authentication(h, progress);
    if constexpr (requires { dialogue.on_frame(*this, h); }) {
      if (progress == Progress::frame) return dialogue.on_frame(*this, h);
    }
    if constexpr (requires { dialogue.on_failed(*this, h, h.exchange.error()); }) {
      if (progress == Progress::failed)
        return dialogue.on_failed(*this, h, Error(h.exchange.error()));
    }
    if constexpr (requires { dialogue.is_over(h); }) {
      if (dialogue.is_over(h)) return dialogue.end(*this, h);
    }
    if (progress == Progress::waiting) return watch(h);
    if constexpr (requires { dialogue.closed_error(h); }) {
      dialogue.on_failed(*this, h, dialogue.closed_error(h));
    } else if constexpr (requires { dialogue.on_failed(*this, h, closed_early()); }) {
      dialogue.on_failed(*this, h, closed_early());
    }
  });
}

void ControlPort::on_timer(base::Timer& timer) noexcept {
  Handshake& h = handshakes_.at(timer.index);
  with_dialogue(h, [&](auto& dialogue) {
    if constexpr (requires { dialogue.on_timeout(*this, h); }) dialogue.on_timeout(*this, h);
  });
}

Result<void> ControlPort::watch(int fd, DescriptorOwner& owner) {
  const auto index = static_cast<std::uint32_t>(descriptors_.size());
  descriptors_.push_back(&owner);
  auto added = epoll_.add(fd, token(TokenKind::descriptor, index), Interest::read);
  if (!added) descriptors_.pop_back();
  return added;
}

}  // namespace spinwire::control
