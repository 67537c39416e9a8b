// Direct messages, as the layers above verbs/ see them: messages of connections that an opened
// device carries without work requests, and receives without receives. softverbs owns their line
// format. A device without them leaves Provider::direct_messages null.
#pragma once

#include "softverbs/rc/rc_direct.h"

namespace spinwire::verbs {

using softverbs::DirectMessages;
using softverbs::DirectReads;
using softverbs::DirectRound;
using softverbs::in_place_bytes;
using softverbs::is_in_place;
using softverbs::kDirectMessageHeader;
using softverbs::kMayRunAhead;
using softverbs::kNamedByPeer;
using softverbs::kNoCompletion;
using softverbs::kRecordLines;
using softverbs::record_of;
using softverbs::release_reads;
using softverbs::Sent;

}  // namespace spinwire::verbs
