// A row of floats as rows of integers, so that the exact kernels for codes serve float rows: they
// take half the instructions per weight that decoding to floats does.

#ifndef FEWBIT_NATIVE_FIXED_POINT_H_
#define FEWBIT_NATIVE_FIXED_POINT_H_

#include "common/activations.h"

namespace fewbit {

// A row is the sum of this many integer rows times powers of two: 29 bits below its largest
// magnitude, where a float has 24 of its own. 1: the product has to run in floats.
int PlanesOf(const Kernels& kernels, const Matmul& matmul);

// Fills in the words, sums and scales of a row whose floats are in place: those of its planes,
// which are rows to the kernels.
void PackPlanes(const Plan& plan, const Matmul& matmul, int64_t row,
                const Activations& activations);

// The row `x` times a power of two, and what its product is to be multiplied by: the reciprocal,
// times the bias of an fp8 format. It keeps all sums in the range of a float, whose scales are
// applied later; but for fp8 only rows near the end of that range are changed.
float FoldRow(const Matmul& matmul, int64_t length, float* x);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_FIXED_POINT_H_
