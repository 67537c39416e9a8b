#include "wire/cm_data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "wire/endpoints.h"

namespace cm_data_test {
namespace {

namespace wire = spinwire::wire;
using spinwire::Endpoint;
using spinwire::GidType;
using spinwire::Status;
using wire_test::valid_endpoint;

/// The fields that rdma_cm provides itself.
Endpoint addressed() {
  Endpoint e;
  e.gid = valid_endpoint().gid;
  e.gid_type = valid_endpoint().gid_type;
  e.lid = valid_endpoint().lid;
  e.qp_num = valid_endpoint().qp_num;
  e.psn = valid_endpoint().psn;
  return e;
}

TEST(CmData, TellsTheRestOfAnEndpoint) {
  const auto data = wire::encode_cm(valid_endpoint());
  Endpoint e = addressed();
  const auto done = wire::decode_cm(data, e);
  ASSERT_TRUE(done) << done.error().message();
  EXPECT_EQ(e, valid_endpoint());
}

TEST(CmData, ARawEndTellsNothingOfCredit) {
  Endpoint raw = addressed();
  raw.raw = true;
  raw.mtu = valid_endpoint().mtu;
  Endpoint e = addressed();
  const auto done = wire::decode_cm(wire::encode_cm(raw), e);
  ASSERT_TRUE(done) << done.error().message();
  EXPECT_EQ(e, raw);
  raw.mtu = 77;  // the other fields are checked
  EXPECT_FALSE(wire::decode_cm(wire::encode_cm(raw), e));
}

TEST(CmData, PaddingIsSkipped) {
  const auto data = wire::encode_cm(valid_endpoint());
  std::vector<std::byte> padded(data.begin(), data.end());
  padded.resize(wire::kCmRequestMax);
  Endpoint e = addressed();
  ASSERT_TRUE(wire::decode_cm(padded, e));
  EXPECT_EQ(e, valid_endpoint());
}

TEST(CmData, EveryCutIsAnError) {
  const auto data = wire::encode_cm(valid_endpoint());
  for (std::size_t n = 0; n < data.size(); ++n) {
    Endpoint e = addressed();
    const auto done = wire::decode_cm(std::span(data).first(n), e);
    ASSERT_FALSE(done) << n;
    EXPECT_EQ(done.error().status, Status::protocol);
  }
}

TEST(CmData, FieldsAreChecked) {
  Endpoint wrong = valid_endpoint();
  wrong.credit_cell_address = 3;
  Endpoint e = addressed();
  auto done = wire::decode_cm(wire::encode_cm(wrong), e);
  ASSERT_FALSE(done);
  EXPECT_NE(done.error().message().find("credit_cell_address is 0x3"), std::string::npos);
  e = addressed();
  e.qp_num = 0;  // the fields from rdma_cm are checked as well
  EXPECT_FALSE(wire::decode_cm(wire::encode_cm(valid_endpoint()), e));
}

TEST(CmData, ForeignersAndOtherVersionsAreTold) {
  auto data = wire::encode_cm(valid_endpoint());
  data[0] = std::byte{'X'};
  Endpoint e = addressed();
  EXPECT_EQ(wire::decode_cm(data, e).error().status, Status::protocol);
  wire::Capabilities later;
  later.versions = {7, 9};
  const auto done = wire::decode_cm(wire::encode_cm(valid_endpoint(), later), e);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().status, Status::unsupported);
  EXPECT_NE(done.error().message().find("7 to 9"), std::string::npos) << done.error().message();
}

TEST(CmData, RandomBytesAreRefusedQuietly) {
  std::mt19937 random(3);
  std::vector<std::byte> data(wire::kCmRequestMax);
  for (int i = 0; i < 20000; ++i) {
    for (std::byte& b : data) b = static_cast<std::byte>(random());
    if (i % 2 == 0)
      std::copy_n(wire::encode_cm(valid_endpoint()).begin(), 4 + i % 40, data.begin());
    Endpoint e = addressed();
    const bool taken = wire::decode_cm(data, e).has_value();
    EXPECT_TRUE(!taken || wire::check(e));
    const auto refuse = wire::decode_cm_refusal(data);
    EXPECT_NE(refuse.status, Status::ok);
  }
}

TEST(CmData, ARefusalFitsAndIsReadBack) {
  const std::string text(400, 'w');
  const auto frame = wire::encode_cm_refusal(wire::make_refuse(Status::limit, text));
  EXPECT_EQ(frame.size, wire::kCmRejectMax);
  const auto read = wire::decode_cm_refusal(frame.bytes());
  EXPECT_EQ(read.status, Status::limit);
  EXPECT_EQ(read.message(), text.substr(0, read.message().size()));
  EXPECT_GT(read.message().size(), 100u);
  const auto foreign = wire::decode_cm_refusal({});
  EXPECT_EQ(foreign.status, Status::refused);
  EXPECT_EQ(foreign.message(), "");
}

}  // namespace
}  // namespace cm_data_test
