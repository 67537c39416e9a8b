#include "observe/recorder.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/probe.h"
#include "observe/whole_write.h"
#include "spinwire/observe.h"

namespace spinwire {
namespace observe {
namespace {

/// By EventKind, from 1 on.
constexpr std::array kKinds = {
    EventKindInfo{"opened", "the engine has opened, or a peer has opened a session"},
    EventKindInfo{"state", "a connection or session is in another state"},
    EventKindInfo{"handshake", "a step of a handshake"},
    EventKindInfo{"refused", "an inbound handshake has failed: of which peer, and why"},
    EventKindInfo{"error", "why a connection or session ends or is interrupted"},
    EventKindInfo{"goodbye", "a goodbye, sent or received"},
    EventKindInfo{"lease_end", "a lease has ended by expiry, recall or refusal"},
    EventKindInfo{"retransmission", "a request has been sent again"},
    EventKindInfo{"timeout", "a call has run out of time"},
    EventKindInfo{"blocked", "something blocks the subject for more than 100 ms"},
    EventKindInfo{"unblocked", "that has ended"},
    EventKindInfo{"slow_poll", "a poll took longer than observability.longest_poll"},
    EventKindInfo{"slow_callback", "callbacks took longer than observability.longest_callback"},
    EventKindInfo{"pause", "there was no poll for longer than observability.longest_pause"},
    EventKindInfo{"slow",
                  "a poll with callbacks, or the pause behind it, took longer than a limit"},
    EventKindInfo{"device", "an event of the device"},
    EventKindInfo{"drain", "Engine::drain() has begun or ended"},
    EventKindInfo{"keys", "Engine::reload_keys() has taken keys: their names, the first one first"},
};

/// An event while it is made. Its text ends with 0, which tracers need.
struct TerminatedEvent {
  EventRecord event;
  char end = '\0';
};
static_assert(offsetof(EventRecord, text) + sizeof(EventRecord::text) == sizeof(EventRecord));

void set_text(EventRecord& event, std::initializer_list<std::string_view> parts) noexcept {
  std::size_t size = 0;
  for (const std::string_view part : parts) {
    const std::size_t more = std::min(part.size(), event.text.size() - size);
    std::copy_n(part.data(), more, event.text.data() + size);
    size += more;
  }
}

/// The probe of an event, of the same name.
void fire_probe(EventKind kind, EventSubject subject, std::uint32_t index, std::uint32_t generation,
                const char* text) noexcept {
  const char* const whose = name_of(subject).data();
#define SPINWIRE_EVENT_PROBE(kind)                        \
  case EventKind::kind:                                   \
    SPINWIRE_PROBE(kind, whose, index, generation, text); \
    return
  switch (kind) {
    case EventKind::none:
      return;
      SPINWIRE_EVENT_PROBE(opened);
      SPINWIRE_EVENT_PROBE(state);
      SPINWIRE_EVENT_PROBE(handshake);
      SPINWIRE_EVENT_PROBE(refused);
      SPINWIRE_EVENT_PROBE(error);
      SPINWIRE_EVENT_PROBE(goodbye);
      SPINWIRE_EVENT_PROBE(lease_end);
      SPINWIRE_EVENT_PROBE(retransmission);
      SPINWIRE_EVENT_PROBE(timeout);
      SPINWIRE_EVENT_PROBE(blocked);
      SPINWIRE_EVENT_PROBE(unblocked);
      SPINWIRE_EVENT_PROBE(slow_poll);
      SPINWIRE_EVENT_PROBE(slow_callback);
      SPINWIRE_EVENT_PROBE(pause);
      SPINWIRE_EVENT_PROBE(slow);
      SPINWIRE_EVENT_PROBE(device);
      SPINWIRE_EVENT_PROBE(drain);
      SPINWIRE_EVENT_PROBE(keys);
  }
#undef SPINWIRE_EVENT_PROBE
}

/// Whether `event` repeats the newest event of its ring.
bool is_repeated(const EventRecord& newest, const EventRecord& event) noexcept {
  return newest.number != 0 && newest.kind == event.kind && newest.index == event.index &&
         newest.generation == event.generation && newest.text == event.text;
}

}  // namespace

std::string_view name_of(EventSubject subject) noexcept {
  static constexpr std::array<std::string_view, kEventSubjects> kNames = {
      "engine", "connection", "session", "served_session", "stranger"};
  const auto i = static_cast<std::size_t>(subject);
  return i < kNames.size() ? kNames[i] : std::string_view();
}

std::string_view name_of(EventKind kind) noexcept {
  const auto i = static_cast<std::size_t>(kind);
  return i != 0 && i <= kKinds.size() ? kKinds[i - 1].name : std::string_view();
}

void Recorder::open(const EventRings& all,
                    const std::array<EventRings, kEventSubjects>& by_subject) {
  by_subject_ = by_subject;
  for (std::size_t i = 0; i < kEventSubjects; ++i) places_[i].assign(by_subject[i].rings, {});
  places_of_all_.emplace(all.length);
  for (const EventRing ring : {EventRing::all, EventRing::strangers}) {
    const EventRings& shared = ring == EventRing::all ? all : rings_of(ring);
    numbers_in_ring_[static_cast<std::size_t>(ring)].assign(shared.rings != 0 ? shared.length : 0,
                                                            0);
  }
  all_ = all;
}

std::uint32_t Recorder::take_place(EventRing ring, const EventSource& source,
                                   std::uint64_t number) noexcept {
  std::vector<std::uint64_t>& numbers = numbers_in_ring_[static_cast<std::size_t>(ring)];
  if (numbers.empty()) return 0;
  const std::uint32_t place = ring == EventRing::all
                                  ? places_of_all_->take(source)
                                  : static_cast<std::uint32_t>(strangers_++ % numbers.size());
  numbers[place] = number;
  return place;
}

void Recorder::record(EventKind kind, EventSubject subject, std::uint32_t index,
                      std::uint32_t generation, std::initializer_list<std::string_view> text,
                      const EventOrigin& origin) noexcept {
  TerminatedEvent made;
  EventRecord& event = made.event;
  set_text(event, text);
  fire_probe(kind, subject, index, generation, event.text.data());
  if (all_.length == 0) return;
  event.kind = static_cast<std::uint16_t>(kind);
  event.subject = static_cast<std::uint8_t>(subject);
  event.index = index;
  event.generation = generation;
  const std::uint64_t now = clock_->now();
  event.at_ns = (realtime_ + clock_->duration(now - std::min(now, tick_))).count();
  const auto i = static_cast<std::size_t>(subject);
  const EventRings& rings = by_subject_[i];
  Place& place = rings.rings != 0 ? places_[i][index % rings.rings] : without_ring_;
  if (rings.rings == 0) place.newest.number = 0;
  const bool is_stranger = subject == EventSubject::stranger;
  const EventRing ring = is_stranger ? EventRing::strangers : origin.ring;
  const bool repeated = place.ring == ring && is_repeated(place.newest, event);
  event.number = repeated ? place.newest.number : ++numbers_;
  event.first_ns = repeated ? place.newest.first_ns : event.at_ns;
  event.count = repeated ? place.newest.count + 1 : 1;
  if (!repeated) {
    place.ring = ring;
    place.place_in_ring = take_place(ring, origin.source, event.number);
    ++place.events;
  }
  place.newest = event;
  if (rings.rings != 0 && !is_stranger) {
    const std::uint64_t first = std::uint64_t{index % rings.rings} * rings.length;
    write(rings, first + (place.events - 1) % rings.length, event);
  }
  const std::vector<std::uint64_t>& shared = numbers_in_ring_[static_cast<std::size_t>(ring)];
  if (!shared.empty() && shared[place.place_in_ring] == event.number)
    write(rings_of(ring), place.place_in_ring, event);
}

void Recorder::write(const EventRings& rings, std::uint64_t place,
                     const EventRecord& event) noexcept {
  constexpr std::size_t kWords = sizeof event / sizeof(std::uint64_t) - 1;  // behind the sequence
  static_assert(sizeof event.sequence == sizeof(std::uint64_t));
  std::byte* const at = rings.data + place * sizeof(EventRecord);
  const auto* const bytes = reinterpret_cast<const std::byte*>(&event) + sizeof event.sequence;
  const auto store_word = [&](std::byte* behind, std::size_t i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i * sizeof word, sizeof word);
    word_at(behind + i * sizeof word).store(word, std::memory_order_relaxed);
  };
  // Without a loop, which would take more instructions than the stores.
  write_whole(at, sequence_, [&](std::byte* behind) {
    [&]<std::size_t... i>(std::index_sequence<i...>) { (store_word(behind, i), ...); }
    (std::make_index_sequence<kWords>());
  });
}

}  // namespace observe

std::vector<EventKindInfo> event_kinds() {
  return {observe::kKinds.begin(), observe::kKinds.end()};
}

}  // namespace spinwire
