// Names: what the answers of the name service become. A lookup of the test's own stands in for it.
#include "control/name_resolver.h"

#include <gtest/gtest.h>
#include <netdb.h>

#include <cerrno>
#include <initializer_list>
#include <string>

namespace name_resolver_test {
namespace {

using namespace spinwire;  // the names of the library
using control::resolve_name;

/// A list of these addresses, as getaddrinfo() makes one, without a name service.
addrinfo* list_of(std::initializer_list<const char*> addresses, const char* port) {
  addrinfo* first = nullptr;
  addrinfo** next = &first;
  for (const char* each : addresses) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    EXPECT_EQ(::getaddrinfo(each, port, &hints, next), 0) << each;
    if (*next != nullptr) next = &(*next)->ai_next;
  }
  return first;
}

TEST(NameResolver, AddressesKeepTheOrderOfTheNameServiceOnceEach) {
  const auto found = resolve_name(
      "store.example:7777", [](const char* host, const char* port, const addrinfo*, addrinfo** r) {
        EXPECT_EQ(std::string(host), "store.example");
        *r = list_of({"::2", "192.0.2.9", "::1", "192.0.2.1", "192.0.2.9", "::2"}, port);
        return 0;
      });
  ASSERT_TRUE(found) << found.error().message();
  EXPECT_EQ(*found, (Addresses{"[::2]:7777", "192.0.2.9:7777", "[::1]:7777", "192.0.2.1:7777"}));
}

TEST(NameResolver, AddressesOfOtherFamiliesAreLeftOut) {
  const auto found =
      resolve_name("host:1", [](const char*, const char* port, const addrinfo*, addrinfo** r) {
        *r = list_of({"192.0.2.1", "192.0.2.2"}, port);
        (*r)->ai_addr->sa_family = AF_UNIX;
        return 0;
      });
  EXPECT_EQ(found.value_or(Addresses()), Addresses{"192.0.2.2:1"});
  const auto none =
      resolve_name("host:1", [](const char*, const char* port, const addrinfo*, addrinfo** r) {
        *r = list_of({"192.0.2.1"}, port);
        (*r)->ai_addr->sa_family = AF_UNIX;
        return 0;
      });
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().status, Status::invalid_argument);
}

TEST(NameResolver, ANumericAddressAsksNobody) {
  const auto found =
      resolve_name("192.0.2.1:5", [](const char*, const char*, const addrinfo*, addrinfo**) {
        ADD_FAILURE();
        return EAI_FAIL;
      });
  EXPECT_EQ(found.value_or(Addresses()), Addresses{"192.0.2.1:5"});
}

TEST(NameResolver, EachFailureHasItsStatus) {
  struct Case {
    int answer;
    Status status;
  };
  constexpr Case kCases[] = {
      {EAI_NONAME, Status::invalid_argument},
      {EAI_NODATA, Status::invalid_argument},
      {EAI_AGAIN, Status::timed_out},
      {EAI_MEMORY, Status::no_memory},
      {EAI_FAIL, Status::system},
      {EAI_SYSTEM, Status::system},
  };
  static int answer;
  for (const Case& test : kCases) {
    answer = test.answer;
    const auto found =
        resolve_name("host:1", [](const char*, const char*, const addrinfo*, addrinfo**) {
          errno = EMFILE;
          return answer;
        });
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().status, test.status) << ::gai_strerror(test.answer);
    const bool names_errno = found.error().message().find("EMFILE") != std::string::npos;
    EXPECT_EQ(names_errno, test.answer == EAI_SYSTEM) << found.error().message();
  }
}

}  // namespace
}  // namespace name_resolver_test
