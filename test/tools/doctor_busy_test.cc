// Clients of a doctor that serves another one: they are told so, and wait.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <optional>
#include <string>
#include <thread>

#include "tools/doctor_host.h"
#include "tools/doctor_link.h"
#include "tools/programs.h"
#include "tools/scripted_peer.h"

namespace tools_test {
namespace {

Words doctor_command(const DoctorHost& host, const std::string& address) {
  return {bin() + "/spinwire-doctor", address, "--root", host.root(), "--json"};
}

/// The server serves the first client for as long as the test wants: until it has both lines.
TEST_F(Tools, DoctorWaitsWhileTheOtherOneServesOthers) {
  DoctorHost there;
  there.put("probe/first_limit_ms", "300000");
  Serving server(there);
  const DoctorHost host;
  const LinkClient first(server.address());
  first.send("a=b\n");
  EXPECT_NE(first.receive().find("engine.port="), std::string::npos);
  Program second(doctor_command(host, server.address()));
  EXPECT_EQ(second.wait_for_error("serves another one; this one waits; to be served before it: "),
            "1");
  Program third(doctor_command(host, server.address()));
  EXPECT_EQ(third.wait_for_error("serves another one; this one waits; to be served before it: "),
            "2");
  first.send("", kEndFrame);
  for (Program* each : {&second, &third}) {
    EXPECT_EQ(each->wait(), 0) << each->out() << each->err();
    EXPECT_NE(each->out().find(finding("connection", "ok")), std::string::npos) << each->out();
  }
  EXPECT_EQ(server.stop(), 0);
  EXPECT_EQ(server.err(), "") << "nobody has left, and nobody was no doctor";
}

/// An older doctor would take such a frame for no answer of a doctor.
TEST_F(Tools, DoctorTellsOnlyThoseThatItIsBusyThatUnderstandIt) {
  const DoctorHost host;
  const Serving server(host);
  const LinkClient first(server.address());
  first.send("a=b\n");
  EXPECT_NE(first.receive(), "");
  const LinkClient older(server.address());
  older.send("a=b\n");
  const LinkClient newer(server.address());
  newer.send("waits=1\n");
  EXPECT_EQ(newer.receive(kBusyFrame), "ahead=2\n");
  first.send("", kEndFrame);
  EXPECT_NE(older.receive().find("engine.port="), std::string::npos) << "its facts come first";
}

/// Its place is free, and the next one is told.
TEST_F(Tools, DoctorForgetsAClientThatLeavesWhileItWaits) {
  const DoctorHost host;
  Serving server(host);
  const LinkClient first(server.address());
  first.send("a=b\n");
  EXPECT_NE(first.receive(), "");
  std::optional<LinkClient> leaving(std::in_place, server.address());
  leaving->send("waits=1\n");
  EXPECT_EQ(leaving->receive(kBusyFrame), "ahead=1\n");
  const LinkClient last(server.address());
  last.send("waits=1\n");
  EXPECT_EQ(last.receive(kBusyFrame), "ahead=2\n");
  leaving.reset();
  std::string ahead = "ahead=2\n";
  while (ahead == "ahead=2\n") ahead = last.receive(kBusyFrame);
  EXPECT_EQ(ahead, "ahead=1\n");
  first.send("", kEndFrame);
  std::string facts = last.receive();
  EXPECT_NE(facts.find("engine.port="), std::string::npos) << facts;
  EXPECT_EQ(server.stop(), 0);
  EXPECT_EQ(server.err(), "");
}

/// Connections that say nothing hold all places, until their time for that is over.
TEST_F(Tools, DoctorGivesThePlacesOfSilentClientsToOthers) {
  DoctorHost there;
  there.put("probe/first_limit_ms", "300000");
  there.put("probe/facts_limit_ms", "1000");
  Serving server(there);
  const LinkClient first(server.address());
  first.send("a=b\n");
  EXPECT_NE(first.receive(), "");
  std::list<LinkClient> silent;
  for (int i = 0; i < 63; ++i) silent.emplace_back(server.address());
  const LinkClient half(server.address());
  EXPECT_EQ(::send(half.fd(), frame("a=b\n").data(), 14, MSG_NOSIGNAL), 14);
  const LinkClient next(server.address());
  next.send("waits=1\n");
  for (const LinkClient& each : silent) {
    char end[12];
    ASSERT_EQ(::recv(each.fd(), end, sizeof end, MSG_WAITALL), 12) << "it has lost its place";
  }
  std::string ahead = "none yet";
  while (!ahead.empty() && ahead != "ahead=1\n") ahead = next.receive(kBusyFrame);
  EXPECT_EQ(ahead, "ahead=1\n") << "the half of a frame holds no place either";
  EXPECT_EQ(server.stop(), 0);
  EXPECT_EQ(server.err(), "");
}

/// A server that is always busy.
TEST_F(Tools, DoctorDoesNotWaitForever) {
  DoctorHost host;
  host.put("probe/busy_limit_ms", "1");
  const std::string busy = frame("ahead=1\n", 1, kBusyFrame);
  std::string bytes;
  for (int i = 0; i < 50000; ++i) bytes += busy;
  const ScriptedPeer peer(bytes);
  const Outcome o = compare(host, peer.address());
  EXPECT_TRUE(has(o, "tcp", "error")) << o.out << o.err;
  EXPECT_NE(o.out.find("has served others for 0.001 s"), std::string::npos) << o.out;
  EXPECT_EQ(o.code, 2);
}

/// What it says of those before us is a number, or nothing.
TEST_F(Tools, DoctorPrintsNoTextOfABusyServer) {
  const DoctorHost host;
  const ScriptedPeer peer(frame("ahead=3;evil\n", 1, kBusyFrame) +
                          frame("x=evil\n", 1, kBusyFrame) + frame("ahead=7\n", 1, kBusyFrame) +
                          frame("spinwire=9.9.9\n"));
  const Outcome o = compare(host, peer.address());
  EXPECT_EQ(o.err.find("evil"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("to be served before it: 7\n"), std::string::npos) << o.err;
  EXPECT_NE(o.out.find("9.9.9 there"), std::string::npos) << o.out;
}

/// A server that says something else in each frame fills no terminal.
TEST_F(Tools, DoctorPrintsOneLineASecondOfABusyServer) {
  std::string bytes;
  for (int i = 0; i < 2000; ++i) bytes += frame(i % 2 ? "ahead=1\n" : "ahead=2\n", 1, kBusyFrame);
  const DoctorHost host;
  const ScriptedPeer peer(bytes + frame("spinwire=9.9.9\n"));
  const auto began = Clock::now();
  const Outcome o = compare(host, peer.address());
  const auto seconds = std::chrono::ceil<std::chrono::seconds>(Clock::now() - began).count();
  EXPECT_NE(o.out.find("9.9.9 there"), std::string::npos) << o.out;
  EXPECT_GE(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
  EXPECT_LE(std::count(o.err.begin(), o.err.end(), '\n'), 1 + seconds) << o.err;
}

/// Each frame of a busy server gives it new time: together they come for longer than the limit of
/// silence.
TEST_F(SlowTools, DoctorWaitsOnWhileABusyServerReports) {
  DoctorHost host;
  host.put("probe/first_limit_ms", "6000");
  SilentPeer peer;
  std::thread server([&peer] {
    const int client = ::accept4(peer.fd(), nullptr, nullptr, SOCK_CLOEXEC);
    const std::string busy = frame("ahead=1\n", 1, kBusyFrame);
    const auto end = Clock::now() + std::chrono::seconds(8);
    while (Clock::now() < end && ::send(client, busy.data(), busy.size(), MSG_NOSIGNAL) > 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const std::string facts = frame("spinwire=9.9.9\n");
    (void)!::send(client, facts.data(), facts.size(), MSG_NOSIGNAL);
    ::close(client);
  });
  const Outcome o = compare(host, peer.address());
  server.join();
  EXPECT_NE(o.out.find("9.9.9 there"), std::string::npos) << o.out << o.err;
}

}  // namespace
}  // namespace tools_test
