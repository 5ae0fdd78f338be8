// AVX-512 by SIMDe's functions, and by loops where SIMDe has none. Stands for <immintrin.h>.

#ifndef FEWBIT_TESTS_NATIVE_AVX512_EMULATED_H_
#define FEWBIT_TESTS_NATIVE_AVX512_EMULATED_H_

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "matmul/kernels.h"

namespace fewbit {

extern const Kernels kEmulatedAvx512Kernels;

namespace emulated {

template <class To, class From, class Function>
inline __m512i Lanes(From from, Function function) {
  typename Function::Lane in[16];
  To out[16];
  __m512i result;
  static_assert(sizeof(out) == sizeof(result), "");
  std::memcpy(in, &from, sizeof in);
  for (int i = 0; i < 16; ++i) {
    out[i] = function(in[i]);
  }
  std::memcpy(&result, out, sizeof out);
  return result;
}

struct Same8 {
  using Lane = uint8_t;
  int32_t operator()(uint8_t v) const { return v; }
};
struct Same16 {
  using Lane = uint16_t;
  int32_t operator()(uint16_t v) const { return v; }
};
struct ToFloat {
  using Lane = int32_t;
  float operator()(int32_t v) const { return static_cast<float>(v); }
};
struct ToInt {
  using Lane = float;
  int32_t operator()(float v) const {
    const bool fits = v >= -0x1p31f && v < 0x1p31f;  // not NaN either
    return fits ? static_cast<int32_t>(std::nearbyint(v)) : std::numeric_limits<int32_t>::min();
  }
};
struct SignedShift {
  using Lane = int32_t;
  unsigned n;
  int32_t operator()(int32_t v) const { return v >> n; }
};
struct FromHalf {
  using Lane = uint16_t;
  float operator()(uint16_t v) const {
    const float size = static_cast<float>(v & 0x3ff);
    const int exponent = v >> 10 & 31;
    const float value = exponent == 0 ? size * 0x1p-24f
                                      : (size + 1024) * 0x1p-25f * static_cast<float>(1 << exponent);
    return v & 0x8000 ? -value : value;
  }
};

inline __m512i cvtepu8_epi32(__m128i v) { return Lanes<int32_t>(v, Same8{}); }
inline __m512i cvtepu16_epi32(__m256i v) { return Lanes<int32_t>(v, Same16{}); }
inline __m512 cvtepi32_ps(__m512i v) { return _mm512_castsi512_ps(Lanes<float>(v, ToFloat{})); }
inline __m512i cvtps_epi32(__m512 v) { return Lanes<int32_t>(v, ToInt{}); }
inline __m512 cvtph_ps(__m256i v) { return _mm512_castsi512_ps(Lanes<float>(v, FromHalf{})); }
inline __m512i srai_epi32(__m512i v, unsigned n) { return Lanes<int32_t>(v, SignedShift{n}); }

// SIMDe has it, under a macro of the masked form's arguments.
inline __m512i madd_epi16(__m512i x, __m512i y) {
  int16_t a[32], b[32];
  int32_t sums[16];
  __m512i result;
  std::memcpy(a, &x, sizeof a);
  std::memcpy(b, &y, sizeof b);
  for (int i = 0; i < 16; ++i) {
    sums[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  }
  std::memcpy(&result, sums, sizeof sums);
  return result;
}

// SIMDe adds signed numbers, for which leaving 32 bits is undefined; the instruction wraps around.
inline __m512i dpbusd_epi32(__m512i sums, __m512i unsigned_bytes, __m512i signed_bytes) {
  uint32_t total[16];
  uint8_t a[64];
  int8_t b[64];
  __m512i result;
  std::memcpy(total, &sums, sizeof total);
  std::memcpy(a, &unsigned_bytes, sizeof a);
  std::memcpy(b, &signed_bytes, sizeof b);
  for (int i = 0; i < 64; ++i) {
    total[i / 4] += static_cast<uint32_t>(a[i] * b[i]);
  }
  std::memcpy(&result, total, sizeof total);
  return result;
}

}  // namespace emulated
}  // namespace fewbit

#define _mm512_cvtepu8_epi32 fewbit::emulated::cvtepu8_epi32
#define _mm512_cvtepu16_epi32 fewbit::emulated::cvtepu16_epi32
#define _mm512_cvtepi32_ps fewbit::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 fewbit::emulated::cvtps_epi32
#define _mm512_cvtph_ps fewbit::emulated::cvtph_ps
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 fewbit::emulated::madd_epi16
#define _mm512_srai_epi32 fewbit::emulated::srai_epi32
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 fewbit::emulated::dpbusd_epi32

#endif  // FEWBIT_TESTS_NATIVE_AVX512_EMULATED_H_
