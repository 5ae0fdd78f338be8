#include "matmul/transposed_rows.h"

#include <algorithm>

#include "common/bf16.h"

namespace fewbit {
namespace {

template <int kWidth, class From, class Convert>
void PackTile(const Matmul& m, const Tile& tile, const Columns& piece, const Convert& convert,
              float* out) {
  for (int r = 0; r < tile.rows; ++r) {
    const From* from = static_cast<const From*>(m.x) + (tile.first_row + r) * m.n;
    float* to = out + r * kWidth;
    int64_t column = piece.first;
    for (; column + kWidth <= std::min(m.n, piece.end); column += kWidth) {
      for (int i = 0; i < kWidth; ++i) {
        to[i] = convert(from[column + i]);
      }
      to += tile.rows * kWidth;
    }
    for (; column < piece.end; column += kWidth, to += tile.rows * kWidth) {
      for (int i = 0; i < kWidth; ++i) {
        to[i] = column + i < m.n ? convert(from[column + i]) : 0.0f;
      }
    }
  }
}

template <int kWidth>
void PackTile(const Matmul& m, const Tile& tile, const Columns& piece, float* out) {
  if (m.x_type == Element::kF32) {
    PackTile<kWidth, float>(m, tile, piece, [](float value) { return value; }, out);
  } else {
    PackTile<kWidth, uint16_t>(m, tile, piece, FromBf16, out);
  }
}

}  // namespace

std::vector<Columns> CutColumns(int64_t panels, int64_t most) {
  std::vector<Columns> pieces;
  const int64_t count = (panels + most - 1) / most;
  for (int64_t i = 0; i < count; ++i) {
    pieces.push_back({panels * i / count * kPanel, panels * (i + 1) / count * kPanel});
  }
  return pieces;
}

void PackTile(const Matmul& m, const Tile& tile, const Columns& piece, int lanes, float* out) {
  switch (lanes) {  // known to the compiler, which then copies a vector at a time
    case 1:
      return PackTile<1>(m, tile, piece, out);
    case 4:
      return PackTile<4>(m, tile, piece, out);
    case 8:
      return PackTile<8>(m, tile, piece, out);
    default:
      return PackTile<16>(m, tile, piece, out);
  }
}

}  // namespace fewbit
