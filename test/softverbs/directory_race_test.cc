// A thread opens a context while another one closes one.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "softverbs/context_gid.h"
#include "softverbs/peer_process.h"
#include "softverbs/process_directory.h"

namespace softverbs_test::directory_race {
namespace {

constexpr std::size_t kPage = 4096;

/// Where this process has mapped the file of a descriptor of its own; null: nowhere.
void* mapping_of(std::uint32_t fd) {
  struct stat file {};
  must(::fstat(static_cast<int>(fd), &file) == 0, "fstat");
  std::ifstream maps("/proc/self/maps");
  const std::string inode = ' ' + std::to_string(file.st_ino) + ' ';
  for (std::string line; std::getline(maps, line);) {
    if (line.find("spinwire-process") != std::string::npos && line.find(inode) != std::string::npos)
      return reinterpret_cast<void*>(std::stoull(line, nullptr, 16));
  }
  return nullptr;
}

/// Another thread, which runs while this one is about to write to a page, until it is done or
/// waits.
struct Between {
  void* page = nullptr;
  std::atomic<bool> begun{false};
  std::atomic<pid_t> thread{0};
  std::atomic<bool> done{false};
  std::atomic<bool> is_late{false};  ///< it neither ended nor slept within a minute
};
Between* between = nullptr;

/// Whether a thread of this process sleeps in the kernel. For a handler of signals.
bool sleeps(pid_t thread) {
  const std::string name = "/proc/self/task/" + std::to_string(thread) + "/stat";
  const spinwire::base::UniqueFd file(::open(name.c_str(), O_RDONLY | O_CLOEXEC));
  char text[128]{};
  if (::read(file.get(), text, sizeof text - 1) <= 0) return false;
  const char* const name_end = std::strrchr(text, ')');
  return name_end != nullptr && name_end[1] == ' ' && name_end[2] == 'S';
}

/// The write to the page goes on when the other thread is done, or waits for this one.
void let_it_run(int, siginfo_t* fault, void*) {
  const auto at = reinterpret_cast<std::uintptr_t>(fault->si_addr);
  const auto page = reinterpret_cast<std::uintptr_t>(between->page);
  if (at < page || at >= page + kPage) std::abort();
  if (::mprotect(between->page, kPage, PROT_READ | PROT_WRITE) != 0) std::abort();
  between->begun = true;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!between->done && (between->thread == 0 || !sleeps(between->thread))) {
    if (std::chrono::steady_clock::now() > limit) {
      between->is_late = true;
      return;
    }
    (void)::sched_yield();
  }
}

/// Calls let_it_run() at the next write to the page.
class AtNextWrite {
 public:
  explicit AtNextWrite(Between& what) {
    between = &what;
    struct sigaction action {};
    action.sa_sigaction = let_it_run;
    action.sa_flags = SA_SIGINFO;
    must(::sigaction(SIGSEGV, &action, &before_) == 0, "sigaction");
    must(::mprotect(what.page, kPage, PROT_READ) == 0, "mprotect");
  }
  AtNextWrite(const AtNextWrite&) = delete;
  AtNextWrite& operator=(const AtNextWrite&) = delete;
  ~AtNextWrite() { (void)::sigaction(SIGSEGV, &before_, nullptr); }

 private:
  struct sigaction before_ {};
};

// The slot is free in the private table before peers see that it is.
TEST(ProcessGid, ASlotThatIsBeingLeftIsNotTakenYet) {
  const ibv_gid context = sv::make_gid({static_cast<std::uint32_t>(getpid()), 5, 6});
  const auto stays = sv::DirectorySlot::take(context);
  ASSERT_TRUE(stays);
  std::optional<sv::DirectorySlot> leaves(std::move(*sv::DirectorySlot::take(context)));
  const ibv_gid gid = leaves->gid();
  const std::uint32_t left = leaves->number();
  Between other;
  other.page = mapping_of(sv::parse_gid(gid, sv::GidKind::process)->fd);
  ASSERT_NE(other.page, nullptr);
  sv::DirectorySlot taken;
  std::thread thread([&] {
    while (!other.begun) std::this_thread::yield();
    other.thread = static_cast<pid_t>(::syscall(SYS_gettid));
    taken = std::move(*sv::DirectorySlot::take(context));
    other.done = true;
  });
  {
    const AtNextWrite interrupted(other);
    leaves.reset();
  }
  EXPECT_TRUE(other.begun);
  EXPECT_FALSE(other.is_late) << "the other thread neither ended nor slept";
  thread.join();
  EXPECT_EQ(taken.number(), left) << "it is free again";
  Child peer([&](int) {
    ibv_gid found{};
    std::string why;
    must(sv::find_context(gid, taken.number() << 16 | 2, found, why), why.c_str());
  });
  EXPECT_EQ(peer.wait(), 0) << "no peer finds the context that took the slot";
}

}  // namespace
}  // namespace softverbs_test::directory_race
