// Direct datagrams for the layers above verbs/: datagrams that the device carries without work
// requests. softverbs owns their line format. On a device without them Provider::direct is null,
// and datagrams use work requests.
#pragma once

#include "softverbs/ud/ud_direct.h"

namespace spinwire::verbs {

using softverbs::DatagramAddress;
using softverbs::DirectBatch;
using softverbs::DirectBatches;
using softverbs::DirectDatagrams;
using softverbs::DirectEnd;
using softverbs::DirectLane;
using softverbs::DirectRound;
using softverbs::kDirectHeader;
using softverbs::kDirectPayload;
using softverbs::kLongestDirect;
using softverbs::Line;
using softverbs::release_batch;
using softverbs::send_direct;
using softverbs::Sent;

}  // namespace spinwire::verbs
