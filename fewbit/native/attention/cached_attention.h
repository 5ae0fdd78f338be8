// Attention of new tokens over a cache of keys and values, which they enter.

#ifndef FEWBIT_NATIVE_CACHED_ATTENTION_H_
#define FEWBIT_NATIVE_CACHED_ATTENTION_H_

#include "attention/attention.h"
#include "common/parallel.h"

namespace fewbit {

struct CachedAttention {
  int64_t batch, fresh, heads, key_heads, dim, length;
  const float* query;       // [batch][fresh][heads][dim]
  const float* key;         // [batch][fresh][key_heads][dim]
  const float* value;
  int64_t start;            // where the first of them stands, at most length - fresh
  const uint8_t* enters;    // [batch][fresh]: which of them enter the cache; null: all
  const uint8_t* mask;      // [batch][fresh][length]: what each may look at
  float factor, soft_cap;   // as in AttendBlock
  float* keys;              // [batch][length][key_heads][dim], the cache
  float* values;
  float* out;               // [batch][fresh][heads][dim]; 0 where nothing may be looked at
};

void RunAttention(void (*attend)(const AttendBlock&), const Workers& workers,
                  const CachedAttention& attention);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CACHED_ATTENTION_H_
