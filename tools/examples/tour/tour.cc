// A tour of Spinwire: both ends in one program and one thread. Read it from top to bottom. Each
// stop shows one feature of an engine, checks the result, and prints it.
//
//   tour [--device NAME]
//
// An Engine does nothing by itself. This thread polls both engines in turn (Tour::until below), and
// every event arrives in a callback inside poll().
//
// CMake builds it, and so does this command. A copy of this folder of a clone needs `cp -rL`.
//
//   g++ -std=c++20 -O2 *.cc -o tour $(pkg-config --cflags --libs spinwire fmt CLI11)
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "program.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using namespace std::chrono_literals;

/// A stop of the tour failed.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void expect(bool holds, std::string_view what) {
  if (!holds) throw Wrong(std::string("not so: ") + std::string(what));
}
void expect(Status status, std::string_view what) {
  if (status != Status::ok) throw Wrong(fmt::format("{}: {}", what, to_string(status)));
}
template <typename T>
T expect(Result<T> result) {  // set-up calls return a Result: a value, or an Error to show
  if (!result) throw Wrong(result.error().message());
  return std::move(*result);
}

/// Everything that callbacks use is declared before the engines, whose destructors run the last
/// callbacks.
class Tour {
 public:
  explicit Tour(const Config& config) : config_(config) {}
  void run();

 private:
  void open_and_connect();
  void messages();
  void immediates();
  void long_messages();
  void one_sided();
  void atomics();
  void remote_memory();
  void leases_end();
  void giving_up();
  void close();

  /// The loop that every program has: polls until `done()`.
  template <typename Done>
  void until(Done&& done) {
    const std::uint64_t began = client_.clock().now();
    while (!done()) {
      // Returns the number of events, or a negated Status.
      expect(server_.poll() >= 0 && client_.poll() >= 0, "poll() is called as it should be");
      if (client_.clock().duration(client_.clock().now() - began) > 20s) {
        throw Wrong(closed_.empty() ? "nothing happens any more" : closed_);
      }
    }
  }
  static void heading(std::string_view text) { fmt::print("\n{}\n", text); }

  Config config_;
  // Set by callbacks. A callback holds at most 32 bytes of captures: here a pointer to the Tour.
  std::string closed_;
  std::string server_got_, client_got_;
  std::optional<std::uint32_t> server_immediate_;
  std::size_t server_bytes_ = 0;
  Buffer destination_;
  RemoteRegion told_;
  std::optional<Status> ended_;
  std::uint64_t value_ = 0;
  RemoteMemory memory_;
  std::optional<LeaseRefusal> refusal_;
  std::string returned_;
  ReturnedBy returned_by_{};
  int returns_ = 0;

  Engine server_, client_;
  Listener listener_;
  Connection at_server_, at_client_;
};

// ---- 1. connecting ----------------------------------------------------------------------------

void Tour::open_and_connect() {
  heading("1. Two engines connect");
  // An engine owns a device context, its memory and its connections. It belongs to the thread that
  // opened it; use more engines to use more cores.
  server_ = expect(Engine::open(config_));
  client_ = expect(Engine::open(config_));
  fmt::print("   device: {}\n", server_.device_name());

  ListenOptions listen;
  listen.on_accept = [this](Connection c) { at_server_ = c; };
  listen.handlers.on_message = [this](Connection, Message& m) {
    server_got_.assign(reinterpret_cast<const char*>(m.data()), m.is_write() ? 0 : m.size());
    server_immediate_ = m.immediate();
    server_bytes_ = m.size();
  };
  listen.handlers.on_offer = [this](Connection, Offer& offer) {  // see the fourth stop
    if (destination_) expect(offer.place(destination_), "the destination is long enough");
  };
  listen.handlers.on_returned = [this](Connection, const Returned& r) {
    returned_.assign(reinterpret_cast<const char*>(r.memory.data()), r.memory.size());
    returned_by_ = r.how;
    ++returns_;
  };
  listen.handlers.on_closed = [this](Connection, const Error& e) { closed_ = e.message(); };
  // Port 0 chooses a free port. The handshake is Spinwire's own, over TCP; rdma_cm and out-of-band
  // exchange of endpoints are the alternatives.
  listener_ = expect(server_.listen("127.0.0.1:0", listen));

  ConnectOptions connect;
  connect.handlers.on_message = [this](Connection, Message& m) {
    client_got_.assign(reinterpret_cast<const char*>(m.data()), m.size());
    if (m.size() == sizeof told_) std::memcpy(&told_, m.data(), sizeof told_);
  };
  connect.handlers.on_closed = [this](Connection, const Error& e) { closed_ = e.message(); };
  at_client_ = expect(client_.connect(listener_.address(), connect));
  until([this] { return at_client_.ready() && at_server_.ready(); });
  fmt::print("   connected: messages up to {} bytes\n", at_client_.max_message());
}

// ---- 2. messages ------------------------------------------------------------------------------

void Tour::messages() {
  heading("2. Messages arrive whole, once and in order");
  // A buffer of registered memory. The library sends from it without a copy. The operation holds a
  // reference that keeps the memory until the operation ends.
  Buffer hello = client_.allocate(5);
  expect(static_cast<bool>(hello), "the pool has a block");
  std::memcpy(hello.data(), "hello", 5);
  // ok: accepted, and the callback will run exactly once. would_block: not accepted; poll and try
  // again.
  expect(at_client_.send(hello, [this](const Completion& c) { ended_ = c.status; }), "send");
  hello.reset();
  until([this] { return ended_.has_value() && server_got_ == "hello"; });
  expect(*ended_, "the send");
  // send_copy() takes any bytes. This answer is sent from outside a callback.
  expect(at_server_.send_copy(std::as_bytes(std::span("hello yourself", 14))), "send_copy");
  until([this] { return client_got_ == "hello yourself"; });
  fmt::print("   the server got \"{}\", the client \"{}\"\n", server_got_, client_got_);
}

// ---- 3. immediates ----------------------------------------------------------------------------

void Tour::immediates() {
  heading("3. An immediate: 32 bits beside the bytes");
  const Buffer b = client_.allocate(6);
  std::memcpy(b.data(), "number", 6);
  expect(at_client_.send_with_imm(b.slice(), 4711), "send_with_imm");
  until([this] { return server_immediate_.has_value(); });
  expect(*server_immediate_ == 4711, "the immediate is unchanged, in host order");
  fmt::print("   \"{}\" came with {}\n", server_got_, *server_immediate_);
}

// ---- 4. long messages -------------------------------------------------------------------------

void Tour::long_messages() {
  heading("4. Long messages are pulled to where the receiver wants them");
  // Above connections.eager_bytes the sender's engine opens the block, and the receiver's engine
  // READs it. The receiving application may choose the destination (on_offer, above). Otherwise the
  // message arrives in a block of a pool.
  const std::size_t size = 1u << 20;
  destination_ = server_.allocate(size, Pool::rendezvous);
  Buffer b = client_.allocate(size);
  expect(b && destination_, "the pools have room");
  std::memset(b.data(), 'x', size);
  server_bytes_ = 0;
  expect(at_client_.send(b), "send");
  until([&] { return server_bytes_ == size; });
  expect(std::memcmp(destination_.data(), b.data(), size) == 0, "the bytes are the same");
  destination_.reset();
  fmt::print("   {} bytes in the place that the receiver named\n", size);
}

// ---- 5. one-sided operations ------------------------------------------------------------------

void Tour::one_sided() {
  heading("5. One-sided operations: the peer's processor takes no part");
  // The owner opens exactly these bytes under a key of their own and tells the peer, here in a
  // message. Connection::token() encodes a region for any other way; the peer checks the encoding.
  Buffer memory = server_.allocate(64, Pool::lease);
  std::memset(memory.data(), 0, 64);
  const RemoteRegion region = expect(server_.expose(memory, Access::remote_read_write));
  expect(at_server_.send_copy(std::as_bytes(std::span(&region, 1))), "send_copy");
  until([this] { return static_cast<bool>(told_); });

  const Buffer b = client_.allocate(8);
  std::memcpy(b.data(), "one-side", 8);
  ended_.reset();
  // Bytes [16, 24) of the region. The notification is in order with messages.
  expect(at_client_.write_with_imm(b.slice(), told_.slice(16, 8), 1,
                                   [this](const Completion& c) { ended_ = c.status; }),
         "write_with_imm");
  server_immediate_.reset();
  until([this] { return ended_.has_value() && server_immediate_.has_value(); });
  expect(std::memcmp(memory.data() + 16, "one-side", 8) == 0, "the bytes are there");

  std::memset(b.data(), 0, 8);
  ended_.reset();
  expect(at_client_.read(b.slice(), told_.slice(16, 8),
                         [this](const Completion& c) { ended_ = c.status; }),
         "read");
  until([this] { return ended_.has_value(); });
  expect(std::memcmp(b.data(), "one-side", 8) == 0, "what was written is read");
  // An access out of bounds fails at once: nothing is posted.
  expect(at_client_.read(b.slice(), told_.slice(60, 8)) == Status::out_of_bounds, "bounds hold");
  expect(server_.revoke(region), "revoke");  // from now on the device refuses the key
  fmt::print("   written, noticed, read back\n");
}

// ---- 6. atomics -------------------------------------------------------------------------------

void Tour::atomics() {
  heading("6. Atomics");
  if (!client_.device().atomics) return fmt::print("   not on this device\n");
  Buffer memory = server_.allocate(8, Pool::lease);
  const std::uint64_t start = 40;
  std::memcpy(memory.data(), &start, sizeof start);
  const RemoteRegion word = expect(server_.expose(memory.slice(0, 8), Access::remote_atomic));
  const auto done = [this](const Completion& c) {
    ended_ = c.status;
    value_ = c.value;  // the previous value
  };
  ended_.reset();
  expect(at_client_.fetch_add(word, 2, done), "fetch_add");
  until([this] { return ended_.has_value(); });
  expect(value_ == 40, "it returns the previous value");
  ended_.reset();
  expect(at_client_.compare_swap(word, 42, 7, done), "compare_swap");
  until([this] { return ended_.has_value(); });
  expect(value_ == 42, "the addition was seen");
  expect(server_.revoke(word), "revoke");
  fmt::print("   40 + 2 was {}, and is 7 now\n", value_);
}

// ---- 7. remote memory -------------------------------------------------------------------------

void Tour::remote_memory() {
  heading("7. Remote memory: requested, used, given back");
  // The peer's engine leases us a zeroed block of its pool for a time, within its limits ([leases]
  // in the configuration). A refusal comes at once, with the reason.
  LeaseOptions options;
  options.duration = 10s;
  expect(at_client_.request_memory(64, options,
                                   [this](LeaseReply& r) {
                                     refusal_ = r.refusal;
                                     memory_ = std::move(r.memory);
                                   }),
         "request_memory");
  until([this] { return refusal_.has_value(); });
  expect(static_cast<bool>(memory_), to_string(*refusal_));
  const Buffer b = client_.allocate(5);
  std::memcpy(b.data(), "lease", 5);
  expect(at_client_.write(b.slice(), memory_.slice(0, 5)), "write");
  // Returned after all writes. Dropping the handle would release the memory without notice.
  expect(memory_.give_back(), "give_back");
  until([this] { return returns_ == 1; });
  expect(returned_by_ == ReturnedBy::give_back && returned_.starts_with("lease"),
         "the owner sees what was written");
  fmt::print("   the owner got it back: \"{}\"\n", returned_.substr(0, 5));
}

// ---- 8. leases end ----------------------------------------------------------------------------

void Tour::leases_end() {
  heading("8. A lease ends, and the device enforces it");
  // The other direction: our memory, leased to a peer that did not request it.
  Buffer b = server_.allocate(4096);
  std::memset(b.data(), 'o', 4096);
  std::optional<LeaseId> id;
  LeaseOptions options;
  options.duration = 10s;
  options.access = Access::remote_read;
  expect(at_server_.lease(b, options, [&id](LeaseReply& r) { id = r.lease; }), "lease");
  // The client has no on_lease, so its engine refuses and the memory is ours again.
  until([&] { return returns_ == 2 && id.has_value(); });
  expect(!*id && returned_by_ == ReturnedBy::refusal, "nobody took it");

  expect(at_client_.request_memory(8, {.access = Access::remote_read_write, .duration = 50ms},
                                   [this](LeaseReply& r) { memory_ = std::move(r.memory); }),
         "request_memory");
  until([this] { return static_cast<bool>(memory_); });
  const RemoteRegion region = memory_.region();
  const Nanoseconds left = memory_.time_left();
  until([this] { return memory_.time_left() == 0s; });
  // Our engine stops slightly early, so that no operation is in flight when the owner takes the
  // memory back. A peer that does not stop is stopped by the device and loses the connection.
  const Buffer mine = client_.allocate(8);
  expect(at_client_.write(mine.slice(), region) == Status::lease_expired, "the lease is over");
  expect(at_client_.ready(), "the connection stays");
  memory_.release();
  fmt::print("   usable for {} ms, then: lease_expired\n",
             std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1);
}

// ---- 9. giving up -----------------------------------------------------------------------------

void Tour::giving_up() {
  heading("9. What was started can be cancelled");
  const Buffer b = client_.allocate(5);
  ended_.reset();
  // Post::defer: the message leaves at the end of the next poll; until then it is not posted.
  OperationId id;
  expect(at_client_.send(
             b, [this](const Completion& c) { ended_ = c.status; }, Post::defer, &id),
         "send");
  expect(at_client_.cancel(id), "cancel");
  until([this] { return ended_.has_value(); });
  expect(*ended_ == Status::cancelled, "the callback reports it");
  const ConnectionSnapshot now = at_client_.snapshot();
  fmt::print("   cancelled; {} messages are outstanding, blocked by: {}\n", now.messages,
             to_string(now.blocked_by));
}

// ---- 10. closing ------------------------------------------------------------------------------

void Tour::close() {
  heading("10. Closing");
  // Outstanding operations complete, the peer is notified, and both ends get on_closed.
  expect(at_client_.close(), "close");
  until([this] { return server_.stats().connections == 0 && client_.stats().connections == 0; });
  // audit() checks an engine's books at any time: each operation, credit, key and block.
  if (auto good = server_.audit(); !good) throw Wrong(good.error().message());
  if (auto good = client_.audit(); !good) throw Wrong(good.error().message());
  fmt::print("   closed; the books of both engines balance\n");
}

void Tour::run() {
  open_and_connect();
  messages();
  immediates();
  long_messages();
  one_sided();
  atomics();
  remote_memory();
  leases_end();
  giving_up();
  close();
}

}  // namespace

int main(int argc, char** argv) {
  program::name = "tour";
  program::log_to_stderr();
  CLI::App app("Shows the features of Spinwire's engines, one after another.", "tour");
  std::string device;
  app.add_option("--device", device, "device to open; overrides the configuration");
  int code = 0;
  if (!program::parse_arguments(app, argc, argv, code)) return code;

  // Defaults, then the environment, e.g. SPINWIRE_MEMORY_HUGEPAGES=off.
  auto config = Config::load();
  if (!config) return program::fail(config.error());
  config->engine.control = ControlMode::automatic;
  if (!device.empty()) config->device.name = device;
  try {
    Tour(*config).run();
  } catch (const Wrong& wrong) {
    return program::fail(wrong.what());
  }
  return program::kDone;
}
