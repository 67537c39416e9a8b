// Spinwire's public API: remote calls, messages and one-sided operations.
#include <array>
#include <deque>

#include "peers/spinwire_end.h"

namespace spinwire::bench {
namespace {

// ---- calls --------------------------------------------------------------------------------------

class CallsEnd : public SpinwireEnd {
 public:
  CallsEnd(const Options& options, Role role) : SpinwireEnd(options, role) {}
  ~CallsEnd() { engine_ = Engine(); }  // runs callbacks, which use the members

  [[nodiscard]] std::string address() {
    if (!role_.is_server) return {};
    if (auto served = engine_.serve(kEcho, [this](Request& r) { answer(r); }); !served)
      give_up(served.error().message());
    listener_ = must(engine_.listen("127.0.0.1:0", {}));
    return listener_.address();
  }
  void connect(const std::string& theirs) {
    if (!role_.is_client) return;
    SessionOptions options;
    options.window = std::bit_ceil(options_.window);
    options.on_ready = [this](Session session) { start(session); };
    options.on_closed = [](Session, const Error& why) { give_up_on(why); };
    session_ = must(engine_.open_session(theirs, options));
  }
  void step() {
    poll();
    if (ready_) send_requests([this](std::uint32_t slot) { return call(slot); });
  }

 private:
  void start(Session session) {
    session_ = session;
    ready_ = true;
    if (options_.reply_size <= session.max_inline_call()) return;
    for (std::uint32_t i = 0; i < options_.window; ++i)
      long_replies_.push_back(allocate(options_.reply_size, Pool::lease));
  }
  Status call(std::uint32_t slot) {
    CallOptions options;
    options.post = Post::defer;
    if (!long_replies_.empty()) options.reply_into = long_replies_[slot].slice();
    const auto done = [this](Reply& reply) {
      if (reply.status() == Status::ok) [[likely]]
        return window_.on_reply(reply.bytes().data(), reply.bytes().size());
      if (reply.status() != Status::flushed) window_.count_bad();
    };
    const Buffer& request = requests_[slot];
    // A request of up to kSlotPayloadBytes is copied into the call's slot.
    return options_.size <= kSlotPayloadBytes
               ? session_.call(kEcho, std::span<const std::byte>(request.bytes()), done, options)
               : session_.call(kEcho, request.slice(), done, options);
  }

  void answer(Request& request) {
    const Status status = options_.reply_size <= kSlotPayloadBytes ? answer_short(request)
                          : is_long_                               ? answer_long(request)
                                                                   : answer_in_place(request);
    if (status != Status::ok) window_.count_bad();
  }
  bool build(const Request& request, std::byte* reply) {
    return build_reply(options_, request.bytes().data(), request.bytes().size(), reply);
  }
  Status answer_short(Request& request) {
    std::array<std::byte, kSlotPayloadBytes> reply;
    if (!build(request, reply.data())) return request.refuse("not the request that was sent");
    return request.reply(std::span<const std::byte>(reply.data(), options_.reply_size));
  }
  Status answer_in_place(Request& request) {
    const std::span<std::byte> reply = request.reserve_reply(options_.reply_size);
    if (reply.empty()) {
      is_long_ = true;
      return answer_long(request);
    }
    if (!build(request, reply.data())) return request.refuse("not the request that was sent");
    return request.commit_reply(options_.reply_size);
  }
  /// A reply that the library does not copy, in a buffer that no earlier reply uses any more.
  Status answer_long(Request& request) {
    Buffer* reply = nullptr;
    for (Buffer& buffer : replies_) {
      if (buffer.unique()) reply = &buffer;
    }
    if (reply == nullptr) reply = &replies_.emplace_back(allocate(options_.reply_size));
    if (!build(request, reply->data())) return request.refuse("not the request that was sent");
    return request.reply(reply->slice());
  }

  Session session_;
  std::vector<Buffer> long_replies_;  ///< by slot, where the server writes the replies
  std::vector<Buffer> replies_;
  bool is_long_ = false;  ///< the client names the memory of its replies
};

// ---- messages -----------------------------------------------------------------------------------

class MessagesEnd : public SpinwireEnd {
 public:
  MessagesEnd(const Options& options, Role role) : SpinwireEnd(options, role) {}
  ~MessagesEnd() { engine_ = Engine(); }

  [[nodiscard]] std::string address() {
    if (!role_.is_server) return {};
    ListenOptions options;
    options.handlers.on_message = [this](Connection c, Message& m) { answer(c, m); };
    listener_ = must(engine_.listen("127.0.0.1:0", options));
    return listener_.address();
  }
  void connect(const std::string& theirs) {
    if (!role_.is_client) return;
    ConnectOptions options;
    options.handlers.on_ready = [this](Connection) { ready_ = true; };
    options.handlers.on_message = [this](Connection, Message& m) {
      window_.on_reply(m.data(), m.size());
    };
    options.handlers.on_closed = [](Connection, const Error& why) { give_up_on(why); };
    connection_ = must(engine_.connect(theirs, options));
  }
  void step() {
    poll();
    while (!unsent_.empty() && reply(unsent_.front())) unsent_.pop_front();
    if (!ready_) return;
    send_requests([this](std::uint32_t slot) {
      return options_.size == 0 ? connection_.send_copy({}, {}, Post::defer)
                                : connection_.send(requests_[slot], {}, Post::defer);
    });
  }

 private:
  struct Reply {
    Connection to;
    Buffer bytes;
  };

  void answer(Connection connection, Message& request) {
    if (options_.reply_size > kShortReply || !unsent_.empty() || !answer_short(connection, request))
      answer_long(connection, request);
  }
  /// Builds the reply on the stack, as the server of calls does. False: nothing was sent.
  bool answer_short(Connection connection, const Message& request) {
    std::array<std::byte, kShortReply> reply;
    if (!build_reply(options_, request.data(), request.size(), reply.data())) return false;
    return is_sent(connection.send_copy({reply.data(), options_.reply_size}));
  }
  /// Sends the request's own buffer back, where its bytes and its length allow that.
  void answer_long(Connection connection, Message& request) {
    Buffer bytes;
    if (options_.reply_size != 0) {
      bytes = options_.size != 0 ? request.take() : Buffer();
      const std::size_t size = request.size();
      std::byte* const from = bytes.data();
      if (!bytes || !bytes.resize(options_.reply_size)) {
        Buffer copy = allocate(options_.reply_size);
        if (!build_reply(options_, from, size, copy.data())) window_.count_bad();
        bytes = std::move(copy);
      } else if (!build_reply(options_, from, size, from)) {
        window_.count_bad();
      }
    }
    Reply next{connection, std::move(bytes)};
    if (!unsent_.empty() || !reply(next)) unsent_.push_back(std::move(next));
  }
  static constexpr std::size_t kShortReply = std::size_t{16} << 10;

  static bool reply(Reply& reply) {
    return is_sent(reply.bytes ? reply.to.send(reply.bytes) : reply.to.send_copy({}));
  }
  static bool is_sent(Status status) {
    if (status == Status::would_block) return false;
    if (status != Status::ok && status != Status::not_connected) give_up(to_string(status));
    return true;
  }

  Connection connection_;
  std::deque<Reply> unsent_;  ///< while the client grants no credit
};

// ---- one-sided operations -----------------------------------------------------------------------

class OneSidedEnd : public SpinwireEnd {
 public:
  OneSidedEnd(const Options& options, Role role) : SpinwireEnd(options, role) {}
  ~OneSidedEnd() { engine_ = Engine(); }

  [[nodiscard]] std::string address() {
    if (!role_.is_server) return {};
    const std::size_t stride = stride_of(options_.size);
    memory_ = allocate(options_.window * stride, Pool::lease);
    for (std::uint32_t slot = 0; slot < options_.window; ++slot) {
      const Head head{slot, 0, 0};
      if (options_.size >= sizeof head)
        std::memcpy(memory_.data() + slot * stride, &head, sizeof head);
    }
    const RemoteRegion region =
        must(engine_.expose(memory_.slice(), Access::remote_read | Access::remote_write));
    ListenOptions options;
    listener_ = must(engine_.listen("127.0.0.1:0", options));
    return join_parts(
        {listener_.address(), std::string(reinterpret_cast<const char*>(&region), sizeof region)});
  }
  void connect(const std::string& theirs) {
    if (!role_.is_client) return;
    const std::vector<std::string> parts = split_parts(theirs);
    std::memcpy(&remote_, parts.at(1).data(), sizeof remote_);
    ConnectOptions options;
    options.handlers.on_ready = [this](Connection) { ready_ = true; };
    options.handlers.on_closed = [](Connection, const Error& why) { give_up_on(why); };
    connection_ = must(engine_.connect(parts.at(0), options));
  }
  void step() {
    poll();
    if (ready_) send_requests([this](std::uint32_t slot) { return start(slot); });
  }
  /// What was written has to lie in the place that it was written to.
  void close() {
    if (!role_.is_server || options_.size < sizeof(Head)) return;
    for (std::uint32_t slot = 0; slot < options_.window; ++slot) {
      if (load_head(memory_.data() + slot * stride_of(options_.size)).slot != slot)
        window_.count_bad();
    }
  }

 private:
  Status start(std::uint32_t slot) {
    const RemoteRegion remote = remote_.slice(slot * stride_of(options_.size), options_.size);
    const auto done = [this, slot](const Completion& c) { end(slot, c); };
    return options_.what == What::write
               ? connection_.write(requests_[slot], remote, done, Post::defer)
               : connection_.read(requests_[slot], remote, done, Post::defer);
  }
  void end(std::uint32_t slot, const Completion& completion) {
    if (completion.status == Status::flushed) return;
    if (completion.status != Status::ok) window_.count_bad();
    if (options_.what == What::read && options_.size >= sizeof(Head)) {
      const Head head = load_head(requests_[slot].data());
      if (head.slot != slot || head.generation != 0) window_.count_bad();
    }
    window_.end(slot);
  }

  Connection connection_;
  RemoteRegion remote_;
  Buffer memory_;
};

int measure(const Options& options) {
  switch (options.what) {
    case What::calls:
      return measure_peer<CallsEnd>("spinwire", options);
    case What::messages:
      return measure_peer<MessagesEnd>("spinwire", options);
    case What::write:
    case What::read:
      return measure_peer<OneSidedEnd>("spinwire", options);
  }
  return 2;
}

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  using namespace spinwire::bench;
  return measure(parse_options(argc, argv, "Spinwire's calls, messages and one-sided operations",
                               {What::calls, What::messages, What::write, What::read}));
}
