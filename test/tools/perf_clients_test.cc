// A serving spinwire-perf with many clients at once.
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "tools/programs.h"

namespace tools_test {

/// A server, and clients of it.
class Served {
 public:
  explicit Served(const Words& more = {}) {
    Words words{bin() + "/spinwire-perf", "--port", "0"};
    words.insert(words.end(), more.begin(), more.end());
    server_ = std::make_unique<Program>(words);
    const std::string address = server_->wait_for("listening on ");
    port_ = address.substr(address.rfind(':') + 1);
    EXPECT_NE(port_, "") << server_->err();
  }

  /// The command line of a client that measures the test with these options.
  [[nodiscard]] Words client(const std::string& test, const Words& more) const {
    Words words{test, "127.0.0.1", "--port", port_};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  /// A client that measures until it is stopped. Returns once it is measured.
  std::unique_ptr<Program> endless(const std::string& test) {
    Words words{bin() + "/spinwire-perf"};
    const Words options = client(test, {"--count", "1000000000000", "--warmup", "0"});
    words.insert(words.end(), options.begin(), options.end());
    auto program = std::make_unique<Program>(words);
    EXPECT_NE(server_->wait_for(test == "rpc" ? "measuring for a " : "measuring for 127.0.0.1:"),
              "")
        << program->err();
    return program;
  }
  void expect_measured(const std::string& test, const Words& more) const {
    Words options{"--count", "300", "--warmup", "20", "--json"};
    options.insert(options.end(), more.begin(), more.end());
    const Outcome o = run("spinwire-perf", client(test, options));
    EXPECT_EQ(o.code, 0) << test << testing::PrintToString(more) << o.err;
    EXPECT_EQ(parse_object(o.out).value("test", ""), test) << o.out;
  }
  [[nodiscard]] Program& server() const { return *server_; }

 private:
  std::unique_ptr<Program> server_;
  std::string port_;
};

void expect_interrupted(Program& client) {
  client.signal(SIGTERM);
  EXPECT_EQ(client.wait(), 1);
  EXPECT_NE(client.err().find("interrupted"), std::string::npos) << client.err();
}

TEST_F(SlowTools, PerfServesManyClientsAtOnce) {
  Served served;
  const auto sender = served.endless("rate");
  const auto caller = served.endless("rpc");
  for (const char* op : {"send", "write", "read", "pong", "atomic"})
    served.expect_measured("lat", {"--op", op});
  served.expect_measured("rpc", {"--window", "1"});
  served.expect_measured("rpc", {"--symmetric", "--sessions", "3", "--window", "8"});
  EXPECT_EQ(served.server().out().find("from what was sent"), std::string::npos);
  expect_interrupted(*sender);
  expect_interrupted(*caller);
  EXPECT_NE(served.server().wait_for(": rate send, 32 bytes, window 64, "), "");
  EXPECT_EQ(served.server().wait_for("rpc, 32 bytes, window 8, 320 calls: "), "all data as sent");
  served.server().signal(SIGTERM);
  EXPECT_EQ(served.server().wait(), 0) << served.server().err();
}

TEST_F(SlowTools, AClientThatDiesDisturbsNoOther) {
  Served served;
  const auto sender = served.endless("rate");
  const auto caller = served.endless("rpc");
  sender->signal(SIGKILL);
  caller->signal(SIGKILL);
  served.expect_measured("lat", {});
  served.expect_measured("rpc", {});
}

TEST_F(SlowTools, ClientsBeyondTheLimitWaitForTheirTurn) {
  for (const char* test : {"lat", "rpc"}) {
    Served served({"--clients", "1"});
    const auto first = served.endless(test);
    for (const char* other : {"lat", "rpc"}) {
      const Outcome o = run("spinwire-perf", served.client(other, {"-n", "300", "--wait", "0.1"}));
      EXPECT_EQ(o.code, 1) << test << other;
      EXPECT_NE(o.err.find("refused"), std::string::npos) << o.err;
    }
    expect_interrupted(*first);
    for (const char* other : {"lat", "rpc"}) served.expect_measured(other, {"--wait", "300"});
  }
}

}  // namespace tools_test
