// Every instruction set's kernels against naive loops. Prints what ran; fails by its exit code.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "codes_dot.h"
#include "matmul.h"
#include "matmul_transposed.h"
#include "pack_code.h"

namespace fewbit {

namespace {

std::mt19937 engine(1);
int Random(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Helpers are threads of their own here, all joined before the test looks at a result.
struct Team {
  std::vector<std::thread> threads;
  Workers workers;
  explicit Team(int count) {
    workers.threads = count;
    workers.schedule = [this](std::function<void()> task) { threads.emplace_back(std::move(task)); };
  }
  ~Team() {
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
};

double ValueOf(const Format& format, int code) {
  if (std::strcmp(format.name, "int1") == 0) {
    return code;  // the zero point 1 is taken off with the others
  }
  if (format.integers()) {
    return code;
  }
  if (format.table != nullptr) {
    return format.table[code];
  }
  const int mantissa_bits = format.decoding == kE4m3 ? 3 : 2;
  const int bias = format.decoding == kE4m3 ? 7 : 15;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const double size = exponent == 0
                          ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                          : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return code & 0x80 ? -size : size;
}

struct Case {
  const Format* format;
  int64_t rows, k, n, group, groups;
  std::vector<int> codes, zeros;       // [k][n], [groups][n]
  std::vector<float> scales;           // [groups][n]
  std::vector<uint8_t> data, zero;
  std::vector<uint16_t> half_scales;
  std::vector<float> x, g;             // [rows][k], [rows][n]
  std::vector<int8_t> x_codes;
  std::vector<float> x_scales;         // [rows][groups]

  Case(const Format* format, int64_t rows, int64_t k, int64_t n, int64_t group, bool own_zeros)
      : format(format), rows(rows), k(k), n(n), group(group),
        groups(group == 0 ? 1 : CeilDiv(k, group)) {
    const int bits = format->bits;
    const int64_t panels = CeilDiv(n, kPanel), blocks = CeilDiv(k, kBlock);
    data.assign(static_cast<size_t>(panels * blocks * bits * kPanel * 4), 0);
    half_scales.assign(static_cast<size_t>(panels * groups * kPanel), 0x3c00);
    zero.assign(own_zeros ? half_scales.size() : 0, 0);
    const int most = format->integers() || format->table != nullptr ? (1 << bits) - 1 : 0x77;
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const int code = Random(0, most);
        PackCode(i, j, code, bits, blocks, data.data());
        codes.push_back(bits == 1 ? 2 * code : code);
      }
    }
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t j = 0; j < n; ++j) {
        const int exponent = Random(-3, 3), mantissa = Random(0, 1023);
        const size_t at = static_cast<size_t>((j / kPanel * groups + g) * kPanel + j % kPanel);
        half_scales[at] = static_cast<uint16_t>((exponent + 15) << 10 | mantissa);
        scales.push_back(std::ldexp(1.0f + static_cast<float>(mantissa) / 1024.0f, exponent));
        zeros.push_back(own_zeros ? Random(0, most) : format->zero);
        if (own_zeros) {
          zero[at] = static_cast<uint8_t>(zeros.back());
        }
      }
    }
    for (int64_t i = 0; i < rows * k; ++i) {
      x.push_back(static_cast<float>(Random(-1000, 1000)) / 333.0f);
      x_codes.push_back(static_cast<int8_t>(Random(-128, 127)));
    }
    for (int64_t i = 0; i < rows * n; ++i) {
      g.push_back(static_cast<float>(Random(-1000, 1000)) / 333.0f);
    }
    for (int64_t i = 0; i < rows * groups; ++i) {
      x_scales.push_back(static_cast<float>(Random(1, 100)) / 64.0f);
    }
  }

  // The number at [i][j] of the weight; `scaled` or without its scale.
  double At(int64_t i, int64_t j, bool scaled) const {
    const size_t at = static_cast<size_t>((group == 0 ? 0 : i / group) * n + j);
    double w = ValueOf(*format, codes[static_cast<size_t>(i * n + j)]);
    w -= format->integers() ? zeros[at] : 0;
    return w * (scaled ? scales[at] : 1.0);
  }

  Matmul Problem(void* out, Element out_type) const {
    Matmul m{};
    m.format = format;
    m.rows = rows;
    m.k = k;
    m.n = n;
    m.x = x.data();
    m.x_type = Element::kF32;
    m.data = data.data();
    m.scale = reinterpret_cast<const uint8_t*>(half_scales.data());
    m.scale_type = kScaleF16;
    m.zero = zero.empty() ? nullptr : zero.data();
    m.group = group;
    m.groups = groups;
    m.tensor_scale = 1.0f;
    m.out = out;
    m.out_type = out_type;
    return m;
  }
};

bool Check(const Kernels& kernels, const Workers& workers, const Case& c, bool codes, bool raw) {
  std::vector<float> result(static_cast<size_t>(c.rows * c.n), -1.0f);
  Matmul m = c.Problem(result.data(), raw ? Element::kS32 : Element::kF32);
  if (codes) {
    m.x = c.x_codes.data();
    m.x_type = Element::kS8;
    m.x_scale = raw ? nullptr : c.x_scales.data();
    m.x_scale_rows = c.rows;
    m.x_scale_per_group = !raw;
  }
  const std::string problem = RunMatmul(kernels, workers, m);
  if (!problem.empty()) {
    std::printf("%s\n", problem.c_str());
    return false;
  }
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t j = 0; j < c.n; ++j) {
      double want = 0, size = 0;
      for (int64_t i = 0; i < c.k; ++i) {
        const int64_t g = c.group == 0 ? 0 : i / c.group;
        double a = c.x[static_cast<size_t>(r * c.k + i)];
        if (codes) {
          a = c.x_codes[static_cast<size_t>(r * c.k + i)];
          a *= raw ? 1.0 : c.x_scales[static_cast<size_t>(r * c.groups + g)];
        }
        const double product = a * c.At(i, j, !raw);
        want += product;
        size += std::fabs(product);
      }
      const size_t at = static_cast<size_t>(r * c.n + j);
      double got = result[at];
      if (raw) {
        int32_t sum;
        std::memcpy(&sum, &result[at], sizeof sum);
        got = sum;
      }
      if (!(std::fabs(got - want) <= (raw ? 0.0 : 2e-6 * size))) {
        std::printf("%s %s rows=%ld k=%ld n=%ld group=%ld %s: [%ld,%ld] is %.9g, not %.9g\n",
                    kernels.name, c.format->name, static_cast<long>(c.rows),
                    static_cast<long>(c.k), static_cast<long>(c.n), static_cast<long>(c.group),
                    raw ? "raw" : codes ? "codes" : "float", static_cast<long>(r),
                    static_cast<long>(j), got, want);
        return false;
      }
    }
  }
  return true;
}

bool CheckTransposed(const Kernels& kernels, const Workers& workers, const Case& c) {
  std::vector<float> result(static_cast<size_t>(c.rows * c.k), -1.0f);
  Matmul m = c.Problem(result.data(), Element::kF32);
  m.x = c.g.data();
  RunTransposed(kernels, workers, m);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t i = 0; i < c.k; ++i) {
      double want = 0, size = 0;
      for (int64_t j = 0; j < c.n; ++j) {
        const double product = c.g[static_cast<size_t>(r * c.n + j)] * c.At(i, j, true);
        want += product;
        size += std::fabs(product);
      }
      const double got = result[static_cast<size_t>(r * c.k + i)];
      if (!(std::fabs(got - want) <= 2e-6 * size)) {
        std::printf("%s %s rows=%ld k=%ld n=%ld group=%ld transposed: [%ld,%ld] is %.9g, not %.9g\n",
                    kernels.name, c.format->name, static_cast<long>(c.rows),
                    static_cast<long>(c.k), static_cast<long>(c.n), static_cast<long>(c.group),
                    static_cast<long>(r), static_cast<long>(i), got, want);
        return false;
      }
    }
  }
  return true;
}

int64_t CheckAll(const Kernels& kernels, bool* good) {
  const char* names[] = {"int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8", "uint4",
                         "uint8", "nf4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"};
  struct {
    int64_t rows, k, n, group;
  } shapes[] = {{1, 37, 1, 0},   {2, 96, 65, 32},   {3, 100, 64, 16}, {4, 70, 3, 16},
                {5, 600, 66, 0}, {6, 1100, 5, 128}, {13, 33, 70, 16}, {7, 64, 130, 64},
                {1, 530, 20, 16}, {11, 1500, 9, 0}, {5, 40, 600, 16}, {100, 33, 5, 32},
                {64, 50, 600, 16}};
  int64_t count = 0;
  for (const char* name : names) {
    const Format* format = FindFormat(name, std::strlen(name));
    for (const auto& s : shapes) {
      for (int zeros = 0; zeros < (format->integers() && format->bits > 1 ? 2 : 1); ++zeros) {
        const Case c(format, s.rows, s.k, s.n, s.group, zeros != 0);
        for (int threads = 1; threads <= 3; threads += 2) {
          Team team(threads);
          *good = Check(kernels, team.workers, c, false, false) && *good;
          *good = Check(kernels, team.workers, c, true, false) && *good;
          *good = CheckTransposed(kernels, team.workers, c) && *good;
          count += 3;
          if (format->integers() && c.groups == 1) {
            *good = Check(kernels, team.workers, c, true, true) && *good;
            ++count;
          }
        }
      }
    }
  }
  return count;
}

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
                bool raw) {
  const size_t rows = lhs.side.lines.size(), columns = rhs.side.lines.size();
  std::vector<float> result(lhs.side.batch.size() * rows * columns, -1.0f);
  RunCodesDot(kernels, workers,
              {lhs.side, rhs.side, result.data(), raw ? Element::kS32 : Element::kF32});
  for (size_t i = 0; i < result.size(); ++i) {
    const size_t entry = i / (rows * columns), row = i / columns % rows, column = i % columns;
    const int8_t* a = lhs.side.codes + lhs.side.batch[entry] + lhs.side.lines[row];
    const int8_t* b = rhs.side.codes + rhs.side.batch[entry] + rhs.side.lines[column];
    int32_t want = 0;
    for (size_t k = 0; k < lhs.side.ks.size(); ++k) {
      want += a[lhs.side.ks[k]] * b[rhs.side.ks[k]];
    }
    float number = static_cast<float>(want) * lhs.scale[entry * rows + row];
    number = number * rhs.scale[entry * columns + column];
    if (std::memcmp(&result[i], raw ? static_cast<void*>(&want) : &number, 4) != 0) {
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
        *good = CheckCodes(kernels, team.workers, lhs, rhs, true) && *good;
        *good = CheckCodes(kernels, team.workers, lhs, rhs, false) && *good;
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
    const int64_t count =
        fewbit::CheckAll(*kernels, &each) + fewbit::CheckAllCodes(*kernels, &each);
    std::printf("%-22s %ld products, %s\n", kernels->name, static_cast<long>(count),
                each ? "all right" : "WRONG");
    good = good && each;
  }
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
