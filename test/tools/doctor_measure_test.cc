// What a doctor says of measurements that fail: it measures an engine of this process, which plays
// the other host.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "rpc/rpc_ends.h"
#include "tools/doctor_host.h"
#include "tools/doctor_link.h"
#include "tools/programs.h"

namespace doctor_measure_test {
namespace {

using engine_test::Connection;
using engine_test::Node;
using engine_test::Status;
using tools_test::DoctorHost;
using tools_test::has;
using tools_test::Outcome;

/// How the engine behaves.
struct Play {
  bool holds_a_call = false;  ///< the first one, until its request has come again
  bool refuses = false;       ///< that call
  bool revokes = false;       ///< the memory that the client is to write
  bool closes = false;        ///< the connection, at its first message
  bool hangs = false;         ///< from its first message on, until the doctor has ended
};

class PlayedDoctor {
 public:
  explicit PlayedDoctor(const Play& play) : play_(play), node_(rpc_test::rpc_config()) {
    memory_ = node_.buffer(kRegionBytes, spinwire::Pool::lease);
    const auto region = node_.engine.expose(memory_.slice(), spinwire::Access::remote_write);
    EXPECT_TRUE(region);
    region_ = *region;
    if (play_.revokes) {
      EXPECT_EQ(node_.engine.revoke(region_), Status::ok);
    }
    node_.on_ready = [this](Connection c) {
      const auto bytes = std::as_bytes(std::span(&region_, 1));
      EXPECT_EQ(c.send_copy(bytes), Status::ok);
    };
    node_.on_message = [this](Connection c, spinwire::Message& message) {
      if (play_.closes) return (void)c.close();
      is_hanging_ = play_.hangs;
      if (is_hanging_) return;
      peer_ = c;
      echo_.assign(message.data(), message.data() + message.size());
    };
    EXPECT_TRUE(node_.engine.serve(kEchoMethod, [this](spinwire::Request& r) {
      if (std::exchange(play_.holds_a_call, false)) {
        held_ = r.defer();
        is_held_ = true;
      } else {
        EXPECT_EQ(r.reply(r.bytes()), Status::ok);
      }
    }));
    node_.listen();
    listen();
  }
  PlayedDoctor(const PlayedDoctor&) = delete;
  PlayedDoctor& operator=(const PlayedDoctor&) = delete;
  ~PlayedDoctor() { ::close(fd_); }

  /// What the doctor finds between both.
  Outcome examine() {
    DoctorHost here;
    tools_test::Words command{tools_test::bin() + "/spinwire-doctor",
                              "127.0.0.1:" + std::to_string(port_), "--root", here.root(),
                              "--json"};
    if (play_.hangs) {
      here.put("probe/echo_limit_ms", "100").put("probe/close_limit_ms", "100");
      command.insert(command.begin(), {"/usr/bin/env", "SPINWIRE_CONNECTIONS_CLOSE_TIMEOUT=1h"});
    }
    tools_test::Program doctor(command);
    const int client = is_readable(fd_) ? ::accept(fd_, nullptr, nullptr) : -1;
    std::array<char, 65536> some{};
    if (client < 0 || !is_readable(client) || ::recv(client, some.data(), some.size(), 0) <= 0) {
      ADD_FAILURE() << "the doctor has sent no facts";
      if (client >= 0) ::close(client);
      return {-1, doctor.out(), doctor.err()};
    }
    const std::string& address = node_.listener.address();
    const std::string facts = tools_test::frame(
        "engine.port=" + address.substr(address.rfind(':') + 1) + "\nengine.device=softverbs\n");
    EXPECT_EQ(::send(client, facts.data(), facts.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(facts.size()));
    EXPECT_TRUE(engine_test::until({}, [&] {
      if (!is_hanging_) (void)node_.poll();
      work();
      return ::recv(client, some.data(), some.size(), MSG_DONTWAIT) == 0;
    }));
    ::close(client);
    const int code = doctor.wait();
    return {code, doctor.out(), doctor.err()};
  }

 private:
  /// Waits no longer than a run of a program may last.
  static bool is_readable(int fd) {
    pollfd polled{fd, POLLIN, 0};
    constexpr std::chrono::milliseconds kMost = tools_test::kLimit;
    return ::poll(&polled, 1, static_cast<int>(kMost.count())) > 0;
  }
  static constexpr std::size_t kRegionBytes = std::size_t{256} << 10;
  static constexpr spinwire::Method kEchoMethod = 1;

  void listen() {
    sockaddr_in address{};
    fd_ = tools_test::tcp_socket(address, 0);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(fd_, 1), 0);
    socklen_t length = sizeof address;
    EXPECT_EQ(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port_ = ntohs(address.sin_port);
  }
  void work() {
    if (!echo_.empty() && peer_.send_copy(echo_) == Status::ok) echo_.clear();
    if (!is_held_ || node_.engine.rpc_stats().duplicates == 0) return;
    is_held_ = false;
    EXPECT_EQ(play_.refuses ? held_.refuse("no") : held_.reply(std::span<const std::byte>()),
              Status::ok);
  }

  Play play_;
  Node node_;
  spinwire::Buffer memory_;
  spinwire::RemoteRegion region_;
  Connection peer_;
  std::vector<std::byte> echo_;  ///< still to be sent
  spinwire::PendingCall held_;
  bool is_held_ = false;
  bool is_hanging_ = false;
  int fd_ = -1;
  int port_ = 0;
};

class ToolsDoctorMeasures : public testing::Test {
 protected:
  void SetUp() override {
    if (engine_test::device_name() != "softverbs" || rpc_test::over_connections())
      GTEST_SKIP() << "the doctor uses softverbs and datagrams here";
  }
};

TEST_F(ToolsDoctorMeasures, ARefusedWriteIsNoLossOfPackets) {
  const Outcome o = PlayedDoctor({.holds_a_call = true, .revokes = true}).examine();
  EXPECT_TRUE(has(o, "loss", "note")) << o.out << o.err;
  EXPECT_TRUE(has(o, "latency", "ok")) << o.out;
  EXPECT_TRUE(has(o, "connection", "error")) << o.out;
  EXPECT_EQ(o.out.find("packets are lost"), std::string::npos) << o.out;
  EXPECT_EQ(o.code, 2);
}

TEST_F(ToolsDoctorMeasures, LossIsFoundAlsoIfACallIsNotAnswered) {
  const Outcome o = PlayedDoctor({.holds_a_call = true, .refuses = true}).examine();
  EXPECT_TRUE(has(o, "datagrams", "error")) << o.out << o.err;
  EXPECT_TRUE(has(o, "loss", "note")) << o.out;
  EXPECT_TRUE(has(o, "bandwidth", "ok")) << o.out;
  EXPECT_EQ(o.code, 2);
}

TEST_F(ToolsDoctorMeasures, SaysThatTheRateIsNotMeasured) {
  const Outcome o = PlayedDoctor({.closes = true}).examine();
  EXPECT_TRUE(has(o, "datagrams", "ok")) << o.out << o.err;
  EXPECT_TRUE(has(o, "connection", "error")) << o.out;
  EXPECT_TRUE(has(o, "bandwidth", "note")) << o.out;
  EXPECT_NE(o.out.find("not measured"), std::string::npos) << o.out;
  EXPECT_EQ(o.code, 2);
}

/// The doctor has given up the connection before it is closed. The callbacks that its engine still
/// runs find what they write to: under the address sanitizer, anything else fails.
TEST_F(ToolsDoctorMeasures, APeerThatHangsIsGivenUp) {
  const Outcome o = PlayedDoctor({.hangs = true}).examine();
  EXPECT_TRUE(has(o, "datagrams", "ok")) << o.out << o.err;
  EXPECT_TRUE(has(o, "connection", "error")) << o.out;
  EXPECT_NE(o.out.find("no echo came"), std::string::npos) << o.out;
  EXPECT_EQ(o.err, "");
  EXPECT_EQ(o.code, 2);
}

}  // namespace
}  // namespace doctor_measure_test
