// The provider of the embedded device.
#include <cstring>

#include "base/error.h"
#include "softverbs/context_gid.h"
#include "softverbs/memory/access_tracking.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/objects.h"
#include "softverbs/softverbs_device.h"
#include "softverbs/ud/ud_datagram.h"
#include "verbs/providers.h"

namespace spinwire::verbs {
namespace {

std::vector<std::string> softverbs_names() { return {softverbs::kDeviceName}; }

Result<ibv_context*> open_softverbs(const std::string&, const Clock& clock) {
  return softverbs::open_device(clock, softverbs::Driving::by_user);
}

std::vector<GidEntry> softverbs_gid_table(ibv_context* context, std::uint8_t port, int) {
  GidEntry entry;
  entry.type = GidType::embedded;
  if (softverbs::query_gid(context, port, entry.index, &entry.gid) != 0) return {};
  return {entry};
}

/// Ignores `single_threaded`: softverbs' queues have no locks.
ibv_cq* create_softverbs_cq(ibv_context* context, const CompletionQueueOptions& options) {
  return softverbs::create_cq(context, options.entries);
}

int softverbs_wake_descriptor(ibv_cq* cq) { return softverbs::wake_descriptor(cq->context); }

Armed arm_softverbs(ibv_cq* cq) {
  switch (softverbs::arm_device(cq)) {
    case softverbs::SleepAnswer::yes:
      return Armed::yes;
    case softverbs::SleepAnswer::brief:
      return Armed::brief;
    default:
      return Armed::work;
  }
}

void disarm_softverbs(ibv_cq* cq) { softverbs::disarm_device(cq->context); }

}  // namespace

const Provider& softverbs_provider() noexcept {
  static const Provider provider = {
      .name = "softverbs",
      .reaches_other_hosts = false,
      .device_names = softverbs_names,
      .open_device = open_softverbs,
      .close_device = softverbs::close_device,
      .query_device = softverbs::query_device,
      .query_port = softverbs::query_port,
      .query_gid = softverbs::query_gid,
      .gid_table = softverbs_gid_table,
      .get_async_event = softverbs::get_async_event,
      .is_gone = nullptr,
      .alloc_pd = softverbs::alloc_pd,
      .dealloc_pd = softverbs::dealloc_pd,
      .alloc_td = nullptr,
      .dealloc_td = nullptr,
      .alloc_parent_domain = nullptr,
      .memory_flags = nullptr,
      .reg_mr = softverbs::reg_mr,
      .reg_mr_for_qp = softverbs::reg_mr_for_qp,
      .dereg_mr = softverbs::dereg_mr,
      .alloc_mw = softverbs::alloc_mw,
      .dealloc_mw = softverbs::dealloc_mw,
      .create_cq = create_softverbs_cq,
      .destroy_cq = softverbs::destroy_cq,
      .create_srq = softverbs::create_srq,
      .destroy_srq = softverbs::destroy_srq,
      .create_ah = softverbs::create_ah,
      .destroy_ah = softverbs::destroy_ah,
      .create_qp = softverbs::create_qp,
      .modify_qp = softverbs::modify_qp,
      .query_qp = softverbs::query_qp,
      .destroy_qp = softverbs::destroy_qp,
      .control = softverbs::control_device,
      .wake_descriptor = softverbs_wake_descriptor,
      .arm = arm_softverbs,
      .disarm = disarm_softverbs,
      .wait_for_local_accesses = softverbs::wait_for_local_accesses,
      .peer_has_ended = softverbs::peer_has_ended,
      .direct = &softverbs::direct_datagrams(),
      .direct_messages = &softverbs::direct_messages(),
  };
  return provider;
}

std::uint32_t process_of_embedded(const std::array<std::uint8_t, 16>& gid) noexcept {
  ibv_gid at;
  std::memcpy(at.raw, gid.data(), sizeof at.raw);
  auto parts = softverbs::parse_gid(softverbs::own_gid(at));
  if (!parts) parts = softverbs::parse_gid(at, softverbs::GidKind::process);
  return parts ? parts->pid : 0;
}

}  // namespace spinwire::verbs
