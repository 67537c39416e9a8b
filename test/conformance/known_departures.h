// Known departures of a device from the specification. Their cases still run: a failure with the
// known text counts as skipped, any other failure as a failure.
#pragma once

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "conformance/conformance_device.h"
#include "conformance/patterns.h"

namespace conformance {

struct Departure {
  std::string_view cases;  ///< patterns as in --gtest_filter
  std::string_view shows;  ///< part of the text of one failure
  std::string_view what;
  mutable unsigned seen = 0;
};

/// Linux' Soft-RoCE (rdma_rxe, seen with Linux 6.1) and its provider in rdma-core.
inline constexpr std::uint32_t kRxeVendor = 0xffffff;
inline const Departure kRxeDepartures[] = {
    {"*LocalProtection.*:LocalErrors.AnError*:LocalErrors.Earlier*:LocalErrors.ThePeer*:"
     "LocalErrors.ComeWithout*:Windows.AreNoLocalKeys",
     "local QP operation error",
     "a local protection error is reported as IBV_WC_LOC_QP_OP_ERR (11.6.2)"},
    {"*TooSmall*:Datagrams.LongerThanTheReceive*", "local QP operation error",
     "a receive that is too small ends with IBV_WC_LOC_QP_OP_ERR, and the sender gets a remote "
     "operation error instead of an invalid request"},
    {"Datagrams.HighestBitMeansTheOwnKey", "did not come",
     "a Q_Key with its highest bit set is sent unchanged"},
    {"Flush.WhatIsPostedAfterwards:Flush.DatagramQueuesToo", "did not come",
     "receives posted in ERR are not flushed"},
    {"Posting.*BeyondTheQueueNameTheFirstRefused", "Which is: 0",
     "a queue accepts more than ibv_create_qp returned: the depth is silently rounded up "
     "(11.2.4.2)"},
    {"States.QueryTellsHowItWasMade", "max_send_wr",
     "ibv_create_qp does not return the actual depths; ibv_query_qp does"},
    {"SharedReceives.LastTakenIsTold", "IBV_EVENT_QP_LAST_WQE_REACHED",
     "IBV_EVENT_QP_LAST_WQE_REACHED is never raised (11.6.3)"},
    {"*RemoteAccess.RefusalEndsTheResponderWithAnEvent*", "IBV_EVENT_QP_ACCESS_ERR",
     "IBV_EVENT_QP_ACCESS_ERR is never raised (11.6.3)"},
    {"States.SendsAreRefusedBeforeReadyToSend", "Which is: NULL",
     "a send that the state forbids does not set bad_wr"},
    {"States.QueryTellsWhatWasSet", "attr.cur_qp_state", "cur_qp_state is not filled in"},
    {"*UdSqe*:States.DatagramSendErrorStopsSendingOnly", "Which is: 6",
     "a datagram queue pair has no SQE: a failed send leads to ERR"},
    {"*BadValue.IsRefused/Responder", "a.modify(attr, mask)",
     "max_dest_rd_atomic is not checked against the device's limit"},
    {"*WindowBounds.Hold*", "IBV_WC_REM_ACCESS_ERR",
     "a window's bounds are not checked: it opens its whole region"},
    {"Windows.RemotelyInvalidatingAWrongKeyFails", "IBV_WC_SUCCESS",
     "remote invalidation of a wrong key succeeds"},
    {"Windows.OfAnotherQueuePairAreNotInvalidatedRemotely", "IBV_WC_SUCCESS",
     "the peer of another queue pair can invalidate a window"},
    {"Windows.EndByRemoteInvalidation", "wc.wc_flags", "IBV_WC_WITH_INV and the key are not set"},
    {"Windows.KeepTheirRegion", "memory.try_to_deregister()",
     "deregistering a region with windows fails with EINVAL"},
    {"WindowBinding.OfAnotherDomainsRegionIsRefused", "success",
     "a window can be bound to a region of another protection domain"},
};

/// The departures of the device under test.
inline std::span<const Departure> known_departures() {
  static const std::span<const Departure> known = []() -> std::span<const Departure> {
    const Context context = open_device();
    ibv_device_attr attr{};
    must(ibv_query_device(context.get(), &attr) == 0, "ibv_query_device");
    if (attr.vendor_id == kRxeVendor) return kRxeDepartures;
    return {};
  }();
  return known;
}

/// A case whose failures are held back if a departure is known.
class Case : public testing::Test {
 public:
  ~Case() override {
    intercepted_.reset();
    if (departure_ != nullptr) report_failures();
  }

 protected:
  Case() {
    const testing::TestInfo& info = *testing::UnitTest::GetInstance()->current_test_info();
    const std::string name = std::string(info.test_suite_name()) + "." + info.name();
    for (const Departure& departure : known_departures()) {
      if (!matches_any(departure.cases, name)) continue;
      departure_ = &departure;
      intercepted_.emplace(testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD,
                           &held_);
      break;
    }
  }

 private:
  void report_failures() const {
    bool as_known = false;
    for (int i = 0; i < held_.size(); ++i) {
      const testing::TestPartResult& result = held_.GetTestPartResult(i);
      const std::string_view text = result.message();
      as_known = as_known || (result.failed() && text.find(departure_->shows) != text.npos);
    }
    if (as_known) return skip(*departure_);
    for (int i = 0; i < held_.size(); ++i) {
      const testing::TestPartResult& result = held_.GetTestPartResult(i);
      if (result.failed())
        ADD_FAILURE_AT(result.file_name(), result.line_number()) << result.message();
    }
  }
  static void skip(const Departure& departure) {
    ++departure.seen;
    GTEST_SKIP() << "known departure: " << departure.what;
  }

  const Departure* departure_ = nullptr;
  testing::TestPartResultArray held_;
  std::optional<testing::ScopedFakeTestPartResultReporter> intercepted_;
};

/// The embedded device has all that the cases try, but for this: a case that it skips otherwise
/// fails the run.
inline constexpr std::string_view kEmbedded = "softverbs";
inline constexpr std::string_view kEmbeddedLacks = "States/SendQueueDrain.*";

/// Counts the cases that the embedded device must not skip.
class Missing : public testing::EmptyTestEventListener {
 public:
  [[nodiscard]] unsigned count() const { return count_; }

 private:
  void OnTestStart(const testing::TestInfo&) override {
    if (name_.empty()) name_ = ibv_get_device_name(open_device()->device);
  }
  void OnTestEnd(const testing::TestInfo& info) override {
    const std::string name = std::string(info.test_suite_name()) + "." + info.name();
    if (name_ != kEmbedded || !info.result()->Skipped() || matches_any(kEmbeddedLacks, name))
      return;
    ++count_;
    std::printf("%s is skipped, but softverbs has what it tries\n", name.c_str());
  }

  std::string name_;
  unsigned count_ = 0;
};

/// At the end: each that was seen, and in how many cases.
inline void print_departures() {
  for (const Departure& departure : known_departures()) {
    if (departure.seen == 0) continue;
    std::printf("known departure, %u cases: %.*s\n", departure.seen,
                static_cast<int>(departure.what.size()), departure.what.data());
  }
}

}  // namespace conformance
