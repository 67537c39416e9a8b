// The list of devices, with this one after the real ones; opening, closing, querying.
#include <endian.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "preload/host.h"
#include "preload/interpose.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::preload {

namespace {

/// A locally administered GUID. All contexts of a host report the same, so they are one device.
constexpr std::uint64_t kNodeGuid = 0x0273'6f66'7476'6273;
constexpr std::uint16_t kPkey = 0xffff;

ibv_device make_device() noexcept {
  ibv_device device{};
  device.node_type = IBV_NODE_CA;
  device.transport_type = IBV_TRANSPORT_IB;
  std::strncpy(device.name, softverbs::kDeviceName, sizeof device.name - 1);
  std::strncpy(device.dev_name, softverbs::kDeviceName, sizeof device.dev_name - 1);
  return device;
}

ibv_context* open_ours() {
  auto host = std::make_unique<Host>();
  auto opened = softverbs::open_device(Clock::real(), softverbs::Driving::by_poll);
  if (!opened) {
    const bool files = opened.error().status == Status::limit;
    return refuse_with<ibv_context>(files ? EMFILE : ENOMEM);
  }
  ibv_context* context = *opened;
  host->device = &softverbs::context_of(context);
  host->bare = context->ops;
  context->device = &the_device;
  context->async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  host->idle_cq = context->async_fd < 0 ? nullptr : softverbs::create_cq(context, 1);
  if (host->idle_cq == nullptr) {
    const int error = errno;
    if (context->async_fd >= 0) ::close(context->async_fd);
    (void)softverbs::close_device(context);
    return refuse_with<ibv_context>(error);
  }
  auto* extended = reinterpret_cast<verbs_context*>(host->device->extension);
  fill_extended_operations(*extended);
  lock_operations(context->ops);
  context->cmd_fd = context->async_fd;  // serves only to identify the context
  context->abi_compat = __VERBS_ABI_IS_EXTENDED;
  extended->priv = reinterpret_cast<verbs_ex_private*>(host.get());
  try {
    join_process(*host);
  } catch (const std::bad_alloc&) {
    (void)softverbs::destroy_cq(host->idle_cq);
    ::close(context->async_fd);
    (void)softverbs::close_device(context);
    throw;
  }
  (void)host.release();
  return context;
}

int close_ours(ibv_context* context) noexcept {
  Host& host = host_of(context);
  destroy_leftovers(context);
  {
    const Guard guard(context);
    if (host.device->objects_open > 1) return EBUSY;  // the idle queue is one of them
  }
  stop_driving(host);
  remove_host(host);
  const int events = context->async_fd;
  (void)softverbs::destroy_cq(host.idle_cq);
  const int error = softverbs::close_device(context);
  ::close(events);
  delete &host;
  return error;
}

}  // namespace

ibv_device the_device = make_device();

namespace {

/// Set while libibverbs walks the list itself. It reads private fields behind each ibv_device, and
/// the_device has none.
thread_local bool real_devices_only = false;

}  // namespace

}  // namespace spinwire::preload

using namespace spinwire;
using preload::ours;
using preload::refuse_with;

/// The returned list is the second element of ours. The first element is libibverbs' own list,
/// which holds the real devices.
SOFTVERBS_INTERPOSED ibv_device** ibv_get_device_list(int* count) {
  if (preload::real_devices_only) return SOFTVERBS_NEXT(ibv_get_device_list)(count);
  int real_count = 0;
  ibv_device** real = SOFTVERBS_NEXT(ibv_get_device_list)(&real_count);
  const auto found = static_cast<std::size_t>(real != nullptr ? std::max(real_count, 0) : 0);
  auto** list = static_cast<ibv_device**>(std::calloc(found + 3, sizeof(void*)));
  if (list == nullptr) {
    if (real != nullptr) SOFTVERBS_NEXT(ibv_free_device_list)(real);
    return static_cast<ibv_device**>(nullptr);
  }
  list[0] = reinterpret_cast<ibv_device*>(real);
  std::copy_n(real, found, list + 1);
  list[1 + found] = &preload::the_device;
  if (count != nullptr) *count = static_cast<int>(found) + 1;
  return list + 1;
}

SOFTVERBS_INTERPOSED void ibv_free_device_list(ibv_device** list) {
  if (list == nullptr) return;
  if (preload::real_devices_only) return SOFTVERBS_NEXT(ibv_free_device_list)(list);
  auto** real = reinterpret_cast<ibv_device**>(list[-1]);
  if (real != nullptr) SOFTVERBS_NEXT(ibv_free_device_list)(real);
  std::free(list - 1);
}

SOFTVERBS_INTERPOSED const char* ibv_get_device_name(ibv_device* device) {
  return device == &preload::the_device ? device->name
                                        : SOFTVERBS_NEXT(ibv_get_device_name)(device);
}
SOFTVERBS_INTERPOSED __be64 ibv_get_device_guid(ibv_device* device) {
  return device == &preload::the_device ? htobe64(preload::kNodeGuid)
                                        : SOFTVERBS_NEXT(ibv_get_device_guid)(device);
}
SOFTVERBS_INTERPOSED int ibv_get_device_index(ibv_device* device) {
  return device == &preload::the_device ? -1 : SOFTVERBS_NEXT(ibv_get_device_index)(device);
}

SOFTVERBS_INTERPOSED ibv_context* ibv_open_device(ibv_device* device) {
  if (device != &preload::the_device) return SOFTVERBS_NEXT(ibv_open_device)(device);
  try {
    return preload::open_ours();
  } catch (const std::bad_alloc&) {
    return refuse_with<ibv_context>(ENOMEM);
  }
}
SOFTVERBS_INTERPOSED int ibv_close_device(ibv_context* context) {
  return ours(context) ? preload::close_ours(context) : SOFTVERBS_NEXT(ibv_close_device)(context);
}

/// A process that shares a context hands over the descriptor in ibv_context::cmd_fd, or a
/// duplicate. libibverbs looks for the device of any other descriptor in the list of devices.
SOFTVERBS_INTERPOSED ibv_context* ibv_import_device(int cmd_fd) {
  if (preload::is_command_descriptor(cmd_fd)) return refuse_with<ibv_context>(EOPNOTSUPP);
  preload::real_devices_only = true;
  ibv_context* context = SOFTVERBS_NEXT(ibv_import_device)(cmd_fd);
  preload::real_devices_only = false;
  return context;
}

SOFTVERBS_INTERPOSED int ibv_query_device(ibv_context* context, ibv_device_attr* attr) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_query_device)(context, attr);
  const int error = softverbs::query_device(context, attr);
  attr->node_guid = attr->sys_image_guid = htobe64(preload::kNodeGuid);
  return error;
}

/// This function fills in the struct without its latest members; newer callers use verbs_context.
SOFTVERBS_INTERPOSED int ibv_query_port(ibv_context* context, std::uint8_t port,
                                        _compat_ibv_port_attr* attr) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_query_port)(context, port, attr);
  ibv_port_attr whole{};
  const int error = softverbs::query_port(context, port, &whole);
  if (error == 0) std::memcpy(attr, &whole, offsetof(ibv_port_attr, port_cap_flags2));
  return error;
}

SOFTVERBS_INTERPOSED int ibv_query_gid(ibv_context* context, std::uint8_t port, int index,
                                       ibv_gid* gid) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_query_gid)(context, port, index, gid);
  const int error = softverbs::query_gid(context, port, index, gid);
  if (error == 0) return 0;
  errno = error;
  return -1;
}

namespace {

constexpr std::uint32_t kRoceV2File = 1;  // as in the file in sysfs

int find_gid(ibv_context* context, std::uint32_t port, std::uint32_t index, ibv_gid_entry& entry) {
  entry = {};
  if (port != 1 || index != 0) return EINVAL;
  entry.gid_index = index;
  entry.port_num = port;
  entry.gid_type = IBV_GID_TYPE_ROCE_V2;
  return softverbs::query_gid(context, 1, 0, &entry.gid);
}

}  // namespace

SOFTVERBS_INTERPOSED int _ibv_query_gid_ex(ibv_context* context, std::uint32_t port,
                                           std::uint32_t index, ibv_gid_entry* entry,
                                           std::uint32_t flags, std::size_t size) {
  if (!ours(context))
    return SOFTVERBS_NEXT(_ibv_query_gid_ex)(context, port, index, entry, flags, size);
  ibv_gid_entry found;
  if (flags != 0) return EOPNOTSUPP;
  if (const int error = find_gid(context, port, index, found); error != 0) return error;
  std::memcpy(entry, &found, std::min(size, sizeof found));
  return 0;
}

SOFTVERBS_INTERPOSED ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries,
                                                  std::size_t room, std::uint32_t flags,
                                                  std::size_t size) {
  if (!ours(context))
    return SOFTVERBS_NEXT(_ibv_query_gid_table)(context, entries, room, flags, size);
  if (room == 0) return -EINVAL;
  const int error = _ibv_query_gid_ex(context, 1, 0, entries, flags, size);
  return error == 0 ? 1 : -error;
}

/// Private to rdma-core: ibv_devinfo calls it.
SOFTVERBS_INTERPOSED int ibv_query_gid_type(ibv_context* context, std::uint8_t port, unsigned index,
                                            std::uint32_t* type) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_query_gid_type)(context, port, index, type);
  if (port != 1 || index != 0) return errno = EINVAL, -1;
  *type = kRoceV2File;
  return 0;
}

SOFTVERBS_INTERPOSED int ibv_query_pkey(ibv_context* context, std::uint8_t port, int index,
                                        __be16* pkey) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_query_pkey)(context, port, index, pkey);
  if (port != 1 || index != 0) return errno = EINVAL, -1;
  *pkey = htobe16(preload::kPkey);
  return 0;
}
SOFTVERBS_INTERPOSED int ibv_get_pkey_index(ibv_context* context, std::uint8_t port, __be16 pkey) {
  if (!ours(context)) return SOFTVERBS_NEXT(ibv_get_pkey_index)(context, port, pkey);
  if (port != 1 || pkey != htobe16(preload::kPkey)) return errno = EINVAL, -1;
  return 0;
}
