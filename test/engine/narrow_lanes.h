// Lanes of softverbs that few messages fill.
#pragma once

#include "engine/engine_core.h"
#include "softverbs/objects.h"
#include "softverbs/peer.h"
#include "spinwire/engine.h"

namespace engine_test {

/// Gives an engine's messages no more of a lane's data than datagrams have. The engine must have
/// its connections, and softverbs as its device.
inline void narrow_lanes(spinwire::Engine& engine) {
  ibv_context* const device = spinwire::detail::core_of(engine)->context.device->context();
  for (const auto& peer : spinwire::softverbs::context_of(device).peers)
    peer->out.data_capacity = spinwire::softverbs::kLaneData;
}

}  // namespace engine_test
