// A row of floats to int8 codes, with a scale for each group of its values. Internal linkage only, as
// in matmul/decode.h.

#ifndef FEWBIT_NATIVE_QUANTIZE_ROWS_H_
#define FEWBIT_NATIVE_QUANTIZE_ROWS_H_

#include <algorithm>

#include "matmul/kernels.h"
#include "codes/quantize_codes.h"

namespace fewbit {
namespace {

template <class T>
FEWBIT_INLINE void CodesOfGroup(const QuantizeRow& r, int64_t from, int64_t count, float scale,
                                float per_scale) {
  if (count == 1 || r.round_to_bf16 || scale != scale) {
    CodesOf(r.x + from, count, scale, count == 1, r.round_to_bf16, r.codes + from);
    return;
  }
  const typename T::F factor = T::SetF(per_scale);
  int64_t k = from;
  for (; k + kLanes <= from + count; k += kLanes) {
    T::StoreCodes(r.codes + k, T::MulF(T::LoadF(r.x + k), factor));
  }
  for (; k < from + count; ++k) {
    r.codes[k] = CodeOf(r.x[k] * per_scale);
  }
}

// `first` is a value's number, `groups` at most 16. Ranges of all groups, then all scales, then all
// codes: with a group at a time each step would wait for the one before.
template <class T, class Length>
FEWBIT_INLINE void QuantizeGroups(const QuantizeRow& r, int64_t first, int64_t groups, bool lost,
                                  const Length& length_of) {
  float* scales = r.scales + first / r.group;
  float per_scale[kLanes];
  int32_t largest[kLanes];
  for (int64_t g = 0; g < groups && !r.stored; ++g) {
    largest[g] = LargestBits(r.x + first + g * r.group, length_of(g));
  }
  for (int64_t g = 0; g < groups; ++g) {
    if (!r.stored) {
      scales[g] = ScaleOfLargest(largest[g], r.round_to_bf16);
    } else if (lost) {
      scales[g] = __builtin_nanf("");
    }
    per_scale[g] = 1.0f / scales[g];
  }
  for (int64_t g = 0; g < groups; ++g) {
    CodesOfGroup<T>(r, first + g * r.group, length_of(g), scales[g], per_scale[g]);
  }
}

template <class T>
void QuantizeOneRow(const QuantizeRow& r) {
  constexpr int64_t kShort = 32;  // the shortest usual group: worth loops of a known length
  const bool lost = r.stored && LargestBits(r.x, r.length) > kInfinityBits;
  const int64_t step = r.group * kLanes;
  for (int64_t from = 0; from < r.length; from += step) {
    const int64_t left = std::min(step, r.length - from);
    const int64_t groups = (left + r.group - 1) / r.group;
    if (r.group == kShort && left == step) {
      QuantizeGroups<T>(r, from, kLanes, lost, [](int64_t) { return kShort; });
    } else {
      QuantizeGroups<T>(r, from, groups, lost, [&](int64_t g) {
        return std::min(r.group, left - g * r.group);
      });
    }
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_QUANTIZE_ROWS_H_
