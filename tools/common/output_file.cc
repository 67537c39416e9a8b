#include "output_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

namespace spinwire::tools {
namespace {

/// What a path names, itself and not what it leads to.
struct Node {
  mode_t mode = 0;  ///< 0: there is none
  dev_t device = 0;
  ino_t inode = 0;
  bool is_ours = false;  ///< belongs to this user or to root
  bool is_in_proc = false;
  std::string link;  ///< where a link leads

  /// A link of /proc, such as /proc/self/fd/1, is opened as it is: its text may be no path.
  [[nodiscard]] bool is_followed() const { return S_ISLNK(mode) && is_ours && !is_in_proc; }
  /// Devices, and what a user of this process or root has put there. Any user can make links, pipes
  /// and sockets in a folder of their own; these are replaced, as a file would be.
  [[nodiscard]] bool is_written_in_place() const {
    const bool is_anyones = S_ISLNK(mode) || S_ISFIFO(mode) || S_ISSOCK(mode);
    return mode != 0 && !S_ISREG(mode) && (is_ours || !is_anyones);
  }
};

Node examine(const std::string& path) {
  Node node;
  const int fd = ::open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return node;
  struct stat about {};
  struct statfs system {};
  if (::fstat(fd, &about) == 0 && ::fstatfs(fd, &system) == 0) {
    node.mode = about.st_mode;
    node.device = about.st_dev;
    node.inode = about.st_ino;
    node.is_ours = about.st_uid == ::geteuid() || about.st_uid == 0;
    node.is_in_proc = system.f_type == PROC_SUPER_MAGIC;
  }
  std::array<char, PATH_MAX> text{};
  const ssize_t size = node.is_followed() ? ::readlinkat(fd, "", text.data(), text.size()) : 0;
  if (size > 0) node.link.assign(text.data(), static_cast<std::size_t>(size));
  ::close(fd);
  return node;
}

/// The path that a link leads to.
std::string follow(const std::string& path, const std::string& link) {
  return link.starts_with('/') ? link : path.substr(0, path.rfind('/') + 1) + link;
}

/// Whether an open file is the one that was examined. A link of /proc is opened as where it leads.
bool is_examined(int fd, const Node& node) {
  struct stat about {};
  return node.is_in_proc ||
         (::fstat(fd, &about) == 0 && about.st_dev == node.device && about.st_ino == node.inode);
}

/// Opens what is not to be replaced. Does not wait for the reader of a pipe. -1: an error, in
/// errno.
int open_in_place(const std::string& path, const Node& node) {
  const int how = node.is_in_proc ? O_TRUNC : O_NOFOLLOW;
  const int fd = ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | how);
  // The kernel answers ENXIO for sockets, too.
  if (fd < 0 && errno == ENXIO && S_ISSOCK(node.mode)) errno = EOPNOTSUPP;
  if (fd < 0) return fd;
  if (!is_examined(fd, node)) {
    ::close(fd);
    return errno = ESTALE, -1;
  }
  (void)::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK);
  return fd;
}

const char* remedy_of(int error) {
  switch (error) {
    case ENOSPC:
      return "free space, or give another path";
    case ENXIO:
      return "open the pipe for reading first, or give another path";
    case ESTALE:
      return "another file took this path a moment ago: give one that no other program changes";
    default:
      return "give a writable path";
  }
}

}  // namespace

OutputFile::OutputFile(std::string name, std::string path, std::string partial, int fd)
    : name_(std::move(name)), path_(std::move(path)), partial_(std::move(partial)), fd_(fd) {}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : name_(std::move(other.name_)),
      path_(std::move(other.path_)),
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
  return tl::unexpected(Error{Status::system, fmt::format("write {}", name_),
                              fmt::format("{}: {}", call, std::strerror(code)), remedy_of(code)});
}

Result<OutputFile> OutputFile::create(const std::string& path) {
  constexpr int kMostLinks = 40;  // as many as the kernel follows
  std::string target = path;
  Node node = examine(target);
  for (int links = 0; node.is_followed(); ++links) {
    if (links == kMostLinks) return OutputFile(path, target, {}, -1).error("open", ELOOP);
    target = follow(target, node.link);
    node = examine(target);
  }
  const bool in_place = node.is_written_in_place();
  const std::string partial =
      in_place ? std::string() : fmt::format("{}.partial-{}", target, ::getpid());
  OutputFile file(path, target, partial, -1);
  file.fd_ = in_place ? open_in_place(target, node)
                      : ::open(partial.c_str(), O_WRONLY | O_CLOEXEC | O_CREAT | O_EXCL, 0666);
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
