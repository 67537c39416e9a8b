// Compares remote calls that have long requests or replies with memcpy of as many bytes.
#include <cstring>

#include "common/setup.h"
#include "peers/beside_memcpy.h"
#include "peers/harness/placement.h"

namespace spinwire::bench {
namespace {

enum Methods : Method { kTake = 1, kGive = 2 };

/// A client and a server. The server checks a request's length and first byte, or replies with its
/// buffer.
class Ends {
 public:
  explicit Ends(std::size_t bytes)
      : bytes_(bytes),
        client_(must(Engine::open(config_for(bytes, 2, 4)))),
        server_(must(Engine::open(config_for(bytes, 2, 4)))),
        from_(client_.allocate(bytes)),
        to_(client_.allocate(bytes, Pool::lease)),
        has_(server_.allocate(bytes)) {
    if (!from_ || !to_ || !has_) give_up("the pools are too small");
    std::memset(from_.data(), 1, bytes);
    std::memset(to_.data(), 2, bytes);
    std::memset(has_.data(), 3, bytes);
    must_serve(kTake, [this](Request& r) {
      arrived_ += r.bytes().size() == bytes_ && r.bytes().front() == std::byte{1} ? 1 : 0;
      (void)r.reply(std::span<const std::byte>());
    });
    must_serve(kGive, [this](Request& r) { (void)r.reply(has_.slice()); });
    listener_ = must(server_.listen("127.0.0.1:0", {}));
    session_ = must(client_.open_session(listener_.address(), {}));
    run_until(
        "the session is being opened", [this] { poll(); }, [this] { return session_.ready(); });
  }

  /// Nanoseconds for `calls` calls, `window` of them at a time.
  double call(Method method, std::size_t calls, std::size_t window) {
    const std::size_t end = ended_ + calls;
    std::size_t begun = ended_;
    arrived_ = 0;
    const double start = nanoseconds_now();
    while (ended_ != end) {
      for (; begun != end && begun - ended_ < window; ++begun) start_one(method);
      poll();
    }
    const double took = nanoseconds_now() - start;
    if (method == kTake && arrived_ != calls) give_up("a request differs from what was sent");
    if (method == kGive && to_.data()[bytes_ - 1] != std::byte{3})
      give_up("a reply did not arrive");
    return took / static_cast<double>(calls);
  }
  double copy(std::size_t times) {
    const double start = nanoseconds_now();
    for (std::size_t i = 0; i < times; ++i) {
      std::memcpy(to_.data(), from_.data(), bytes_);
      asm volatile("" ::: "memory");
    }
    return (nanoseconds_now() - start) / static_cast<double>(times);
  }

 private:
  void must_serve(Method method, const MethodHandler& handler) {
    if (auto served = server_.serve(method, handler); !served) give_up(served.error().message());
  }
  void start_one(Method method) {
    CallOptions options;
    if (method == kGive) options.reply_into = to_.slice();
    const ReplyCallback done = [this](Reply& r) {
      if (r.status() != Status::ok) give_up(to_string(r.status()));
      ++ended_;
    };
    const Status status = method == kGive
                              ? session_.call(method, std::span<const std::byte>(), done, options)
                              : session_.call(method, from_.slice(), done, options);
    if (status != Status::ok) give_up(to_string(status));
  }
  void poll() {
    (void)client_.poll();
    (void)server_.poll();
  }

  std::size_t bytes_;
  std::size_t ended_ = 0;
  std::size_t arrived_ = 0;
  Engine client_;
  Engine server_;
  Buffer from_;
  Buffer to_;
  Buffer has_;
  Listener listener_;
  Session session_;
};

int compare(const Sizes& sizes, std::size_t calls) {
  Ends ends(sizes.bytes());
  const auto way = [&](const char* name, Method method, std::size_t window) {
    return Way{name, [&ends, calls, method, window] { return ends.call(method, calls, window); }};
  };
  const std::vector<Way> ways{{"memcpy", [&] { return ends.copy(calls); }},
                              way("long requests, one at a time", kTake, 1),
                              way("long requests, four at a time", kTake, 4),
                              way("long replies, one at a time", kGive, 1),
                              way("long replies, four at a time", kGive, 4)};
  compare_with_memcpy(sizes, ways, [](bool) {});
  return 0;
}

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  spinwire::bench::Sizes sizes{8};
  std::size_t calls = 16;
  CLI::App app("Compares remote calls that have long requests or replies with memcpy");
  add_sizes(app, sizes, "a request or reply", 256);
  app.add_option("--calls", calls, "calls per measurement")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return spinwire::bench::compare(sizes, calls);
}
