// g[rows, n] times the transpose of a packed weight[k, n]: for gradients, from the same bytes.

#ifndef FEWBIT_NATIVE_MATMUL_TRANSPOSED_H_
#define FEWBIT_NATIVE_MATMUL_TRANSPOSED_H_

#include "matmul/matmul.h"

namespace fewbit {

// `matmul` as for RunMatmul, but x is [rows][n] of kF32 or kBf16, out [rows][k] of kF32 or kBf16.
void RunTransposed(const Kernels& kernels, const Workers& workers, const Matmul& matmul);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_TRANSPOSED_H_
