#include "matmul/pieces.h"

#include <cmath>
#include <cstring>

namespace fewbit {
namespace {

constexpr int64_t kLine = 64;

}  // namespace

void MultiplyIntPiece(const Kernels& kernels, const Plan& plan, int bits, bool raw,
                      const Panel& panel, const Piece& piece, size_t begin, size_t end,
                      const IntRows& rows, const IntSpace& space, Ahead ahead) {
  const bool as_it_is = kernels.panel_is_unpacked[bits];
  int32_t* words = as_it_is ? nullptr : space.words;
  kernels.unpack_int[bits - 1]({panel, nullptr, words, space.scales, space.zeros});
  const int64_t quads = piece.bounds.back() - piece.bounds.front();
  const int32_t* b = words;
  if (as_it_is) {
    b = reinterpret_cast<const int32_t*>(panel.data) + panel.segment_quads[0] * kPanel;
  }
  const int64_t columns = kernels.int_vectors * kLanes;
  const int64_t turns = static_cast<int64_t>(end - begin) * (kPanel / columns);
  const int64_t each = (ahead.count / kLine + turns) / turns * kLine;
  ForTiles(plan, begin, end, columns, [&](const Tile& tile, int64_t column) {
    for (int64_t i = std::min(each, ahead.count); i > 0; i -= kLine) {
      __builtin_prefetch(ahead.bytes, 0, 2);
      ahead.bytes += kLine, ahead.count -= kLine;
    }
    const int64_t row = tile.first_row, local = row - rows.first_row;
    TileInt args{};
    args.a = rows.words + (row * plan.quads + piece.bounds.front() * tile.rows) * plan.words;
    args.b = b + column * quads * plan.words;
    args.segment_quads = piece.lengths.data();
    args.segment_group = panel.segment_group;
    args.segments = panel.segments;
    args.scales = space.scales + column;
    args.zeros = panel.zero == nullptr ? nullptr : space.zeros + column;
    args.sums = rows.sums + row * plan.segments() + piece.first_segment;
    args.sums_stride = plan.segments();
    args.a_scale = rows.scales + row * rows.scale_columns;
    args.a_scale_stride = rows.scale_columns;
    args.scale_each = plan.scale_each;
    args.partial = space.partial + local * kPanel + column;
    args.c = space.c + local * space.c_stride + column;
    args.c_stride = space.c_stride;
    args.first = piece.first_segment == 0;
    args.resume = piece.resume;
    args.unfinished = piece.unfinished;
    args.raw = raw;
    const auto height = static_cast<size_t>(tile.rows - 1);
    (plan.grouped ? kernels.tile_groups[height] : kernels.tile_int[bits - 1][height])(args);
  });
}

}  // namespace fewbit
