// One piece of a panel, unpacked, under all row tiles of a block; shared by the drivers.

#ifndef FEWBIT_NATIVE_MATMUL_PIECES_H_
#define FEWBIT_NATIVE_MATMUL_PIECES_H_

#include <algorithm>

#include "matmul/plan.h"

namespace fewbit {

// Row tiles that go over all strips of a piece together: their activations (6 rows of 512 floats
// each) should stay in the L2 cache beside the unpacked piece.
constexpr size_t kTilesAtOnce = 16;

// body(tile, first column) for every tile and every strip of `columns` columns.
template <class Body>
void ForTiles(const Plan& plan, size_t begin, size_t end, int64_t columns, const Body& body) {
  for (size_t from = begin; from < end; from += kTilesAtOnce) {
    for (int64_t column = 0; column < kPanel; column += columns) {
      for (size_t t = from; t < std::min(end, from + kTilesAtOnce); ++t) {
        body(plan.tiles[t], column);
      }
    }
  }
}

// Packed rows of codes, all of the product's.
struct IntRows {
  const int32_t* words;   // tiles of [quad][words][rows]
  const int32_t* sums;    // [rows][segments]
  const float* scales;    // [rows][scale_columns]
  int64_t scale_columns;
  int64_t first_row;      // of the block
};

// The block's scratch.
struct IntSpace {
  float* c;               // [rows of the block][c_stride]
  int64_t c_stride;
  int32_t* partial;       // [rows of the block][64]
  float* scales;          // [segments of a piece][64]
  int32_t* zeros;
  int32_t* words;         // the unpacked piece
};

// Bytes that will be read after the piece. Asked for while it is multiplied, they come from memory
// meanwhile.
struct Ahead {
  const uint8_t* bytes;
  int64_t count;
};

// `panel` has the piece's segments; its bytes begin where its first quad says.
void MultiplyIntPiece(const Kernels& kernels, const Plan& plan, int bits, bool raw,
                      const Panel& panel, const Piece& piece, size_t begin, size_t end,
                      const IntRows& rows, const IntSpace& space, Ahead ahead);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_PIECES_H_
