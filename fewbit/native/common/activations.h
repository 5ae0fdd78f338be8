// The rows of x as the kernels want them: quantized, converted, packed in tiles.

#ifndef FEWBIT_NATIVE_ACTIVATIONS_H_
#define FEWBIT_NATIVE_ACTIVATIONS_H_

#include "matmul/plan.h"

namespace fewbit {

// Pointers into the scratch of the call.
struct Activations {
  float* floats;       // tiles of [k][rows], the tile of row r at floats + r * 4 * quads
  int32_t* words;      // tiles of [quad][words][rows]
  int32_t* sums;       // [rows][segments], as in matmul/kernels.h
  float* scales;       // [rows][scale_columns]
  int64_t scale_columns;
  int8_t* codes;       // [rows][4 * quads]
  float* factors;      // [rows], what FoldRow gave
  float* row;          // [tiles][4 * quads], work space, as the next two
  int32_t* units;
  int16_t* digits;
};

// All bytes that `activations` needs are taken from the scratch of the calling thread.
Activations TakeActivations(const Plan& plan, const Matmul& matmul);

// Fills in the rows of one tile.
void PrepareTile(const Kernels& kernels, const Plan& plan, const Matmul& matmul, int64_t tile,
                 const Activations& activations);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ACTIVATIONS_H_
