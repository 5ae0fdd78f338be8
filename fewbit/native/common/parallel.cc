#include "common/parallel.h"

#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fewbit {
namespace {

constexpr size_t kKeptScratch = size_t{32} << 20;
constexpr size_t kLine = 64;

// To the byte and anew for every use, so that nothing read behind or before it was written goes
// unseen.
#if defined(FEWBIT_SANITIZED)
constexpr bool kExactScratch = true;
#else
constexpr bool kExactScratch = false;
#endif

class SubnormalsKept {
 public:
#if defined(__x86_64__)
  SubnormalsKept() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~kFlushAndZero); }
  ~SubnormalsKept() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushAndZero = 0x8040;
  unsigned before_;
#else
  SubnormalsKept() {}
#endif
};

// Lives on the heap as long as a helper may still look at it. `body` belongs to the caller, who
// stays until every block that was taken is done; a helper that comes later takes none.
struct Job {
  explicit Job(int64_t lanes) : next(static_cast<size_t>(lanes)) {}

  struct alignas(kLine) Counter {
    std::atomic<int64_t> value{0};
  };
  std::vector<Counter> next;  // of each lane
  std::atomic<int64_t> came{1}, done{0};  // threads that came: the caller is the first
  int64_t count = 0;
  const std::function<void(int64_t, int64_t)>* body = nullptr;

  void Work(int64_t comer) {
    SubnormalsKept kept;
    const size_t own = static_cast<size_t>(comer);
    for (size_t turn = 0; turn < next.size(); ++turn) {
      const size_t lane = (own + turn) % next.size();
      std::atomic<int64_t>& at = next[lane].value;
      for (int64_t i = at.fetch_add(1); i < count; i = at.fetch_add(1)) {
        (*body)(static_cast<int64_t>(lane), i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  }
};

struct Buffer {
  void* memory = nullptr;
  size_t bytes = 0;

  ~Buffer() { std::free(memory); }
  void Resize(size_t wanted) {
    std::free(memory);
    memory = nullptr;
    bytes = kExactScratch ? wanted : (wanted + kLine - 1) / kLine * kLine;
    if (bytes != 0 && posix_memalign(&memory, kLine, bytes) != 0) {
      memory = nullptr;
      bytes = 0;
      throw std::bad_alloc();
    }
  }
};

Buffer& BufferOf(Scratch slot) {
  static thread_local Buffer call, block;
  return slot == Scratch::kCall ? call : block;
}

}  // namespace

void WaitFor(const std::atomic<int64_t>& count, int64_t all) {
  for (int spins = 0; count.load(std::memory_order_acquire) < all; ++spins) {
    if (spins > 400) {
      std::this_thread::yield();
    } else {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  }
}

void ParallelLanes(const Workers& workers, int64_t lanes, int64_t count,
                   const std::function<void(int64_t, int64_t)>& body) {
  const auto job = std::make_shared<Job>(lanes);
  const int64_t all = lanes * count;
  job->count = count;
  job->body = &body;
  const int64_t helpers = (workers.threads < all ? workers.threads : all) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    workers.schedule([job] { job->Work(job->came.fetch_add(1)); });
  }
  job->Work(0);
  WaitFor(job->done, all);
}

void ParallelFor(const Workers& workers, int64_t count, const std::function<void(int64_t)>& body) {
  ParallelLanes(workers, 1, count, [&body](int64_t, int64_t i) { body(i); });
}

int64_t UsableCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    return CPU_COUNT(&set);
  }
  const unsigned all = std::thread::hardware_concurrency();
  return all == 0 ? 1 : all;
}

void* ScratchBytes(Scratch slot, size_t bytes) {
  Buffer& buffer = BufferOf(slot);
  if (kExactScratch || buffer.bytes < bytes) {
    buffer.Resize(bytes);
  }
  return buffer.memory;
}

void ReleaseLargeScratch(Scratch slot) {
  Buffer& buffer = BufferOf(slot);
  if (buffer.bytes > kKeptScratch) {
    buffer.Resize(0);
  }
}

}  // namespace fewbit
