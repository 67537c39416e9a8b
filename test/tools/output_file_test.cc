// What the tools' --output makes of links, pipes and devices at its path, their own and those of
// another user.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>

#include "tools/programs.h"

namespace tools_test {
namespace {

constexpr uid_t kOther = 65534;

class ToolsOutput : public Tools {
 protected:
  [[nodiscard]] static Outcome write_to(const std::string& path) {
    return run("spinwire-stat", {"--list", "--output", path});
  }
  [[nodiscard]] static mode_t mode_of(const std::string& path) {
    struct stat about {};
    EXPECT_EQ(::lstat(path.c_str(), &about), 0) << path;
    return about.st_mode & S_IFMT;
  }
  /// The list of metrics, as it is without --output.
  std::string list_ = run("spinwire-stat", {"--list"}).out;
};

TEST_F(ToolsOutput, ALinkOfAnotherUserIsReplaced) {
  const Folder folder;
  const std::string path = folder / "metrics", victim = folder / "victim";
  std::ofstream(victim) << "secret";
  ASSERT_EQ(::symlink(victim.c_str(), path.c_str()), 0);
  if (::lchown(path.c_str(), kOther, kOther) != 0) GTEST_SKIP() << "may not give a link away";
  const Outcome o = write_to(path);
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(read_file(victim), "secret");
  EXPECT_EQ(mode_of(path), static_cast<mode_t>(S_IFREG));
  EXPECT_EQ(read_file(path), list_);
  EXPECT_EQ(folder.files(), 2u) << "no partial files";
}

// Without a reader the open of a pipe would wait, and with one that reads nothing the write.
TEST_F(ToolsOutput, APipeOfAnotherUserIsReplaced) {
  const Folder folder;
  const std::string path = folder / "metrics";
  ASSERT_EQ(::mkfifo(path.c_str(), 0666), 0);
  if (::chown(path.c_str(), kOther, kOther) != 0) GTEST_SKIP() << "may not give a pipe away";
  const int silent = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(silent, 0);
  const Outcome o = write_to(path);
  ::close(silent);
  EXPECT_EQ(o.code, 0) << o.err;
  ASSERT_EQ(mode_of(path), static_cast<mode_t>(S_IFREG));
  EXPECT_EQ(read_file(path), list_);
}

TEST_F(ToolsOutput, OwnLinksAreFollowedAndStay) {
  const Folder folder;
  ASSERT_TRUE(std::filesystem::create_directory(folder / "sub"));
  const std::string path = folder / "metrics", between = folder / "sub/between";
  const std::string target = folder / "sub/target";
  ASSERT_EQ(::symlink("sub/between", path.c_str()), 0);
  ASSERT_EQ(::symlink("target", between.c_str()), 0);
  for (const char* const before : {"", "before"}) {
    if (*before != '\0') std::ofstream(target) << before;
    const Outcome o = write_to(path);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(mode_of(path), static_cast<mode_t>(S_IFLNK));
    EXPECT_EQ(mode_of(between), static_cast<mode_t>(S_IFLNK));
    EXPECT_EQ(read_file(target), list_);
  }
  const std::string circle = folder / "circle";
  ASSERT_EQ(::symlink("circle", circle.c_str()), 0);
  const Outcome o = write_to(circle);
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find(circle), std::string::npos) << o.err;
}

TEST_F(ToolsOutput, OwnPipesAreWrittenToIfTheyAreRead) {
  const Folder folder;
  const std::string path = folder / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const Outcome unread = write_to(path);
  EXPECT_EQ(unread.code, 1);
  EXPECT_NE(unread.err.find("open the pipe for reading"), std::string::npos) << unread.err;
  // Its capacity is smaller than the list, so the writer has to wait for the reader.
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(::fcntl(reader, F_SETPIPE_SZ, 4096), 0);
  ASSERT_GT(list_.size(), 4096u);
  Program writer({bin() + "/spinwire-stat", "--list", "--output", path});
  std::string text;
  std::array<char, 4096> bytes{};
  const auto end = Clock::now() + kLimit;
  while (text.size() < list_.size() && Clock::now() < end) {
    const ssize_t got = ::read(reader, bytes.data(), bytes.size());
    if (got > 0) text.append(bytes.data(), static_cast<std::size_t>(got));
  }
  ::close(reader);
  EXPECT_EQ(writer.wait(), 0) << writer.err();
  EXPECT_EQ(text, list_);
  EXPECT_EQ(mode_of(path), static_cast<mode_t>(S_IFIFO));
}

TEST_F(ToolsOutput, OwnSocketsAreNotTakenForPipes) {
  const Folder folder;
  const std::string path = folder / "socket";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof address.sun_path);
  path.copy(address.sun_path, path.size());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const Outcome o = write_to(path);
  ::close(fd);
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find(path), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("pipe"), std::string::npos) << o.err;
  EXPECT_EQ(mode_of(path), static_cast<mode_t>(S_IFSOCK));
}

TEST_F(ToolsOutput, DevicesAndTheProgramsOwnFilesAreWrittenTo) {
  EXPECT_EQ(write_to("/dev/null").code, 0);
  EXPECT_EQ(mode_of("/dev/null"), static_cast<mode_t>(S_IFCHR));
  const Outcome o = write_to("/dev/stdout");
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.out, list_);
}

}  // namespace
}  // namespace tools_test
