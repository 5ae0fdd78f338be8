// Factor, bias and activation of every instruction set against float64, alone and at the end of
// products. Fails by its exit code.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/bf16.h"
#include "common/finish.h"
#include "matmul/matmul.h"
#include "pack_code.h"
#include "team.h"
#include "weight_case.h"

namespace fewbit {
namespace {

constexpr Elementwise kAll[] = {
    Elementwise::kNone, Elementwise::kRelu, Elementwise::kRelu6, Elementwise::kGelu,
    Elementwise::kGeluExact, Elementwise::kTanh,
    Elementwise::kSiluCephesOnce, Elementwise::kSiluCephesTwice,
    Elementwise::kSiluFdlibmOnce, Elementwise::kSiluFdlibmTwice,
    Elementwise::kSigmoidCephesOnce, Elementwise::kSigmoidCephesTwice,
    Elementwise::kSigmoidFdlibmOnce, Elementwise::kSigmoidFdlibmTwice};
constexpr double kTolerance = 4 * 0x1p-23;  // FUSED_ACTIVATION of tests/support/tolerances.py

double Exact(Elementwise activation, double x) {
  switch (activation) {
    case Elementwise::kNone:
      return x;
    case Elementwise::kRelu:
      return x <= 0 ? 0.0 : x;
    case Elementwise::kRelu6:
      return x <= 0 ? 0.0 : x > 6 ? 6.0 : x;
    case Elementwise::kSiluCephesOnce:
    case Elementwise::kSiluCephesTwice:
    case Elementwise::kSiluFdlibmOnce:
    case Elementwise::kSiluFdlibmTwice:
      return x / (1 + std::exp(-x));
    case Elementwise::kGelu:
      return x * 0.5 * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case Elementwise::kGeluExact:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Elementwise::kTanh:
      return std::tanh(x);
    case Elementwise::kSigmoidCephesOnce:
    case Elementwise::kSigmoidCephesTwice:
    case Elementwise::kSigmoidFdlibmOnce:
    case Elementwise::kSigmoidFdlibmTwice:
      return 1 / (1 + std::exp(-x));
  }
  return 0.0;
}

// Relative to the larger of argument and value; bfloat16 rounds the value once more.
bool Near(Elementwise activation, float x, float got, bool narrow) {
  const double want = Exact(activation, x);
  if (std::isnan(want) || std::isinf(want)) {
    // An activation of minus infinity times zero is as undefined here as it is in JAX.
    return std::isnan(want) ? std::isnan(got) : got == static_cast<float>(want);
  }
  const double size = std::fmax(std::fabs(static_cast<double>(x)), std::fabs(want));
  const double rounding = narrow ? std::ldexp(std::fabs(want), -8) : 0.0;
  return std::fabs(got - want) <= kTolerance * size + rounding + 1e-37;
}

// Sixty-four numbers at a time, in arrays that hold no more than they must.
int64_t CheckRows(const Kernels& kernels, bool* good) {
  std::vector<float> numbers = {0.0f, -0.0f, 1e-42f, -1e-42f, 1e-30f, 6.0f, 87.0f, -87.0f, -87.5f,
                                -104.0f, 3e38f, -1e12f};
  for (const float special : {std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
    numbers.push_back(special);
    numbers.push_back(-special);
  }
  while (numbers.size() % kPanel != 0 || numbers.size() < 40 * kPanel) {
    numbers.push_back(static_cast<float>(Random(-1000000, 1000000)) / 30000.0f);
  }
  int64_t count = 0;
  for (Elementwise activation : kAll) {
    for (size_t from = 0; from < numbers.size(); from += kPanel) {
      const std::vector<float> sums(numbers.begin() + static_cast<int64_t>(from),
                                    numbers.begin() + static_cast<int64_t>(from) + kPanel);
      const std::vector<float> bias(numbers.rbegin(), numbers.rbegin() + kPanel);
      for (int with_bias = 0; with_bias < 2; ++with_bias, ++count) {
        const float factor = with_bias ? 0.5f : 1.0f;
        std::vector<float> out(kPanel, -1.0f);
        kernels.finish_row(
            {sums.data(), factor, with_bias ? bias.data() : nullptr, activation, out.data()});
        for (size_t i = 0; i < kPanel; ++i) {
          const float scaled = sums[i] * factor, x = with_bias ? scaled + bias[i] : scaled;
          const bool beyond = activation == Elementwise::kGelu && std::fabs(x) > 1e12f;  // x^3
          if (!beyond && !Near(activation, x, out[i], false)) {
            std::printf("%s activation %d of %.9g is %.9g\n", kernels.name,
                        static_cast<int>(activation), x, out[i]);
            *good = false;
          }
        }
      }
    }
  }
  return count;
}

// How a product is finished.
struct Ending {
  Elementwise activation;
  bool bias, narrow_bias, narrow_out, quantize;
};

// Against the plain product of the same kernels, whose numbers the bias is added to.
bool CheckProduct(const Kernels& kernels, const Workers& workers, const Case& c, const Ending& e) {
  const size_t all = static_cast<size_t>(c.rows * c.n);
  std::vector<float> plain(all, -1.0f), wide(e.narrow_out ? 0 : all, -1.0f);
  std::vector<uint16_t> narrow(e.narrow_out ? all : 0, 0xffff);
  Matmul m = c.Problem(plain.data(), Element::kF32);
  m.quantize_x = e.quantize;
  m.x_scale_per_group = e.quantize;
  m.tensor_scale = 0.75f;
  std::string problem = RunMatmul(kernels, workers, m);
  // Panels are padded with what must not be seen in a result.
  const size_t padded = static_cast<size_t>(CeilDiv(c.n, kPanel) * kPanel);
  std::vector<float> bias(e.bias ? padded : 0, std::numeric_limits<float>::quiet_NaN());
  std::vector<uint16_t> narrow_bias;
  for (size_t i = 0; i < bias.size() && i < static_cast<size_t>(c.n); ++i) {
    bias[i] = static_cast<float>(Random(-100, 100)) / 32.0f;
  }
  for (float b : bias) {
    narrow_bias.push_back(ToBf16(b));
  }
  if (e.bias) {
    m.bias = e.narrow_bias ? static_cast<const void*>(narrow_bias.data()) : bias.data();
    m.bias_type = e.narrow_bias ? Element::kBf16 : Element::kF32;
  }
  m.activation = e.activation;
  m.out = e.narrow_out ? static_cast<void*>(narrow.data()) : wide.data();
  m.out_type = e.narrow_out ? Element::kBf16 : Element::kF32;
  problem += RunMatmul(kernels, workers, m);
  for (size_t i = 0; i < all && problem.empty(); ++i) {
    const float x = e.bias ? plain[i] + bias[i % static_cast<size_t>(c.n)] : plain[i];
    const float got = e.narrow_out ? FromBf16(narrow[i]) : wide[i];
    // Nothing but a sum and its bias: the same bits.
    const bool same = e.activation != Elementwise::kNone || got == (e.narrow_out ? FromBf16(ToBf16(x)) : x);
    if (!same || !Near(e.activation, x, got, e.narrow_out)) {
      problem = "[" + std::to_string(i) + "] is " + std::to_string(got) + " for " + std::to_string(x);
    }
  }
  if (!problem.empty()) {
    std::printf("%s %s rows=%ld k=%ld n=%ld activation=%d bias=%d%s: %s\n", kernels.name,
                c.format->name, static_cast<long>(c.rows), static_cast<long>(c.k),
                static_cast<long>(c.n), static_cast<int>(e.activation), e.bias,
                e.narrow_out ? " bfloat16" : "", problem.c_str());
  }
  return problem.empty();
}

int64_t CheckProducts(const Kernels& kernels, bool* good) {
  struct {
    int64_t rows, k, n, group;
  } shapes[] = {{1, 37, 1, 0},    {1, 64, 64, 32}, {2, 33, 65, 0},   {4, 64, 130, 16}, {5, 100, 63, 0},
                {13, 600, 70, 0}, {3, 0, 66, 0},   {70, 33, 129, 32}};
  int64_t count = 0;
  for (const char* name : {"int8", "int4", "nf4", "float8_e4m3fn"}) {
    for (const auto& s : shapes) {
      const Case c(FindFormat(name, std::strlen(name)), s.rows, s.k, s.n, s.group, false);
      for (Elementwise activation : kAll) {
        // Every pair of the choices, over the activations and shapes.
        const bool one = count % 2 == 0, two = count / 2 % 2 == 0, three = count / 3 % 2 == 0;
        Team team(1 + static_cast<int>(count % 3));
        for (bool bias : {false, true}) {
          const Ending ending{activation, bias, one, two, three};
          *good = CheckProduct(kernels, team.workers, c, ending) && *good;
        }
        ++count;
      }
    }
  }
  return 2 * count;
}

// The names that the border reads.
bool CheckNames() {
  const std::string names = ElementwiseNames();
  Elementwise found;
  bool good = !FindElementwise("", 0, &found) && !FindElementwise("reluu", 5, &found);
  size_t from = 0, number = 0;
  for (; from < names.size(); ++number) {
    const size_t end = std::min(names.find(", ", from), names.size());
    good = good && FindElementwise(names.data() + from, end - from, &found) && found == kAll[number];
    from = end + 2;
  }
  return good && number == sizeof kAll / sizeof *kAll;
}

}  // namespace
}  // namespace fewbit

int main() {
  bool good = fewbit::CheckNames();
  if (!good) {
    std::printf("the names of the activations are WRONG\n");
  }
  for (const fewbit::Kernels* kernels : fewbit::SetsToTest()) {
    bool each = true;
    const int64_t rows = fewbit::CheckRows(*kernels, &each);
    const int64_t products = fewbit::CheckProducts(*kernels, &each);
    std::printf("%-22s %ld rows, %ld finished products, %s\n", kernels->name,
                static_cast<long>(rows), static_cast<long>(products), each ? "all right" : "WRONG");
    good = good && each;
  }
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
