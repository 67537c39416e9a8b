#include "engine/device_watch.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "agent/agent.h"
#include "agent/connecting.h"
#include "agent/reconnect.h"
#include "base/error.h"
#include "base/log_message.h"
#include "rpc/rpc_state.h"

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

namespace engine {
namespace {

using agent::Agent;
using Kind = DeviceEventKind;

Kind kind_of(ibv_event_type type) noexcept {
  static constexpr std::pair<ibv_event_type, Kind> kKinds[] = {
      {IBV_EVENT_QP_FATAL, Kind::connection_failed},
      {IBV_EVENT_QP_REQ_ERR, Kind::connection_failed},
      {IBV_EVENT_QP_ACCESS_ERR, Kind::connection_failed},
      {IBV_EVENT_QP_LAST_WQE_REACHED, Kind::receives_ended},
      {IBV_EVENT_COMM_EST, Kind::connection_established},
      {IBV_EVENT_PATH_MIG, Kind::path_changed},
      {IBV_EVENT_PATH_MIG_ERR, Kind::path_changed},
      {IBV_EVENT_PORT_ACTIVE, Kind::port_active},
      {IBV_EVENT_PORT_ERR, Kind::port_error},
      {IBV_EVENT_GID_CHANGE, Kind::gid_changed},
      {IBV_EVENT_LID_CHANGE, Kind::port_changed},
      {IBV_EVENT_PKEY_CHANGE, Kind::port_changed},
      {IBV_EVENT_SM_CHANGE, Kind::port_changed},
      {IBV_EVENT_CLIENT_REREGISTER, Kind::port_changed},
      {IBV_EVENT_CQ_ERR, Kind::completion_queue_failed},
      {IBV_EVENT_SRQ_ERR, Kind::receive_queue_failed},
      {IBV_EVENT_SRQ_LIMIT_REACHED, Kind::receive_queue_low},
      {IBV_EVENT_DEVICE_FATAL, Kind::device_failed},
  };
  for (const auto& [event, kind] : kKinds) {
    if (event == type) return kind;
  }
  return Kind::other;
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

Result<void> DeviceWatch::check_present(const char* asked) const {
  if (lost_ == nullptr) return {};
  return base::fail(Status::no_device, asked,
                    base::format("device {} has failed: {}", context_.device->info().name, lost_),
                    "open another engine when the device is back");
}

void DeviceWatch::fail_all(const char* event) noexcept {
  lost_ = event;
  for (Agent& a : context_.agents) {
    agent::fail_for_good(
        context_, a,
        {Status::local_error, "keep the connection", base::format("device event: {}", event),
         "see the system's log for the device, then open another engine"});
  }
}

/// The event may be old: what survives a link that has come up again goes on.
void DeviceWatch::fail_over(std::uint8_t port) noexcept {
  const auto is_up = base::no_throw(
      "query a port", [&]() -> Result<bool> { return context_.device->is_link_up(port); });
  if (is_up.value_or(false)) return;
  completions_.process_all_completions();  // what has succeeded is reported so
  agent::on_port_down(context_, port);
  if (calls_ != nullptr) rpc::on_port_down(*calls_, port);
}

void DeviceWatch::on_event(const ibv_async_event& found) noexcept {
  DeviceEvent event;
  event.kind = kind_of(found.event_type);
  event.code = static_cast<int>(found.event_type);
  event.text = ibv_event_type_str(found.event_type);
  if (is_ports(event.kind)) event.port = static_cast<std::uint8_t>(found.element.port_num);
  base::log(level_of(event.kind), "device {}: {}", context_.device->info().name, event.text);
  context_.recorder.record(observe::EventKind::device, {event.text});
  std::uint32_t qp_num = 0;
  if (is_connections(event.kind)) {
    // A queue pair with work fails with a completion, which explains the failure: handle
    // completions first.
    qp_num = found.element.qp->qp_num;
    completions_.process_all_completions();
    if (const Agent* a = agent::find_by_qpn(context_, qp_num); a != nullptr)
      event.connection = agent::handle(context_, *a);
  }
  if (const DeviceEventCallback run = handler; run) run(event);
  if (event.kind == Kind::device_failed) next_check_ = ~std::uint64_t{0};
  if (ends_all(event.kind)) return fail_all(event.text.data());
  if (event.kind == Kind::port_error) return fail_over(event.port);
  if (!ends_connection(event.kind)) return;
  if (Agent* a = agent::find_by_qpn(context_, qp_num); a != nullptr) {
    agent::fail(context_, *a,
                {Status::remote_error, "serve the peer's requests",
                 base::format("device event: {}", event.text),
                 "the peer asked for what it may not do, or its end has failed"});
  }
}

Result<void> DeviceWatch::open(control::ControlPort& port) {
  const int fd = context_.device->context()->async_fd;
  if (fd < 0) return {};
  if (auto added = port.watch(fd, *this); !added) return added;
  watched_ = true;
  return {};
}

void DeviceWatch::close(control::ControlPort& port) noexcept {
  if (watched_) port.unwatch(context_.device->context()->async_fd);
  watched_ = false;
}

void DeviceWatch::step(std::uint64_t now) noexcept {
  if (!watched_) drain_events();
  if (now >= next_check_) check_removal(now);
}

/// Detects the removal of a device whose driver waits for it to be closed, and sends no event:
/// Soft-RoCE, when its link is deleted. The connections would not notice the removal.
void DeviceWatch::check_removal(std::uint64_t now) noexcept {
  constexpr Nanoseconds kPause = std::chrono::milliseconds(100);
  const verbs::Device& device = *context_.device;
  next_check_ = ~std::uint64_t{0};
  if (device.provider().is_gone == nullptr) return;
  if (!device.provider().is_gone(device.context())) {
    next_check_ = now + context_.clock.ticks(kPause);
    return;
  }
  ibv_async_event gone{};
  gone.event_type = IBV_EVENT_DEVICE_FATAL;
  on_event(gone);
}

void DeviceWatch::drain_events() noexcept {
  constexpr std::size_t kEventsPerStep = 16;
  std::array<ibv_async_event, kEventsPerStep> events;
  const verbs::Device& device = *context_.device;
  std::size_t count = 0;
  while (count < events.size() &&
         device.provider().get_async_event(device.context(), &events[count]) == 0)
    ++count;
  if (count == 0) return;
  // The end of a queue pair's receives follows from a failure, whose event explains more.
  (void)std::stable_partition(events.begin(), events.begin() + count, [](const ibv_async_event& e) {
    return e.event_type != IBV_EVENT_QP_LAST_WQE_REACHED;
  });
  for (std::size_t i = 0; i < count; ++i) on_event(events[i]);
}

}  // namespace engine
}  // namespace spinwire
