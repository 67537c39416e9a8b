// Changes the number of reserved hugepages, for tests that need some or must know how many there
// are.
#pragma once

#include <fcntl.h>
#include <sys/file.h>

#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "base/unique_fd.h"

namespace hugepage_setting {

inline constexpr const char* kNrHugepages = "/proc/sys/vm/nr_hugepages";

/// Every test that reserves hugepages or counts free ones holds this lock, since processes share
/// the tests.
class Lock {
 public:
  Lock() : file_(open("/tmp/spinwire-test-hugepages.lock", O_CREAT | O_RDWR | O_CLOEXEC, 0600)) {
    if (file_.get() >= 0) (void)flock(file_.get(), LOCK_EX);
  }

 private:
  spinwire::base::UniqueFd file_;
};

inline std::string read_text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline bool write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.flush();
  return file.good();
}

/// Changes a system setting during its lifetime.
class Setting {
 public:
  Setting(std::string path, const std::string& before, const std::string& value)
      : path_(std::move(path)), before_(before), changed_(write_text(path_, value)) {}
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
  ~Setting() {
    if (changed_) write_text(path_, before_);
  }
  explicit operator bool() const { return changed_; }

 private:
  std::string path_;
  std::string before_;
  bool changed_;
};

}  // namespace hugepage_setting
