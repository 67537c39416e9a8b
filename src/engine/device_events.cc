// What the device reports by itself: told to the application, then acted upon. Cold.
#include <algorithm>
#include <array>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "engine/engine_core.h"

namespace spinwire {

std::string_view to_string(DeviceEventKind kind) noexcept {
  constexpr std::array<std::string_view, 13> kNames = {"connection_failed",
                                                       "connection_established",
                                                       "path_changed",
                                                       "receives_ended",
                                                       "port_active",
                                                       "port_error",
                                                       "gid_changed",
                                                       "port_changed",
                                                       "completion_queue_failed",
                                                       "receive_queue_failed",
                                                       "device_failed",
                                                       "receive_queue_low",
                                                       "other"};
  const auto i = static_cast<std::size_t>(kind);
  return i < kNames.size() ? kNames[i] : "unknown";
}

namespace detail {
namespace {

using agent::Agent;
using Kind = DeviceEventKind;

Kind kind_of(ibv_event_type type) noexcept {
  switch (type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      return Kind::connection_failed;
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return Kind::receives_ended;
    case IBV_EVENT_COMM_EST:
      return Kind::connection_established;
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
      return Kind::path_changed;
    case IBV_EVENT_PORT_ACTIVE:
      return Kind::port_active;
    case IBV_EVENT_PORT_ERR:
      return Kind::port_error;
    case IBV_EVENT_GID_CHANGE:
      return Kind::gid_changed;
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
      return Kind::port_changed;
    case IBV_EVENT_CQ_ERR:
      return Kind::completion_queue_failed;
    case IBV_EVENT_SRQ_ERR:
      return Kind::receive_queue_failed;
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      return Kind::receive_queue_low;
    case IBV_EVENT_DEVICE_FATAL:
      return Kind::device_failed;
    default:
      return Kind::other;
  }
}

constexpr bool is_connections(Kind kind) noexcept { return kind <= Kind::receives_ended; }
constexpr bool is_ports(Kind kind) noexcept {
  return kind >= Kind::port_active && kind <= Kind::port_changed;
}
constexpr bool ends_connection(Kind kind) noexcept {
  return kind == Kind::connection_failed || kind == Kind::receives_ended;
}
constexpr bool ends_all(Kind kind) noexcept {
  return kind == Kind::completion_queue_failed || kind == Kind::receive_queue_failed ||
         kind == Kind::device_failed;
}

LogLevel level_of(Kind kind) noexcept {
  if (ends_all(kind)) return LogLevel::error;
  if (kind == Kind::port_error || kind == Kind::gid_changed) return LogLevel::warning;
  return is_connections(kind) ? LogLevel::debug : LogLevel::info;
}

}  // namespace

Result<void> EngineCore::check_device_left(const char* asked) const {
  if (device_lost == nullptr) return {};
  return base::fail(
      Status::no_device, asked,
      std::string("device ") + context.device->info().name + " has failed: " + device_lost,
      "open another engine when the device is back");
}

void EngineCore::fail_all(const char* what) noexcept {
  device_lost = what;
  for (std::uint32_t i = 0; i < context.agents.capacity(); ++i) {
    if (!context.agents.in_use(i)) continue;
    Agent& a = context.agents.at(i);
    if (a.reconnect != nullptr) a.reconnect->permanent = true;
    agent::fail(context, a,
                {Status::local_error, "keep the connection", std::string("device event: ") + what,
                 "see the system's log for the device, then open another engine"});
  }
}

void EngineCore::take_event(const ibv_async_event& found) noexcept {
  DeviceEvent event;
  event.kind = kind_of(found.event_type);
  event.code = static_cast<int>(found.event_type);
  event.text = ibv_event_type_str(found.event_type);
  if (is_ports(event.kind)) event.port = static_cast<std::uint8_t>(found.element.port_num);
  base::log(level_of(event.kind), "device {}: {}", context.device->info().name, event.text);
  std::uint32_t qp_num = 0;
  if (is_connections(event.kind)) {
    // A queue pair fails with a completion that tells why, if it had work: that goes first.
    qp_num = found.element.qp->qp_num;
    drain();
    if (const Agent* a = agent::find_by_qpn(context, qp_num); a != nullptr)
      event.connection = agent::handle(context, *a);
  }
  if (const DeviceEventCallback tell = on_device_event; tell) tell(event);
  if (event.kind == Kind::device_failed) next_device_look = ~std::uint64_t{0};  // told
  if (ends_all(event.kind)) return fail_all(event.text.data());
  if (!ends_connection(event.kind)) return;
  if (Agent* a = agent::find_by_qpn(context, qp_num); a != nullptr) {
    agent::fail(context, *a,
                {Status::remote_error, "serve the peer's requests",
                 std::string("device event: ") + event.text.data(),
                 "the peer asked for what it may not do, or its end has failed"});
  }
}

/// A device of the kernel tells through a descriptor that it has events: then the one look at the
/// sockets is all the system calls that a control step needs. Others are asked each time.
Result<void> EngineCore::watch_device() {
  const int fd = context.device->context()->async_fd;
  if (fd < 0) return {};
  if (auto added = epoll.add(fd, engine::kDeviceToken, control::Interest::read); !added)
    return added;
  device_watched = true;
  return {};
}

/// A driver that cannot take a device away from who has it open waits for its end, without a word:
/// Soft-RoCE's does when its link is deleted. The connections would not notice.
void EngineCore::look_for_device() noexcept {
  constexpr Nanoseconds kPause = std::chrono::milliseconds(100);
  const verbs::Device& device = *context.device;
  next_device_look = ~std::uint64_t{0};
  if (device.provider().is_gone == nullptr) return;
  if (!device.provider().is_gone(device.context())) {
    next_device_look = context.clock.now() + context.clock.ticks(kPause);
    return;
  }
  ibv_async_event gone{};
  gone.event_type = IBV_EVENT_DEVICE_FATAL;
  take_event(gone);
}

void EngineCore::take_async_events() noexcept {
  constexpr std::size_t kEventsPerStep = 16;
  std::array<ibv_async_event, kEventsPerStep> events;
  const verbs::Device& device = *context.device;
  std::size_t count = 0;
  while (count < events.size() &&
         device.provider().get_async_event(device.context(), &events[count]) == 0)
    ++count;
  if (count == 0) return;
  // That a queue pair takes no more receives follows from a failure, which says more.
  (void)std::stable_partition(events.begin(), events.begin() + count, [](const ibv_async_event& e) {
    return e.event_type != IBV_EVENT_QP_LAST_WQE_REACHED;
  });
  for (std::size_t i = 0; i < count; ++i) take_event(events[i]);
}

}  // namespace detail
}  // namespace spinwire
