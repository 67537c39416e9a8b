// Strangers who shake hands again and again do not push the history of others out of the flight
// recorder, and neither do peers who are heard each time.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "attack/victim.h"
#include "base/internals.h"
#include "engine/engine_core.h"
#include "observe/engine_folder.h"
#include "observe/recorder.h"
#include "rpc/raw_datagrams.h"

namespace attack_test {
namespace {

/// Three events of each fill the common ring.
constexpr std::uint32_t kStrikes = 400;
/// Of peers that are heard, in a ring that is full already.
constexpr std::uint32_t kVisits = 200;

class AttackOnRecorder : public observe_test::WithEngineFolder {
 protected:
  void SetUp() override {
    WithEngineFolder::SetUp();
    if (IsSkipped()) return;
    folder_.emplace();
    Config c = observe_test::shown_in(*folder_, rpc_test::rpc_config());
    c.observability.rows = 1;  // all connections share a ring, besides the common one
    victim_ = std::make_unique<Node>(c, &ticks_);
    victim_->listen();
    ASSERT_TRUE(
        victim_->engine.serve(kEcho, [](spinwire::Request& r) { (void)r.reply(r.bytes()); }));
    attacker_ = std::make_unique<Node>(small_config());
    prepared_ = *attacker_->engine.prepare({});
    ASSERT_TRUE(until({attacker_.get()}, [&] { return prepared_.endpoint().has_value(); }));
    datagrams_ =
        std::make_unique<rpc_test::RawDatagrams>(*spinwire::detail::core_of(attacker_->engine));
    // The first of several honest connections: the others displace its events in their own ring.
    Node honest(rpc_test::rpc_config());
    for (std::size_t i = 1; i <= 5; ++i) {
      Connection to = honest.begin(*victim_);
      ASSERT_TRUE(until({victim_.get(), &honest}, [&] { return honest.ready.size() == i; }));
      ASSERT_EQ(to.send(honest.buffer(8)), Status::ok);
      ASSERT_TRUE(until({victim_.get(), &honest}, [&] { return victim_->messages == i; }));
      ASSERT_EQ(to.close(), Status::ok);
      ASSERT_TRUE(until({victim_.get(), &honest},
                        [&] { return honest.closed.size() == i && victim_->closed.size() == i; }));
      if (i == 1) first_ = newest("goodbye");
    }
    last_ = newest("goodbye");
    ASSERT_NE(first_, 0u);
    ASSERT_TRUE(has_first());
  }
  void TearDown() override { datagrams_.reset(); }

  [[nodiscard]] std::vector<spinwire::EngineEvent> events() const {
    const auto reading = folder_->read();
    EXPECT_TRUE(reading) << reading.error().message();
    return reading ? reading->events : std::vector<spinwire::EngineEvent>{};
  }
  /// The number of the last event of a kind; 0: none.
  [[nodiscard]] std::uint64_t newest(std::string_view kind) const {
    std::uint64_t number = 0;
    for (const spinwire::EngineEvent& event : events()) {
      if (event.kind == kind) number = event.number;
    }
    return number;
  }
  [[nodiscard]] bool has(std::uint64_t number) const {
    const auto all = events();
    return std::any_of(all.begin(), all.end(),
                       [&](const auto& event) { return event.number == number; });
  }
  [[nodiscard]] bool has_first() const { return has(first_); }
  /// Fills the ring with events of another host, but for as many as the ring of strangers has.
  void fill_ring() {
    const spinwire::observe::EventOrigin host{{1}};
    for (std::size_t i = events().size(); i < spinwire::observe::kEventsOfAll; ++i) {
      spinwire::detail::core_of(victim_->engine)
          ->context.recorder.record(spinwire::observe::EventKind::state,
                                    spinwire::observe::EventSubject::session,
                                    static_cast<std::uint32_t>(i), 1, {"ready"}, host);
    }
    filled_ = events_of_other_host();
  }
  [[nodiscard]] std::size_t events_of_other_host() const {
    const auto all = events();
    return static_cast<std::size_t>(std::count_if(all.begin(), all.end(), [](const auto& event) {
      return event.subject == "session" && event.text == "ready";
    }));
  }
  /// A peer that was heard each time has displaced events, but no more than its part of the ring.
  void expect_few_are_displaced() const {
    EXPECT_TRUE(has(last_)) << "one of the newest events of a source with few";
    const std::size_t displaced = filled_ - events_of_other_host();
    EXPECT_GT(displaced, 0u);
    EXPECT_LE(displaced, spinwire::observe::kEventsOfAll / spinwire::observe::kPartOfSource);
  }
  /// The victim's answer, which is of type Body.
  template <typename Body>
  std::optional<Body> answer(const Stream& s) {
    if (!until({victim_.get()}, [&] { return s.answered(0); })) return std::nullopt;
    const auto got = s.receive();
    const auto* const body = got ? std::get_if<Body>(&got->body) : nullptr;
    return body != nullptr ? std::optional<Body>(*body) : std::nullopt;
  }
  /// Waits until so many connections of the victim have ended; time passes meanwhile.
  [[nodiscard]] bool have_ended(std::size_t count) {
    return until({victim_.get()}, [&] {
      ticks_ += 10'000'000;
      return victim_->closed.size() >= count;
    });
  }

  std::optional<observe_test::EngineFolder> folder_;
  std::uint64_t ticks_ = 1'000'000'000;
  std::unique_ptr<Node> victim_;
  std::unique_ptr<Node> attacker_;
  Connection prepared_;
  std::unique_ptr<rpc_test::RawDatagrams> datagrams_;
  std::uint64_t first_ = 0;  ///< number of an event of the first honest connection
  std::uint64_t last_ = 0;   ///< of the last one
  std::size_t filled_ = 0;   ///< events_of_other_host() before an attack
};

TEST_F(AttackOnRecorder, Hellos) {
  for (std::uint32_t i = 0; i < kStrikes; ++i) {
    const Stream s(victim_->listener.address());
    s.send(wire::encode(wire::Hello{*prepared_.endpoint()}));
    ASSERT_TRUE(answer<wire::Accept>(s)) << i;
  }
  EXPECT_TRUE(until({victim_.get()}, [&] { return victim_->engine.stats().connections == 0; }));
  EXPECT_TRUE(has_first());
}

// A connection is ready by frames alone, and then silent.
TEST_F(AttackOnRecorder, HellosThatAreConfirmed) {
  const std::size_t before = victim_->closed.size();
  for (std::uint32_t i = 0; i < kStrikes; ++i) {
    const Stream s(victim_->listener.address());
    s.send(wire::encode(wire::Hello{*prepared_.endpoint()}));
    const auto accept = answer<wire::Accept>(s);
    ASSERT_TRUE(accept) << i;
    s.send(wire::encode(wire::Ready{accept->endpoint.incarnation}));
    ASSERT_TRUE(until({victim_.get()}, [&] { return victim_->ready.size() == before + i + 1; }));
    ASSERT_TRUE(have_ended(before + i + 1)) << i;
  }
  EXPECT_TRUE(has_first());
}

TEST_F(AttackOnRecorder, SessionsThatAreNeverUsed) {
  if (rpc_test::over_connections()) GTEST_SKIP() << "such sessions prove no address";
  for (std::uint32_t i = 1; i <= kStrikes; ++i) {
    const Stream s(victim_->listener.address());
    s.send(wire::encode(wire::OpenSession{datagrams_->end(i)}));
    std::uint64_t token = 0;
    ASSERT_TRUE(until({victim_.get()}, [&] { return (token = datagrams_->challenge(i)) != 0; }));
    s.send(wire::encode(wire::PathResponse{token}));
    ASSERT_TRUE(answer<wire::SessionOpened>(s)) << i;
  }
  EXPECT_TRUE(until({victim_.get()}, [&] {
    ticks_ += 10'000'000;
    return victim_->engine.rpc_stats().served_sessions == 0;
  }));
  EXPECT_TRUE(has_first());
}

/// Of the attacker's session.
struct Progress {
  bool is_answered = false;
  bool is_closed = false;
};
/// Goes on until the parent ends it.
template <typename Strike>
int strike_often(int in, std::uint32_t times, Strike&& strike) {
  Progress progress;
  Node node(rpc_test::rpc_config());
  for (std::uint32_t i = 1; i <= times && !testing::Test::HasFailure(); ++i) {
    progress = {};
    strike(node, i, progress);
  }
  while (command(in) != 'q') (void)node.poll();
  return 0;
}

TEST_F(AttackOnRecorder, APeerThatComesAndGoes) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "all peers of this host are one source";
  fill_ring();
  ASSERT_TRUE(has_first());
  const std::size_t before = victim_->closed.size();
  const std::string address = victim_->listener.address();
  Child attacker([&](int in, int) {
    return strike_often(in, kVisits, [&](Node& node, std::uint32_t i, Progress&) {
      Connection to = node.begin(address);
      EXPECT_TRUE(until({&node}, [&] { return node.ready.size() == i; }));
      EXPECT_EQ(to.send(node.buffer(8)), Status::ok);
      EXPECT_EQ(to.close(), Status::ok);
      EXPECT_TRUE(until({&node}, [&] { return node.closed.size() == i; }));
    });
  });
  EXPECT_TRUE(until({victim_.get()}, [&] { return victim_->closed.size() == before + kVisits; }));
  EXPECT_EQ(victim_->messages, before + kVisits) << "it was heard each time";
  attacker.tell('q');
  EXPECT_EQ(attacker.wait(), 0);
  expect_few_are_displaced();
}

TEST_F(AttackOnRecorder, ACallerThatComesAndGoes) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "all peers of this host are one source";
  fill_ring();
  ASSERT_TRUE(has_first());
  const std::string address = victim_->listener.address();
  Child attacker([&](int in, int) {
    return strike_often(in, kVisits, [&](Node& node, std::uint32_t, Progress& progress) {
      spinwire::SessionOptions options;
      options.on_closed = [&progress](spinwire::Session, const Error&) {
        progress.is_closed = true;
      };
      auto session = node.engine.open_session(address, options);
      ASSERT_TRUE(session) << session.error().message();
      ASSERT_TRUE(until({&node}, [&] { return session->ready(); }));
      const auto word = std::byte{7};
      ASSERT_EQ(session->call(kEcho, {&word, 1},
                              [&progress](const spinwire::Reply&) { progress.is_answered = true; }),
                Status::ok);
      ASSERT_TRUE(until({&node}, [&] { return progress.is_answered; }));
      (void)session->close();
      ASSERT_TRUE(until({&node}, [&] { return progress.is_closed; }));
    });
  });
  EXPECT_TRUE(until({victim_.get()}, [&] {
    return victim_->engine.rpc_stats().served >= kVisits &&
           victim_->engine.rpc_stats().served_sessions == 0;
  }));
  attacker.tell('q');
  EXPECT_EQ(attacker.wait(), 0);
  expect_few_are_displaced();
}

}  // namespace
}  // namespace attack_test
