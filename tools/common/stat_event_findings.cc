#include "common/stat_event_findings.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "common/stat_events.h"

namespace spinwire::tools {
namespace {

constexpr auto kLately = std::chrono::seconds(60);
/// A peer that was heard within this time answers.
constexpr double kAnswersSeconds = 1;

/// What an event, or the beginning of its text, means.
struct Meaning {
  std::string_view is;
  std::string_view cause;
  std::string_view advice;
};

/// By the status with which the text of an error begins.
constexpr std::array kErrors = {
    Meaning{"peer_lost", "the peer is lost",
            "Its process has ended or hangs, or its host or the network is down."},
    Meaning{"timed_out", "no answer in time",
            "The peer's engine does not answer: see that its application polls."},
    Meaning{"remote_access", "remote access refused",
            "It was revoked, is smaller, or has other rights than were used."},
    Meaning{"refused", "the peer refused", "See its log, and that it listens at this address."},
    Meaning{"unauthenticated", "no common key",
            "Give both ends the same security.key_file, or none."},
    Meaning{"unsupported", "the peer does not fit",
            "Give both ends releases and settings that go together."},
    Meaning{"protocol", "the peer broke the protocol", "See that it is a Spinwire program."},
    Meaning{"local_error", "this host's device refused an operation",
            "See the device's events and the system's log."},
};

/// By kind.
constexpr std::array kEvents = {
    Meaning{"timeout", "calls run out of time",
            "The server is slow or away, or CallOptions::timeout is too short."},
    Meaning{"slow_poll", "slow poll", "Callbacks of the application hold up everything else."},
    Meaning{"slow_callback", "slow callback",
            "It holds up everything else of the engine: do the work elsewhere."},
    Meaning{"slow", "slow callback or pause",
            "The application held the engine up, in a callback or behind it."},
    Meaning{"pause", "pause between polls",
            "The application did other work between two polls, or had no processor."},
    Meaning{"device", "an event of the device",
            "See the system's log, the cable and the switch; spinwire-doctor shows the ports."},
};

/// Null: there is none.
template <std::size_t N>
const Meaning* meaning_of(const std::array<Meaning, N>& meanings, std::string_view what) {
  const auto* const found = std::find_if(meanings.begin(), meanings.end(),
                                         [&](const Meaning& each) { return each.is == what; });
  return found == meanings.end() ? nullptr : found;
}

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// What the recorder and the tables say of the subjects of events.
class Subjects {
 public:
  Subjects(const EngineReading& reading, const Earlier& earlier) {
    for (const EngineEvent& event : reading.events) read_event(event);
    for (const std::string_view table : {"connection", "session"}) read_table(reading, table);
    read_replies(reading, earlier);
  }
  /// "connection 3-1 to 10.0.0.7:4000"
  [[nodiscard]] std::string text(const EngineEvent& event) const {
    const std::string& peer = known(event).peer;
    return subject_text(event) + (peer.empty() ? "" : fmt::format(" to {}", peer));
  }
  /// Whether the subject of the event was ready before.
  [[nodiscard]] bool was_ready(const EngineEvent& event) const {
    return known(event).ready < event.number;
  }
  /// Whether a step of its handshake was done before.
  [[nodiscard]] bool had_handshake(const EngineEvent& event) const {
    return known(event).handshake < event.number;
  }
  /// Whether its peer has been heard lately, by any connection or session.
  [[nodiscard]] bool answers(const EngineEvent& event) const {
    return answering_.contains(known(event).peer);
  }
  /// Whether calls of the session have ended between two readings.
  [[nodiscard]] bool has_replies(const EngineEvent& event) const {
    return replied_.contains(event.id);
  }

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  struct Known {
    std::string peer;
    std::uint64_t ready = kNever;  ///< number of the first such event
    std::uint64_t handshake = kNever;
  };

  static std::string key_of(const EngineEvent& event) { return event.subject + ' ' + event.id; }
  [[nodiscard]] const Known& known(const EngineEvent& event) const {
    static const Known none;
    const auto found = known_.find(key_of(event));
    return found != known_.end() ? found->second : none;
  }
  /// A state is "ready, peer 10.0.0.7:4000".
  void read_event(const EngineEvent& event) {
    if (event.kind != "state" && event.kind != "handshake") return;
    Known& known = known_[key_of(event)];
    if (event.kind == "handshake") {
      known.handshake = std::min(known.handshake, event.number);
      return;
    }
    if (event.text.starts_with("ready")) known.ready = std::min(known.ready, event.number);
    for (const std::string_view before : {", peer ", ", server ", ", client "}) {
      const std::size_t at = event.text.find(before);
      if (at != std::string::npos) known.peer = event.text.substr(at + before.size());
    }
  }
  void read_table(const EngineReading& reading, std::string_view name) {
    const MetricTable* const table = reading.find(name);
    if (table == nullptr) return;
    const std::string state = fmt::format("spinwire_{}_state", name);
    const std::string heard = fmt::format("spinwire_{}_last_heard_seconds", name);
    for (const MetricRow& row : table->rows) {
      if (table->text(row, state) == "ready" && table->number(row, heard) < kAnswersSeconds)
        answering_.emplace(table->text(row, "peer"));
    }
  }
  void read_replies(const EngineReading& reading, const Earlier& earlier) {
    const MetricTable* const table = reading.find("session");
    if (table == nullptr || !earlier.is_known()) return;
    for (const MetricRow& row : table->rows) {
      const MetricRow* const before = earlier.find({table, &row});
      if (before != nullptr && ended_calls(*table, row) > ended_calls(*table, *before))
        replied_.emplace(table->text(row, "session"));
    }
  }
  static double ended_calls(const MetricTable& table, const MetricRow& row) {
    return table.number(row, "spinwire_session_calls_total") -
           table.number(row, "spinwire_session_in_flight") -
           table.number(row, "spinwire_session_long_calls") -
           table.number(row, "spinwire_session_backlog");
  }

  std::unordered_map<std::string, Known> known_;
  std::unordered_set<std::string> answering_;  ///< peers
  std::unordered_set<std::string> replied_;    ///< sessions
};

/// A finding with the event's text.
Finding noted(Severity severity, std::string_view cause, std::string_view advice,
              const EngineEvent& event) {
  return {.severity = severity,
          .cause = std::string(cause),
          .found = event.text,
          .advice = std::string(advice)};
}

/// Why a connection or session has ended or was interrupted.
Finding find_error(const EngineEvent& event, const Subjects& subjects) {
  const std::string_view text = event.text;
  const std::string_view status = text.substr(0, text.find(':'));
  const bool is_lost = status == "peer_lost" || status == "timed_out";
  if (is_lost && subjects.had_handshake(event) && !subjects.was_ready(event))
    return noted(Severity::ended, "packets do not arrive",
                 "The handshake works: compare GID, its type and the network of both ends "
                 "(device.gid_index), and see "
                 "that UDP port 4791 is open: spinwire-doctor HOST.",
                 event);
  constexpr std::string_view kNoAcknowledgement = "completion status 12";
  if (is_lost && has(text, kNoAcknowledgement) && subjects.answers(event))
    return noted(Severity::ended, "long packets are lost",
                 "The peer answers otherwise, so a hop has a smaller MTU than both ends: see "
                 "connections.mtu, and spinwire-doctor HOST.",
                 event);
  if (const Meaning* const meaning = meaning_of(kErrors, status))
    return noted(Severity::ended, meaning->cause, meaning->advice, event);
  return noted(Severity::ended, "ended or interrupted", "", event);
}

/// Of an inbound handshake that failed: "10.0.0.7:39000: why"
Finding find_refusal(const EngineEvent& event) {
  const std::size_t end = event.text.find(": ");
  const std::string_view why = end == std::string::npos
                                   ? std::string_view(event.text)
                                   : std::string_view(event.text).substr(end + 2);
  const bool is_unproved = has(why, "key") || has(why, "proof") || has(why, "prove");
  Finding finding{.severity = Severity::recent,
                  .cause = is_unproved ? "handshake refused, no common key" : "handshake refused",
                  .subject = "from " + event.text.substr(0, std::min(end, event.text.size())),
                  .found = std::string(why)};
  if (is_unproved) finding.advice = "Give both ends the same security.key_file.";
  return finding;
}

Finding find_lease_end(const EngineEvent& event) {
  const std::string_view cause = has(event.text, "expiry")     ? "a lease has expired"
                                 : has(event.text, "recall")   ? "a lease was recalled"
                                 : has(event.text, "too late") ? "a lease was used too late"
                                                               : "a lease has ended";
  return noted(Severity::recent, cause,
               "Renew leases in time (RemoteMemory::auto_renew()), or lease for longer.", event);
}

/// Requests that were sent again.
Finding find_retransmission(const EngineEvent& event, const Subjects& subjects) {
  if (subjects.has_replies(event))
    return noted(Severity::recent, "datagrams are lost",
                 "Requests are sent again: the network or the server drops datagrams.", event);
  if (subjects.answers(event))
    return noted(Severity::recent, "replies are late",
                 "Requests are sent again: handlers take long, or datagrams are lost.", event);
  return noted(Severity::recent, "the server does not reply",
               "Requests are sent again: its application does not poll, or the network is down.",
               event);
}

/// False: the event tells of no trouble.
bool find_event(const EngineEvent& event, const Subjects& subjects, Finding& finding) {
  // A queue pair's end in order.
  if (event.kind == "device" && event.text == "last WQE reached") return false;
  if (event.kind == "error") {
    finding = find_error(event, subjects);
  } else if (event.kind == "refused") {
    finding = find_refusal(event);
  } else if (event.kind == "lease_end") {
    finding = find_lease_end(event);
  } else if (event.kind == "retransmission") {
    finding = find_retransmission(event, subjects);
  } else if (event.kind == "goodbye") {
    const bool is_sent = event.text.starts_with("sent");
    finding = noted(Severity::notice, is_sent ? "goodbye sent" : "goodbye received", "", event);
    finding.found.clear();
  } else if (const Meaning* const meaning = meaning_of(kEvents, event.kind)) {
    finding = noted(Severity::recent, meaning->cause, meaning->advice, event);
  } else {
    return false;
  }
  return true;
}

/// "2 times, 1.3 s ago"
std::string when_text(const EngineEvent& event, Nanoseconds reference) {
  const std::string ago =
      fmt::format("{} ago", time_text(std::max(to_seconds(reference - event.at), 0.0)));
  return event.count > 1 ? fmt::format("{} times, {}", event.count, ago) : ago;
}

}  // namespace

void find_events(const EngineReading& reading, const Earlier& earlier, Findings& found) {
  const Nanoseconds reference = reference_time(reading);
  const Subjects subjects(reading, earlier);
  for (auto event = reading.events.rbegin(); event != reading.events.rend(); ++event) {
    if (reference - event->at > kLately) break;
    Finding finding;
    if (!find_event(*event, subjects, finding)) continue;
    finding.when = when_text(*event, reference);
    if (finding.subject.empty() && event->subject != "engine")
      finding.subject = subjects.text(*event);
    found.add(std::move(finding));
  }
}

}  // namespace spinwire::tools
