// AVX2: how 16 values of a 4-bit table are looked up for many codes at once.

#ifndef FEWBIT_NATIVE_ISA_AVX2_TABLES_H_
#define FEWBIT_NATIVE_ISA_AVX2_TABLES_H_

#include <immintrin.h>

#include <cstdint>

#include "matmul/kernels.h"

namespace fewbit {
namespace {

struct Avx2Tables {
  struct F {
    __m256 a, b;
  };

  // The bytes of the 16 values apart: byte shuffles look up each, and unpacking joins them, at
  // half the cost of two permutations and a blend. What comes out has k along the lanes.
  struct WideTable {
    __m256i bytes[4];

    explicit WideTable(const Panel& panel) {
      const __m128i* values = reinterpret_cast<const __m128i*>(panel.table);
      const __m128i gather = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      __m128i v[4];  // four values each, by bytes: [4 lowest][4 next]...
      for (int i = 0; i < 4; ++i) {
        v[i] = _mm_shuffle_epi8(_mm_loadu_si128(values + i), gather);
      }
      const __m128i a = _mm_unpacklo_epi32(v[0], v[1]), b = _mm_unpacklo_epi32(v[2], v[3]);
      const __m128i c = _mm_unpackhi_epi32(v[0], v[1]), d = _mm_unpackhi_epi32(v[2], v[3]);
      bytes[0] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(a, b));
      bytes[1] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(a, b));
      bytes[2] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(c, d));
      bytes[3] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(c, d));
    }
    // The values of a quad of 8 columns: vector c has the four of column c in its low half, those
    // of column c + 4 in its high half.
    void LookUp(__m256i index, __m256 (&w)[4]) const {
      const __m256i b0 = _mm256_shuffle_epi8(bytes[0], index);
      const __m256i b1 = _mm256_shuffle_epi8(bytes[1], index);
      const __m256i b2 = _mm256_shuffle_epi8(bytes[2], index);
      const __m256i b3 = _mm256_shuffle_epi8(bytes[3], index);
      const __m256i low0 = _mm256_unpacklo_epi8(b0, b1), high0 = _mm256_unpacklo_epi8(b2, b3);
      const __m256i low1 = _mm256_unpackhi_epi8(b0, b1), high1 = _mm256_unpackhi_epi8(b2, b3);
      w[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low0, high0));
      w[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low0, high0));
      w[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low1, high1));
      w[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low1, high1));
    }
  };
  // The sums lie as the values that WideTable looks up.
  struct TableSums {
    __m256 sum[2][4];

    TableSums() {
      for (int i = 0; i < 4; ++i) {
        sum[0][i] = sum[1][i] = _mm256_setzero_ps();
      }
    }
    // A word per column: eight k.
    void Add(const WideTable& table, const uint8_t* words, const float* x) {
      const __m256i low = _mm256_set1_epi8(0x0f);
      const __m256 x0 = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x));
      const __m256 x1 = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x + 4));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words) + h);
        AddQuad(table, _mm256_and_si256(v, low), x0, sum[h]);
        AddQuad(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), low), x1, sum[h]);
      }
    }
    F Total() const { return {Columns(sum[0]), Columns(sum[1])}; }

   private:
    static void AddQuad(const WideTable& table, __m256i index, __m256 x, __m256* sum) {
      __m256 w[4];
      table.LookUp(index, w);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        sum[c] = _mm256_fmadd_ps(w[c], x, sum[c]);
      }
    }
    static __m256 Columns(const __m256* s) {
      return _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
    }
  };

  // The transposed product from the same look-up, with k along the lanes: each number of a row
  // of g is spread as the values of its column lie, and a quad's sums are one vector.
  static void SpreadColumns(const float* g, float* out) {
    for (int c = 0; c < kPanel; c += 8) {
      const __m256 x = _mm256_loadu_ps(g + c);
      _mm256_storeu_ps(out + c * 4, _mm256_permute_ps(x, 0x00));
      _mm256_storeu_ps(out + c * 4 + 8, _mm256_permute_ps(x, 0x55));
      _mm256_storeu_ps(out + c * 4 + 16, _mm256_permute_ps(x, 0xaa));
      _mm256_storeu_ps(out + c * 4 + 24, _mm256_permute_ps(x, 0xff));
    }
  }
  // A row of words: two quads of 64 columns.
  template <int kRows>
  static void AddTableDots(const WideTable& table, const uint8_t* words,
                           const float (*g)[kPanel * 4], float* sums, int64_t row_stride) {
    constexpr int kChains = kRows == 1 ? 2 : 1;  // else one row would wait for its own sums
    const __m256i low = _mm256_set1_epi8(0x0f);
    __m256 sum[kRows][2][2];
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        sum[m][h][0] = _mm256_loadu_ps(sums + m * row_stride + h * 8);
        sum[m][h][1] = _mm256_setzero_ps();
      }
    }
    for (int v = 0; v < 8; ++v) {
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words) + v);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        __m256 w[4];
        table.LookUp(_mm256_and_si256(h == 0 ? word : _mm256_srli_epi16(word, 4), low), w);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
#pragma GCC unroll 4
          for (int m = 0; m < kRows; ++m) {
            __m256& chain = sum[m][h][c % kChains];
            chain = _mm256_fmadd_ps(w[c], _mm256_loadu_ps(g[m] + v * 32 + c * 8), chain);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        float* at = sums + m * row_stride + h * 8;
        _mm256_storeu_ps(
            at, kChains == 1 ? sum[m][h][0] : _mm256_add_ps(sum[m][h][0], sum[m][h][1]));
      }
    }
  }
  static void AddTableTotals(const float* sums, float* out) {
    const __m128 four = _mm_add_ps(_mm_loadu_ps(sums), _mm_loadu_ps(sums + 4));
    _mm_storeu_ps(out, _mm_add_ps(_mm_loadu_ps(out), four));
  }
};

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ISA_AVX2_TABLES_H_
