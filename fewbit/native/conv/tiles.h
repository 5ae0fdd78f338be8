// The kernels of convolutions, written once over an instruction set `T` (isa_*.h) and compiled in
// one unit per set. Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_CONV_TILES_H_
#define FEWBIT_NATIVE_CONV_TILES_H_

#include "conv/kernels.h"
#include "matmul/decode.h"
#include "codes/quantize_codes.h"

namespace fewbit {
namespace {

// Adds the products of `quads` quads of one tap, and moves b behind them.
template <class T, int kBits, int kRows, int kN>
FEWBIT_INLINE void AddTap(int64_t quads, const int32_t* const (&a)[kRows], const int32_t*& b,
                          typename T::I (&sum)[kRows][kN]) {
  constexpr int kSpan = T::Span(kBits);
  if constexpr (kSpan == 0) {
    const int64_t steps = quads * T::Words(kBits);
    for (int64_t step = 0; step < steps; ++step, b += kN * kLanes) {
      typename T::I w[kN];
      FEWBIT_UNROLL
      for (int j = 0; j < kN; ++j) {
        w[j] = T::LoadI(b + j * kLanes);
      }
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          sum[m][j] = T::DotWord(sum[m][j], w[j], a[m][step]);
        }
      }
    }
  } else {
    // Sums of 16 bits fill the registers; the 32-bit ones wait in memory.
    for (int64_t from = 0; from < quads; from += kSpan) {
      const int64_t to = quads - from < kSpan ? quads : from + kSpan;
      typename T::I narrow[kRows][kN];
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          narrow[m][j] = T::SetI(0);
        }
      }
      for (int64_t step = from; step < to; ++step, b += kN * kLanes) {
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          const typename T::I w = T::LoadI(b + j * kLanes);
          FEWBIT_UNROLL
          for (int m = 0; m < kRows; ++m) {
            narrow[m][j] = T::AddShorts(narrow[m][j], T::DotNarrow(w, a[m][step]));
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
    }
  }
}

template <class T, int kBits, int kRows>
void ConvTileIntRows(const ConvTileInt& t) {
  constexpr int kN = T::kIntVectors;
  typename T::I sum[kRows][kN];
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      sum[m][j] = t.first ? T::SetI(0) : T::LoadI(t.sums + m * kPanel + j * kLanes);
    }
  }
  const int32_t* const* taps = t.taps;
  const int32_t* b = t.b;
  int64_t skip = t.skip;
  for (int64_t left = t.quads; left > 0; taps += kRows) {
    const int64_t rest = t.tap_quads - skip;
    const int64_t quads = rest < left ? rest : left;
    const int32_t* a[kRows];
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      a[m] = taps[m] + skip * T::Words(kBits);
    }
    AddTap<T, kBits, kRows, kN>(quads, a, b, sum);
    left -= quads;
    skip = 0;
  }
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      T::StoreI(t.sums + m * kPanel + j * kLanes, sum[m][j]);
    }
  }
}

template <class T, int kRows>
void ConvTileFloatRows(const ConvTileFloat& t) {
  constexpr int kN = T::kFloatVectors;
  typename T::F sum[kRows][kN];
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      sum[m][j] = t.first ? T::SetF(0.0f) : T::LoadF(t.sums + m * t.stride + j * kLanes);
    }
  }
  const float* const* taps = t.taps;
  const float* b = t.b;
  int64_t skip = t.skip;
  for (int64_t left = t.length; left > 0; taps += kRows) {
    const int64_t rest = t.tap_length - skip;
    const int64_t length = rest < left ? rest : left;
    const float* a[kRows];
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      a[m] = taps[m] + skip;
    }
    for (int64_t k = 0; k < length; ++k, b += kN * kLanes) {
      typename T::F w[kN];
      FEWBIT_UNROLL
      for (int j = 0; j < kN; ++j) {
        w[j] = T::LoadF(b + j * kLanes);
      }
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const typename T::F x = T::SetF(a[m][k]);
        FEWBIT_UNROLL
        for (int j = 0; j < kN; ++j) {
          sum[m][j] = T::Fma(x, w[j], sum[m][j]);
        }
      }
    }
    left -= length;
    skip = 0;
  }
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      T::StoreF(t.sums + m * t.stride + j * kLanes, sum[m][j]);
    }
  }
}

template <class T, int kOutputs>
void ChannelTileOutputs(const ChannelTile& t) {
  typename T::F sum[kOutputs];
  FEWBIT_UNROLL
  for (int p = 0; p < kOutputs; ++p) {
    sum[p] = T::SetF(0.0f);
  }
  const float* w = t.w;
  for (int64_t y = 0; y < t.taps_y; ++y) {
    for (int64_t x = 0; x < t.taps_x; ++x) {
      const float* at = t.x + y * t.step_y + x * t.step_x;
      for (int64_t i = 0; i < t.depth; ++i, at += kLanes, w += kLanes) {
        const typename T::F weight = T::LoadF(w);
        FEWBIT_UNROLL
        for (int p = 0; p < kOutputs; ++p) {
          sum[p] = T::Fma(T::LoadF(at + p * t.step_out), weight, sum[p]);
        }
      }
    }
  }
  FEWBIT_UNROLL
  for (int p = 0; p < kOutputs; ++p) {
    T::StoreF(t.out + p * kLanes, sum[p]);
  }
}

void FloatsOfLine(const ChannelLine& line) {
  float* out = line.out;
  for (int64_t p = 0; p < line.pixels; ++p, out += kLanes) {
    if (line.codes == nullptr) {
      std::memcpy(out, line.floats + p * line.stride, kLanes * sizeof(float));
      continue;
    }
    const int8_t* codes = line.codes + p * line.stride;
    for (int lane = 0; lane < kLanes; ++lane) {
      out[lane] = static_cast<float>(codes[lane]);
    }
  }
}

template <class T>
void Finish(const ConvFinish& f) {
  for (int64_t r = 0; r < f.rows; ++r) {
    const int32_t* sums = f.sums + r * kPanel;
    float* out = f.out + r * f.stride;
    const typename T::I zero = T::SetI(f.zeros[r]);
    const typename T::F row_scale = T::SetF(f.row_scales[r]);
    for (int64_t column = 0; column < f.columns; column += kLanes) {
      const typename T::F exact = T::ToFloat(T::SubI(T::LoadI(sums + column), zero));
      const typename T::F value =
          T::MulF(T::MulF(exact, row_scale), T::LoadF(f.scales + column));
      const int64_t left = f.columns - column;
      if (left >= kLanes) {
        T::StoreF(out + column, value);
      } else {
        float rest[kLanes];
        T::StoreF(rest, value);
        std::memcpy(out + column, rest, static_cast<size_t>(left) * sizeof(float));
      }
    }
  }
}

// Codes 0 and 2, then 1 and 3 of a quad as pairs of 16-bit numbers.
void WidenCodes(const int8_t* codes, int64_t quads, int32_t* words) {
  int16_t* out = reinterpret_cast<int16_t*>(words);
  for (int64_t q = 0; q < quads; ++q, codes += 4, out += 4) {
    out[0] = codes[0];
    out[1] = codes[2];
    out[2] = codes[1];
    out[3] = codes[3];
  }
}

int32_t SumOfCodes(const int8_t* codes, int64_t count) {
  int32_t sum = 0;
  for (int64_t k = 0; k < count; ++k) {
    sum += codes[k];
  }
  return sum;
}

int32_t Largest(const float* x, int64_t count) { return LargestBits(x, count); }

void Quantize(const QuantizePart& p) {
  CodesOf(p.x, p.count, p.scale, p.divide, p.round_to_bf16, p.codes);
}

// Codes of few bits share a kernel where only the width of the sums counts.
template <class T>
constexpr int SumsLike(int bits) {
  if (T::Span(bits) == T::Span(8) && T::Words(bits) == T::Words(8)) {
    return 8;
  }
  return bits < 4 && T::Span(bits) == T::Span(4) ? 4 : bits;
}

#define FEWBIT_CONV_TILES(bits)                                                            \
  {                                                                                        \
    ConvTileIntRows<T, SumsLike<T>(bits), 1>, ConvTileIntRows<T, SumsLike<T>(bits), 2>,    \
        ConvTileIntRows<T, SumsLike<T>(bits), (T::kIntRows > 2 ? 3 : 1)>,                  \
        ConvTileIntRows<T, SumsLike<T>(bits), (T::kIntRows > 3 ? 4 : 1)>,                  \
        ConvTileIntRows<T, SumsLike<T>(bits), (T::kIntRows > 4 ? 5 : 1)>,                  \
        ConvTileIntRows<T, SumsLike<T>(bits), (T::kIntRows > 5 ? 6 : 1)>                   \
  }

template <class T>
constexpr ConvKernels MakeConvKernels() {
  return ConvKernels{
      {FEWBIT_CONV_TILES(1), FEWBIT_CONV_TILES(2), FEWBIT_CONV_TILES(3), FEWBIT_CONV_TILES(4),
       FEWBIT_CONV_TILES(5), FEWBIT_CONV_TILES(6), FEWBIT_CONV_TILES(7), FEWBIT_CONV_TILES(8)},
      {ConvTileFloatRows<T, 1>, ConvTileFloatRows<T, 2>,
       ConvTileFloatRows<T, (T::kFloatRows > 2 ? 3 : 1)>,
       ConvTileFloatRows<T, (T::kFloatRows > 3 ? 4 : 1)>,
       ConvTileFloatRows<T, (T::kFloatRows > 4 ? 5 : 1)>,
       ConvTileFloatRows<T, (T::kFloatRows > 5 ? 6 : 1)>},
      {ChannelTileOutputs<T, 1>, ChannelTileOutputs<T, 2>,
       ChannelTileOutputs<T, (T::kFloatRows > 2 ? 3 : 1)>,
       ChannelTileOutputs<T, (T::kFloatRows > 3 ? 4 : 1)>,
       ChannelTileOutputs<T, (T::kFloatRows > 4 ? 5 : 1)>,
       ChannelTileOutputs<T, (T::kFloatRows > 5 ? 6 : 1)>},
      FloatsOfLine,
      Finish<T>,
      WidenCodes,
      SumOfCodes,
      Largest,
      Quantize,
  };
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CONV_TILES_H_
