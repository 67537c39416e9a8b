// The inputs of the fuzzer control_port: what their bytes mean, and its seeds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fuzz/control_port_owner.h"

namespace fuzz {

/// An input is a byte of settings and a sequence of acts: a byte that names one of these, then its
/// arguments.
enum class Act : std::uint8_t {
  calls,       ///< source: a stranger connects
  says,        ///< peer, frame, how
  says_bytes,  ///< peer, length, bytes
  flushes,     ///< peer: sends the rest of a frame
  reads,       ///< peer
  shuts,       ///< peer
  closes,      ///< peer
  resets,      ///< peer: closes with unread bytes
  polls,       ///< number of times
  time,        ///< advances
  connect,     ///< place, whether to ask at once
  join,        ///< place
  open,        ///< place
  probe,       ///< place, limit
  ask,         ///< record
  answer,      ///< record
  confirm,     ///< record
  respond,     ///< record, token
  refuse,      ///< record
  drop,        ///< record
  stops,       ///< the listener
  listens,
  admission,   ///< what the listener answers
  validation,  ///< of the paths of sessions
  resolver,    ///< mode
  resolved,    ///< number, outcome
  request,     ///< source, number: through rdma_cm
  stale,       ///< a listener or handshake of another generation
  proves,      ///< peer, ring: begins to prove a key
  reloads,     ///< ring: with keys, the port takes others
  count
};

/// Bits of the last argument of Act::says.
namespace how {
inline constexpr std::uint8_t mutated = 1, cut = 2, split = 4, newer = 8, own_address = 16,
                              application_data = 64;
}

/// Bits of the settings that choose the port's keys: none, one, or two.
namespace keys {
inline constexpr std::uint8_t one = 64, two = 128;
}

/// The frames of Act::says.
enum class Said : std::uint8_t {
  hello,
  accept,
  refuse,
  ready,
  foreign_ready,
  open_session,
  without_datagrams,
  session_opened,
  join_session,
  path_response,
  foreign_response,
  count
};

/// An input without its settings.
using Script = std::string;

template <typename... Arguments>
Script act(Act what, Arguments... arguments) {
  return {static_cast<char>(what), static_cast<char>(arguments)...};
}
inline Script calls(int source) { return act(Act::calls, source); }
/// `mutation`: where the frame is cut, or what is changed.
template <typename... Mutation>
Script says(int peer, Said said, int how, Mutation... mutation) {
  return act(Act::says, peer, said, how, mutation...);
}
/// `inside`: what owners do inside of calls.
template <typename... Insides>
Script polls(int times, Insides... inside) {
  return act(Act::polls, times, inside...);
}
inline Script passes(int time) { return act(Act::time, time); }

struct Seed {
  std::uint8_t settings;  ///< set in addition to others
  Script script;
};

inline constexpr int kOwn = how::own_address;
inline constexpr int kWithData = how::own_address | how::application_data;
inline const Script kGet = act(Act::says_bytes, 0, 4, 'G', 'E', 'T', ' ');
inline const Script kHello = says(0, Said::hello, 0), kOwnHello = says(0, Said::hello, kOwn);

/// A stranger connects, and owners act inside of calls.
inline std::vector<Seed> strangers() {
  std::vector<Seed> seeds{
      {0, calls(0) + kHello + polls(0, 0) + act(Act::answer, 0) + act(Act::reads, 0) +
              says(0, Said::ready, 0) + polls(0, 0)},
      {0, calls(0) + says(0, Said::join_session, how::split, 30) + polls(0) + act(Act::flushes, 0) +
              polls(0, 0) + says(0, Said::refuse, 0) + polls(0, 0)},
      {0, calls(0) + says(0, Said::hello, kWithData) + polls(0, 0) + act(Act::answer, 0) +
              act(Act::reads, 0) + says(0, Said::refuse, kWithData) + polls(0, 0)},
      {0, calls(0) + says(0, Said::hello, kWithData | how::mutated, 86, 255) + polls(0) + calls(1) +
              says(1, Said::open_session, kWithData | how::mutated, 73, 1) + polls(0) + calls(2) +
              says(2, Said::open_session, kWithData) + polls(0, 1) + act(Act::reads, 0)},
      {0, kGet + calls(0) + kGet + polls(0) + calls(0) + says(0, Said::hello, how::mutated, 70, 0) +
              polls(0) + act(Act::shuts, 0) + polls(0)}};
  for (int inside = 1; inside < static_cast<int>(Inside::count); ++inside) {
    seeds.push_back({0, calls(0) + kOwnHello + polls(0, inside) + polls(2) + act(Act::answer, 0) +
                            act(Act::resets, 0) + polls(0, 0)});
    seeds.push_back({0, act(Act::connect, 128) + polls(0) + says(0, Said::accept, kOwn) +
                            polls(0, inside) + act(Act::confirm, 0, 0) + polls(0, 0)});
    seeds.push_back({0, act(Act::open, 0) + polls(0) + says(0, Said::session_opened, kOwn) +
                            polls(0, inside) + polls(0)});
  }
  return seeds;
}

inline const Script kOpenSession = calls(1) + says(0, Said::open_session, kOwn);

/// Frames that come too early, sessions, a path that is validated, and probes of both sides.
inline std::vector<Seed> sessions_and_probes() {
  return {
      {0, calls(0) + kOwnHello + says(0, Said::ready, 0) + polls(3, 0)},
      {0, act(Act::connect, 0) + says(0, Said::accept, kOwn) + polls(3, 0, 0)},
      {0, kOpenSession + polls(0, 0) + says(0, Said::ready, 0) + polls(0)},
      {0, act(Act::validation) + kOpenSession + polls(0, 0, 0) + passes(3) + polls(0, 0) +
              says(0, Said::foreign_response, 0) + polls(0) + says(0, Said::path_response, 0) +
              polls(0) + act(Act::reads, 0) + passes(7) + polls(0, 0)},
      {0, act(Act::open, 1) + act(Act::reads, 0) + polls(0) + act(Act::respond, 0, 9) +
              says(0, Said::refuse, 0) + polls(0, 0)},
      {0, calls(2) + says(0, Said::ready, 0) + polls(0) + calls(2) +
              says(0, Said::foreign_ready, 0) + polls(0) + act(Act::closes, 0) + polls(0)},
      {0, act(Act::probe, 0, 255) + act(Act::probe, 1, 9) + act(Act::probe, 2, 9) +
              act(Act::probe, 3, 9) + act(Act::probe, 4, 9) + polls(0, 0, 0) +
              says(1, Said::ready, 0) + polls(0, 0) + passes(6) + polls(0, 0)},
  };
}

inline Script proves(int peer, int ring) { return act(Act::proves, peer, ring); }

/// Peers that prove a key, and that do not. The rings are those of control_port_fuzz.cc.
inline std::vector<Seed> proofs() {
  const Script proof = proves(0, 1) + polls(0) + act(Act::reads, 0);
  const Script hello = calls(0) + proof + kOwnHello + polls(0, 0);
  const Script asks = act(Act::connect, 128) + polls(0) + act(Act::reads, 0);
  return {
      {keys::one, hello + act(Act::answer, 0) + polls(0) + act(Act::reads, 0) +
                      says(0, Said::ready, 0) + polls(0, 0)},
      {keys::two, calls(0) + proves(0, 2) + polls(0) + act(Act::reads, 0) + kOwnHello +
                      polls(0, 0) + act(Act::answer, 0) + polls(0) + act(Act::reads, 0) +
                      says(0, Said::ready, 0) + polls(0, 0)},
      {keys::one, calls(0) + proves(0, 2) + polls(0) + act(Act::reads, 0)},
      {keys::one, calls(0) + kHello + polls(0) + act(Act::reads, 0) + polls(0)},
      {keys::one, calls(0) + proof + says(0, Said::hello, how::mutated, 90, 1) + polls(0)},
      {keys::one, calls(0) + proof + says(0, Said::open_session, kOwn) + polls(0, 0) +
                      act(Act::reads, 0) + says(0, Said::ready, 0) + polls(0)},
      {keys::one, act(Act::validation) + calls(0) + proof + says(0, Said::open_session, kOwn) +
                      polls(0, 0, 0) + says(0, Said::path_response, 0) + polls(0) +
                      act(Act::reads, 0)},
      {keys::one, asks + proves(0, 1) + polls(0) + act(Act::reads, 0) +
                      says(0, Said::accept, kOwn) + polls(0, 0) + act(Act::confirm, 0) +
                      polls(0, 0) + act(Act::reads, 0)},
      {keys::two, asks + proves(0, 2) + polls(0) + act(Act::reads, 0) + polls(0)},
      {keys::one, asks + says(0, Said::refuse, 0) + polls(0)},
      {keys::one, act(Act::open, 0) + polls(0) + act(Act::reads, 0) + proves(0, 1) + polls(0) +
                      act(Act::reads, 0) + says(0, Said::session_opened, kOwn) + polls(0, 0)},
      {keys::one, hello + act(Act::reloads, 2) + act(Act::answer, 0) + polls(0) +
                      act(Act::reads, 0) + says(0, Said::ready, 0) + polls(0, 0) + calls(1) +
                      proves(0, 1) + polls(0) + act(Act::reads, 0)},
      {keys::one, calls(0) + act(Act::reloads, 3) + proves(0, 1) + polls(0) + act(Act::reloads, 0) +
                      act(Act::reads, 0) + kOwnHello + polls(0, 0)},
      {keys::one | 3, act(Act::request, 9, 0) + calls(0) + calls(1) + polls(0) + passes(6) +
                          calls(0) + proof + calls(2) + polls(0) + kOwnHello + polls(2, 0)},
  };
}

/// Crowds: silent, without room, through rdma_cm, and with addresses that have to be resolved.
inline std::vector<Seed> crowds() {
  constexpr std::uint8_t kResolver = 4, kRoom = 3;
  Script hellos;
  for (int i = 0; i < 9; ++i) hellos += calls(0) + kHello;
  return {
      {0, calls(0) + calls(0) + calls(0) + calls(0) + polls(0) + passes(5) + calls(1) + kHello +
              polls(3, 0)},
      {0, act(Act::admission, 1) + calls(0) + kOwnHello + calls(1) + kOwnHello + polls(2) +
              act(Act::admission, 0) + polls(2, 0, 0) + act(Act::answer, 0) + passes(5) +
              act(Act::admission, 1) + calls(2) + kOwnHello + polls(2, 0)},
      {0, act(Act::request, 200, 0, 0, 0, 0) + act(Act::request, 1, 0) + act(Act::answer, 0) +
              passes(5) + polls(1, 0) + act(Act::request, 253, 0, 0) + act(Act::drop, 0) +
              polls(0) + passes(7) + polls(0)},
      {kResolver, act(Act::resolver, 1) + calls(0) + kHello + calls(0) +
                      says(0, Said::open_session, 0) + act(Act::connect, 128) + polls(0) +
                      says(0, Said::accept, 0) + polls(0) + act(Act::resolved, 0, 0) +
                      act(Act::resolved, 1) + act(Act::resolved, 0, 0) + polls(2) + passes(7) +
                      polls(1)},
      {kResolver | kRoom, act(Act::resolver, 1) + hellos + polls(3) + act(Act::resolved, 0, 0) +
                              polls(2, 0) + act(Act::stops) + polls(1) + act(Act::listens) +
                              act(Act::stale, 1)},
  };
}

}  // namespace fuzz
