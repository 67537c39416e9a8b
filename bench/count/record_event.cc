// Counts an event of the flight recorder, of one of 256 connections in turn from 64 hosts, with a
// text of two parts: count-record-event (new|repeated|newcomer) OPERATIONS. A repeated event is
// like the one before of its connection, as retransmissions are. Each newcomer's is of another of
// 4,096 hosts, in a full ring: it displaces the only event of another host.
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
constexpr std::uint32_t kNewcomers = 4096;
static_assert(kNewcomers > 2 * observe::kEventsOfAll);

/// The memory that an engine's file has for events.
class Events {
 public:
  Events() {
    recorder_.open(
        rings(1, observe::kEventsOfAll),
        {rings(1, observe::kEventsOfEngine), rings(kConnections, observe::kEventsOfSubject),
         EventRings(), EventRings(), rings(1, observe::kEventsOfStrangers)});
  }
  void record(std::uint32_t connection, std::uint32_t generation, std::uint32_t host) noexcept {
    recorder_.record(
        EventKind::state, EventSubject::connection, connection, generation,
        {"ready, peer ", "10.77.0.2:18515"},
        {{static_cast<std::uint8_t>(host / 256 + 1), static_cast<std::uint8_t>(host)}});
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
/// of bench::counted. It does not know what this points to.
void (Events::*volatile record)(std::uint32_t, std::uint32_t,
                                std::uint32_t) noexcept = &Events::record;

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  const std::string_view which = argc == 3 ? argv[1] : "";
  const bool is_repeated = which == "repeated";
  const bool is_newcomer = which == "newcomer";
  if (which != "new" && !is_repeated && !is_newcomer)
    bench::give_up("arguments: (new|repeated|newcomer) OPERATIONS");
  const std::uint32_t hosts = is_newcomer ? kNewcomers : kHosts;
  Events events;
  std::uint32_t next = 0;
  const auto work = [&] {
    bench::advance_time();
    (events.*record)(next % kConnections, is_repeated ? 0 : next / kConnections, next % hosts);
    ++next;
  };
  for (std::uint32_t i = 0; i < 2 * observe::kEventsOfAll; ++i) work();
  bench::measured(operations, work);
}
