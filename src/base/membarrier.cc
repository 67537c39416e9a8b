#include "base/membarrier.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace spinwire::base {
namespace {

long call(int command) noexcept { return ::syscall(SYS_membarrier, command, 0, 0); }

}  // namespace

bool membarrier_available() noexcept {
  const long commands = call(MEMBARRIER_CMD_QUERY);
  return commands >= 0 && (commands & MEMBARRIER_CMD_GLOBAL_EXPEDITED) != 0 &&
         call(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0;
}

bool membarrier() noexcept {
  if (call(MEMBARRIER_CMD_GLOBAL_EXPEDITED) == 0) return true;
  // The expedited command may fail to allocate a set of processors; the slow one allocates nothing.
  return call(MEMBARRIER_CMD_GLOBAL) == 0;
}

}  // namespace spinwire::base
