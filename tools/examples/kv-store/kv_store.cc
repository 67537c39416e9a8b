// A key-value store, as a base for storage programs. Read it from top to bottom.
//
//   kv-store serve [--address A] [--buckets N]      keeps the table until interrupted
//   kv-store put KEY VALUE, get KEY, delete KEY     does one operation at the server of --address
//   kv-store bench [--count N] [--keys N] ...       puts and gets at random and checks every value
//   kv-store demo                                   runs bench against a server in a second process
//
// The table is an array of buckets in memory that the server opens to its clients. A put is a
// remote call: only the server writes. A get is a one-sided READ of the one bucket that can hold
// the key. The network adapter (on softverbs, the reader's own processor) executes it, without the
// server's processor, which may be writing at that moment. The reader recognises a torn value by a
// version and a checksum in each slot: read kv_table.h first. The server replies to a
// put after the slot is whole, so a client with the reply reads that value or a later one.
//
// CMake builds it, and so does this command. A copy of this folder of a clone needs `cp -rL`.
//
//   g++ -std=c++20 -O2 *.cc -o kv-store $(pkg-config --cflags --libs spinwire fmt CLI11 libxxhash)
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kv_bench.h"
#include "kv_table.h"
#include "program.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using program::fail;
using program::Failure;
using program::must;
using namespace std::chrono_literals;
using kv::BenchOptions;
using kv::Bucket;
using kv::Found;
using kv::kKeyBytes;
using kv::kValueBytes;

// ---- the protocol -----------------------------------------------------------------------------

/// The first message on a connection: where the server's table is.
struct Welcome {
  static constexpr std::uint64_t kMagic = 0x31766b7270737773;
  std::uint64_t magic = kMagic;
  std::uint64_t buckets = 0;  // a power of two
  RegionToken table{};        // for import_token()
};

/// A put: this header, the key's bytes, the value's bytes. The reply is the new version of the
/// slot.
constexpr Method kPut = 1;
/// A delete: the key's bytes. The reply is empty.
constexpr Method kDelete = 2;
struct PutHead {
  std::uint32_t key_size;
  std::uint32_t value_size;
};

void must(Status status, std::string_view what) {
  if (status != Status::ok) throw Failure(fmt::format("{}: {}", what, to_string(status)));
}

Config settings() {
  Config config = must(Config::load());  // the defaults, then SPINWIRE_* variables
  config.engine.control = ControlMode::automatic;
  return config;
}

// ---- the server -------------------------------------------------------------------------------

class Server {
 public:
  Server(const std::string& address, std::uint64_t buckets) : buckets_(buckets) {
    Config config = settings();
    config.memory.lease_bytes =
        std::max<std::uint64_t>(config.memory.lease_bytes, buckets * sizeof(Bucket) + (4u << 20));
    engine_ = must(Engine::open(config));
    memory_ = engine_.allocate(buckets * sizeof(Bucket), Pool::lease);
    if (!memory_) throw Failure(fmt::format("no memory for {} buckets", buckets));
    std::memset(memory_.data(), 0, memory_.size());
    // Read access only: no client can write to the table.
    region_ = must(engine_.expose(memory_, Access::remote_read));
    must(engine_.serve(kPut, [this](Request& r) { on_put(r); }));
    must(engine_.serve(kDelete, [this](Request& r) { on_delete(r); }));
    ListenOptions options;
    options.handlers.on_ready = [this](Connection c) { welcome(c); };
    options.handlers.on_closed = [this](Connection, const Error&) { ++gone_; };
    listener_ = must(engine_.listen(address, options));
  }

  /// The loop that every program has. Ends when interrupted or, with `once`, when the first client
  /// has left.
  void run(bool once) {
    // A server that waits for clients sleeps; one that is measured yields.
    Idler idler(once ? IdleStrategy::yield : IdleStrategy::wait);
    while (!program::stop_requested() && !(once && gone_ != 0)) {
      if (idler.idle(engine_, engine_.poll()) != Status::ok) throw Failure("poll() was misused");
    }
  }
  [[nodiscard]] std::string address() const { return listener_.address(); }

 private:
  void welcome(Connection client) {
    Welcome w;
    w.buckets = buckets_;
    const auto token = client.token(region_);
    if (token) w.table = *token;
    if (!token || client.send_copy(std::as_bytes(std::span(&w, 1))) != Status::ok)
      (void)client.close();
  }

  // Runs inside poll(). Checks everything that comes from a client before using it.
  void on_put(Request& request) {
    PutHead head{};
    const std::span<const std::byte> bytes = request.bytes();
    if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
    if (head.key_size == 0 || head.key_size > kKeyBytes || head.value_size > kValueBytes ||
        bytes.size() != sizeof head + head.key_size + head.value_size) {
      return static_cast<void>(request.refuse("that is not a put"));
    }
    const char* text = reinterpret_cast<const char*>(bytes.data()) + sizeof head;
    const std::string_view key(text, head.key_size);
    auto* table = reinterpret_cast<Bucket*>(memory_.data());
    kv::Slot* slot = kv::place_of(table[kv::bucket_of(key, buckets_)], key);
    if (slot == nullptr) return static_cast<void>(request.refuse("the key's bucket is full"));
    kv::write(*slot, key, {text + head.key_size, head.value_size});
    // Reply only now: a client with the reply finds the value. If reply() fails, the library
    // refuses the call.
    (void)request.reply(std::as_bytes(std::span(&slot->version, 1)));
  }

  void on_delete(Request& request) {
    const std::span<const std::byte> bytes = request.bytes();
    if (bytes.empty() || bytes.size() > kKeyBytes)
      return static_cast<void>(request.refuse("that is not a key"));
    const std::string_view key(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    auto* table = reinterpret_cast<Bucket*>(memory_.data());
    kv::Slot* slot = kv::place_of(table[kv::bucket_of(key, buckets_)], key);
    if (slot == nullptr || !kv::holds(*slot, key))
      return static_cast<void>(request.refuse("the key does not exist"));
    kv::write(*slot, {}, {});
    (void)request.reply(std::span<const std::byte>());
  }

  // Declared before the engine, whose destructor still runs callbacks.
  std::uint64_t buckets_;
  int gone_ = 0;
  Buffer memory_;
  RemoteRegion region_;
  Engine engine_;
  Listener listener_;
};

int serve(const std::string& address, std::uint64_t buckets, bool once, int announce) {
  Server server(address, buckets);
  program::announce_address(announce, server.address());
  server.run(once);
  return program::kDone;
}

// ---- the client -------------------------------------------------------------------------------

class Client {
 public:
  explicit Client(const std::string& address) {
    engine_ = must(Engine::open(settings()));
    ConnectOptions connect;
    connect.handlers.on_message = [this](Connection, Message& m) { on_welcome(m); };
    connect.handlers.on_closed = [this](Connection, const Error& e) { lost(e); };
    connection_ = must(engine_.connect(address, connect));  // for the READs
    SessionOptions open;
    open.on_closed = [this](Session, const Error& e) { lost(e); };
    session_ = must(engine_.open_session(address, open));  // for the calls, on the same port
    until([this] { return session_.ready() && table_; });
    for (std::uint32_t i = 0; i < kGets; ++i) {
      gets_[i].memory = engine_.allocate(sizeof(Bucket));
      if (!gets_[i].memory) throw Failure("no memory for READs; raise memory.send_bytes");
      free_.push_back(i);
    }
  }
  ~Client() { engine_ = Engine(); }  // runs callbacks, so it happens while all members exist
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  static constexpr std::uint32_t kGets = 8;  // at once

  /// `done` runs in a later poll(). After would_block, poll and try again.
  Status put(std::string_view key, std::string_view value, const ReplyCallback& done) {
    const PutHead head{static_cast<std::uint32_t>(key.size()),
                       static_cast<std::uint32_t>(value.size())};
    // The call holds the buffer's block until it ends.
    const Buffer b = engine_.allocate(sizeof head + key.size() + value.size());
    if (!b) return Status::would_block;
    std::memcpy(b.data(), &head, sizeof head);
    std::memcpy(b.data() + sizeof head, key.data(), key.size());
    std::memcpy(b.data() + sizeof head + key.size(), value.data(), value.size());
    return session_.call(kPut, b, done);
  }

  Status remove(std::string_view key, const ReplyCallback& done) {
    return session_.call(kDelete, std::as_bytes(std::span(key)), done);
  }

  /// Like put().
  Status get(std::string_view key, const Callback<void(const Found&)>& done) {
    if (free_.empty()) return Status::would_block;
    const std::uint32_t index = free_.back();
    Get& g = gets_[index];
    g.key = key;
    g.done = done;
    g.torn = {};
    g.from = table_.slice(kv::bucket_of(key, buckets_) * sizeof(Bucket), sizeof(Bucket));
    const Status status = read(index);
    if (status == Status::ok) free_.pop_back();
    return status;
  }

  /// Polls until `done()`.
  template <typename Done>
  void until(Done&& done) {
    const program::Deadline deadline(engine_.clock(), 20s);
    while (!done()) {
      if (poll() < 0) throw Failure("poll() was misused");
      if (program::stop_requested()) throw Failure("interrupted");
      if (deadline.passed()) throw Failure("the server does not answer");
    }
  }
  int poll() {
    if (!lost_.empty()) throw Failure(lost_);
    const int events = engine_.poll();
    for (std::size_t most = put_off_.size(); most != 0; --most) {
      const std::uint32_t index = put_off_.front();
      put_off_.erase(put_off_.begin());
      repeat(index);
    }
    return events;
  }
  void close() {
    closing_ = true;
    // Either may be closed already; then there is nothing to do.
    (void)session_.close();
    (void)connection_.close();
    until([this] { return engine_.stats().connections + engine_.rpc_stats().sessions == 0; });
  }
  [[nodiscard]] const Clock& clock() const { return engine_.clock(); }
  [[nodiscard]] Engine& engine() { return engine_; }
  [[nodiscard]] std::uint64_t read_again() const { return read_again_; }

 private:
  // A server that is descheduled during a put resumes within this time. A server that died there
  // leaves the slot torn for good.
  static constexpr auto kTimeout = 5s;

  struct Get {
    Buffer memory;
    std::string key;
    RemoteRegion from;
    Callback<void(const Found&)> done;
    std::optional<program::Deadline> torn;  // since the slot was first seen torn
  };

  void on_welcome(const Message& message) {
    Welcome w;
    if (message.size() == sizeof w) std::memcpy(&w, message.data(), sizeof w);
    auto region = connection_.import_token(w.table);
    if (message.size() != sizeof w || w.magic != Welcome::kMagic ||
        !std::has_single_bit(w.buckets) || !region ||
        region->length / sizeof(Bucket) != w.buckets) {
      lost_ = "the server is not a kv-store of this version";
      return;
    }
    buckets_ = w.buckets;
    table_ = *region;
  }
  void lost(const Error& e) {
    if (closing_ || !lost_.empty()) return;
    lost_ = e.status == Status::ok ? "the server has gone" : e.message();
  }

  Status read(std::uint32_t index) {
    Get& g = gets_[index];
    return connection_.read(g.memory.slice(), g.from,
                            [this, index](const Completion& c) { on_read(index, c); });
  }

  void on_read(std::uint32_t index, const Completion& completion) {
    Get& g = gets_[index];
    Found found{completion.status, kv::Look::absent, {}};
    if (completion.status == Status::ok) {
      found.look = kv::look(*reinterpret_cast<const Bucket*>(g.memory.data()), g.key, found.value,
                            found.version);
    }
    if (found.look == kv::Look::torn) {
      if (!g.torn) g.torn.emplace(clock(), kTimeout);
      if (!g.torn->passed()) {
        ++read_again_;
        return repeat(index);
      }
      found.status = Status::timed_out;
    }
    end_get(index, found);
  }
  /// The connection may have no room now; then a later poll() tries again.
  void repeat(std::uint32_t index) {
    const Status status = read(index);
    if (status == Status::would_block) {
      put_off_.push_back(index);
    } else if (status != Status::ok) {
      end_get(index, {status, kv::Look::torn, {}});
    }
  }
  void end_get(std::uint32_t index, const Found& found) {
    gets_[index].done(found);
    free_.push_back(index);
  }

  std::string lost_;
  bool closing_ = false;
  std::uint64_t buckets_ = 0;
  RemoteRegion table_;
  std::array<Get, kGets> gets_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> put_off_;  // gets to read again
  std::uint64_t read_again_ = 0;
  Engine engine_;
  Connection connection_;
  Session session_;
};

/// A put or, if `value` is null, a delete.
int change(const std::string& address, const std::string& key, const std::string* value) {
  // Declared before the client, here and below: its engine's destructor still runs callbacks.
  std::optional<Status> ended;
  std::string why;
  Client client(address);
  const auto done = [&ended, &why](Reply& r) {
    ended = r.status();
    why = r.text();
  };
  must(value != nullptr ? client.put(key, *value, done) : client.remove(key, done), key);
  client.until([&ended] { return ended.has_value(); });
  client.close();
  if (*ended == Status::ok) return program::kDone;
  return fail(fmt::format("{} was not {}: {}", key, value != nullptr ? "put" : "deleted",
                          why.empty() ? to_string(*ended) : why));
}

int get(const std::string& address, const std::string& key) {
  std::optional<Found> found;
  std::string value;
  Client client(address);
  must(client.get(key,
                  [&found, &value](const Found& f) {
                    found = f;
                    value = f.value;
                  }),
       "get");
  client.until([&found] { return found.has_value(); });
  client.close();
  must(found->status, key);
  if (found->look != kv::Look::there) return fail(fmt::format("there is no {}", key));
  fmt::print("{}\n", value);
  return program::kDone;
}

// ---- bench ------------------------------------------------------------------------------------

int bench(const std::string& address, const BenchOptions& options) {
  std::unique_ptr<kv::Bench<Client>> run;
  const auto client = std::make_unique<Client>(address);
  run = std::make_unique<kv::Bench<Client>>(*client, options);
  if (const std::string wrong = run->run(); !wrong.empty()) throw Failure(wrong);
  client->close();
  return program::kDone;
}

int demo(const BenchOptions& options) {
  // Fork before engines are opened: an engine belongs to the process and thread that opened it.
  program::ServerChild server([](int announce) {
    try {
      return serve("127.0.0.1:0", 1024, /*once=*/true, announce);
    } catch (const Failure& failure) {
      return fail(failure.what());
    }
  });
  fmt::print("a server with 1024 buckets of {} slots in a process of its own, on {}\n", kv::kWays,
             server.address());
  const int code = bench(server.address(), options);
  if (code != program::kDone) return code;
  return server.wait() == 0 ? program::kDone : fail("the server failed");
}

// ---- the command line -------------------------------------------------------------------------

void add_bench_options(CLI::App& app, BenchOptions& o) {
  app.add_option("-n,--count", o.count, "operations")
      ->check(CLI::Range(program::kOne, program::kMostCount))
      ->capture_default_str();
  app.add_option("-k,--keys", o.keys, "keys that the operations are spread over")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--puts", o.put_percent, "percentage of puts")
      ->check(CLI::Range(0, 100))
      ->capture_default_str();
  app.add_option("-s,--size", o.value_bytes, "bytes per value")
      ->check(CLI::Range(std::size_t{16}, kValueBytes))
      ->capture_default_str();
}

}  // namespace

int main(int argc, char** argv) {
  program::name = "kv-store";
  program::log_to_stderr();
  program::catch_stop_signals();

  CLI::App app("Keeps values under keys: puts are remote calls, gets are one-sided reads.",
               "kv-store");
  app.require_subcommand(1);
  std::string address = program::kDefaultAddress;
  std::uint64_t buckets = 4096;
  std::string key, value;
  BenchOptions options;

  CLI::App* serving = app.add_subcommand("serve", "keep a table, until interrupted");
  serving->add_option("--buckets", buckets, "number of buckets, four values each; a power of two")
      ->check(CLI::Range(1, 1 << 20))
      ->check([](const std::string& text) {
        return std::has_single_bit(std::strtoull(text.c_str(), nullptr, 10))
                   ? std::string()
                   : text + " is not a power of two";
      })
      ->capture_default_str();
  CLI::App* putting = app.add_subcommand("put", "put a value");
  CLI::App* getting = app.add_subcommand("get", "print a value");
  CLI::App* deleting = app.add_subcommand("delete", "delete a key");
  CLI::App* benching = app.add_subcommand("bench", "put and get at random and check every value");
  CLI::App* showing = app.add_subcommand("demo", "run bench against a server in a second process");
  const auto length = [](std::size_t least, std::size_t most) {
    return [least, most](const std::string& text) {
      return text.size() >= least && text.size() <= most
                 ? std::string()
                 : fmt::format("length must be {} to {} bytes, not {}", least, most, text.size());
    };
  };
  for (CLI::App* one : {putting, getting, deleting})
    one->add_option("key", key, "the key")->required()->check(length(1, kKeyBytes));
  putting->add_option("value", value, "the value")->required()->check(length(0, kValueBytes));
  for (CLI::App* one : {serving, putting, getting, deleting, benching}) {
    one->add_option("-a,--address", address, "server address: a.b.c.d:port or [v6]:port")
        ->capture_default_str();
  }
  for (CLI::App* one : {benching, showing}) add_bench_options(*one, options);
  int code = 0;
  if (!program::parse_arguments(app, argc, argv, code)) return code;
  try {
    if (*serving) return serve(address, buckets, /*once=*/false, -1);
    if (*putting) return change(address, key, &value);
    if (*deleting) return change(address, key, nullptr);
    if (*getting) return get(address, key);
    return *benching ? bench(address, options) : demo(options);
  } catch (const Failure& failure) {
    return fail(failure.what());
  }
}
