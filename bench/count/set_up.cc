// Counts what setting a connection or session up over TCP costs one end, until both ends are ready:
// count-set-up connection|session open|keyed client|server OPERATIONS. The other end's work, and
// the end of what was made, do not count.
#include <unistd.h>

#include <string_view>

#include "common/key_file.h"
#include "common/setup.h"
#include "spinwire/rpc.h"

using namespace spinwire;

namespace {

enum class End { client, server };

/// Microseconds in which the kernel delivers what an end has sent, so that no poll waits for it.
constexpr useconds_t kDelivery = 50;

class Ends {
 public:
  Ends(const Config& config, End counted)
      : client_(bench::open_engine(config)),
        server_(bench::open_engine(config)),
        counted_(counted) {
    if (!server_.serve(bench::kEcho, [](Request& r) { (void)r.reply(r.bytes()); }))
      bench::give_up("the method cannot be served");
    ListenOptions options;
    options.handlers.on_ready = [this](Connection) { ++accepted_; };
    listener_ = bench::must(server_.listen("127.0.0.1:0", options));
  }
  void connection() {
    accepted_ = 0;
    Connection made;
    count_if(End::client,
             [&] { made = bench::must(client_.connect(listener_.address(), ConnectOptions{})); });
    run([&] { return made.ready() && accepted_ != 0; });
    (void)made.close();
    end([&] { return client_.stats().connections + server_.stats().connections == 0; });
  }
  void begin_to_count() noexcept { counts_ = true; }
  void session() {
    Session made;
    count_if(End::client,
             [&] { made = bench::must(client_.open_session(listener_.address(), {})); });
    run([&] { return made.ready(); });
    (void)made.close();
    end([&] { return client_.rpc_stats().sessions + server_.rpc_stats().served_sessions == 0; });
  }

 private:
  template <typename Work>
  void count_if(End end, Work&& work) {
    (counts_ && end == counted_) ? bench::counted(1, work) : work();
  }
  template <typename Done>
  void run(Done&& done) {
    const auto drive_both = [this] {
      count_if(End::client, [this] { bench::drive(client_); });
      ::usleep(kDelivery);
      count_if(End::server, [this] { bench::drive(server_); });
      ::usleep(kDelivery);
    };
    bench::run_until("a set-up is under way", drive_both, done);
  }
  template <typename Done>
  void end(Done&& done) {
    const auto drive_both = [this] { bench::drive(client_), bench::drive(server_); };
    bench::run_until("what was made ends", drive_both, done);
    for (int i = 0; i < 50; ++i) drive_both();  // lets the rest of its work finish
  }

  Engine client_;
  Engine server_;
  End counted_;
  bool counts_ = false;
  Listener listener_;
  int accepted_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  bench::step_time();
  if (argc != 5)
    bench::give_up("arguments: connection|session open|keyed client|server OPERATIONS");
  const std::string_view what = argv[1], key = argv[2], end = argv[3];
  const bench::KeyFile file;
  Config config = bench::hot_path_config();
  if (key == "keyed") config.security.key_file = file.path();
  Ends ends(config, end == "client" ? End::client : End::server);
  for (std::uint64_t i = 0; i < 2 * operations; ++i) {
    if (i == operations) ends.begin_to_count();  // the first find cold caches and empty pools
    what == "session" ? ends.session() : ends.connection();
  }
}
