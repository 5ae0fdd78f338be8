// Attention over a cache, of every instruction set, against float64. Fails by its exit code.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "attention/cached_attention.h"
#include "pack_code.h"
#include "team.h"

namespace fewbit {
namespace {

struct Sizes {
  int64_t batch, fresh, heads, key_heads, dim, length;
};

std::vector<float> Numbers(int64_t count) {
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& x : numbers) {
    x = static_cast<float>(Random(-1000, 1000)) / 500.0f;
  }
  return numbers;
}

std::vector<uint8_t> Marks(int64_t count, int share) {
  std::vector<uint8_t> marks(static_cast<size_t>(count));
  for (uint8_t& mark : marks) {
    mark = Random(0, 9) < share;
  }
  return marks;
}

// What one head of one new token sees, at column d.
double Naively(const CachedAttention& a, int64_t token, int64_t head, int64_t d) {
  const int64_t group = a.heads / a.key_heads, batch = token / a.fresh;
  const float* query = a.query + (token * a.heads + head) * a.dim;
  double largest = -INFINITY, total = 0, sum = 0;
  std::vector<double> scores(static_cast<size_t>(a.length), -INFINITY);
  for (int64_t s = 0; s < a.length; ++s) {
    if (a.mask[token * a.length + s] != 0) {
      const float* key = a.keys + ((batch * a.length + s) * a.key_heads + head / group) * a.dim;
      double score = 0;
      for (int64_t i = 0; i < a.dim; ++i) {
        score += static_cast<double>(query[i]) * static_cast<double>(key[i]);
      }
      score *= static_cast<double>(a.factor);
      const double cap = static_cast<double>(a.soft_cap);
      scores[static_cast<size_t>(s)] = cap == 0 ? score : cap * std::tanh(score / cap);
      largest = std::fmax(largest, scores[static_cast<size_t>(s)]);
    }
  }
  for (int64_t s = 0; s < a.length && largest > -INFINITY; ++s) {
    const double weight = std::exp(scores[static_cast<size_t>(s)] - largest);
    total += weight;
    sum += weight * static_cast<double>(
                        a.values[((batch * a.length + s) * a.key_heads + head / group) * a.dim + d]);
  }
  return total == 0 ? 0 : sum / total;
}

bool Check(const Kernels& kernels, const Sizes& size, int threads, int share, float soft_cap) {
  const int64_t tokens = size.batch * size.fresh, line = size.key_heads * size.dim;
  const std::vector<float> query = Numbers(tokens * size.heads * size.dim);
  const std::vector<float> key = Numbers(tokens * line), value = Numbers(tokens * line);
  std::vector<float> keys = Numbers(size.batch * size.length * line);
  std::vector<float> values = Numbers(size.batch * size.length * line);
  const std::vector<uint8_t> enters = Marks(tokens, 7), mask = Marks(tokens * size.length, share);
  std::vector<float> out(query.size());
  const std::vector<float> before = keys;
  const int64_t start = Random(0, static_cast<int>(size.length - size.fresh));
  const CachedAttention a{size.batch, size.fresh, size.heads, size.key_heads, size.dim,
                          size.length, query.data(), key.data(), value.data(), start,
                          enters.data(), mask.data(), 0.2f, soft_cap, keys.data(),
                          values.data(), out.data()};
  {
    Team team(threads);
    RunAttention(kernels.attend, team.workers, a);
  }
  bool right = true;
  for (size_t i = 0; i < keys.size() && right; ++i) {
    const int64_t place = static_cast<int64_t>(i) / line, within = static_cast<int64_t>(i) % line;
    const int64_t t = place % size.length - start, token = place / size.length * size.fresh + t;
    const bool entered =
        t >= 0 && t < size.fresh && enters[static_cast<size_t>(token)] != 0;
    right = keys[i] == (entered ? key[static_cast<size_t>(token * line + within)] : before[i]);
  }
  for (size_t i = 0; i < out.size() && right; ++i) {
    const int64_t d = static_cast<int64_t>(i) % size.dim, head = static_cast<int64_t>(i) / size.dim;
    const double want = Naively(a, head / size.heads, head % size.heads, d);
    right = std::fabs(static_cast<double>(out[i]) - want) < 4e-6;
  }
  if (!right) {
    std::printf("%s: %ld x %ld tokens, %ld / %ld heads of %ld, %ld positions: wrong\n",
                kernels.name, static_cast<long>(size.batch), static_cast<long>(size.fresh),
                static_cast<long>(size.heads), static_cast<long>(size.key_heads),
                static_cast<long>(size.dim), static_cast<long>(size.length));
  }
  return right;
}

}  // namespace
}  // namespace fewbit

int main() {
  constexpr fewbit::Sizes kSizes[] = {{1, 1, 1, 1, 1, 1},    {1, 1, 4, 1, 256, 160},
                                      {2, 3, 6, 2, 33, 131}, {1, 1, 5, 1, 64, 1300},
                                      {3, 1, 7, 7, 48, 20},  {1, 2, 9, 3, 15, 520}};
  bool good = true;
  for (const fewbit::Kernels* kernels : fewbit::SetsToTest()) {
    int64_t count = 0;
    bool each = true;
    for (const fewbit::Sizes& size : kSizes) {
      for (int threads : {1, 3}) {
        for (int share : {0, 1, 10}) {
          for (float soft_cap : {0.0f, 1.5f}) {
            each = fewbit::Check(*kernels, size, threads, share, soft_cap) && each;
            ++count;
          }
        }
      }
    }
    std::printf("%-22s %ld attentions, %s\n", kernels->name, static_cast<long>(count),
                each ? "all right" : "WRONG");
    good = good && each;
  }
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
