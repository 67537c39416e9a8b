// Counts an event of the flight recorder, of one of 256 connections in turn from 64 hosts, with a
// text of two parts: count-record-event (new|repeated) OPERATIONS. A repeated event is like the one
// before of its connection, as retransmissions are.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/setup.h"
#include "observe/recorder.h"
#include "spinwire/clock.h"

using namespace spinwire;

namespace {

using observe::EventKind;
using observe::EventRings;
using observe::EventSubject;

constexpr std::uint32_t kConnections = 256;
constexpr std::uint32_t kHosts = 64;

/// The memory that an engine's file has for events.
class Events {
 public:
  Events() {
    recorder_.open(
        rings(1, observe::kEventsOfAll),
        {rings(1, observe::kEventsOfEngine), rings(kConnections, observe::kEventsOfSubject),
         EventRings(), EventRings(), rings(1, observe::kEventsOfStrangers)});
  }
  void record(std::uint32_t connection, std::uint32_t generation) noexcept {
    recorder_.record(EventKind::state, EventSubject::connection, connection, generation,
                     {"ready, peer ", "10.77.0.2:18515"},
                     {{static_cast<std::uint8_t>(connection % kHosts + 1)}});
  }

 private:
  struct alignas(64) Line {
    std::array<std::byte, 64> bytes;
  };
  EventRings rings(std::uint32_t count, std::uint32_t length) {
    const std::size_t lines =
        std::size_t{count} * length * sizeof(observe::EventRecord) / sizeof(Line);
    return {memory_.emplace_back(lines).data()->bytes.data(), count, length};
  }

  std::vector<std::vector<Line>> memory_;
  Clock clock_ = Clock::manual(&bench::stepped_time);
  observe::Recorder recorder_{clock_};
};

/// The recorder is cold, and so would be code that calls it: the compiler would take the loop out
/// of bench::measured. It does not know what this points to.
void (Events::*volatile record)(std::uint32_t, std::uint32_t) noexcept = &Events::record;

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  const std::string_view which = argc == 3 ? argv[1] : "";
  const bool is_new = which == "new";
  if (!is_new && which != "repeated") bench::give_up("arguments: (new|repeated) OPERATIONS");
  Events events;
  std::uint32_t next = 0;
  const auto work = [&] {
    bench::advance_time();
    (events.*record)(next % kConnections, is_new ? next / kConnections : 0);
    ++next;
  };
  for (std::uint32_t i = 0; i < 2 * kConnections; ++i) work();
  bench::measured(operations, work);
}
