// A weight of random codes in panels, with the activations and gradients that meet it.

#ifndef FEWBIT_TESTS_NATIVE_WEIGHT_CASE_H_
#define FEWBIT_TESTS_NATIVE_WEIGHT_CASE_H_

#include <cmath>
#include <cstring>
#include <vector>

#include "common/bf16.h"
#include "matmul/matmul.h"
#include "pack_code.h"
#include "team.h"

namespace fewbit {

inline double ValueOf(const Format& format, int code) {
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

// A positive number of few bits as every type of a scale writes it, the lowest byte first.
struct ScaleCode {
  int bytes, mantissa_bits, bias;
};
inline ScaleCode CodeOfScale(ScaleType type) {
  switch (type) {
    case kScaleF32:
      return {4, 23, 127};
    case kScaleF16:
      return {2, 10, 15};
    case kScaleBf16:
      return {2, 7, 127};
    case kScaleE8m0:
      return {1, 0, 127};
    default:
      return {1, 3, 7};
  }
}

struct Case {
  const Format* format;
  int64_t rows, k, n, group, groups;
  ScaleType scale_type;
  std::vector<int> codes, zeros;       // [k][n], [groups][n]
  std::vector<float> scales;           // [groups][n]
  std::vector<uint8_t> data, zero, packed_scales;
  std::vector<float> x, g;             // [rows][k], [rows][n]
  std::vector<uint16_t> x_narrow, g_narrow;   // the same, rounded
  std::vector<int8_t> x_codes;
  std::vector<float> x_scales;         // [rows][groups]

  Case(const Format* format, int64_t rows, int64_t k, int64_t n, int64_t group, bool own_zeros,
       ScaleType scale_type = kScaleF16)
      : format(format), rows(rows), k(k), n(n), group(group),
        groups(group == 0 ? 1 : CeilDiv(k, group)), scale_type(scale_type) {
    const int bits = format->bits;
    const int64_t panels = CeilDiv(n, kPanel), blocks = CeilDiv(k, kBlock);
    const ScaleCode kind = CodeOfScale(scale_type);
    data.assign(static_cast<size_t>(panels * blocks * bits * kPanel * 4), 0);
    const size_t all_scales = static_cast<size_t>(panels * groups * kPanel);
    packed_scales.assign(all_scales * static_cast<size_t>(kind.bytes), 0);
    zero.assign(own_zeros ? all_scales : 0, 0);
    const int most = format->integers() || format->table != nullptr ? (1 << bits) - 1 : 0x77;
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const int code = Random(0, most);
        PackCode(i, j, code, bits, blocks, data.data());
        codes.push_back(bits == 1 ? 2 * code : code);
      }
    }
    for (int64_t at_group = 0; at_group < groups; ++at_group) {
      for (int64_t j = 0; j < n; ++j) {
        const int random_bits = kind.mantissa_bits < 10 ? kind.mantissa_bits : 10;
        const int exponent = Random(-3, 3), mantissa = Random(0, (1 << random_bits) - 1);
        const size_t at = static_cast<size_t>((j / kPanel * groups + at_group) * kPanel + j % kPanel);
        const uint32_t word =
            static_cast<uint32_t>(exponent + kind.bias) << kind.mantissa_bits |
            static_cast<uint32_t>(mantissa) << (kind.mantissa_bits - random_bits);
        for (int byte = 0; byte < kind.bytes; ++byte) {
          packed_scales[at * static_cast<size_t>(kind.bytes) + static_cast<size_t>(byte)] =
              static_cast<uint8_t>(word >> (8 * byte));
        }
        const float fraction = std::ldexp(static_cast<float>(mantissa), -random_bits);
        scales.push_back(std::ldexp(1.0f + fraction, exponent));
        zeros.push_back(own_zeros ? Random(0, most) : format->zero);
        if (own_zeros) {
          zero[at] = static_cast<uint8_t>(zeros.back());
        }
      }
    }
    for (int64_t i = 0; i < rows * k; ++i) {
      x.push_back(static_cast<float>(Random(-1000, 1000)) / 333.0f);
      x_narrow.push_back(ToBf16(x.back()));
      x_codes.push_back(static_cast<int8_t>(Random(-128, 127)));
    }
    for (int64_t i = 0; i < rows * n; ++i) {
      g.push_back(static_cast<float>(Random(-1000, 1000)) / 333.0f);
      g_narrow.push_back(ToBf16(g.back()));
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
    m.scale = packed_scales.data();
    m.scale_type = scale_type;
    m.zero = zero.empty() ? nullptr : zero.data();
    m.group = group;
    m.groups = groups;
    m.tensor_scale = 1.0f;
    m.out = out;
    m.out_type = out_type;
    return m;
  }
};

}  // namespace fewbit

#endif  // FEWBIT_TESTS_NATIVE_WEIGHT_CASE_H_
