// Attention over one block of positions, in the compiler's own vectors, compiled once per
// instruction set. Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_ATTENTION_LOOPS_H_
#define FEWBIT_NATIVE_ATTENTION_LOOPS_H_

#include "attention/attention.h"
#include "common/elementwise.h"

namespace fewbit {
namespace {

constexpr int kLanesOfV = 16;
typedef float V __attribute__((vector_size(kLanesOfV * sizeof(float))));
typedef float Half __attribute__((vector_size(sizeof(V) / 2)));
typedef float Quarter __attribute__((vector_size(sizeof(V) / 4)));
constexpr int64_t kHeadsAtOnce = 4;  // sums that fit the registers, and hide each other's latency

inline V LoadV(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void StoreV(float* p, V v) { std::memcpy(p, &v, sizeof v); }

inline V SetV(float x) { return V{} + x; }

// The first or the second half of the lanes.
template <class Part, class Whole>
inline Part PartOf(const Whole& v, int number) {
  Part part;
  std::memcpy(&part, reinterpret_cast<const char*>(&v) + number * sizeof part, sizeof part);
  return part;
}

inline float SumOfLanes(V v) {
  const Half half = PartOf<Half>(v, 0) + PartOf<Half>(v, 1);
  const Quarter four = PartOf<Quarter>(half, 0) + PartOf<Quarter>(half, 1);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

// The products of one key with some query heads; every key is read once.
template <int kHeads>
void Scores(const AttendBlock& b, int64_t first) {
  const float* query = b.query + first * b.dim;
  const int64_t whole = b.dim / kLanesOfV * kLanesOfV;
  for (int64_t i = 0; i < b.count; ++i) {
    const float* key = b.keys + b.positions[i] * b.stride;
    V sums[kHeads] = {};
    for (int64_t d = 0; d < whole; d += kLanesOfV) {
      const V k = LoadV(key + d);
      for (int h = 0; h < kHeads; ++h) {
        sums[h] += LoadV(query + h * b.dim + d) * k;
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      float sum = SumOfLanes(sums[h]);
      for (int64_t d = whole; d < b.dim; ++d) {
        sum += query[h * b.dim + d] * key[d];
      }
      b.scores[(first + h) * kAttentionBlock + i] = sum;
    }
  }
}

// Adds some values, weighted, for some heads. All columns of a few values at a time: so memory is read
// in the order in which it lies, and sums are read and written once for all of them.
template <int kHeads, int kValues>
void WeighSome(const AttendBlock& b, int64_t first, int64_t at) {
  const float* weights = b.scores + first * kAttentionBlock + at;
  float* out = b.out + first * b.dim;
  const float* values[kValues];
  for (int i = 0; i < kValues; ++i) {
    values[i] = b.values + b.positions[at + i] * b.stride;
  }
  int64_t d = 0;
  for (; d + kLanesOfV <= b.dim; d += kLanesOfV) {
    V sums[kHeads];
    for (int h = 0; h < kHeads; ++h) {
      sums[h] = LoadV(out + h * b.dim + d);
    }
    for (int i = 0; i < kValues; ++i) {
      const V value = LoadV(values[i] + d);
      for (int h = 0; h < kHeads; ++h) {
        sums[h] += SetV(weights[h * kAttentionBlock + i]) * value;
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      StoreV(out + h * b.dim + d, sums[h]);
    }
  }
  for (; d < b.dim; ++d) {
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kValues; ++i) {
        out[h * b.dim + d] += weights[h * kAttentionBlock + i] * values[i][d];
      }
    }
  }
}

template <int kHeads>
void Weigh(const AttendBlock& b, int64_t first) {
  constexpr int kValues = 8;
  std::memset(b.out + first * b.dim, 0, static_cast<size_t>(kHeads * b.dim) * sizeof(float));
  int64_t at = 0;
  for (; at + kValues <= b.count; at += kValues) {
    WeighSome<kHeads, kValues>(b, first, at);
  }
  for (; at < b.count; ++at) {
    WeighSome<kHeads, 1>(b, first, at);
  }
}

// Scores become e^(score - largest). Loops of one thing each, over whole vectors: what is behind the
// last score counts as minus infinity.
void Exponentials(const AttendBlock& b, int64_t head) {
  static_assert(kAttentionBlock % kLanesOfV == 0);
  float* scores = b.scores + head * kAttentionBlock;
  const int64_t padded = (b.count + kLanesOfV - 1) / kLanesOfV * kLanesOfV;
  for (int64_t i = 0; i < b.count; ++i) {
    scores[i] *= b.factor;
  }
  for (int64_t i = 0; b.soft_cap != 0.0f && i < b.count; ++i) {
    scores[i] = Tanh(scores[i] / b.soft_cap) * b.soft_cap;
  }
  for (int64_t i = b.count; i < padded; ++i) {
    scores[i] = -__builtin_inff();
  }
  float lanes[kLanesOfV];
  for (int lane = 0; lane < kLanesOfV; ++lane) {
    lanes[lane] = -__builtin_inff();
  }
  for (int64_t i = 0; i < padded; i += kLanesOfV) {
    for (int lane = 0; lane < kLanesOfV; ++lane) {
      const float score = scores[i + lane];
      lanes[lane] = score > lanes[lane] ? score : lanes[lane];
    }
  }
  float largest = -__builtin_inff();
  for (int lane = 0; lane < kLanesOfV; ++lane) {
    largest = lanes[lane] > largest ? lanes[lane] : largest;
  }
  for (int64_t i = 0; i < padded; ++i) {
    scores[i] = ExpOfNegative(scores[i] - largest);
  }
  V total = {};
  for (int64_t i = 0; i < padded; i += kLanesOfV) {
    total += LoadV(scores + i);
  }
  b.largest[head] = largest;
  b.total[head] = SumOfLanes(total);
}

template <int kHeads>
void AttendHeads(const AttendBlock& b, int64_t first) {
  Scores<kHeads>(b, first);
  for (int64_t head = first; head < first + kHeads; ++head) {
    Exponentials(b, head);
  }
  Weigh<kHeads>(b, first);
}

void AttendOneBlock(const AttendBlock& b) {
  for (int64_t first = 0; first < b.heads; first += kHeadsAtOnce) {
    switch (b.heads - first) {
      case 1:
        AttendHeads<1>(b, first);
        break;
      case 2:
        AttendHeads<2>(b, first);
        break;
      case 3:
        AttendHeads<3>(b, first);
        break;
      default:
        AttendHeads<4>(b, first);
    }
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ATTENTION_LOOPS_H_
