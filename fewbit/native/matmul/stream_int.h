// Few rows of integers: exact sums of codes, scaled per group. Internal linkage only, as in
// matmul/decode.h.

#ifndef FEWBIT_NATIVE_MATMUL_STREAM_INT_H_
#define FEWBIT_NATIVE_MATMUL_STREAM_INT_H_

#include "matmul/stream.h"

namespace fewbit {
namespace {

// Adds the products of one or more quads to 32-bit sums. Narrow codes are first summed in 16 bits
// where the instruction set has that, as many quads as cannot overflow.
template <class T, int kBits, int kCount>
FEWBIT_INLINE typename T::I DotQuads(typename T::I sum, const typename T::I* quads,
                                     const int32_t* a) {
  constexpr int kSpan = T::Span(kBits);
  if constexpr (kSpan == 0) {
    FEWBIT_UNROLL
    for (int q = 0; q < kCount; ++q) {
      sum = T::template Dot<kBits>(sum, quads[q], a + q * T::Words(kBits));
    }
  } else {
    constexpr int kStep = kSpan < kCount ? kSpan : kCount;
    FEWBIT_UNROLL
    for (int q = 0; q < kCount; q += kStep) {
      typename T::I narrow = T::DotNarrow(quads[q], a[q]);
      FEWBIT_UNROLL
      for (int r = q + 1; r < q + kStep; ++r) {
        narrow = T::AddShorts(narrow, T::DotNarrow(quads[r], a[r]));
      }
      sum = T::AddWidened(sum, narrow);
    }
  }
  return sum;
}

template <class T, int kBits, int kRows, int kN, int kFirst>
FEWBIT_INLINE void IntUnit(const uint8_t* block, const int32_t* a, int64_t a_stride,
                           typename T::I (*sum)[kN]) {
  if constexpr (T::Span(kBits) == 0) {
    // Quad by quad: all rows use what was made of one before the next takes its registers.
    FEWBIT_UNROLL
    for (int q = 0; q < 4; ++q) {
      FEWBIT_UNROLL
      for (int j = 0; j < kN; ++j) {
        const typename T::I quad = Quad<T, kBits>(block + j * T::kWidth * 4, kFirst + q);
        FEWBIT_UNROLL
        for (int m = 0; m < kRows; ++m) {
          sum[m][j] = T::template Dot<kBits>(sum[m][j], quad, a + m * a_stride + q * T::Words(kBits));
        }
      }
    }
  } else {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      typename T::I quads[4];
      FEWBIT_UNROLL
      for (int q = 0; q < 4; ++q) {
        quads[q] = Quad<T, kBits>(block + j * T::kWidth * 4, kFirst + q);
      }
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        sum[m][j] = DotQuads<T, kBits, 4>(sum[m][j], quads, a + m * a_stride);
      }
    }
  }
}

// Asks for a block that is wanted soon. The CPU's own prefetcher follows whole lines in a row; it
// lags behind codes narrower than a byte, and behind passes over every second or fourth line, which
// is how several rows read a panel.
template <int64_t kBytes>
FEWBIT_INLINE void FetchAhead(const uint8_t* block) {
  constexpr int64_t kAhead = 2048;
  FEWBIT_UNROLL
  for (int64_t at = 0; at < kBytes; at += 64) {
    __builtin_prefetch(block + kAhead + at);
  }
}

// All four vectors of a panel side by side: one pass over its bytes, sums and results in registers.
// kJoined: the rows are planes of one (common/fixed_point.h), whose sums are one result.
template <class T, int kBits, int kRows, bool kJoined>
void StreamIntPanel(const StreamInt& s) {
  constexpr int kWords = T::Words(kBits);
  constexpr int kResults = kJoined ? 1 : kRows;
  constexpr int64_t kBlockBytes = kBits * kPanel * 4;
  const Panel& panel = s.panel;
  typename T::F total[kResults][kVectors];
  FEWBIT_UNROLL
  for (int i = 0; i < kResults * kVectors; ++i) {
    total[i / kVectors][i % kVectors] = T::SetF(0.0f);
  }
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t end = panel.segment_quads[segment + 1];
    const int64_t group = panel.segment_group[segment];
    typename T::I sum[kRows][kVectors];
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const int32_t zeros = panel.zero == nullptr ? s.sums[m * panel.segments + segment] : 0;
      FEWBIT_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        sum[m][j] = T::SetI(zeros);
      }
    }
    int64_t q = panel.segment_quads[segment];
    const uint8_t* block = panel.data + q / kBlockQuads * kBlockBytes;
    const int32_t* a = s.a + q * kWords;
    while (q < end) {
      if (q % kBlockQuads == 0) {
        IntUnit<T, kBits, kRows, kVectors, 0>(block, a, s.a_stride, sum);
        q += 4, a += 4 * kWords;
      }
      if (q < end) {  // a group of 16 may end in the middle of a block
        IntUnit<T, kBits, kRows, kVectors, 4>(block, a, s.a_stride, sum);
        q += 4, a += 4 * kWords, block += kBlockBytes;
      }
    }
    FEWBIT_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const typename T::F scale = UsualScale<T>(panel, group, j);
      typename T::F joined = T::SetF(0.0f);
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        if (panel.zero != nullptr) {
          const typename T::I own = T::LoadBytes(panel.zero + group * kPanel + j * kLanes);
          const typename T::I zeros = T::SetI(s.sums[m * panel.segments + segment]);
          sum[m][j] = T::AddI(sum[m][j], T::MulI(zeros, own));
        }
        if (!kJoined && s.raw) {
          T::StoreI(static_cast<int32_t*>(s.out) + m * kPanel + j * kLanes, sum[m][j]);
          continue;
        }
        typename T::F part = T::ToFloat(sum[m][j]);
        if (kJoined) {
          joined = T::Fma(part, T::SetF(s.a_scale[m]), joined);
          continue;
        }
        if (s.scale_each) {
          part = T::MulF(part, T::SetF(s.a_scale[m * s.a_scale_stride + group]));
        }
        total[m % kResults][j] = T::Fma(part, scale, total[m % kResults][j]);
      }
      if (kJoined) {
        total[0][j] = T::Fma(joined, scale, total[0][j]);
      }
    }
  }
  for (int i = 0; i < kResults * kVectors && (kJoined || !s.raw); ++i) {
    T::StoreF(static_cast<float*>(s.out) + i * kLanes, total[i / kVectors][i % kVectors]);
  }
}

// What usually follows the sums of a group, without the questions that others ask for each vector:
// with groups of 32 those take as long as a part of the group.
template <class T, int kRows, int kN>
FEWBIT_INLINE void AddUsual(const StreamInt& s, int64_t segment, int v,
                            const typename T::I (*sum)[kN]) {
  FEWBIT_UNROLL
  for (int j = 0; j < kN; ++j) {
    const typename T::F scale = UsualScale<T>(s.panel, s.panel.segment_group[segment], v + j);
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const typename T::I zeros = T::SetI(s.sums[m * s.panel.segments + segment]);
      float* out = static_cast<float*>(s.out) + m * kPanel + (v + j) * T::kWidth;
      T::StoreF(out, T::Fma(T::ToFloat(T::AddI(sum[m][j], zeros)), scale, T::LoadF(out)));
    }
  }
}

// A panel in passes over as many of its columns as the registers have sums for.
template <class T, int kBits, int kRows>
void StreamIntPasses(const StreamInt& s) {
  constexpr int kN = SideBySide<T>(kRows);
  constexpr int kWords = T::Words(kBits);
  constexpr int64_t kBlockBytes = kBits * kPanel * 4;
  // Short pieces of whole bytes come in a row for the prefetcher, however many passes read them.
  constexpr bool kFetches = kBits < 8 || (kRows > 1 && T::kPieceQuads > kBlockQuads);
  const Panel& panel = s.panel;
  // Where registers are so few that vectors are short, a second way out costs more than the questions.
  constexpr bool kTwoWays = T::kWidth == kLanes;
  const bool usual = kTwoWays && panel.zero == nullptr && !s.raw && !s.scale_each;
  alignas(64) int32_t carried[kRows][kPanel];
  for (int v = 0; v < Vectors<T>() * kRows; ++v) {
    T::StoreI(static_cast<int32_t*>(s.out) + v * T::kWidth, T::SetI(0));
  }
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t begin = panel.segment_quads[segment], end = panel.segment_quads[segment + 1];
    const int64_t group = panel.segment_group[segment];
    for (int64_t from = begin; from < end; from += T::kPieceQuads) {
      const int64_t to = end - from < T::kPieceQuads ? end : from + T::kPieceQuads;
      for (int v = 0; v < Vectors<T>(); v += kN) {
        typename T::I sum[kRows][kN];
        FEWBIT_UNROLL
        for (int m = 0; m < kRows; ++m) {
          FEWBIT_UNROLL
          for (int j = 0; j < kN; ++j) {
            sum[m][j] = from == begin ? T::SetI(0) : T::LoadI(carried[m] + (v + j) * T::kWidth);
          }
        }
        const uint8_t* block = panel.data + from / kBlockQuads * kBlockBytes + v * T::kWidth * 4;
        const int32_t* a = s.a + from * kWords;
        for (int64_t q = from; q < to;) {
          if (q % kBlockQuads == 0) {
            if (kFetches && v == 0) {
              FetchAhead<kBlockBytes>(block);
            }
            IntUnit<T, kBits, kRows, kN, 0>(block, a, s.a_stride, sum);
            q += 4, a += 4 * kWords;
          }
          if (q < to) {
            IntUnit<T, kBits, kRows, kN, 4>(block, a, s.a_stride, sum);
            q += 4, a += 4 * kWords, block += kBlockBytes;
          }
        }
        if (to < end) {
          FEWBIT_UNROLL
          for (int m = 0; m < kRows; ++m) {
            FEWBIT_UNROLL
            for (int j = 0; j < kN; ++j) {
              T::StoreI(carried[m] + (v + j) * T::kWidth, sum[m][j]);
            }
          }
          continue;
        }
        if (usual) {
          AddUsual<T, kRows, kN>(s, segment, v, sum);
          continue;
        }
        FEWBIT_UNROLL  // or the sums would have to lie in memory
        for (int j = 0; j < kN; ++j) {
          const int column = (v + j) * T::kWidth;
          const typename T::F scale =
              kTwoWays ? Scale<T>(panel, group, v + j) : UsualScale<T>(panel, group, v + j);
          FEWBIT_UNROLL
          for (int m = 0; m < kRows; ++m) {
            typename T::I zeros = T::SetI(s.sums[m * panel.segments + segment]);
            if (panel.zero != nullptr) {
              zeros = T::MulI(zeros, T::LoadBytes(panel.zero + group * kPanel + column));
            }
            const typename T::I exact = T::AddI(sum[m][j], zeros);
            if (s.raw) {
              T::StoreI(static_cast<int32_t*>(s.out) + m * kPanel + column, exact);
              continue;
            }
            typename T::F part = T::ToFloat(exact);
            if (s.scale_each) {
              part = T::MulF(part, T::SetF(s.a_scale[m * s.a_scale_stride + group]));
            }
            float* out = static_cast<float*>(s.out) + m * kPanel + column;
            T::StoreF(out, T::Fma(part, scale, T::LoadF(out)));
          }
        }
      }
    }
  }
}

template <class T, int kBits, int kRows>
void StreamIntRows(const StreamInt& s) {
  if constexpr (T::kWholePanels) {
    StreamIntPanel<T, kBits, kRows, false>(s);
  } else {
    StreamIntPasses<typename T::Stream, kBits, kRows>(s);
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_STREAM_INT_H_
