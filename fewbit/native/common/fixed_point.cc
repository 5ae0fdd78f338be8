#include "common/fixed_point.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/bf16.h"

namespace fewbit {
namespace {

constexpr int kBits = 29;  // of the integers: two planes of 15 bits, or four of 8

int32_t MagnitudeBits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}

// Where most numbers of a row are this many times smaller than the largest, they would keep too few
// of the bits.
constexpr float kMostAboveMedian = 1024.0f;

// Far from the ends of the range, so that no factor is subnormal or infinite.
constexpr float kSmallest = 0x1p-63f, kLargest = 0x1p97f;

// Whether integers below the row's largest magnitude hold all of it; not if that is not finite.
template <class Load>
bool FitsIntegers(int64_t length, const Load& load) {
  int32_t largest_bits = 0;  // magnitudes order like their bits, and NaN lies above all
  for (int64_t k = 0; k < length; ++k) {
    const int32_t bits = MagnitudeBits(load(k));
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  if (largest == 0.0f) {
    return true;
  }
  if (!(largest >= kSmallest && largest < kLargest)) {
    return false;
  }
  const float bound = largest / kMostAboveMedian;
  int32_t small = 0, zero = 0;
  for (int64_t k = 0; k < length; ++k) {
    const float x = std::fabs(load(k));
    small += x < bound;
    zero += x == 0.0f;
  }
  return 2 * (small - zero) <= length - zero;
}

uint32_t Pair(int32_t low, int32_t high) {
  return (static_cast<uint32_t>(low) & 0xffffu) | static_cast<uint32_t>(high) << 16;
}

// The power of two that brings every number of the row below 2^kBits.
int ExponentOf(const float* x, int64_t length) {
  float largest = 0.0f;
  for (int64_t k = 0; k < length; ++k) {
    largest = std::max(largest, std::fabs(x[k]));
  }
  int exponent = 0;
  std::frexp(largest, &exponent);
  return exponent - kBits;
}

void SumSegments(const Plan& plan, const int16_t* digits, uint32_t zero, int32_t* sums) {
  for (int64_t s = 0; s < plan.segments(); ++s) {
    int32_t sum = 0;
    for (int64_t k = plan.segment_quads[s] * 4; k < plan.segment_quads[s + 1] * 4; ++k) {
      sum += digits[k];
    }
    sums[s] = static_cast<int32_t>(0u - static_cast<uint32_t>(sum) * zero);
  }
}

void PackDigits(const Plan& plan, const int16_t* digits, int32_t* packed) {
  for (int64_t q = 0; q < plan.quads; ++q, digits += 4) {
    if (plan.words == 2) {
      packed[q * 2] = static_cast<int32_t>(Pair(digits[0], digits[2]));
      packed[q * 2 + 1] = static_cast<int32_t>(Pair(digits[1], digits[3]));
    } else {
      const int8_t narrow[4] = {
          static_cast<int8_t>(digits[0]), static_cast<int8_t>(digits[1]),
          static_cast<int8_t>(digits[2]), static_cast<int8_t>(digits[3])};
      std::memcpy(packed + q, narrow, sizeof narrow);
    }
  }
}

}  // namespace

int PlanesOf(const Kernels& kernels, const Matmul& m) {
  const bool floats = m.x_type == Element::kF32 || m.x_type == Element::kBf16;
  if (!floats || m.quantize_x || !m.format->integers()) {
    return 1;
  }
  const int planes = kernels.words[m.format->bits] == 2 ? 2 : 4;
  if (m.rows * planes > kernels.plane_rows) {
    return 1;
  }
  for (int64_t row = 0; row < m.rows; ++row) {
    bool fits;
    if (m.x_type == Element::kF32) {
      const float* x = static_cast<const float*>(m.x) + row * m.k;
      fits = FitsIntegers(m.k, [x](int64_t k) { return x[k]; });
    } else {
      const uint16_t* x = static_cast<const uint16_t*>(m.x) + row * m.k;
      fits = FitsIntegers(m.k, [x](int64_t k) { return FromBf16(x[k]); });
    }
    if (!fits) {
      return 1;
    }
  }
  return planes;
}

namespace {

// A row so large that its sums of codes could overflow before their scales are applied.
float FoldLargest(int64_t length, float* x) {
  constexpr float kApart = 0x1p64f;
  int32_t largest_bits = 0, limit_bits;
  for (int64_t k = 0; k < length; ++k) {
    const int32_t bits = MagnitudeBits(x[k]);
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  std::memcpy(&limit_bits, &kLargest, sizeof limit_bits);
  if (largest_bits < limit_bits) {
    return 1.0f;
  }
  for (int64_t k = 0; k < length; ++k) {
    x[k] *= 1.0f / kApart;
  }
  return kApart;
}

}  // namespace

float FoldRow(const Matmul& m, int64_t length, float* x) {
  if (m.format->decoding <= kTable4) {
    return FoldLargest(length, x);
  }
  constexpr int kMiddle = 60;  // half the bias
  const int exponent = std::max(-kMiddle, std::min(kMiddle, ExponentOf(x, length) + kBits));
  const float factor = std::ldexp(1.0f, kMiddle - exponent);
  for (int64_t k = 0; k < length; ++k) {
    x[k] *= factor;
  }
  const float bias = m.format->decoding == kE4m3 ? kBiasE4m3 : kBiasE5m2;
  return bias * std::ldexp(1.0f, exponent - kMiddle);
}

void PackPlanes(const Plan& plan, const Matmul& m, int64_t row, const Activations& a) {
  const int shift = plan.words == 2 ? 15 : 8;
  const float* x = a.row + row * plan.quads * 4;
  const int exponent = ExponentOf(x, m.k);
  const float to_units = std::ldexp(1.0f, -exponent);
  const uint32_t zero = m.zero == nullptr ? static_cast<uint32_t>(m.format->zero) : 1;
  int32_t* units = a.units + row * plan.quads * 4;
  int16_t* digits = a.digits + row * plan.quads * 4;
  for (int64_t k = 0; k < m.k; ++k) {
    units[k] = static_cast<int32_t>(std::lrintf(x[k] * to_units));
  }
  std::fill(units + m.k, units + plan.quads * 4, 0);
  for (int p = 0; p < plan.planes; ++p) {
    // The digit of the lowest bits, from -half to half - 1; the rest is what is left.
    const int32_t half = 1 << (shift - 1);
    for (int64_t k = 0; k < plan.quads * 4; ++k) {
      const int32_t rest = (units[k] + half) >> shift;
      digits[k] = static_cast<int16_t>(units[k] - rest * (half * 2));
      units[k] = rest;
    }
    const int64_t at = row * plan.planes + p;
    SumSegments(plan, digits, zero, a.sums + at * plan.segments());
    PackDigits(plan, digits, a.words + at * plan.quads * plan.words);
    a.scales[at] = std::ldexp(1.0f, exponent + shift * p);
  }
}

}  // namespace fewbit
