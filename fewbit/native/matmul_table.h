// The quantization of activations, and the table of one instruction set's kernels.
// Internal linkage only, as in matmul_stream.h.

#ifndef FEWBIT_NATIVE_MATMUL_TABLE_H_
#define FEWBIT_NATIVE_MATMUL_TABLE_H_

#include "codes_direct.h"
#include "codes_pack.h"
#include "codes_quantize.h"
#include "matmul_tiles.h"

namespace fewbit {
namespace {

float RoundedToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;  // finite numbers only
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The codes that fewbit.quantize(x, 'int8') gives, bit for bit: in float32 XLA multiplies with the
// reciprocal of a shared scale and divides by one that is not shared; in bfloat16 it divides and
// rounds the quotient.
void QuantizeOneRow(const QuantizeRow& r) {
  for (int64_t from = 0, g = 0; from < r.length; from += r.group, ++g) {
    const int64_t count = r.length - from < r.group ? r.length - from : r.group;
    const float* x = r.x + from;
    int8_t* codes = r.codes + from;
    int32_t largest = 0;  // magnitudes order like their bits, and NaN lies above infinity
    for (int64_t k = 0; k < count; ++k) {
      int32_t bits;
      std::memcpy(&bits, x + k, sizeof bits);
      bits &= 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    if (largest >= 0x7f800000) {
      std::memset(codes, 0, static_cast<size_t>(count));
      r.scales[g] = __builtin_nanf("");
      continue;
    }
    float absmax;
    std::memcpy(&absmax, &largest, sizeof absmax);
    float scale = absmax * kPerBound;
    if (r.round_to_bf16) {
      scale = RoundedToBf16(scale);
    }
    scale = scale < kSmallestScale ? 1.0f : scale;
    r.scales[g] = scale;
    const float per_scale = 1.0f / scale;
    if (r.round_to_bf16) {
      for (int64_t k = 0; k < count; ++k) {
        codes[k] = CodeOf(RoundedToBf16(x[k] / scale));
      }
    } else if (count == 1) {
      codes[0] = CodeOf(x[0] / scale);
    } else {
      for (int64_t k = 0; k < count; ++k) {
        codes[k] = CodeOf(x[k] * per_scale);
      }
    }
  }
}

// Heights that the instruction set does not use are not compiled; the driver never asks for them.
#define FEWBIT_STREAM(function, type)                                                      \
  {                                                                                        \
    function<T, type, 1>, function<T, type, (T::kStreamRows > 1 ? 2 : 1)>,                 \
        function<T, type, (T::kStreamRows > 2 ? 3 : 1)>,                                   \
        function<T, type, (T::kStreamRows > 3 ? 4 : 1)>                                    \
  }
#define FEWBIT_TILES(type)                                                                 \
  {                                                                                        \
    TileIntRows<T, type, 1>, TileIntRows<T, type, 2>,                                      \
        TileIntRows<T, type, (T::kIntRows > 2 ? 3 : 1)>,                                   \
        TileIntRows<T, type, (T::kIntRows > 3 ? 4 : 1)>,                                   \
        TileIntRows<T, type, (T::kIntRows > 4 ? 5 : 1)>,                                   \
        TileIntRows<T, type, (T::kIntRows > 5 ? 6 : 1)>                                    \
  }

template <class T>
constexpr Kernels MakeKernels(const char* name) {
  return Kernels{
      name,
      T::kStreamRows,
      T::kFloatRows,
      T::kFloatVectors,
      T::kIntRows,
      T::kIntVectors,
      {0, T::Words(1), T::Words(2), T::Words(3), T::Words(4), T::Words(5), T::Words(6), T::Words(7),
       T::Words(8)},
      {false, false, false, false, false, false, false, false, T::kPanelIsUnpacked},
      QuantizeOneRow,
      PackCodes,
      {FEWBIT_STREAM(StreamFloatRows, 0), FEWBIT_STREAM(StreamFloatRows, 1),
       FEWBIT_STREAM(StreamFloatRows, 2), FEWBIT_STREAM(StreamFloatRows, 3),
       FEWBIT_STREAM(StreamFloatRows, 4), FEWBIT_STREAM(StreamFloatRows, 5),
       FEWBIT_STREAM(StreamFloatRows, 6), FEWBIT_STREAM(StreamFloatRows, 7),
       FEWBIT_STREAM(StreamFloatRows, 8), FEWBIT_STREAM(StreamFloatRows, 9),
       FEWBIT_STREAM(StreamFloatRows, 10)},
      {FEWBIT_STREAM(StreamIntRows, 1), FEWBIT_STREAM(StreamIntRows, 2),
       FEWBIT_STREAM(StreamIntRows, 3), FEWBIT_STREAM(StreamIntRows, 4),
       FEWBIT_STREAM(StreamIntRows, 5), FEWBIT_STREAM(StreamIntRows, 6),
       FEWBIT_STREAM(StreamIntRows, 7), FEWBIT_STREAM(StreamIntRows, 8)},
      {UnpackFloat<T, 0>, UnpackFloat<T, 1>, UnpackFloat<T, 2>, UnpackFloat<T, 3>,
       UnpackFloat<T, 4>, UnpackFloat<T, 5>, UnpackFloat<T, 6>, UnpackFloat<T, 7>,
       UnpackFloat<T, 8>, UnpackFloat<T, 9>, UnpackFloat<T, 10>},
      {UnpackInt<T, 1>, UnpackInt<T, 2>, UnpackInt<T, 3>, UnpackInt<T, 4>, UnpackInt<T, 5>,
       UnpackInt<T, 6>, UnpackInt<T, 7>, UnpackInt<T, 8>},
      {TileFloatRows<T, 1>, TileFloatRows<T, 2>, TileFloatRows<T, (T::kFloatRows > 2 ? 3 : 1)>,
       TileFloatRows<T, (T::kFloatRows > 3 ? 4 : 1)>, TileFloatRows<T, (T::kFloatRows > 4 ? 5 : 1)>,
       TileFloatRows<T, (T::kFloatRows > 5 ? 6 : 1)>},
      {FEWBIT_TILES(1), FEWBIT_TILES(2), FEWBIT_TILES(3),
       FEWBIT_TILES(4), FEWBIT_TILES(5), FEWBIT_TILES(6),
       FEWBIT_TILES(7), FEWBIT_TILES(8)},
      PackRows,
      PackColumns,
      {DotColumns<T, 1>, DotColumns<T, 2>, DotColumns<T, 3>, DotColumns<T, 4>},
      {AddRows<T, 1>, AddRows<T, 2>, AddRows<T, 3>, AddRows<T, 4>},
      ScaleOneRow,
      LargestOfColumns,
      ScalesOfColumns,
      CodesOfColumns,
  };
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_TABLE_H_
