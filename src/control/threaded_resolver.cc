#include "control/threaded_resolver.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "control/control_port.h"

namespace spinwire::control {
namespace {

constexpr const char* kAsked = "resolve a peer's RDMA address";
/// A verb needs little; programs may lock all their memory, stacks too.
constexpr std::size_t kStackBytes = 256 << 10;

}  // namespace

struct ThreadedResolver::Job {
  ThreadedResolver& resolver;
  std::vector<Resolution> waiting;  ///< for the outcome
  Gid gid;
  verbs::Place from;
  bool is_started = false;
  int error = 0;                     ///< errno value
  std::atomic<bool> is_over{false};  ///< `error` is written; the thread touches this no more

  Job(ThreadedResolver& of, const Resolution& what, const Gid& to, const verbs::Place& leaves)
      : resolver(of), waiting{what}, gid(to), from(leaves) {}

  static void* run(void* argument) noexcept {
    Job& job = *static_cast<Job*>(argument);
    const HelperEvent event = job.resolver.event_;
    job.error = job.wait();
    job.is_over.store(true, std::memory_order_release);
    raise(event);
    return nullptr;
  }

 private:
  /// The kernel gives up after a second and one request (rdma_resolve_ip of ib_core), which may be
  /// lost: so a second one, as through rdma_cm.
  [[nodiscard]] int wait() const noexcept {
    try {
      const int first = resolver.wait_(from, gid);
      const bool again = first == ETIMEDOUT && !resolver.is_closing_.load();
      return again ? resolver.wait_(from, gid) : first;
    } catch (...) {
      return ENOMEM;
    }
  }
};

ThreadedResolver::ThreadedResolver(ControlPort& port, WaitForNeighbour wait)
    : port_(port), wait_(std::move(wait)), process_(::getpid()) {}

ThreadedResolver::~ThreadedResolver() {
  is_closing_ = true;
  if (event_ != nullptr) port_.unwatch(event_->get());
  if (process_ != ::getpid()) return;
  for (const auto& job : jobs_) {
    while (job->is_started && !job->is_over.load(std::memory_order_acquire)) {
      pollfd raised{event_->get(), POLLIN, 0};
      (void)::poll(&raised, 1, -1);
      clear(event_);
    }
  }
}

Result<void> ThreadedResolver::start(Job& job) {
  const auto thread = start_helper_thread(kAsked, Job::run, &job, kStackBytes);
  if (!thread) return tl::unexpected(thread.error());
  ::pthread_detach(*thread);
  job.is_started = true;
  ++running_;
  return {};
}

Result<bool> ThreadedResolver::begin(const Resolution& what, const Gid& gid, GidType,
                                     const verbs::Place* from) {
  if (event_ == nullptr) {
    auto made = open_helper_event(kAsked, port_, *this);
    if (!made) return tl::unexpected(made.error());
    event_ = std::move(*made);
  }
  const auto same = std::find_if(jobs_.begin(), jobs_.end(), [&](const auto& job) {
    return job->gid == gid && job->from.is_at(*from);
  });
  if (same != jobs_.end()) {
    (*same)->waiting.push_back(what);
    return false;
  }
  auto job = std::make_unique<Job>(*this, what, gid, *from);
  jobs_.reserve(jobs_.size() + 1);
  if (running_ < kMost) {
    if (auto started = start(*job); !started) return tl::unexpected(started.error());
  }
  jobs_.push_back(std::move(job));
  return false;
}

void ThreadedResolver::cancel(const Resolution& what) noexcept {
  for (const auto& job : jobs_) {
    if (std::erase(job->waiting, what) == 0) continue;
    if (job->waiting.empty() && !job->is_started) erase(*job);
    return;
  }
}

ThreadedResolver::Job* ThreadedResolver::find_over() const noexcept {
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const auto& job) {
    return job->is_over.load(std::memory_order_acquire);
  });
  return found != jobs_.end() ? found->get() : nullptr;
}

void ThreadedResolver::erase(const Job& job) noexcept {
  if (job.is_started) --running_;
  std::erase_if(jobs_, [&](const auto& each) { return each.get() == &job; });
}

void ThreadedResolver::start_waiting() {
  for (const auto& job : jobs_) {
    if (running_ == kMost) return;
    if (job->is_started || job->is_over.load(std::memory_order_relaxed)) continue;
    if (start(*job)) continue;
    job->error = EAGAIN;  // no thread: reported like another outcome
    job->is_over.store(true, std::memory_order_relaxed);
    raise(event_);
  }
}

void ThreadedResolver::on_readable() {
  constexpr int kMostPerPoll = 16;
  clear(event_);
  Job* job = find_over();
  for (int left = kMostPerPoll; job != nullptr && left != 0; --left, job = find_over()) {
    if (job->waiting.empty()) {
      erase(*job);
      continue;
    }
    const Resolution what = job->waiting.front();
    job->waiting.erase(job->waiting.begin());
    const Gid gid = job->gid;
    const int error = job->error;
    if (job->waiting.empty()) erase(*job);
    // The owner may begin or cancel others.
    port_.on_resolved(what, error == 0 ? Result<void>() : tl::unexpected(unreachable(gid, error)));
  }
  if (job != nullptr) raise(event_);  // the rest in the next poll
  start_waiting();
}

}  // namespace spinwire::control
