// Situations in which something holds an engine up, each staged by a process of its own. The names
// are those of the table in include/troubleshooting.md.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>

#include <cctype>
#include <functional>
#include <initializer_list>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include "engine/harness.h"
#include "observe/engine_folder.h"

namespace situations {

using namespace engine_test;  // the names of a test namespace

/// What a stage needs: settings of engines.
class Scene {
 public:
  explicit Scene(std::string directory) : directory_(std::move(directory)) {}
  /// Of the engine that spinwire-stat shows. A busy machine makes no stall of its own there.
  [[nodiscard]] Config shown(Config c = small_config()) const {
    c.observability.directory = directory_;
    c.observability.longest_poll = c.observability.longest_callback = 1h;
    c.observability.longest_pause = 1h;
    return c;
  }
  /// Of its peers, which have no file.
  [[nodiscard]] static Config hidden(Config c = small_config()) {
    c.observability.directory.clear();
    return c;
  }

 private:
  std::string directory_;
};

/// A peer that is silent is not lost.
inline Config without_loss(Config c = small_config()) {
  c.connections.peer_timeout = 1h;
  return c;
}

/// Polls the nodes for ever.
[[noreturn]] inline void play(std::initializer_list<Node*> nodes,
                              const std::function<void()>& each_turn = {}) {
  for (;;) {
    for (Node* node : nodes) (void)node->poll();
    if (each_turn) each_turn();
    (void)::sched_yield();
  }
}

/// Does not return, unless a step fails.
using Stage = void (*)(const Scene&);
struct Situation {
  const char* name;  ///< as in the table
  Stage stage;
};
inline void PrintTo(const Situation& situation, std::ostream* out) { *out << situation.name; }

/// "credit used up" as CreditUsedUp: the name of the situation's test.
inline std::string name_of_test(std::string_view situation) {
  std::string name;
  bool is_first = true;
  for (const char c : situation) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0)
      name += is_first ? static_cast<char>(std::toupper(static_cast<unsigned char>(c))) : c;
    is_first = c == ' ';
  }
  return name;
}
inline std::string test_name(const testing::TestParamInfo<Situation>& info) {
  return name_of_test(info.param.name);
}

/// Each situation is a test.
class ToolsStatSituations : public observe_test::WithEngineFolder,
                            public testing::WithParamInterface<Situation> {};

}  // namespace situations
