// What FFI targets share: refusing what does not fit before anything is read, and the threads.

#ifndef FEWBIT_NATIVE_FFI_CHECKS_H_
#define FEWBIT_NATIVE_FFI_CHECKS_H_

#include <algorithm>
#include <string>
#include <utility>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

struct Refused {
  std::string why;
};

inline std::string Show(xla::ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    text += (i ? "," : "") + std::to_string(dims[i]);
  }
  return text + "]";
}

inline void Require(bool fits, const std::string& why) {
  if (!fits) {
    throw Refused{why};
  }
}

// `pool` has to outlive the workers.
inline Workers WorkersOf(xla::ffi::ThreadPool& pool) {
  Workers workers;
  workers.threads = std::min<int64_t>(pool.num_threads(), UsableCpus());
  workers.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
  return workers;
}

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_FFI_CHECKS_H_
