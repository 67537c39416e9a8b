// gdb's printers of the public types, and the static probes, as include/tracing.md describes them.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "spinwire/observe.h"
#include "tools/programs.h"

namespace debugging_test {
namespace {

using tools_test::Folder;
using tools_test::Program;
using tools_test::read_file;

/// Replaces what differs from run to run: addresses, ports, and numbers of calls.
std::string without_chance(std::string text) {
  text = std::regex_replace(text, std::regex("0x[0-9a-f]+"), "ADDRESS");
  text = std::regex_replace(text, std::regex("127\\.0\\.0\\.1:[0-9]+"), "PEER");
  return std::regex_replace(text, std::regex("call [0-9]+ of"), "call N of");
}

constexpr const char* kNoGdb =
    "gdb is missing (tools/install-deps.sh --gdb), or may run no program here";

/// Whether gdb is installed, and the system lets it trace a program.
bool can_debug() {
  if (!std::filesystem::exists("/usr/bin/gdb")) return false;
  Program gdb({"/usr/bin/gdb", "-nx", "-batch", "-ex", "set disable-randomization off", "-ex",
               "run", "/bin/true"});
  return gdb.wait() == 0 && gdb.out().find("exited normally") != std::string::npos;
}

/// Runs gdb's commands on the program `test-inspected`. Answers what gdb has written, or a text
/// that says why it could not.
std::string debug(const std::string& commands) {
  const std::string inspected = tools_test::bin() + "/test-inspected";
  if (!std::filesystem::exists(inspected)) return inspected + " is not built: run make test-build";
  const Folder folder;
  std::ofstream(folder / "commands") << "set confirm off\nset pagination off\nset width 0\n"
                                     << "set disable-randomization off\n"
                                     << "source tools/gdb/spinwire.py\n"
                                     << commands;
  Program gdb({"/usr/bin/gdb", "-nx", "-batch", "-x", folder / "commands", inspected});
  const int code = gdb.wait();
  return gdb.out() + (code == 0 ? "" : "\ngdb has failed:\n" + gdb.err());
}

/// The values of gdb's lines "$1 = value", and of those that name a reference first.
std::vector<std::string> values_in(const std::string& output) {
  std::vector<std::string> values;
  std::istringstream lines(output);
  const std::regex value("\\$[0-9]+ = (?:\\([a-zA-Z:]+ &\\) @0x[0-9a-f]+: )?(.*)");
  std::smatch found;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_match(line, found, value)) values.push_back(without_chance(found[1]));
  }
  return values;
}

struct Printed {
  const char* member;
  const char* value;
};

TEST(SlowGdb, PrintsHandlesAndValues) {
  if (!can_debug()) GTEST_SKIP() << kNoGdb;
  const std::vector<Printed> expected{
      {"server", "Engine (softverbs, 1 connection, 0 sessions, 1 served session)"},
      {"client", "Engine (softverbs, 1 connection, 1 session, 0 served sessions)"},
      {"closed_engine", "Engine (closed)"},
      {"listener", "Listener (0-1)"},
      {"timer", "Timer (0-1)"},
      {"connection", "Connection (0-2, ready, peer PEER)"},
      {"accepted", "Connection (0-2, ready, peer PEER)"},
      {"empty_connection", "Connection (empty)"},
      {"closed_connection", "Connection (0-1, closed)"},
      {"of_closed_engine", "Connection (0-1, the engine is closed)"},
      {"session", "Session (0-1, ready, server PEER)"},
      {"closed_session", "Session (1-1, closed)"},
      {"served", "ServedSession (0-1, client PEER)"},
      {"pending", "PendingCall (call N of session 0 by datagram)"},
      {"buffer", "Buffer (100 of 256 bytes at ADDRESS, 3 references)"},
      {"empty_buffer", "Buffer (empty)"},
      {"slice", "BufferSlice (20 bytes at ADDRESS)"},
      {"registered", "MemoryRegion (8192 bytes at ADDRESS, remote_read)"},
      {"region", "RemoteRegion (100 bytes at ADDRESS, remote_read_write, rkey ADDRESS)"},
      {"leased", "RemoteMemory (lease 1, 4096 bytes, remote_read_write)"},
      {"not_leased", "RemoteMemory (empty)"},
      {"operation", "OperationId (7)"},
      {"no_call", "CallId (empty)"},
      {"status", "would_block"},
      {"unknown_status", "unknown (200)"},
      {"access", "remote_read | remote_atomic"},
      {"state", "draining"},
      {"error", "Error (in_use: listen at port 1: another program listens there; use port 0)"},
      {"goodbye", "Goodbye (draining, back after 200 ms)"},
      {"number", "Result (ok) = {value = 5}"},
      {"nothing", "Result (ok)"},
      {"failed", "Result (failed) = {error = Error (limit: asked: found)}"},
      {"snapshot.state", "ready"},
      {"snapshot.blocked_by", "nothing"},
  };
  std::string commands = "break inspect\nrun\n";
  for (const Printed& each : expected) commands += std::string("print world.") + each.member + "\n";
  // The library's debug information gone, as far as a handle's printer can see.
  commands +=
      "python gdb.lookup_type = lambda name: (_ for _ in ()).throw(gdb.error(name))\n"
      "print world.connection\nprint world.session\nprint world.leased\nkill\n";
  const std::string output = debug(commands);
  const std::vector<std::string> values = values_in(output);
  ASSERT_EQ(values.size(), expected.size() + 3) << output;
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(values[i], expected[i].value) << expected[i].member;
  EXPECT_EQ(values[expected.size()], "Connection (0-2)");
  EXPECT_EQ(values[expected.size() + 1], "Session (0-1)");
  EXPECT_EQ(values[expected.size() + 2], "RemoteMemory (lease 1)");
}

TEST(SlowGdb, PrintsWhatCallbacksGet) {
  if (!can_debug()) GTEST_SKIP() << kNoGdb;
  std::string commands;
  for (const char* what : {"message", "request", "reply"}) {
    commands += std::string("tbreak inspect_") + what + "\ncommands\nsilent\nprint " + what +
                "\ncontinue\nend\n";
  }
  const std::string output = debug(commands + "break inspect\nrun\nkill\n");
  std::vector<std::string> values = values_in(output);
  std::sort(values.begin(), values.end());
  EXPECT_EQ(values, (std::vector<std::string>{"Message (12 bytes at ADDRESS)",
                                              "Reply (ok, 12 bytes at ADDRESS)",
                                              "Request (method 3, 12 bytes at ADDRESS)"}))
      << output;
}

#ifdef __x86_64__

/// Arguments of each probe, by its name.
using Probes = std::map<std::string, std::set<std::size_t>>;

/// The probes of an ELF file, as readelf reads the notes.
Probes probes_of(const std::string& file) {
  Program readelf({"/usr/bin/env", "readelf", "-n", "-W", file});
  EXPECT_EQ(readelf.wait(), 0) << readelf.err();
  Probes probes;
  std::istringstream lines(readelf.out());
  std::string name;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key;
    std::string value;
    words >> key >> value;
    if (key == "Provider:") {
      EXPECT_EQ(value, "spinwire");
    }
    if (key == "Name:") name = value;
    if (key != "Arguments:") continue;
    EXPECT_TRUE(value.starts_with("8@")) << line;  // a pointer
    std::size_t arguments = 1;
    while (words >> value) ++arguments;
    probes[name].insert(arguments);
  }
  return probes;
}

/// The rows "| `name` | arguments |" of the page.
Probes documented_probes() {
  Probes probes;
  std::istringstream lines(read_file("include/tracing.md"));
  const std::regex row("\\| `([a-z_]+)` \\| ([0-9]+) \\|.*");
  std::smatch found;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_match(line, found, row)) probes[found[1]].insert(std::stoul(found[2]));
  }
  return probes;
}

TEST(Probes, AreThoseOfTheDocumentedTable) {
  const Probes documented = documented_probes();
  EXPECT_FALSE(documented.empty()) << "run this in the source tree";
  // A program that has the static library, whose probes are those of the shared one.
  const std::string program = tools_test::bin() + "/test-inspected";
  ASSERT_TRUE(std::filesystem::exists(program)) << program << " is not built: run make tests";
  EXPECT_EQ(probes_of(program), documented);
  // Each event of the flight recorder is one.
  std::set<std::string> names;
  for (const auto& probe : documented) names.insert(probe.first);
  std::set<std::string> kinds;
  for (const spinwire::EventKindInfo& kind : spinwire::event_kinds())
    kinds.insert(std::string(kind.name));
  EXPECT_EQ(names, kinds);
}

TEST(SlowGdb, StopsAtProbesThatTellWhatHappensToWhom) {
  if (!can_debug()) GTEST_SKIP() << kNoGdb;
  std::string commands;
  for (const char* probe : {"state", "refused", "error", "opened"}) {
    commands += std::string("break -probe-stap spinwire:") + probe +
                "\ncommands\nsilent\nprintf \"probe " + probe +
                " %s %u-%u %s (%d)\\n\", (char*)$_probe_arg0, $_probe_arg1, $_probe_arg2, "
                "(char*)$_probe_arg3, $_probe_argc\ncontinue\nend\n";
  }
  const std::string output = without_chance(debug(commands + "run\n"));
  for (const char* expected :
       {"probe state connection 0-1 exchanging, peer PEER (4)\n",
        "probe state connection 0-1 ready, peer PEER (4)\n",
        "probe state connection 0-1 closed, peer PEER (4)\n",
        "probe state session 0-1 ready, server PEER (4)\n",
        "probe state session 1-1 closing, server PEER (4)\n",
        "probe opened served_session 1-1 by client PEER (4)\n",
        "probe refused stranger 0-0 PEER: not today (4)\n", "probe error connection 1-"}) {
    EXPECT_NE(output.find(expected), std::string::npos) << expected << "\n" << output;
  }
  EXPECT_NE(output.find("exited normally"), std::string::npos) << output;
}

#endif

}  // namespace
}  // namespace debugging_test
