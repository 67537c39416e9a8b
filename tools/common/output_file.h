// A file that appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "spinwire/status.h"

namespace spinwire::tools {

/// Written as NAME.partial-PID and renamed by commit(); without commit() it is removed. An existing
/// path that is no regular file (a device, a pipe, a link) is written to, never replaced. All
/// errors are `system` and name the file.
class OutputFile {
 public:
  static Result<OutputFile> create(const std::string& path);

  OutputFile(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// Appends all of `bytes`. May block.
  Result<void> append(std::span<const std::byte> bytes);
  Result<void> commit();

 private:
  OutputFile(std::string path, std::string partial, int fd);
  void remove_partial() const;
  [[nodiscard]] tl::unexpected<Error> error(const char* call, int code) const;

  std::string path_;
  std::string partial_;  ///< empty: written in place
  int fd_;
};

}  // namespace spinwire::tools
