// The elementwise functions in plain C++ that compilers vectorize, compiled once per instruction
// set. Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_FINISH_LOOPS_H_
#define FEWBIT_NATIVE_FINISH_LOOPS_H_

#include "common/elementwise.h"
#include "common/finish.h"

namespace fewbit {
namespace {

constexpr int kRow = 64;

template <class Function>
inline void Map(const FinishRow& row, const Function& function) {
  const float* __restrict__ sums = row.sums;
  const float* __restrict__ bias = row.bias;
  float* __restrict__ out = row.out;
  const float factor = row.factor;
  if (bias == nullptr) {
    for (int i = 0; i < kRow; ++i) {
      out[i] = function(sums[i] * factor);
    }
  } else {
    for (int i = 0; i < kRow; ++i) {
      out[i] = function(sums[i] * factor + bias[i]);
    }
  }
}

void FinishOneRow(const FinishRow& row) {
  switch (row.activation) {
    case Elementwise::kNone:
      return Map(row, [](float x) { return x; });
    case Elementwise::kRelu:
      return Map(row, [](float x) { return x <= 0.0f ? 0.0f : x; });
    case Elementwise::kRelu6:
      return Map(row, [](float x) { return x <= 0.0f ? 0.0f : x > 6.0f ? 6.0f : x; });
    case Elementwise::kGelu:
      return Map(row, Gelu);
    case Elementwise::kGeluExact:
      return Map(row, GeluExact);
    case Elementwise::kTanh:
      return Map(row, Tanh);
    case Elementwise::kSiluCephesOnce:
      return Map(row, Silu<Cephes, true>);
    case Elementwise::kSiluCephesTwice:
      return Map(row, Silu<Cephes, false>);
    case Elementwise::kSiluFdlibmOnce:
      return Map(row, Silu<Fdlibm, true>);
    case Elementwise::kSiluFdlibmTwice:
      return Map(row, Silu<Fdlibm, false>);
    case Elementwise::kSigmoidCephesOnce:
      return Map(row, Sigmoid<Cephes, true>);
    case Elementwise::kSigmoidCephesTwice:
      return Map(row, Sigmoid<Cephes, false>);
    case Elementwise::kSigmoidFdlibmOnce:
      return Map(row, Sigmoid<Fdlibm, true>);
    case Elementwise::kSigmoidFdlibmTwice:
      return Map(row, Sigmoid<Fdlibm, false>);
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_FINISH_LOOPS_H_
