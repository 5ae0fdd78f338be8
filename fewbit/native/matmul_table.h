// The packing of activations, and the table of one instruction set's kernels.
// Internal linkage only, as in matmul_stream.h.

#ifndef FEWBIT_NATIVE_MATMUL_TABLE_H_
#define FEWBIT_NATIVE_MATMUL_TABLE_H_

#include "matmul_dots.h"
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
  constexpr float kPerBound = 1.0f / 127.5f;
  constexpr float kSmallest = 0x1p-63f;    // below it a range counts as nothing: scale 1
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even
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
    scale = scale < kSmallest ? 1.0f : scale;
    r.scales[g] = scale;
    const float per_scale = 1.0f / scale;
    if (r.round_to_bf16) {
      for (int64_t k = 0; k < count; ++k) {
        float units = RoundedToBf16(x[k] / scale);
        units = units > 127.0f ? 127.0f : units < -128.0f ? -128.0f : units;
        codes[k] = static_cast<int8_t>(static_cast<int32_t>((units + kRounder) - kRounder));
      }
    } else {
      for (int64_t k = 0; k < count; ++k) {
        float units = count == 1 ? x[k] / scale : x[k] * per_scale;
        units = units > 127.0f ? 127.0f : units < -128.0f ? -128.0f : units;
        codes[k] = static_cast<int8_t>(static_cast<int32_t>((units + kRounder) - kRounder));
      }
    }
  }
}

// Rows of codes to [quad][words][rows]: four codes in a word, or (0, 2) and (1, 3) as 16-bit pairs.
void PackCodes(const int8_t* codes, int64_t stride, int rows, int64_t quads, int words,
               int32_t* packed) {
  for (int m = 0; m < rows; ++m) {
    const int8_t* row = codes + m * stride;
    int32_t* out = packed + m;
    if (words == 1) {
      for (int64_t q = 0; q < quads; ++q, out += rows) {
        std::memcpy(out, row + q * 4, 4);
      }
    } else {
      for (int64_t q = 0; q < quads; ++q, out += rows * 2) {
        const int8_t* a = row + q * 4;
        for (int i = 0; i < 2; ++i) {
          out[i * rows] = static_cast<int32_t>(
              static_cast<uint32_t>(static_cast<uint16_t>(a[i])) |
              static_cast<uint32_t>(static_cast<uint16_t>(a[i + 2])) << 16);
        }
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
      T::kDotRows,
      T::kDotLanes,
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
      {FEWBIT_STREAM(StreamDotsRows, 0), FEWBIT_STREAM(StreamDotsRows, 1),
       FEWBIT_STREAM(StreamDotsRows, 2), FEWBIT_STREAM(StreamDotsRows, 3),
       FEWBIT_STREAM(StreamDotsRows, 4), FEWBIT_STREAM(StreamDotsRows, 5),
       FEWBIT_STREAM(StreamDotsRows, 6), FEWBIT_STREAM(StreamDotsRows, 7),
       FEWBIT_STREAM(StreamDotsRows, 8), FEWBIT_STREAM(StreamDotsRows, 9),
       FEWBIT_STREAM(StreamDotsRows, 10)},
      {AddLanes<T, 0>, AddLanes<T, 1>, AddLanes<T, 2>, AddLanes<T, 3>, AddLanes<T, 4>,
       AddLanes<T, 5>, AddLanes<T, 6>, AddLanes<T, 7>, AddLanes<T, 8>, AddLanes<T, 9>,
       AddLanes<T, 10>},
      {UnpackDotsOf<T, 0>, UnpackDotsOf<T, 1>, UnpackDotsOf<T, 2>, UnpackDotsOf<T, 3>,
       UnpackDotsOf<T, 4>, UnpackDotsOf<T, 5>, UnpackDotsOf<T, 6>, UnpackDotsOf<T, 7>,
       UnpackDotsOf<T, 8>, UnpackDotsOf<T, 9>, UnpackDotsOf<T, 10>},
      {TileDotsRows<T, 1>, TileDotsRows<T, 2>, TileDotsRows<T, (T::kDotRows > 2 ? 3 : 1)>,
       TileDotsRows<T, (T::kDotRows > 3 ? 4 : 1)>, TileDotsRows<T, (T::kDotRows > 4 ? 5 : 1)>,
       TileDotsRows<T, (T::kDotRows > 5 ? 6 : 1)>},
      {UnpackTurnedOf<T, 0>, UnpackTurnedOf<T, 1>, UnpackTurnedOf<T, 2>, UnpackTurnedOf<T, 3>,
       UnpackTurnedOf<T, 4>, UnpackTurnedOf<T, 5>, UnpackTurnedOf<T, 6>, UnpackTurnedOf<T, 7>,
       UnpackTurnedOf<T, 8>, UnpackTurnedOf<T, 9>, UnpackTurnedOf<T, 10>},
  };
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_TABLE_H_
