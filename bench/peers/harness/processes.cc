#include "peers/harness/processes.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "common/setup.h"

namespace spinwire::bench {
namespace {

void write_all(int socket, const void* data, std::size_t size) {
  if (::write(socket, data, size) != static_cast<ssize_t>(size))
    give_up("the other process does not take an address");
}

void read_all(int socket, void* data, std::size_t size) {
  for (std::size_t got = 0; got < size;) {
    const ssize_t n = ::read(socket, static_cast<char*>(data) + got, size - got);
    if (n <= 0) give_up("the other process has sent no address");
    got += static_cast<std::size_t>(n);
  }
}

}  // namespace

void* map_shared(std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) give_up("there is no shared memory");
  return memory;
}

void pin_to_cpu(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(cpu), &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0) give_up("the processor cannot be pinned");
}

std::uint64_t times_preempted() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return static_cast<std::uint64_t>(usage.ru_nivcsw);
}

std::string join_parts(const std::vector<std::string>& parts) {
  std::string joined;
  for (const std::string& part : parts) {
    const std::uint64_t size = part.size();
    joined.append(reinterpret_cast<const char*>(&size), sizeof size);
    joined += part;
  }
  return joined;
}

std::vector<std::string> split_parts(const std::string& joined) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < joined.size();) {
    std::uint64_t size = 0;
    std::memcpy(&size, joined.data() + at, sizeof size);
    at += sizeof size;
    parts.push_back(joined.substr(at, size));
    at += size;
  }
  return parts;
}

SecondProcess::SecondProcess(const std::function<int(int)>& work) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) give_up("there is no socket pair");
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) give_up("there is no second process");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(ends[0]);
    if (::getppid() != parent) ::_exit(1);
    ::_exit(work(ends[1]));
  }
  ::close(ends[1]);
  socket_ = ends[0];
}

void SecondProcess::check_alive() {
  // A process that gave up has said why.
  if (::waitpid(pid_, nullptr, WNOHANG) != 0) give_up("the second process has ended");
}

bool SecondProcess::wait() {
  int status = 0;
  ::waitpid(pid_, &status, 0);
  return status == 0;
}

std::string exchange_addresses(int socket, const std::string& ours) {
  const std::uint64_t size = ours.size();
  write_all(socket, &size, sizeof size);
  write_all(socket, ours.data(), ours.size());
  std::uint64_t their_size = 0;
  read_all(socket, &their_size, sizeof their_size);
  std::string theirs(their_size, '\0');
  read_all(socket, theirs.data(), theirs.size());
  return theirs;
}

}  // namespace spinwire::bench
