// Messages longer than fit one receive: exposed by their sender, pulled by their receiver with
// READs, answered. What arrives behind one is held until it is delivered, so that order is kept.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/index_pool.h"
#include "memory/windows.h"
#include "spinwire/buffer.h"
#include "spinwire/connection.h"
#include "wire/transfer.h"

namespace spinwire::agent {

struct Agent;
struct Operation;
struct EngineContext;
struct Request;

/// Of one READ. Pulls of many connections take turns by it.
inline constexpr std::uint32_t kPullBytes = 128u << 10;
/// READs of pulls outstanding: of the engine, so that what a poll can bring is bounded (the
/// embedded device copies in post_send), and of a connection.
inline constexpr std::uint32_t kPullsAtOnce = 4;
inline constexpr std::uint32_t kPullsOfOne = 2;
/// Notes of a connection that are outstanding.
inline constexpr std::uint32_t kNotesAtOnce = 2;

/// Notes that a connection may have in wait in any case.
inline constexpr std::uint32_t kNotesOfItsOwn = 64;

inline constexpr std::uint32_t kNoWindow = memory::WindowPool::kNone;

/// A message that we have offered.
struct Transfer {
  detail::Block* block = nullptr;  ///< holds a reference
  std::uint32_t length = 0;
  std::uint32_t rkey = 0;
  std::uint32_t window = kNoWindow;  ///< none: the key is a registration's
  wire::Verdict verdict = wire::Verdict::pulled;
  bool answered = false;
  bool cancelled = false;  ///< by the application
  bool untold = false;     ///< in the list of those whose callback is due
  bool unoffered = false;  ///< cancelled before its offer was posted
  Transfer* next = nullptr;
  Transfer* prev = nullptr;
  std::uint32_t index = 0;
  std::uint32_t id = 0;  ///< what the peer calls it
  Agent* agent = nullptr;
  Transfer* next_untold = nullptr;
  CompletionCallback done;
};

/// Something that came while an earlier message was being pulled, or such a message.
struct Arrival {
  enum class Kind : std::uint8_t { message, write, pull, goodbye };
  Arrival* next = nullptr;
  detail::Block* block = nullptr;  ///< holds a reference; of a pull, the one it arrives in
  std::byte* data = nullptr;
  std::uint32_t length = 0;
  std::uint32_t immediate = 0;
  Kind kind = Kind::message;
  bool has_immediate = false;
  bool complete = false;  ///< to be delivered when it is first
  bool refused = false;   ///< not to be delivered
  bool named = false;     ///< the application chose where it arrives
  bool credited = false;  ///< it keeps one receive out of its agent's allotment
  // Of a pull.
  bool invalidate = false;
  std::uint64_t remote = 0;
  std::uint64_t deadline = 0;  ///< tick; while it waits for a block
  std::uint32_t rkey = 0;
  std::uint32_t id = 0;
  std::uint32_t asked = 0;    ///< bytes
  std::uint32_t arrived = 0;  ///< bytes
  std::uint32_t index = 0;
};

/// A control message that waits for credit, or a window to be unbound.
struct Note {
  Note* next = nullptr;
  Transfer* unbind = nullptr;                          ///< then no message
  std::uint32_t invalidate = 0;                        ///< key to be invalidated by it; 0: none
  std::uint64_t invalidate_until = ~std::uint64_t{0};  ///< tick: later it may be dead
  bool fence = false;  ///< goes out when the READs and atomics before it have ended
  wire::MessageKind kind = wire::MessageKind::answer;
  std::uint32_t size = 0;
  std::array<std::byte, 48> body{};
  std::uint32_t index = 0;
};

template <std::size_t size>
Note make_note(wire::MessageKind kind, const std::array<std::byte, size>& body) noexcept {
  Note note;
  static_assert(size <= sizeof note.body);
  note.kind = kind;
  note.size = size;
  std::copy(body.begin(), body.end(), note.body.begin());
  return note;
}

/// A queue of records that are linked by `next`.
template <typename T>
struct Line {
  T* first = nullptr;
  T* last = nullptr;
  [[nodiscard]] bool empty() const noexcept { return first == nullptr; }
  void push(T& item) noexcept {
    item.next = nullptr;
    (first == nullptr ? first : last->next) = &item;
    last = &item;
  }
  T& pop() noexcept {
    T& item = *first;
    first = item.next;
    return item;
  }
};

/// A connection's part.
struct AgentTransfers {
  Transfer* offered = nullptr;  ///< the newest first
  std::uint32_t offers = 0;     ///< of those
  Line<Arrival> held;
  Arrival* pulling = nullptr;  ///< first of them with bytes to be asked for
  Line<Note> notes;
  std::uint32_t notes_waiting = 0;
  Agent* next = nullptr;       ///< in the line that it is in
  bool lined_up = false;       ///< to pull, or for a block
  std::uint8_t pulls = 0;      ///< READs outstanding
  std::uint8_t notes_out = 0;  ///< outstanding
  std::uint64_t pulled = 0;    ///< messages
};

/// Agents in line, linked by AgentTransfers::next.
struct AgentLine {
  Agent* first = nullptr;
  Agent* last = nullptr;
  void push(Agent& a) noexcept;
  Agent& pop() noexcept;
  void remove(const Agent& a) noexcept;
};

/// The engine's part.
struct Transfers {
  /// May throw std::bad_alloc.
  Transfers(std::uint32_t most_offered, std::uint32_t most_held, std::uint32_t most_notes)
      : offered(most_offered), arrivals(most_held), notes(most_notes) {}
  memory::WindowPool windows;
  base::IndexPool<Transfer> offered;
  base::IndexPool<Arrival> arrivals;
  base::IndexPool<Note> notes;
  AgentLine pullers;                 ///< with bytes to be asked for
  AgentLine dry;                     ///< whose next pull waits for a block, the longest first
  std::uint32_t pulls = 0;           ///< READs outstanding
  Transfer* untold_first = nullptr;  ///< cancelled ones whose callback is due, oldest first
  Transfer* untold_last = nullptr;
};

// The sender.

/// Accepts a message longer than eager. Errors: those of send().
Status submit_long(EngineContext& ctx, Agent& a, const Request& r, bool has_immediate) noexcept;
void take_answer(EngineContext& ctx, Agent& a, const ibv_wc& wc,
                 std::span<const std::byte> body) noexcept;
/// The record of an offer's work request, if the message is outstanding; else null.
Transfer* offered_by(const EngineContext& ctx, const Agent& a, const Operation& offer) noexcept;
/// No peer can reach it any more: ends it, as cancelled if it was, and a connection that waited
/// only for that.
void settle(EngineContext& ctx, Agent& a, Transfer& t, Status status) noexcept;
/// Its binding, if it had one, and its offer will not be posted: its key is free again.
void close_unoffered(EngineContext& ctx, Transfer& t) noexcept;
/// Ends all that was offered, as flushed; the queue pair takes no work requests any more, and is
/// about to be destroyed. Answers false while control verbs are left to be done: one a call.
bool end_offers(EngineContext& ctx, Agent& a) noexcept;

// The receiver.

/// An offer has come, and its credit is counted.
void take_offer(EngineContext& ctx, Agent& a, const ibv_wc& wc,
                std::span<const std::byte> body) noexcept;
/// Keeps what came for later; null if there is no record, and the connection fails.
Arrival* hold(EngineContext& ctx, Agent& a, const Arrival& what) noexcept;
/// Posts READs as far as they may be.
void pump_pulls(EngineContext& ctx) noexcept;
/// Refuses what has waited too long for a block. For the control step.
void look_at_dry(EngineContext& ctx) noexcept;
/// The connection closes: what is not pulled will not be, which its sender is told.
void refuse_held(EngineContext& ctx, Agent& a) noexcept;
/// One READ has ended.
void on_pulled(EngineContext& ctx, Agent& a, std::uint32_t bytes, Status status) noexcept;
/// Forgets all that was held; no READ is outstanding.
void drop_held(EngineContext& ctx, Agent& a) noexcept;

// Notes.

/// Tells the peer with the end of the poll, in the order of calls.
void tell(EngineContext& ctx, Agent& a, const Note& what) noexcept;
/// Posts notes as credit allows; false: to be tried again by the next poll.
bool post_notes(EngineContext& ctx, Agent& a) noexcept;
/// The same for what was told outside of a poll, with a doorbell.
void flush_notes(EngineContext& ctx, Agent& a) noexcept;
void on_note_done(EngineContext& ctx, Agent& a) noexcept;
/// A window was unbound.
void on_unbound(EngineContext& ctx, Agent& a, std::uint32_t id, Status status) noexcept;

}  // namespace spinwire::agent
