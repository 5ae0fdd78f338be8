// Sixteen lanes as two 256-bit vectors: AVX2, FMA, F16C.

#ifndef FEWBIT_NATIVE_ISA_AVX2_H_
#define FEWBIT_NATIVE_ISA_AVX2_H_

#include <immintrin.h>

#include <cstdint>

#include "isa/avx2_tables.h"
#include "matmul/kernels.h"

namespace fewbit {
namespace {

struct Avx2 : Avx2Tables {
  struct I {
    __m256i a, b;
  };
  using D = __m256;
  using Stream = Avx2;
  // Two registers of eight values: a permutation reaches eight.
  struct Table {
    __m256 low, high;
  };

  static constexpr int kFloatRows = 6, kFloatVectors = 1;
  static constexpr int kIntRows = 6, kIntVectors = 1;
  static constexpr int kGroupRows = 0;
  static constexpr int kPlaneRows = 4;
  static constexpr int kStreamRows = 4, kStreamIntRows = 4, kStreamVectors = 4;
  static constexpr int kWidth = 16, kPieceQuads = 64;
  static constexpr int kDotRows = 3, kDotLanes = 8;
  static constexpr bool kPanelIsUnpacked = false;
  static constexpr bool kWholePanels = false;
  static constexpr bool kOwnTable = true, kOwnTableDots = true;
  static constexpr bool kHalfSteps = false;

  static I LoadI(const void* p) {
    const __m256i* v = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
  }
  static void StoreI(int32_t* p, I v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, v.b);
  }
  static I SetI(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
  static I LoadBytes(const void* p) {
    const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
  }
  static I LoadShorts(const void* p) {
    const __m128i* v = static_cast<const __m128i*>(p);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(v)),
            _mm256_cvtepu16_epi32(_mm_loadu_si128(v + 1))};
  }
  static I And(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
  static I Or(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
  static I AddI(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static I SubI(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
  static I MulI(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
  static I MaxI(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
  static I ShiftLeft(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
  static I ShiftRight(I x, int n) {
    return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
  }
  static I ShiftRightSigned(I x, int n) {
    return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
  }

  static F LoadF(const void* p) {
    const float* v = static_cast<const float*>(p);
    return {_mm256_loadu_ps(v), _mm256_loadu_ps(v + 8)};
  }
  static void StoreF(float* p, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
  }
  static F LoadHalf(const void* p) {
    const __m128i* v = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(v)), _mm256_cvtph_ps(_mm_loadu_si128(v + 1))};
  }
  static F SetF(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static F AddF(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F SubF(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F MulF(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F Fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static F ToFloat(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
  static F AsFloat(I v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
  static I AsInt(F v) { return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)}; }

  // The nearest codes, halves to even. Numbers below -128, and NaN, end there: a conversion gives the least
  // integer for what it cannot hold, and packing saturates.
  static void StoreCodes(int8_t* p, F units) {
    const __m256i shorts = _mm256_packs_epi32(Rounded(units.a), Rounded(units.b));
    const __m256i bytes = _mm256_packs_epi16(shorts, shorts);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(bytes, order)));
  }

  static F ByteOverMagic(I quad, int i) {
    const int b = i - 0x7f7f8000;  // byte i of a lane into its lowest place, zeros above
    const __m256i pick = _mm256_broadcastsi128_si256(_mm_setr_epi32(b, b + 4, b + 8, b + 12));
    const __m256i magic = _mm256_set1_epi32(0x4b000000);
    return AsFloat({_mm256_or_si256(_mm256_shuffle_epi8(quad.a, pick), magic),
                    _mm256_or_si256(_mm256_shuffle_epi8(quad.b, pick), magic)});
  }
  static Table LoadTable(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static F LookUp(const Table& table, I index) {
    return {LookUpHalf(table, index.a), LookUpHalf(table, index.b)};
  }

  static D ZeroD() { return _mm256_setzero_ps(); }
  static D LoadD(const float* p) { return _mm256_loadu_ps(p); }
  static void StoreD(float* p, D v) { _mm256_storeu_ps(p, v); }
  static D FmaD(D x, D y, D z) { return _mm256_fmadd_ps(x, y, z); }
  static D AddDot(D sum, F x, F y) { return FmaD(x.b, y.b, FmaD(x.a, y.a, sum)); }
  static void StoreParts(float* p, int step, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + step, v.b);
  }
  // Four vectors to four numbers at each of 16 places.
  static void StoreTurned(float* p, int step, const F (&w)[4]) {
    TurnHalf(p, step, w[0].a, w[1].a, w[2].a, w[3].a);
    TurnHalf(p + 8 * step, step, w[0].b, w[1].b, w[2].b, w[3].b);
  }
  static void AddTotals(const D (&v)[4], float* out) {
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), four));
  }

  // Codes of 8 bits as two vectors of 16-bit numbers; vpmaddubsw would saturate on them.
  static constexpr int Words(int bits) { return bits == 8 ? 2 : 1; }
  // How many quads' sums of two products u * a, |a| <= 128, fit 16 bits. 0: summed in 32 at once.
  static constexpr int Span(int bits) {
    return bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : bits == 7 ? 1 : 0;
  }
  template <int kBits>
  static void Keep(int32_t* p, I quad) {
    if constexpr (kBits == 8) {
      StoreI(p, Even(quad));
      StoreI(p + 16, Odd(quad));
    } else {
      StoreI(p, quad);
    }
  }
  template <int kBits>
  static I Dot(I sum, I quad, const int32_t* a) {
    return DotWord(DotWord(sum, Even(quad), a[0]), Odd(quad), a[1]);
  }
  static I DotWord(I sum, I w, int32_t a) {
    const __m256i pair = _mm256_set1_epi32(a);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(w.a, pair)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(w.b, pair))};
  }
  static I DotNarrow(I w, int32_t a) {
    const __m256i quad = _mm256_set1_epi32(a);
    return {_mm256_maddubs_epi16(w.a, quad), _mm256_maddubs_epi16(w.b, quad)};
  }
  static I AddShorts(I x, I y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
  static I AddWidened(I sum, I narrow) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(narrow.a, one)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(narrow.b, one))};
  }

  // Signed codes as 16-bit numbers: 32 k of one column, or pairs of k of 16 columns.
  using Wide = I;
  static Wide Widen(const int8_t* p) {
    const __m128i* v = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(v)), _mm256_cvtepi8_epi16(_mm_loadu_si128(v + 1))};
  }
  static I DotWide(I sum, Wide w, const int16_t* a) {
    const I x = LoadI(a);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(w.a, x.a)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(w.b, x.b))};
  }
  static I Pairs(const int8_t* p, const int8_t* q) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y)),
            _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y))};
  }
  static I DotPair(I sum, I pairs, int32_t a) { return DotWord(sum, pairs, a); }
  // The sum of each of 16 vectors that lie one after the other.
  static I LaneSums(const int32_t* p) { return {LaneSums8(p), LaneSums8(p + 128)}; }

 private:
  static void TurnHalf(float* p, int step, __m256 w0, __m256 w1, __m256 w2, __m256 w3) {
    const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(w0, w1));
    const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(w2, w3));
    const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(w0, w1));
    const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(w2, w3));
    const __m256d turned[4] = {_mm256_unpacklo_pd(low01, low23), _mm256_unpackhi_pd(low01, low23),
                               _mm256_unpacklo_pd(high01, high23),
                               _mm256_unpackhi_pd(high01, high23)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 v = _mm256_castpd_ps(turned[i]);
      _mm_storeu_ps(p + i * step, _mm256_castps256_ps128(v));
      _mm_storeu_ps(p + (i + 4) * step, _mm256_extractf128_ps(v, 1));
    }
  }
  static I Even(I quad) { return And(quad, SetI(0x00ff00ff)); }
  static I Odd(I quad) { return {_mm256_srli_epi16(quad.a, 8), _mm256_srli_epi16(quad.b, 8)}; }
  static __m256i LaneSums8(const int32_t* p) {
    __m256i v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const I halves = LoadI(p + i * 16);
      v[i] = _mm256_add_epi32(halves.a, halves.b);
    }
    const __m256i x = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    const __m256i y = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20),
                            _mm256_permute2x128_si256(x, y, 0x31));
  }
  static __m256i Rounded(__m256 units) {
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(127.0f), units));
  }
  static __m256 LookUpHalf(const Table& table, __m256i index) {
    const __m256 low = _mm256_permutevar8x32_ps(table.low, index);
    const __m256 high = _mm256_permutevar8x32_ps(table.high, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
};

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ISA_AVX2_H_
