// Completion channels and asynchronous events: descriptors that programs read, poll(2) or epoll. A
// sleeping program does not drive its device. So a thread does, as long as a queue with a channel
// is armed.
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

#include "preload/host.h"
#include "preload/interpose.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::preload {

namespace {

WatchedCq* find(Host& host, const ibv_cq* cq) noexcept {
  for (WatchedCq& watched : host.watched) {
    if (watched.cq == cq) return &watched;
  }
  return nullptr;
}

std::uint32_t waiting(const ibv_cq* base) noexcept {
  const auto* cq = static_cast<const softverbs::Cq*>(base);
  return cq->tail - cq->head;
}

std::uint32_t solicited(const ibv_cq* cq) noexcept {
  return static_cast<const softverbs::Cq*>(cq)->solicited;
}

void disarm(Host& host, WatchedCq& watched) noexcept {
  if (!watched.armed) return;
  watched.armed = false;
  --host.armed;
}

void fire(Host& host, WatchedCq& watched) noexcept {
  try {
    watched.channel->events.push_back(watched.cq);
  } catch (const std::bad_alloc&) {
    return;  // stays armed; the next check tries again
  }
  disarm(host, watched);
  (void)eventfd_write(watched.channel->fd, 1);
}

/// Whether an armed queue has the completion that it waits for.
bool due(const WatchedCq& watched) noexcept {
  return watched.solicited_only ? solicited(watched.cq) != watched.solicited
                                : waiting(watched.cq) > watched.older;
}

/// Drives contexts that have an armed queue, and sleeps while there is none.
class Driver {
 public:
  static Driver& get() {
    static Driver driver;
    return driver;
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  ~Driver() {
    if (!thread_.joinable()) return;
    if (pid_ != getpid()) {  // a forked child has no such thread
      thread_.detach();
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void add(Host& host) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(hosts_.begin(), hosts_.end(), &host) == hosts_.end()) hosts_.push_back(&host);
    if (!thread_.joinable()) {
      pid_ = getpid();
      thread_ = std::thread([this] { run(); });
    }
  }
  void remove(Host& host) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase(hosts_, &host);
  }
  /// Called when a queue is armed. Do not hold a host's lock, which run() takes under mutex_.
  void wake() noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      rounds_ = 0;
    }
    wake_.notify_all();
  }

 private:
  Driver() = default;

  void run() noexcept {
    (void)prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      bool armed = false;
      for (Host* host : hosts_) armed = drive(*host) || armed;
      // Completions often arrive soon. If not, longer naps save CPU.
      constexpr std::uint32_t kEagerRounds = 1000;
      const auto nap = std::chrono::microseconds(rounds_ < kEagerRounds ? 10 : 200);
      if (rounds_ < kEagerRounds) ++rounds_;
      if (armed) {
        drive_others(nullptr);
        wake_.wait_for(lock, nap);
      } else {
        wake_.wait(lock);
      }
    }
  }

  /// Drives the context. Returns whether a queue is still armed.
  static bool drive(Host& host) noexcept {
    const Guard guard(&host.device->verbs);
    if (host.armed == 0) return false;
    preload::drive(host);
    for (WatchedCq& watched : host.watched) {
      if (watched.armed && due(watched)) fire(host, watched);
    }
    return host.armed != 0;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Host*> hosts_;
  std::thread thread_;
  std::uint32_t rounds_ = 0;
  pid_t pid_ = 0;
  bool stop_ = false;
};

}  // namespace

void note_polled(Host& host, const ibv_cq* cq, std::uint32_t count) noexcept {
  WatchedCq* watched = find(host, cq);
  if (watched == nullptr || !watched->armed) return;
  if (watched->solicited_only) {
    if (due(*watched)) fire(host, *watched);
    return;
  }
  if (count > watched->older) return fire(host, *watched);
  watched->older -= count;
}

void watch(Host& host, ibv_cq* cq, Channel* channel) {
  host.watched.push_back({cq, channel});
  cq->channel = channel;
  ++channel->refcnt;
}

void unwatch(Host& host, ibv_cq* cq) noexcept {
  WatchedCq* watched = find(host, cq);
  if (watched == nullptr) return;
  disarm(host, *watched);
  std::erase(watched->channel->events, cq);
  --watched->channel->refcnt;
  *watched = host.watched.back();
  host.watched.pop_back();
}

std::uint32_t events_handed_out(const Host& host, const ibv_cq* cq) noexcept {
  const WatchedCq* watched = find(const_cast<Host&>(host), cq);
  return watched != nullptr ? watched->handed_out : 0;
}

std::uint32_t async_events_handed_out(const Host& host, const void* object) noexcept {
  const auto found = host.async_events.find(object);
  return found == host.async_events.end() ? 0 : found->second;
}

bool acknowledged(const Acknowledged& events, std::uint32_t handed_out) noexcept {
  pthread_mutex_lock(&events.mutex);
  const bool all = events.count == handed_out;
  pthread_mutex_unlock(&events.mutex);
  return all;
}

void wait_for_acknowledgements(const Acknowledged& events, std::uint32_t handed_out) noexcept {
  pthread_mutex_lock(&events.mutex);
  while (events.count != handed_out) pthread_cond_wait(&events.changed, &events.mutex);
  pthread_mutex_unlock(&events.mutex);
}

void drain_packets(Host& host) noexcept {
  // A poll for zero completions takes a packet from each lane.
  for (std::uint32_t i = 0; i < softverbs::kLaneLines; ++i)
    (void)host.bare.poll_cq(host.idle_cq, 0, nullptr);
}

void stop_driving(Host& host) noexcept { Driver::get().remove(host); }

/// Arming for any completion overrides arming for solicited ones, but not the reverse.
int req_notify_cq(ibv_cq* cq, int solicited_only) noexcept {
  {
    const Guard guard(cq->context);
    WatchedCq* watched = find(guard.host(), cq);
    if (watched == nullptr) return 0;  // without a channel there are no events
    const bool wider = watched->armed && watched->solicited_only && solicited_only == 0;
    if (!watched->armed || wider) {
      if (!watched->armed) ++guard.host().armed;
      watched->armed = true;
      watched->solicited_only = solicited_only != 0;
      watched->older = waiting(cq);
      watched->solicited = solicited(cq);
    }
  }
  Driver::get().wake();
  return 0;
}

}  // namespace spinwire::preload

using namespace spinwire;
using preload::Channel;
using preload::Guard;
using preload::ours;

SOFTVERBS_INTERPOSED ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_create_comp_channel)(context);
  try {
    auto channel = std::make_unique<Channel>();
    preload::Driver::get().add(preload::host_of(context));
    channel->context = context;
    channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    return channel->fd < 0 ? nullptr : channel.release();
  } catch (const std::exception&) {
    return preload::refuse_with<ibv_comp_channel>(ENOMEM);  // no memory, or no thread
  }
}

SOFTVERBS_INTERPOSED int ibv_destroy_comp_channel(ibv_comp_channel* base) {
  if (!ours(base->context)) return SOFTVERBS_NEXT(ibv_destroy_comp_channel)(base);
  const Guard guard(base->context);
  if (base->refcnt != 0) return EBUSY;
  ::close(base->fd);
  delete static_cast<Channel*>(base);
  return 0;
}

SOFTVERBS_INTERPOSED int ibv_get_cq_event(ibv_comp_channel* base, ibv_cq** cq, void** cq_context) {
  if (!ours(base->context)) return SOFTVERBS_NEXT(ibv_get_cq_event)(base, cq, cq_context);
  auto* channel = static_cast<Channel*>(base);
  for (eventfd_t one = 0;;) {
    if (eventfd_read(channel->fd, &one) != 0) return -1;
    const Guard guard(channel->context);
    if (channel->events.empty()) continue;  // the event's queue was destroyed
    *cq = channel->events.front();
    *cq_context = (*cq)->cq_context;
    channel->events.pop_front();
    ++preload::find(guard.host(), *cq)->handed_out;
    return 0;
  }
}

SOFTVERBS_INTERPOSED int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_get_async_event)(context, event);
  for (eventfd_t one = 0;;) {
    if (eventfd_read(context->async_fd, &one) != 0) return -1;
    const Guard guard(context);
    if (softverbs::get_async_event(context, event) == 0) {
      ++guard.host().async_events[event->element.cq];  // whichever member is set
      return 0;
    }
    // The event's object was destroyed.
  }
}
