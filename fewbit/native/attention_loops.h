// Attention over one block of positions, in the compiler's own vectors, compiled once per
// instruction set. Internal linkage only, as in matmul_stream.h.

#ifndef FEWBIT_NATIVE_ATTENTION_LOOPS_H_
#define FEWBIT_NATIVE_ATTENTION_LOOPS_H_

#include "attention.h"
#include "elementwise.h"

namespace fewbit {
namespace {

constexpr int kLanesOfV = 16;
typedef float V __attribute__((vector_size(kLanesOfV * sizeof(float))));
constexpr int64_t kHeadsAtOnce = 4;  // sums that fit the registers, and hide each other's latency

inline V LoadV(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void StoreV(float* p, V v) { std::memcpy(p, &v, sizeof v); }

inline V SetV(float x) { return V{} + x; }

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
      float sum = 0.0f;
      for (int lane = 0; lane < kLanesOfV; ++lane) {
        sum += sums[h][lane];
      }
      for (int64_t d = whole; d < b.dim; ++d) {
        sum += query[h * b.dim + d] * key[d];
      }
      b.scores[(first + h) * kAttentionBlock + i] = sum;
    }
  }
}

// The values, weighted, for some heads: as many columns at a time as fit the registers.
template <int kHeads>
void Weigh(const AttendBlock& b, int64_t first) {
  constexpr int kVectors = 2;
  const float* weights = b.scores + first * kAttentionBlock;
  float* out = b.out + first * b.dim;
  int64_t d = 0;
  for (; d + kVectors * kLanesOfV <= b.dim; d += kVectors * kLanesOfV) {
    V sums[kHeads][kVectors] = {};
    for (int64_t i = 0; i < b.count; ++i) {
      const float* value = b.values + b.positions[i] * b.stride + d;
      const V v[kVectors] = {LoadV(value), LoadV(value + kLanesOfV)};
      for (int h = 0; h < kHeads; ++h) {
        const V weight = SetV(weights[h * kAttentionBlock + i]);
        sums[h][0] += weight * v[0];
        sums[h][1] += weight * v[1];
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      StoreV(out + h * b.dim + d, sums[h][0]);
      StoreV(out + h * b.dim + d + kLanesOfV, sums[h][1]);
    }
  }
  for (; d < b.dim; ++d) {
    for (int h = 0; h < kHeads; ++h) {
      float sum = 0.0f;
      for (int64_t i = 0; i < b.count; ++i) {
        sum += weights[h * kAttentionBlock + i] * b.values[b.positions[i] * b.stride + d];
      }
      out[h * b.dim + d] = sum;
    }
  }
}

// Scores become e^(score - largest).
void Exponentials(const AttendBlock& b, int64_t head) {
  float* scores = b.scores + head * kAttentionBlock;
  float largest = -__builtin_inff();
  for (int64_t i = 0; i < b.count; ++i) {
    float score = scores[i] * b.factor;
    if (b.soft_cap != 0.0f) {
      score = Tanh(score / b.soft_cap) * b.soft_cap;
    }
    scores[i] = score;
    largest = score > largest ? score : largest;
  }
  float total = 0.0f;
  for (int64_t i = 0; i < b.count; ++i) {
    scores[i] = ExpOfNegative(scores[i] - largest);
    total += scores[i];
  }
  b.largest[head] = largest;
  b.total[head] = total;
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
