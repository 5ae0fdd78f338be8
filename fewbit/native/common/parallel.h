// Work shared with XLA's threads, in a way that cannot wait for a task which nobody runs.

#ifndef FEWBIT_NATIVE_PARALLEL_H_
#define FEWBIT_NATIVE_PARALLEL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace fewbit {

// Threads to work with, and how to hand a task to another one.
struct Workers {
  int64_t threads = 1;
  std::function<void(std::function<void()>)> schedule;
};

// Runs body(0) ... body(count - 1), each once, on the calling thread and on helpers. Within body,
// subnormal numbers are kept, which XLA's threads otherwise flush to zero.
void ParallelFor(const Workers& workers, int64_t count, const std::function<void(int64_t)>& body);

// The same for `lanes` rows of blocks: body(lane, i) for each i < count. A thread begins with a lane of its
// own, the caller with the first, so that what a lane works on stays in that thread's cache from one
// call to the next; when its lane is used up it helps with others.
void ParallelLanes(const Workers& workers, int64_t lanes, int64_t count,
                   const std::function<void(int64_t, int64_t)>& body);

// Returns when `count` has reached `all`, which other threads see to.
void WaitFor(const std::atomic<int64_t>& count, int64_t all);

// CPUs that this process may run on. XLA's pool can have more threads (one per host device).
int64_t UsableCpus();

// Memory of the calling thread, aligned to cache lines, kept for the next call unless it is large.
// The two slots are for what a whole call needs and for what a block of work needs.
enum class Scratch { kCall, kBlock };
void* ScratchBytes(Scratch slot, size_t bytes);
void ReleaseLargeScratch(Scratch slot);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_PARALLEL_H_
