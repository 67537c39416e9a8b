// The device's file. UCX, for one, uses a device only if /dev/infiniband/<name> is there and may be
// read and written. A library cannot make a file appear there, so these calls answer for that one
// path.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

#include "preload/interpose.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::preload {

namespace {

/// The file's device number: none that the kernel gives to an InfiniBand device.
constexpr unsigned kMajor = 231;
constexpr unsigned kMinor = 255;

bool is_device_file(const char* path) noexcept {
  // The headers say that these calls never get a null pointer. Programs pass one all the same, to
  // be answered EFAULT.
  asm("" : "+r"(path));
  constexpr std::string_view kFolder = "/dev/infiniband/";
  return path != nullptr && std::strncmp(path, kFolder.data(), kFolder.size()) == 0 &&
         std::strcmp(path + kFolder.size(), softverbs::kDeviceName) == 0;
}

/// A character device that everybody may read and write.
template <typename Stat>
int describe(Stat& file) noexcept {
  file = {};
  file.st_mode = S_IFCHR | 0666;
  file.st_nlink = 1;
  file.st_rdev = makedev(kMajor, kMinor);
  return 0;
}

int check_access(int mode) noexcept {
  if ((mode & X_OK) == 0) return 0;
  errno = EACCES;
  return -1;
}

}  // namespace

}  // namespace spinwire::preload

using spinwire::preload::check_access;
using spinwire::preload::describe;
using spinwire::preload::is_device_file;

SOFTVERBS_INTERPOSED int stat(const char* path, struct stat* file) noexcept {
  return is_device_file(path) ? describe(*file) : SOFTVERBS_NEXT(stat)(path, file);
}
SOFTVERBS_INTERPOSED int stat64(const char* path, struct stat64* file) noexcept {
  return is_device_file(path) ? describe(*file) : SOFTVERBS_NEXT(stat64)(path, file);
}
SOFTVERBS_INTERPOSED int access(const char* path, int mode) noexcept {
  return is_device_file(path) ? check_access(mode) : SOFTVERBS_NEXT(access)(path, mode);
}
SOFTVERBS_INTERPOSED int faccessat(int folder, const char* path, int mode, int flags) noexcept {
  return is_device_file(path) ? check_access(mode)
                              : SOFTVERBS_NEXT(faccessat)(folder, path, mode, flags);
}

/// Programs built before glibc 2.33 call these in place of stat(). dlsym() does not find them,
/// since new programs must not.
#define SOFTVERBS_NEXT_XSTAT(function)                                                        \
  ([] {                                                                                       \
    static auto* const next =                                                                 \
        reinterpret_cast<decltype(&function)>(::dlvsym(RTLD_NEXT, #function, "GLIBC_2.2.5")); \
    return next;                                                                              \
  }())

SOFTVERBS_INTERPOSED int __xstat(int version, const char* path,  // NOLINT: libc's name
                                 struct stat* file) noexcept {
  return is_device_file(path) ? describe(*file)
                              : SOFTVERBS_NEXT_XSTAT(__xstat)(version, path, file);
}
SOFTVERBS_INTERPOSED int __xstat64(int version, const char* path,  // NOLINT: libc's name
                                   struct stat64* file) noexcept {
  return is_device_file(path) ? describe(*file)
                              : SOFTVERBS_NEXT_XSTAT(__xstat64)(version, path, file);
}
