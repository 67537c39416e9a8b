// The flight recorder: the last events of an engine, and of each of its connections and sessions.
// They lie in the engine's file, so they can be read while the engine runs and after its process
// was killed. Each event is a static probe, too, with or without a file. Cold, except record() of a
// retransmission. Nothing is read back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "observe/event_places.h"
#include "observe/page_layout.h"
#include "spinwire/clock.h"

namespace spinwire::observe {

/// Whose event it is. A stranger is a peer that has got neither a connection nor a session.
enum class EventSubject : std::uint8_t { engine, connection, session, served_session, stranger };
inline constexpr std::size_t kEventSubjects = 5;
/// "engine", "connection", "session", "served_session" or "stranger"; empty: unknown.
std::string_view name_of(EventSubject subject) noexcept;

/// What an event reports: see kKinds in recorder.cc. The numbers are those of files, so later
/// releases only add to them.
enum class EventKind : std::uint16_t {
  none = 0,
  opened = 1,
  state = 2,
  handshake = 3,
  refused = 4,
  error = 5,
  goodbye = 6,
  lease_end = 7,
  retransmission = 8,
  timeout = 9,
  blocked = 10,
  unblocked = 11,
  slow_poll = 12,
  slow_callback = 13,
  pause = 14,
  slow = 15,
  device = 16,
  drain = 17,
  keys = 18,
};
/// Empty: unknown.
std::string_view name_of(EventKind kind) noexcept;

/// Whether an event goes to the ring of all subjects or to that of strangers, besides its own.
enum class EventRing : std::uint8_t { all, strangers };

/// Who causes an event; by default the engine itself.
struct EventOrigin {
  EventSource source{};
  EventRing ring = EventRing::all;
};

/// Events that are kept: of all subjects but strangers together, of the engine, of all strangers,
/// and of each place of a connection or session.
inline constexpr std::uint32_t kEventsOfAll = 1024;
inline constexpr std::uint32_t kEventsOfEngine = 64;
inline constexpr std::uint32_t kEventsOfStrangers = 64;
inline constexpr std::uint32_t kEventsOfSubject = 8;

/// Memory for a number of rings of equal length, one behind the other.
struct EventRings {
  std::byte* data = nullptr;
  std::uint32_t rings = 0;
  std::uint32_t length = 0;  ///< events of a ring
};

/// Writes events. An event goes to the ring of its subject, and to the one of all: a subject with
/// many events does not displace the last ones of another. Events of strangers go to their ring
/// instead of that of all, and so do those of a connection or session that a peer has asked for,
/// until something has come from the peer through the device. So a peer that only asks, again and
/// again, displaces no events of others from the ring of all; and one that is heard each time
/// displaces few: see event_places.h. An event that repeats the newest one of its subject is
/// counted there. Not thread-safe.
class Recorder {
 public:
  /// `clock` must outlive the recorder.
  explicit Recorder(const Clock& clock) noexcept : clock_(&clock) {}

  /// Memory for all events together, and by EventSubject; where there are no rings, events of such
  /// subjects go to the common ring only. May throw std::bad_alloc. Set-up.
  void open(const EventRings& all, const std::array<EventRings, kEventSubjects>& by_subject);
  /// From now on nothing is recorded: the memory goes.
  void close() noexcept { all_ = {}; }
  /// The time since the Unix epoch at a tick; events of later ticks count from it.
  void set_time(std::uint64_t tick, Nanoseconds realtime) noexcept {
    tick_ = tick;
    realtime_ = realtime;
  }
  /// Fires the event's probe, and records the event. Its text is that of all parts, up to the
  /// length of EventRecord::text.
  [[gnu::cold, gnu::noinline]] void record(EventKind kind, EventSubject subject,
                                           std::uint32_t index, std::uint32_t generation,
                                           std::initializer_list<std::string_view> text,
                                           const EventOrigin& origin = {}) noexcept;
  /// An event of the engine itself.
  void record(EventKind kind, std::initializer_list<std::string_view> text) noexcept {
    record(kind, EventSubject::engine, 0, 0, text);
  }

 private:
  /// A ring as the recorder knows it, and the newest event there.
  struct Place {
    std::uint64_t events = 0;         ///< written so far
    EventRecord newest;               ///< ours, so that no reader can change it
    EventRing ring = EventRing::all;  ///< the other ring that has it
    std::uint32_t place_in_ring = 0;  ///< there
  };

  /// Memory of the ring of all subjects, or of that of strangers.
  [[nodiscard]] const EventRings& rings_of(EventRing ring) const noexcept {
    return ring == EventRing::all ? all_
                                  : by_subject_[static_cast<std::size_t>(EventSubject::stranger)];
  }
  /// The place of a new event in one of these two.
  [[nodiscard]] std::uint32_t take_place(EventRing ring, const EventSource& source,
                                         std::uint64_t number) noexcept;
  void write(const EventRings& rings, std::uint64_t place, const EventRecord& event) noexcept;

  const Clock* clock_;
  EventRings all_;
  std::array<EventRings, kEventSubjects> by_subject_{};
  std::array<std::vector<Place>, kEventSubjects> places_;
  Place without_ring_;  ///< for an event of a subject without a ring
  std::optional<EventPlaces> places_of_all_;
  std::uint64_t strangers_ = 0;  ///< events of their ring, from the start
  std::array<std::vector<std::uint64_t>, 2> numbers_in_ring_;  ///< by EventRing and place
  std::uint64_t numbers_ = 0;                                  ///< events, from the start
  std::uint64_t sequence_ = 0;                                 ///< of the last write
  std::uint64_t tick_ = 0;
  Nanoseconds realtime_{0};
};

}  // namespace spinwire::observe
