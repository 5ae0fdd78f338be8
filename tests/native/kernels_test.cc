// Products with weights, of every instruction set, against naive loops. Prints what ran; fails by its
// exit code.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/bf16.h"
#include "matmul/matmul.h"
#include "matmul/transposed.h"
#include "pack_code.h"
#include "team.h"
#include "weight_case.h"

namespace fewbit {
namespace {

enum class X { kFloat, kNarrow, kQuantized, kQuantizedNarrow, kCodes, kRawCodes };
constexpr const char* kXNames[] = {"float", "bfloat16", "quantized", "quantized bfloat16", "codes",
                                   "raw codes"};

bool Narrow(X x) { return x == X::kNarrow || x == X::kQuantizedNarrow; }

// A group of numbers as fewbit.quantize(x, 'int8') sees them; in bfloat16 each step is rounded.
void QuantizeNaively(int64_t count, bool narrow, double* values) {
  const auto rounded = [narrow](float v) { return narrow ? FromBf16(ToBf16(v)) : v; };
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::fabs(static_cast<float>(values[i])));
  }
  const float scale = largest == 0 ? 1.0f : rounded(largest * (1.0f / 127.5f));
  for (int64_t i = 0; i < count; ++i) {
    const float v = static_cast<float>(values[i]);
    const float units = narrow || count == 1 ? rounded(v / scale) : v * (1.0f / scale);
    const float code = std::nearbyint(std::min(std::max(units, -128.0f), 127.0f));
    values[i] = static_cast<double>(code) * scale;
  }
}

// What the product is to see as x.
std::vector<double> Seen(const Case& c, X x) {
  std::vector<double> seen;
  for (int64_t i = 0; i < c.rows * c.k; ++i) {
    const size_t at = static_cast<size_t>(i);
    const int64_t column = i % c.k, g = c.group == 0 ? 0 : column / c.group;
    if (x == X::kCodes || x == X::kRawCodes) {
      const double scale = c.x_scales[static_cast<size_t>(i / c.k * c.groups + g)];
      seen.push_back(c.x_codes[at] * (x == X::kCodes ? scale : 1.0));
    } else {
      seen.push_back(Narrow(x) ? FromBf16(c.x_narrow[at]) : c.x[at]);
    }
  }
  const int64_t group = c.group == 0 ? c.k : c.group;
  for (int64_t i = 0; (x == X::kQuantized || x == X::kQuantizedNarrow) && i < c.rows * c.k;) {
    const int64_t count = std::min(group, c.k - i % c.k);
    QuantizeNaively(count, Narrow(x), seen.data() + i);
    i += count;
  }
  return seen;
}

// Results of float32, bfloat16 or int32 at [rows][columns] against sums of products.
bool Compare(const std::string& what, const Case& c, const std::vector<double>& want,
             const std::vector<double>& sizes, const std::vector<uint8_t>& bytes, Element type) {
  const bool narrow = type == Element::kBf16;
  for (size_t i = 0; i < want.size(); ++i) {
    double got;
    if (type == Element::kS32) {
      int32_t sum;
      std::memcpy(&sum, &bytes[i * 4], 4);
      got = sum;
    } else {
      const uint16_t high = static_cast<uint16_t>(bytes[i * 2] | bytes[i * 2 + 1] << 8);
      float value = FromBf16(high);
      if (!narrow) {
        std::memcpy(&value, &bytes[i * 4], 4);
      }
      got = value;
    }
    const double rounding = narrow ? std::ldexp(std::fabs(want[i]), -8) : 0.0;
    if (!(std::fabs(got - want[i]) <= (type == Element::kS32 ? 0.0 : 2e-6 * sizes[i] + rounding))) {
      std::printf("%s rows=%ld k=%ld n=%ld group=%ld: [%zu] is %.9g, not %.9g\n", what.c_str(),
                  static_cast<long>(c.rows), static_cast<long>(c.k), static_cast<long>(c.n),
                  static_cast<long>(c.group), i, got, want[i]);
      return false;
    }
  }
  return true;
}

// bfloat16 goes in and out together.
bool Check(const Kernels& kernels, const Workers& workers, const Case& c, X x) {
  const bool codes = x == X::kCodes || x == X::kRawCodes, raw = x == X::kRawCodes;
  const Element type = raw ? Element::kS32 : Narrow(x) ? Element::kBf16 : Element::kF32;
  std::vector<uint8_t> result(static_cast<size_t>(c.rows * c.n) * (Narrow(x) ? 2 : 4), 0xff);
  Matmul m = c.Problem(result.data(), type);
  m.quantize_x = x == X::kQuantized || x == X::kQuantizedNarrow;
  m.x_scale_per_group = m.quantize_x || x == X::kCodes;
  m.tensor_scale = raw ? 1.0f : 0.75f;
  if (Narrow(x)) {
    m.x = c.x_narrow.data();
    m.x_type = Element::kBf16;
  } else if (codes) {
    m.x = c.x_codes.data();
    m.x_type = Element::kS8;
    m.x_scale = raw ? nullptr : c.x_scales.data();
    m.x_scale_rows = c.rows;
  }
  const std::string problem = RunMatmul(kernels, workers, m);
  if (!problem.empty()) {
    std::printf("%s\n", problem.c_str());
    return false;
  }
  const std::vector<double> seen = Seen(c, x);
  std::vector<double> want, sizes;
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t j = 0; j < c.n; ++j) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < c.k; ++i) {
        const double product =
            seen[static_cast<size_t>(r * c.k + i)] * c.At(i, j, !raw) * m.tensor_scale;
        sum += product;
        size += std::fabs(product);
      }
      want.push_back(sum);
      sizes.push_back(size);
    }
  }
  const std::string what = std::string(kernels.name) + " " + c.format->name + " " +
                           kXNames[static_cast<int>(x)];
  return Compare(what, c, want, sizes, result, type);
}

bool CheckTransposed(const Kernels& kernels, const Workers& workers, const Case& c, bool narrow) {
  const Element type = narrow ? Element::kBf16 : Element::kF32;
  std::vector<uint8_t> result(static_cast<size_t>(c.rows * c.k) * (narrow ? 2 : 4), 0xff);
  Matmul m = c.Problem(result.data(), type);
  m.x = narrow ? static_cast<const void*>(c.g_narrow.data()) : c.g.data();
  m.x_type = type;
  RunTransposed(kernels, workers, m);
  std::vector<double> want, sizes;
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t i = 0; i < c.k; ++i) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < c.n; ++j) {
        const size_t at = static_cast<size_t>(r * c.n + j);
        const double g = narrow ? FromBf16(c.g_narrow[at]) : c.g[at];
        sum += g * c.At(i, j, true);
        size += std::fabs(g * c.At(i, j, true));
      }
      want.push_back(sum);
      sizes.push_back(size);
    }
  }
  const std::string what = std::string(kernels.name) + " " + c.format->name + " transposed";
  return Compare(what, c, want, sizes, result, type);
}

int64_t CheckAll(const Kernels& kernels, bool* good) {
  const char* names[] = {"int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8", "uint4",
                         "uint8", "nf4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"};
  struct {
    int64_t rows, k, n, group;
  } shapes[] = {{1, 37, 1, 0},   {2, 96, 65, 32},   {3, 100, 64, 16}, {4, 70, 3, 16},
                {5, 600, 66, 0}, {6, 1100, 5, 128}, {13, 33, 70, 16}, {7, 64, 130, 64},
                {1, 530, 20, 16}, {11, 1500, 9, 0}, {5, 40, 600, 16}, {100, 33, 5, 32},
                {64, 50, 600, 16}, {530, 70, 130, 32}};
  int64_t count = 0, turn = 0;
  const auto run = [&](bool right) {
    *good = right && *good;
    ++count;
  };
  for (const char* name : names) {
    const Format* format = FindFormat(name, std::strlen(name));
    for (const auto& s : shapes) {
      for (int zeros = 0; zeros < (format->integers() && format->bits > 1 ? 2 : 1); ++zeros) {
        const auto scale_type = static_cast<ScaleType>(turn++ % 5);
        const Case c(format, s.rows, s.k, s.n, s.group, zeros != 0, scale_type);
        for (int threads = 1; threads <= 3; threads += 2) {
          Team team(threads);
          run(Check(kernels, team.workers, c, X::kFloat));
          run(Check(kernels, team.workers, c, X::kCodes));
          run(CheckTransposed(kernels, team.workers, c, false));
          if (format->integers() && c.groups == 1) {
            run(Check(kernels, team.workers, c, X::kRawCodes));
          }
        }
        // What differs only before and after the kernels: each once.
        Team team(2);
        run(Check(kernels, team.workers, c, X::kNarrow));
        run(Check(kernels, team.workers, c, turn % 2 ? X::kQuantized : X::kQuantizedNarrow));
        run(CheckTransposed(kernels, team.workers, c, true));
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
    const int64_t count = fewbit::CheckAll(*kernels, &each);
    std::printf("%-22s %ld products, %s\n", kernels->name, static_cast<long>(count),
                each ? "all right" : "WRONG");
    good = good && each;
  }
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
