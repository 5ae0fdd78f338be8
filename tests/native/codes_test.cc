// Products of codes and the codes themselves, of every instruction set, against naive loops. Fails by
// its exit code.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "common/bf16.h"
#include "codes/dot.h"
#include "pack_code.h"
#include "team.h"

namespace fewbit {
namespace {

// One side of a product of codes: [batch][lines][k] if k is last, else [batch][k][lines]; every
// other byte of it where it is scattered.
struct Codes {
  std::vector<int8_t> bytes;
  CodesSide side;
  std::vector<float> scale;

  Codes(int64_t batch, int64_t lines, int64_t k, bool k_last, bool scattered) {
    const int64_t inner = k_last ? k : lines, outer = k_last ? lines : k, step = scattered ? 2 : 1;
    for (int64_t i = 0; i < batch * outer * inner * step; ++i) {
      bytes.push_back(static_cast<int8_t>(Random(-128, 127)));
    }
    std::vector<int64_t>& slow = k_last ? side.lines : side.ks;
    std::vector<int64_t>& fast = k_last ? side.ks : side.lines;
    for (int64_t i = 0; i < batch; ++i) {
      side.batch.push_back(i * outer * inner * step);
    }
    for (int64_t i = 0; i < outer; ++i) {
      slow.push_back(i * inner * step);
    }
    for (int64_t i = 0; i < inner; ++i) {
      fast.push_back(i * step);
    }
    for (int64_t i = 0; i < batch * lines; ++i) {
      scale.push_back(static_cast<float>(Random(1, 100)) / 64.0f);
    }
    side.codes = bytes.data();
    side.scale = scale.data();
  }
};

bool CheckCodes(const Kernels& kernels, const Workers& workers, const Codes& lhs, const Codes& rhs,
                Element type) {
  const size_t rows = lhs.side.lines.size(), columns = rhs.side.lines.size();
  const size_t bytes = type == Element::kBf16 ? 2 : 4, all = lhs.side.batch.size() * rows * columns;
  std::vector<uint8_t> result(all * bytes, 0xff);
  RunCodesDot(kernels, workers, {lhs.side, rhs.side, result.data(), type});
  for (size_t i = 0; i < all; ++i) {
    const size_t entry = i / (rows * columns), row = i / columns % rows, column = i % columns;
    const int8_t* a = lhs.side.codes + lhs.side.batch[entry] + lhs.side.lines[row];
    const int8_t* b = rhs.side.codes + rhs.side.batch[entry] + rhs.side.lines[column];
    uint32_t sum = 0;  // modulo 2^32
    for (size_t k = 0; k < lhs.side.ks.size(); ++k) {
      sum += static_cast<uint32_t>(a[lhs.side.ks[k]] * b[rhs.side.ks[k]]);
    }
    float number = static_cast<float>(static_cast<int32_t>(sum)) * lhs.scale[entry * rows + row];
    number = number * rhs.scale[entry * columns + column];
    const uint16_t narrow = ToBf16(number);
    const void* want = type == Element::kS32   ? static_cast<const void*>(&sum)
                       : type == Element::kF32 ? static_cast<const void*>(&number)
                                               : &narrow;
    if (std::memcmp(&result[i * bytes], want, bytes) != 0) {
      std::printf("%s codes %zux%zux%zu: element %zu is wrong\n", kernels.name, rows,
                  lhs.side.ks.size(), columns, i);
      return false;
    }
  }
  return true;
}

int64_t CheckAllCodes(const Kernels& kernels, bool* good) {
  struct {
    int64_t batch, rows, k, columns;
  } shapes[] = {{1, 1, 37, 70},  {2, 2, 64, 33},  {1, 3, 5, 3},    {3, 4, 100, 130}, {1, 7, 70, 20},
                {1, 9, 1100, 66}, {20, 6, 33, 17}, {1, 30, 64, 2}, {1, 13, 0, 4}};
  int64_t count = 0;
  for (const auto& s : shapes) {
    for (int order = 0; order < 6; ++order) {
      const Codes lhs(s.batch, s.rows, s.k, order % 2 == 0, order > 3);
      const Codes rhs(s.batch, s.columns, s.k, order / 2 % 2 == 0, order > 3);
      for (int threads = 1; threads <= 3; threads += 2) {
        Team team(threads);
        for (Element type : {Element::kS32, Element::kF32, Element::kBf16}) {
          *good = CheckCodes(kernels, team.workers, lhs, rhs, type) && *good;
          ++count;
        }
      }
    }
  }
  return count;
}

// Sums that leave 32 bits come around at the other end, as XLA's do.
int64_t CheckOverflow(const Kernels& kernels, bool* good) {
  constexpr int64_t kLength = 132000;  // 2^14 * k > 2^31
  int64_t count = 0;
  for (int64_t rows : {2, 10}) {
    for (bool k_last : {false, true}) {
      Codes lhs(1, rows, kLength, k_last, false), rhs(1, 17, kLength, k_last, false);
      std::fill(lhs.bytes.begin(), lhs.bytes.end(), int8_t{-128});
      std::fill(rhs.bytes.begin(), rhs.bytes.end(), int8_t{-128});
      Team team(2);
      *good = CheckCodes(kernels, team.workers, lhs, rhs, Element::kS32) && *good;
      ++count;
    }
  }
  return count;
}

// The code that fewbit.quantize(x, 'int8') gives.
int CodeNaively(float units) {
  return static_cast<int>(std::nearbyint(std::min(std::max(units, -128.0f), 127.0f)));
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kUnusual[] = {kNan, -kNan, kInfinity, -kInfinity, 0.0f, -0.0f, 1e-42f, 3e38f, -1e-30f};

// [rows][columns]; some columns have a number that is no ordinary one, or nothing but zeros.
std::vector<float> Table(int64_t rows, int64_t columns) {
  std::vector<float> x;
  for (int64_t i = 0; i < rows * columns; ++i) {
    x.push_back(i % columns == 1 ? 0.0f : static_cast<float>(Random(-1000, 1000)) / 333.0f);
  }
  size_t column = 2;
  for (float number : kUnusual) {
    if (column < static_cast<size_t>(columns)) {
      x[static_cast<size_t>(Random(0, static_cast<int>(rows) - 1) * columns) + column] = number;
    }
    ++column;
  }
  return x;
}

// The scale of some numbers that are `step` apart; NaN if one of them is not finite.
float ScaleNaively(const float* x, int64_t count, int64_t step) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(x[i * step])) {
      return kNan;
    }
    largest = std::max(largest, std::fabs(x[i * step]));
  }
  const float scale = largest * (1.0f / 127.5f);
  return scale < 0x1p-63f ? 1.0f : scale;
}

bool SameScale(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// With factors it is the products that are quantized.
bool CheckColumns(const Kernels& kernels, int64_t rows, int64_t columns, bool with_factors) {
  const std::vector<float> given = Table(rows, columns);
  std::vector<float> x = given, factors(static_cast<size_t>(rows));
  for (size_t r = 0; r < factors.size(); ++r) {
    factors[r] = 0.3f + 0.7f * static_cast<float>(r % 11);
  }
  for (size_t i = 0; with_factors && i < x.size(); ++i) {
    x[i] = given[i] * factors[i / static_cast<size_t>(columns)];
  }
  const size_t width = static_cast<size_t>(columns);
  std::vector<int32_t> largest(width, -1);
  std::vector<float> scales(width), per_scale(width);
  std::vector<int8_t> codes(x.size());
  const ColumnBlock block{given.data(), rows, columns, with_factors ? factors.data() : nullptr};
  kernels.largest_of_columns(block, largest.data());
  kernels.scales_of_columns(largest.data(), columns, scales.data(), per_scale.data());
  kernels.codes_of_columns(block, per_scale.data(), codes.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t column = i % width;
    const float scale = ScaleNaively(x.data() + column, rows, columns);
    const bool right = SameScale(scales[column], scale) &&
                       (std::isnan(scale) || codes[i] == CodeNaively(x[i] * (1.0f / scale)));
    if (!right) {
      std::printf("%s columns of [%ld,%ld]: [%zu] is wrong\n", kernels.name,
                  static_cast<long>(rows), static_cast<long>(columns), i);
      return false;
    }
  }
  return true;
}

// Groups of a row, their scales measured or stored; in bfloat16 each step is rounded.
bool CheckRow(const Kernels& kernels, int64_t length, int64_t group, bool narrow, bool stored) {
  std::vector<float> x = Table(1, length);
  const auto rounded = [narrow](float v) { return narrow ? FromBf16(ToBf16(v)) : v; };
  std::transform(x.begin(), x.end(), x.begin(), rounded);
  const int64_t groups = CeilDiv(length, group);
  std::vector<int8_t> codes(x.size());
  std::vector<float> scales(static_cast<size_t>(groups), rounded(0.013f));
  kernels.quantize_row({x.data(), length, group, narrow, stored, codes.data(), scales.data()});
  const bool lost = std::any_of(x.begin(), x.end(), [](float v) { return std::isnan(v); });
  for (int64_t i = 0; i < length; ++i) {
    const int64_t first = i / group * group, count = std::min(group, length - first);
    const float scale = !stored ? rounded(ScaleNaively(x.data() + first, count, 1))
                        : lost  ? std::nanf("")
                                : rounded(0.013f);
    const float v = x[static_cast<size_t>(i)];
    const float units = narrow || count == 1 ? rounded(v / scale) : v * (1.0f / scale);
    const int code = std::isnan(scale) ? 0 : CodeNaively(units);
    if (!SameScale(scales[static_cast<size_t>(i / group)], scale) ||
        codes[static_cast<size_t>(i)] != code) {
      std::printf("%s row of %ld in groups of %ld: [%ld] is wrong\n", kernels.name,
                  static_cast<long>(length), static_cast<long>(group), static_cast<long>(i));
      return false;
    }
  }
  return true;
}

int64_t CheckAllQuantized(const Kernels& kernels, bool* good) {
  int64_t count = 0;
  for (int64_t rows : {1, 5, 40}) {
    for (int64_t columns : {1, 3, 16, 33, 70}) {
      *good = CheckColumns(kernels, rows, columns, false) && *good;
      *good = CheckColumns(kernels, rows, columns, true) && *good;
      count += 2;
    }
  }
  for (int64_t length : {1, 3, 31, 64, 200, 1100}) {
    for (int64_t group : {int64_t{1}, int64_t{16}, int64_t{32}, length}) {
      for (bool narrow : {false, true}) {
        *good = CheckRow(kernels, length, group, narrow, false) &&
                CheckRow(kernels, length, group, narrow, true) && *good;
        count += 2;
      }
    }
  }
  return count;
}

}  // namespace
}  // namespace fewbit

int main() {
  bool good = true;
  for (const fewbit::Kernels* kernels : fewbit::SetsToTest()) {
    bool each = true;
    const int64_t products =
        fewbit::CheckAllCodes(*kernels, &each) + fewbit::CheckOverflow(*kernels, &each);
    const int64_t arrays = fewbit::CheckAllQuantized(*kernels, &each);
    std::printf("%-22s %ld products of codes, %ld quantized arrays, %s\n", kernels->name,
                static_cast<long>(products), static_cast<long>(arrays), each ? "all right" : "WRONG");
    good = good && each;
  }
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
