// Asynchronous events of a device, about itself or a connection.
#pragma once

#include <cstdint>
#include <string_view>

#include "spinwire/callback.h"
#include "spinwire/connection.h"
#include "spinwire/export.h"

namespace spinwire {

/// What happened to a device, port or connection.
enum class DeviceEventKind : std::uint8_t {
  // Events of a connection.
  connection_failed,       ///< the queue pair is in error; on_closed says more
  connection_established,  ///< the first packet came before the handshake's last frame
  path_changed,            ///< migrated to the alternate path, or failed to
  receives_ended,          ///< the queue pair takes no more receives, after an error or a close
  // Events of the port.
  port_active,   ///< the link came up
  port_error,    ///< the link went down; connections time out if it stays down
  gid_changed,   ///< an address came or went; check that the GID in use still exists
  port_changed,  ///< LID, partition keys or subnet manager
  // Events of the engine's own queues or the whole device: every connection ends.
  completion_queue_failed,  ///< the completion queue is lost, perhaps by an overrun
  receive_queue_failed,     ///< the shared receive queue is lost
  device_failed,            ///< the device is lost
  receive_queue_low,        ///< the queue's limit was reached
  other,                    ///< DeviceEvent::code and text say what
};

/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(DeviceEventKind kind) noexcept;

/// An asynchronous event of the device.
struct DeviceEvent {
  DeviceEventKind kind = DeviceEventKind::other;  ///< what happened
  int code = 0;                                   ///< IBV_EVENT_*
  std::uint8_t port = 0;                          ///< set for events of the port; else 0
  Connection connection;  ///< set for events of a connection; empty if it has ended
  std::string_view text;  ///< the name that verbs give the event; a constant
};

/// Receives events of the device.
using DeviceEventCallback = Callback<void(const DeviceEvent&)>;

}  // namespace spinwire
