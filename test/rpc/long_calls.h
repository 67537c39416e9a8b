// A client and a server whose calls are longer than a datagram.
#pragma once

#include <utility>
#include <vector>

#include "rpc/rpc_ends.h"

namespace rpc_test {

inline Config long_call_config() {
  Config c = rpc_config();
  c.memory.rendezvous_bytes = 6u << 20;
  c.memory.windows = 64;
  c.connections.max_message_bytes = 1u << 20;
  c.queues.completion_depth = 16384;
  // Nothing is lost here: what is sent twice, as time is short, would count as bad.
  c.rpc.min_rto = 10s;
  return c;
}

/// The client opens the memory of replies to the server, instead of placing them itself.
inline Config with_reply_keys(Config c) {
  c.connections.direct_messages = spinwire::DirectPath::off;
  return c;
}

enum LongCallMethods : spinwire::Method {
  kBack = 10,  ///< replies with the request's own memory
  kFold = 11,  ///< replies with the request's length and checksum
  kMake = 12,  ///< replies with the requested number of pattern bytes
};

inline std::uint64_t sum_of(std::span<const std::byte> bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    sum = sum * 31 + static_cast<std::uint64_t>(bytes[i]) + i;
  return sum;
}
using Fold = std::array<std::uint64_t, 2>;
inline Bytes fold_of(std::span<const std::byte> bytes) {
  const Fold fold{bytes.size(), sum_of(bytes)};
  return bytes_of(std::as_bytes(std::span(fold)));
}
inline Bytes number(std::uint32_t value) { return bytes_of(std::as_bytes(std::span(&value, 1))); }

inline void serve_long_calls(Engine& engine) {
  EXPECT_TRUE(engine.serve(kBack, [](Request& r) { (void)r.reply(r.keep()); }));
  EXPECT_TRUE(
      engine.serve(kFold, [](Request& r) { EXPECT_EQ(r.reply(fold_of(r.bytes())), Status::ok); }));
  EXPECT_TRUE(engine.serve(kMake, [&engine](Request& r) {
    std::uint32_t size = 0;
    std::memcpy(&size, r.bytes().data(), sizeof size);
    const Buffer b = engine.allocate(std::max(size, 1u));
    if (!b) return;
    for (std::uint32_t i = 0; i < size; ++i) b.data()[i] = Node::pattern(size, i);
    if (r.reply(b.slice(0, size)) != Status::ok) {
      EXPECT_EQ(r.refuse("too long"), Status::ok);
    }
  }));
}

/// Calls with replies into memory that they name.
struct LongCalls : Calls {
  explicit LongCalls(const Config& c = long_call_config(), const std::uint64_t* ticks = nullptr,
                     std::uint32_t window = 0)
      : LongCalls(c, c, ticks, window) {}
  LongCalls(const Config& servers, const Config& clients, const std::uint64_t* ticks = nullptr,
            std::uint32_t window = 0)
      : Calls(servers, clients, ticks, window) {
    serve_long_calls(server.engine);
  }
  Buffer room(std::size_t size) {
    Buffer b = client.engine.allocate(size);
    EXPECT_TRUE(b);
    std::fill(b.data(), b.data() + size, std::byte{0xee});
    return b;
  }
  CallOptions into(const Buffer& b) const {
    CallOptions options;
    options.reply_into = b.slice();
    return options;
  }
  Ended call_into(spinwire::Method method, const Bytes& bytes, const Buffer& b) {
    return call(method, bytes, into(b));
  }
  /// Calls with a reply into `b` and checks the reply and the untouched bytes behind it.
  void expect_into(spinwire::Method method, const Bytes& bytes, const Bytes& reply,
                   std::size_t more = 64) {
    const Buffer b = room(reply.size() + more);
    const Ended e = call_into(method, bytes, b);
    EXPECT_EQ(e.status, Status::ok);
    EXPECT_TRUE(e.bytes == reply) << reply.size() << " bytes, " << e.bytes.size() << " came";
    EXPECT_TRUE(std::equal(reply.begin(), reply.end(), b.data()));
    const auto untouched = b.bytes().subspan(reply.size());
    EXPECT_TRUE(std::all_of(untouched.begin(), untouched.end(),
                            [](std::byte x) { return x == std::byte{0xee}; }));
  }
  /// Checks that nothing is left and that no message of a long call was invalid.
  void finish_long_calls() {
    finish();
    for (const Node* node : {&client, &server})
      EXPECT_EQ(node->engine.rpc_stats().bad_long_calls, 0u);
  }
};

}  // namespace rpc_test
