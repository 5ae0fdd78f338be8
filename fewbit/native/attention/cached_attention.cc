#include "attention/cached_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace fewbit {
namespace {

constexpr int64_t kWorthSharing = 1000 * 1000;  // multiplications
constexpr int64_t kSpan = 512;                  // positions that one thread takes at a time

void EnterTokens(const CachedAttention& a) {
  const int64_t line = a.key_heads * a.dim;
  const size_t bytes = static_cast<size_t>(line) * sizeof(float);
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.fresh; ++t) {
      const int64_t from = b * a.fresh + t, to = b * a.length + a.start + t;
      if (a.enters == nullptr || a.enters[from] != 0) {
        std::memcpy(a.keys + to * line, a.key + from * line, bytes);
        std::memcpy(a.values + to * line, a.value + from * line, bytes);
      }
    }
  }
}

// Sums that lack their denominator, of the heads that share a key head.
struct Sums {
  float* largest;  // [heads]; minus infinity at first
  float* total;    // [heads]
  float* out;      // [heads][dim]
};

Sums SumsAt(float* space, int64_t heads, int64_t dim, int64_t index) {
  float* at = space + index * heads * (dim + 2);
  return {at, at + heads, at + 2 * heads};
}

void Clear(const Sums& sums, int64_t heads, int64_t dim) {
  std::fill(sums.largest, sums.largest + heads, -std::numeric_limits<float>::infinity());
  std::fill(sums.total, sums.total + heads * (dim + 1), 0.0f);
}

// Both in units of e^(the larger maximum). A total of 0 has seen nothing yet.
void Join(const Sums& more, int64_t heads, int64_t dim, const Sums& sums) {
  for (int64_t h = 0; h < heads; ++h) {
    if (more.total[h] == 0.0f) {
      continue;
    }
    const float both = std::max(sums.largest[h], more.largest[h]);
    const float before = sums.total[h] == 0.0f ? 0.0f : std::exp(sums.largest[h] - both);
    const float now = std::exp(more.largest[h] - both);
    sums.largest[h] = both;
    sums.total[h] = sums.total[h] * before + more.total[h] * now;
    for (int64_t d = h * dim; d < (h + 1) * dim; ++d) {
      sums.out[d] = sums.out[d] * before + more.out[d] * now;
    }
  }
}

// One token and one key head, over one span of the cache.
void AttendSpan(void (*attend)(const AttendBlock&), const CachedAttention& a, int64_t line,
                int64_t span, const Sums& sums) {
  const int64_t token = line / a.key_heads, key_head = line % a.key_heads;
  const int64_t group = a.heads / a.key_heads;
  const int64_t first = (token / a.fresh * a.length * a.key_heads + key_head) * a.dim;
  const uint8_t* mask = a.mask + token * a.length;
  float* scores = static_cast<float*>(ScratchBytes(
      Scratch::kBlock,
      static_cast<size_t>(group * (kAttentionBlock + a.dim + 2)) * sizeof(float)));
  const Sums block = SumsAt(scores + group * kAttentionBlock, group, a.dim, 0);
  int32_t positions[kAttentionBlock];
  Clear(sums, group, a.dim);
  const int64_t end = std::min((span + 1) * kSpan, a.length);
  for (int64_t at = span * kSpan; at < end;) {
    int64_t count = 0;
    for (; at < end && count < kAttentionBlock; ++at) {
      positions[count] = static_cast<int32_t>(at);
      count += mask[at] != 0;
    }
    if (count == 0) {
      continue;
    }
    attend({a.query + (token * a.heads + key_head * group) * a.dim, group, a.dim, a.keys + first,
            a.values + first, a.key_heads * a.dim, positions, count, a.factor, a.soft_cap, scores,
            block.largest, block.total, block.out});
    Join(block, group, a.dim, sums);
  }
  ReleaseLargeScratch(Scratch::kBlock);
}

}  // namespace

void RunAttention(void (*attend)(const AttendBlock&), const Workers& workers,
                  const CachedAttention& a) {
  EnterTokens(a);
  const int64_t group = a.heads / a.key_heads, lines = a.batch * a.fresh * a.key_heads;
  const int64_t spans = (a.length + kSpan - 1) / kSpan;
  Workers team = workers;
  if (lines * a.length * group * a.dim < kWorthSharing || !team.schedule) {
    team.threads = 1;
  }
  float* space = static_cast<float*>(
      ScratchBytes(Scratch::kCall,
                   static_cast<size_t>(lines * spans * group * (a.dim + 2)) * sizeof(float)));
  ParallelFor(team, lines * spans, [&](int64_t index) {
    AttendSpan(attend, a, index / spans, index % spans, SumsAt(space, group, a.dim, index));
  });
  for (int64_t line = 0; line < lines; ++line) {
    const Sums sums = SumsAt(space, group, a.dim, line * spans);
    for (int64_t span = 1; span < spans; ++span) {
      Join(SumsAt(space, group, a.dim, line * spans + span), group, a.dim, sums);
    }
    float* out = a.out + line * group * a.dim;  // heads that share a key head are neighbours
    for (int64_t i = 0; i < group * a.dim; ++i) {
      const float total = sums.total[i / a.dim];
      out[i] = total == 0.0f ? 0.0f : sums.out[i] / total;
    }
  }
  ReleaseLargeScratch(Scratch::kCall);
}

}  // namespace fewbit
