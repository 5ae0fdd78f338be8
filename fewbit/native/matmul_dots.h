// The transposed product g · Wᵀ: columns are summed, and they are what lies along the lanes. So a
// sum stays a vector of lanes for each k, added up at its end, and nothing is ever transposed.
// Internal linkage only, as in matmul_stream.h.

#ifndef FEWBIT_NATIVE_MATMUL_DOTS_H_
#define FEWBIT_NATIVE_MATMUL_DOTS_H_

#include "matmul_stream.h"

namespace fewbit {
namespace {

// Four quads, the half block that starts at quad kFirst, of the 64 columns. `g` has the scales in.
template <class T, int kDecoding, int kRows, int kFirst>
FEWBIT_INLINE void DotsOfUnit(const uint8_t* block, const float (*g)[kPanel],
                              const Meaning<T, kDecoding>* meaning, float* sums,
                              int64_t row_stride) {
  constexpr int kAtOnce = kRows < T::kDotRows ? 4 : 2;  // k whose sums fit the registers
  FEWBIT_UNROLL
  for (int q = 0; q < 4; ++q) {
    FEWBIT_UNROLL
    for (int from = 0; from < 4; from += kAtOnce) {
      float* at = sums + (q * 4 + from) * T::kDotLanes;
      typename T::D sum[kRows][kAtOnce];
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        FEWBIT_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          sum[m][i] = T::LoadD(at + m * row_stride + i * T::kDotLanes);
        }
      }
      FEWBIT_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const typename T::I quad = Quad<T, BitsOf(kDecoding)>(block + v * kLanes * 4, kFirst + q);
        FEWBIT_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          const typename T::F w =
              Value<T, kDecoding>(quad, from + i, meaning[kDecoding == kTable4 ? 0 : v]);
          FEWBIT_UNROLL
          for (int m = 0; m < kRows; ++m) {
            sum[m][i] = T::AddDot(sum[m][i], T::LoadF(g[m] + v * kLanes), w);
          }
        }
      }
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        FEWBIT_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          T::StoreD(at + m * row_stride + i * T::kDotLanes, sum[m][i]);
        }
      }
    }
  }
}

template <class T, int kDecoding, int kRows>
void StreamDotsRows(const StreamDots& s) {
  constexpr int64_t kBlockBytes = BitsOf(kDecoding) * kPanel * 4;
  constexpr int kHalfBlock = 16 * T::kDotLanes;
  const Panel& panel = s.panel;
  const int64_t row_stride = s.quads * 4 * T::kDotLanes;
  float* sums = s.sums;
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t from = panel.segment_quads[segment], to = panel.segment_quads[segment + 1];
    const int64_t group = panel.segment_group[segment];
    alignas(64) float g[kRows][kPanel];
    Meaning<T, kDecoding> meaning[kVectors];
    FEWBIT_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      meaning[v] = MeaningOf<T, kDecoding>(panel, group, v);
      const typename T::F scale = Scale<T>(panel, group, v);
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const typename T::F row = T::LoadF(s.g + m * s.g_stride + v * kLanes);
        T::StoreF(g[m] + v * kLanes, T::MulF(row, scale));
      }
    }
    const uint8_t* block = panel.data + from / kBlockQuads * kBlockBytes;
    for (int64_t q = from; q < to;) {
      if (q % kBlockQuads == 0) {
        DotsOfUnit<T, kDecoding, kRows, 0>(block, g, meaning, sums, row_stride);
        q += 4, sums += kHalfBlock;
      }
      if (q < to) {
        DotsOfUnit<T, kDecoding, kRows, 4>(block, g, meaning, sums, row_stride);
        q += 4, sums += kHalfBlock, block += kBlockBytes;
      }
    }
  }
}

template <class T>
void AddLanes(const float* sums, int64_t quads, float* out) {
  for (int64_t q = 0; q < quads; ++q, sums += 4 * T::kDotLanes, out += 4) {
    typename T::D sum[4];
    FEWBIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      sum[i] = T::LoadD(sums + i * T::kDotLanes);
    }
    T::Totals(sum, out);
  }
}

template <class T, int kDecoding, int kFirst>
FEWBIT_INLINE void PartsOfUnit(const uint8_t* block, const Meaning<T, kDecoding>& meaning,
                               typename T::F scale, float* out, int64_t quad_stride) {
  FEWBIT_UNROLL
  for (int q = 0; q < 4; ++q) {
    const typename T::I quad = Quad<T, BitsOf(kDecoding)>(block, kFirst + q);
    FEWBIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      T::StoreParts(out + q * quad_stride + i * T::kDotLanes, 4 * T::kDotLanes,
                    T::MulF(Value<T, kDecoding>(quad, i, meaning), scale));
    }
  }
}

template <class T, int kDecoding>
void UnpackDotsOf(const UnpackDots& u) {
  constexpr int64_t kBlockBytes = BitsOf(kDecoding) * kPanel * 4;
  const Panel& panel = u.panel;
  const int64_t first = panel.segment_quads[0];
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t from = panel.segment_quads[segment], to = panel.segment_quads[segment + 1];
    const int64_t group = panel.segment_group[segment];
    for (int v = 0; v < kVectors; ++v) {
      const Meaning<T, kDecoding> meaning = MeaningOf<T, kDecoding>(panel, group, v);
      const typename T::F scale = Scale<T>(panel, group, v);
      float* out = u.floats + (from - first) * u.quad_stride + v * kLanes * 4;
      const uint8_t* block = panel.data + from / kBlockQuads * kBlockBytes + v * kLanes * 4;
      for (int64_t q = from; q < to;) {
        if (q % kBlockQuads == 0) {
          PartsOfUnit<T, kDecoding, 0>(block, meaning, scale, out, u.quad_stride);
          q += 4, out += 4 * u.quad_stride;
        }
        if (q < to) {
          PartsOfUnit<T, kDecoding, 4>(block, meaning, scale, out, u.quad_stride);
          q += 4, out += 4 * u.quad_stride, block += kBlockBytes;
        }
      }
    }
  }
}

template <class T, int kRows>
void TileDotsRows(const TileDots& t) {
  typename T::D sum[kRows][4];
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      sum[m][i] = T::ZeroD();
    }
  }
  const float* a = t.a;
  const float* b = t.b;
  for (int64_t step = 0; step < t.steps; ++step) {
    typename T::D g[kRows];
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      g[m] = T::LoadD(a + m * T::kDotLanes);
    }
    FEWBIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const typename T::D w = T::LoadD(b + i * T::kDotLanes);
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        sum[m][i] = T::FmaD(g[m], w, sum[m][i]);
      }
    }
    a += kRows * T::kDotLanes, b += 4 * T::kDotLanes;
  }
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    float total[4];
    T::Totals(sum[m], total);
    for (int i = 0; i < 4; ++i) {
      t.c[m * kBlock + i] += total[i];
    }
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_DOTS_H_
