// Attention over some positions of a cache of keys and values. Nothing inline, as in
// matmul/kernels.h.

#ifndef FEWBIT_NATIVE_ATTENTION_H_
#define FEWBIT_NATIVE_ATTENTION_H_

#include <cstdint>

namespace fewbit {

constexpr int64_t kAttentionBlock = 128;  // positions whose softmax is taken together

// Some positions of one key head, for the query heads that share it. What is left of a block are
// sums that still lack their denominator, so that blocks can be put together.
struct AttendBlock {
  const float* query;        // [heads][dim]
  int64_t heads, dim;
  const float* keys;         // [positions], `stride` apart, of [dim]
  const float* values;
  int64_t stride;
  const int32_t* positions;  // those that may be looked at
  int64_t count;             // 1 to kAttentionBlock
  float factor;              // of the scores
  float soft_cap;            // scores become cap * tanh(score / cap); 0: they stay
  float* scores;             // [heads][kAttentionBlock], work space
  float* largest;            // [heads]
  float* total;              // [heads]: sum of e^(score - largest)
  float* out;                // [heads][dim]: values, so weighted
};

void AttendPortable(const AttendBlock& block);
#if defined(__x86_64__)
void AttendAvx2(const AttendBlock& block);
void AttendAvx512(const AttendBlock& block);
#endif

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ATTENTION_H_
