#include "engine/devices.h"

#include "agent/own_receives.h"
#include "base/error.h"
#include "config/queue_sizing.h"
#include "spinwire/device.h"
#include "verbs/providers.h"

namespace spinwire {
namespace engine {

verbs::DeviceWish device_wish(const Config& config) {
  verbs::DeviceWish wish;
  wish.name = config.device.name;
  wish.port = static_cast<std::uint8_t>(config.device.port);
  wish.gid.index = config.device.gid_index;
  wish.gid.address = verbs::parse_host_address(config.device.address);
  return wish;
}

verbs::DeviceOptions device_options(const Config& config, const Clock& clock) {
  verbs::DeviceOptions options;
  options.wish = device_wish(config);
  options.completion_depth = config.queues.completion_depth;
  options.receive_depth = config.queues.receive_depth;
  options.shared_receives = config.queues.shared_receive_queue == SharedReceiveQueue::automatic;
  options.own_receives = agent::own_slots(config);
  options.domain_receives = config::receives_per_own_domain(config);
  options.send_depth = config.queues.send_depth;
  options.inline_bytes = config.queues.inline_bytes;
  options.send_elements = config.queues.max_send_sge + 1;  // and the header of a message
  const Config::QueuePair& qp = config.queue_pair;
  options.initiator_depth = qp.initiator_depth;
  options.responder_depth = qp.responder_depth;
  options.pkey_index = static_cast<std::uint16_t>(qp.pkey_index);
  options.clock = clock;
  return options;
}

}  // namespace engine

Result<std::vector<DeviceCandidate>> list_devices(const Config& config) {
  using Candidates = std::vector<DeviceCandidate>;
  return base::no_throw("list the devices", [&]() -> Result<Candidates> {
    if (auto good = config.check(); !good) return tl::unexpected(good.error());
    return verbs::survey_devices(verbs::providers(), engine::device_wish(config), Clock::real());
  });
}

}  // namespace spinwire
