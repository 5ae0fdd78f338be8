// Many rows: panels unpacked into scratch, tiles of rows over it, and the packing of activations.
// Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_MATMUL_TILES_H_
#define FEWBIT_NATIVE_MATMUL_TILES_H_

#include "matmul/decode.h"

namespace fewbit {
namespace {

template <class T, int kDecoding, int kFirst>
FEWBIT_INLINE void FloatsOfUnit(const uint8_t* block, const Meaning<T, kDecoding>& meaning,
                                typename T::F scale, float* out) {
  constexpr int kColumns = T::kFloatVectors * kLanes;
  FEWBIT_UNROLL
  for (int q = 0; q < 4; ++q) {
    const typename T::I quad = Quad<T, BitsOf(kDecoding)>(block, kFirst + q);
    FEWBIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      T::StoreF(out + (q * 4 + i) * kColumns,
                T::MulF(Value<T, kDecoding>(quad, i, meaning), scale));
    }
  }
}

template <class T, int kDecoding>
void UnpackFloat(const Unpack& u) {
  constexpr int64_t kBlockBytes = BitsOf(kDecoding) * kPanel * 4;
  constexpr int kColumns = T::kFloatVectors * kLanes;
  const Panel& panel = u.panel;
  const int64_t first = panel.segment_quads[0];
  const int64_t length = (panel.segment_quads[panel.segments] - first) * 4;
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t from = panel.segment_quads[segment], to = panel.segment_quads[segment + 1];
    const int64_t group = panel.segment_group[segment];
    for (int v = 0; v < kVectors; ++v) {
      const Meaning<T, kDecoding> meaning = MeaningOf<T, kDecoding>(panel, group, v);
      const typename T::F scale = Scale<T>(panel, group, v);
      float* out = u.floats + v / T::kFloatVectors * length * kColumns +
                   v % T::kFloatVectors * kLanes + (from - first) * 4 * kColumns;
      const uint8_t* block = panel.data + from / kBlockQuads * kBlockBytes + v * kLanes * 4;
      for (int64_t q = from; q < to;) {
        if (q % kBlockQuads == 0) {
          FloatsOfUnit<T, kDecoding, 0>(block, meaning, scale, out);
          q += 4, out += 16 * kColumns;
        }
        if (q < to) {
          FloatsOfUnit<T, kDecoding, 4>(block, meaning, scale, out);
          q += 4, out += 16 * kColumns, block += kBlockBytes;
        }
      }
    }
  }
}

template <class T, int kBits>
void UnpackInt(const Unpack& u) {
  constexpr int64_t kBlockBytes = kBits * kPanel * 4;
  constexpr int kVectorWords = T::Words(kBits) * kLanes;
  constexpr int kQuadWords = T::kIntVectors * kVectorWords;
  const Panel& panel = u.panel;
  const int64_t first = panel.segment_quads[0], last = panel.segment_quads[panel.segments];
  if (u.words != nullptr) {
    // Pieces of the integer path start at a block, or in the middle of one at a half group. Four quads
    // of all columns at a time: both sides are passed over from front to back.
    for (int64_t q = first; q < last; q += 4) {
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* block = panel.data + q / kBlockQuads * kBlockBytes + v * kLanes * 4;
        int32_t* out = u.words + v / T::kIntVectors * (last - first) * kQuadWords +
                       v % T::kIntVectors * kVectorWords + (q - first) * kQuadWords;
        if (q % kBlockQuads == 0) {
          FEWBIT_UNROLL
          for (int r = 0; r < 4; ++r, out += kQuadWords) {
            T::template Keep<kBits>(out, Quad<T, kBits>(block, r));
          }
        } else {
          FEWBIT_UNROLL
          for (int r = 4; r < 8; ++r, out += kQuadWords) {
            T::template Keep<kBits>(out, Quad<T, kBits>(block, r));
          }
        }
      }
    }
  }
  for (int64_t segment = 0; segment < panel.segments; ++segment) {
    const int64_t group = panel.segment_group[segment];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = segment * kPanel + v * kLanes;
      T::StoreF(u.scales + at, Scale<T>(panel, group, v));
      if (panel.zero != nullptr) {
        T::StoreI(u.zeros + at, T::LoadBytes(panel.zero + group * kPanel + v * kLanes));
      }
    }
  }
}

template <class T, int kRows>
void TileFloatRows(const TileFloat& t) {
  constexpr int kN = T::kFloatVectors;
  typename T::F sum[kRows][kN];
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      sum[m][j] = T::SetF(0.0f);
    }
  }
  const float* a = t.a;
  const float* b = t.b;
  for (int64_t k = 0; k < t.length; ++k, a += kRows, b += kN * kLanes) {
    typename T::F w[kN];
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      w[j] = T::LoadF(b + j * kLanes);
    }
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const typename T::F x = T::SetF(a[m]);
      FEWBIT_UNROLL
      for (int j = 0; j < kN; ++j) {
        sum[m][j] = T::Fma(x, w[j], sum[m][j]);
      }
    }
  }
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      float* c = t.c + m * kPanel + j * kLanes;
      T::StoreF(c, t.first ? sum[m][j] : T::AddF(sum[m][j], T::LoadF(c)));
    }
  }
}

// Adds the products of `quads` quads to the sums, and moves a and b behind them.
template <class T, int kBits, int kRows, int kN>
FEWBIT_INLINE void AddProducts(int64_t quads, const int32_t*& a, const int32_t*& b,
                               typename T::I (&sum)[kRows][kN]) {
  constexpr int kSpan = T::Span(kBits);
  if constexpr (kSpan == 0) {
    // Word by word, not quad by quad: the sums and one word of weights fill the registers.
    for (int64_t step = quads * T::Words(kBits); step > 0; --step, a += kRows, b += kN * kLanes) {
      typename T::I w[kN];
      FEWBIT_UNROLL
      for (int j = 0; j < kN; ++j) {
        w[j] = T::LoadI(b + j * kLanes);
      }
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          sum[m][j] = T::DotWord(sum[m][j], w[j], a[m]);
        }
      }
    }
  } else {
    // Sums of 16 bits fill the registers; the 32-bit ones wait in memory.
    while (quads > 0) {
      const int64_t turn = quads < kSpan ? quads : kSpan;
      typename T::I narrow[kRows][kN];
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          narrow[m][j] = T::SetI(0);
        }
      }
      for (int64_t r = 0; r < turn; ++r, a += kRows, b += kN * kLanes) {
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          const typename T::I w = T::LoadI(b + j * kLanes);
          FEWBIT_UNROLL
          for (int m = 0; m < kRows; ++m) {
            narrow[m][j] = T::AddShorts(narrow[m][j], T::DotNarrow(w, a[m]));
          }
        }
      }
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          sum[m][j] = T::AddWidened(sum[m][j], narrow[m][j]);
        }
      }
      quads -= turn;
    }
  }
}

// A finished segment: its sums, corrected and scaled, are added to c. kPlain: nothing but that,
// with zeros that are shared and activation scales that come later.
template <class T, int kRows, int kN, bool kPlain>
FEWBIT_INLINE void AddSegment(const TileInt& t, int64_t segment,
                              const typename T::I (&sum)[kRows][kN]) {
  const bool first = t.first && segment == 0;
  FEWBIT_UNROLL
  for (int j = 0; j < kN; ++j) {
    const int64_t at = segment * kPanel + j * kLanes;
    const typename T::F scale = T::LoadF(t.scales + at);
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      typename T::I zeros = T::SetI(t.sums[m * t.sums_stride + segment]);
      if (!kPlain && t.zeros != nullptr) {
        zeros = T::MulI(zeros, T::LoadI(t.zeros + at));
      }
      const typename T::I exact = T::AddI(sum[m][j], zeros);
      if (!kPlain && t.raw) {
        T::StoreI(t.partial + m * kPanel + j * kLanes, exact);
        continue;
      }
      typename T::F part = T::ToFloat(exact);
      if (!kPlain && t.scale_each) {
        part = T::MulF(part, T::SetF(t.a_scale[m * t.a_scale_stride + t.segment_group[segment]]));
      }
      float* c = t.c + m * t.c_stride + j * kLanes;
      T::StoreF(c, T::Fma(part, scale, first ? T::SetF(0.0f) : T::LoadF(c)));
    }
  }
}

template <class T, int kBits, int kRows>
void TileIntRows(const TileInt& t) {
  constexpr int kN = T::kIntVectors;
  const bool plain = t.zeros == nullptr && !t.raw && !t.scale_each;
  const int32_t* a = t.a;
  const int32_t* b = t.b;
  for (int64_t segment = 0; segment < t.segments; ++segment) {
    typename T::I sum[kRows][kN];
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      FEWBIT_UNROLL
      for (int j = 0; j < kN; ++j) {
        sum[m][j] = t.resume ? T::LoadI(t.partial + m * kPanel + j * kLanes) : T::SetI(0);
      }
    }
    AddProducts<T, kBits>(t.segment_quads[segment], a, b, sum);
    if (t.unfinished) {
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          T::StoreI(t.partial + m * kPanel + j * kLanes, sum[m][j]);
        }
      }
    } else if (plain) {
      AddSegment<T, kRows, kN, true>(t, segment, sum);
    } else {
      AddSegment<T, kRows, kN, false>(t, segment, sum);
    }
  }
}

// Short groups, where the results of a tile fit the registers beside its sums: some vectors of a
// strip at a time.
template <class T, int kRows, bool kOwnZeros, bool kScaleEach>
FEWBIT_INLINE void TileGroupVectors(const TileInt& t, int v) {
  constexpr int kN = T::kGroupVectors;
  constexpr int kUnroll = 2;  // every segment is a multiple of 4 quads long
  const int32_t* a = t.a;
  const int32_t* b = t.b + v * kLanes;
  typename T::F total[kRows][kN];
  FEWBIT_UNROLL
  for (int i = 0; i < kRows * kN; ++i) {
    const float* c = t.c + i / kN * t.c_stride + (v + i % kN) * kLanes;
    total[i / kN][i % kN] = t.first ? T::SetF(0.0f) : T::LoadF(c);
  }
  for (int64_t segment = 0; segment < t.segments; ++segment) {
    const int32_t* sums = t.sums + segment;
    const float* a_scale = t.a_scale + (kScaleEach ? t.segment_group[segment] : 0);
    typename T::I sum[kRows][kN];
    FEWBIT_UNROLL
    for (int i = 0; i < kRows * kN; ++i) {
      const int32_t zeros = kOwnZeros ? 0 : sums[i / kN * t.sums_stride];
      sum[i / kN][i % kN] = T::SetI(zeros);
    }
    for (int64_t q = t.segment_quads[segment]; q > 0; q -= kUnroll) {
      FEWBIT_UNROLL
      for (int u = 0; u < kUnroll; ++u, a += kRows, b += T::kIntVectors * kLanes) {
        typename T::I w[kN];
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          w[j] = T::LoadI(b + j * kLanes);
        }
        FEWBIT_UNROLL
        for (int i = 0; i < kRows * kN; ++i) {
          sum[i / kN][i % kN] = T::DotWord(sum[i / kN][i % kN], w[i % kN], a[i / kN]);
        }
      }
    }
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      const int64_t at = segment * kPanel + (v + j) * kLanes;
      const typename T::F scale = T::LoadF(t.scales + at);
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        if (kOwnZeros) {
          const typename T::I zeros = T::SetI(sums[m * t.sums_stride]);
          sum[m][j] = T::AddI(sum[m][j], T::MulI(zeros, T::LoadI(t.zeros + at)));
        }
        typename T::F part = T::ToFloat(sum[m][j]);
        if (kScaleEach) {
          part = T::MulF(part, T::SetF(a_scale[m * t.a_scale_stride]));
        }
        total[m][j] = T::Fma(part, scale, total[m][j]);
      }
    }
  }
  FEWBIT_UNROLL
  for (int i = 0; i < kRows * kN; ++i) {
    T::StoreF(t.c + i / kN * t.c_stride + (v + i % kN) * kLanes, total[i / kN][i % kN]);
  }
}

template <class T, int kRows>
void TileGroupRows(const TileInt& t) {
  for (int v = 0; v < T::kIntVectors; v += T::kGroupVectors) {
    if (t.zeros != nullptr) {
      t.scale_each ? TileGroupVectors<T, kRows, true, true>(t, v)
                   : TileGroupVectors<T, kRows, true, false>(t, v);
    } else {
      t.scale_each ? TileGroupVectors<T, kRows, false, true>(t, v)
                   : TileGroupVectors<T, kRows, false, false>(t, v);
    }
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_TILES_H_
