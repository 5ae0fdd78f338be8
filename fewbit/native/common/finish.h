// What is done to a row of a product while it is still in the cache: factor, bias, activation.
// Nothing inline, as in matmul/kernels.h.

#ifndef FEWBIT_NATIVE_FINISH_H_
#define FEWBIT_NATIVE_FINISH_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace fewbit {

// silu and sigmoid by each of the steps that XLA may take (common/elementwise.h); `Once` is `Twice` where
// the instruction set has no product and sum rounded once.
enum class Elementwise : int32_t {
  kNone, kRelu, kRelu6, kGelu, kGeluExact, kTanh,
  kSiluCephesOnce, kSiluCephesTwice, kSiluFdlibmOnce, kSiluFdlibmTwice,
  kSigmoidCephesOnce, kSigmoidCephesTwice, kSigmoidFdlibmOnce, kSigmoidFdlibmTwice
};

// Finds "none", "relu", ...; false if there is no such name.
bool FindElementwise(const char* name, size_t length, Elementwise* found);
std::string ElementwiseNames();

// One row of a panel: 64 columns. Each step is rounded, as separate operations would be.
struct FinishRow {
  const float* sums;    // [64]
  float factor;
  const float* bias;    // [64], or null
  Elementwise activation;
  float* out;           // [64], apart from the others
};

void FinishPortable(const FinishRow& row);
#if defined(__x86_64__)
void FinishAvx2(const FinishRow& row);
void FinishAvx512(const FinishRow& row);
#endif

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_FINISH_H_
