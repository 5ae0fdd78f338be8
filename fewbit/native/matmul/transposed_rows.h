// The rows of g as the kernels of the transposed product want them, in pieces of columns.

#ifndef FEWBIT_NATIVE_TRANSPOSED_ROWS_H_
#define FEWBIT_NATIVE_TRANSPOSED_ROWS_H_

#include <cstdint>
#include <vector>

#include "matmul/plan.h"

namespace fewbit {

// Columns that are unpacked at once.
struct Columns {
  int64_t first, end;  // multiples of a panel

  // Where a tile's part of g lies: piece by piece, so that the tiles of one follow each other.
  int64_t Place(int64_t rows, const Tile& tile) const {
    return first * rows + (end - first) * tile.first_row;
  }
};

std::vector<Columns> CutColumns(int64_t panels, int64_t most);

// A tile's rows in a piece, as floats [columns / lanes][rows][lanes]; missing columns are zero.
// Lanes: 1, 4, 8 or 16.
void PackTile(const Matmul& matmul, const Tile& tile, const Columns& piece, int lanes, float* out);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_TRANSPOSED_ROWS_H_
