#include "spinwire/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <iterator>
#include <new>
#include <set>
#include <stdexcept>
#include <string>

#include "base/error.h"

namespace status_test {
namespace {

using spinwire::Error;
using spinwire::GoodbyeReason;
using spinwire::Result;
using spinwire::Status;

TEST(Status, EveryValueHasANameOfItsOwn) {
  std::set<std::string_view> names;
  for (int i = 0; i < spinwire::kStatusCount; ++i) {
    const std::string_view name = to_string(static_cast<Status>(i));
    EXPECT_NE(name, "unknown status") << i;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
#define EXPECT_NAMED(status) EXPECT_EQ(to_string(Status::status), #status)
  EXPECT_NAMED(ok);
  EXPECT_NAMED(would_block);
  EXPECT_NAMED(no_buffer);
  EXPECT_NAMED(invalid_argument);
  EXPECT_NAMED(out_of_bounds);
  EXPECT_NAMED(message_too_long);
  EXPECT_NAMED(not_connected);
  EXPECT_NAMED(wrong_thread);
  EXPECT_NAMED(reentrant);
  EXPECT_NAMED(forked_child);
  EXPECT_NAMED(unsupported);
  EXPECT_NAMED(flushed);
  EXPECT_NAMED(peer_lost);
  EXPECT_NAMED(remote_access);
  EXPECT_NAMED(remote_error);
  EXPECT_NAMED(local_error);
  EXPECT_NAMED(timed_out);
  EXPECT_NAMED(refused);
  EXPECT_NAMED(protocol);
  EXPECT_NAMED(bad_config);
  EXPECT_NAMED(no_device);
  EXPECT_NAMED(no_memory);
  EXPECT_NAMED(in_use);
  EXPECT_NAMED(limit);
  EXPECT_NAMED(system);
  EXPECT_NAMED(cancelled);
  EXPECT_NAMED(lease_expired);
#undef EXPECT_NAMED
}

TEST(Status, ValuesBeyondTheListAreNamedAsUnknown) {
  EXPECT_EQ(to_string(static_cast<Status>(spinwire::kStatusCount)), "unknown status");
  EXPECT_EQ(to_string(static_cast<Status>(255)), "unknown status");
}

TEST(Status, TellsWhetherToTryAgain) {
  constexpr Status kRetryable[] = {Status::would_block, Status::no_buffer, Status::not_connected,
                                   Status::flushed,     Status::peer_lost, Status::timed_out,
                                   Status::refused,     Status::no_memory, Status::in_use,
                                   Status::limit,       Status::system};
  constexpr Status kFinal[] = {Status::ok,
                               Status::invalid_argument,
                               Status::out_of_bounds,
                               Status::message_too_long,
                               Status::wrong_thread,
                               Status::reentrant,
                               Status::forked_child,
                               Status::unsupported,
                               Status::remote_access,
                               Status::remote_error,
                               Status::local_error,
                               Status::protocol,
                               Status::bad_config,
                               Status::no_device,
                               Status::cancelled,
                               Status::lease_expired,
                               Status::unauthenticated};
  static_assert(is_retryable(Status::would_block) && !is_retryable(Status::ok));
  for (const Status status : kRetryable) EXPECT_TRUE(is_retryable(status)) << to_string(status);
  for (const Status status : kFinal) EXPECT_FALSE(is_retryable(status)) << to_string(status);
  EXPECT_EQ(std::size(kRetryable) + std::size(kFinal), std::size_t{spinwire::kStatusCount})
      << "each status is in one of the lists";
}

TEST(Error, TellsWhetherToConnectAgain) {
  Error error;
  for (int i = 0; i < spinwire::kStatusCount; ++i) {
    error.status = static_cast<Status>(i);
    // What ends with a connection passes, although the same request never succeeds.
    const bool ends_with_it =
        error.status == Status::remote_access || error.status == Status::remote_error ||
        error.status == Status::local_error || error.status == Status::unauthenticated;
    EXPECT_EQ(is_retryable(error), is_retryable(error.status) || ends_with_it)
        << to_string(error.status);
    error.code = 0;
    EXPECT_FALSE(is_retryable(error)) << to_string(error.status);
    for (const auto reason : {GoodbyeReason::closed, GoodbyeReason::draining}) {
      error.goodbye.reason = reason;
      EXPECT_EQ(is_retryable(error), reason == GoodbyeReason::draining);
    }
    error = {};
  }
}

TEST(Error, MessageJoinsItsThreeParts) {
  const Error error = spinwire::base::make_error(Status::no_device, "open mlx5_0", "no such device",
                                                 "give one of: rxe0");
  EXPECT_EQ(error.message(), "open mlx5_0: no such device; give one of: rxe0");
}

TEST(Error, MessageLeavesOutWhatIsEmpty) {
  EXPECT_EQ((Error{Status::limit, "", "too many", ""}).message(), "too many");
  EXPECT_EQ((Error{Status::limit, "connect", "", "close some"}).message(), "connect; close some");
  EXPECT_EQ((Error{Status::limit, "", "", ""}).message(), "limit");
}

TEST(Error, FailCarriesStatusAndPartsIntoAResult) {
  const Result<int> result = spinwire::base::fail(Status::in_use, "a", "b", "c");
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().status, Status::in_use);
  EXPECT_EQ(result.error().message(), "a: b; c");
}

TEST(Error, ErrnoTextGivesMeaningAndName) {
  EXPECT_EQ(spinwire::base::errno_text(EACCES), "Permission denied (EACCES)");
  EXPECT_EQ(spinwire::base::errno_text(0), "no error");
  EXPECT_EQ(spinwire::base::errno_text(99999), "error 99999");
  EXPECT_EQ(spinwire::base::errno_text(-1), "error -1");
}

TEST(Error, FailErrnoNamesTheCall) {
  const Result<void> result =
      spinwire::base::fail_errno(Status::system, "listen", "bind", EADDRINUSE, "take another port");
  EXPECT_EQ(result.error().found, "bind: Address already in use (EADDRINUSE)");
}

TEST(Error, NoThrowTurnsExceptionsIntoErrors) {
  const auto run = [](int what) {
    return spinwire::base::no_throw("do it", [&]() -> Result<int> {
      if (what == 1) throw std::bad_alloc();
      if (what == 2) throw std::runtime_error("went wrong");
      if (what == 3) throw 7;
      return 42;
    });
  };
  EXPECT_EQ(run(0).value(), 42);
  EXPECT_EQ(run(1).error().status, Status::no_memory);
  EXPECT_EQ(run(1).error().message(), "allocate: out of memory; free memory");
  EXPECT_EQ(run(2).error().status, Status::system);
  EXPECT_EQ(run(2).error().asked, "do it");
  EXPECT_EQ(run(2).error().found, "went wrong");
  EXPECT_EQ(run(3).error().found, "an exception of unknown type");
}

}  // namespace
}  // namespace status_test
