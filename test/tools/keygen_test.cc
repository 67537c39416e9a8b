// spinwire-keygen, as a user runs it.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "spinwire/spinwire.h"
#include "tools/programs.h"

namespace tools_test {
namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

mode_t mode_of(const std::string& path) {
  struct stat about {};
  EXPECT_EQ(::stat(path.c_str(), &about), 0);
  return about.st_mode & 07777u;
}

/// Whether an engine opens with the file.
bool opens(const std::string& path) {
  spinwire::Config c;
  c.memory.hugepages = spinwire::HugepagePolicy::off;
  c.security.key_file = path;
  const auto engine = spinwire::Engine::open(c);
  EXPECT_TRUE(engine) << engine.error().message();
  return engine.has_value();
}

TEST_F(Tools, KeygenWritesAKeyThatAnEngineTakes) {
  const Folder folder;
  const std::string file = folder / "keys";
  const mode_t before = ::umask(0277);
  const Outcome made = run("spinwire-keygen", {file, "--name", "desk-1"});
  ::umask(before);
  EXPECT_EQ(made.code, 0) << made.err;
  EXPECT_NE(made.out.find("'desk-1'"), std::string::npos) << made.out;
  EXPECT_EQ(mode_of(file), 0600u);
  const std::string text = text_of(file);
  EXPECT_EQ(text.size(), std::string("desk-1 \n").size() + 64);
  EXPECT_EQ(made.out.find(text.substr(7, 64)), std::string::npos) << "the key is not shown";
  EXPECT_TRUE(opens(file));
}

TEST_F(Tools, KeygenOverwritesNothing) {
  const Folder folder;
  const std::string file = folder / "keys";
  ASSERT_EQ(run("spinwire-keygen", {file}).code, 0);
  const std::string before = text_of(file);
  const Outcome again = run("spinwire-keygen", {file, "--name", "other"});
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("--add"), std::string::npos) << again.err;
  EXPECT_EQ(text_of(file), before);
}

TEST_F(Tools, KeygenAddsAKeyAtTheEnd) {
  const Folder folder;
  const std::string file = folder / "keys";
  ASSERT_EQ(run("spinwire-keygen", {file, "--name", "old"}).code, 0);
  const std::string before = text_of(file);
  ASSERT_EQ(run("spinwire-keygen", {file, "--name", "new", "--add"}).code, 0);
  const std::string after = text_of(file);
  EXPECT_EQ(after.substr(0, before.size()), before);
  EXPECT_EQ(after.substr(before.size(), 4), "new ");
  EXPECT_TRUE(opens(file));
  const Outcome twice = run("spinwire-keygen", {file, "--name", "new", "--add"});
  EXPECT_EQ(twice.code, 1);
  EXPECT_NE(twice.err.find("'new' already"), std::string::npos) << twice.err;
  ASSERT_EQ(::chmod(file.c_str(), 0640), 0);
  EXPECT_EQ(run("spinwire-keygen", {file, "--name", "next", "--add"}).code, 1);
  EXPECT_EQ(text_of(file), after);
  EXPECT_EQ(run("spinwire-keygen", {folder / "none", "--add"}).code, 1);
}

TEST_F(Tools, KeygenAddsNoKeyThatEnginesWouldNotRead) {
  const Folder folder;
  const std::string file = folder / "keys";
  ASSERT_EQ(run("spinwire-keygen", {file, "--name", "k0"}).code, 0);
  for (int i = 1; i < 16; ++i)
    ASSERT_EQ(run("spinwire-keygen", {file, "--name", "k" + std::to_string(i), "--add"}).code, 0);
  EXPECT_TRUE(opens(file));
  const std::string full = text_of(file);
  const Outcome more = run("spinwire-keygen", {file, "--name", "k16", "--add"});
  EXPECT_EQ(more.code, 1);
  EXPECT_NE(more.err.find("16 keys"), std::string::npos) << more.err;
  EXPECT_EQ(text_of(file), full);

  const std::string large = folder / "large";
  ASSERT_EQ(run("spinwire-keygen", {large, "--name", "k0"}).code, 0);
  std::ofstream(large, std::ios::app) << std::string(8100, '#') << '\n';
  const std::string before = text_of(large);
  const Outcome beyond = run("spinwire-keygen", {large, "--name", std::string(32, 'n'), "--add"});
  EXPECT_EQ(beyond.code, 1);
  EXPECT_NE(beyond.err.find("8192 bytes"), std::string::npos) << beyond.err;
  EXPECT_TRUE(text_of(large) == before);
}

// A limit on the size of files makes the write end in the middle of the line.
TEST_F(Tools, KeygenAddsAWholeLineOrNothing) {
  const Folder folder;
  const std::string file = folder / "keys";
  ASSERT_EQ(run("spinwire-keygen", {file, "--name", "old"}).code, 0);
  const std::string before = text_of(file);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{before.size() + 20, limit.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Outcome added = run("spinwire-keygen", {file, "--name", "new", "--add"});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(added.code, 1);
  EXPECT_EQ(text_of(file), before);
}

// In a folder of another user, that user could lead root to another file, or lock it for ever.
TEST_F(Tools, KeygenAddsToNoFileOfAnotherUserAndFollowsNoLink) {
  const Folder folder;
  const std::string file = folder / "keys", link = folder / "link";
  ASSERT_EQ(run("spinwire-keygen", {file}).code, 0);
  const std::string before = text_of(file);
  ASSERT_EQ(::symlink(file.c_str(), link.c_str()), 0);
  const Outcome linked = run("spinwire-keygen", {link, "--name", "new", "--add"});
  EXPECT_EQ(linked.code, 1);
  EXPECT_NE(linked.err.find("it is a link"), std::string::npos) << linked.err;
  // Root of a container may not know that user.
  if (::geteuid() == 0 && ::chown(file.c_str(), 65534, 65534) == 0) {
    const Outcome foreign = run("spinwire-keygen", {file, "--name", "new", "--add"});
    EXPECT_EQ(foreign.code, 1);
    EXPECT_NE(foreign.err.find("it belongs to user 65534"), std::string::npos) << foreign.err;
  }
  EXPECT_EQ(text_of(file), before);
}

/// A key file that this process has locked.
class LockedKeys {
 public:
  LockedKeys() {
    EXPECT_EQ(run("spinwire-keygen", {path()}).code, 0);
    held_ = ::open(path().c_str(), O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(::flock(held_, LOCK_EX), 0);
  }
  LockedKeys(const LockedKeys&) = delete;
  LockedKeys& operator=(const LockedKeys&) = delete;
  ~LockedKeys() { unlock(); }
  [[nodiscard]] std::string path() const { return folder_ / "keys"; }
  void unlock() {
    if (held_ >= 0) ::close(std::exchange(held_, -1));
  }
  /// Whether a process has opened the file, and sleeps.
  [[nodiscard]] bool is_awaited_by(pid_t pid) const {
    const std::string stat = read_process_file(pid, "stat");
    const std::size_t name_end = stat.rfind(") ");
    if (name_end == std::string::npos || stat[name_end + 2] != 'S') return false;
    std::error_code gone;
    const std::string fds = "/proc/" + std::to_string(pid) + "/fd";
    for (std::filesystem::directory_iterator at(fds, gone), end; !gone && at != end;
         at.increment(gone)) {
      std::error_code closed;
      if (std::filesystem::equivalent(at->path(), path(), closed)) return true;
    }
    return false;
  }

 private:
  Folder folder_;
  int held_ = -1;
};

TEST_F(Tools, KeygenWaitsForALock) {
  LockedKeys keys;
  Program waiting({bin() + "/spinwire-keygen", keys.path(), "--name", "new", "--add"});
  const auto end = Clock::now() + kLimit;
  while (!keys.is_awaited_by(waiting.pid()) && Clock::now() < end) std::this_thread::yield();
  EXPECT_TRUE(keys.is_awaited_by(waiting.pid()));
  keys.unlock();
  EXPECT_EQ(waiting.wait(), 0) << waiting.err();
  EXPECT_NE(text_of(keys.path()).find("\nnew "), std::string::npos);
}

TEST_F(SlowTools, KeygenWaitsForALockOnlyForAWhile) {
  const LockedKeys keys;
  const std::string before = text_of(keys.path());
  const Outcome late = run("spinwire-keygen", {keys.path(), "--name", "new", "--add"});
  EXPECT_EQ(late.code, 1);
  EXPECT_NE(late.err.find("has locked it"), std::string::npos) << late.err;
  EXPECT_EQ(text_of(keys.path()), before);
}

TEST_F(Tools, KeygenExplainsItself) {
  const Outcome help = run("spinwire-keygen", {"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_NE(help.out.find("Usage: spinwire-keygen"), std::string::npos) << help.out;
  for (const Words& words : {Words{}, Words{"a", "--name", "b c"}, Words{"a", "--name", ""},
                             Words{"a", "--name", std::string(33, 'n')}, Words{"a", "--bogus"}})
    EXPECT_EQ(run("spinwire-keygen", words).code, 2) << testing::PrintToString(words);
}

// The settings reach the tools through a file or the environment.
TEST_F(Tools, PerfMeasuresBetweenProcessesWithAKey) {
  const Folder folder;
  const std::string file = folder / "keys", other = folder / "other", conf = folder / "conf.toml";
  ASSERT_EQ(run("spinwire-keygen", {file}).code, 0);
  ASSERT_EQ(run("spinwire-keygen", {other}).code, 0);
  std::ofstream(conf) << "[security]\nkey_file = \"" << file << "\"\n";
  Program server({bin() + "/spinwire-perf", "--port", "0", "-c", conf});
  const std::string address = server.wait_for("listening on ");
  const std::string port = address.substr(address.rfind(':') + 1);
  const Words client{"lat", "127.0.0.1", "-p", port, "--count", "50", "--wait", "1"};
  ::setenv("SPINWIRE_SECURITY_KEY_FILE", other.c_str(), 1);
  const Outcome stranger = run("spinwire-perf", client);
  ::setenv("SPINWIRE_SECURITY_KEY_FILE", file.c_str(), 1);
  const Outcome friendly = run("spinwire-perf", client);
  ::unsetenv("SPINWIRE_SECURITY_KEY_FILE");
  EXPECT_EQ(stranger.code, 1);
  EXPECT_NE(stranger.err.find("authenticat"), std::string::npos) << stranger.err;
  EXPECT_EQ(friendly.code, 0) << friendly.err;
}

}  // namespace
}  // namespace tools_test
