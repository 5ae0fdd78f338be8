// Few rows times plain codes: every code is read once, where it lies, and nothing is packed.
// Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_CODES_DIRECT_H_
#define FEWBIT_NATIVE_CODES_DIRECT_H_

#include "matmul/decode.h"

namespace fewbit {
namespace {

constexpr int kChunk = 32;        // k of a column at a time
constexpr int64_t kRowsAtOnce = 32;  // k whose sums stay in registers; an even number

// Columns whose k lie in one piece: a sum of products each. The last chunk of `a` stands for the
// last 32 k, with zeros for those that the chunk before it had; short rows are filled with zeros.
template <class T, int kRows>
void DotColumns(const FewRows& f) {
  alignas(64) int32_t lanes[kRows][kLanes][kLanes] = {};
  alignas(64) int32_t sums[kLanes];
  alignas(64) int8_t filled[kChunk] = {};
  const int64_t whole = f.length / kChunk, first = f.length == 0 ? 0 : f.ks[0];
  const int64_t steps = (f.length + kChunk - 1) / kChunk;
  for (int64_t from = 0; from < f.count; from += kLanes) {
    const int64_t count = f.count - from < kLanes ? f.count - from : kLanes;
    for (int64_t i = 0; i < count; ++i) {
      const int8_t* codes = f.codes + f.columns[from + i] + first;
      typename T::I sum[kRows];
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        sum[m] = T::SetI(0);
      }
      for (int64_t step = 0; step < steps; ++step) {
        const int8_t* chunk = codes + step * kChunk;
        if (step == whole) {
          chunk = codes + f.length - kChunk;
          if (whole == 0) {
            std::memcpy(filled, codes, static_cast<size_t>(f.length));
            chunk = filled;
          }
        }
        const typename T::Wide wide = T::Widen(chunk);
        FEWBIT_UNROLL
        for (int m = 0; m < kRows; ++m) {
          sum[m] = T::DotWide(sum[m], wide, f.a + m * f.a_stride + step * kChunk);
        }
      }
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        T::StoreI(lanes[m][i], sum[m]);
      }
    }
    for (int m = 0; m < kRows; ++m) {
      T::StoreI(sums, T::LaneSums(lanes[m][0]));
      std::memcpy(f.out + m * f.out_stride + from, sums, static_cast<size_t>(count) * 4);
    }
  }
}

// k from `from` to `to` of 16 * kN columns, added to `out` or, for the first ones, stored there.
template <class T, int kRows, int kN>
FEWBIT_INLINE void AddBlock(const FewRows& f, const int8_t* columns, int64_t from, int64_t to,
                            int32_t* out, int64_t stride) {
  typename T::I sum[kRows][kN];
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      sum[m][j] = from == 0 ? T::SetI(0) : T::LoadI(out + m * stride + j * kLanes);
    }
  }
  for (int64_t k = from; k < to; k += 2) {
    // A last k without a partner meets a zero.
    const int8_t* one = columns + f.ks[k];
    const int8_t* two = columns + f.ks[k + 1 < f.length ? k + 1 : k];
    int32_t a[kRows];
    FEWBIT_UNROLL
    for (int m = 0; m < kRows; ++m) {
      std::memcpy(&a[m], f.a + m * f.a_stride + k, 4);
    }
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      const typename T::I pairs = T::Pairs(one + j * kLanes, two + j * kLanes);
      FEWBIT_UNROLL
      for (int m = 0; m < kRows; ++m) {
        sum[m][j] = T::DotPair(sum[m][j], pairs, a[m]);
      }
    }
  }
  FEWBIT_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FEWBIT_UNROLL
    for (int j = 0; j < kN; ++j) {
      T::StoreI(out + m * stride + j * kLanes, sum[m][j]);
    }
  }
}

// Columns side by side: multiples of whole rows of codes are added up. `a` is filled with a zero
// to an even length.
template <class T, int kRows>
void AddRows(const FewRows& f) {
  constexpr int kN = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
  const int8_t* codes = f.codes + f.columns[0];
  if (f.count < kLanes) {
    for (int m = 0; m < kRows; ++m) {
      for (int64_t c = 0; c < f.count; ++c) {
        uint32_t sum = 0;
        for (int64_t k = 0; k < f.length; ++k) {
          sum += static_cast<uint32_t>(f.a[m * f.a_stride + k] * codes[c + f.ks[k]]);
        }
        f.out[m * f.out_stride + c] = static_cast<int32_t>(sum);
      }
    }
    return;
  }
  // The last 16 columns overlap those before them, and are summed apart.
  alignas(64) int32_t last[kRows][kLanes];
  const int64_t end = f.count / kLanes * kLanes;
  for (int64_t from = 0; from < f.length; from += kRowsAtOnce) {
    const int64_t to = from + kRowsAtOnce < f.length ? from + kRowsAtOnce : f.length;
    int64_t c = 0;
    for (; c + kN * kLanes <= end; c += kN * kLanes) {
      AddBlock<T, kRows, kN>(f, codes + c, from, to, f.out + c, f.out_stride);
    }
    for (; c < end; c += kLanes) {
      AddBlock<T, kRows, 1>(f, codes + c, from, to, f.out + c, f.out_stride);
    }
    if (end < f.count) {
      AddBlock<T, kRows, 1>(f, codes + f.count - kLanes, from, to, last[0], kLanes);
    }
  }
  for (int m = 0; m < kRows && end < f.count; ++m) {
    const int64_t rest = f.count - end;
    std::memcpy(f.out + m * f.out_stride + end, last[m] + kLanes - rest,
                static_cast<size_t>(rest) * 4);
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CODES_DIRECT_H_
