// The private data that a peer gives to rdma_cm.
#include "fuzz/fuzz.h"
#include "fuzz/samples.h"
#include "wire/cm_data.h"

namespace fuzz {

using namespace spinwire;
using namespace spinwire::wire;

namespace {

void run_request(std::span<const std::byte> data) {
  // rdma_cm itself provides these fields.
  Endpoint e = sample_endpoint();
  const auto decoded = decode_cm(data, e);
  if (!decoded) {
    expect(
        decoded.error().status == Status::protocol || decoded.error().status == Status::unsupported,
        "status of a refusal");
    return;
  }
  expect(check(e).has_value(), "a decoded endpoint is in order");
  Endpoint again = sample_endpoint();
  expect(decode_cm(encode_cm(e), again).has_value(), "what was decoded can be encoded");
  expect(again == e, "an endpoint encoded and decoded");
}

void run_rejection(std::span<const std::byte> data) {
  const Refuse refuse = decode_cm_refusal(data);
  expect(refuse.status != Status::ok, "a rejection is none");
  expect(printable(refuse.message()), "text of a rejection");
  const Frame frame = encode_cm_refusal(refuse);
  expect(frame.size <= kCmRejectMax, "a rejection fits");
  const Refuse again = decode_cm_refusal(frame.bytes());
  expect(again.status == refuse.status && again.code == refuse.code &&
             refuse.message().starts_with(again.message()),
         "a rejection encoded and decoded");
}

}  // namespace

void run(std::span<const std::byte> data) {
  const Bytes bytes = alone(data);
  run_request(bytes);
  run_rejection(bytes);
  (void)takes_application_fields(bytes);
  (void)takes_cm_private_data(bytes);
  (void)announces_private_data(bytes);
}

void sow(Seeds& seeds) {
  const auto request = encode_cm(sample_endpoint(), {{1, 2}, 3});
  const Bytes padding(kCmRequestMax - request.size());
  seeds.add(request);
  seeds.add({request, padding});
  const std::string text(200, 'x');
  seeds.add(encode_cm_refusal(make_refuse(Status::limit, text)).bytes());
  seeds.add(encode_cm_refusal(make_refuse(Status::refused, "")).bytes());
  seeds.add(encode_cm_refusal(make_refuse(Status::refused, text, 77)).bytes());
  Endpoint fields = sample_endpoint();
  fields.application_fields = true;
  seeds.add(encode_cm(fields));
  seeds.add(encode(make_refuse(Status::limit, "of a newer one"), {{1, 5}, 0}).bytes());
}

}  // namespace fuzz
