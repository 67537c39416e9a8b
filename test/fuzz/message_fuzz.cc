// The header of every message, and the comparison that replaces its decoder on the hot path.
#include "fuzz/fuzz.h"
#include "wire/message_header.h"

namespace fuzz {

using namespace spinwire::wire;

namespace {

void check_plain(const Bytes& message, bool good, const MessageHeader& header) {
  if (message.size() < kMessageHeaderBytes) return;
  const std::uint64_t word = get(message.data());
  const bool plain = is_plain(word, static_cast<std::uint32_t>(message.size()));
  expect(plain == (good && header.kind == MessageKind::data && header.flags == 0),
         "plain is what decodes as data without flags");
  const bool data = is_plain(without_flags(word), static_cast<std::uint32_t>(message.size()));
  const bool known_flags = (word >> 8 & 0xff & ~std::uint64_t{message_flag::kAll}) == 0;
  expect((data && known_flags) == (good && header.kind == MessageKind::data),
         "without its flags, what decodes as data is plain");
  expect(!data || !good || wants_credit(word) == (header.flags == message_flag::kWantCredit),
         "the flag is seen");
  const std::uint64_t other = with_granted(word, 0x1234);
  expect(granted_of(other) == 0x1234 && with_granted(other, granted_of(word)) == word,
         "a header with other credit");
}

}  // namespace

void run(std::span<const std::byte> data) {
  const Bytes message = alone(data);
  MessageHeader header{};
  const bool good = decode(message.data(), message.size(), header);
  check_plain(message, good, header);
  if (!good) return;
  const std::size_t payload = message.size() - kMessageHeaderBytes;
  expect((header.flags & ~message_flag::kAll) == 0, "flags are known");
  expect(header.kind == MessageKind::credit_return || header.kind == MessageKind::goodbye ||
             header.length == payload,
         "a length is that of what came");
  expect(header.kind == MessageKind::data || payload == body_bytes(header.kind),
         "a control message has its body");
  Bytes again(kMessageHeaderBytes);
  put(encode(header), again.data());
  expect(same(again, std::span(message).first(kMessageHeaderBytes)), "a header's bytes");
}

void sow(Seeds& seeds) {
  const std::uint32_t draining =
      encode(spinwire::Goodbye{spinwire::GoodbyeReason::draining, std::chrono::seconds(2)});
  for (const std::uint32_t number : {draining, draining | kAwaitsGoodbye}) {
    const std::uint64_t header = encode(MessageHeader{MessageKind::goodbye, 0, 7, number});
    seeds.add({std::as_bytes(std::span(&header, 1)), Bytes()});
  }
  for (std::uint8_t kind = 0; kind < 20; ++kind) {
    const auto k = static_cast<MessageKind>(kind);
    const Bytes body(k == MessageKind::data ? 21 : body_bytes(k));
    for (const std::uint8_t flags : {std::uint8_t{0}, message_flag::kWantCredit}) {
      const std::uint64_t header = encode({k, flags, 7, static_cast<std::uint32_t>(body.size())});
      seeds.add({std::as_bytes(std::span(&header, 1)), body});
    }
  }
}

}  // namespace fuzz
