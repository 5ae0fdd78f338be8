// The codes that fewbit.quantize(x, 'int8') gives, bit for bit. Internal linkage only: compiled
// once per instruction set.

#ifndef FEWBIT_NATIVE_QUANTIZE_CODES_H_
#define FEWBIT_NATIVE_QUANTIZE_CODES_H_

#include <cstdint>
#include <cstring>

namespace fewbit {
namespace {

inline float RoundedToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;  // finite numbers only
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr int32_t kInfinityBits = 0x7f800000;

// The bits of the largest magnitude: magnitudes order like their bits, and NaN lies above infinity.
inline int32_t LargestBits(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// NaN where the largest magnitude is not finite.
inline float ScaleOfLargest(int32_t largest, bool round_to_bf16) {
  constexpr float kPerBound = 1.0f / 127.5f;
  constexpr float kSmallest = 0x1p-63f;  // below it a range counts as nothing: scale 1
  if (largest >= kInfinityBits) {
    return __builtin_nanf("");
  }
  float absmax;
  std::memcpy(&absmax, &largest, sizeof absmax);
  float scale = absmax * kPerBound;
  if (round_to_bf16) {
    scale = RoundedToBf16(scale);
  }
  return scale < kSmallest ? 1.0f : scale;
}

// The nearest code. The limits keep a product from being fused with the sum, which would round
// once for both.
inline int8_t CodeOf(float units) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even
  const float above = units > -128.0f ? units : -128.0f;
  const float inside = above < 127.0f ? above : 127.0f;
  return static_cast<int8_t>(static_cast<int32_t>((inside + kRounder) - kRounder));
}

// In float32 XLA multiplies with the reciprocal of a shared scale and divides by one that is not
// shared; in bfloat16 it divides and rounds the quotient.
inline void CodesOf(const float* x, int64_t count, float scale, bool divide, bool round_to_bf16,
                    int8_t* codes) {
  const float per_scale = 1.0f / scale;
  if (scale != scale) {
    std::memset(codes, 0, static_cast<size_t>(count));
  } else if (round_to_bf16) {
    for (int64_t k = 0; k < count; ++k) {
      codes[k] = CodeOf(RoundedToBf16(x[k] / scale));
    }
  } else {
    for (int64_t k = 0; k < count; ++k) {
      codes[k] = CodeOf(divide ? x[k] / scale : x[k] * per_scale);
    }
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_QUANTIZE_CODES_H_
