// The flight recorder: which events stay, what readers find, and what engines record.
#include "observe/recorder.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "agent/recording.h"
#include "agent/unheard_peers.h"
#include "base/internals.h"
#include "control/peer_source.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "observe/engine_folder.h"
#include "rpc/long_calls.h"
#include "rpc/rpc_ends.h"
#include "rpc/session_recording.h"

namespace observe_test {
namespace {

using engine_test::Node;
using engine_test::Pair;
using observe::EventKind;
using observe::EventSubject;
using observe::Recorder;
using rpc_test::Calls;
using std::chrono::milliseconds;

PageFileOptions with_rings(const EngineFolder& folder) {
  PageFileOptions options = options_in(folder);
  options.events = 16;
  options.event_rings = {1, 3, 2, 0, 1};
  return options;
}

/// A recorder with its file.
struct Recorded {
  Recorded() : clock(Clock::manual(&ticks)), recorder(clock) {
    auto made = PageFile::create(with_rings(folder));
    EXPECT_TRUE(made) << made.error().message();
    file = std::move(*made);
    recorder.open(file.all_events(),
                  {file.events(EventSubject::engine), file.events(EventSubject::connection),
                   file.events(EventSubject::session), file.events(EventSubject::served_session),
                   file.events(EventSubject::stranger)});
    recorder.set_time(1000, std::chrono::seconds(50));
  }
  void connection(std::uint32_t index, std::string_view text, EventKind kind = EventKind::state) {
    recorder.record(kind, EventSubject::connection, index, 1, {text});
    ticks += 10;
  }
  [[nodiscard]] std::vector<EngineEvent> events() const {
    const auto reading = folder.read();
    EXPECT_TRUE(reading) << reading.error().message();
    return reading ? reading->events : std::vector<EngineEvent>{};
  }
  /// The texts of a subject's events, in their order.
  [[nodiscard]] std::vector<std::string> texts(const std::string& id) const {
    std::vector<std::string> found;
    for (const EngineEvent& event : events()) {
      if (event.id == id) found.push_back(event.text);
    }
    return found;
  }

  EngineFolder folder;
  std::uint64_t ticks = 1500;
  Clock clock;
  Recorder recorder;
  PageFile file;
};

class ObserveRecorder : public WithEngineFolder {};

TEST_F(ObserveRecorder, AnEventSaysWhatHappenedToWhomAndWhen) {
  Recorded r;
  EXPECT_TRUE(r.events().empty());
  r.recorder.record(EventKind::error, EventSubject::session, 1, 7, {"peer_lost", ": ", "silent"});
  r.recorder.record(EventKind::drain, {"begun"});
  const auto events = r.events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].number, 1u);
  EXPECT_EQ(events[0].at, std::chrono::seconds(50) + Nanoseconds(500));
  EXPECT_EQ(events[0].first_at, events[0].at);
  EXPECT_EQ(events[0].subject, "session");
  EXPECT_EQ(events[0].id, "1-7");
  EXPECT_EQ(events[0].kind, "error");
  EXPECT_EQ(events[0].text, "peer_lost: silent");
  EXPECT_EQ(events[0].count, 1u);
  EXPECT_TRUE(events[0].is_consistent);
  EXPECT_EQ(events[1].subject, "engine");
  EXPECT_EQ(events[1].id, "");
}

TEST_F(ObserveRecorder, ANoisySubjectDisplacesNoEventsOfOthers) {
  Recorded r;
  r.connection(0, "quiet");
  r.recorder.record(EventKind::device, {"port error"});
  for (int i = 0; i < 1000; ++i) r.connection(1, std::to_string(i));
  EXPECT_EQ(r.texts("0-1"), std::vector<std::string>{"quiet"});
  EXPECT_EQ(r.texts(""), std::vector<std::string>{"port error"});
  // The common ring is longer than that of a subject.
  EXPECT_EQ(r.texts("1-1").size(), 16u);
  EXPECT_EQ(r.texts("1-1").back(), "999");
}

TEST_F(ObserveRecorder, StrangersDisplaceNoEvents) {
  Recorded r;
  r.recorder.record(EventKind::device, {"port error"});
  r.recorder.record(EventKind::goodbye, EventSubject::served_session, 5, 2, {"in the common ring"});
  for (int i = 0; i < 1000; ++i)
    r.recorder.record(EventKind::refused, EventSubject::stranger, 0, 0, {std::to_string(i)});
  const auto events = r.events();
  ASSERT_EQ(events.size(), 2 + observe::kEventsOfStrangers);
  EXPECT_EQ(events[0].text, "port error");
  EXPECT_EQ(events[1].text, "in the common ring");
  EXPECT_EQ(events[2].subject, "stranger");
  EXPECT_EQ(events[2].id, "");
  EXPECT_EQ(events.back().text, "999");
}

/// An event of a served session, which has no ring of its own here, of a peer at 10.0.0.HOST.
void record_of_host(Recorded& r, std::uint8_t host, std::uint32_t session,
                    const std::string& text) {
  observe::EventOrigin origin;
  origin.source = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, host};
  r.recorder.record(EventKind::state, EventSubject::served_session, session, 1, {text}, origin);
  r.ticks += 10;
}

TEST_F(ObserveRecorder, ASourceDisplacesFewEventsOfOthers) {
  Recorded r;
  constexpr std::uint32_t kAll = 16;  // see with_rings()
  constexpr std::uint32_t kTaken = kAll / observe::kPartOfSource;
  r.recorder.record(EventKind::device, EventSubject::session, 4, 1, {"of the engine"});
  for (std::uint32_t i = 1; i < kAll; ++i) record_of_host(r, 1, i, "before");
  // Comes and goes: each time another session.
  for (std::uint32_t i = 0; i < 1000; ++i) record_of_host(r, 2, 100 + i, std::to_string(i));
  const auto events = r.events();
  ASSERT_EQ(events.size(), kAll);
  EXPECT_EQ(events[0].text, "of the engine");
  for (std::uint32_t i = 1; i < kAll - kTaken; ++i) {
    EXPECT_EQ(events[i].text, "before");
    EXPECT_EQ(events[i].id, std::to_string(i + kTaken) + "-1");
  }
  for (std::uint32_t i = 1; i <= kTaken; ++i)
    EXPECT_EQ(events[kAll - i].text, std::to_string(1000 - i)) << "its own newest ones stay";
  // A third host finds room, too, at the cost of the one with the most.
  record_of_host(r, 3, 1, "newcomer");
  EXPECT_EQ(r.events().back().text, "newcomer");
  EXPECT_EQ(r.events()[1].id, std::to_string(kTaken + 2) + "-1");
  EXPECT_EQ(r.events()[kAll - 2].text, "999");
}

TEST_F(ObserveRecorder, ADisplacedEventThatIsRepeatedDisplacesNone) {
  Recorded r;
  r.connection(0, "first");
  for (std::uint32_t i = 0; i < 16; ++i) {  // without rings of their own
    r.recorder.record(EventKind::state, EventSubject::served_session, i, 1, {std::to_string(i)});
  }
  r.connection(0, "first");
  const auto events = r.events();
  ASSERT_EQ(events.size(), 17u);
  EXPECT_EQ(events.back().count, 2u);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(events[i].text, std::to_string(i));
}

TEST_F(ObserveRecorder, EachSubjectKeepsItsNewestEvents) {
  Recorded r;
  const std::uint32_t kept = observe::kEventsOfSubject;
  for (std::uint32_t i = 0; i < 2 * kept; ++i) r.connection(2, std::to_string(i));
  for (int i = 0; i < 100; ++i) r.connection(1, std::to_string(i));
  const auto texts = r.texts("2-1");
  ASSERT_EQ(texts.size(), kept);
  EXPECT_EQ(texts.front(), std::to_string(kept));
  EXPECT_EQ(texts.back(), std::to_string(2 * kept - 1));
  // A subject without a ring of its own has its events in the common one only.
  r.recorder.record(EventKind::goodbye, EventSubject::served_session, 5, 2, {"sent"});
  EXPECT_EQ(r.texts("5-2"), std::vector<std::string>{"sent"});
}

TEST_F(ObserveRecorder, RepeatedEventsAreCountedInOne) {
  Recorded r;
  r.connection(0, "before");
  for (int i = 0; i < 500; ++i) {
    r.connection(1, "", EventKind::retransmission);
    r.connection(2, "", EventKind::retransmission);
  }
  auto events = r.events();
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].text, "before");
  EXPECT_EQ(events[1].count, 500u);
  EXPECT_LT(events[1].first_at, events[1].at);
  EXPECT_EQ(events[2].id, "2-1");
  EXPECT_EQ(events[2].count, 500u);
  // Another text, kind or generation is another event.
  r.connection(1, "x", EventKind::retransmission);
  r.connection(1, "x", EventKind::timeout);
  r.recorder.record(EventKind::timeout, EventSubject::connection, 1, 2, {"x"});
  EXPECT_EQ(r.events().size(), 6u);
}

TEST_F(ObserveRecorder, LongTextsAreCut) {
  Recorded r;
  const std::string part(50, 'a');
  r.recorder.record(EventKind::error, {part, part, "\n"});
  r.recorder.record(EventKind::error, {"\n"});
  const auto events = r.events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].text, std::string(sizeof(observe::EventRecord::text), 'a'));
  EXPECT_EQ(events[1].text, "?");
}

TEST_F(ObserveRecorder, NothingIsRecordedWithoutAFile) {
  Recorded r;
  r.connection(0, "before");
  r.recorder.close();
  r.connection(0, "after");
  EXPECT_EQ(r.texts("0-1"), std::vector<std::string>{"before"});
  Recorder closed(r.clock);
  closed.record(EventKind::error, {"nobody sees it"});
}

TEST_F(ObserveRecorder, EachKindHasANameAndAMeaning) {
  std::set<std::string_view> names;
  for (const EventKindInfo& kind : event_kinds()) {
    EXPECT_TRUE(names.insert(kind.name).second) << kind.name;
    EXPECT_FALSE(kind.help.empty());
  }
  EXPECT_TRUE(observe::name_of(EventKind::none).empty());
  EXPECT_EQ(observe::name_of(EventKind::drain), "drain");
  EXPECT_EQ(static_cast<std::size_t>(EventKind::keys), names.size());
}

/// Where an event with this number lies in a file.
std::size_t place_of(const std::vector<std::byte>& bytes, std::uint64_t number) {
  observe::FileHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  for (std::uint32_t i = 0; i < header.table_count; ++i) {
    observe::TableDescriptor table;
    std::memcpy(&table, bytes.data() + header.tables_offset + i * sizeof table, sizeof table);
    if (table.kind != observe::kEventTable) continue;
    for (std::uint32_t row = 0; row < table.row_count; ++row) {
      observe::EventRecord event;
      const std::size_t at = table.rows_offset + std::size_t{row} * table.row_bytes;
      std::memcpy(&event, bytes.data() + at, sizeof event);
      if (event.number == number) return at;
    }
  }
  ADD_FAILURE() << "no event " << number;
  return 0;
}

TEST_F(ObserveRecorder, ATornEventIsLeftToItsOtherCopyOrMarked) {
  Recorded r;
  r.connection(0, "whole");
  r.recorder.record(EventKind::goodbye, EventSubject::served_session, 5, 2, {"one copy"});
  auto bytes = bytes_of(r.file.path());
  // The first copy of event 1, and the only one of event 2.
  for (const std::uint64_t number : {1u, 2u})
    bytes[place_of(bytes, number)] |= static_cast<std::byte>(1);
  const auto reading = decode_engine(bytes);
  ASSERT_TRUE(reading);
  ASSERT_EQ(reading->events.size(), 2u);
  EXPECT_TRUE(reading->events[0].is_consistent);
  EXPECT_FALSE(reading->events[1].is_consistent);
  // An event that changes between two readings.
  const auto earlier = bytes_of(r.file.path());
  r.connection(0, "whole");
  const auto changed = decode_engine(earlier, bytes_of(r.file.path()));
  ASSERT_TRUE(changed);
  EXPECT_FALSE(changed->events[0].is_consistent);
  EXPECT_TRUE(changed->events[1].is_consistent);
}

// ---- what engines record ----

/// "KIND TEXT" of the events of a kind of subject, of all engines in a folder.
std::vector<std::string> recorded(const EngineFolder& folder, std::string_view subject) {
  std::vector<std::string> found;
  for (const EngineFile& file : folder.engines()) {
    const auto reading = read_engine(file);
    EXPECT_TRUE(reading) << reading.error().message();
    if (!reading) continue;
    for (const EngineEvent& event : reading->events) {
      if (event.subject == subject) found.push_back(event.kind + " " + event.text);
    }
  }
  return found;
}
testing::AssertionResult has(const std::vector<std::string>& events, std::string_view what) {
  if (std::ranges::any_of(
          events, [&](const std::string& each) { return each.find(what) != std::string::npos; }))
    return testing::AssertionSuccess();
  auto result = testing::AssertionFailure() << "no " << what << " in";
  for (const std::string& each : events) result << "\n  " << each;
  return result;
}

TEST_F(ObserveRecorder, TellsTheLifeOfAConnection) {
  const EngineFolder folder;
  Pair p(shown_in(folder));
  EXPECT_TRUE(has(recorded(folder, "engine"), "opened on device"));
  auto events = recorded(folder, "connection");
  EXPECT_TRUE(has(events, "state ready, peer " + p.server.listener.address()));
  EXPECT_TRUE(has(events, "handshake the peer's endpoint is here"));
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  ASSERT_TRUE(p.until([&] { return !p.client.closed.empty() && !p.server.closed.empty(); }));
  events = recorded(folder, "connection");
  EXPECT_TRUE(has(events, "goodbye sent"));
  EXPECT_TRUE(has(events, "goodbye received"));
  EXPECT_TRUE(has(events, "state closed"));
  EXPECT_FALSE(has(events, "error"));
}

TEST_F(ObserveRecorder, TellsOfAGoodbyeThatWaitsForNothing) {
  // What the engine that sends the goodbye ends the connection by.
  void (*const kEnds[])(spinwire::agent::EngineContext&, spinwire::agent::Agent&) = {
      [](auto& ctx, auto& a) { spinwire::agent::close_at_once(ctx, a, {}); },
      [](auto& ctx, auto& a) { spinwire::agent::give_way(ctx, a); }};
  for (const auto& end : kEnds) {
    const EngineFolder folder;
    Pair p(shown_in(folder));
    auto& context = spinwire::detail::core_of(p.server.engine)->context;
    EXPECT_FALSE(has(recorded(folder, "connection"), "goodbye sent"));
    end(context, *context.agents.begin());
    ASSERT_TRUE(p.until([&] { return !p.client.closed.empty() && !p.server.closed.empty(); }));
    EXPECT_TRUE(has(recorded(folder, "connection"), "goodbye sent"));
    EXPECT_TRUE(has(recorded(folder, "connection"), "goodbye received"));
  }
}

TEST_F(ObserveRecorder, TellsWhyAConnectionFails) {
  const EngineFolder folder;
  Node client(shown_in(folder));
  engine_test::Child server([](int, int out) -> int {
    Node node(engine_test::small_config());
    node.listen();
    engine_test::write_line(out, node.listener.address());
    for (;;) (void)node.poll();
  });
  spinwire::ConnectOptions options;
  options.handlers = client.handlers();
  auto made = client.engine.connect(server.line(), options);
  ASSERT_TRUE(made) << made.error().message();
  ASSERT_TRUE(engine_test::until({&client}, [&] { return made->ready(); }));
  server.kill(SIGKILL);
  ASSERT_TRUE(engine_test::until({&client}, [&] { return !client.closed.empty(); }));
  EXPECT_TRUE(has(recorded(folder, "connection"), "error peer_lost: "));
}

TEST_F(ObserveRecorder, NamesTheRefusedPeerAndWhy) {
  const EngineFolder folder;
  Pair p(shown_in(folder));
  spinwire::ListenOptions listening;
  listening.on_connect_request = [](spinwire::PeerRequest& request) {
    request.refuse(7, "not today");
  };
  const auto other = p.server.engine.listen("127.0.0.1:0", listening);
  ASSERT_TRUE(other) << other.error().message();
  spinwire::ConnectOptions options;
  options.handlers = p.client.handlers();
  const auto refused = p.client.engine.connect(other->address(), options);
  ASSERT_TRUE(refused);
  ASSERT_TRUE(p.until([&] { return !p.client.closed.empty(); }));
  EXPECT_TRUE(has(recorded(folder, "stranger"), "refused 127.0.0.1:"));
  EXPECT_TRUE(has(recorded(folder, "stranger"), "not today"));
  EXPECT_TRUE(has(recorded(folder, "connection"), "error refused: not today"));
}

TEST_F(ObserveRecorder, RecordsOnlyLongBlocks) {
  const EngineFolder folder;
  std::uint64_t ticks = 1'000'000'000;
  Pair p(shown_in(folder), &ticks);
  const Buffer b = p.client.filled(8, 1);
  const auto fill = [&] {
    while (p.ends.client.send(b, {}, engine_test::Post::automatic) == Status::ok) {
    }
    for (int i = 0; i < 4; ++i) (void)p.client.engine.poll_control();
  };
  fill();
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().send_credits > 0; }));
  EXPECT_FALSE(has(recorded(folder, "connection"), "blocked"));
  fill();
  ticks += 150'000'000;
  (void)p.client.poll();
  for (int i = 0; i < 4; ++i) (void)p.client.engine.poll_control();
  EXPECT_TRUE(has(recorded(folder, "connection"), "blocked credit"));
  EXPECT_FALSE(has(recorded(folder, "connection"), "unblocked"));
  ASSERT_TRUE(p.until([&] { return p.ends.client.stats().send_credits > 0; }));
  for (int i = 0; i < 4; ++i) (void)p.client.engine.poll_control();
  EXPECT_TRUE(has(recorded(folder, "connection"), "unblocked"));
}

TEST_F(ObserveRecorder, TellsOfSessionsAtBothEnds) {
  const EngineFolder folder;
  Calls calls(shown_in(folder, rpc_test::rpc_config()));
  EXPECT_TRUE(has(recorded(folder, "session"), "state opening, server "));
  EXPECT_TRUE(has(recorded(folder, "session"), "state ready, server "));
  EXPECT_TRUE(has(recorded(folder, "served_session"), "opened by client 127.0.0.1:"));
  spinwire::CallOptions options;
  options.timeout = milliseconds(1);
  ASSERT_EQ(calls.begin(rpc_test::kLater, {}, options), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.ended[0].times == 1; }));
  EXPECT_EQ(calls.ended[0].status, Status::timed_out);
  EXPECT_TRUE(has(recorded(folder, "session"), "timeout of "));
  calls.finish();
  EXPECT_TRUE(has(recorded(folder, "session"), "state closed"));
  EXPECT_TRUE(has(recorded(folder, "served_session"), "state closed, client 127.0.0.1:"));
}

TEST_F(ObserveRecorder, EventsCountForTheAddressOfThePeer) {
  const auto here =
      spinwire::control::event_source(*spinwire::control::Address::parse("127.0.0.1:1"));
  Pair p;
  for (const Node* const end : {&p.client, &p.server}) {
    auto& agents = spinwire::detail::core_of(end->engine)->context.agents;
    ASSERT_EQ(agents.size(), 1u);
    for (const spinwire::agent::Agent& a : agents)
      EXPECT_EQ(spinwire::agent::event_origin_of(a).source, here);
  }
  Calls calls(rpc_test::rpc_config());
  const auto& client = *spinwire::detail::core_of(calls.client.engine)->calls;
  const auto& server = *spinwire::detail::core_of(calls.server.engine)->calls;
  EXPECT_EQ(spinwire::rpc::event_origin_of(client.clients.at(0)).source, here);
  EXPECT_EQ(spinwire::rpc::event_origin_of(server.servers.at(0)).source, here);
  calls.finish();
}

/// Two nodes whose endpoints are exchanged out-of-band.
struct JoinedNodes {
  explicit JoinedNodes(const spinwire::ConnectionSettings& settings = {}) {
    for (const std::size_t i : {0, 1}) {
      spinwire::PrepareOptions options;
      options.handlers = nodes[i].handlers();
      options.settings = settings;
      to[i] = *nodes[i].engine.prepare(options);
    }
    EXPECT_TRUE(until([&] { return to[0].endpoint() && to[1].endpoint(); }));
    EXPECT_TRUE(to[0].join(*to[1].endpoint()));
    EXPECT_TRUE(to[1].join(*to[0].endpoint()));
    EXPECT_TRUE(until([&] { return to[0].ready() && to[1].ready(); }));
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&nodes[0], &nodes[1]}, done);
  }
  std::array<Node, 2> nodes;
  std::array<spinwire::Connection, 2> to;
};

// The endpoint is the peer's word, until something comes from there.
TEST_F(ObserveRecorder, EventsCountForTheProcessOfAnEndpoint) {
  const auto here =
      spinwire::control::event_source(*spinwire::control::Address::parse("127.0.0.1:1"));
  JoinedNodes joined;
  auto& [nodes, to] = joined;
  ASSERT_EQ(to[0].send(nodes[0].buffer(8)), spinwire::Status::ok);
  ASSERT_TRUE(joined.until([&] { return joined.nodes[1].messages == 1; }));
  for (const spinwire::agent::Agent& a :
       spinwire::detail::core_of(nodes[1].engine)->context.agents) {
    EXPECT_EQ(spinwire::agent::event_origin_of(a).source, here);
    EXPECT_EQ(spinwire::agent::event_ring_of(a), observe::EventRing::all);
  }
}

// Nothing comes from such a peer but the answers of its device.
TEST_F(ObserveRecorder, TheRawPeerOfAnEndpointThatOnlyReceivesIsNoStranger) {
  bool came = false, sent = false;
  spinwire::ConnectionSettings raw;
  raw.raw.emplace();
  JoinedNodes joined(raw);
  auto& [nodes, to] = joined;
  const auto ring = [&](const Node& node) {
    return spinwire::agent::event_ring_of(
        *spinwire::detail::core_of(node.engine)->context.agents.begin());
  };
  EXPECT_EQ(ring(nodes[0]), observe::EventRing::strangers) << "the endpoint is the peer's word";
  const Buffer room = nodes[1].buffer(64);
  const spinwire::BufferSlice into = room.slice();
  ASSERT_EQ(
      to[1].post_receive(std::span(&into, 1), [&](const spinwire::RawReceive&) { came = true; }),
      spinwire::Status::ok);
  for (int i = 0; i < 8; ++i) (void)nodes[1].poll();
  const Buffer data = nodes[0].filled(8, 1);
  const auto on_sent = [&](const spinwire::Completion& c) {
    EXPECT_EQ(c.status, spinwire::Status::ok);
    sent = true;
  };
  ASSERT_EQ(to[0].send_raw(data.slice(), on_sent), spinwire::Status::ok);
  ASSERT_TRUE(joined.until([&] { return came && sent; }));
  for (const Node& node : nodes) EXPECT_EQ(ring(node), observe::EventRing::all);
}

TEST_F(ObserveRecorder, RepliesIntoNamedMemoryLeaveNoEvents) {
  const EngineFolder folder;
  rpc_test::LongCalls t(shown_in(folder, rpc_test::long_call_config()));
  Buffer room = t.room(64 << 10);
  const auto ends = [&] {
    std::size_t found = 0;
    for (const EngineFile& file : folder.engines()) {
      const auto contents = read_engine(file).value();
      for (const EngineEvent& event : contents.events)
        found += event.kind == "lease_end" ? event.count : 0;
    }
    return found;
  };
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(t.call_into(rpc_test::kMake, rpc_test::number(40'000), room).status, Status::ok);
  for (int i = 0; i < 1000; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(ends(), 0u);
  room.reset();
  t.finish_long_calls();
}

TEST_F(ObserveRecorder, CountsRetransmissions) {
  if (rpc_test::over_connections()) GTEST_SKIP() << "connections send nothing again";
  const EngineFolder folder;
  std::uint64_t ticks = 1'000'000'000;
  Calls calls(shown_in(folder, rpc_test::rpc_config()), &ticks);
  ASSERT_EQ(calls.begin(rpc_test::kLater, {}), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 1; }));
  const auto sent_again = [&] { return calls.client.engine.rpc_stats().retransmitted_requests; };
  ASSERT_TRUE(calls.until([&] {
    ticks += 1'000'000;
    return sent_again() >= 3;
  }));
  for (const EngineFile& file : folder.engines()) {
    const auto reading = read_engine(file);
    ASSERT_TRUE(reading);
    for (const EngineEvent& event : reading->events) {
      if (event.kind == "retransmission") {
        EXPECT_EQ(event.count, sent_again());
      }
    }
  }
  EXPECT_TRUE(has(recorded(folder, "session"), "retransmission"));
  EXPECT_EQ(calls.later[0].call.reply(std::span<const std::byte>()), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.ended[0].times == 1; }));
}

}  // namespace
}  // namespace observe_test
