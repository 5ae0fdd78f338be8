// A dot_general of two arrays of int8 codes, read where they lie. Shapes are checked before.

#ifndef FEWBIT_NATIVE_CODES_DOT_H_
#define FEWBIT_NATIVE_CODES_DOT_H_

#include <cstdint>
#include <vector>

#include "matmul/matmul.h"

namespace fewbit {

// One operand: a code is at codes + batch[b] + lines[row or column] + ks[k].
struct CodesSide {
  const int8_t* codes;
  std::vector<int64_t> batch, lines, ks;
  const float* scale;  // [batch][lines], or null
};

struct CodesDot {
  CodesSide lhs, rhs;
  void* out;           // [batch][lhs lines][rhs lines] of out_type
  Element out_type;    // kS32: the sums, modulo 2^32; kF32, kBf16: times lhs scale, times rhs scale
};

void RunCodesDot(const Kernels& kernels, const Workers& workers, const CodesDot& dot);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CODES_DOT_H_
