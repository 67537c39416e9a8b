// Waiting for a condition with a limit that only a defect reaches.
#pragma once

#include <chrono>
#include <thread>

namespace waiting {

/// Repeats `attempt` until it returns true. Returns false after a time limit.
template <typename Attempt>
bool eventually(Attempt&& attempt, std::chrono::seconds limit = std::chrono::seconds(60)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!attempt()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace waiting
