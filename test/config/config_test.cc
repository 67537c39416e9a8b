#include "spinwire/config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "config/config_keys.h"
#include "config/queue_sizing.h"

namespace config_test {
namespace {

using spinwire::Config;
using spinwire::ControlMode;
using spinwire::Error;
using spinwire::HugepagePolicy;
using spinwire::LockPolicy;
using spinwire::Nanoseconds;
using spinwire::Result;
using spinwire::Status;
using namespace std::chrono_literals;

/// Sets an environment variable during its lifetime and restores it.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) {
      had_ = true;
      old_ = old;
    }
    ::setenv(name, value, 1);
  }
  ~Variable() {
    if (had_) {
      ::setenv(name_, old_.c_str(), 1);
    } else {
      ::unsetenv(name_);
    }
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  bool had_ = false;
  std::string old_;
};

Result<Config> parse(const std::string& toml) { return Config::parse(toml, "test.toml"); }

Config good(const std::string& toml) {
  auto config = parse(toml);
  EXPECT_TRUE(config) << config.error().message();
  return config.value_or(Config{});
}

Error bad(const std::string& toml) {
  const auto config = parse(toml);
  EXPECT_FALSE(config) << toml << " was accepted";
  if (config) return {Status::ok, "", "", ""};
  EXPECT_EQ(config.error().status, Status::bad_config);
  return config.error();
}

Error bad_check(const Config& config) {
  const auto checked = config.check();
  EXPECT_FALSE(checked);
  if (checked) return {Status::ok, "", "", ""};
  EXPECT_EQ(checked.error().status, Status::bad_config);
  return checked.error();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::filesystem::path conf(const std::string& name) {
  return std::filesystem::path(__FILE__).parent_path() / ".." / ".." / "conf" / name;
}

std::string contents(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

/// A temporary file of a test.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text) {
    std::string name = (std::filesystem::temp_directory_path() / "spinwire-config-XXXXXX").string();
    const int fd = ::mkstemp(name.data());
    EXPECT_GE(fd, 0);
    EXPECT_EQ(::write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    ::close(fd);
    path_ = name;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

TEST(Config, DefaultsPassTheCheck) {
  const auto checked = Config{}.check();
  EXPECT_TRUE(checked) << checked.error().message();
}

TEST(Config, EmptyTextGivesTheDefaults) { EXPECT_EQ(good("").to_toml(), Config{}.to_toml()); }

TEST(Config, ReadsEveryKind) {
  const Config config = good(R"(
[device]
name = "rxe0"
gid_index = -1
port = 2
[memory]
hugepages = "require"
lock = "prefer"
send_bytes = "1GiB"
receive_bytes = 33554432
[connections]
eager_bytes = "2048"
connect_timeout = "250ms"
keepalive_interval = "2min"
[engine]
control = "manual"
control_interval = "1500us"
)");
  EXPECT_EQ(config.device.name, "rxe0");
  EXPECT_EQ(config.device.gid_index, -1);
  EXPECT_EQ(config.device.port, 2u);
  EXPECT_EQ(config.memory.hugepages, HugepagePolicy::require);
  EXPECT_EQ(config.memory.lock, LockPolicy::prefer);
  EXPECT_EQ(config.memory.send_bytes, 1u << 30);
  EXPECT_EQ(config.memory.receive_bytes, 32u << 20);
  EXPECT_EQ(config.connections.eager_bytes, 2048u);
  EXPECT_EQ(config.connections.connect_timeout, Nanoseconds(250ms));
  EXPECT_EQ(config.connections.keepalive_interval, Nanoseconds(2min));
  EXPECT_EQ(config.engine.control, ControlMode::manual);
  EXPECT_EQ(config.engine.control_interval, Nanoseconds(1500us));
  EXPECT_EQ(config.queues.send_depth, Config{}.queues.send_depth);
}

TEST(Config, ReadsBooleans) {
  EXPECT_FALSE(Config{}.security.open);
  EXPECT_TRUE(good("[security]\nopen = true").security.open);
  EXPECT_FALSE(good("[security]\nopen = false").security.open);
  EXPECT_TRUE(good("[security]\nopen = \"true\"").security.open);
  for (const char* wrong : {"1", "\"yes\"", "\"\"", "1.0", "[]"}) {
    const Error error = bad(std::string("[security]\nopen = ") + wrong);
    EXPECT_EQ(error.remedy, "give false or true") << wrong;
  }
}

TEST(Config, ReadsDottedAndInlineTables) {
  EXPECT_EQ(good("queues.send_depth = 64").queues.send_depth, 64u);
  EXPECT_EQ(good("queues = { send_depth = 32 }").queues.send_depth, 32u);
}

// Every key, set to each end of its range, is read back from the written form.
TEST(Config, EveryKeyReadsWhatItWrites) {
  for (const auto& key : spinwire::config::config_keys()) {
    for (const std::int64_t end : {key.least, key.most}) {
      Config config;
      if (key.kind == spinwire::config::ValueKind::text) {
        key.text(config) = std::string(static_cast<std::size_t>(end), '"');
      } else {
        key.set(config, end);
        EXPECT_EQ(key.get(config), end) << full_name(key);
      }
      EXPECT_EQ(good(config.to_toml()).to_toml(), config.to_toml()) << full_name(key);
      // Each key has its own member: only its line differs from the defaults.
      std::istringstream now(config.to_toml());
      std::istringstream before(Config{}.to_toml());
      int changed = 0;
      for (std::string a, b; std::getline(now, a) && std::getline(before, b);) {
        if (a == b) continue;
        ++changed;
        EXPECT_EQ(a.rfind(std::string(key.name) + " = ", 0), 0u) << a;
      }
      EXPECT_LE(changed, 1) << full_name(key);
    }
  }
}

TEST(Config, EveryKeyRefusesWhatIsJustOutsideItsRange) {
  for (const auto& key : spinwire::config::config_keys()) {
    using spinwire::config::ValueKind;
    if (key.kind == ValueKind::choice) continue;
    for (const std::int64_t outside : {key.least - 1, key.most + 1}) {
      std::string value;
      if (key.kind == ValueKind::text) {
        if (outside < 0) continue;
        value = '"' + std::string(static_cast<std::size_t>(outside), 'x') + '"';
      } else if (key.kind == ValueKind::duration) {
        value = '"' + std::to_string(outside) + "ns\"";
      } else {
        value = std::to_string(outside);
      }
      const Error error =
          bad("[" + std::string(key.section) + "]\n" + std::string(key.name) + " = " + value);
      EXPECT_TRUE(contains(error.asked, full_name(key))) << error.message();
      EXPECT_TRUE(contains(error.remedy, range_text(key))) << error.message();
    }
  }
}

TEST(Config, RangesFitTheirMembers) {
  // A value at the end of its range fits a 32-bit member. A member that code sets beyond its range
  // is still detected.
  Config config;
  config.memory.send_bytes = ~std::uint64_t{0};
  EXPECT_EQ(bad_check(config).asked, "memory.send_bytes");
  config = Config{};
  config.queues.operations = ~std::uint32_t{0};
  EXPECT_EQ(bad_check(config).found, "4294967295 is out of range");
}

TEST(ConfigErrors, UnknownKeyNamesPlaceAndNearest) {
  const Error error = bad("# first\n[queues]\nsend_depth = 16\n  recieve_depth = 16\n");
  EXPECT_EQ(error.asked, "test.toml:4:3: queues.recieve_depth");
  EXPECT_EQ(error.found, "there is no such setting");
  EXPECT_EQ(error.remedy, "the nearest known is queues.receive_depth");
}

TEST(ConfigErrors, KeyInTheWrongSectionNamesTheRightOne) {
  EXPECT_EQ(bad("[queues]\nmtu = 1024").remedy, "the nearest known is connections.mtu");
}

TEST(ConfigErrors, UnknownSectionNamesTheNearest) {
  const Error error = bad("[queue]\nsend_depth = 8\n");
  EXPECT_EQ(error.asked.rfind("test.toml:1:", 0), 0u) << error.asked;
  EXPECT_TRUE(contains(error.asked, "[queue]")) << error.asked;
  EXPECT_EQ(error.found, "there is no such section");
  EXPECT_EQ(error.remedy, "the nearest known is [queues]");
}

TEST(ConfigErrors, SettingOutsideOfASectionNamesItsOwn) {
  const Error error = bad("send_depth = 8");
  EXPECT_EQ(error.asked, "test.toml:1:1: send_depth");
  EXPECT_EQ(error.remedy, "the nearest known is queues.send_depth");
}

TEST(ConfigErrors, SectionsAreTables) {
  const Error error = bad("queues = 5");
  EXPECT_EQ(error.asked, "test.toml:1:10: queues");
  EXPECT_EQ(error.found, "a whole number where a section is expected");
  EXPECT_EQ(bad("[[queues]]\nsend_depth = 8").found, "an array where a section is expected");
}

TEST(ConfigErrors, OutOfRangeNamesValueAndRange) {
  const Error error = bad("[queues]\nsend_depth = 99999");
  EXPECT_EQ(error.asked, "test.toml:2:14: queues.send_depth");
  EXPECT_EQ(error.found, "99999 is out of range");
  EXPECT_EQ(error.remedy, "give a whole number in 16 .. 32768 work requests");
  EXPECT_EQ(bad("[memory]\nsend_bytes = \"1MiB\"").message(),
            "test.toml:2:14: memory.send_bytes: \"1MiB\" is out of range; give a number of bytes, "
            "or a text such as \"4KiB\", in 2MiB .. 1TiB");
  EXPECT_EQ(bad("[memory]\nsend_bytes = -5").found, "-5 is out of range");
  EXPECT_EQ(bad("[engine]\ncontrol_interval = \"2s\"").remedy,
            "give a text with a unit, such as \"100us\", in 1us .. 1s");
}

TEST(ConfigErrors, DurationsNeedAUnit) {
  const Error error = bad("[engine]\ncontrol_interval = 100");
  EXPECT_EQ(error.asked, "test.toml:2:20: engine.control_interval");
  EXPECT_EQ(error.found, "100 needs a unit");
  EXPECT_TRUE(contains(error.remedy, "1us .. 1s")) << error.remedy;
  EXPECT_TRUE(contains(bad("[engine]\ncontrol_interval = \"100\"").found, "needs a unit"));
}

TEST(ConfigErrors, WrongUnitsNameTheRightOnes) {
  EXPECT_EQ(bad("[engine]\ncontrol_interval = \"100MiB\"").found,
            "\"100MiB\" has the unknown unit 'MiB'; it is one of ns, us, ms, s, min or h");
  EXPECT_EQ(bad("[memory]\nsend_bytes = \"64MB\"").found,
            "\"64MB\" has the unknown unit 'MB'; it is one of B, KiB, MiB, GiB or TiB");
}

TEST(ConfigErrors, WrongTypesAreNamed) {
  EXPECT_EQ(bad("[queues]\nsend_depth = \"128\"").found, "\"128\" is a text");
  EXPECT_EQ(bad("[queues]\nsend_depth = 1.5").found, "it is a number with a fraction");
  EXPECT_EQ(bad("[queues]\nsend_depth = true").found, "it is a boolean");
  EXPECT_EQ(bad("[queues]\nsend_depth = [1]").found, "it is an array");
  EXPECT_EQ(bad("[queues]\nsend_depth = {a = 1}").found, "it is a table");
  EXPECT_EQ(bad("[queues]\nsend_depth = 2024-01-01").found, "it is a date or time");
  EXPECT_EQ(bad("[device]\nname = 7").found, "7 is a number");
  EXPECT_EQ(bad("[memory]\nhugepages = 1").found, "1 is a number");
  EXPECT_EQ(bad("[engine]\ncontrol_interval = 0.1").found, "it is a number with a fraction");
}

TEST(ConfigErrors, UnknownChoiceListsTheChoices) {
  const Error error = bad("[memory]\nhugepages = \"yes\"");
  EXPECT_EQ(error.found, "\"yes\" is none of the choices");
  EXPECT_EQ(error.remedy, "give \"require\", \"prefer\" or \"off\"");
}

TEST(ConfigErrors, SyntaxErrorsNameTheLine) {
  const Error error = bad("[queues]\nsend_depth = 8\nreceive_depth = = 3\n");
  EXPECT_EQ(error.asked.rfind("test.toml:3:", 0), 0u) << error.asked;
  EXPECT_FALSE(error.found.empty());
  EXPECT_EQ(bad("[queues]\nsend_depth = 1\nsend_depth = 2\n").asked.rfind("test.toml:3:", 0), 0u);
  EXPECT_EQ(bad("[queues]\nsend_depth = 99999999999999999999\n").asked.rfind("test.toml:2:", 0),
            0u);
}

TEST(ConfigErrors, OddCharactersAreRefusedWhereTheyStand) {
  // The parser asserts that a key begins with a valid character, but misjudges some non-ASCII ones.
  EXPECT_EQ(bad("[!]").asked, "test.toml:1:2");
  EXPECT_EQ(bad("[queues]\n[ # ]").asked.rfind("test.toml:2:", 0), 0u);
  EXPECT_EQ(bad("[[queu\u044c]]\n").asked, "test.toml:1:7");
  EXPECT_EQ(bad("[queues] # \u00fcber\n\nsend_depth =\u00e9 8").asked, "test.toml:3:13");
  EXPECT_EQ(bad("[device]\nname = '''\nx'''").asked, "test.toml:2:8");
  EXPECT_EQ(bad("[device]\nname = \"\"\"x\u00e9\"\"\"").asked, "test.toml:2:8");
  EXPECT_EQ(bad("[device]\nname = \"a\\\"b\u00e9\" \u00e9").asked, "test.toml:2:17");
  EXPECT_EQ(bad("[queues]\nsend_depth = -i'\u0159'").asked, "test.toml:2:17");
  EXPECT_EQ(bad("[device]\nname = \"a\"'\u0159'").asked, "test.toml:2:12");
  EXPECT_EQ(bad("0i=--e=\"\u0159\"").asked, "test.toml:1:9");
  EXPECT_EQ(bad("a = --e.'\u0159'").asked, "test.toml:1:10");
  const char* const kFine = "\ufeff[device] # \u00fc \"'\nname = \"m\u00e9 # \\\" '\"\n\n";
  EXPECT_EQ(good(kFine).device.name, "m\u00e9 # \" '");
  EXPECT_EQ(good("[device]\nname = '\u00e9 \" # \\'").device.name, "\u00e9 \" # \\");
}

TEST(ConfigErrors, TheFirstInTheFileIsTold) {
  // The parser sorts tables by name; the reported error must be the first in the file.
  const Error error = bad("[queues]\nzzz = 1\n[connections]\naaa = 1\n");
  EXPECT_EQ(error.asked, "test.toml:2:1: queues.zzz");
}

TEST(ConfigFile, LoadsAndNamesItselfInErrors) {
  const TemporaryFile fine("[queues]\nsend_depth = 77\n");
  const auto config = Config::load(fine.path());
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->queues.send_depth, 77u);

  const TemporaryFile wrong("\n\n[queues]\nsend = 77\n");
  const auto refused = Config::load(wrong.path());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().asked, wrong.path().string() + ":4:1: queues.send");
}

TEST(ConfigFile, WithoutAFileTheDefaultsAreLoaded) {
  const auto config = Config::load();
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->to_toml(), Config{}.to_toml());
}

TEST(ConfigFile, MissingUnreadableAndEndlessFilesAreErrors) {
  const auto status = [](const char* file) {
    const auto config = Config::load(file);
    EXPECT_FALSE(config);
    return config ? Error{} : config.error();
  };
  const Error missing = status("/nonexistent/spinwire.toml");
  EXPECT_EQ(missing.status, Status::bad_config);
  EXPECT_EQ(missing.asked, "read /nonexistent/spinwire.toml");
  EXPECT_EQ(missing.found, "open: No such file or directory (ENOENT)");
  EXPECT_EQ(status("/").found, "read: Is a directory (EISDIR)");
  EXPECT_EQ(status("/dev/zero").found, "it is longer than 1 MiB");
}

TEST(ConfigFile, DefaultTomlIsWhatTheDefaultsWrite) {
  EXPECT_EQ(contents(conf("default.toml")), Config{}.to_toml());
}

TEST(ConfigFile, EveryShippedFileLoadsPassesTheCheckAndDeviates) {
  for (const char* name : {"low_latency.toml", "storage.toml", "softroce.toml"}) {
    const auto config = Config::load(conf(name));
    ASSERT_TRUE(config) << config.error().message();
    const auto checked = config->check();
    EXPECT_TRUE(checked) << name << ": " << checked.error().message();
    EXPECT_NE(config->to_toml(), Config{}.to_toml()) << name;
  }
}

// An engine warns otherwise: handshakes beyond them would wait.
TEST(ConfigFile, NoShippedFileHasMoreHandshakesThanConnectionsMayBeHalfOpen) {
  for (const char* name : {"default.toml", "low_latency.toml", "storage.toml", "softroce.toml"}) {
    const auto config = Config::load(conf(name));
    ASSERT_TRUE(config) << config.error().message();
    EXPECT_LE(config->connections.handshakes,
              spinwire::config::half_open_connections(config->connections))
        << name;
  }
}

TEST(ConfigEnvironment, OverridesTheFile) {
  const Variable depth("SPINWIRE_QUEUES_SEND_DEPTH", "256");
  const Variable time("SPINWIRE_CONNECTIONS_PEER_TIMEOUT", "20s");
  const Variable device("SPINWIRE_DEVICE_NAME", "mlx5_0");
  const Variable pages("SPINWIRE_MEMORY_HUGEPAGES", "off");
  const Variable bytes("SPINWIRE_CONNECTIONS_EAGER_BYTES", "8KiB");
  const Variable retry("SPINWIRE_QUEUE_PAIR_RETRY_COUNT", "0");
  const Config config = good("[queues]\nsend_depth = 64\nreceive_depth = 99\n");
  EXPECT_EQ(config.queues.send_depth, 256u);
  EXPECT_EQ(config.queues.receive_depth, 99u);
  EXPECT_EQ(config.connections.peer_timeout, Nanoseconds(20s));
  EXPECT_EQ(config.device.name, "mlx5_0");
  EXPECT_EQ(config.memory.hugepages, HugepagePolicy::off);
  EXPECT_EQ(config.connections.eager_bytes, 8192u);
  EXPECT_EQ(config.queue_pair.retry_count, 0u);
  const auto loaded = Config::load();
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->queues.send_depth, 256u);
}

TEST(ConfigEnvironment, RefusesWhatItCannotRead) {
  const auto refused = [](const char* name, const char* value) {
    const Variable variable(name, value);
    const auto config = Config::load();
    EXPECT_FALSE(config) << name << "=" << value;
    return config ? Error{} : config.error();
  };
  const Error error = refused("SPINWIRE_QUEUES_SEND_DEPTH", "many");
  EXPECT_EQ(error.status, Status::bad_config);
  EXPECT_EQ(error.message(),
            "SPINWIRE_QUEUES_SEND_DEPTH: \"many\" is not a whole number; give a whole number in "
            "16 .. 32768 work requests");
  EXPECT_EQ(refused("SPINWIRE_QUEUES_SEND_DEPTH", "3").found, "\"3\" is out of range");
  EXPECT_EQ(refused("SPINWIRE_QUEUES_SEND_DEPTH", "").found, "\"\" is not a whole number");
  EXPECT_EQ(refused("SPINWIRE_DEVICE_NAME", "").found, "\"\" is empty");
  EXPECT_TRUE(contains(refused("SPINWIRE_ENGINE_CONTROL_INTERVAL", "5").found, "needs a unit"));
  EXPECT_EQ(refused("SPINWIRE_ENGINE_CONTROL", "Manual").found,
            "\"Manual\" is none of the choices");
}

TEST(ConfigEnvironment, UnknownVariableOfASectionNamesTheNearest) {
  const Variable variable("SPINWIRE_QUEUES_SEND_DEPHT", "128");
  const auto config = Config::load();
  ASSERT_FALSE(config);
  EXPECT_EQ(config.error().status, Status::bad_config);
  EXPECT_EQ(config.error().asked, "SPINWIRE_QUEUES_SEND_DEPHT");
  EXPECT_EQ(config.error().remedy, "the nearest known is SPINWIRE_QUEUES_SEND_DEPTH");
}

TEST(ConfigEnvironment, ASectionAloneIsAMistakeToo) {
  const Variable variable("SPINWIRE_DEVICE", "mlx5_0");
  const auto config = Config::load();
  ASSERT_FALSE(config);
  EXPECT_EQ(config.error().remedy, "the nearest known is SPINWIRE_DEVICE_NAME");
}

TEST(ConfigEnvironment, LeavesVariablesOfOthersAlone) {
  const Variable other("SPINWIRE_TEST_X", "1");
  const Variable longer("SPINWIRE_ENGINES", "1");
  const Variable lower("SPINWIRE_queues_send_depth", "7");
  const auto config = Config::load();
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->to_toml(), Config{}.to_toml());
}

TEST(ConfigCheck, NamesTheSettingOutOfRange) {
  Config config;
  config.queues.poll_batch = 65;
  const Error error = bad_check(config);
  EXPECT_EQ(error.message(),
            "queues.poll_batch: 65 is out of range; give a whole number in 1 .. 64 entries");
  config = Config{};
  config.memory.lock = static_cast<LockPolicy>(9);
  EXPECT_EQ(bad_check(config).asked, "memory.lock");
  config = Config{};
  config.engine.control_interval = Nanoseconds(-1);
  EXPECT_EQ(bad_check(config).found, "-1ns is out of range");
  config = Config{};
  config.device.address = "10.0.0.1";
  EXPECT_TRUE(config.check());
  config.device.address = "10.0.0.1:5";
  EXPECT_EQ(bad_check(config).asked, "device.address");
  config = Config{};
  config.device.name.clear();
  EXPECT_EQ(bad_check(config).asked, "device.name");
}

TEST(ConfigCheck, MtuIsOneOfTheFive) {
  Config config;
  for (const std::uint32_t mtu : {256u, 512u, 1024u, 2048u, 4096u}) {
    config.connections.mtu = mtu;
    EXPECT_TRUE(config.check()) << mtu;
  }
  config.connections.mtu = 1500;
  const Error error = bad_check(config);
  EXPECT_EQ(error.asked, "connections.mtu = 1500");
  EXPECT_EQ(error.remedy, "give 256, 512, 1024, 2048 or 4096");
}

TEST(ConfigCheck, CreditsStayWithinTheReceives) {
  Config config;
  config.queues.receive_depth = 64;
  config.connections.credits = 64;
  EXPECT_TRUE(config.check());
  config.connections.credits = 65;
  const Error error = bad_check(config);
  EXPECT_EQ(error.asked, "connections.credits = 65");
  EXPECT_TRUE(contains(error.found, "queues.receive_depth = 64")) << error.found;
}

TEST(ConfigCheck, CompletionQueueHoldsWhatCanCompleteAtOnce) {
  Config config;
  EXPECT_TRUE(config.check());
  config.queues.completion_depth = 4096 + 1024 + 4 * 1024 + 64;
  EXPECT_TRUE(config.check());
  --config.queues.completion_depth;
  const Error error = bad_check(config);
  EXPECT_EQ(error.asked, "queues.completion_depth = 9279");
  for (const char* part : {"queues.operations = 4096", "queues.receive_depth = 1024",
                           "connections.maximum = 1024", "9280"}) {
    EXPECT_TRUE(contains(error.found, part)) << error.found;
  }
  EXPECT_TRUE(contains(error.remedy, "9280")) << error.remedy;
}

TEST(ConfigCheck, SomeReceivesCanBeGranted) {
  Config config;
  config.connections.credits = 1;
  config.queues.receive_postlist = 64;
  config.queues.receive_depth = 64 + 8 + 1;
  EXPECT_TRUE(config.check());
  --config.queues.receive_depth;
  const Error error = bad_check(config);
  EXPECT_EQ(error.asked, "queues.receive_depth = 72");
  EXPECT_TRUE(contains(error.found, "queues.receive_postlist = 64")) << error.found;
  EXPECT_TRUE(contains(error.remedy, "73")) << error.remedy;
}

TEST(ConfigCheck, ReceivePoolHoldsTheReceivesWithAQuarterSpare) {
  Config config;
  config.queues.receive_depth = 4096;
  config.connections.eager_bytes = 4096;
  const std::uint64_t needed = 4096ull * (4096 + 64) * 5 / 4;
  config.memory.receive_bytes = needed;
  EXPECT_TRUE(config.check());
  config.memory.receive_bytes = needed - 1;
  const Error error = bad_check(config);
  EXPECT_TRUE(contains(error.found, std::to_string(needed))) << error.found;
  EXPECT_TRUE(contains(error.found, std::to_string(needed - 1))) << error.found;
  EXPECT_TRUE(contains(error.remedy, "21MiB")) << error.remedy;

  // One byte more than a power of two needs blocks of twice the size.
  config.memory.receive_bytes = needed;
  config.connections.eager_bytes = 4097;
  EXPECT_FALSE(config.check());
  // Blocks have at least 256 bytes.
  config.queues.receive_depth = 32768;
  config.queues.completion_depth = 65536;
  config.connections.eager_bytes = 256;
  config.memory.receive_bytes = 32768ull * (256 + 64) * 5 / 4;
  EXPECT_TRUE(config.check());
  --config.memory.receive_bytes;
  EXPECT_FALSE(config.check());
}

TEST(ConfigCheck, TimesAreLongerThanTheControlInterval) {
  using Member = Nanoseconds Config::Connections::*;
  const std::pair<const char*, Member> times[] = {
      {"connect_timeout", &Config::Connections::connect_timeout},
      {"handshake_timeout", &Config::Connections::handshake_timeout},
      {"close_timeout", &Config::Connections::close_timeout},
      {"keepalive_interval", &Config::Connections::keepalive_interval},
      {"peer_timeout", &Config::Connections::peer_timeout},
      {"credit_idle_timeout", &Config::Connections::credit_idle_timeout},
  };
  for (const auto& [name, member] : times) {
    Config config;
    config.engine.control_interval = 500ms;
    config.connections.*member = 500ms;
    const Error error = bad_check(config);
    EXPECT_EQ(error.asked, "connections." + std::string(name) + " = 500ms");
    EXPECT_TRUE(contains(error.found, "engine.control_interval = 500ms")) << error.found;
  }
}

TEST(ConfigCheck, PeersAreProbedBeforeTheyAreLost) {
  Config config;
  config.connections.keepalive_interval = 2s;
  config.connections.peer_timeout = 2s;
  EXPECT_TRUE(config.check());
  config.connections.keepalive_interval = 2001ms;
  EXPECT_EQ(bad_check(config).asked, "connections.peer_timeout = 2s");
}

TEST(ConfigKeys, EditDistanceCountsSingleChanges) {
  using spinwire::config::edit_distance;
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("mtu", ""), 3u);
  EXPECT_EQ(edit_distance("", "mtu"), 3u);
  EXPECT_EQ(edit_distance("credits", "credits"), 0u);
  EXPECT_EQ(edit_distance("credits", "credit"), 1u);
  EXPECT_EQ(edit_distance("recieve", "receive"), 1u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
}

TEST(ConfigKeys, EnvironmentNamesAreDistinct) {
  for (const auto& a : spinwire::config::config_keys()) {
    for (const auto& b : spinwire::config::config_keys()) {
      EXPECT_TRUE(&a == &b || environment_name(a) != environment_name(b)) << environment_name(a);
    }
  }
}

}  // namespace
}  // namespace config_test
