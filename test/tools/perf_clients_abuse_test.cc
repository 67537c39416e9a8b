// Clients of a serving spinwire-perf that are admitted, and do to it what spinwire-perf does not.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "../../tools/common/perf_protocol.h"
#include "spinwire/spinwire.h"
#include "tools/programs.h"

namespace tools_test {
namespace {

using namespace spinwire;  // NOLINT: the names of a client
using spinwire::tools::PerfHead;

constexpr Method kAsk = 2, kEnd = 3, kFirstPlace = 16;

/// CallAsk and CallAdmission of perf_rpc.h.
struct Ask {
  PerfHead head{.kind = 5};
  std::uint64_t size = 32, reply_size = 32, total = 1000, warmup = 0, seed = 1;
  std::uint32_t window = 1, batch = 1, sessions = 1, unused = 0;
  std::array<char, 172> caller{};
};
struct Admission {
  PerfHead head{.kind = 7};
  Method method = kFirstPlace;
};

struct Answer {
  Status status = Status::timed_out;
  std::string text;
};

/// Calls a method of the server once, on a session of its own.
template <typename T>
Answer call(const std::string& address, Method method, const T& request) {
  Config c;
  c.memory.hugepages = HugepagePolicy::off;
  Answer answer;  // the callbacks use these until the engine ends
  bool is_over = false;
  auto engine = Engine::open(c);
  EXPECT_TRUE(engine) << engine.error().message();
  SessionOptions options;
  options.on_ready = [&](Session session) {
    const Status status =
        session.call(method, std::as_bytes(std::span(&request, 1)), [&](Reply& reply) {
          answer = {reply.status(), std::string(reply.text())};
          is_over = true;
        });
    EXPECT_EQ(status, Status::ok);
  };
  options.on_closed = [&](Session, const Error&) { is_over = true; };
  const auto session = engine->open_session(address, options);
  EXPECT_TRUE(session) << session.error().message();
  const auto end = Clock::now() + kLimit;
  while (!is_over && Clock::now() < end) (void)engine->poll();
  return answer;
}

class ServingPerf {
 public:
  ServingPerf()
      : program_({bin() + "/spinwire-perf", "--port", "0"}),
        address_(program_.wait_for("listening on ")) {
    EXPECT_NE(address_, "") << program_.err();
  }
  [[nodiscard]] const std::string& address() const { return address_; }
  [[nodiscard]] std::string port() const { return address_.substr(address_.rfind(':') + 1); }
  Program& program() { return program_; }

 private:
  Program program_;
  std::string address_;
};

TEST_F(Tools, PerfLetsNoClientEndAnothersMeasurement) {
  ServingPerf server;
  Program client({bin() + "/spinwire-perf", "rpc", "127.0.0.1", "--port", server.port(), "--count",
                  "1000000000000", "--warmup", "0"});
  EXPECT_EQ(server.program().wait_for("measuring for "), "a caller");
  const Answer answer = call(server.address(), kEnd, Admission{});
  EXPECT_EQ(answer.status, Status::refused);
  EXPECT_EQ(answer.text, "no measurement was begun");
  client.signal(SIGTERM);
  EXPECT_EQ(client.wait(), 1);
  EXPECT_NE(client.err().find("interrupted"), std::string::npos) << client.err();
}

TEST_F(Tools, PerfCallsBackAtTheClientsOwnHostOnly) {
  ServingPerf server;
  Ask ask;
  constexpr std::string_view kElsewhere = "127.0.0.9:9";
  std::copy(kElsewhere.begin(), kElsewhere.end(), ask.caller.begin());
  const Answer answer = call(server.address(), kAsk, ask);
  EXPECT_EQ(answer.status, Status::refused);
  EXPECT_NE(answer.text.find("calls back at 127.0.0.1 only"), std::string::npos) << answer.text;
}

}  // namespace
}  // namespace tools_test
