// Configuration of tests of connections with their own protection domains.
#pragma once

#include <cstdint>

#include "engine/harness.h"

namespace own_domains {

inline engine_test::Config domain_config(std::uint32_t domains = 4) {
  engine_test::Config c = engine_test::small_config();
  c.connections.own_domains = domains;
  c.connections.credits = 16;
  c.memory.send_bytes = 16u << 20;  // the sizes below fall into five classes
  c.memory.receive_bytes = 8u << 20;
  // A message without a receive ends its connection at once.
  c.queue_pair.rnr_retry = 0;
  return c;
}

inline spinwire::ConnectionSettings own(bool wanted = true) {
  spinwire::ConnectionSettings settings;
  settings.own_domain = wanted;
  return settings;
}

}  // namespace own_domains
