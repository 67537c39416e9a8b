// Direct datagrams, as the layers above verbs/ see them: short datagrams that an opened device
// carries without work requests. softverbs owns their line format. A device without them leaves
// Provider::direct null; its datagrams go by work requests.
#pragma once

#include "softverbs/ud/ud_direct.h"

namespace spinwire::verbs {

using softverbs::DatagramAddress;
using softverbs::DirectDatagrams;
using softverbs::DirectEnd;
using softverbs::DirectLane;
using softverbs::DirectRun;
using softverbs::DirectRuns;
using softverbs::kDirectHeader;
using softverbs::kDirectPayload;
using softverbs::Line;
using softverbs::send_direct;
using softverbs::Sent;

}  // namespace spinwire::verbs
