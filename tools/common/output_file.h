// A file that appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "spinwire/status.h"

namespace spinwire::tools {

/// Written as NAME.partial-PID and renamed by commit(); without commit() it is removed. A link of
/// this user or of root is followed, and stays. Devices, and pipes of this user or of root, are
/// written to in place; a pipe needs a reader. Links and pipes of other users are replaced. All
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
  OutputFile(std::string name, std::string path, std::string partial, int fd);
  void remove_partial() const;
  [[nodiscard]] tl::unexpected<Error> error(const char* call, int code) const;

  std::string name_;     ///< as it was given, for errors
  std::string path_;     ///< where its links lead
  std::string partial_;  ///< empty: written in place
  int fd_;
};

}  // namespace spinwire::tools
