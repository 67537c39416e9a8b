// The device under test, and RAII wrappers of its objects. Uses libibverbs only, so any device with
// `ibv_*` calls can be tested.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace conformance {

struct Settings {
  std::string device;     ///< empty: the first device
  std::uint8_t port = 1;  ///< of the device
  int gid_index = -1;     ///< -1: the first IPv4 address, else 0
  /// Time limit for expected events. A missing event costs this much time, and devices with defects
  /// miss many.
  std::chrono::milliseconds timeout{5000};
};
inline Settings settings;

/// For set-up that no case is about: a failure ends the case.
inline void must(bool good, const char* what) {
  if (!good) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

// ---- objects ----------------------------------------------------------------------------------

/// Destroying must succeed: an object that stays busy is a defect of the device.
template <auto kDestroy>
struct Destroys {
  template <typename T>
  void operator()(T* object) const {
    EXPECT_EQ(kDestroy(object), 0);
  }
};
/// A function, because verbs.h defines ibv_dealloc_mw() inline.
inline int dealloc_window(ibv_mw* mw) { return ibv_dealloc_mw(mw); }

using Context = std::unique_ptr<ibv_context, Destroys<ibv_close_device>>;
using Pd = std::unique_ptr<ibv_pd, Destroys<ibv_dealloc_pd>>;
using Cq = std::unique_ptr<ibv_cq, Destroys<ibv_destroy_cq>>;
using Qp = std::unique_ptr<ibv_qp, Destroys<ibv_destroy_qp>>;
using Srq = std::unique_ptr<ibv_srq, Destroys<ibv_destroy_srq>>;
using Ah = std::unique_ptr<ibv_ah, Destroys<ibv_destroy_ah>>;
using Mr = std::unique_ptr<ibv_mr, Destroys<ibv_dereg_mr>>;
using Mw = std::unique_ptr<ibv_mw, Destroys<dealloc_window>>;
using Channel = std::unique_ptr<ibv_comp_channel, Destroys<ibv_destroy_comp_channel>>;

inline Context open_device() {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  must(list != nullptr, "ibv_get_device_list");
  ibv_device* found = nullptr;
  for (int i = 0; i < count && found == nullptr; ++i) {
    if (settings.device.empty() || settings.device == ibv_get_device_name(list[i])) found = list[i];
  }
  Context context(found != nullptr ? ibv_open_device(found) : nullptr);
  ibv_free_device_list(list);
  if (context == nullptr) throw std::runtime_error("no device '" + settings.device + "'");
  return context;
}

inline int choose_gid(ibv_context* context) {
  if (settings.gid_index >= 0) return settings.gid_index;
  constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  ibv_port_attr port{};
  must(ibv_query_port(context, settings.port, &port) == 0, "ibv_query_port");
  for (int i = 0; i < port.gid_tbl_len; ++i) {
    ibv_gid gid{};
    if (ibv_query_gid(context, settings.port, i, &gid) == 0 &&
        std::memcmp(gid.raw, kMapped, sizeof kMapped) == 0)
      return i;
  }
  return 0;
}

// ---- memory -----------------------------------------------------------------------------------

// As integers: in the headers they are a mixture of enumerators and macros.
constexpr int kLocalWrite = IBV_ACCESS_LOCAL_WRITE;
constexpr int kRemoteRead = IBV_ACCESS_REMOTE_READ;
constexpr int kRemoteWrite = IBV_ACCESS_REMOTE_WRITE;
constexpr int kRemoteAtomic = IBV_ACCESS_REMOTE_ATOMIC;
constexpr int kBind = IBV_ACCESS_MW_BIND;
constexpr int kRemote = kRemoteRead | kRemoteWrite | kRemoteAtomic;

inline void fill(std::span<std::byte> bytes, unsigned seed) {
  unsigned state = seed * 2654435761u + 1;
  for (std::byte& b : bytes) {
    state = state * 1664525u + 1013904223u;
    b = static_cast<std::byte>(state >> 24);
  }
}
inline bool holds(std::span<const std::byte> bytes, unsigned seed) {
  std::vector<std::byte> wanted(bytes.size());
  fill(wanted, seed);
  return std::equal(bytes.begin(), bytes.end(), wanted.begin());
}
inline bool all_are(std::span<const std::byte> bytes, std::byte value) {
  return std::all_of(bytes.begin(), bytes.end(), [&](std::byte b) { return b == value; });
}

/// Registered memory, zeroed.
class Memory {
 public:
  Memory(ibv_pd* pd, std::size_t size, int access = kLocalWrite | kRemote)
      : bytes_(
            static_cast<std::byte*>(std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage)),
            std::free),
        mr_(ibv_reg_mr(pd, bytes_.get(), size, access)) {
    must(mr_ != nullptr, "ibv_reg_mr");
    std::memset(bytes_.get(), 0, size);
  }
  [[nodiscard]] std::span<std::byte> at(std::size_t offset, std::size_t length) const {
    return {bytes_.get() + offset, length};
  }
  [[nodiscard]] std::uint64_t address(std::size_t offset = 0) const {
    return reinterpret_cast<std::uint64_t>(bytes_.get() + offset);
  }
  [[nodiscard]] ibv_sge sge(std::size_t offset, std::uint32_t length) const {
    return {address(offset), length, mr_->lkey};
  }
  [[nodiscard]] std::uint64_t word(std::size_t offset) const {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes_.get() + offset, sizeof value);
    return value;
  }
  void set_word(std::size_t offset, std::uint64_t value) const {
    std::memcpy(bytes_.get() + offset, &value, sizeof value);
  }
  [[nodiscard]] std::uint32_t rkey() const { return mr_->rkey; }
  [[nodiscard]] ibv_mr* mr() const { return mr_.get(); }
  /// Ends the keys; the bytes remain.
  void deregister() { mr_.reset(); }
  /// Returns the errno of deregistering; after success nothing is left to deregister.
  int try_to_deregister() {
    const int error = ibv_dereg_mr(mr_.get());
    if (error == 0) (void)mr_.release();
    return error;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  std::unique_ptr<std::byte, void (*)(void*)> bytes_;
  Mr mr_;
};

// ---- completions ------------------------------------------------------------------------------

/// A pattern that shows which fields the device does not write.
inline ibv_wc blank_wc() {
  ibv_wc wc;
  std::memset(static_cast<void*>(&wc), 0xee, sizeof wc);
  return wc;
}

/// A limit in time and in number of checks, which only a defect reaches.
class Deadline {
 public:
  /// Returns false when the limit is reached.
  bool look() {
    if (++looks_ < kLooks || std::chrono::steady_clock::now() < end_) return true;
    // After three misses, further waits are short.
    constexpr int kChances = 3;
    if (++ran_out_ >= kChances) settings.timeout = std::min(settings.timeout, kShortTimeout);
    return false;
  }

 private:
  static constexpr int kLooks = 5000;
  static constexpr std::chrono::milliseconds kShortTimeout{500};
  static inline int ran_out_ = 0;
  int looks_ = 0;
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + settings.timeout;
};

/// Takes `count` completions; fewer if the time limit passes.
inline std::vector<ibv_wc> take(ibv_cq* cq, std::size_t count) {
  std::vector<ibv_wc> taken;
  for (Deadline deadline; taken.size() < count && deadline.look();) {
    ibv_wc wc = blank_wc();
    const int got = ibv_poll_cq(cq, 1, &wc);
    must(got >= 0, "ibv_poll_cq");
    if (got == 1) taken.push_back(wc);
  }
  EXPECT_EQ(taken.size(), count) << "completions did not come";
  return taken;
}

/// The next completion. Without one the case ends.
inline ibv_wc one(ibv_cq* cq) {
  const std::vector<ibv_wc> taken = take(cq, 1);
  if (taken.empty()) throw std::runtime_error("a completion that had to come did not");
  return taken[0];
}

/// Waits long enough for a faulty device to act.
inline void settle(ibv_cq* cq) {
  constexpr std::chrono::milliseconds kWhile{2};
  constexpr int kLooks = 200;
  const auto end = std::chrono::steady_clock::now() + kWhile;
  for (int looks = 0; looks < kLooks || std::chrono::steady_clock::now() < end; ++looks)
    (void)ibv_poll_cq(cq, 0, nullptr);
}

inline bool nothing(ibv_cq* cq) {
  settle(cq);
  ibv_wc wc = blank_wc();
  return ibv_poll_cq(cq, 1, &wc) == 0;
}

// ---- asynchronous events ----------------------------------------------------------------------

inline void do_not_block(int fd) {
  must(::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK) == 0, "O_NONBLOCK");
}

/// The element of an event of any type.
inline const void* element_of(const ibv_async_event& event) {
  switch (event.event_type) {
    case IBV_EVENT_CQ_ERR:
      return event.element.cq;
    case IBV_EVENT_SRQ_LIMIT_REACHED:
    case IBV_EVENT_SRQ_ERR:
      return event.element.srq;
    default:
      return event.element.qp;
  }
}

/// Takes the pending events. Returns true if one is `type` of `element`. Polls `cq` for zero
/// completions meanwhile, because some devices work only when polled.
inline bool event_came(ibv_context* context, ibv_event_type type, const void* element, ibv_cq* cq) {
  for (Deadline deadline; deadline.look();) {
    (void)ibv_poll_cq(cq, 0, nullptr);
    ibv_async_event event{};
    if (ibv_get_async_event(context, &event) != 0) continue;
    const bool wanted = event.event_type == type && element_of(event) == element;
    ibv_ack_async_event(&event);
    if (wanted) return true;
  }
  return false;
}

/// Whether any event but "communication established" is pending.
inline bool any_event(ibv_context* context) {
  ibv_async_event event{};
  bool any = false;
  while (ibv_get_async_event(context, &event) == 0) {
    any = any || event.event_type != IBV_EVENT_COMM_EST;
    ibv_ack_async_event(&event);
  }
  return any;
}

}  // namespace conformance
