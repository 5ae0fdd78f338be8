// How one product is cut: segments of k that share a scale, pieces of k that fit the caches, tiles
// of rows, blocks of work.

#ifndef FEWBIT_NATIVE_MATMUL_PLAN_H_
#define FEWBIT_NATIVE_MATMUL_PLAN_H_

#include <cstdint>
#include <vector>

#include "matmul/matmul.h"

namespace fewbit {

// Waking another thread costs about as long as this many products take.
constexpr int64_t kWorthSharing = 400 * 1000;
// Codes that are worth taking as a block of work where each is read once.
constexpr int64_t kBlockBytes = 64 * 1024;

// Part of k that is unpacked at once: whole segments, or a part of one.
struct Piece {
  int64_t first_segment;
  std::vector<int64_t> bounds;   // quads where its segments begin, and its end
  std::vector<int64_t> lengths;  // their lengths, in quads
  bool resume, unfinished;       // its only segment began before, goes on after
};

struct Tile {
  int64_t first_row;
  int rows;
};

struct Plan {
  bool integers;           // exact sums of codes; else floats
  bool stream;             // few rows: no unpacking
  bool grouped;            // many rows and short segments: tiles that keep their results
  bool scale_each;         // activation scales belong to the groups' sums
  int planes;              // rows of integers that a row of floats is made of, or 1
  bool folded;             // rows have a factor: fp8's bias, or what keeps sums in range
  int words;               // int32 words of an activation quad; floats: 4
  int64_t quads, panels;
  std::vector<int64_t> segment_quads;   // [segments + 1]
  std::vector<int64_t> segment_group;   // [segments]
  std::vector<Piece> pieces;
  std::vector<Tile> tiles;
  int64_t tiles_per_block;

  int64_t segments() const { return static_cast<int64_t>(segment_group.size()); }
  int64_t row_blocks() const;
};

// Rows in tiles of equal height (at most `height`), give or take one row.
std::vector<Tile> CutTiles(int64_t rows, int64_t height);

// Blocks of rows, so that `columns_of_work` blocks beside each other keep all threads busy.
int64_t RowBlocks(int64_t rows, int64_t columns_of_work, int64_t threads);

// Panel `index` of the weight, without segments.
Panel PanelOf(const Matmul& matmul, int64_t index);

// For tiles of any number of rows.
Plan MakePlan(const Kernels& kernels, int64_t threads, const Matmul& matmul);

// The same, but few rows are streamed, and then there are no pieces. `planes` as in common/fixed_point.h; more
// than one is for few rows only.
Plan MakeStreamPlan(const Kernels& kernels, int64_t threads, const Matmul& matmul, int planes);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_PLAN_H_
