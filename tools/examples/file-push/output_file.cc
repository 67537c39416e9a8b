#include "output_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace spinwire::tools {

OutputFile::OutputFile(std::string path, std::string partial, int fd)
    : path_(std::move(path)), partial_(std::move(partial)), fd_(fd) {}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      partial_(std::move(other.partial_)),
      fd_(std::exchange(other.fd_, -1)) {}

OutputFile::~OutputFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  remove_partial();
}

void OutputFile::remove_partial() const {
  if (!partial_.empty()) ::unlink(partial_.c_str());
}

tl::unexpected<Error> OutputFile::error(const char* call, int code) const {
  return tl::unexpected(
      Error{Status::system, fmt::format("write {}", path_),
            fmt::format("{}: {}", call, std::strerror(code)),
            code == ENOSPC ? "free space, or give another path" : "give a writable path"});
}

Result<OutputFile> OutputFile::create(const std::string& path) {
  struct stat there {};
  const bool in_place = ::lstat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode);
  const std::string partial =
      in_place ? std::string() : fmt::format("{}.partial-{}", path, ::getpid());
  OutputFile file(path, partial, -1);
  const int how = in_place ? O_TRUNC : O_CREAT | O_EXCL;
  file.fd_ = ::open(in_place ? path.c_str() : partial.c_str(), O_WRONLY | O_CLOEXEC | how, 0666);
  if (file.fd_ < 0) return file.error("open", errno);
  return file;
}

Result<void> OutputFile::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::write(fd_, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return error("write", done < 0 ? errno : ENOSPC);
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
  return {};
}

Result<void> OutputFile::commit() {
  // Network and quota file systems report lost writes only here.
  if (::close(std::exchange(fd_, -1)) != 0) {
    const int code = errno;
    remove_partial();
    return error("close", code);
  }
  if (partial_.empty() || std::rename(partial_.c_str(), path_.c_str()) == 0) return {};
  const int code = errno;
  remove_partial();
  return error("rename", code);
}

}  // namespace spinwire::tools
