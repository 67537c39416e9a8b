#include "control/threaded_resolver.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log_message.h"
#include "control/control_port.h"

namespace spinwire::control {
namespace {

constexpr const char* kAsked = "resolve a peer's RDMA address";
/// A verb needs little; programs may lock all their memory, stacks too.
constexpr std::size_t kStackBytes = 256 << 10;

/// Whether the error says something of the peer. After any other, a verb that uses the address will
/// say what is wrong.
bool is_about_peer(int error) noexcept {
  switch (error) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EDESTADDRREQ:
      return true;
    default:
      return false;
  }
}

/// Whether the device has no address handles, as hns of rdma-core on HIP08.
bool has_no_handles(int error) noexcept { return error == EOPNOTSUPP || error == ENOSYS; }

/// Other errors come at once. A verb that has waited for so long has waited for the peer, whatever
/// it says.
constexpr std::chrono::milliseconds kWaited{500};

}  // namespace

struct ThreadedResolver::Job {
  ThreadedResolver& resolver;
  std::vector<Resolution> waiting;  ///< for the outcome
  Gid gid;
  verbs::Place from;
  std::optional<Source> counted_for;  ///< in running_of_; none for outbound ones
  bool is_started = false;
  int error = 0;                     ///< errno value
  std::optional<Error> failure;      ///< there was no thread
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
  [[nodiscard]] Result<void> outcome() const {
    if (failure) return tl::unexpected(*failure);
    if (is_about_peer(error)) return tl::unexpected(unreachable(gid, error));
    return {};
  }

 private:
  /// The kernel gives up after a second and one request (rdma_resolve_ip of ib_core), which may be
  /// lost: so a second one, as through rdma_cm.
  [[nodiscard]] int wait() const noexcept {
    const int first = wait_once();
    return first == ETIMEDOUT && !resolver.is_closing_.load() ? wait_once() : first;
  }
  [[nodiscard]] int wait_once() const noexcept {
    const auto begun = std::chrono::steady_clock::now();
    int found = 0;
    try {
      found = resolver.wait_(from, gid);
    } catch (...) {
      return ENOMEM;
    }
    if (found == 0 || is_about_peer(found)) return found;
    return std::chrono::steady_clock::now() - begun >= kWaited ? ETIMEDOUT : found;
  }
};

ThreadedResolver::ThreadedResolver(ControlPort& port, WaitForNeighbour wait, StartThread start)
    : port_(port), wait_(std::move(wait)), start_thread_(std::move(start)) {
  // Opened at once, so that no peer makes us open anything. A failure is retried when needed.
  (void)open();
}

ThreadedResolver::~ThreadedResolver() {
  is_closing_ = true;
  if (event_ == nullptr) return;
  port_.unwatch(event_->get());
  for (const auto& job : jobs_) {
    while (job->is_started && !job->is_over.load(std::memory_order_acquire)) {
      pollfd raised{event_->get(), POLLIN, 0};
      (void)::poll(&raised, 1, -1);
      clear(event_);
    }
  }
}

Result<void> ThreadedResolver::open() {
  if (event_ != nullptr) return {};
  auto made = open_helper_event(kAsked, port_, *this);
  if (!made) return tl::unexpected(made.error());
  event_ = std::move(*made);
  return {};
}

Result<bool> ThreadedResolver::begin(const Resolution& what, const Gid& gid, GidType,
                                     const verbs::Place* from) {
  if (is_unable_) return true;
  if (auto opened = open(); !opened) return tl::unexpected(opened.error());
  const auto same = std::find_if(jobs_.begin(), jobs_.end(), [&](const auto& job) {
    return job->gid == gid && job->from.is_at(*from) && !job->is_over.load();
  });
  if (same != jobs_.end()) {
    (*same)->waiting.push_back(what);
  } else {
    jobs_.push_back(std::make_unique<Job>(*this, what, gid, *from));
  }
  start_waiting();
  return false;
}

void ThreadedResolver::cancel(const Resolution& what) noexcept {
  for (const auto& job : jobs_) {
    if (std::erase(job->waiting, what) == 0) continue;
    if (job->waiting.empty() && !job->is_started) erase(*job);
    return;
  }
}

bool ThreadedResolver::has_room(const std::optional<Source>& source) const noexcept {
  if (running_ >= kMost) return false;
  if (!source) return true;
  const auto found = running_of_.find(*source);
  return running_inbound_ < kMostInbound &&
         (found == running_of_.end() || found->second < kMostOfSource);
}

void ThreadedResolver::start_waiting() {
  for (const auto& job : jobs_) {
    if (running_ == kMost) return;
    if (job->is_started || job->is_over.load(std::memory_order_relaxed)) continue;
    // A peer that names the address first does not make others wait for a thread of its own.
    const auto first = std::find_if(job->waiting.begin(), job->waiting.end(),
                                    [this](const auto& what) { return has_room(what.source); });
    if (first == job->waiting.end()) continue;
    job->counted_for = first->source;
    if (!start(*job)) return;
  }
}

bool ThreadedResolver::start(Job& job) noexcept {
  const bool is_inbound = job.counted_for.has_value();
  auto thread = base::no_throw(kAsked, [&]() -> Result<pthread_t> {
    if (is_inbound) ++running_of_[*job.counted_for];
    return start_thread_(kAsked, Job::run, &job, kStackBytes);
  });
  if (thread) {
    ::pthread_detach(*thread);
    job.is_started = true;
    ++running_;
    if (is_inbound) ++running_inbound_;
    return true;
  }
  if (is_inbound) uncount(*job.counted_for);
  if (running_ != 0) return false;  // it waits until one of these ends
  job.failure = std::move(thread.error());
  job.is_over.store(true, std::memory_order_relaxed);
  raise(event_);
  return false;
}

void ThreadedResolver::uncount(const Source& source) noexcept {
  const auto found = running_of_.find(source);
  if (found != running_of_.end() && --found->second == 0) running_of_.erase(found);
}

ThreadedResolver::Job* ThreadedResolver::find_over() const noexcept {
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const auto& job) {
    return job->is_over.load(std::memory_order_acquire);
  });
  return found != jobs_.end() ? found->get() : nullptr;
}

void ThreadedResolver::erase(const Job& job) noexcept {
  if (job.is_started) {
    --running_;
    if (job.counted_for) {
      --running_inbound_;
      uncount(*job.counted_for);
    }
  }
  std::erase_if(jobs_, [&](const auto& each) { return each.get() == &job; });
}

void ThreadedResolver::on_readable() {
  constexpr int kMostPerPoll = 16;
  clear(event_);
  Job* job = find_over();
  for (int left = kMostPerPoll; job != nullptr && left != 0; --left, job = find_over()) {
    has_worked_ = has_worked_ || (job->is_started && job->error == 0);
    if (has_no_handles(job->error) && !has_worked_ && !std::exchange(is_unable_, true)) {
      base::log(LogLevel::warning, "polls may wait for ARP when peers connect: ibv_create_ah: {}",
                base::errno_text(job->error));
    }
    if (job->waiting.empty()) {
      erase(*job);
      continue;
    }
    const Resolution what = job->waiting.front();
    job->waiting.erase(job->waiting.begin());
    const Result<void> outcome = job->outcome();
    // After an error that says nothing of the peer, the verb may leave an unanswered request
    // behind.
    const bool is_answered = job->error == 0;
    if (job->waiting.empty()) erase(*job);
    // The owner may begin or cancel others.
    port_.on_resolved(what, outcome, is_answered);
  }
  if (job != nullptr) raise(event_);  // the rest in the next poll
  start_waiting();
}

}  // namespace spinwire::control
