// Few rows of floats: a panel is read once and decoded on the way. Internal linkage only, as in
// matmul/decode.h.

#ifndef FEWBIT_NATIVE_MATMUL_STREAM_H_
#define FEWBIT_NATIVE_MATMUL_STREAM_H_

#include "matmul/decode.h"

namespace fewbit {
namespace {

// Longer groups are cut: a float sum of fewer products is nearer to the truth, and where rows or
// columns beyond the registers take further passes, these find a piece in the L1 cache. If one row
// takes several, pieces (T::kPieceQuads) are shorter than that, so that the panel arrives from
// memory in the order in which it lies there and without a pause.
constexpr int64_t kStreamQuads = 64;

// Four quads, the half block that starts at quad kFirst, of `kN` vectors from the first, for kRows.
template <class T, int kDecoding, int kRows, int kN, int kFirst>
FEWBIT_INLINE void FloatUnit(const uint8_t* block, const float* x, int64_t x_stride,
                             const Meaning<T, kDecoding>* meaning, typename T::F (*sum)[kN]) {
  FEWBIT_UNROLL
  for (int q = kFirst; q < kFirst + 4; ++q) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      const typename T::I quad = Quad<T, BitsOf(kDecoding)>(block + j * T::kWidth * 4, q);
      FEWBIT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const typename T::F w =
            StreamedValue<T, kDecoding>(quad, i, meaning[kDecoding == kTable4 ? 0 : j]);
        FEWBIT_UNROLL
        for (int m = 0; m < kRows; ++m) {
          sum[m][j] = T::Fma(T::SetF(x[m * x_stride + (q - kFirst) * 4 + i]), w, sum[m][j]);
        }
      }
    }
  }
}

// Vectors that are summed side by side, so that the sums' latencies overlap.
template <class T>
constexpr int SideBySide(int rows) {
  return rows == 1 ? T::kStreamVectors : rows == 2 ? (T::kStreamVectors + 1) / 2 : 1;
}

// One row times a 4-bit table, where the instruction set has its own way to look up many values.
template <class T>
void StreamTable(const StreamFloat& s) {
  constexpr int64_t kWordBytes = kPanel * 4;  // of a row of words: two quads
  const Panel& panel = s.panel;
  for (int v = 0; v < kVectors; ++v) {
    T::StoreF(s.out + v * kLanes, T::SetF(0.0f));
  }
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t begin = panel.segment_quads[segment], end = panel.segment_quads[segment + 1];
    for (int64_t from = begin; from < end; from += kStreamQuads) {
      const int64_t to = end - from < kStreamQuads ? end : from + kStreamQuads;
      for (int v = 0; v < kVectors; ++v) {
        const typename T::WideTable table(panel);
        typename T::TableSums sums;
        for (int64_t q = from; q < to; q += 2) {
          const uint8_t* words = panel.data + q / 2 * kWordBytes + v * kLanes * 4;
          sums.Add(table, words, s.x + q * 4);
        }
        float* out = s.out + v * kLanes;
        const typename T::F scale = UsualScale<T>(panel, panel.segment_group[segment], v);
        T::StoreF(out, T::Fma(sums.Total(), scale, T::LoadF(out)));
      }
    }
  }
}

// A panel in passes over as many of its columns as the registers have sums for.
template <class T, int kDecoding, int kRows>
void StreamFloatPasses(const StreamFloat& s) {
  constexpr int kN = SideBySide<T>(kRows);
  constexpr int64_t kBlockBytes = BitsOf(kDecoding) * kPanel * 4;
  constexpr bool kCarries = T::kPieceQuads < kStreamQuads;
  const Panel& panel = s.panel;
  alignas(64) float carried[kRows][kPanel];
  for (int v = 0; v < Vectors<T>() * kRows; ++v) {
    T::StoreF(s.out + v * T::kWidth, T::SetF(0.0f));
  }
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t begin = panel.segment_quads[segment], end = panel.segment_quads[segment + 1];
    const int64_t group = panel.segment_group[segment];
    for (int64_t from = begin; from < end; from += T::kPieceQuads) {
      const int64_t to = end - from < T::kPieceQuads ? end : from + T::kPieceQuads;
      const bool resumes = kCarries && (from - begin) % kStreamQuads != 0;
      const bool goes_on = kCarries && to < end && (to - begin) % kStreamQuads != 0;
      for (int v = 0; v < Vectors<T>(); v += kN) {
        Meaning<T, kDecoding> meaning[kN];
        typename T::F sum[kRows][kN];
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          meaning[j] = MeaningOf<T, kDecoding>(panel, group, v + j);
          FEWBIT_UNROLL
          for (int m = 0; m < kRows; ++m) {
            sum[m][j] = resumes ? T::LoadF(carried[m] + (v + j) * T::kWidth) : T::SetF(0.0f);
          }
        }
        const uint8_t* block = panel.data + from / kBlockQuads * kBlockBytes + v * T::kWidth * 4;
        const float* x = s.x + from * 4;
        for (int64_t q = from; q < to;) {
          if (q % kBlockQuads == 0) {
            FloatUnit<T, kDecoding, kRows, kN, 0>(block, x, s.x_stride, meaning, sum);
            q += 4, x += 16;
          }
          if (q < to) {  // a group of 16 may end in the middle of a block
            FloatUnit<T, kDecoding, kRows, kN, 4>(block, x, s.x_stride, meaning, sum);
            q += 4, x += 16, block += kBlockBytes;
          }
        }
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          const int column = (v + j) * T::kWidth;
          if (goes_on) {
            FEWBIT_UNROLL
            for (int m = 0; m < kRows; ++m) {
              T::StoreF(carried[m] + column, sum[m][j]);
            }
            continue;
          }
          const typename T::F scale = UsualScale<T>(panel, group, v + j);
          FEWBIT_UNROLL
          for (int m = 0; m < kRows; ++m) {
            float* out = s.out + m * kPanel + column;
            T::StoreF(out, T::Fma(sum[m][j], scale, T::LoadF(out)));
          }
        }
      }
    }
  }
}

template <class T, int kDecoding, int kRows>
void StreamFloatRows(const StreamFloat& s) {
  if constexpr (T::kOwnTable && kDecoding == kTable4 && kRows == 1) {
    StreamTable<T>(s);
  } else {
    StreamFloatPasses<typename T::Stream, kDecoding, kRows>(s);
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_STREAM_H_
