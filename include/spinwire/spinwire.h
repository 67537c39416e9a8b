// All of the public API.
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
#include "spinwire/status.h"
#include "spinwire/version.h"
