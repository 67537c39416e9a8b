// Pushes a file to another process by one-sided writes.
//
//   file-push receive [ADDRESS] --out FILE    receives one file
//   file-push send FILE ADDRESS               sends one file
//   file-push both FILE                       does both in two processes
//
// The receiver opens a ring of blocks to its peer. The sender reads the file into its own blocks
// and writes each into the next free block of the ring, several at once. The receiver takes no part
// in the writes. A write's immediate names the block that is full. The receiver stores and hashes
// the block and returns it by a message.
//
//   sender                               receiver
//   announce (size)                   →
//                                     ←  grant (the ring)
//   write_with_imm (number of block)  →  as long as blocks are free
//                                     ←  returned (blocks free again)
//   finish (size, digest)             →
//                                     ←  verdict (size, digest)
//
// Either end may send `abort` with a reason instead.
//
// CMake builds it, and so does this command. A copy of this folder of a clone needs `cp -rL`.
//
//   g++ -std=c++20 -O2 *.cc -o file-push $(pkg-config --cflags --libs spinwire fmt CLI11 libxxhash)
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "output_file.h"
#include "program.h"
#include "progress.h"
#include "push.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using namespace std::chrono_literals;
using program::fail;
using push::Digest;
using push::End;
using push::Kind;
using push::Note;

struct Options {
  std::string file;
  std::string address = program::kDefaultAddress;
  std::string out;
  std::uint64_t block = 512 << 10;  // bytes
  std::uint32_t window = 8;         // blocks of the ring
};

void print_result(const char* verb, std::uint64_t size, double seconds, const Digest& digest) {
  fmt::print("{} {} bytes in {:.3f} s ({:.1f} MB/s), xxh3-128 {}\n", verb, size, seconds,
             static_cast<double>(size) / 1e6 / std::max(seconds, 1e-9), digest.text());
  std::fflush(stdout);
}

double seconds_since(const Clock& clock, std::uint64_t begin) {
  return std::chrono::duration<double>(clock.duration(clock.now() - begin)).count();
}

// ---- the receiver -----------------------------------------------------------------------------

class Receiver final : public End {
 public:
  Receiver(Engine engine, const Options& options)
      : End(std::move(engine), "the sender"), options_(options), clock_(engine_.clock()) {}

  Result<void> listen(int announce) {
    ListenOptions options;
    options.on_accept = [this](Connection sender) {
      if (met_) return static_cast<void>(sender.close());  // one file, one sender
      if (sender.set_handlers(handlers()) == Status::ok) set_peer(sender);
    };
    auto listener = engine_.listen(options_.address, options);
    if (!listener) return tl::unexpected(listener.error());
    listener_ = std::move(*listener);
    program::announce_address(announce, listener_.address());
    return {};
  }

 private:
  void on_note(const Note& note) override {
    if (note.kind == Kind::announce && !file_) {
      announced_ = note.size;
      open_ring();
    } else if (note.kind == Kind::finish && file_ && !finish_) {
      finish_ = note;  // earlier blocks may still have to be stored
    } else {
      give_up("an unexpected message");
    }
  }

  void stop_listening() override { listener_ = {}; }

  void open_ring() {
    auto file = tools::OutputFile::create(options_.out);
    if (!file) return give_up(file.error().message());
    file_.emplace(std::move(*file));
    const std::uint64_t bytes = options_.block * options_.window;
    memory_ = engine_.allocate(bytes, Pool::lease);
    if (!memory_) {
      return give_up(fmt::format("no {} bytes of free lease memory: {}", bytes,
                                 to_string(engine_.allocate_status())));
    }
    auto ring = engine_.expose(memory_, Access::remote_write);
    if (!ring) return give_up(ring.error().message());
    sizes_.resize(options_.window);
    begin_ = clock_.now();
    Note grant;
    grant.kind = Kind::grant;
    grant.block = options_.block;
    grant.blocks = options_.window;
    grant.ring = *ring;
    say(grant);
  }

  /// A block of the ring is full. Storing takes long, so it happens between polls.
  void on_write(const Message& write) override {
    const bool room = arrived_ - stored_ < sizes_.size();
    if (!room || write.size() > options_.block || write.immediate() != arrived_ % sizes_.size()) {
      return give_up("a write to a block that is in use");
    }
    sizes_[arrived_++ % sizes_.size()] = write.size();
  }

  bool turn() override {
    const bool any = stored_ != arrived_;
    if (any) store_block();
    if (unreturned_ != 0 && has_said_all()) {
      Note note;
      note.kind = Kind::returned;
      note.size = std::exchange(unreturned_, 0);
      say(note);
    }
    if (finish_ && stored_ == arrived_ && !judged_) judge();
    return any;
  }

  void store_block() {
    const std::uint64_t slot = stored_ % sizes_.size();
    const BufferSlice block = memory_.slice(slot * options_.block, sizes_[slot]);
    ++stored_;
    if (auto done = file_->append(block.bytes()); !done) return give_up(done.error().message());
    digest_.add(block.bytes());
    received_ += block.size();
    ++unreturned_;
  }

  void judge() {
    judged_ = true;
    const bool equal =
        digest_.is(*finish_) && received_ == finish_->size && received_ == announced_;
    if (equal) {
      if (auto done = file_->commit(); !done) return give_up(done.error().message());
    } else {
      fault_ = fmt::format("the received data differs from what was sent ({} of {} bytes)",
                           received_, finish_->size);
    }
    print_result("received", received_, seconds_since(clock_, begin_), digest_);
    Note verdict;
    verdict.kind = Kind::verdict;
    verdict.size = received_;
    verdict.digest_low = digest_.value().low64;
    verdict.digest_high = digest_.value().high64;
    say(verdict);
    expect_close();
  }

  const Options& options_;
  Clock clock_;
  Listener listener_;
  std::optional<tools::OutputFile> file_;
  Buffer memory_;
  std::vector<std::size_t> sizes_;  // bytes in each block of the ring
  Digest digest_;
  std::uint64_t announced_ = 0;
  std::uint64_t arrived_ = 0;     // blocks
  std::uint64_t stored_ = 0;      // blocks
  std::uint64_t unreturned_ = 0;  // stored, but not yet returned to the sender
  std::uint64_t received_ = 0;    // bytes
  std::uint64_t begin_ = 0;
  std::optional<Note> finish_;
  bool judged_ = false;
};

int receive(const Options& options, int announce) {
  auto config = Config::load();
  if (!config) return fail(config.error());
  // Memory comes in chunks of 2 MiB. One more than the ring leaves room for headroom.
  config->memory.lease_bytes =
      std::max(config->memory.lease_bytes, options.block * options.window + (4u << 20));
  config->engine.control = ControlMode::automatic;
  auto engine = Engine::open(*config);
  if (!engine) return fail(engine.error());
  Receiver receiver(std::move(*engine), options);
  if (auto listening = receiver.listen(announce); !listening) return fail(listening.error());
  return receiver.run();
}

// ---- the sender -------------------------------------------------------------------------------

class Sender final : public End {
 public:
  Sender(Engine engine, const Options& options, int fd, std::uint64_t size)
      : End(std::move(engine), "the receiver"),
        options_(options),
        clock_(engine_.clock()),
        fd_(fd),
        size_(size),
        progress_("sending", size, engine_.clock()) {}

  /// Tries for a few seconds: the receiver may start later.
  Result<void> connect() {
    ConnectOptions connect;
    connect.reconnect = {.attempts = 200, .first_delay = 50ms, .max_delay = 50ms};
    connect.handlers = handlers();
    connect.handlers.on_ready = [this](Connection receiver) {
      set_peer(receiver);
      Note note;
      note.kind = Kind::announce;
      note.size = size_;
      say(note);
    };
    // A transfer that was lost is not taken up again.
    connect.handlers.on_interrupted = [this](Connection, const Error& error) {
      if (met_) on_closed(error);
    };
    if (auto begun = engine_.connect(options_.address, connect); !begun)
      return tl::unexpected(begun.error());
    return {};
  }

 private:
  bool turn() override {
    if (!memory_ || finished_) return false;
    progress_.update(completed_ * block_);
    if (next_offset_ == size_ && !pending_) {
      finish();
      return true;
    }
    return push_block();
  }

  void on_note(const Note& note) override {
    if (note.kind == Kind::grant && !memory_) {
      on_grant(note);
    } else if (note.kind == Kind::returned && note.size <= posted_ - returned_) {
      returned_ += note.size;
    } else if (note.kind == Kind::verdict && finished_) {
      print_result("sent", size_, seconds_since(clock_, begin_), digest_);
      if (note.size != size_ || !digest_.is(note)) fault_ = "the receiver has other data";
      close();
    } else {
      give_up("an unexpected message");
    }
  }

  void on_grant(const Note& grant) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 30;
    if (grant.block == 0 || grant.block > kMost || grant.blocks == 0 || grant.blocks > kMost ||
        grant.ring.length != grant.block * grant.blocks) {
      return give_up("the receiver granted an invalid ring");
    }
    ring_ = grant.ring;
    block_ = grant.block;
    blocks_ = grant.blocks;
    // As many blocks as the ring has; fewer if memory is short.
    places_ = blocks_;
    while (places_ != 0 && !(memory_ = engine_.allocate(places_ * block_))) places_ /= 2;
    if (!memory_) {
      return give_up(
          fmt::format("no {} bytes of free send memory; raise SPINWIRE_MEMORY_SEND_BYTES", block_));
    }
    begin_ = clock_.now();
  }

  /// Reads the next block, unless one is pending, and writes it if our block and the ring's are
  /// free. Returns false if nothing could be done.
  bool push_block() {
    if (posted_ - completed_ == places_) return false;
    const BufferSlice place = memory_.slice(posted_ % places_ * block_, block_);
    if (!pending_) {
      const std::uint64_t length = std::min(block_, size_ - next_offset_);
      if (!read_block(place.bytes().first(length))) return true;
      pending_ = place.slice(0, length);
      next_offset_ += length;
    }
    if (posted_ - returned_ == blocks_) return false;
    const std::uint64_t slot = posted_ % blocks_;
    const Status status = peer_.write_with_imm(
        pending_, ring_.slice(slot * block_, block_), static_cast<std::uint32_t>(slot),
        [this](const Completion& c) { completed_ += c.status == Status::ok ? 1 : 0; });
    if (status != Status::ok) {
      // Credit or queue used up: the next poll's turn tries again. Not connected: on_closed has the
      // reason.
      if (status != Status::would_block && status != Status::not_connected) {
        give_up(fmt::format("cannot post a block: {}", to_string(status)));
      }
      return false;
    }
    pending_ = {};
    ++posted_;
    return true;
  }

  bool read_block(std::span<std::byte> bytes) {
    std::uint64_t done = 0;
    while (done != bytes.size()) {
      const ssize_t got = ::pread(fd_, bytes.data() + done, bytes.size() - done,
                                  static_cast<off_t>(next_offset_ + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        give_up(fmt::format("read {}: {}", options_.file, std::strerror(errno)));
        return false;
      }
      if (got == 0) {
        give_up(fmt::format("{} shrank from {} to {} bytes while it was read", options_.file, size_,
                            next_offset_ + done));
        return false;
      }
      done += static_cast<std::uint64_t>(got);
    }
    digest_.add(bytes);
    return true;
  }

  /// Messages and writes with immediate arrive in order, so `finish` arrives after the last block.
  void finish() {
    finished_ = true;
    progress_.finish(size_);
    Note note;
    note.kind = Kind::finish;
    note.size = size_;
    note.digest_low = digest_.value().low64;
    note.digest_high = digest_.value().high64;
    say(note);
  }

  const Options& options_;
  Clock clock_;
  int fd_;
  std::uint64_t size_;
  push::Progress progress_;
  RemoteRegion ring_;
  std::uint64_t block_ = 0;   // bytes
  std::uint64_t blocks_ = 0;  // of the ring
  std::uint64_t places_ = 0;  // blocks of our own memory
  Buffer memory_;
  BufferSlice pending_;            // read, not posted
  std::uint64_t next_offset_ = 0;  // in the file
  std::uint64_t posted_ = 0;       // blocks
  std::uint64_t completed_ = 0;    // blocks whose copy here is free again
  std::uint64_t returned_ = 0;     // blocks whose place in the ring is free again
  Digest digest_;
  bool finished_ = false;
  std::uint64_t begin_ = 0;
};

/// A regular file open for reading, and its size.
struct InputFile {
  explicit InputFile(const std::string& path) : fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat info {};
    if (fd < 0 || ::fstat(fd, &info) != 0) {
      fault = fmt::format("open {}: {}", path, std::strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
      fault = fmt::format("{} is not a regular file", path);
    }
    size = static_cast<std::uint64_t>(info.st_size);
  }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile() {
    if (fd >= 0) ::close(fd);
  }
  int fd;
  std::uint64_t size = 0;
  std::string fault;
};

int send(const Options& options) {
  const InputFile file(options.file);
  if (!file.fault.empty()) return fail(file.fault);
  auto config = Config::load();
  if (!config) return fail(config.error());
  config->engine.control = ControlMode::automatic;
  auto engine = Engine::open(*config);
  if (!engine) return fail(engine.error());
  Sender sender(std::move(*engine), options, file.fd, file.size);
  if (auto connecting = sender.connect(); !connecting) return fail(connecting.error());
  return sender.run();
}

// ---- both -------------------------------------------------------------------------------------

int run_both(Options options) {
  // Without --out the copy is only checked. Its name contains our pid, so no other file has that
  // name.
  const bool keep = !options.out.empty();
  if (!keep) {
    const char* folder = std::getenv("TMPDIR");
    options.out = fmt::format("{}/file_push-{}", folder != nullptr ? folder : "/tmp", ::getpid());
  }
  options.address = "127.0.0.1:0";
  const Options* for_child = &options;
  program::ServerChild child([for_child](int announce) { return receive(*for_child, announce); });
  options.address = child.address();
  int code = send(options);
  if (child.wait() != program::kDone) code = program::kFailed;
  if (!keep) ::unlink(options.out.c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  program::name = "file-push";
  program::log_to_stderr();
  program::catch_stop_signals();

  Options options;
  CLI::App app("Pushes a file to another process by one-sided writes.", "file-push");
  app.require_subcommand(1);
  CLI::App* receiver = app.add_subcommand("receive", "receive one file");
  receiver->add_option("address", options.address, "a.b.c.d:port or [v6]:port to listen on")
      ->capture_default_str();
  receiver->add_option("-o,--out", options.out, "file to write")->required();
  CLI::App* sender = app.add_subcommand("send", "send one file");
  sender->add_option("file", options.file, "file to send")->required();
  sender->add_option("address", options.address, "address of the receiver")->required();
  CLI::App* both = app.add_subcommand("both", "run a sender and a receiver in two processes");
  both->add_option("file", options.file, "file to send")->required();
  both->add_option("-o,--out", options.out, "keep the received file here");
  for (CLI::App* granting : {receiver, both}) {
    granting->add_option("--block", options.block, "bytes per block, e.g. 512KiB")
        ->transform(CLI::AsSizeValue(false))
        ->check(CLI::Range(std::uint64_t{4096}, std::uint64_t{64} << 20));
    granting->add_option("--window", options.window, "blocks in flight")
        ->check(CLI::Range(1u, 256u))
        ->capture_default_str();
  }
  int code = 0;
  if (!program::parse_arguments(app, argc, argv, code)) return code;
  if (*receiver) return receive(options, -1);
  if (*sender) return send(options);
  try {
    return run_both(options);
  } catch (const program::Failure& failure) {
    return fail(failure.what());
  }
}
