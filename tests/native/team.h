// What the test programs share: numbers at random, and threads that help.

#ifndef FEWBIT_TESTS_NATIVE_TEAM_H_
#define FEWBIT_TESTS_NATIVE_TEAM_H_

#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "common/parallel.h"

namespace fewbit {

inline int Random(int low, int high) {
  static std::mt19937 engine(1);
  return std::uniform_int_distribution<int>(low, high)(engine);
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Helpers are threads of their own here, all joined before the test looks at a result.
struct Team {
  std::vector<std::thread> threads;
  Workers workers;
  explicit Team(int count) {
    workers.threads = count;
    workers.schedule = [this](std::function<void()> task) { threads.emplace_back(std::move(task)); };
  }
  ~Team() {
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
};

}  // namespace fewbit

#endif  // FEWBIT_TESTS_NATIVE_TEAM_H_
