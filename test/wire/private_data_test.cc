// Private data, codes of refusals, and tags of leases on the wire.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "wire/cm_data.h"
#include "wire/codec.h"
#include "wire/endpoints.h"
#include "wire/lease_messages.h"

namespace private_data_test {
namespace {

using namespace spinwire::wire;
using spinwire::Endpoint;
using spinwire::Error;
using spinwire::kPrivateDataMax;
using spinwire::PrivateData;
using spinwire::Status;
using wire_test::decode_frame;
using wire_test::valid_endpoint;
using wire_test::valid_session_end;
namespace header_at = wire_test::header_at;

using Bytes = std::vector<std::byte>;

PrivateData data_of(std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 3 + 1);
  PrivateData data;
  EXPECT_EQ(data.assign(bytes), Status::ok);
  return data;
}
Endpoint endpoint_with(std::size_t size) {
  Endpoint e = valid_endpoint();
  e.private_data = data_of(size);
  return e;
}
SessionEnd session_with(std::size_t size) {
  SessionEnd e = valid_session_end();
  e.private_data = data_of(size);
  return e;
}
Bytes copy_of(const Frame& frame) { return {frame.bytes().begin(), frame.bytes().end()}; }
/// Each frame that can carry private data, and the bytes of its body without it.
std::vector<std::pair<Frame, std::size_t>> frames_with(std::size_t size) {
  return {{encode(Hello{endpoint_with(size)}), kEndpointBytes},
          {encode(Accept{endpoint_with(size)}), kEndpointBytes},
          {encode(OpenSession{session_with(size)}), kSessionBytes},
          {encode(SessionOpened{session_with(size)}), kSessionBytes}};
}
const PrivateData& data_in(const Received& r) {
  if (const auto* hello = std::get_if<Hello>(&r.body)) return hello->endpoint.private_data;
  if (const auto* accept = std::get_if<Accept>(&r.body)) return accept->endpoint.private_data;
  if (const auto* open = std::get_if<OpenSession>(&r.body)) return open->end.private_data;
  return std::get<SessionOpened>(r.body).end.private_data;
}
template <typename T>
Bytes with(Bytes bytes, std::size_t at, T value) {
  put_number(bytes.data() + at, value);
  return bytes;
}

TEST(PrivateDataWire, ComesBackAsSent) {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{255}, kPrivateDataMax}) {
    for (const auto& [frame, fixed] : frames_with(size)) {
      EXPECT_LE(frame.size, kFrameBytesMax);
      EXPECT_EQ(frame.size, kHeaderBytes + fixed + (size == 0 ? 0 : 2 + size));
      const auto received = decode_frame(frame.bytes());
      ASSERT_TRUE(received) << received.error().message();
      EXPECT_EQ(data_in(*received), data_of(size));
    }
  }
}

TEST(PrivateDataWire, AFrameWithoutItIsThatOfAnOlderRelease) {
  const Frame plain = encode(Hello{valid_endpoint()});
  EXPECT_EQ(plain.size, kHeaderBytes + kEndpointBytes);
  EXPECT_EQ(decode_frame(plain.bytes())->header.features, 0u);
  Endpoint e = valid_endpoint();
  e.application_fields = true;
  const auto offers = decode_frame(encode(Hello{e}).bytes());
  ASSERT_TRUE(offers);
  EXPECT_EQ(offers->header.features, feature::application_fields);
  EXPECT_EQ(std::get<Hello>(offers->body).endpoint, e);
}

TEST(PrivateDataWire, MoreThan256BytesAreRefused) {
  PrivateData data = data_of(3);
  EXPECT_EQ(data.assign(Bytes(257)), Status::invalid_argument);
  EXPECT_EQ(data, data_of(3));
  for (const auto& [frame, fixed] : frames_with(kPrivateDataMax)) {
    // The header alone shows it.
    Bytes longer = copy_of(frame);
    longer.push_back(std::byte{});
    longer = with(longer, header_at::body_length, static_cast<std::uint16_t>(fixed + 259));
    longer = with(longer, kHeaderBytes + fixed, std::uint16_t{257});
    const auto received = decode_frame(longer);
    ASSERT_FALSE(received);
    EXPECT_EQ(received.error().status, Status::protocol);
    // A newer peer may append fields, so there only the length shows it.
    const auto newer = decode_frame(with(longer, 6, std::uint16_t{2}));
    ASSERT_FALSE(newer);
    EXPECT_NE(
        newer.error().found.find("the length of its private data is 257, allowed is 1 to 256"),
        std::string::npos)
        << newer.error().message();
  }
}

TEST(PrivateDataWire, ALengthThatIsNotThatOfItsFrameIsRefused) {
  for (const auto& [frame, fixed] : frames_with(20)) {
    for (unsigned length = 0; length <= 0xffff; length += length < 300 ? 1 : 509) {
      const auto received = decode_frame(
          with(copy_of(frame), kHeaderBytes + fixed, static_cast<std::uint16_t>(length)));
      ASSERT_EQ(received.has_value(), length == 20) << length;
    }
    // Cut anywhere, with the body's length as it then is.
    for (std::size_t size = 0; size < frame.size - kHeaderBytes; ++size) {
      Bytes cut = copy_of(frame);
      cut.resize(kHeaderBytes + size);
      EXPECT_FALSE(
          decode_frame(with(cut, header_at::body_length, static_cast<std::uint16_t>(size))))
          << size;
    }
  }
}

TEST(PrivateDataWire, FieldsThatANewerPeerAppendsAreSkipped) {
  for (const auto& [frame, fixed] : frames_with(20)) {
    Bytes bytes = with(copy_of(frame), 6, std::uint16_t{2});
    bytes.resize(bytes.size() + 6, std::byte{0xee});
    bytes = with(bytes, header_at::body_length, static_cast<std::uint16_t>(fixed + 22 + 6));
    const auto received = decode_frame(bytes);
    ASSERT_TRUE(received) << received.error().message();
    EXPECT_EQ(data_in(*received), data_of(20));
  }
}

TEST(RefusalCodeWire, ComesBackAsSent) {
  for (const std::uint32_t code : {0u, 1u, 0xffffffffu}) {
    for (const std::size_t length : {std::size_t{0}, kRefuseTextMax}) {
      const auto frame = encode(make_refuse(Status::refused, std::string(length, 'x'), code));
      const auto received = decode_frame(frame.bytes());
      ASSERT_TRUE(received) << received.error().message();
      const auto& refuse = std::get<Refuse>(received->body);
      EXPECT_EQ(refuse.code, code);
      EXPECT_EQ(refuse.message(), std::string(length, 'x'));
    }
  }
  const auto frame = encode(make_refuse(Status::refused, "", 5));
  for (std::uint16_t size = 0; size < 5; ++size)
    EXPECT_FALSE(decode_header(with(copy_of(frame), header_at::body_length, size))) << size;
  EXPECT_FALSE(decode_header(with(copy_of(frame), header_at::body_length, std::uint16_t{206})));
}

TEST(RefusalCodeWire, OnlyAnApplicationsErrorHasOne) {
  Error why{Status::refused, "accept a peer", "come back on Monday", "ask its operator"};
  EXPECT_EQ(make_refuse(why, true).message(), why.message());
  EXPECT_FALSE(make_refuse(why, true).code);
  why.code = 9;
  EXPECT_EQ(Error(why).code, 9u);
  EXPECT_EQ(make_refuse(why, true).message(), "come back on Monday");
  EXPECT_EQ(make_refuse(why, true).code, 9u);
  EXPECT_EQ(make_refuse(why, false).message(), "come back on Monday");
  EXPECT_FALSE(make_refuse(why, false).code);
}

TEST(RefusalCodeWire, ARejectionOfRdmaCmHasRoomForIt) {
  const Frame frame = encode_cm_refusal(make_refuse(Status::refused, std::string(200, 'x'), 77));
  EXPECT_EQ(frame.size, kCmRejectMax);
  const Refuse refuse = decode_cm_refusal(frame.bytes());
  EXPECT_EQ(refuse.code, 77u);
  EXPECT_EQ(refuse.message(), std::string(127, 'x'));
  Endpoint e = valid_endpoint();
  EXPECT_FALSE(takes_application_fields(encode_cm(e)));
  e.application_fields = true;
  const auto request = encode_cm(e);
  EXPECT_TRUE(takes_application_fields(request));
  EXPECT_FALSE(takes_application_fields(std::span(request).first(kCmDataBytes - 1)));
  Endpoint read = valid_endpoint();
  ASSERT_TRUE(decode_cm(request, read));
  EXPECT_TRUE(read.application_fields);
}

TEST(PrivateDataText, IsReadBack) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, kPrivateDataMax}) {
    for (const bool raw : {false, true}) {
      Endpoint e;
      e.gid = valid_endpoint().gid;
      e.gid_type = valid_endpoint().gid_type;
      e.qp_num = 5;
      e.mtu = 1024;
      if (!raw) e = valid_endpoint();
      e.raw = raw;
      e.application_fields = true;
      e.private_data = data_of(size);
      const auto read = Endpoint::parse(e.text());
      ASSERT_TRUE(read) << read.error().message();
      EXPECT_EQ(*read, e);
    }
  }
}

TEST(PrivateDataText, NamesWhatIsWrong) {
  const std::string line = valid_endpoint().text() + " private-data=";
  const std::pair<std::string, const char*> kCases[] = {
      {"", "private-data has 0 hexadecimal digits, allowed are 2 to 512"},
      {"123", "private-data has 3 hexadecimal digits"},
      {std::string(514, '0'), "private-data has 514 hexadecimal digits"},
      {"0g", "private-data has '0g' where hexadecimal digits belong"},
      {"-1", "private-data has '-1'"},
      {"00 private-data=00", "private-data is there twice"},
      {"00 application-fields application-fields", "'application-fields' is no part"}};
  for (const auto& [text, tells] : kCases) {
    const auto read = Endpoint::parse(line + text);
    ASSERT_FALSE(read) << text;
    EXPECT_EQ(read.error().status, Status::invalid_argument);
    EXPECT_NE(read.error().found.find(tells), std::string::npos) << read.error().message();
  }
}

TEST(LeaseTagWire, ComesBackAsSent) {
  TaggedLeaseRequest request{LeaseRequest{64, 1000, 7, 8, 3, 0x1122334455667788}};
  TaggedLeaseRequest asked;
  ASSERT_TRUE(decode(encode(request), asked));
  EXPECT_EQ(asked.tag, request.tag);
  EXPECT_EQ(asked.bytes, 64u);
  request.tag = 0;
  EXPECT_FALSE(decode(encode(request), asked)) << "without a tag it is a plain request";
  request.tag = 1;
  request.bytes = 0;
  EXPECT_FALSE(decode(encode(request), asked));

  TaggedLeaseGrant grant{LeaseGrant{0x1000, 64, 1000, 7, 8, 9, 3, LeaseVerdict::granted, false, 5}};
  TaggedLeaseGrant got;
  ASSERT_TRUE(decode(encode(grant), got));
  EXPECT_EQ(got.tag, 5u);
  EXPECT_EQ(got.rkey, 9u);
  const auto bytes = encode(grant);
  EXPECT_FALSE(decode(std::span(bytes).first(kLeaseGrantBytes), got));
  grant.tag = 0;
  EXPECT_FALSE(decode(encode(grant), got));
  grant.tag = 5;
  grant.rkey = 0;
  EXPECT_FALSE(decode(encode(grant), got));
}

TEST(LeaseTagWire, ADenialHasACodeAndAText) {
  LeaseDenial denial{7, 0xfffffffe, {}};
  set_text(denial, "not\nnow");
  LeaseDenial got;
  ASSERT_TRUE(decode(encode(denial), got));
  EXPECT_EQ(got.id, 7u);
  EXPECT_EQ(got.code, 0xfffffffeu);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(got.text.data())), "not?now");
  set_text(denial, std::string(100, 'y'));
  ASSERT_TRUE(decode(encode(denial), got));
  EXPECT_EQ(got.text.back(), 'y');
  denial.text[10] = 0;  // bytes behind the end
  EXPECT_FALSE(decode(encode(denial), got));
  denial.text.fill(0x1b);
  EXPECT_FALSE(decode(encode(denial), got));
  const auto bytes = encode(LeaseDenial{});
  EXPECT_TRUE(decode(bytes, got));
  EXPECT_FALSE(decode(std::span(bytes).first(47), got));
}

}  // namespace
}  // namespace private_data_test
