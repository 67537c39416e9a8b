// Key files for tests.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <string_view>

namespace key_files {

/// A line of a key file whose secret repeats one hexadecimal digit.
inline std::string line(std::string_view name, char digit) {
  return std::string(name) + ' ' + std::string(64, digit) + '\n';
}

/// A file of its own, removed at the end.
class KeyFile {
 public:
  explicit KeyFile(std::string_view text, mode_t mode = 0600) {
    std::string path = "/tmp/spinwire-keys-XXXXXX";
    const int fd = ::mkstemp(path.data());
    EXPECT_GE(fd, 0);
    EXPECT_EQ(::write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    EXPECT_EQ(::fchmod(fd, mode), 0);
    ::close(fd);
    path_ = path;
  }
  KeyFile(const KeyFile&) = delete;
  KeyFile& operator=(const KeyFile&) = delete;
  ~KeyFile() { ::unlink(path_.c_str()); }

  [[nodiscard]] const std::string& path() const { return path_; }
  /// Gives the file another text and other rights.
  void write(std::string_view text, mode_t mode = 0600) const {
    const int fd = ::open(path_.c_str(), O_WRONLY | O_TRUNC | O_CREAT | O_CLOEXEC, mode);
    EXPECT_GE(fd, 0);
    EXPECT_EQ(::write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    EXPECT_EQ(::fchmod(fd, mode), 0);
    ::close(fd);
  }

 private:
  std::string path_;
};

}  // namespace key_files
