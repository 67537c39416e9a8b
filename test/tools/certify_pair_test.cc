// spinwire-doctor certify between two hosts, which are two processes on softverbs here, with
// programs that play a device.
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "eventually.h"
#include "spinwire/spinwire.h"
#include "tools/certify_programs.h"
#include "tools/doctor_link.h"
#include "tools/scripted_peer.h"

namespace tools_test {
namespace {

const std::string kCertifyNonce(32, '7');

/// A doctor that certifies with others, on a free port of loopback.
class CertifyServer {
 public:
  CertifyServer(const CertifyPrograms& programs, const Words& settings, Words options = {})
      : program_(programs.command(settings, with_serve(std::move(options)))),
        address_(program_.wait_for("listening on ")) {
    EXPECT_EQ(address_.find("127.0.0.1:"), 0u) << program_.err();
  }
  [[nodiscard]] const std::string& address() const { return address_; }
  /// Ends it by a signal.
  Outcome stop() {
    program_.signal(SIGTERM);
    const int code = program_.wait();
    return {code, program_.out(), program_.err()};
  }

 private:
  static Words with_serve(Words options) {
    options.insert(options.end(), {"--serve", "127.0.0.1:0"});
    return options;
  }

  Program program_;
  std::string address_;
};

/// A key for both hosts, as a setting.
std::string key_setting(const Folder& folder, const std::string& name) {
  const std::string file = folder / name;
  EXPECT_EQ(run("spinwire-keygen", {file}).code, 0);
  return "SPINWIRE_SECURITY_KEY_FILE=" + file;
}

TEST(CertifyPair, EachHostRunsTheTestsAndTheWayBetweenIsMeasured) {
  const CertifyPrograms programs;
  const Folder keys;
  const std::string key = key_setting(keys, "key");
  CertifyServer server(programs, {key, "FAKE_TESTS=Good.One Good.Two Calls.Three"});
  {
    const Outcome ran =
        programs.certify({key, "FAKE_TESTS=Good.One Calls.Two"}, {server.address()});
    EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
    expect_text(ran, "device softverbs: no departure\n");
    expect_text(ran, "ok       connection   a connection after a handshake over TCP works\n");
    expect_text(ran, "ok       datagrams    calls over datagrams work\n");
    expect_text(ran, "ok       conformance  passed: 2 tests\n");
    expect_text(ran, "ok       engine       passed: 1 test\n");
    expect_text(ran, "ok       conformance there passed: 3 tests\n");
    expect_text(ran, "ok       engine there passed: 2 tests\n");
    expect_text(ran, "ok       calls there  passed: 1 test\n");
    for (const char* figure :
         {"send, round trip of 32 bytes: 9.00 us, ib_send_lat 10.00 us",
          "write, round trip of 32 bytes: 9.00 us, ib_write_lat 10.00 us",
          "rate of messages of 64 bytes: 2.10 million/s, ib_send_bw 2.00 million/s"})
      expect_text(ran, figure);
  }
  const Outcome served = server.stop();
  EXPECT_EQ(served.code, 0);
  EXPECT_EQ(served.err, "");
  expect_text(served, "report for 127.0.0.1:\nok       conformance  passed: 3 tests\n");
}

/// Both doctors are on one host, each at its own port, as with a cable between two ports.
TEST(CertifyPair, MeasuresBetweenTwoPortsOfOneHost) {
  const CertifyPrograms programs;
  const std::string open = "SPINWIRE_SECURITY_OPEN=true";
  const CertifyServer server(programs, {open, "FAKE_PORT=1"}, {"--port", "1"});
  const Outcome ran =
      programs.certify({open, "FAKE_PORT=2"}, {"--port", "2", "--json", server.address()});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  for (const char* check : {"connection", "out-of-band", "latency", "bandwidth", "engine there"})
    EXPECT_TRUE(has(ran, check, "ok")) << check << ran.out;
  // Its second port has none, which shows that the engine uses it.
  EXPECT_TRUE(has(ran, "datagrams", "note")) << ran.out;
}

TEST(CertifyPair, NamesWhatFailsOnTheOtherHost) {
  const CertifyPrograms here;
  CertifyPrograms there;
  there.remove("ib_send_lat");
  const std::string open = "SPINWIRE_SECURITY_OPEN=true";
  CertifyServer server(there, {open, "FAKE_TESTS=A.First A.Fails A.Known", "PATH=" + there.path()});
  const Outcome ran = here.certify({open}, {server.address()});
  EXPECT_EQ(ran.code, 2) << ran.out << ran.err;
  expect_text(ran, "device softverbs: there are departures\n");
  expect_text(ran,
              "error    engine there A.Fails failed\n"
              "         read: x.cc:7: Failure; the value is 3\n"
              "         run:  # the report of the doctor there has the command");
  expect_text(ran, "warning  conformance there 1 case: a known departure: no such check\n");
  expect_text(ran,
              "send, round trip of 32 bytes: not measured\n"
              "         read: there: ib_send_lat is missing");
  expect_text(ran, "ib_write_lat 10.00 us, ratio 0.900");
  expect_text(ran, "ok       engine       passed: 2 tests\n");
  // A command is printed on the host where it is to run.
  EXPECT_EQ(ran.out.find("--gtest_filter"), std::string::npos) << ran.out;
  expect_text(server.stop(), "--gtest_filter=A.Fails\n");
}

TEST(CertifyPair, ServesOnlyWithAKeyOrOpen) {
  const CertifyPrograms programs;
  const Outcome ran = programs.certify({}, {"--serve"});
  EXPECT_EQ(ran.code, 3) << ran.out;
  EXPECT_NE(ran.err.find("there is no key"), std::string::npos) << ran.err;
}

TEST(CertifyPair, RunsNothingForAHostWithoutTheKey) {
  const CertifyPrograms programs;
  const Folder keys;
  const CertifyServer server(programs, {key_setting(keys, "key")});
  for (const std::string& setting :
       {key_setting(keys, "other"), std::string("SPINWIRE_SECURITY_OPEN=true")}) {
    const Outcome ran = programs.certify({setting}, {server.address()});
    EXPECT_EQ(ran.code, 2) << ran.out << ran.err;
    expect_text(ran, "error    connection   no connection after a handshake over TCP\n");
    expect_text(ran, "error    certify      the doctor there runs nothing for this one\n");
    EXPECT_EQ(ran.out.find("there passed"), std::string::npos) << ran.out;
  }
}

TEST(CertifyPair, SaysThatTheOtherDoctorDoesNotCertify) {
  const CertifyPrograms programs;
  Program plain({bin() + "/spinwire-doctor", "--serve", "127.0.0.1:0"});
  const std::string address = plain.wait_for("listening on ");
  const Outcome ran = programs.certify({}, {address});
  EXPECT_EQ(ran.code, 2) << ran.out << ran.err;
  expect_text(ran,
              "the doctor there does not certify\n         read: 127.0.0.1\n"
              "         run:  spinwire-doctor certify --device DEVICE --serve ADDRESS  # there\n");
}

/// Connects an engine to that of the facts, and says the text until it comes back.
void send_to_engine(const std::string& facts, const std::string& text) {
  bool echoed = false;
  bool said = false;
  std::string closed;
  auto engine = spinwire::Engine::open(spinwire::Config{});
  ASSERT_TRUE(engine) << engine.error().message();
  const std::size_t at = facts.find("engine.port=") + 12;
  spinwire::ConnectOptions options;
  options.handlers.on_message = [&](spinwire::Connection c, spinwire::Message& message) {
    // The first one is the engine's region.
    if (!said) {
      EXPECT_EQ(c.send_copy(std::as_bytes(std::span(text))), spinwire::Status::ok);
      said = true;
      return;
    }
    echoed =
        std::string_view(reinterpret_cast<const char*>(message.data()), message.size()) == text;
  };
  options.handlers.on_closed = [&](spinwire::Connection, const spinwire::Error& e) {
    closed = "closed: " + e.message();
  };
  auto connection =
      engine->connect("127.0.0.1:" + facts.substr(at, facts.find('\n', at) - at), options);
  ASSERT_TRUE(connection) << connection.error().message();
  (void)waiting::eventually([&] {
    (void)engine->poll();
    return echoed || !closed.empty();
  });
  EXPECT_TRUE(echoed) << (said ? "no echo; " : "no region; ") << closed << engine->describe();
}

TEST(CertifyPair, RunsNothingBeforeAnEngineHasSaidTheNonce) {
  const CertifyPrograms programs;
  const CertifyServer server(programs, {"SPINWIRE_SECURITY_OPEN=true"});
  for (const std::string& said : {std::string(), std::string(32, '8'), std::string("7777")}) {
    const LinkClient stranger(server.address());
    stranger.send("certify=" + kCertifyNonce + "\n");
    const std::string facts = stranger.receive();
    EXPECT_NE(facts.find("certify=softverbs\n"), std::string::npos) << facts;
    if (!said.empty()) send_to_engine(facts, said);
    stranger.send("id=1\nrequest=start\nmeasurement=1\nprogram=1\n");
    EXPECT_EQ(stranger.receive(),
              "error=it has seen no connection of this doctor's engine\nid=1\n");
    EXPECT_EQ(stranger.receive(), "");
  }
}

TEST(CertifyPair, AClientChoosesAMeasurementOnly) {
  const CertifyPrograms programs;
  const CertifyServer server(programs, {"SPINWIRE_SECURITY_OPEN=true"});
  const LinkClient client(server.address());
  client.send("certify=" + kCertifyNonce + "\n");
  send_to_engine(client.receive(), kCertifyNonce);
  client.send("id=1\nrequest=begin\n");
  EXPECT_EQ(client.receive(), "certify=yes\nid=1\n");
  for (const char* wrong :
       {"measurement=12\nprogram=1", "measurement=0\nprogram=1", "measurement=1\nprogram=3",
        "program=1", "measurement=1 -x\nprogram=1"}) {
    client.send(std::string("id=2\nrequest=start\n") + wrong + "\n");
    EXPECT_EQ(client.receive(), "error=there is no such measurement\nid=2\n") << wrong;
  }
  client.send("id=3\nrequest=run\nprogram=/bin/sh\n");
  EXPECT_EQ(client.receive(), "error=there is no such request\nid=3\n");
  client.send("id=4\nrequest=start\nmeasurement=3\nprogram=1\n");
  const std::string started = client.receive();
  EXPECT_EQ(started.find("id=4\noperations=40000\nport="), 0u) << started;
}

/// One more endpoint, as after an answer that came too late: the certification goes on.
TEST(CertifyPair, IgnoresAnEndpointThatComesTooLate) {
  const CertifyPrograms programs;
  const std::string endpoint = frame("error=system\n", 1, kEndpointFrame);
  const ScriptedPeer peer(
      frame("engine.port=1\nengine.device=softverbs\nendpoint.exchange=1\ncertify=softverbs\n"),
      endpoint + endpoint + frame("id=1\nerror=it has read this\n"));
  const Outcome ran = programs.certify({}, {peer.address()});
  EXPECT_EQ(ran.code, 2) << ran.err;
  expect_text(ran, "error    certify      the doctor there runs nothing for this one\n");
  expect_text(ran, "it has read this");
}

/// A client that leaves holds up no other one.
TEST(CertifyPair, TestsEndWhenTheClientLeaves) {
  const CertifyPrograms programs;
  const CertifyServer server(programs, {"SPINWIRE_SECURITY_OPEN=true", "FAKE_TESTS=A.Hangs"});
  {
    const LinkClient client(server.address());
    client.send("certify=" + kCertifyNonce + "\n");
    send_to_engine(client.receive(), kCertifyNonce);
    client.send("id=1\nrequest=begin\n");
    EXPECT_EQ(client.receive(), "certify=yes\nid=1\n");
    client.send("id=2\nrequest=tests\nseconds=3600\n");
  }
  const Outcome next = run("spinwire-doctor", {server.address()});
  EXPECT_EQ(next.code, 0) << next.out << next.err;
}

}  // namespace
}  // namespace tools_test
