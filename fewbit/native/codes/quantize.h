// Columns of floats to int8 codes with a scale each, as QuantizeOneRow does for rows.
// Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_CODES_QUANTIZE_H_
#define FEWBIT_NATIVE_CODES_QUANTIZE_H_

#include <cstdint>
#include <cstring>

#include "matmul/kernels.h"
#include "codes/quantize_codes.h"

namespace fewbit {
namespace {

// The bits of the largest magnitude of each column: magnitudes order like their bits, and every NaN
// lies above infinity.
void LargestOfColumns(const ColumnBlock& block, int32_t* largest) {
  std::memset(largest, 0, static_cast<size_t>(block.columns) * sizeof *largest);
  const float* x = block.x;
  for (int64_t r = 0; r < block.rows; ++r, x += block.columns) {
    const float factor = block.factor == nullptr ? 1.0f : block.factor[r];
    for (int64_t c = 0; c < block.columns; ++c) {
      const float value = x[c] * factor;
      int32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      bits &= 0x7fffffff;
      largest[c] = bits > largest[c] ? bits : largest[c];
    }
  }
}

// Scales from those bits, NaN where a column is not finite, and their reciprocals, 0 there.
void ScalesOfColumns(const int32_t* largest, int64_t columns, float* scales, float* per_scale) {
  for (int64_t c = 0; c < columns; ++c) {
    scales[c] = ScaleOfLargest(largest[c], false);
    per_scale[c] = scales[c] == scales[c] ? 1.0f / scales[c] : 0.0f;
  }
}

void CodesOfColumns(const ColumnBlock& block, const float* per_scale, int8_t* codes) {
  const int64_t rows = block.rows, columns = block.columns;  // bytes written might be those there
  const float* x = block.x;
  for (int64_t r = 0; r < rows; ++r, x += columns, codes += columns) {
    const float factor = block.factor == nullptr ? 1.0f : block.factor[r];
    for (int64_t c = 0; c < columns; ++c) {
      codes[c] = CodeOf(x[c] * factor * per_scale[c]);
    }
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CODES_QUANTIZE_H_
