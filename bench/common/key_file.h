// A file with a key for both ends of a benchmark.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "common/setup.h"

namespace spinwire::bench {

/// A key file, until the engines have read it.
class KeyFile {
 public:
  KeyFile() {
    const int fd = ::mkstemp(path_.data());
    const std::string text = "bench " + std::string(64, 'a') + '\n';
    if (fd < 0 || ::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
      give_up("a key file cannot be written");
    ::close(fd);
  }
  KeyFile(const KeyFile&) = delete;
  KeyFile& operator=(const KeyFile&) = delete;
  ~KeyFile() { ::unlink(path_.c_str()); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/spinwire-bench-key-XXXXXX";
};

}  // namespace spinwire::bench
