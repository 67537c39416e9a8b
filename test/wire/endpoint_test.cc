#include "spinwire/endpoint.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace endpoint_test {
namespace {

using spinwire::Endpoint;
using spinwire::GidType;
using spinwire::Status;

Endpoint example() {
  Endpoint e;
  e.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3};
  e.gid_type = GidType::roce_v2;
  e.qp_num = 0x11;
  e.psn = 0xabcdef;
  e.mtu = 1024;
  e.max_message = e.eager_bytes = 4096;
  e.credits = 1;
  e.incarnation = 0x1122334455667788;
  e.credit_cell_address = 0x7f0000001008;
  e.credit_cell_rkey = 0xcafe;
  e.credit_cell_token = 0x51de;
  e.peer_timeout_ms = 10000;
  e.max_rd_atomic = 16;
  return e;
}

constexpr const char* kLine =
    "spinwire-endpoint-1 gid=::ffff:10.1.2.3 type=rocev2 lid=0 qpn=0x11 psn=0xabcdef mtu=1024 "
    "message=4096 eager=4096 credits=1 incarnation=0x1122334455667788 cell=0x7f0000001008 "
    "cell-key=0xcafe cell-token=0x51de peer-timeout-ms=10000 "
    "rd-atomic=16";

constexpr const char* kRawLine =
    "spinwire-endpoint-1 gid=::ffff:10.1.2.3 type=rocev2 raw lid=0 qpn=0x11 psn=0xabcdef mtu=1024 "
    "rd-atomic=16";

std::string replaced(std::string_view what, std::string_view with) {
  std::string text = kLine;
  const std::size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), with);
}

TEST(EndpointText, IsALineThatIsReadBack) {
  EXPECT_EQ(example().text(), kLine);
  const auto read = Endpoint::parse(kLine);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(*read, example());
}

TEST(EndpointText, ARawEndpointHasOnlyTheFieldsThatItUses) {
  const auto read = Endpoint::parse(kRawLine);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_TRUE(read->raw);
  EXPECT_EQ(read->text(), kRawLine);
  for (const char* field : {"message=4096", "eager=4096", "credits=1", "incarnation=0x1",
                            "cell=0x8", "cell-key=0x1", "cell-token=0x1", "peer-timeout-ms=25"}) {
    const auto more = Endpoint::parse(std::string(kRawLine) + " " + field);
    ASSERT_FALSE(more) << field;
    EXPECT_EQ(more.error().status, Status::invalid_argument);
    const std::string name(field, std::string_view(field).find('='));
    EXPECT_EQ(more.error().found, name + " is there, but a raw endpoint does not have it");
  }
}

TEST(EndpointText, ReadsBackEveryValue) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 2000; ++i) {
    Endpoint e;
    for (std::uint8_t& b : e.gid) b = static_cast<std::uint8_t>(random() % 3 == 0 ? 0 : random());
    e.gid[3] = 1;  // not all zero
    e.gid_type = static_cast<GidType>(random() % 4);
    e.lid = static_cast<std::uint16_t>(1 + random() % 0xbfff);
    e.qp_num = static_cast<std::uint32_t>(2 + random() % 0xfffffd);
    e.psn = static_cast<std::uint32_t>(random() & 0xffffff);
    e.mtu = static_cast<std::uint16_t>(256u << random() % 5);
    e.max_message = static_cast<std::uint32_t>(256 + random() % ((1u << 31) - 255));
    e.eager_bytes = static_cast<std::uint32_t>(256 + random() % (e.max_message - 255));
    e.credits = static_cast<std::uint32_t>(random() % 32769);
    e.incarnation = random() | 1;
    e.credit_cell_address = (random() | 8) & ~std::uint64_t{7};
    e.credit_cell_rkey = static_cast<std::uint32_t>(random() | 1);
    e.credit_cell_token = static_cast<std::uint32_t>(random() | 1);
    e.peer_timeout_ms = static_cast<std::uint32_t>(25 + random() % (3600000 - 24));
    e.max_rd_atomic = static_cast<std::uint8_t>(random());
    const auto read = Endpoint::parse(e.text());
    ASSERT_TRUE(read) << read.error().message() << "\n" << e.text();
    ASSERT_EQ(*read, e) << e.text();
  }
}

TEST(EndpointText, TakesWordsInAnyOrderAndAnySpace) {
  const auto read = Endpoint::parse(
      "\n spinwire-endpoint-1\trd-atomic=16 cell-key=51966 peer-timeout-ms=10000 cell-token=20958  "
      " cell=0x7f0000001008\r\n"
      "incarnation=1234605616436508552 credits=1 message=0x1000 eager=4096 mtu=0x400 psn=0xABCDEF "
      "qpn=17 "
      "lid=0x0 type=rocev2 gid=0:0::ffff:a01:203  ");
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(*read, example());
}

const std::string kKey = " key=" + std::string(32, '1'), kNonce = " nonce=" + std::string(32, '2'),
                  kCode = " proof=" + std::string(64, '3'),
                  kAnswers = " answers=" + std::string(64, '4');

TEST(EndpointText, AProofIsReadBack) {
  Endpoint e = example();
  e.proof.key.fill(0x11);
  e.proof.nonce.fill(0x22);
  e.proof.code.fill(0x33);
  EXPECT_EQ(e.text(), kLine + kKey + kNonce + kCode);
  EXPECT_EQ(*Endpoint::parse(e.text()), e);
  e.proof.answers.fill(0x44);
  EXPECT_EQ(e.text(), kLine + kKey + kNonce + kCode + kAnswers);
  EXPECT_EQ(*Endpoint::parse(e.text()), e);
}

TEST(EndpointText, APartOfAProofIsRefused) {
  for (const std::string& part :
       {kKey, kNonce, kCode, kAnswers, kKey + kNonce, kKey + kCode, kNonce + kCode,
        kKey + kNonce + kAnswers, kKey + kNonce + kCode + kCode, kKey + kNonce + kCode + "33",
        kKey + kNonce + " proof=" + std::string(62, '3'),
        kKey + kNonce + " proof=" + std::string(64, '0'),
        kKey + kNonce + " proof=" + std::string(64, 'g'), kKey + kNonce + " proof"}) {
    const auto read = Endpoint::parse(kLine + part);
    ASSERT_FALSE(read) << part;
    EXPECT_EQ(read.error().status, Status::invalid_argument);
  }
}

TEST(EndpointText, NamesWhatIsWrong) {
  const struct {
    std::string text;
    Status status;
    const char* tells;
  } kCases[] = {
      {"", Status::invalid_argument, "begins with ''"},
      {"hello", Status::invalid_argument, "begins with 'hello'"},
      {replaced("endpoint-1", "endpoint-2"), Status::invalid_argument, "spinwire-endpoint-2"},
      {replaced(" psn=0xabcdef", ""), Status::invalid_argument, "psn is missing"},
      {replaced("lid=0", "lid=0 lid=0"), Status::invalid_argument, "lid is there twice"},
      {replaced("lid=0", "lid=0 weight=3"), Status::invalid_argument, "'weight=3' is no part"},
      {replaced("lid=0", "lid"), Status::invalid_argument, "'lid' is no part"},
      {replaced("lid=0", "=0"), Status::invalid_argument, "'=0' is no part"},
      {replaced("lid=0", "lid="), Status::invalid_argument, "lid is ''"},
      {replaced("lid=0", "lid=0x"), Status::invalid_argument, "lid is '0x'"},
      {replaced("lid=0", "lid=-1"), Status::invalid_argument, "lid is '-1'"},
      {replaced("lid=0", "lid=1e"), Status::invalid_argument, "lid is '1e'"},
      {replaced("lid=0", "lid=65536"), Status::invalid_argument, "lid is 65536"},
      {replaced("incarnation=0x1", "incarnation=0x11"), Status::invalid_argument, "no number"},
      {replaced("::ffff:10.1.2.3", "10.1.2.3"), Status::invalid_argument, "gid is '10.1.2.3'"},
      {replaced("rocev2", "roce"), Status::invalid_argument, "type is 'roce'"},
      {replaced("::ffff:10.1.2.3", "::"), Status::protocol, "gid is all zero"},
      {replaced("qpn=0x11", "qpn=0x1"), Status::protocol, "qp_num is 0x1"},
      {replaced("mtu=1024", "mtu=1000"), Status::protocol, "mtu is 1000"},
      {replaced("psn=0xabcdef", "psn=0x1000000"), Status::protocol, "psn is 0x1000000"},
  };
  for (const auto& c : kCases) {
    const auto read = Endpoint::parse(c.text);
    ASSERT_FALSE(read) << c.text;
    EXPECT_EQ(read.error().status, c.status) << c.text;
    EXPECT_NE(read.error().message().find(c.tells), std::string::npos) << read.error().message();
  }
}

TEST(EndpointText, ALongLineIsNotRepeatedInTheError) {
  const auto read = Endpoint::parse(std::string(1u << 20, 'x'));
  ASSERT_FALSE(read);
  EXPECT_LT(read.error().message().size(), 300u);
}

}  // namespace
}  // namespace endpoint_test
