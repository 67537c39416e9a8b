// Lease messages of peers.
#include "fuzz/exact.h"
#include "fuzz/fuzz.h"
#include "wire/lease_messages.h"

namespace fuzz {

using namespace spinwire::wire;

void run(std::span<const std::byte> data) {
  const Bytes body = alone(data);
  run_exact<LeaseRequest>(body);
  run_exact<LeaseGrant>(body);
  run_exact<LeaseCall>(body);
  run_exact<LeaseReply>(body);
  run_exact<TaggedLeaseRequest>(body);
  run_exact<TaggedLeaseGrant>(body);
  run_exact<LeaseDenial>(body);
  LeaseGrant grant;
  if (decode(body, grant) && grant.verdict == LeaseVerdict::granted) {
    expect(grant.bytes != 0 && grant.address <= ~std::uint64_t{0} - grant.bytes,
           "a lease lies within memory");
    expect(grant.time != 0 && grant.time <= kLongestLease && is_remote_access(grant.access),
           "a lease can be used");
  }
}

void sow(Seeds& seeds) {
  seeds.add(encode(LeaseRequest{4096, 1'000'000'000, 7, 64, 3}));
  LeaseGrant grant;
  grant.address = 0x7fff00001000;
  grant.bytes = 4096;
  grant.time = 1'000'000'000;
  grant.rkey = 0xabcd;
  grant.access = 3;
  grant.invalidate = true;
  seeds.add(encode(grant));
  TaggedLeaseGrant tagged{grant};
  tagged.tag = 0x7461675f;
  seeds.add(encode(tagged));
  TaggedLeaseRequest asked{LeaseRequest{4096, 1'000'000'000, 7, 64, 3, 0x7461675f}};
  seeds.add(encode(asked));
  asked.tag = 0;
  seeds.add(encode(asked));
  LeaseDenial denial{7, 0xffffffff, {}};
  seeds.add(encode(denial));
  set_text(denial, "not for you\n");
  seeds.add(encode(denial));
  denial.text[30] = 'x';
  seeds.add(encode(denial));
  grant.address = ~std::uint64_t{0} - 9;
  seeds.add(encode(grant));
  grant.verdict = LeaseVerdict::no_room;
  seeds.add(encode(grant));
  for (std::uint8_t action = 0; action < 6; ++action)
    seeds.add(encode(LeaseCall{5, 6, 7, static_cast<LeaseAction>(action), LeaseVerdict::granted}));
  seeds.add(encode(LeaseReply{kLongestLease, 9, LeaseVerdict::over}));
  seeds.add(encode(LeaseReply{kLongestLease + 1, 9, LeaseVerdict::granted}));
}

}  // namespace fuzz
