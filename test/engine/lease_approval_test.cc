// The owner's application decides about requests for memory, and leases carry a tag.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "engine/lease_ends.h"

namespace lease_approval_test {
namespace {

using namespace leases;  // the names of a test namespace
using spinwire::ConnectionHandlers;
using spinwire::MemoryRequest;

/// The server's application decides about the client's requests.
struct Owner : Leases {
  explicit Owner(By by) : Leases(by) {
    ConnectionHandlers h = server.handlers();
    h.on_memory_request = [this](Connection c, MemoryRequest& r) {
      EXPECT_EQ(c, ends.server);
      ++requests;
      decide(r);
    };
    h.on_returned = [this](Connection, const Returned& r) { returned_tags.push_back(r.tag); };
    EXPECT_EQ(ends.server.set_handlers(h), Status::ok);
  }
  struct Answer {
    Status status;
    LeaseRefusal refusal;
    std::optional<std::uint32_t> code;
    std::string text;
    RemoteMemory memory;
  };
  Answer ask(std::size_t bytes, const LeaseOptions& options = {}) {
    std::optional<Answer> answer;
    EXPECT_EQ(ends.client.request_memory(bytes, options,
                                         [&](LeaseReply& r) {
                                           answer =
                                               Answer{r.status, r.refusal, r.code,
                                                      std::string(r.text), std::move(r.memory)};
                                         }),
              Status::ok);
    EXPECT_TRUE(until([&] { return answer.has_value(); }));
    return std::move(*answer);
  }

  std::function<void(MemoryRequest&)> decide = [](MemoryRequest& r) { r.accept(); };
  int requests = 0;
  std::vector<std::uint64_t> returned_tags;
};

class LeaseApproval : public testing::TestWithParam<By> {};
INSTANTIATE_TEST_SUITE_P(Keys, LeaseApproval, testing::Values(By::window, By::registration),
                         [](const auto& of) {
                           return of.param == By::window ? "windows" : "registrations";
                         });

TEST_P(LeaseApproval, TheOwnerSeesWhatIsAskedAndAccepts) {
  Owner t(GetParam());
  LeaseOptions asked;
  asked.duration = 5s;
  asked.access = Access::remote_write;
  asked.alignment = 128;
  asked.tag = 0x1122334455667788;
  t.decide = [&](MemoryRequest& r) {
    EXPECT_EQ(r.bytes(), 1000u);
    EXPECT_EQ(r.options().duration, 5s);
    EXPECT_EQ(r.options().access, Access::remote_write);
    EXPECT_EQ(r.options().alignment, 128u);
    EXPECT_EQ(r.tag(), asked.tag);
    r.accept();
  };
  {
    Owner::Answer answer = t.ask(1000, asked);
    EXPECT_EQ(answer.status, Status::ok);
    EXPECT_EQ(t.requests, 1);
    EXPECT_EQ(answer.memory.tag(), asked.tag);
    EXPECT_EQ(t.write(answer.memory.region(), 3), Status::ok);
  }
  EXPECT_TRUE(t.until([&] { return !t.returned_tags.empty(); }));
  EXPECT_EQ(t.returned_tags, std::vector<std::uint64_t>{asked.tag});
  t.finish();
}

TEST_P(LeaseApproval, TheOwnerGivesATagOfItsOwn) {
  Owner t(GetParam());
  t.decide = [](MemoryRequest& r) { r.accept(77); };
  {
    const Owner::Answer answer = t.ask(64);
    EXPECT_EQ(answer.status, Status::ok);
    EXPECT_EQ(answer.memory.tag(), 77u);
  }
  t.decide = [](MemoryRequest& r) { r.accept(0); };
  {
    LeaseOptions asked;
    asked.tag = 5;
    const Owner::Answer answer = t.ask(64, asked);
    EXPECT_EQ(answer.memory.tag(), 0u);
  }
  t.finish();
}

TEST_P(LeaseApproval, ARefusalHasACodeAndAText) {
  Owner t(GetParam());
  t.decide = [&](MemoryRequest& r) {
    EXPECT_EQ(t.server.engine.memory_stats(Pool::lease).blocks_used, 0u) << "memory was taken";
    r.refuse(0xfeedface, "no\tmemory for you" + std::string(60, '!'));
  };
  const Owner::Answer answer = t.ask(64);
  EXPECT_EQ(answer.status, Status::refused);
  EXPECT_EQ(answer.refusal, LeaseRefusal::unwanted);
  EXPECT_EQ(answer.code, 0xfeedfaceu);
  EXPECT_EQ(answer.text, "no?memory for you" + std::string(23, '!'));
  EXPECT_FALSE(answer.memory);
  EXPECT_EQ(t.ends.server.snapshot().leased_out, 0u);
  t.finish();
}

TEST_P(LeaseApproval, ARequestThatIsNotAcceptedIsRefused) {
  Owner t(GetParam());
  t.decide = [](MemoryRequest&) {};
  const Owner::Answer answer = t.ask(64);
  EXPECT_EQ(answer.status, Status::refused);
  EXPECT_EQ(answer.code, 0u);
  EXPECT_EQ(answer.text, "");
  t.finish();
}

TEST_P(LeaseApproval, ACallbackThatClosesItsConnectionGivesNothing) {
  Owner t(GetParam());
  t.decide = [&](MemoryRequest& r) {
    r.accept();
    EXPECT_EQ(t.ends.server.close(), Status::ok);
  };
  const Owner::Answer answer = t.ask(64);
  EXPECT_EQ(answer.status, Status::flushed);
  EXPECT_FALSE(answer.memory);
  t.finish();
}

TEST_P(LeaseApproval, RequestsBeyondALimitAreNotShown) {
  Owner t(GetParam());
  LeaseOptions late;
  late.duration = std::chrono::minutes(59);
  EXPECT_EQ(t.ask(1u << 30, late).refusal, LeaseRefusal::too_long);
  EXPECT_EQ(t.requests, 0);
  t.finish();
}

TEST_P(LeaseApproval, LeasedMemoryHasItsTag) {
  Owner t(GetParam());
  Buffer b = t.server.filled(64, 1);
  for (const std::uint64_t tag : {std::uint64_t{0}, ~std::uint64_t{0}}) {
    LeaseOptions options;
    options.tag = tag;
    ASSERT_EQ(t.ends.server.lease(b.slice(), options), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.leased.size() == 1; }));
    EXPECT_EQ(t.leased[0].tag(), tag);
    EXPECT_EQ(t.read(t.leased[0].region()), filled(64, 1));
    t.leased.clear();
    ASSERT_TRUE(t.until([&] { return t.returned_tags.size() == (tag == 0 ? 1u : 2u); }));
    EXPECT_EQ(t.returned_tags.back(), tag);
  }
  t.finish(b);
}

TEST(LeaseTags, AnEmptyHandleHasNone) { EXPECT_EQ(RemoteMemory().tag(), 0u); }

}  // namespace
}  // namespace lease_approval_test
