// An endpoint as text, from an unknown source.
#include "control/endpoint_proof.h"
#include "fuzz/fuzz.h"
#include "fuzz/samples.h"
#include "wire/handshake.h"

namespace fuzz {

using namespace spinwire;

namespace {

void check_text(const Endpoint& e) {
  expect(wire::check(e).has_value(), "an endpoint is in order");
  const std::string line = e.text();
  expect(printable(line), "an endpoint's text is one line");
  const auto again = Endpoint::parse(line);
  expect(again && *again == e, "an endpoint written and read");
}

/// No endpoint from elsewhere proves our key.
void check_proof(const Endpoint& e) {
  const auto keys = *control::KeyRing::parse("key " + std::string(64, 'a'), "keys");
  control::AuthenticationCounts counts;
  control::EndpointKeys ours(keys, counts);
  for (const bool must_answer : {false, true}) {
    const auto checked = ours.check(e, {}, must_answer);
    expect(!checked && checked.error().status == Status::unauthenticated, "an endpoint proves");
  }
  Endpoint proved = e;
  ours.prove(proved, e.proof.nonce, {});
  expect(ours.check(proved, {}, false).has_value(), "and does not");
  expect(!ours.check(proved, proved.proof.code, false), "our own endpoint is taken");
}

}  // namespace

void run(std::span<const std::byte> data) {
  const Bytes bytes = alone(data);
  const auto read = Endpoint::parse(text_of(bytes));
  if (read) {
    check_text(*read);
    check_proof(*read);
  }
  if (!read) expect(!read.error().found.empty(), "words of a refusal");
  // Any valid endpoint has a text.
  if (const auto e = wire::decode_endpoint(bytes); e) check_text(*e);
  if (const auto e = wire::decode_endpoint(bytes, wire::feature::private_data); e) check_text(*e);
}

void sow(Seeds& seeds) {
  Endpoint e = sample_endpoint();
  seeds.add(e.text());
  seeds.add(wire::encode(wire::Hello{e}).bytes().subspan(wire::kHeaderBytes));
  e.gid_type = GidType::embedded;
  seeds.add(" \t" + e.text() + "\r\n");
  e.gid_type = GidType::infiniband;
  e.gid = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1};
  seeds.add(e.text());
  e.gid_type = GidType::roce_v1;
  e.mtu = 77;
  seeds.add(e.text());
  Endpoint with_data = sample_endpoint();
  with_data.private_data = sample_private_data(kPrivateDataMax);
  with_data.application_fields = true;
  seeds.add(with_data.text());
  seeds.add(with_data.text() + "00");
  seeds.add("spinwire-endpoint-1 private-data=0");
  seeds.add("spinwire-endpoint-1 private-data=0x private-data=");
  Endpoint proved = sample_endpoint();
  proved.proof.key.fill(1);
  proved.proof.nonce.fill(2);
  proved.proof.code.fill(3);
  seeds.add(proved.text());
  proved.proof.answers.fill(4);
  seeds.add(proved.text());
  proved.proof.nonce = {};
  seeds.add(proved.text());
  seeds.add(proved.text() + " nonce=00 proof=" + std::string(64, 'g') + " answers=");
  Endpoint raw = sample_endpoint();
  raw.raw = true;
  seeds.add(raw.text());
  seeds.add(raw.text() + " message=4096");
  seeds.add("spinwire-endpoint-1 gid=::1 gid=::1");
  seeds.add("spinwire-endpoint-1 gid=nonsense");
  seeds.add("spinwire-endpoint-1 type=other");
  seeds.add("spinwire-endpoint-1 lid=99999999");
  seeds.add("spinwire-endpoint-1 lid=0x");
  seeds.add("spinwire-endpoint-1 psn=0x12 lid");
}

}  // namespace fuzz
