// Shared by both ends of file-push: the dialogue, the digest, and how a transfer ends.
#pragma once

#include <fmt/core.h>
#include <xxhash.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "program.h"

namespace push {

using namespace spinwire;  // NOLINT: a part of one program

inline constexpr Nanoseconds kTimeout = std::chrono::seconds(60);  ///< without any progress

enum class Kind : std::uint16_t { announce = 1, grant, returned, finish, verdict, abort };

/// Every message of the dialogue; its kind says which fields count. Both ends have the same byte
/// order, as all supported machines do.
struct Note {
  static constexpr std::uint32_t kMagic = 0x48535550;  // "PUSH"

  std::uint32_t magic = kMagic;
  std::uint16_t version = 1;
  Kind kind = Kind::abort;
  std::uint64_t size = 0;    // bytes of the file; `returned`: blocks
  std::uint64_t block = 0;   // bytes of a block
  std::uint64_t blocks = 0;  // blocks in the ring
  RemoteRegion ring;
  std::uint64_t digest_low = 0;
  std::uint64_t digest_high = 0;
  std::array<char, 160> text{};  // the reason, for `abort`
};

/// XXH3 of 128 bits.
class Digest {
 public:
  Digest() : state_(XXH3_createState(), &XXH3_freeState) { XXH3_128bits_reset(state_.get()); }
  void add(std::span<const std::byte> bytes) {
    XXH3_128bits_update(state_.get(), bytes.data(), bytes.size());
  }
  [[nodiscard]] XXH128_hash_t value() const { return XXH3_128bits_digest(state_.get()); }
  [[nodiscard]] std::string text() const {
    return fmt::format("{:016x}{:016x}", value().high64, value().low64);
  }
  [[nodiscard]] bool is(const Note& note) const {
    return value().high64 == note.digest_high && value().low64 == note.digest_low;
  }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

/// One end of the transfer: its connection, the dialogue, and how it ended.
class End {
 public:
  End(Engine engine, std::string peer_is)
      : engine_(std::move(engine)), peer_is_(std::move(peer_is)) {}
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  virtual ~End() = default;

  /// Runs the transfer to its end and returns the exit code. Call it once.
  int run() {
    drive_to_end();
    stop_listening();
    // Closing the engine runs the callbacks of outstanding operations, so it happens while all
    // members exist.
    engine_ = Engine();
    return fault_.empty() ? program::kDone : program::fail(fault_);
  }

 protected:
  /// Does the work between two polls. Returns whether there was any.
  virtual bool turn() = 0;
  virtual void on_note(const Note& note) = 0;
  virtual void on_write(const Message&) { give_up("an unexpected write"); }
  virtual void stop_listening() {}

  void drive_to_end() {
    Idler idler;
    program::Deadline timeout(engine_.clock(), kTimeout);
    while (!over_) {
      const int events = engine_.poll();
      if (events < 0) return static_cast<void>(fault_ = "poll() was misused");
      if (program::stop_requested()) give_up("interrupted");
      send_outbox();
      const bool worked = turn();
      if (worked || events > 0 || !met_) timeout = {engine_.clock(), kTimeout};
      if (timeout.passed()) {
        over_ = closing_;
        give_up(fmt::format("{} makes no progress", peer_is_));
      }
      (void)idler.idle(engine_, worked ? 1 : events);
    }
  }

  ConnectionHandlers handlers() {
    ConnectionHandlers handlers;
    handlers.on_message = [this](Connection, Message& m) { on_message(m); };
    handlers.on_closed = [this](Connection, const Error& e) { on_closed(e); };
    return handlers;
  }

  void say(const Note& note) {
    outbox_.push_back(note);
    send_outbox();
  }
  void send_outbox() {
    while (!outbox_.empty()) {
      const Status status = peer_.send_copy(std::as_bytes(std::span(&outbox_.front(), 1)));
      if (status == Status::message_too_long)
        return give_up("connections.eager_bytes is below 256");
      if (status != Status::ok) return;
      outbox_.erase(outbox_.begin());
    }
  }
  [[nodiscard]] bool has_said_all() const { return outbox_.empty(); }

  /// The dialogue is complete: from now on the peer may close.
  void expect_close() { closing_ = true; }
  void close() {
    closing_ = true;
    (void)peer_.close();
  }
  /// Ends the transfer here and, if possible, at the peer.
  void give_up(std::string why, bool tell = true) {
    if (closing_) return;
    fault_ = std::move(why);
    outbox_.clear();
    if (!met_) {
      over_ = true;
      return;
    }
    Note note;
    fault_.copy(note.text.data(), note.text.size() - 1);
    if (tell) (void)peer_.send_copy(std::as_bytes(std::span(&note, 1)));
    close();
  }

  void set_peer(Connection connection) {
    met_ = true;
    peer_ = connection;
    name_ = connection.peer();
  }
  Engine engine_;
  Connection peer_;
  bool met_ = false;  // a peer has connected
  bool over_ = false;
  std::string fault_;

 protected:
  void on_closed(const Error& error) {
    if (over_) return;
    if (!met_) {
      fault_ = error.message();
    } else if (!closing_) {
      fault_ = fmt::format("lost {} at {}: {}", peer_is_, name_,
                           error.status != Status::ok ? error.message() : "it left before the end");
    }
    over_ = true;
  }

 private:
  void on_message(Message& message) {
    Note note;
    if (message.is_write()) return on_write(message);
    if (message.size() == sizeof note) std::memcpy(&note, message.data(), sizeof note);
    note.text.back() = '\0';
    if (message.size() != sizeof note || note.magic != Note::kMagic || note.version != 1) {
      give_up(fmt::format("{} is not a file-push of this version", peer_is_));
    } else if (note.kind == Kind::abort) {
      give_up(fmt::format("{} gave up: {}", peer_is_, note.text.data()), /*tell=*/false);
    } else {
      on_note(note);
    }
  }

  std::string peer_is_;  // for messages: "the sender"
  std::string name_;     // its address
  bool closing_ = false;
  std::vector<Note> outbox_;
};

}  // namespace push
