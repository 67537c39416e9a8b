#include "observe/engine_paths.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <tuple>

#include "base/error.h"
#include "base/unique_fd.h"
#include "spinwire/observe.h"

namespace spinwire {
namespace observe {
namespace {

constexpr std::string_view kPrefix = "spinwire-";

/// Reads a decimal number and a following '-' or the end.
bool read_number(std::string_view& text, std::uint32_t& value) noexcept {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  if (text.empty()) return true;
  if (text.front() != '-') return false;
  text.remove_prefix(1);
  return !text.empty();
}

struct DirectoryCloser {
  void operator()(DIR* directory) const noexcept { ::closedir(directory); }
};

/// A dead engine's file, with its time.
struct DeadFile {
  std::string path;
  timespec written{};
};

}  // namespace

std::string file_name(uid_t user, std::uint32_t pid, std::uint32_t engine) {
  return fmt::format("{}{}-{}-{}", kPrefix, user, pid, engine);
}

std::optional<EngineFile> parse_file_name(std::string_view name, uid_t user) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::string_view rest = name.substr(kPrefix.size());
  std::uint32_t owner = 0;
  EngineFile file;
  if (!read_number(rest, owner) || !read_number(rest, file.pid) || !read_number(rest, file.engine))
    return std::nullopt;
  // One spelling for each file, so that no other file is taken for an engine's.
  if (owner != user || name != file_name(user, file.pid, file.engine)) return std::nullopt;
  return file;
}

bool is_locked(int fd) noexcept {
  if (::flock(fd, LOCK_SH | LOCK_NB) != 0) return errno == EWOULDBLOCK;
  (void)::flock(fd, LOCK_UN);
  return false;
}

int open_file(const std::string& path) noexcept {
  base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!fd) return -1;
  struct stat about {};
  if (::fstat(fd.get(), &about) != 0) return -1;
  if (!S_ISREG(about.st_mode) || about.st_uid != ::geteuid()) {
    errno = EPERM;
    return -1;
  }
  return fd.release();
}

std::uint64_t process_start() noexcept {
  const base::UniqueFd fd(::open("/proc/self/stat", O_RDONLY | O_CLOEXEC));
  std::array<char, 1024> bytes{};
  const ssize_t got = fd ? ::read(fd.get(), bytes.data(), bytes.size()) : 0;
  if (got <= 0) return 0;
  std::string_view text(bytes.data(), static_cast<std::size_t>(got));
  // The second field is the program's name, which may hold anything but ends with the last ')'.
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string_view::npos) return 0;
  text.remove_prefix(name_end + 1);
  constexpr int kFieldsBefore = 20;
  for (int i = 0; i < kFieldsBefore; ++i) {
    const std::size_t space = text.find(' ');
    if (space == std::string_view::npos) return 0;
    text.remove_prefix(space + 1);
  }
  std::uint64_t value = 0;
  (void)std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

}  // namespace observe

Result<std::vector<EngineFile>> list_engines(const std::string& directory) {
  return base::no_throw("list the engines", [&]() -> Result<std::vector<EngineFile>> {
    const std::unique_ptr<DIR, observe::DirectoryCloser> open(::opendir(directory.c_str()));
    if (open == nullptr) {
      return base::fail_errno(Status::system, "list the engines in " + directory, "opendir", errno,
                              "give the folder that observability.directory names");
    }
    const uid_t user = ::geteuid();
    const int folder = ::dirfd(open.get());
    std::vector<EngineFile> files;
    // NOLINTNEXTLINE(concurrency-mt-unsafe): the stream is ours alone
    while (const dirent* const entry = ::readdir(open.get())) {
      auto file = observe::parse_file_name(static_cast<const char*>(entry->d_name), user);
      if (!file) continue;
      // Other users may have made any number of files with such names: they are not opened.
      struct stat about {};
      if (::fstatat(folder, static_cast<const char*>(entry->d_name), &about, AT_SYMLINK_NOFOLLOW) !=
              0 ||
          !S_ISREG(about.st_mode) || about.st_uid != user)
        continue;
      file->path = directory + '/' + static_cast<const char*>(entry->d_name);
      const base::UniqueFd fd(observe::open_file(file->path));
      if (!fd) continue;
      file->is_alive = observe::is_locked(fd.get());
      files.push_back(std::move(*file));
    }
    std::sort(files.begin(), files.end(), [](const EngineFile& a, const EngineFile& b) {
      return std::tie(a.pid, a.engine) < std::tie(b.pid, b.engine);
    });
    return files;
  });
}

Result<std::size_t> remove_dead_engines(std::size_t keep, const std::string& directory) {
  return base::no_throw("remove files of dead engines", [&]() -> Result<std::size_t> {
    auto files = list_engines(directory);
    if (!files) return tl::unexpected(files.error());
    std::vector<observe::DeadFile> dead;
    for (EngineFile& file : *files) {
      struct stat about {};
      if (file.is_alive || ::lstat(file.path.c_str(), &about) != 0) continue;
      dead.push_back({std::move(file.path), about.st_ctim});
    }
    std::sort(dead.begin(), dead.end(), [](const observe::DeadFile& a, const observe::DeadFile& b) {
      return std::tie(a.written.tv_sec, a.written.tv_nsec) >
             std::tie(b.written.tv_sec, b.written.tv_nsec);
    });
    std::size_t removed = 0;
    for (std::size_t i = std::min(keep, dead.size()); i < dead.size(); ++i) {
      if (::unlink(dead[i].path.c_str()) == 0) ++removed;
    }
    return removed;
  });
}

}  // namespace spinwire
