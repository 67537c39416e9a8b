// The whole public API. include/README.md is the user's guide. These rules hold for every function:
//
// Threads. An engine and its handles belong to the thread that opened the engine. A call from
// another thread answers wrong_thread, a call in a forked child forked_child; both change nothing.
// There, functions that answer neither a Status nor a Result answer an empty value, as if the
// engine were gone, and dropping a Listener or a RemoteMemory releases nothing. Only functions
// marked "any thread" may be called from other threads.
//
// Cost. A function marked "Hot" allocates nothing, makes no system call and takes bounded time. A
// function marked "Set-up" may allocate and make system calls: call it before the loop, or where a
// pause does no harm. Exceptions from "Hot":
//   - A rendezvous message, or CallOptions::reply_into, is registered if no memory window can open
//     it: see memory.windows. A window opens memory of the pools only, and none to a connection
//     with its own domain. With direct messages, messages of the pools need none.
//   - A session's first long call and its first reserve_reply() at the server allocate.
//   - The last reference to the memory of a MemoryRegion deregisters it, also in a poll().
//   - On softverbs, an operation or a call that wakes a sleeping peer makes a system call.
//
// Callbacks run inside Engine::poll(), poll_control(), arm() or wait(), or while their engine is
// destroyed; a visitor runs inside Engine::visit_served_sessions(). None runs inside cancel(),
// close(), recall() or revoke(). They may call everything except poll(), poll_control(), wait(),
// Engine::serve() and Engine::audit(), which answer reentrant, and arm(), which answers false. A
// callback may destroy its engine; see Engine::~Engine(). See callback.h for exceptions.
//
// Handles. Connection, Session, PendingCall, Listener, RemoteMemory and Timer may outlive the
// objects they name. Once the connection, session, call or engine is gone, functions that answer a
// Status or a Result answer not_connected, and other functions answer an empty value (`closed`, 0,
// {}). A moved Engine keeps its handles. An empty or moved-from Engine answers not_connected.
// Buffer, BufferSlice and MemoryRegion keep their memory beyond their engine.
//
// Ownership. A call that does not answer ok has taken nothing, with two exceptions. When revoke()
// answers would_block or local_error, the key is closing. When Connection::close() answers
// not_connected, a connection that was closing or interrupted has stopped reconnecting. An accepted
// operation or call holds a reference to its memory until its callback has run. The device may go
// on with an operation that has ended as cancelled or timed_out, and the operation then holds its
// memory longer: do not write to the memory until Buffer::unique() is true. For calls, see
// CallOptions::reply_into.
//
// Errors. Each function lists its errors, except wrong_thread, forked_child and not_connected (the
// named object is gone), which every function may answer. A function that answers a Result may also
// answer no_memory.
//
// Names. A to_string() answers the enumerator as written in its header, unless its comment says
// otherwise. A 0 byte follows the text.
#pragma once

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/config.h"
#include "spinwire/connect_options.h"
#include "spinwire/connection.h"
#include "spinwire/connection_handlers.h"
#include "spinwire/connection_settings.h"
#include "spinwire/connection_state.h"
#include "spinwire/device.h"
#include "spinwire/device_event.h"
#include "spinwire/drain.h"
#include "spinwire/endpoint.h"
#include "spinwire/engine.h"
#include "spinwire/engine_stats.h"
#include "spinwire/footprint.h"
#include "spinwire/gid.h"
#include "spinwire/gid_type.h"
#include "spinwire/goodbye.h"
#include "spinwire/identity.h"
#include "spinwire/idler.h"
#include "spinwire/lease.h"
#include "spinwire/log.h"
#include "spinwire/memory_access.h"
#include "spinwire/message.h"
#include "spinwire/observe.h"
#include "spinwire/operation.h"
#include "spinwire/raw.h"
#include "spinwire/reconnect.h"
#include "spinwire/resolve.h"
#include "spinwire/rpc.h"
#include "spinwire/session_state.h"
#include "spinwire/sim.h"
#include "spinwire/status.h"
#include "spinwire/timer.h"
#include "spinwire/version.h"
