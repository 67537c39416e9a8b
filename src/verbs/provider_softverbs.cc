// The embedded device as a provider: the one place above it that knows it.
#include "base/error.h"
#include "softverbs/device.h"
#include "softverbs/objects.h"
#include "softverbs/region.h"
#include "verbs/providers.h"

namespace spinwire::verbs {
namespace {

std::vector<std::string> names() { return {softverbs::kDeviceName}; }

Result<ibv_context*> open(const std::string&, const Clock& clock) {
  return softverbs::open_device(clock, softverbs::Driving::by_user);
}

}  // namespace

const Provider& softverbs_provider() noexcept {
  static const Provider provider = {
      .name = "softverbs",
      .device_names = names,
      .open_device = open,
      .close_device = softverbs::close_device,
      .query_device = softverbs::query_device,
      .query_port = softverbs::query_port,
      .query_gid = softverbs::query_gid,
      .get_async_event = softverbs::get_async_event,
      .alloc_pd = softverbs::alloc_pd,
      .dealloc_pd = softverbs::dealloc_pd,
      .reg_mr = softverbs::reg_mr,
      .dereg_mr = softverbs::dereg_mr,
      .create_cq = softverbs::create_cq,
      .destroy_cq = softverbs::destroy_cq,
      .create_srq = softverbs::create_srq,
      .destroy_srq = softverbs::destroy_srq,
      .create_qp = softverbs::create_qp,
      .modify_qp = softverbs::modify_qp,
      .query_qp = softverbs::query_qp,
      .destroy_qp = softverbs::destroy_qp,
      .control = softverbs::control_device,
  };
  return provider;
}

}  // namespace spinwire::verbs
