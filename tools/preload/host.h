// A softverbs device opened by a program built for libibverbs: adds locks to the embedded device,
// and wakes threads that sleep on it.
#pragma once

#include <infiniband/verbs.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "softverbs/objects.h"

namespace spinwire::preload {

/// First come, first served: a thread that polls in a tight loop must not shut out one that posts.
class FairLock {
 public:
  void lock() noexcept {
    const std::uint32_t ticket = next_.fetch_add(1, std::memory_order_relaxed);
    for (;;) {
      const std::uint32_t now = serving_.load(std::memory_order_acquire);
      if (now == ticket) return;
      serving_.wait(now, std::memory_order_acquire);  // spins a while before it sleeps
    }
  }
  /// Takes the lock if nobody has it or waits for it.
  bool try_lock() noexcept {
    std::uint32_t now = serving_.load(std::memory_order_acquire);
    return next_.compare_exchange_strong(now, now + 1, std::memory_order_acquire);
  }
  void unlock() noexcept {
    serving_.fetch_add(1);
    serving_.notify_all();
  }

 private:
  std::atomic<std::uint32_t> next_{0};
  std::atomic<std::uint32_t> serving_{0};
};

/// Its descriptor counts events, one per read; what they are lies in `events`.
struct Channel : ibv_comp_channel {
  std::deque<ibv_cq*> events;
};

/// A completion queue that was made with a channel.
struct WatchedCq {
  ibv_cq* cq;
  Channel* channel;
  bool armed = false;
  bool solicited_only = false;   ///< then: armed for what is solicited, and for errors
  std::uint32_t older = 0;       ///< completions that were there when it was armed
  std::uint32_t solicited = 0;   ///< solicited ones that had come when it was armed
  std::uint32_t handed_out = 0;  ///< events, to be acknowledged before it goes
};

struct SendBuilder;

/// Of a program that says which of its threads uses an object. The device's lock serves all.
struct ThreadDomain : ibv_td {
  std::uint32_t users = 0;
};

/// In the order in which a context's leftovers can be destroyed.
enum class Kind : std::uint8_t {
  queue_pair,
  address,
  window,
  shared_receives,
  completions,
  memory,
  parent_domain,
  domain,
  thread_domain,
  count
};

struct Host {
  Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  ~Host();

  FairLock lock;
  softverbs::Context* device = nullptr;
  ibv_context_ops bare{};  ///< the embedded device's own operations
  std::size_t events_reported = 0;
  std::uint32_t armed = 0;
  std::uint32_t empty_polls = 0;  ///< in a row
  std::vector<WatchedCq> watched;
  std::unordered_map<const ibv_qp*, std::unique_ptr<SendBuilder>> builders;
  std::unordered_map<void*, Kind> objects;                      ///< that the program made
  std::unordered_map<const void*, std::uint32_t> async_events;  ///< handed out, by their objects
  std::unordered_map<const ibv_pd*, ThreadDomain*> thread_domains;  ///< of parent domains
  std::atomic<std::uint32_t> polls{0};                              ///< of the program's
  std::uint32_t polls_seen = 0;                                     ///< by drive_others()
  ibv_cq* idle_cq = nullptr;  ///< of no queue pair: polling it only drives the device
};

/// The device in the list; every context that we opened names it.
extern ibv_device the_device;

inline bool ours(const ibv_context* context) noexcept {
  return context != nullptr && context->device == &the_device;
}
inline Host& host_of(ibv_context* context) noexcept {
  return *reinterpret_cast<Host*>(verbs_get_ctx(context)->priv);
}

/// Holds the context's lock; on the way out tells of asynchronous events that came up.
class Guard {
 public:
  explicit Guard(ibv_context* context) noexcept : host_(host_of(context)) { host_.lock.lock(); }
  /// The lock is held.
  Guard(Host& host, std::adopt_lock_t) noexcept : host_(host) {}
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard() {
    if (host_.device->events.size() != host_.events_reported) report_events(host_);
    host_.lock.unlock();
  }
  [[nodiscard]] Host& host() const noexcept { return host_; }

 private:
  static void report_events(Host& host) noexcept;
  Host& host_;
};

// preload_verbs.cc
void lock_operations(ibv_context_ops& ops) noexcept;

// progress.cc. An adapter works whether its program polls or not. Here a context works when it is
// polled, so the contexts of a process work for each other: a program with one thread may poll only
// one of two.
void join_process(Host& host);
void leave_process(Host& host) noexcept;
/// Polls the contexts that their program has not polled since the last time, but not `self`. Not
/// under a lock.
void drive_others(const Host* self) noexcept;
/// Polls a context. Under its lock.
void drive(Host& host) noexcept;
/// Whether a context has it in ibv_context::cmd_fd.
bool is_command_descriptor(int fd) noexcept;

// channels.cc. The first three under the lock.
/// The program took `count` completions out of the queue.
void note_polled(Host& host, const ibv_cq* cq, std::uint32_t count) noexcept;
void watch(Host& host, ibv_cq* cq, Channel* channel);
void unwatch(Host& host, ibv_cq* cq) noexcept;
int req_notify_cq(ibv_cq* cq, int solicited_only) noexcept;
std::uint32_t events_handed_out(const Host& host, const ibv_cq* cq) noexcept;
std::uint32_t async_events_handed_out(const Host& host, const void* object) noexcept;

/// Where libibverbs counts the events that a program acknowledged.
struct Acknowledged {
  pthread_mutex_t& mutex;
  pthread_cond_t& changed;
  std::uint32_t& count;
};
bool acknowledged(const Acknowledged& events, std::uint32_t handed_out) noexcept;
/// Not under the lock.
void wait_for_acknowledgements(const Acknowledged& events, std::uint32_t handed_out) noexcept;
/// Under the lock. Adapters receive packets whether the program polls or not. So packets that came
/// before a queue pair is destroyed are received now, and their senders are acknowledged.
void take_what_came(Host& host) noexcept;
/// Before the context goes.
void stop_driving(Host& host) noexcept;

// leftovers.cc
/// Under the lock, as the next two.
void note_made(Host& host, void* object, Kind kind) noexcept;
template <typename T>
T* made(const Guard& guard, T* object, Kind kind) noexcept {
  if (object != nullptr) note_made(guard.host(), object, kind);
  return object;
}
/// An object is gone, if `error` is 0.
int unmade(const Guard& guard, void* object, int error) noexcept;
/// Destroys the objects that libibverbs leaves to the kernel at closing.
void destroy_leftovers(ibv_context* context) noexcept;

// control_verbs.cc
ibv_cq* create_cq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                  int vector) noexcept;

// completion_reader.cc
ibv_cq_ex* create_cq_ex(ibv_context* context, ibv_cq_init_attr_ex* attr) noexcept;

// extended.cc
/// A domain has gone, which may have been a parent domain. Under the lock.
void leave_thread_domain(Host& host, const ibv_pd* pd) noexcept;
void fill_extended_operations(verbs_context& extended) noexcept;

// send_builder.cc
bool make_builder(Host& host, ibv_qp* qp, const ibv_qp_cap& cap) noexcept;
/// Under the lock.
void drop_builder(Host& host, const ibv_qp* qp) noexcept;
/// The queue pair itself, where a program names it by the base of its ibv_qp_ex.
ibv_qp* actual(ibv_qp* qp) noexcept;

}  // namespace spinwire::preload
