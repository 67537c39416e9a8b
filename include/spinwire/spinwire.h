// All of the public API. The guide to it is include/README.md. What holds for all of it:
//
// Threads. An engine and every handle of it belong to the thread that opened it. Calls from another
// thread answer wrong_thread, in a forked child forked_child, and change nothing.
//
// Cost. A function marked "Hot" allocates nothing, makes no system call and takes constant time.
// One marked "Set-up" may do any of these; it belongs before the loop, or where a pause does no
// harm.
//
// Callbacks. All run inside Engine::poll() or poll_control(), or while an engine is being
// destroyed. They may call everything except poll(), poll_control(), Engine::serve(),
// Engine::audit() and the engine's destruction; those answer reentrant. What leaves them as an
// exception: see callback.h.
//
// Handles. Connection, Session, PendingCall, Listener and RemoteMemory are small values that may
// outlive what they name: the connection, the session or the engine. Once that is gone, calls that
// answer a Status or a Result answer not_connected, calls that answer a value answer an empty one
// (`closed`, 0, {}), and nothing crashes. A moved Engine keeps its handles; an Engine that is
// empty, or was moved from, answers not_connected. Buffer, BufferSlice and MemoryRegion keep their
// memory alive beyond their engine.
//
// Ownership. A call that does not answer `ok` has taken nothing. An accepted operation or call
// holds a reference to its memory until its callback has run. Memory of another engine is refused:
// invalid_argument.
//
// Errors. Each function lists them all, except wrong_thread, forked_child and not_connected as
// above.
#pragma once

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/config.h"
#include "spinwire/connection.h"
#include "spinwire/connection_settings.h"
#include "spinwire/device.h"
#include "spinwire/device_event.h"
#include "spinwire/endpoint.h"
#include "spinwire/engine.h"
#include "spinwire/gid_type.h"
#include "spinwire/lease.h"
#include "spinwire/log.h"
#include "spinwire/raw.h"
#include "spinwire/rpc.h"
#include "spinwire/sim.h"
#include "spinwire/status.h"
#include "spinwire/version.h"
