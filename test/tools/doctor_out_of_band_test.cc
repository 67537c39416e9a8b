// The way of the doctors whose endpoints travel over their link.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <regex>
#include <string>
#include <thread>
#include <utility>

#include "eventually.h"
#include "spinwire/spinwire.h"
#include "tools/doctor_host.h"
#include "tools/doctor_link.h"
#include "tools/programs.h"
#include "tools/scripted_peer.h"

namespace tools_test {
namespace {

/// `setting` is NAME=VALUE.
Outcome compare_set(const DoctorHost& here, const std::string& setting,
                    const std::string& address) {
  Program doctor({"/usr/bin/env", setting, bin() + "/spinwire-doctor", address, "--root",
                  here.root(), "--json"});
  const int code = doctor.wait();
  return {code, doctor.out(), doctor.err()};
}

std::string new_key(const Folder& folder, const std::string& name) {
  const std::string file = folder / name;
  EXPECT_EQ(run("spinwire-keygen", {file}).code, 0);
  return "SPINWIRE_SECURITY_KEY_FILE=" + file;
}

TEST_F(Tools, DoctorsExchangeEndpointsWithACommonKeyOnly) {
  const DoctorHost host;
  const Folder keys;
  const std::string key = new_key(keys, "key");
  const Serving server(host, {key});
  const Outcome o = compare_set(host, key, server.address());
  EXPECT_TRUE(has(o, "out-of-band", "ok")) << o.out << o.err;
  const Outcome without = compare_set(host, "SPINWIRE_SECURITY_KEY_FILE=", server.address());
  EXPECT_TRUE(has(without, "out-of-band", "note")) << without.out << without.err;
  EXPECT_NE(without.out.find("there: unauthenticated"), std::string::npos) << without.out;
  const Outcome other = compare_set(host, new_key(keys, "other"), server.address());
  EXPECT_TRUE(has(other, "out-of-band", "note")) << other.out << other.err;
}

/// Stands between a client and a server, and tells the client that the engine listens at port 1,
/// where nobody does. A firewall that closes the engine's port has the same effect.
class PortCloser {
 public:
  explicit PortCloser(const std::string& address) : server_(address) {
    thread_ = std::thread([this] { run(); });
  }
  PortCloser(const PortCloser&) = delete;
  PortCloser& operator=(const PortCloser&) = delete;
  ~PortCloser() { thread_.join(); }
  [[nodiscard]] std::string address() const { return listener_.address(); }

 private:
  void run() {
    const int client = ::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC);
    if (copy(client, server_.fd())) {
      const std::string facts =
          std::regex_replace(server_.receive(), std::regex("engine.port=[0-9]+"), "engine.port=1");
      const std::string bytes = frame(facts);
      EXPECT_GT(::send(client, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
      pollfd polled[] = {{client, POLLIN, 0}, {server_.fd(), POLLIN, 0}};
      bool goes_on = true;
      while (goes_on && ::poll(polled, 2, -1) > 0)
        for (const auto& [from, to] : {std::pair(0, 1), std::pair(1, 0)})
          if (polled[from].revents != 0) goes_on = goes_on && copy(polled[from].fd, polled[to].fd);
    }
    ::close(client);
  }
  /// What has come; false: the end.
  static bool copy(int from, int to) {
    char some[65536];
    const ssize_t got = ::recv(from, some, sizeof some, 0);
    return got > 0 && ::send(to, some, static_cast<std::size_t>(got), MSG_NOSIGNAL) == got;
  }

  SilentPeer listener_;
  LinkClient server_;
  std::thread thread_;
};

TEST_F(Tools, DoctorConnectsOutOfBandWhereTheEnginesPortIsClosed) {
  const DoctorHost host;
  const Serving server(host);
  const PortCloser closer(server.address());
  const Outcome o = compare(host, closer.address());
  EXPECT_TRUE(has(o, "connection", "error")) << o.out << o.err;
  EXPECT_TRUE(has(o, "out-of-band", "ok")) << o.out << o.err;
}

TEST_F(Tools, DoctorNamesWhyEndpointsDoNotConnect) {
  struct Case {
    const char *facts, *answer, *severity, *text;
  };
  for (const Case& test :
       {Case{"endpoint.exchange=1\n", "error=system\n", "warning", "there: system"},
        Case{"endpoint.exchange=1\n", "error=unauthenticated\n", "note", "there: unauthenticated"},
        Case{"endpoint.exchange=1\n", "endpoint=nonsense\n", "warning", "nonsense"},
        Case{"endpoint.exchange=1\n", "", "warning", "it begins with ''"},
        Case{"", "", "note", "exchanges no endpoints"}}) {
    const ScriptedPeer peer(
        frame(std::string("engine.port=1\nengine.device=softverbs\n") + test.facts),
        frame(test.answer, 1, kEndpointFrame));
    const DoctorHost host;
    const Outcome o = compare(host, peer.address());
    EXPECT_TRUE(has(o, "out-of-band", test.severity)) << test.answer << o.out << o.err;
    const std::size_t at = o.out.find("{\"check\":\"out-of-band");
    EXPECT_NE(o.out.find(test.text, at), std::string::npos) << test.text << o.out;
  }
}

/// The server goes on, whatever the endpoint is, and takes one of each client.
TEST_F(Tools, DoctorTakesOneEndpointOfAClient) {
  const DoctorHost host;
  Serving server(host);
  for (const std::string& text :
       {std::string("endpoint=nonsense\n"), std::string(), std::string(16 << 10, 'x')}) {
    const LinkClient client(server.address());
    client.send("a=b\n");
    EXPECT_NE(client.receive().find("endpoint.exchange=1\n"), std::string::npos);
    client.send(text, kEndpointFrame);
    EXPECT_EQ(client.receive(kEndpointFrame), "error=invalid_argument\n");
    client.send(text, kEndpointFrame);
    EXPECT_EQ(client.receive(kEndpointFrame), "") << "it has left";
  }
  const Outcome o = compare(host, server.address());
  EXPECT_EQ(o.code, 0) << o.out;
  EXPECT_EQ(server.stop(), 0);
  EXPECT_EQ(server.err(), "");
}

/// A write with an immediate is a message without bytes: no echo, and no end of the server.
TEST_F(Tools, DoctorSurvivesAClientThatWritesWithAnImmediate) {
  const DoctorHost host;
  Serving server(host);
  bool is_closed = false;
  {
    const LinkClient client(server.address());
    client.send("a=b\n");
    const std::string facts = client.receive();
    const std::size_t at = facts.find("engine.port=") + 12;
    auto engine = spinwire::Engine::open(spinwire::Config{});
    ASSERT_TRUE(engine) << engine.error().message();
    spinwire::BufferSlice bytes = engine->allocate(32);
    spinwire::ConnectOptions options;
    options.handlers.on_message = [&](spinwire::Connection c, spinwire::Message& message) {
      spinwire::RemoteRegion region;
      ASSERT_EQ(message.size(), sizeof region);
      std::memcpy(&region, message.data(), sizeof region);
      EXPECT_EQ(c.write_with_imm(bytes, region.slice(0, 32), 7), spinwire::Status::ok);
    };
    options.handlers.on_closed = [&](spinwire::Connection, const spinwire::Error&) {
      is_closed = true;
    };
    auto connection =
        engine->connect("127.0.0.1:" + facts.substr(at, facts.find('\n', at) - at), options);
    ASSERT_TRUE(connection) << connection.error().message();
    EXPECT_TRUE(waiting::eventually([&] {
      (void)engine->poll();
      return is_closed;
    }));
    client.send("", kEndFrame);
  }
  const Outcome o = compare(host, server.address());
  EXPECT_EQ(o.code, 0) << o.out;
  EXPECT_EQ(server.stop(), 0) << "a signal has ended it";
}

}  // namespace
}  // namespace tools_test
