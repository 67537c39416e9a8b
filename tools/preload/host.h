// A softverbs device opened by a program built for libibverbs. Adds locks to the embedded device
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
      serving_.wait(now, std::memory_order_acquire);  // spins before it sleeps
    }
  }
  /// Takes the lock if it is free and nobody waits for it.
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

/// The descriptor counts events, one per read; `events` holds the queues that they are about.
struct Channel : ibv_comp_channel {
  std::deque<ibv_cq*> events;
};

/// A completion queue made with a channel.
struct WatchedCq {
  ibv_cq* cq;
  Channel* channel;
  bool armed = false;
  bool solicited_only = false;   ///< armed for solicited completions and errors only
  std::uint32_t older = 0;       ///< completions present when it was armed
  std::uint32_t solicited = 0;   ///< solicited completions received when it was armed
  std::uint32_t handed_out = 0;  ///< events to be acknowledged before it is destroyed
};

struct SendBuilder;

/// Names the thread that uses an object. The device's lock makes it unnecessary here.
struct ThreadDomain : ibv_td {
  std::uint32_t users = 0;
};

/// In the order in which the leftovers of a context can be destroyed.
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
  std::unordered_map<void*, Kind> objects;                      ///< made by the program
  std::unordered_map<const void*, std::uint32_t> async_events;  ///< taken by the program, by object
  std::unordered_map<const ibv_pd*, ThreadDomain*> thread_domains;  ///< of parent domains
  std::atomic<std::uint32_t> polls{0};                              ///< polls of the program
  std::uint32_t polls_seen = 0;                                     ///< at the last drive_others()
  ibv_cq* idle_cq = nullptr;  ///< has no queue pair: a poll only drives the device
};

/// The device in the list. Every context that this library opened names it.
extern ibv_device the_device;

inline bool ours(const ibv_context* context) noexcept {
  return context != nullptr && context->device == &the_device;
}
inline Host& host_of(ibv_context* context) noexcept {
  return *reinterpret_cast<Host*>(verbs_get_ctx(context)->priv);
}

/// Holds the context's lock. Its destructor reports new asynchronous events.
class Guard {
 public:
  explicit Guard(ibv_context* context) noexcept : host_(host_of(context)) { host_.lock.lock(); }
  /// Adopts a lock that is already held.
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

// mutual_progress.cc. An adapter works whether its program polls or not, but a context works only
// when it is polled. So the contexts of a process drive each other: a program with one thread may
// poll only one of two.
void join_process(Host& host);
void remove_host(Host& host) noexcept;
/// Polls the contexts, except `self`, that the program has not polled since the last call. Do not
/// hold a lock.
void drive_others(const Host* self) noexcept;
/// Polls a context. Hold its lock.
void drive(Host& host) noexcept;
/// Whether `fd` is the ibv_context::cmd_fd of a context of this process, or a duplicate.
bool is_command_descriptor(int fd) noexcept;

// channels.cc. Hold the lock for the first three.
/// The program took `count` completions out of the queue.
void note_polled(Host& host, const ibv_cq* cq, std::uint32_t count) noexcept;
void watch(Host& host, ibv_cq* cq, Channel* channel);
void unwatch(Host& host, ibv_cq* cq) noexcept;
int req_notify_cq(ibv_cq* cq, int solicited_only) noexcept;
std::uint32_t events_handed_out(const Host& host, const ibv_cq* cq) noexcept;
std::uint32_t async_events_handed_out(const Host& host, const void* object) noexcept;

/// Where libibverbs counts the events that a program has acknowledged.
struct Acknowledged {
  pthread_mutex_t& mutex;
  pthread_cond_t& changed;
  std::uint32_t& count;
};
bool acknowledged(const Acknowledged& events, std::uint32_t handed_out) noexcept;
/// Do not hold the lock.
void wait_for_acknowledgements(const Acknowledged& events, std::uint32_t handed_out) noexcept;
/// Hold the lock. Adapters receive packets whether the program polls or not. So packets that
/// arrived before a queue pair is destroyed are received now, and their senders get
/// acknowledgements.
void drain_packets(Host& host) noexcept;
/// Call it before the context is closed.
void stop_driving(Host& host) noexcept;

// leftovers.cc
/// Hold the lock for this and the next two.
void note_made(Host& host, void* object, Kind kind) noexcept;
template <typename T>
T* made(const Guard& guard, T* object, Kind kind) noexcept {
  if (object != nullptr) note_made(guard.host(), object, kind);
  return object;
}
/// Forgets an object that was destroyed, unless `error` is set.
int unmade(const Guard& guard, void* object, int error) noexcept;
/// Destroys the objects that the kernel would destroy when a device is closed.
void destroy_leftovers(ibv_context* context) noexcept;

// control_verbs.cc
ibv_cq* create_cq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                  int vector) noexcept;

// completion_reader.cc
ibv_cq_ex* create_cq_ex(ibv_context* context, ibv_cq_init_attr_ex* attr) noexcept;

// extended.cc
/// Drops a domain that may have been a parent domain. Hold the lock.
void release_thread_domain(Host& host, const ibv_pd* pd) noexcept;
void fill_extended_operations(verbs_context& extended) noexcept;

// send_builder.cc
bool make_builder(Host& host, ibv_qp* qp, const ibv_qp_cap& cap) noexcept;
/// Hold the lock.
void drop_builder(Host& host, const ibv_qp* qp) noexcept;
/// The queue pair itself, if a program passes the base of its ibv_qp_ex.
ibv_qp* actual(ibv_qp* qp) noexcept;

}  // namespace spinwire::preload
