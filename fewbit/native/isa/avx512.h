// Sixteen lanes as one 512-bit vector: AVX-512 F, BW, VL, VNNI.

#ifndef FEWBIT_NATIVE_ISA_AVX512_H_
#define FEWBIT_NATIVE_ISA_AVX512_H_

#if defined(FEWBIT_EMULATE_AVX512)
#include "avx512_emulated.h"
#else
#include <immintrin.h>
#endif

#include <cstdint>

namespace fewbit {
namespace {

struct Avx512 {
  using I = __m512i;
  using F = __m512;
  using D = __m512;
  using Stream = Avx512;
  using Table = __m512;

  static constexpr int kFloatRows = 6, kFloatVectors = 4;
  static constexpr int kIntRows = 4, kIntVectors = 4;
  static constexpr int kGroupRows = 6, kGroupVectors = 2;
  static constexpr int kPlaneRows = 4;
  static constexpr int kStreamRows = 4, kStreamIntRows = 8, kStreamVectors = 4;
  static constexpr int kWidth = 16, kPieceQuads = 64;
  static constexpr int kDotRows = 6, kDotLanes = 16;
  static constexpr bool kPanelIsUnpacked = true;
  static constexpr bool kWholePanels = true;
  static constexpr bool kOwnTable = false, kOwnTableDots = false;
  static constexpr bool kHalfSteps = false;

  static I LoadI(const void* p) { return _mm512_loadu_si512(p); }
  static void StoreI(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
  static I SetI(int32_t v) { return _mm512_set1_epi32(v); }
  static I LoadBytes(const void* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static I LoadShorts(const void* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static I And(I x, I y) { return _mm512_and_si512(x, y); }
  static I Or(I x, I y) { return _mm512_or_si512(x, y); }
  static I AddI(I x, I y) { return _mm512_add_epi32(x, y); }
  static I SubI(I x, I y) { return _mm512_sub_epi32(x, y); }
  static I MulI(I x, I y) { return _mm512_mullo_epi32(x, y); }
  static I MaxI(I x, I y) { return _mm512_max_epi32(x, y); }
  static I ShiftLeft(I x, int n) { return _mm512_slli_epi32(x, static_cast<unsigned>(n)); }
  static I ShiftRight(I x, int n) { return _mm512_srli_epi32(x, static_cast<unsigned>(n)); }
  static I ShiftRightSigned(I x, int n) { return _mm512_srai_epi32(x, static_cast<unsigned>(n)); }

  static F LoadF(const void* p) { return _mm512_loadu_ps(p); }
  static void StoreF(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F LoadHalf(const void* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static F SetF(float v) { return _mm512_set1_ps(v); }
  static F AddF(F x, F y) { return _mm512_add_ps(x, y); }
  static F SubF(F x, F y) { return _mm512_sub_ps(x, y); }
  static F MulF(F x, F y) { return _mm512_mul_ps(x, y); }
  static F Fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
  static F ToFloat(I v) { return _mm512_cvtepi32_ps(v); }
  static F AsFloat(I v) { return _mm512_castsi512_ps(v); }
  static I AsInt(F v) { return _mm512_castps_si512(v); }

  // The nearest codes, halves to even. Numbers below -128, and NaN, end there: a conversion gives the least
  // integer for what it cannot hold, and packing saturates.
  static void StoreCodes(int8_t* p, F units) {
    const I near = _mm512_cvtps_epi32(_mm512_min_ps(SetF(127.0f), units));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(near));
  }

  static F ByteOverMagic(I quad, int i) {
    constexpr int kAndOr = 0xea;  // (x & y) | z
    return AsFloat(_mm512_ternarylogic_epi32(ShiftRight(quad, 8 * i), SetI(0xff),
                                             SetI(0x4b000000), kAndOr));
  }
  static Table LoadTable(const float* p) { return _mm512_loadu_ps(p); }
  static F LookUp(const Table& table, I index) { return _mm512_permutexvar_ps(index, table); }

  static D ZeroD() { return _mm512_setzero_ps(); }
  static D LoadD(const float* p) { return _mm512_loadu_ps(p); }
  static void StoreD(float* p, D v) { _mm512_storeu_ps(p, v); }
  static D FmaD(D x, D y, D z) { return _mm512_fmadd_ps(x, y, z); }
  static D AddDot(D sum, F x, F y) { return FmaD(x, y, sum); }
  static void StoreParts(float* p, int, F v) { StoreF(p, v); }
  static void StoreTurned(float* p, int step, const F (&w)[4]) {
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(w[0], w[1]));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(w[2], w[3]));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(w[0], w[1]));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(w[2], w[3]));
    StoreQuarters(p, 4 * step, _mm512_unpacklo_pd(low01, low23));
    StoreQuarters(p + step, 4 * step, _mm512_unpackhi_pd(low01, low23));
    StoreQuarters(p + 2 * step, 4 * step, _mm512_unpacklo_pd(high01, high23));
    StoreQuarters(p + 3 * step, 4 * step, _mm512_unpackhi_pd(high01, high23));
  }
  static void AddTotals(const D (&v)[4], float* out) {
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(Halved(v[0]), Halved(v[1])),
                                       _mm256_hadd_ps(Halved(v[2]), Halved(v[3])));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), four));
  }

  static constexpr int Words(int) { return 1; }
  static constexpr int Span(int) { return 0; }
  template <int kBits>
  static void Keep(int32_t* p, I quad) {
    StoreI(p, quad);
  }
  template <int kBits>
  static I Dot(I sum, I quad, const int32_t* a) {
    return DotWord(sum, quad, a[0]);
  }
  static I DotWord(I sum, I w, int32_t a) {
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(a));
  }

  // Signed codes as 16-bit numbers: 32 k of one column, or pairs of k of 16 columns.
  using Wide = I;
  static Wide Widen(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static I DotWide(I sum, Wide w, const int16_t* a) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(w, LoadI(a)));
  }
  static I Pairs(const int8_t* p, const int8_t* q) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm512_cvtepi8_epi16(_mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_unpacklo_epi8(x, y)), _mm_unpackhi_epi8(x, y), 1));
  }
  static I DotPair(I sum, I pairs, int32_t a) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi32(a)));
  }
  // The sum of each of 16 vectors that lie one after the other.
  static I LaneSums(const int32_t* p) {
    uint32_t sums[16];
    for (int i = 0; i < 16; ++i) {
      sums[i] = 0;
      for (int lane = 0; lane < 16; ++lane) {
        sums[i] += static_cast<uint32_t>(p[i * 16 + lane]);
      }
    }
    return LoadI(sums);
  }

 private:
  static void StoreQuarters(float* p, int step, __m512d four) {
    const __m512 v = _mm512_castpd_ps(four);
    _mm_storeu_ps(p, _mm512_castps512_ps128(v));
    _mm_storeu_ps(p + step, _mm512_extractf32x4_ps(v, 1));
    _mm_storeu_ps(p + 2 * step, _mm512_extractf32x4_ps(v, 2));
    _mm_storeu_ps(p + 3 * step, _mm512_extractf32x4_ps(v, 3));
  }
  static __m256 Halved(D v) {
    const __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(v), 1);
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(high));
  }
};

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ISA_AVX512_H_
