// The suites of messages, by work requests.
#include <gtest/gtest.h>

#include <string>

#include "engine/harness.h"
#include "engine/rerun_tests.h"

namespace work_request_messages_test {
namespace {

TEST(SlowEngineByWorkRequests, PassTheSuitesOfMessages) {
  if (!engine_test::sends_directly()) GTEST_SKIP() << "they use work requests already";
  const std::string text = engine_test::run_again(
      "SPINWIRE_TEST_MESSAGES", "verbs",
      "EngineMessages.*:EngineOrdering.*:EngineDirectPaths.*:EngineDoorbells.*:EnginePoll.*:"
      "EngineHandlers.*:EngineCancel.*:EngineClose.*:EngineReconnect.*:EngineZeroCost.*:Credits.*:"
      "PeerLoss.*:HostilePeer.*");
  EXPECT_GT(engine_test::passed(text), 60) << text << "too many were skipped";
}

}  // namespace
}  // namespace work_request_messages_test
