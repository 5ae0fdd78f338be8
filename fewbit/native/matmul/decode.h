// From the bytes of a panel to codes, numbers and scales, over an instruction set `T` (isa_*.h) and
// compiled in one unit per set. Everything has internal linkage and uses plain pointers; see
// matmul/kernels.h for why.

#ifndef FEWBIT_NATIVE_MATMUL_DECODE_H_
#define FEWBIT_NATIVE_MATMUL_DECODE_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "matmul/kernels.h"

#if defined(FEWBIT_SANITIZED)
// Unrolled and with every access checked, the kernels would take a quarter of an hour to compile.
#define FEWBIT_INLINE inline
#define FEWBIT_UNROLL
#else
#define FEWBIT_INLINE inline __attribute__((always_inline))
#define FEWBIT_UNROLL _Pragma("GCC unroll 64")
#endif

namespace fewbit {
namespace {

// Vectors of a panel: an instruction set with few registers streams vectors of fewer lanes.
template <class T>
constexpr int Vectors() {
  return kPanel / T::kWidth;
}

constexpr int BitsOf(int decoding) {
  return decoding == kTable4 ? 4 : decoding > kTable4 ? 8 : decoding + 1;
}

// The masked bits of a word, `shift` places further down (up, if negative).
template <class T>
FEWBIT_INLINE typename T::I Plane(const uint8_t* words, int row, int shift, int32_t mask) {
  const typename T::I word = T::LoadI(words + row * kPanel * 4);
  return T::And(shift < 0 ? T::ShiftLeft(word, -shift) : T::ShiftRight(word, shift),
                T::SetI(mask));
}

// Quad q of a block, whose words for these 16 columns start at `words`: planes of 4, 2 and 1 bits,
// the largest one holding the lowest bits.
template <class T, int kBits>
FEWBIT_INLINE typename T::I Quad(const uint8_t* words, int q) {
  if constexpr (kBits == 8) {
    return T::LoadI(words + q * kPanel * 4);
  } else if constexpr (kBits == 1) {
    // A sign: 0 or 2, so that a zero point of 1 gives -1 or 1.
    const typename T::I word = T::LoadI(words);
    return T::And(q == 0 ? T::ShiftLeft(word, 1) : T::ShiftRight(word, q - 1),
                  T::SetI(0x02020202));
  } else {
    constexpr int kFour = kBits & 4, kTwo = kBits & 2, kOne = kBits & 1;
    typename T::I code = T::SetI(0);
    if constexpr (kFour != 0) {
      code = Plane<T>(words, q / 2, q % 2 * 4, 0x0f0f0f0f);
    }
    if constexpr (kTwo != 0) {
      code = T::Or(code, Plane<T>(words, kFour + q / 4, q % 4 * 2 - kFour, 0x03030303 << kFour));
    }
    if constexpr (kOne != 0) {
      constexpr int kAbove = kFour + kTwo;
      code = T::Or(code, Plane<T>(words, kAbove, q - kAbove, 0x01010101 << kAbove));
    }
    return code;
  }
}

// What a decoding needs besides the code: 2^23 + zero point, for 16 columns of one group, or a
// table for all.
template <class T, int kDecoding>
using Meaning = std::conditional_t<kDecoding == kTable4, typename T::Table, typename T::F>;

template <class T, int kDecoding>
FEWBIT_INLINE Meaning<T, kDecoding> MeaningOf(const Panel& panel, int64_t group, int vector) {
  constexpr float kMagic = 8388608.0f;
  if constexpr (kDecoding == kTable4) {
    return T::LoadTable(panel.table);
  } else if constexpr (kDecoding > kInt8) {
    return T::SetF(0.0f);
  } else if (panel.zero == nullptr) {
    return T::SetF(kMagic + static_cast<float>(panel.shared_zero));
  } else {
    const uint8_t* zero = panel.zero + group * kPanel + vector * T::kWidth;
    return T::AddF(T::ToFloat(T::LoadBytes(zero)), T::SetF(kMagic));
  }
}

// An fp8 byte's sign, exponent and mantissa moved to where a float has them: a float whose exponent
// bias is off by a constant, subnormal numbers included.
template <class T, int kDecoding>
FEWBIT_INLINE typename T::F BiasedValue(typename T::I quad, int i) {
  constexpr int kShift = kDecoding == kE4m3 ? 4 : 3;
  constexpr uint32_t kMask = kDecoding == kE4m3 ? 0x87f00000u : 0x8fe00000u;
  if constexpr (T::kHalfSteps) {
    return T::AsFloat(T::template MovedByte<kShift, kMask>(quad, i));
  } else {
    const typename T::I bits = T::ShiftRightSigned(T::ShiftLeft(quad, 24 - 8 * i), kShift);
    return T::AsFloat(T::And(bits, T::SetI(static_cast<int32_t>(kMask))));
  }
}

// The numbers (without scale) of byte i of each lane.
template <class T, int kDecoding>
FEWBIT_INLINE typename T::F Value(typename T::I quad, int i, const Meaning<T, kDecoding>& meaning) {
  if constexpr (kDecoding <= kInt8) {
    // A byte below the exponent of 2^23 is the float 2^23 + byte, and the difference is exact.
    return T::SubF(T::ByteOverMagic(quad, i), meaning);
  } else if constexpr (kDecoding == kTable4) {
    return T::LookUp(meaning, T::ShiftRight(quad, 8 * i));
  } else {
    return T::MulF(BiasedValue<T, kDecoding>(quad, i),
                   T::SetF(kDecoding == kE4m3 ? kBiasE4m3 : kBiasE5m2));
  }
}

// The same, for kernels whose caller has taken the bias of fp8 out of the product.
template <class T, int kDecoding>
FEWBIT_INLINE typename T::F StreamedValue(typename T::I quad, int i,
                                          const Meaning<T, kDecoding>& meaning) {
  if constexpr (kDecoding > kTable4) {
    return BiasedValue<T, kDecoding>(quad, i);
  } else {
    return Value<T, kDecoding>(quad, i, meaning);
  }
}

// All bits where the code is the largest of its width (the NaN of scale formats), else none.
template <class T>
FEWBIT_INLINE typename T::I AllOnesFrom(typename T::I code, int width) {
  return T::SubI(T::SetI(0), T::ShiftRight(T::AddI(code, T::SetI(1)), width));
}

// Not inlined: it would be repeated in every kernel, and runs once per group.
template <class T>
__attribute__((noinline)) typename T::F Scale(const Panel& panel, int64_t group, int vector) {
  const int64_t at = group * kPanel + vector * T::kWidth;
  switch (panel.scale_type) {
    case kScaleF32:
      return T::LoadF(panel.scale + at * 4);
    case kScaleF16:
      return T::LoadHalf(panel.scale + at * 2);
    case kScaleBf16:
      return T::AsFloat(T::ShiftLeft(T::LoadShorts(panel.scale + at * 2), 16));
    case kScaleE8m0: {
      // Code 0 is 2^-127, which a float has only as a subnormal number; 255 is NaN.
      const typename T::I code = T::LoadBytes(panel.scale + at);
      const typename T::I bits = T::MaxI(T::ShiftLeft(code, 23), T::SetI(0x00400000));
      return T::AsFloat(T::Or(bits, AllOnesFrom<T>(code, 8)));
    }
    case kScaleE4m3: {
      const typename T::I code = T::LoadBytes(panel.scale + at);
      const typename T::F value = Value<T, kE4m3>(code, 0, T::SetF(0.0f));
      const typename T::I nan = AllOnesFrom<T>(T::And(code, T::SetI(0x7f)), 7);
      return T::AsFloat(T::Or(T::AsInt(value), nan));
    }
  }
  return T::SetF(1.0f);
}

// The usual types are read in place: with groups of 32 a call would cost as much as the group.
template <class T>
FEWBIT_INLINE typename T::F UsualScale(const Panel& panel, int64_t group, int vector) {
  const int64_t at = group * kPanel + vector * T::kWidth;
  if (panel.scale_type == kScaleF16) {
    return T::LoadHalf(panel.scale + at * 2);
  }
  if (panel.scale_type == kScaleF32) {
    return T::LoadF(panel.scale + at * 4);
  }
  return Scale<T>(panel, group, vector);
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_DECODE_H_
