#include "common/activations.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "common/bf16.h"
#include "common/fixed_point.h"

namespace fewbit {
namespace {

constexpr size_t kLine = 64;

float FromF16(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  value *= 0x1p112f;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= (magnitude >= 0x7c00u ? 0x7f800000u : 0u) | static_cast<uint32_t>(half & 0x8000u) << 16;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float ScaleAt(const void* scales, Element type, int64_t i) {
  switch (type) {
    case Element::kBf16:
      return FromBf16(static_cast<const uint16_t*>(scales)[i]);
    case Element::kF16:
      return FromF16(static_cast<const uint16_t*>(scales)[i]);
    default:
      return static_cast<const float*>(scales)[i];
  }
}

void RowOfFloats(const Matmul& m, int64_t row, float* out) {
  if (m.x_type == Element::kF32) {
    std::memcpy(out, static_cast<const float*>(m.x) + row * m.k, static_cast<size_t>(m.k) * 4);
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(m.x) + row * m.k;
  for (int64_t k = 0; k < m.k; ++k) {
    out[k] = FromBf16(x[k]);
  }
}

// [rows][k] to [k][rows], k rounded up with zeros. The height is a constant where it is hot.
template <int kRows, class Load>
void Interleave(int rows_if_any, int64_t length, int64_t padded, const Load& load, float* out) {
  const int rows = kRows == 0 ? rows_if_any : kRows;
  for (int64_t k = 0; k < length; ++k, out += rows) {
    for (int m = 0; m < rows; ++m) {
      out[m] = load(m, k);
    }
  }
  std::fill(out, out + (padded - length) * rows, 0.0f);
}

template <class Load>
void InterleaveRows(int rows, int64_t length, int64_t padded, const Load& load, float* out) {
  switch (rows) {
    case 1:
      return Interleave<1>(rows, length, padded, load, out);
    case 6:
      return Interleave<6>(rows, length, padded, load, out);
    default:
      return Interleave<0>(rows, length, padded, load, out);
  }
}

}  // namespace

Activations TakeActivations(const Plan& plan, const Matmul& m) {
  const auto rows = static_cast<size_t>(m.rows), quads = static_cast<size_t>(plan.quads);
  const bool codes = m.quantize_x || m.x_type == Element::kS8;
  size_t used = 0;
  const auto take = [&used](size_t bytes) {
    const size_t at = used;
    used += (bytes + kLine - 1) / kLine * kLine;
    return at;
  };
  Activations a{};
  a.scale_columns = m.x_scale_per_group ? m.groups : 1;
  const auto planes = static_cast<size_t>(plan.planes);
  const size_t packed = take(rows * planes * quads * 4 * static_cast<size_t>(plan.words));
  const size_t sums = take(plan.integers ? rows * planes * plan.segment_group.size() * 4 : 0);
  const size_t scales =
      take(plan.integers || codes ? rows * planes * static_cast<size_t>(a.scale_columns) * 4 : 0);
  const size_t code = take(codes ? rows * quads * 4 : 0);
  const size_t row = take(m.quantize_x || planes > 1 ? plan.tiles.size() * quads * 16 : 0);
  const size_t factors = take(plan.folded ? rows * 4 : 0);
  const size_t units = take(planes > 1 ? plan.tiles.size() * quads * 16 : 0);
  const size_t digits = take(planes > 1 ? plan.tiles.size() * quads * 8 : 0);
  char* base = static_cast<char*>(ScratchBytes(Scratch::kCall, used));
  a.floats = reinterpret_cast<float*>(base + packed);
  a.words = reinterpret_cast<int32_t*>(base + packed);
  a.sums = reinterpret_cast<int32_t*>(base + sums);
  a.scales = reinterpret_cast<float*>(base + scales);
  a.codes = reinterpret_cast<int8_t*>(base + code);
  a.row = reinterpret_cast<float*>(base + row);
  a.factors = reinterpret_cast<float*>(base + factors);
  a.units = reinterpret_cast<int32_t*>(base + units);
  a.digits = reinterpret_cast<int16_t*>(base + digits);
  return a;
}

void PrepareTile(const Kernels& kernels, const Plan& plan, const Matmul& m, int64_t index,
                 const Activations& a) {
  const Tile tile = plan.tiles[static_cast<size_t>(index)];
  const int64_t padded = plan.quads * 4;
  const bool given = m.x_type == Element::kS8;
  if (plan.planes > 1) {
    RowOfFloats(m, tile.first_row, a.row + index * padded);
    PackPlanes(plan, m, tile.first_row, a);
    return;
  }
  float* packed = a.floats + tile.first_row * padded;
  if (!given && !m.quantize_x) {
    if (m.x_type == Element::kF32) {
      const float* x = static_cast<const float*>(m.x) + tile.first_row * m.k;
      const auto load = [x, &m](int r, int64_t k) { return x[r * m.k + k]; };
      InterleaveRows(tile.rows, m.k, padded, load, packed);
    } else {
      const uint16_t* x = static_cast<const uint16_t*>(m.x) + tile.first_row * m.k;
      const auto load = [x, &m](int r, int64_t k) { return FromBf16(x[r * m.k + k]); };
      InterleaveRows(tile.rows, m.k, padded, load, packed);
    }
    if (plan.folded) {
      a.factors[tile.first_row] = FoldRow(m, m.k, packed);
    }
    return;
  }

  int8_t* codes = a.codes + tile.first_row * padded;
  const int64_t group = m.x_scale_per_group && m.group != 0 ? m.group : std::max<int64_t>(m.k, 1);
  for (int64_t r = tile.first_row; r < tile.first_row + tile.rows; ++r) {
    int8_t* row = a.codes + r * padded;
    float* scales = a.scales + r * a.scale_columns;
    const bool stored = given || m.x_scale != nullptr;
    for (int64_t g = 0; stored && g < a.scale_columns; ++g) {
      const int64_t from = m.x_scale_rows == 1 ? 0 : r;
      scales[g] = m.x_scale == nullptr
                      ? 1.0f
                      : ScaleAt(m.x_scale, m.x_scale_type, from * a.scale_columns + g);
    }
    if (given) {
      std::memcpy(row, static_cast<const int8_t*>(m.x) + r * m.k, static_cast<size_t>(m.k));
    } else {
      const float* x = static_cast<const float*>(m.x) + r * m.k;
      if (m.x_type == Element::kBf16) {
        x = a.row + index * padded;
        RowOfFloats(m, r, a.row + index * padded);
      }
      kernels.quantize_row({x, m.k, group, m.x_type == Element::kBf16, stored, row, scales});
    }
    std::memset(row + m.k, 0, static_cast<size_t>(padded - m.k));
  }

  if (!plan.integers) {
    const int64_t first = tile.first_row;
    const auto load = [&](int r, int64_t k) {
      const int64_t g = m.x_scale_per_group ? k / group : 0;
      return static_cast<float>(codes[r * padded + k]) * a.scales[(first + r) * a.scale_columns + g];
    };
    InterleaveRows(tile.rows, m.k, padded, load, packed);
    if (plan.folded) {
      a.factors[tile.first_row] = FoldRow(m, m.k, packed);
    }
    return;
  }
  const uint32_t zero = m.zero == nullptr ? static_cast<uint32_t>(m.format->zero) : 1;
  for (int64_t r = tile.first_row; r < tile.first_row + tile.rows; ++r) {
    kernels.sum_codes(a.codes + r * padded, plan.segment_quads.data(), plan.segments(), zero,
                      a.sums + r * plan.segments());
  }
  kernels.pack_codes(codes, padded, tile.rows, plan.quads, plan.words,
                     a.words + tile.first_row * plan.quads * plan.words);
}

}  // namespace fewbit
