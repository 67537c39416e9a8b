// The provider of libibverbs' devices.
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/unique_fd.h"
#include "verbs/providers.h"

namespace spinwire::verbs {
namespace {

struct FreeList {
  void operator()(ibv_device** list) const noexcept { ibv_free_device_list(list); }
};
using DeviceList = std::unique_ptr<ibv_device*, FreeList>;

/// Some functions of libibverbs return -1 and set errno, others return an errno value.
int error_of(int answer) noexcept { return answer < 0 ? errno : answer; }

/// Whether sysfs lists the device; it does until the device is removed.
bool is_shown(const ibv_context* context) noexcept {
  std::array<char, sizeof context->device->dev_name + 32> path{};
  (void)std::snprintf(path.data(), path.size(), "/sys/class/infiniband_verbs/%s",
                      context->device->dev_name);
  return ::access(path.data(), F_OK) == 0;
}

/// Records which process opened a context. A forked child shares the device's descriptor with its
/// parent, so an object that the child destroyed would be gone for the parent, too.
class Owners {
 public:
  /// May throw std::bad_alloc.
  void add(const ibv_context* context) {
    const std::lock_guard lock(mutex_);
    owners_.push_back({context, ::getpid(), is_shown(context)});
  }
  void remove(const ibv_context* context) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(owners_, [context](const Owner& o) { return o.context == context; });
  }
  [[nodiscard]] bool ours(const ibv_context* context) noexcept {
    const std::lock_guard lock(mutex_);
    return std::any_of(owners_.begin(), owners_.end(), [context](const Owner& o) {
      return o.context == context && o.process == ::getpid();
    });
  }
  /// Whether sysfs listed the device when it was opened; it never lists a device made by a library.
  [[nodiscard]] bool was_shown(const ibv_context* context) noexcept {
    const std::lock_guard lock(mutex_);
    return std::any_of(owners_.begin(), owners_.end(),
                       [context](const Owner& o) { return o.context == context && o.shown; });
  }

  void lock() noexcept { mutex_.lock(); }
  void unlock() noexcept { mutex_.unlock(); }

 private:
  struct Owner {
    const ibv_context* context;
    pid_t process;
    bool shown;
  };
  std::mutex mutex_;
  std::vector<Owner> owners_;
};

/// Never destroyed, because contexts may outlive other statics. A fork holds the lock, so that the
/// child finds it usable.
Owners& owners() {
  static Owners* const all = [] {
    auto* made = new Owners;
    ::pthread_atfork([] { owners().lock(); }, [] { owners().unlock(); }, [] { owners().unlock(); });
    return made;
  }();
  return *all;
}

std::vector<std::string> names() {
  std::vector<std::string> found;
  const DeviceList list(ibv_get_device_list(nullptr));
  for (ibv_device** device = list.get(); device != nullptr && *device != nullptr; ++device)
    found.emplace_back(ibv_get_device_name(*device));
  return found;
}

tl::unexpected<Error> not_opened(const std::string& name, int error) {
  const bool rights = error == EACCES || error == EPERM;
  return base::fail_errno(
      Status::no_device, base::format("open device {}", name), "ibv_open_device", error,
      rights ? "give this user the right to read and write /dev/infiniband/uverbs*"
             : "see whether the device's driver is loaded and its provider library installed "
               "(Debian: ibverbs-providers)");
}

Result<ibv_context*> open(const std::string& name, const Clock&) {
  const DeviceList list(ibv_get_device_list(nullptr));
  for (ibv_device** device = list.get(); device != nullptr && *device != nullptr; ++device) {
    if (name != ibv_get_device_name(*device)) continue;
    errno = 0;
    ibv_context* context = ibv_open_device(*device);
    if (context == nullptr) return not_opened(name, errno != 0 ? errno : EIO);
    // The engine polls for events and must not block.
    const int flags = ::fcntl(context->async_fd, F_GETFL);
    if (flags >= 0 && ::fcntl(context->async_fd, F_SETFL, flags | O_NONBLOCK) == 0) {
      owners().add(context);
      return context;
    }
    const int error = errno;
    (void)ibv_close_device(context);
    return base::fail_errno(Status::system, base::format("open device {}", name), "fcntl", error,
                            "report this");
  }
  return not_opened(name, ENODEV);
}

int close_device(ibv_context* context) {
  if (!owners().ours(context)) return EPERM;
  owners().remove(context);
  return error_of(ibv_close_device(context));
}

/// Vendor id of Soft-RoCE alone.
constexpr std::uint32_t kRxeVendor = 0xffffff;

int query_device(ibv_context* context, ibv_device_attr* attr) {
  if (const int error = error_of(ibv_query_device(context, attr)); error != 0) return error;
  // On Soft-RoCE a memory window opens its whole region, not only the bound bytes.
  if (attr->vendor_id == kRxeVendor)
    attr->device_cap_flags &= ~static_cast<unsigned>(IBV_DEVICE_MEM_WINDOW_TYPE_2B);
  return 0;
}

/// Soft-RoCE reports 8 MiB, but carries longer messages.
constexpr std::uint32_t kRxeMessage = 1u << 30;

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) {
  if (const int error = error_of(ibv_query_port(context, port, attr)); error != 0) return error;
  ibv_device_attr device{};
  if (error_of(ibv_query_device(context, &device)) == 0 && device.vendor_id == kRxeVendor)
    attr->max_msg_sz = std::max(attr->max_msg_sz, kRxeMessage);
  return 0;
}

int query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  return error_of(ibv_query_gid(context, port, index, gid));
}

GidType type_of(std::uint32_t type) noexcept {
  switch (type) {
    case IBV_GID_TYPE_IB:
      return GidType::infiniband;
    case IBV_GID_TYPE_ROCE_V1:
      return GidType::roce_v1;
    case IBV_GID_TYPE_ROCE_V2:
      return GidType::roce_v2;
    default:
      return GidType::unknown;
  }
}

/// Reads the interface's name and state, if it is in this process's network namespace.
void read_netdev(unsigned index, GidEntry& entry) {
  char name[IF_NAMESIZE] = "";
  if (index == 0 || ::if_indextoname(index, name) == nullptr) return;
  entry.netdev = name;
  const base::UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::memcpy(request.ifr_name, name, sizeof name);
  if (socket.get() >= 0 && ::ioctl(socket.get(), SIOCGIFFLAGS, &request) == 0)
    entry.netdev_up = (request.ifr_flags & IFF_UP) != 0;
}

/// Reads all entries by one system call: a table may have 1024 slots, nearly all of them empty.
std::vector<GidEntry> gid_table(ibv_context* context, std::uint8_t port, int slots) {
  ibv_device_attr device{};
  if (slots <= 0 || error_of(ibv_query_device(context, &device)) != 0) return {};
  std::vector<ibv_gid_entry> found(static_cast<std::size_t>(slots) *
                                   std::max<std::uint8_t>(device.phys_port_cnt, 1));
  const ssize_t count = ibv_query_gid_table(context, found.data(), found.size(), 0);
  found.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  std::vector<GidEntry> table;
  for (const ibv_gid_entry& f : found) {
    if (f.port_num != port || f.gid_index >= static_cast<std::uint32_t>(slots)) continue;
    GidEntry entry;
    entry.index = static_cast<int>(f.gid_index);
    entry.gid = f.gid;
    entry.type = type_of(f.gid_type);
    read_netdev(f.ndev_ifindex, entry);
    table.push_back(std::move(entry));
  }
  return table;
}

/// Reads and acknowledges an event at once: the thread that reads it also destroys its object.
int get_async_event(ibv_context* context, ibv_async_event* event) {
  if (ibv_get_async_event(context, event) != 0) return errno != 0 ? errno : EIO;
  ibv_ack_async_event(event);
  return 0;
}

bool is_gone(ibv_context* context) { return owners().was_shown(context) && !is_shown(context); }

int dealloc_pd(ibv_pd* pd) { return error_of(ibv_dealloc_pd(pd)); }

ibv_td* alloc_td(ibv_context* context) {
  ibv_td_init_attr attr{};
  return ibv_alloc_td(context, &attr);
}

int dealloc_td(ibv_td* td) { return error_of(ibv_dealloc_td(td)); }

ibv_pd* alloc_parent_domain(ibv_context* context, ibv_pd* pd, ibv_td* td) {
  ibv_parent_domain_init_attr attr{};
  attr.pd = pd;
  attr.td = td;
  return ibv_alloc_parent_domain(context, &attr);
}

bool pages_on_demand(ibv_context* context) {
  ibv_device_attr_ex attr{};
  if (error_of(ibv_query_device_ex(context, nullptr, &attr)) != 0) return false;
  constexpr std::uint32_t kNeeded =
      IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ;
  return (attr.odp_caps.general_caps & IBV_ODP_SUPPORT) != 0 &&
         (attr.odp_caps.per_transport_caps.rc_odp_caps & kNeeded) == kNeeded;
}

ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t length, int access);

/// Whether the device registers memory with this flag, which no attribute reports. Drivers look at
/// the flag, not at the page.
bool registers(ibv_pd* pd, int flag) {
  constexpr std::size_t kPage = 4096;
  alignas(kPage) static std::array<std::byte, kPage> page{};  // alone: libibverbs may mark it
  ibv_mr* const mr = reg_mr(pd, page.data(), page.size(), IBV_ACCESS_LOCAL_WRITE | flag);
  return mr != nullptr && ibv_dereg_mr(mr) == 0;
}

/// Relaxed ordering is optional: libibverbs leaves it out for a kernel that does not know it.
MemoryFlags memory_flags(ibv_context* context) {
  MemoryFlags flags = MemoryFlags::relaxed_ordering;
  if (pages_on_demand(context)) flags = flags | MemoryFlags::on_demand;
  ibv_pd* const pd = ibv_alloc_pd(context);
  if (pd == nullptr) return flags;
  if (registers(pd, IBV_ACCESS_ZERO_BASED)) flags = flags | MemoryFlags::zero_based;
  if (registers(pd, IBV_ACCESS_HUGETLB)) flags = flags | MemoryFlags::huge_pages;
  (void)ibv_dealloc_pd(pd);
  return flags;
}

/// Many drivers ignore IBV_ACCESS_ZERO_BASED; all let the caller say where peers see the memory.
ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
  const auto flags = static_cast<unsigned>(access);
  if ((access & IBV_ACCESS_ZERO_BASED) == 0) return ibv_reg_mr(pd, address, length, flags);
  return ibv_reg_mr_iova(pd, address, length, 0, flags & ~unsigned{IBV_ACCESS_ZERO_BASED});
}

int dereg_mr(ibv_mr* mr) { return owners().ours(mr->context) ? error_of(ibv_dereg_mr(mr)) : EPERM; }
ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) { return ibv_alloc_mw(pd, type); }
int dealloc_mw(ibv_mw* mw) { return error_of(ibv_dealloc_mw(mw)); }

/// A channel that wakes the user of a completion queue; null without descriptors: the user then
/// looks by itself.
ibv_comp_channel* open_channel(ibv_context* context) {
  ibv_comp_channel* const channel = ibv_create_comp_channel(context);
  if (channel == nullptr) return nullptr;
  const int flags = ::fcntl(channel->fd, F_GETFL);
  if (flags >= 0 && ::fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK) == 0) return channel;
  (void)ibv_destroy_comp_channel(channel);
  return nullptr;
}

ibv_cq* create_extended(ibv_context* context, const CompletionQueueOptions& options, bool domain,
                        ibv_comp_channel* channel) {
  ibv_cq_init_attr_ex attr{};
  attr.cqe = static_cast<std::uint32_t>(options.entries);
  attr.channel = channel;
  attr.wc_flags = IBV_WC_STANDARD_FLAGS;
  attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
  if (domain) {
    attr.comp_mask |= IBV_CQ_INIT_ATTR_MASK_PD;
    attr.parent_domain = options.parent_domain;
  }
  ibv_cq_ex* cq = ibv_create_cq_ex(context, &attr);
  return cq != nullptr ? ibv_cq_ex_to_cq(cq) : nullptr;
}

/// Devices refuse unknown attributes with different errors, so any failure tries the next form.
ibv_cq* create_cq(ibv_context* context, const CompletionQueueOptions& options) {
  ibv_comp_channel* const channel = open_channel(context);
  ibv_cq* cq = nullptr;
  if (options.single_threaded && options.parent_domain != nullptr)
    cq = create_extended(context, options, true, channel);
  if (options.single_threaded && cq == nullptr)
    cq = create_extended(context, options, false, channel);
  if (cq == nullptr) cq = ibv_create_cq(context, options.entries, nullptr, channel, 0);
  if (cq == nullptr && channel != nullptr) {
    const int error = errno;
    (void)ibv_destroy_comp_channel(channel);
    errno = error;
  }
  return cq;
}

int destroy_cq(ibv_cq* cq) {
  ibv_comp_channel* const channel = cq->channel;
  const int error = error_of(ibv_destroy_cq(cq));
  if (error == 0 && channel != nullptr) (void)ibv_destroy_comp_channel(channel);
  return error;
}

int wake_descriptor(ibv_cq* cq) {
  if (cq->channel != nullptr) return cq->channel->fd;
  errno = EMFILE;  // open_channel() failed
  return -1;
}

/// Reads and acknowledges the events of earlier arming: at most one for each.
void drain_channel(ibv_cq* cq) {
  ibv_cq* about = nullptr;
  void* user = nullptr;
  while (ibv_get_cq_event(cq->channel, &about, &user) == 0) {
    ibv_ack_cq_events(about, 1);
    cq->cq_context = nullptr;
  }
}

/// The queue's `cq_context` tells whether it is armed: not null from ibv_req_notify_cq() until its
/// event has come.
Armed arm_cq(ibv_cq* cq) {
  if (cq->channel == nullptr) return Armed::brief;
  drain_channel(cq);
  if (cq->cq_context != nullptr) return Armed::yes;
  if (ibv_req_notify_cq(cq, 0) != 0) return Armed::brief;
  cq->cq_context = cq;
  return Armed::poll_again;
}

ibv_srq* create_srq(ibv_pd* pd, ibv_srq_init_attr* attr) { return ibv_create_srq(pd, attr); }
int destroy_srq(ibv_srq* srq) { return error_of(ibv_destroy_srq(srq)); }
int destroy_ah(ibv_ah* ah) { return error_of(ibv_destroy_ah(ah)); }

/// Soft-RoCE takes a retry count of 7 as infinite, which the specification does only for RNR
/// retries. A dead peer would never be noticed.
void limit_retries(ibv_qp* qp, ibv_qp_attr& attr) {
  constexpr std::uint8_t kForEver = 7;
  ibv_device_attr device{};
  if (attr.retry_cnt == kForEver && ibv_query_device(qp->context, &device) == 0 &&
      device.vendor_id == kRxeVendor)
    attr.retry_cnt = kForEver - 1;
}

int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  if ((mask & IBV_QP_RETRY_CNT) != 0) limit_retries(qp, *attr);
  return error_of(ibv_modify_qp(qp, attr, mask));
}
int query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) {
  return error_of(ibv_query_qp(qp, attr, mask, init));
}
int destroy_qp(ibv_qp* qp) { return error_of(ibv_destroy_qp(qp)); }

}  // namespace

const Provider& rdmacore_provider() noexcept {
  static const Provider provider = {
      .name = "rdma-core",
      .reaches_other_hosts = true,
      .device_names = names,
      .open_device = open,
      .close_device = close_device,
      .query_device = query_device,
      .query_port = query_port,
      .query_gid = query_gid,
      .gid_table = gid_table,
      .get_async_event = get_async_event,
      .is_gone = is_gone,
      .alloc_pd = ibv_alloc_pd,
      .dealloc_pd = dealloc_pd,
      .alloc_td = alloc_td,
      .dealloc_td = dealloc_td,
      .alloc_parent_domain = alloc_parent_domain,
      .memory_flags = memory_flags,
      .reg_mr = reg_mr,
      .reg_mr_for_qp = nullptr,
      .dereg_mr = dereg_mr,
      .alloc_mw = alloc_mw,
      .dealloc_mw = dealloc_mw,
      .create_cq = create_cq,
      .destroy_cq = destroy_cq,
      .create_srq = create_srq,
      .destroy_srq = destroy_srq,
      .create_ah = ibv_create_ah,
      .destroy_ah = destroy_ah,
      .create_qp = ibv_create_qp,
      .modify_qp = modify_qp,
      .query_qp = query_qp,
      .destroy_qp = destroy_qp,
      .control = nullptr,
      .wake_descriptor = wake_descriptor,
      .arm = arm_cq,
      .disarm = nullptr,
      .wait_for_local_accesses = nullptr,
      .peer_has_ended = nullptr,
      .direct = nullptr,
      .direct_messages = nullptr,
  };
  return provider;
}

}  // namespace spinwire::verbs
