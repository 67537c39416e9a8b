// Asynchronous events of a device, about itself or a connection.
#pragma once

#include <cstdint>
#include <string_view>

#include "spinwire/callback.h"
#include "spinwire/connection.h"
#include "spinwire/export.h"

namespace spinwire {

enum class DeviceEventKind : std::uint8_t {
  // Of a connection.
  connection_failed,       ///< its queue pair is in error; on_closed says more
  connection_established,  ///< its first packet came before the handshake's last frame
  path_changed,            ///< migrated to its alternate path, or failed to
  receives_ended,          ///< its queue pair takes no more receives, after an error or a close
  // Of the port.
  port_active,
  port_error,    ///< its link went down; connections time out if it stays so
  gid_changed,   ///< an address came or went; check that the GID in use still exists
  port_changed,  ///< LID, partition keys or subnet manager
  // Of the engine's own queues, or the whole device: every connection ends.
  completion_queue_failed,
  receive_queue_failed,
  device_failed,
  receive_queue_low,  ///< its limit was reached
  other,
};

SPINWIRE_API std::string_view to_string(DeviceEventKind kind) noexcept;

struct DeviceEvent {
  DeviceEventKind kind = DeviceEventKind::other;
  int code = 0;           ///< IBV_EVENT_*
  std::uint8_t port = 0;  ///< for the port's events; else 0
  Connection connection;  ///< for a connection's events; empty if it has ended
  std::string_view text;  ///< the verbs' name of the event; a constant
};

using DeviceEventCallback = Callback<void(const DeviceEvent&)>;

}  // namespace spinwire
