// The files of the example of a replicated log.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "tools/programs.h"

namespace tools_test {

constexpr std::size_t kRecord = 64;
constexpr std::size_t kRecords = 8192;

/// Starts a node without an address to listen at: it opens its file, and ends.
Outcome start_node(const std::string& file, const Words& more = {}) {
  Words words{"--id", "0", "--nodes", "a,b,c", "--file", file};
  words.insert(words.end(), more.begin(), more.end());
  return run("replicated-log", words);
}
bool is_accepted(const Outcome& o) { return o.err.find("parse the address") != std::string::npos; }

void expect_refused(const std::string& file, const std::string& text, const Words& more = {}) {
  const std::string before = read_file(file);
  const Outcome o = start_node(file, more);
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(o.err.find(text), std::string::npos) << o.err;
  EXPECT_TRUE(read_file(file) == before) << text;
}

TEST_F(Tools, ALogIsMadeOnlyWhenAsked) {
  const Folder folder;
  const std::string file = folder / "log";
  expect_refused(file, "there is no such file");
  EXPECT_FALSE(std::filesystem::exists(file));
  const Outcome made = start_node(file, {"--new", "--records", std::to_string(kRecords)});
  EXPECT_TRUE(is_accepted(made)) << made.err;
  struct stat found {};
  ASSERT_EQ(::stat(file.c_str(), &found), 0);
  EXPECT_EQ(static_cast<std::size_t>(found.st_size), (kRecords + 1) * kRecord);
  EXPECT_GE(static_cast<std::size_t>(found.st_blocks) * 512, (kRecords + 1) * kRecord);
  expect_refused(file, "File exists", {"--new"});
  const Outcome again = start_node(file);
  EXPECT_TRUE(is_accepted(again)) << again.err;
}

TEST_F(Tools, NoFileBecomesALogThatIsNone) {
  const Folder folder;
  std::ofstream(folder / "empty").flush();
  expect_refused(folder / "empty", "no log, but 0 bytes");
  write_random(folder / "odd", 1000);
  expect_refused(folder / "odd", "no log, but 1000 bytes");
  write_random(folder / "other", 100 * kRecord);
  expect_refused(folder / "other", "no log, but a file that begins with");
  ASSERT_EQ(::symlink((folder / "other").c_str(), (folder / "link").c_str()), 0);
  expect_refused(folder / "link", "Too many levels of symbolic links");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const Outcome pipe = start_node(folder / "pipe");
  EXPECT_EQ(pipe.code, 1);
  EXPECT_NE(pipe.err.find("no file of user"), std::string::npos) << pipe.err;
}

TEST_F(Tools, ADamagedLogIsRefused) {
  const Folder folder;
  const std::string file = folder / "log";
  ASSERT_TRUE(is_accepted(start_node(file, {"--new", "--records", std::to_string(kRecords)})));
  const std::string intact = read_file(file);
  const auto expect_damaged = [&](const std::function<void(std::string&)>& damage) {
    std::string bytes = intact;
    damage(bytes);
    std::ofstream(file, std::ios::binary) << bytes;
    expect_refused(file, "a damaged log");
  };
  expect_damaged([](std::string& bytes) { bytes.resize(bytes.size() - kRecord); });
  expect_damaged([](std::string& bytes) {
    const std::uint64_t committed = kRecords + 1;
    std::memcpy(bytes.data() + 24, &committed, sizeof committed);
  });
  std::ofstream(file, std::ios::binary) << intact;
  EXPECT_TRUE(is_accepted(start_node(file)));
}

}  // namespace tools_test
