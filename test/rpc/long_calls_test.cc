// Calls longer than a datagram: in both directions, mixed with short ones, refused, cancelled and
// late.
#include "rpc/long_calls.h"

namespace rpc_long_calls_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

TEST(RpcLongCalls, RequestsOfAnyLengthArriveWhole) {
  LongCalls t;
  const std::size_t datagram = t.session.max_inline_call();
  const std::size_t eager = t.client.engine.config().connections.eager_bytes;
  EXPECT_EQ(t.session.max_call(), t.client.engine.config().connections.max_message_bytes);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, datagram - 1, datagram, datagram + 1, eager - 1, eager,
        eager + 1, std::size_t{128} << 10, t.session.max_call()}) {
    const Bytes bytes = filled(size, static_cast<std::uint32_t>(size));
    const Ended e = t.call(kFold, bytes);
    EXPECT_EQ(e.status, Status::ok) << size;
    EXPECT_EQ(e.bytes, fold_of(bytes)) << size;
  }
  const RpcStats s = t.client.engine.rpc_stats();
  EXPECT_EQ(s.calls, 10u);
  EXPECT_EQ(s.replies, 10u);
  // Only longer calls than a datagram: without direct datagrams, those of an eager message, too.
  EXPECT_EQ(s.long_calls, datagram + 1 < eager - 1 ? 6u : 3u);
  t.finish_long_calls();
}

TEST(RpcLongCalls, RepliesOfAnyLengthAreWrittenWhereTheyAreWanted) {
  LongCalls t;
  const auto datagram = static_cast<std::uint32_t>(t.session.max_inline_call());
  for (const std::uint32_t size :
       {0u, 1u, 49u, datagram, datagram + 1, 4096u - 32u, 4096u, 4097u, 1u << 20}) {
    t.expect_into(kMake, number(size), filled(size, size));
  }
  t.finish_long_calls();
}

TEST(RpcLongCalls, LongBothWays) {
  LongCalls t;
  for (const std::size_t size : {49u, 4033u, 70000u, 1u << 20}) {
    const Bytes bytes = filled(size, 7);
    t.expect_into(kBack, bytes, bytes, 0);
  }
  t.finish_long_calls();
}

TEST(RpcLongCalls, OneGoesOutAtOnceUnlessItIsToWait) {
  Config config = long_call_config();
  config.rpc.direct_datagrams = spinwire::DirectPath::off;  // so that eager messages are long calls
  LongCalls t(config);
  Buffer room = t.room(100);
  const std::size_t body = t.session.max_inline_call() + 1;
  const auto settle = [&t] {
    ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
    for (int i = 0; i < 64; ++i) (void)(t.client.poll() + t.server.poll());
  };
  // Connects and gathers credit.
  for (std::uint32_t i = 0; i < 8; ++i) ASSERT_EQ(t.begin(kFold, filled(body, i)), Status::ok);
  settle();
  std::uint64_t served = 8;
  const auto arrive = [&](std::uint64_t count) {  // without polling the client
    served += count;
    return engine_test::until({&t.server},
                              [&] { return t.server.engine.rpc_stats().served == served; });
  };
  ASSERT_EQ(t.begin(kEcho, filled(9, 12), t.into(room)), Status::ok);
  EXPECT_TRUE(arrive(1));
  settle();

  CallOptions wait;
  wait.post = Post::defer;
  ASSERT_EQ(t.begin(kFold, filled(body, 13), wait), Status::ok);
  ASSERT_EQ(t.begin(kFold, filled(body, 14), wait), Status::ok);
  for (int i = 0; i < 64; ++i) (void)t.server.poll();
  EXPECT_EQ(t.server.engine.rpc_stats().served, served);
  EXPECT_EQ(t.client.engine.flush(), Status::ok);
  EXPECT_TRUE(arrive(2));
  settle();

  ASSERT_EQ(t.begin(kFold, filled(body, 15), wait), Status::ok);
  wait.post = Post::now;  // also sends what was deferred before
  ASSERT_EQ(t.begin(kFold, filled(body, 16), wait), Status::ok);
  EXPECT_TRUE(arrive(2));
  EXPECT_EQ(t.ended.back().times, 0);  // callbacks run only in polls
  settle();
  for (const Ended& e : t.ended) EXPECT_EQ(e.status, Status::ok);
  room = {};
  t.finish_long_calls();
}

TEST(RpcLongCalls, MemoryOfTheApplicationsOwnIsReadAndWritten) {
  LongCalls t;
  std::vector<std::byte> own(300000);
  MemoryRegion region = *t.client.engine.register_memory(own, Access::local);
  const Bytes sent = filled(100000, 3);
  std::copy(sent.begin(), sent.end(), own.begin());
  CallOptions options;
  options.reply_into = region.slice(150000, 100000);
  int ended = 0;
  const auto done = [&](Reply& r) {
    ++ended;
    EXPECT_EQ(r.status(), Status::ok);
    EXPECT_EQ(r.bytes().data(), own.data() + 150000);
    EXPECT_EQ(bytes_of(r.bytes()), sent);
  };
  ASSERT_EQ(t.session.call(kBack, region.slice(0, 100000), done, options), Status::ok);
  ASSERT_TRUE(t.until([&] { return ended == 1; }));
  region = {};
  options = {};
  t.finish_long_calls();
}

TEST(RpcLongCalls, ARoomForTheReplyHasBytes) {
  LongCalls t;
  Buffer b = t.room(100);
  std::vector<std::byte> own(100);
  MemoryRegion region = *t.client.engine.register_memory(own, Access::local);
  const auto served = [&] { return t.server.engine.rpc_stats().served; };
  const auto connections = t.client.engine.stats().connections;
  for (const BufferSlice& bad : {BufferSlice(), b.slice(0, 0), b.slice(101, 1), b.slice(50, 51),
                                 region.slice(100, 1), region.slice(0, 101)}) {
    CallOptions options;
    options.reply_into = bad;
    for (const std::size_t size : {9u, 9000u})
      EXPECT_EQ(t.begin(kEcho, filled(size, 1), options), Status::invalid_argument);
  }
  for (int i = 0; i < 100; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(t.client.engine.rpc_stats().calls, 0u);
  EXPECT_EQ(t.client.engine.stats().connections, connections);
  EXPECT_EQ(served(), 0u) << "nothing was sent";
  EXPECT_TRUE(t.ended.empty());
  EXPECT_EQ(t.call(kEcho, filled(9, 1), CallOptions{}).bytes, filled(9, 1)) << "no room: a message";
  b.reset();
  region = {};
  t.finish_long_calls();
}

TEST(RpcLongCalls, TheLastCallIsTheNewestThatIsNotOver) {
  LongCalls t;
  ASSERT_EQ(t.begin(kLater, filled(9, 1)), Status::ok);
  const CallId inline_call = t.session.last_call();
  std::vector<CallId> ids;
  Buffer request = t.room(40000);
  CallId id;
  while (t.session.call(
             kLater, request.slice(), [](Reply&) {}, &id) == Status::ok) {
    EXPECT_TRUE(id && id == t.session.last_call());
    ids.push_back(id);
  }
  ASSERT_TRUE(t.until([&] { return !t.later.empty() && t.later.back().bytes.size() == 40000; }));
  EXPECT_GT(ids.size(), t.client.engine.config().rpc.window);
  while (!ids.empty()) {
    ASSERT_EQ(t.session.last_call(), ids.back());
    ASSERT_EQ(t.session.cancel(ids.back()), Status::ok);
    ids.pop_back();
  }
  EXPECT_EQ(t.session.last_call(), inline_call);
  EXPECT_EQ(t.session.cancel(inline_call), Status::ok);
  EXPECT_FALSE(t.session.last_call());
  ASSERT_TRUE(t.until([&] { return request.unique() && t.all_ended(); }));
  request.reset();
  t.finish_long_calls();
}

TEST(RpcLongCalls, ManySessionsAndSortsOfCallsAtOnce) {
  Config config = long_call_config();
  config.rpc.backlog = 64;
  config.memory.send_bytes = 32u << 20;
  LongCalls t(config);
  std::vector<Session> sessions{t.session};
  for (int i = 0; i < 3; ++i) sessions.push_back(t.open());
  ASSERT_TRUE(t.until([&] {
    return std::all_of(sessions.begin(), sessions.end(), [](Session s) { return s.ready(); });
  }));
  std::vector<Buffer> rooms;
  for (std::uint32_t i = 0; i < 160; ++i) {
    t.session = sessions[i % 4];
    const std::size_t size = i % 5 == 0 ? 40000 + 997 * i : i % 5 == 1 ? 4100 + i : i;
    if (i % 3 != 0) {
      ASSERT_EQ(t.begin(kFold, filled(size, i)), Status::ok) << i;
      continue;
    }
    rooms.push_back(t.room(size + 1));
    ASSERT_EQ(t.begin(kBack, filled(size, i), t.into(rooms.back())), Status::ok) << i;
  }
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  for (std::uint32_t i = 0; i < 160; ++i) {
    const std::size_t size = i % 5 == 0 ? 40000 + 997 * i : i % 5 == 1 ? 4100 + i : i;
    const Bytes sent = filled(size, i);
    EXPECT_EQ(t.ended[i].status, Status::ok) << i;
    EXPECT_TRUE(t.ended[i].bytes == (i % 3 != 0 ? fold_of(sent) : sent)) << i;
  }
  EXPECT_EQ(t.server.engine.rpc_stats().served, 160u);
  EXPECT_EQ(t.client.engine.stats().connections, 4u);
  rooms.clear();
  for (std::size_t i = 1; i < 4; ++i) EXPECT_EQ(sessions[i].close(), Status::ok);
  t.session = sessions[0];
  t.finish_long_calls();
}

TEST(RpcLongCalls, WhatIsWrongWithACallIsToldAtOnce) {
  LongCalls t;
  Node stranger(long_call_config());
  const Buffer b = t.room(64);
  const auto done = [](Reply&) { FAIL(); };
  const auto ask = [&](const BufferSlice& request, const BufferSlice& reply) {
    CallOptions options;
    options.reply_into = reply;
    return t.session.call(kFold, request, done, options);
  };
  const Buffer foreign = stranger.buffer(64);
  EXPECT_EQ(ask(b.slice(), foreign.slice()), Status::invalid_argument);
  EXPECT_EQ(ask(b.slice(), b.slice(64, 0)), Status::invalid_argument);
  std::vector<std::byte> own(64);
  {
    const MemoryRegion theirs = *stranger.engine.register_memory(own, Access::local);
    EXPECT_EQ(ask(b.slice(), theirs.slice()), Status::invalid_argument);
  }
  const Buffer longest = t.client.buffer((1u << 20) + 1);
  EXPECT_EQ(ask(longest.slice(), {}), Status::message_too_long);
  EXPECT_EQ(t.session.call(kFold, longest.slice(), done), Status::message_too_long);
  EXPECT_EQ(t.client.engine.rpc_stats().calls, 0u);
  EXPECT_EQ(t.client.engine.stats().connections, 0u);
}

TEST(RpcLongCalls, WithoutTheRightToWriteThereIsNoRoomForReplies) {
  Config config = long_call_config();
  config.queue_pair.access = Access::remote_read;
  LongCalls t(config);
  const Buffer b = t.room(64);
  EXPECT_EQ(t.begin(kFold, filled(40000, 1), t.into(b)), Status::unsupported);
  EXPECT_EQ(t.call(kFold, filled(40000, 1)).bytes, fold_of(filled(40000, 1)));
}

TEST(RpcLongCalls, ServersRefuse) {
  LongCalls t;
  Buffer b = t.room(40000);
  for (const CallOptions& options : {CallOptions(), t.into(b)}) {
    for (const std::size_t size : {9u, 5000u, 300000u}) {
      Ended e = t.call(99, filled(size, 1), options);
      EXPECT_EQ(e.status, Status::unsupported) << size;
      EXPECT_EQ(e.text, "no such method") << size;
      e = t.call(kRefuse, filled(size, 1), options);
      EXPECT_EQ(e.status, Status::refused) << size;
      EXPECT_EQ(e.text, "not on a Sunday") << size;
      e = t.call(kSilent, filled(size, 1), options);
      EXPECT_EQ(e.text, "the handler has not answered") << size;
    }
  }
  b.reset();
  t.finish_long_calls();
}

TEST(RpcLongCalls, ARefusalThatLacksMemoryComesWhenThereIsSome) {
  LongCalls t;
  EXPECT_EQ(t.call(kFold, filled(40000, 1)).status, Status::ok);  // to connect
  ASSERT_TRUE(t.until([&] { return t.server.engine.memory_stats(Pool::send).blocks_used == 0; }));
  std::vector<BufferSlice> all;
  ASSERT_TRUE(t.server.engine.serve(20, [&](Request& r) {
    EXPECT_EQ(r.reply(r.bytes().first(9)), Status::no_buffer);
    EXPECT_EQ(r.refuse("no memory"), Status::no_buffer);
  }));
  for (const std::size_t size : {512u << 10, 4096u, 64u}) {
    while (Buffer b = t.server.engine.allocate(size)) all.push_back(b.slice());
  }
  const std::uint64_t served = t.server.engine.rpc_stats().served;
  ASSERT_EQ(t.begin(99, filled(40000, 2)), Status::ok);
  ASSERT_EQ(t.begin(20, filled(40000, 3)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.server.engine.rpc_stats().served == served + 1; }));
  for (int i = 0; i < 200; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_FALSE(t.all_ended());
  all.clear();
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  EXPECT_EQ(t.ended[1].status, Status::unsupported);
  EXPECT_EQ(t.ended[1].text, "no such method");
  EXPECT_EQ(t.ended[2].status, Status::refused);
  EXPECT_EQ(t.ended[2].text, "the handler has not answered");
  t.finish_long_calls();
}

TEST(RpcLongCalls, AReplyIsNoLongerThanItsRoom) {
  LongCalls t;
  // Without reply memory, the limit is a datagram's length.
  const auto datagram = static_cast<std::uint32_t>(t.session.max_inline_call());
  const Bytes padding = filled(40000, 1);
  const auto request = [&](std::uint32_t size) {
    Bytes bytes = number(size);
    bytes.insert(bytes.end(), padding.begin(), padding.end());
    return bytes;
  };
  EXPECT_EQ(t.call(kMake, request(datagram)).bytes, filled(datagram, datagram));
  EXPECT_EQ(t.call(kMake, request(datagram + 1)).text, "too long");
  Buffer b = t.room(50000);
  EXPECT_EQ(t.call_into(kMake, number(50001), b).text, "too long");
  EXPECT_EQ(t.call_into(kMake, number(50000), b).bytes, filled(50000, 50000));
  // The limit that the handler gets.
  ASSERT_EQ(t.begin(kLater, filled(5, 1)), Status::ok);
  ASSERT_EQ(t.begin(kLater, filled(5, 1), t.into(b)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 2; }));
  std::vector<std::size_t> rooms;
  for (const auto& each : t.later) rooms.push_back(each.call.max_reply());
  std::sort(rooms.begin(), rooms.end());
  EXPECT_EQ(rooms, (std::vector<std::size_t>{datagram, 50000}));
  for (const auto& each : t.later) {
    EXPECT_EQ(each.call.reply(each.bytes), Status::ok);
    EXPECT_EQ(each.call.max_reply(), 0u);
    EXPECT_EQ(each.call.reply(each.bytes), Status::not_connected);
  }
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  b.reset();
  t.finish_long_calls();
}

TEST(RpcLongCalls, RequestsAndRepliesAreKept) {
  LongCalls t;
  std::vector<BufferSlice> kept;
  ASSERT_TRUE(t.server.engine.serve(20, [&](Request& r) {
    kept.push_back(r.keep());
    (void)r.reply(std::span(kept.back().bytes()).first(4));
  }));
  std::vector<BufferSlice> replies;
  const auto done = [&](Reply& r) { replies.push_back(r.keep()); };
  for (const std::size_t size : {40u, 100u, 4000u, 4090u, 200000u}) {
    const Buffer b = t.client.filled(size, 5);
    const Buffer to = t.room(4);
    ASSERT_EQ(t.session.call(20, b.slice(), done, t.into(to)), Status::ok);
    ASSERT_EQ(t.session.call(20, t.client.filled(40000, 5).slice(), done), Status::ok);
    const std::size_t before = replies.size();
    ASSERT_TRUE(t.until([&] { return replies.size() == before + 2; }));
  }
  for (const std::size_t size : {300u, 5000u, 100000u})  // reuses freed memory
    EXPECT_EQ(t.call(kFold, filled(size, 9)).status, Status::ok);
  const std::array<std::size_t, 10> sizes{40,    40000, 100,   40000,  4000,
                                          40000, 4090,  40000, 200000, 40000};
  ASSERT_EQ(kept.size(), sizes.size());
  for (const BufferSlice& each : kept) {
    EXPECT_TRUE(std::find(sizes.begin(), sizes.end(), each.size()) != sizes.end());
    EXPECT_TRUE(Node::holds(each.bytes(), 5)) << each.size();
  }
  for (const BufferSlice& each : replies) EXPECT_TRUE(Node::holds(each.bytes(), 5));
  kept.clear();
  replies.clear();
  t.finish_long_calls();
}

TEST(RpcLongCalls, AWindowAndABacklogAreAllThatIsTaken) {
  Config config = long_call_config();
  config.rpc.backlog = 4;
  LongCalls t(config, nullptr, 2);
  std::vector<Status> answers;
  for (int i = 0; i < 8; ++i) answers.push_back(t.begin(kLater, filled(40000, 1)));
  EXPECT_EQ(std::count(answers.begin(), answers.end(), Status::ok), 4);  // not connected yet
  EXPECT_EQ(answers.back(), Status::would_block);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 2; }));
  while (t.begin(kLater, filled(40000, 1)) == Status::ok) {
  }
  EXPECT_EQ(t.ended.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    ASSERT_TRUE(t.until([&] { return t.later.size() > i; }));
    EXPECT_LE(t.later.size(), i + 2);  // never more than the window
    EXPECT_EQ(t.later[i].call.reply(filled(3, 1)), Status::ok);
  }
  ASSERT_TRUE(t.until([&] { return t.all_ended(); }));
  t.finish_long_calls();
}

TEST(SlowRpcLongCalls, TheLongestThereIsByDefault) {
  Config config = long_call_config();
  config.connections.max_message_bytes = Config().connections.max_message_bytes;
  config.memory.send_bytes = 72u << 20;
  config.memory.rendezvous_bytes = Config().memory.rendezvous_bytes;
  LongCalls t(config);
  const std::size_t size = t.session.max_call();
  EXPECT_EQ(size, 64u << 20);
  std::vector<std::byte> own(size);
  MemoryRegion region = *t.client.engine.register_memory(own, Access::local);
  CallOptions options;
  options.reply_into = region.slice();
  Buffer request = t.client.filled(size, 5);
  int ended = 0;
  const auto done = [&](Reply& r) {
    ++ended;
    EXPECT_EQ(r.status(), Status::ok);
    EXPECT_EQ(r.bytes().size(), size);
    EXPECT_TRUE(std::equal(own.begin(), own.end(), request.data()));
  };
  for (int i = 0; i < 3; ++i) {
    std::fill(own.begin(), own.end(), std::byte{0});
    ASSERT_EQ(t.session.call(kBack, request.slice(), done, options), Status::ok);
    ASSERT_TRUE(t.until([&] { return ended == i + 1; }));
  }
  request.reset();
  options = {};
  region = {};
  t.finish_long_calls();
}

}  // namespace
}  // namespace rpc_long_calls_test
