// The file of an engine: how it appears, what readers find, and that it goes.
#include "observe/page_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "observe/engine_folder.h"
#include "observe/engine_paths.h"
#include "observe/page_layout.h"

namespace observe_test {
namespace {

observe::RowWords row_of(std::uint64_t value) {
  observe::RowWords row;
  row.fill(value);
  return row;
}
std::size_t words_of(Table table) {
  return (observe::table_columns(table).row_bytes - sizeof(observe::RowHeader)) / 8;
}
void write(PageFile& file, Table table, std::uint32_t index, std::uint64_t value) {
  file.write(table, index, row_of(value), words_of(table));
}

mode_t mode_of(const std::string& path) {
  struct stat about {};
  EXPECT_EQ(::stat(path.c_str(), &about), 0);
  return about.st_mode & 07777u;
}

class ObservePageFile : public WithEngineFolder {};

TEST_F(ObservePageFile, DescribesItself) {
  const EngineFolder folder;
  auto file = PageFile::create(options_in(folder));
  ASSERT_TRUE(file) << file.error().message();
  EXPECT_EQ(mode_of(file->path()), 0400u);
  write(*file, Table::engine, 0, 7);
  write(*file, Table::pool, 3, 8);
  write(*file, Table::connection, 2, 9);
  const auto reading = folder.read();
  ASSERT_TRUE(reading) << reading.error().message();
  EXPECT_TRUE(reading->file.is_alive);
  EXPECT_EQ(reading->file.pid, static_cast<std::uint32_t>(::getpid()));
  EXPECT_EQ(reading->device, "a device");
  EXPECT_EQ(reading->tables.size(), observe::kTables);
  EXPECT_EQ(number(*reading, "engine", 0, "spinwire_polls_total"), 7);
  EXPECT_EQ(number(*reading, "pool", 0, "spinwire_pool_bytes"), 8);
  EXPECT_EQ(number(*reading, "connection", 0, "spinwire_connection_outstanding"), 9);
  EXPECT_EQ(number(*reading, "connection", 0, "spinwire_connection_age_seconds"), 9e-9);
  EXPECT_EQ(reading->find("session")->rows.size(), 0u);
  EXPECT_EQ(reading->find("nothing"), nullptr);
  for (const MetricTable& table : reading->tables) {
    EXPECT_EQ(table.columns.size(),
              static_cast<std::size_t>(std::ranges::count_if(
                  metrics(), [&](const Metric& metric) { return metric.table == table.name; })));
  }
  file->clear(Table::connection, 2);
  EXPECT_EQ(folder.read()->find("connection")->rows.size(), 0u);
}

TEST_F(ObservePageFile, GoesWithItsEngine) {
  const EngineFolder folder;
  {
    auto file = PageFile::create(options_in(folder));
    ASSERT_TRUE(file);
    PageFile moved = std::move(*file);
    EXPECT_EQ(folder.files(), 1u);
  }
  EXPECT_EQ(folder.files(), 0u);
}

TEST_F(ObservePageFile, FilesOfOneProcessDiffer) {
  const EngineFolder folder;
  const auto a = PageFile::create(options_in(folder)), b = PageFile::create(options_in(folder));
  ASSERT_TRUE(a && b);
  const auto engines = folder.engines();
  ASSERT_EQ(engines.size(), 2u);
  EXPECT_NE(engines[0].engine, engines[1].engine);
}

TEST_F(ObservePageFile, ReplacesNoFileAndFollowsNoLink) {
  const EngineFolder folder;
  const auto first = PageFile::create(options_in(folder));
  ASSERT_TRUE(first);
  const std::uint32_t number = folder.engines()[0].engine;
  const std::string target = folder.path() + "/target";
  std::ofstream(target) << "text";
  const auto next = [&](std::uint32_t engine) {
    return folder.path() + '/' +
           observe::file_name(::geteuid(), static_cast<std::uint32_t>(::getpid()), engine);
  };
  ASSERT_EQ(::symlink(target.c_str(), next(number + 1).c_str()), 0);
  ASSERT_EQ(::mkdir(next(number + 2).c_str(), 0700), 0);
  const auto second = PageFile::create(options_in(folder));
  ASSERT_TRUE(second) << second.error().message();
  EXPECT_EQ(second->path(), next(number + 3));
  EXPECT_EQ(bytes_of(target).size(), 4u);
  // Readers take neither for an engine's file.
  EXPECT_EQ(folder.engines().size(), 2u);
  EngineFile link;
  link.path = next(number + 1);
  EXPECT_EQ(read_engine(link).error().status, Status::invalid_argument);
  link.path = next(number + 2);
  EXPECT_EQ(read_engine(link).error().status, Status::invalid_argument);
  link.path = folder.path() + "/none";
  EXPECT_EQ(read_engine(link).error().status, Status::not_connected);
}

TEST_F(ObservePageFile, TakenNamesKeepNoEngineFromItsFile) {
  const EngineFolder folder;
  const auto first = PageFile::create(options_in(folder));
  ASSERT_TRUE(first) << first.error().message();
  const std::uint32_t number = folder.engines()[0].engine;
  const auto pid = static_cast<std::uint32_t>(::getpid());
  for (std::uint32_t i = 1; i <= 1000; ++i) {
    const std::string path = folder.path() + '/' + observe::file_name(::geteuid(), pid, number + i);
    ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
  }
  const auto second = PageFile::create(options_in(folder));
  ASSERT_TRUE(second) << second.error().message();
  const auto engines = folder.engines();
  ASSERT_EQ(engines.size(), 2u);
  for (const EngineFile& file : engines) {
    const auto reading = read_engine(file);
    ASSERT_TRUE(reading) << reading.error().message();
    EXPECT_EQ(reading->file.engine, file.engine);
  }
}

TEST_F(ObservePageFile, FilesOfOtherUsersAreNotOpened) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to read a file of another user";
  const EngineFolder folder;
  const std::string path = folder.path() + '/' + observe::file_name(0, 1, 1);
  std::ofstream(path) << "foreign";
  if (::chown(path.c_str(), 65534, 65534) != 0) GTEST_SKIP() << "may not give a file away";
  const base::UniqueFd watch(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  ASSERT_GE(::inotify_add_watch(watch.get(), path.c_str(), IN_OPEN), 0);
  EXPECT_TRUE(folder.engines().empty());
  std::array<char, 256> event{};
  EXPECT_EQ(::read(watch.get(), event.data(), event.size()), -1) << "it was opened";
  EXPECT_GE(base::UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)).get(), 0);
  EXPECT_GT(::read(watch.get(), event.data(), event.size()), 0) << "the watch works";
}

// Else one file could pass for those of several processes.
TEST_F(ObservePageFile, ItsNameSaysWhichEngineItIs) {
  const EngineFolder folder;
  const auto file = PageFile::create(options_in(folder));
  ASSERT_TRUE(file) << file.error().message();
  ASSERT_EQ(::chmod(file->path().c_str(), 0600), 0);
  const std::array<std::uint32_t, 2> other{1, 99};
  std::fstream(file->path(), std::ios::in | std::ios::out | std::ios::binary)
      .seekp(offsetof(observe::FileHeader, pid))
      .write(reinterpret_cast<const char*>(other.data()), sizeof other);
  const EngineFile listed = folder.engines().at(0);
  const auto reading = read_engine(listed);
  ASSERT_TRUE(reading) << reading.error().message();
  EXPECT_EQ(reading->file.pid, static_cast<std::uint32_t>(::getpid()));
  EXPECT_EQ(reading->file.engine, listed.engine);
  EngineFile unnamed;
  unnamed.path = file->path();
  EXPECT_EQ(read_engine(unnamed).value().file.pid, 1u);
}

TEST_F(ObservePageFile, SaysWhyThereIsNone) {
  const EngineFolder folder;
  PageFileOptions options = options_in(folder);
  options.directory = "/proc";  // nothing can be made there
  auto none = PageFile::create(options);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().status, Status::system);
  EXPECT_NE(none.error().message().find("observability.directory"), std::string::npos);
  options.directory = folder.path() + "/none";
  EXPECT_FALSE(PageFile::create(options));
  EXPECT_FALSE(list_engines(options.directory));
  EXPECT_EQ(folder.files(), 0u);
}

TEST_F(ObservePageFile, LiesOnNoDisk) {
  struct statfs system {};
  ASSERT_EQ(::statfs(".", &system), 0);
  if (system.f_type == TMPFS_MAGIC) GTEST_SKIP() << "needs a working directory on a disk";
  const EngineFolder folder;
  PageFileOptions options = options_in(folder);
  std::string disk = "spinwire-test-XXXXXX";
  ASSERT_NE(::mkdtemp(disk.data()), nullptr);
  options.directory = disk;
  const auto none = PageFile::create(options);
  const bool is_empty = std::filesystem::is_empty(disk);
  EXPECT_EQ(::rmdir(disk.c_str()), 0);
  EXPECT_TRUE(is_empty);
  ASSERT_FALSE(none);
  if (none.error().message().find("O_TMPFILE") != std::string::npos)
    GTEST_SKIP() << "no file without a name can be made here either";
  EXPECT_EQ(none.error().status, Status::unsupported);
  EXPECT_NE(none.error().message().find("not in memory"), std::string::npos)
      << none.error().message();
  EXPECT_NE(none.error().message().find("observability.directory"), std::string::npos);
}

/// Runs `body` in a child and returns its exit code, or the signal's number below 0.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST_F(ObservePageFile, ALimitOfFileSizeIsNoSignal) {
  const EngineFolder folder;
  EXPECT_EQ(in_child([&] {
              const rlimit few{4096, 4096};
              if (::setrlimit(RLIMIT_FSIZE, &few) != 0) return 1;
              const auto file = PageFile::create(options_in(folder));
              return !file && file.error().status == Status::limit ? 0 : 2;
            }),
            0);
}

TEST_F(ObservePageFile, ALimitOfOpenFilesIsNamed) {
  const EngineFolder folder;
  EXPECT_EQ(in_child([&] {
              const rlimit none{3, 3};
              ::closefrom(3);
              if (::setrlimit(RLIMIT_NOFILE, &none) != 0) return 1;
              const auto file = PageFile::create(options_in(folder));
              if (file) return 2;
              return file.error().remedy.starts_with("raise the limit of open files") ? 0 : 3;
            }),
            0);
}

TEST_F(ObservePageFile, AllPagesAreAllocatedAtOnce) {
  const EngineFolder folder;
  const auto file = PageFile::create(options_in(folder, 1000));
  ASSERT_TRUE(file);
  struct stat about {};
  ASSERT_EQ(::stat(file->path().c_str(), &about), 0);
  EXPECT_GT(about.st_size, 500'000);
  EXPECT_GE(about.st_blocks * 512, about.st_size);
}

/// A process that dies with an open file.
void die_with_file(const EngineFolder& folder) {
  EXPECT_EQ(in_child([&] {
              auto file = PageFile::create(options_in(folder));
              if (!file) return 1;
              write(*file, Table::engine, 0, 42);
              (void)::raise(SIGKILL);
              return 2;
            }),
            -SIGKILL);
}

TEST_F(ObservePageFile, IsReadAfterTheProcessWasKilled) {
  const EngineFolder folder;
  die_with_file(folder);
  const auto reading = folder.read();
  ASSERT_TRUE(reading) << reading.error().message();
  EXPECT_FALSE(reading->file.is_alive);
  EXPECT_NE(reading->file.pid, static_cast<std::uint32_t>(::getpid()));
  EXPECT_EQ(number(*reading, "engine", 0, "spinwire_polls_total"), 42);
  EXPECT_EQ(reading->since_written.count(), 0);
  EXPECT_EQ(remove_dead_engines(0, folder.path()).value(), 1u);
  EXPECT_EQ(folder.files(), 0u);
}

TEST_F(ObservePageFile, TheNextEngineLeavesTheNewestDeadOnes) {
  const EngineFolder folder;
  for (std::size_t i = 0; i < observe::kDeadFilesKept + 3; ++i) {
    die_with_file(folder);
    EXPECT_EQ(folder.files(), std::min(i, observe::kDeadFilesKept) + 1);
  }
  const auto newest = PageFile::create(options_in(folder));
  ASSERT_TRUE(newest);
  EXPECT_EQ(folder.files(), observe::kDeadFilesKept + 1);
  EXPECT_EQ(remove_dead_engines(0, folder.path()).value(), observe::kDeadFilesKept);
  EXPECT_EQ(folder.files(), 1u) << "a living engine's file stays";
  EXPECT_TRUE(folder.engines()[0].is_alive);
}

TEST_F(ObservePageFile, AForkedChildDoesNotKeepADeadEngineAlive) {
  const EngineFolder folder;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  pid_t grandchild = -1;
  EXPECT_EQ(in_child([&] {
              const auto file = PageFile::create(options_in(folder));
              if (!file) return 1;
              const pid_t child = ::fork();
              if (child == 0) {
                for (;;) ::pause();
              }
              if (::write(ends[1], &child, sizeof child) != sizeof child) return 2;
              (void)::raise(SIGKILL);
              return 3;
            }),
            -SIGKILL);
  ASSERT_EQ(::read(ends[0], &grandchild, sizeof grandchild),
            static_cast<ssize_t>(sizeof grandchild));
  EXPECT_FALSE(folder.engines()[0].is_alive);
  ::kill(grandchild, SIGKILL);
  ::close(ends[0]);
  ::close(ends[1]);
}

/// Children of a thread that forks all the time. They live until the end.
class Forks {
 public:
  Forks() : thread_([this] { run(); }) {}
  Forks(const Forks&) = delete;
  Forks& operator=(const Forks&) = delete;
  ~Forks() { stop(); }
  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  /// The system has refused a fork.
  [[nodiscard]] bool have_failed() const noexcept { return have_failed_; }
  void stop() {
    over_ = true;
    if (thread_.joinable()) thread_.join();
    for (const pid_t child : children_) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
    children_.clear();
  }

 private:
  static constexpr std::size_t kMost = 200;
  void run() {
    while (!over_ && children_.size() < kMost) {
      const pid_t child = ::fork();
      if (child == 0) {
        for (;;) ::pause();
      }
      if (child < 0) {
        have_failed_ = true;
        return;
      }
      children_.push_back(child);
      ++count_;
    }
  }

  std::vector<pid_t> children_;
  std::atomic<std::size_t> count_ = 0;
  std::atomic<bool> over_ = false;
  std::atomic<bool> have_failed_ = false;
  std::thread thread_;
};

TEST_F(ObservePageFile, AChildForkedWhileAFileIsMadeDoesNotKeepItLocked) {
  const EngineFolder folder;
  Forks forks;
  // Most of the forks happen while a file is made, unless they wait.
  for (std::size_t forked = forks.count(), i = 0; i < 50 || forked < 100; ++i) {
    ASSERT_FALSE(forks.have_failed());
    ASSERT_LT(i, 100'000U) << "the other thread cannot fork";
    auto file = PageFile::create(options_in(folder));
    ASSERT_TRUE(file) << file.error().message();
    const int fd = observe::open_file(file->path());
    ASSERT_GE(fd, 0);
    file = PageFile();  // its process would have died
    EXPECT_FALSE(observe::is_locked(fd)) << "file " << i;
    ::close(fd);
    forked = forks.count();
    if (HasFailure()) break;
    std::this_thread::yield();
  }
}

TEST_F(ObservePageFile, BytesOfOthersChangeNoWrite) {
  const EngineFolder folder;
  auto file = PageFile::create(options_in(folder));
  ASSERT_TRUE(file);
  write(*file, Table::engine, 0, 1);
  const std::vector<std::byte> before = bytes_of(file->path());
  // Another process of the user overwrites everything, offsets and sequence numbers too.
  ASSERT_EQ(::chmod(file->path().c_str(), 0600), 0);
  {
    std::fstream all(file->path(), std::ios::in | std::ios::out | std::ios::binary);
    all << std::string(before.size(), '\xff');
  }
  write(*file, Table::engine, 0, 5);
  const std::vector<std::byte> after = bytes_of(file->path());
  ASSERT_EQ(after.size(), before.size());
  const std::size_t row_bytes = observe::table_columns(Table::engine).row_bytes;
  std::size_t written = 0;
  for (const std::byte each : after) written += each != std::byte{0xff} ? 1 : 0;
  EXPECT_LE(written, row_bytes);
  EXPECT_GT(written, row_bytes - sizeof(observe::RowHeader) - 1);
}

TEST_F(ObservePageFile, ARowThatChangesMeanwhileIsNotConsistent) {
  const EngineFolder folder;
  auto file = PageFile::create(options_in(folder));
  ASSERT_TRUE(file);
  write(*file, Table::engine, 0, 1);
  write(*file, Table::pool, 0, 1);
  const auto before = bytes_of(file->path());
  write(*file, Table::engine, 0, 2);
  const auto after = bytes_of(file->path());
  const auto reading = decode_engine(before, after);
  ASSERT_TRUE(reading);
  EXPECT_FALSE(reading->find("engine")->rows[0].is_consistent);
  EXPECT_TRUE(reading->find("pool")->rows[0].is_consistent);
  EXPECT_TRUE(decode_engine(after, after)->find("engine")->rows[0].is_consistent);
  // A row that its writer has not finished: the sequence number is odd.
  auto torn = after;
  const std::size_t at = [&] {
    observe::FileHeader header;
    observe::TableDescriptor table;
    std::memcpy(&header, torn.data(), sizeof header);
    std::memcpy(&table, torn.data() + header.tables_offset, sizeof table);
    return static_cast<std::size_t>(table.rows_offset);
  }();
  torn[at] ^= std::byte{1};
  EXPECT_FALSE(decode_engine(torn, torn)->find("engine")->rows[0].is_consistent);
}

/// Takes away the memory of this process's mapping of a file, from `offset` on. False: there is
/// none.
bool unmap_from(const std::string& path, std::size_t offset) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) return false;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream in(line);
    std::size_t begin = 0, end = 0;
    std::string rights, from, device;
    ino_t inode = 0;
    char dash = 0;
    in >> std::hex >> begin >> dash >> end >> rights >> from >> device >> std::dec >> inode;
    if (inode != about.st_ino) continue;
    return ::mprotect(reinterpret_cast<void*>(begin + offset), end - begin - offset, PROT_NONE) ==
           0;
  }
  return false;
}

/// The first row of the connections that begins in a page and ends in a later one, whose offset is
/// `page`.
std::uint32_t row_across_pages(const std::string& path, std::size_t& page) {
  const auto bytes = bytes_of(path);
  observe::FileHeader header;
  observe::TableDescriptor table;
  std::memcpy(&header, bytes.data(), sizeof header);
  std::memcpy(&table,
              bytes.data() + header.tables_offset +
                  static_cast<std::size_t>(Table::connection) * sizeof table,
              sizeof table);
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::uint32_t row = 0;
  std::size_t at = table.rows_offset;
  const auto is_across = [&] {
    page = (at + table.row_bytes - 1) / page_bytes * page_bytes;
    return page >= at + sizeof(observe::RowHeader);
  };
  for (; !is_across(); at += table.row_bytes) ++row;
  return row;
}

TEST_F(ObservePageFile, ARowWhoseWriterDiedHalfWayIsMarked) {
  const EngineFolder folder;
  EXPECT_EQ(in_child([&] {
              auto file = PageFile::create(options_in(folder, 64));
              if (!file) return 1;
              std::size_t page = 0;
              const std::uint32_t row = row_across_pages(file->path(), page);
              write(*file, Table::connection, row, 1);
              (void)::signal(SIGSEGV, [](int) { ::_exit(7); });
              if (!unmap_from(file->path(), page)) return 2;
              write(*file, Table::connection, row, 2);  // ends in the middle of the row
              return 3;
            }),
            7);
  const auto reading = folder.read();
  ASSERT_TRUE(reading) << reading.error().message();
  ASSERT_EQ(reading->find("connection")->rows.size(), 1u);
  EXPECT_FALSE(reading->find("connection")->rows[0].is_consistent);
}

/// A reader never sees half of a row, however fast the rows change.
TEST_F(ObservePageFile, ReadersSeeWholeRows) {
  const EngineFolder folder;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t writer = ::fork();
  if (writer == 0) {
    auto file = PageFile::create(options_in(folder));
    if (!file) ::_exit(1);
    write(*file, Table::engine, 0, 1);
    if (::write(ends[1], "x", 1) != 1) ::_exit(2);
    for (std::uint64_t i = 1;; ++i) {
      write(*file, Table::engine, 0, i | 1);  // a text that begins with a 0 is empty
      // Readers need a moment in which a row stands still, as it does between control steps.
      for (int wait = 0; wait < 200'000; ++wait) asm volatile("");
    }
  }
  char ready = 0;
  ASSERT_EQ(::read(ends[0], &ready, 1), 1);
  int whole = 0;
  for (int i = 0; i < 500; ++i) {
    const auto reading = folder.read();
    ASSERT_TRUE(reading) << reading.error().message();
    const MetricRow& row = reading->find("engine")->rows.at(0);
    if (!row.is_consistent) continue;
    ++whole;
    for (const MetricValue& value : row.values) {
      if (value.text.empty()) {
        ASSERT_EQ(value.number, row.values[0].number);
      }
    }
  }
  EXPECT_GT(whole, 0);
  ::kill(writer, SIGKILL);
  ::waitpid(writer, nullptr, 0);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(ObservePaths, OnlyExactNamesCount) {
  using observe::parse_file_name;
  const auto file = parse_file_name("spinwire-1000-42-7", 1000);
  ASSERT_TRUE(file);
  EXPECT_EQ(file->pid, 42u);
  EXPECT_EQ(file->engine, 7u);
  for (const char* other :
       {"spinwire-1000-42", "spinwire-1000-42-", "spinwire-1000-42-7-", "spinwire-1000-42-7-1",
        "spinwire-1000-042-7", "spinwire-1000-42-7x", "spinwire-1000--42-7", "spinwire-1001-42-7",
        "spinwire-1000-42-99999999999", "Spinwire-1000-42-7", "spinwire-", ""}) {
    EXPECT_FALSE(parse_file_name(other, 1000)) << other;
  }
  EXPECT_NE(observe::process_start(), 0u);
}

}  // namespace
}  // namespace observe_test
