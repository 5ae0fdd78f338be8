// The transposed product g · Wᵀ: columns are summed, and they are what lies along the lanes.
// So a sum stays a vector of lanes for each k, added up at its end, and nothing is transposed.
// Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_MATMUL_DOTS_H_
#define FEWBIT_NATIVE_MATMUL_DOTS_H_

#include "matmul/decode.h"

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

// 4-bit tables where the instruction set has its own way: `sums` is [rows][quads][dot_lanes].
template <class T, int kRows>
void StreamTableDots(const StreamDots& s) {
  const Panel& panel = s.panel;
  const typename T::WideTable table(panel);
  float* sums = s.sums;
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t from = panel.segment_quads[segment], to = panel.segment_quads[segment + 1];
    alignas(64) float spread[kRows][kPanel * 4];
    for (int m = 0; m < kRows; ++m) {
      alignas(64) float g[kPanel];
      for (int v = 0; v < kVectors; ++v) {
        const typename T::F row = T::LoadF(s.g + m * s.g_stride + v * kLanes);
        T::StoreF(g + v * kLanes, T::MulF(row, Scale<T>(panel, panel.segment_group[segment], v)));
      }
      T::SpreadColumns(g, spread[m]);
    }
    for (int64_t q = from; q < to; q += 2, sums += 2 * T::kDotLanes) {
      T::template AddTableDots<kRows>(table, panel.data + q / 2 * kPanel * 4, spread, sums,
                                      s.quads * T::kDotLanes);
    }
  }
}

template <class T, int kDecoding, int kRows>
void StreamDotsRows(const StreamDots& s) {
  if constexpr (T::kOwnTableDots && kDecoding == kTable4) {
    StreamTableDots<T, kRows>(s);
    return;
  }
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

template <class T, int kDecoding>
void AddLanes(const float* sums, int64_t quads, float* out) {
  if constexpr (T::kOwnTableDots && kDecoding == kTable4) {
    for (int64_t q = 0; q < quads; ++q) {
      T::AddTableTotals(sums + q * T::kDotLanes, out + q * 4);
    }
    return;
  }
  for (int64_t q = 0; q < quads; ++q, sums += 4 * T::kDotLanes, out += 4) {
    typename T::D sum[4];
    FEWBIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      sum[i] = T::LoadD(sums + i * T::kDotLanes);
    }
    T::AddTotals(sum, out);
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

// The steps of a panel at a time, so that the end of the loop is foreseen by the CPU.
template <class T, int kRows>
void TileDotsRows(const TileDots& t) {
  constexpr int kSteps = kPanel / T::kDotLanes;
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
  for (int64_t panel = 0; panel < t.panels; ++panel) {
    FEWBIT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      typename T::D g[kRows];
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        g[m] = T::LoadD(a + (step * kRows + m) * T::kDotLanes);
      }
      FEWBIT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const typename T::D w = T::LoadD(b + (step * 4 + i) * T::kDotLanes);
        FEWBIT_UNROLL
        for (int m = 0; m < kRows; ++m) {
          sum[m][i] = T::FmaD(g[m], w, sum[m][i]);
        }
      }
    }
    a += kPanel * kRows, b += kPanel * 4;
  }
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    T::AddTotals(sum[m], t.c + m * t.c_stride);
  }
}

template <class T, int kDecoding, int kFirst>
FEWBIT_INLINE void TurnedUnit(const uint8_t* block, const Meaning<T, kDecoding>& meaning,
                              typename T::F scale, float* out) {
  FEWBIT_UNROLL
  for (int q = 0; q < 4; ++q) {
    const typename T::I quad = Quad<T, BitsOf(kDecoding)>(block, kFirst + q);
    typename T::F w[4];
    FEWBIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      w[i] = T::MulF(Value<T, kDecoding>(quad, i, meaning), scale);
    }
    T::StoreTurned(out + q * 4, T::kFloatVectors * kLanes, w);
  }
}

template <class T, int kDecoding>
void UnpackTurnedOf(const UnpackTurned& u) {
  constexpr int64_t kBlockBytes = BitsOf(kDecoding) * kPanel * 4;
  constexpr int kColumns = T::kFloatVectors * kLanes;
  const Panel& panel = u.panel;
  const int64_t first = panel.segment_quads[0];
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t from = panel.segment_quads[segment], to = panel.segment_quads[segment + 1];
    const int64_t group = panel.segment_group[segment];
    for (int v = 0; v < kVectors; ++v) {
      const Meaning<T, kDecoding> meaning = MeaningOf<T, kDecoding>(panel, group, v);
      const typename T::F scale = Scale<T>(panel, group, v);
      for (int64_t q = from; q < to; q += 4) {
        const int64_t k = (q - first) * 4;
        const uint8_t* block = panel.data + q / kBlockQuads * kBlockBytes + v * kLanes * 4;
        float* out = u.floats + k / kColumns * u.length * kColumns + k % kColumns +
                     v * kLanes * kColumns;
        if (q % kBlockQuads == 0) {
          TurnedUnit<T, kDecoding, 0>(block, meaning, scale, out);
        } else {
          TurnedUnit<T, kDecoding, 4>(block, meaning, scale, out);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_DOTS_H_
