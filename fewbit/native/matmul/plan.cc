#include "matmul/plan.h"

#include <algorithm>

namespace fewbit {
namespace {

// The exact sum of so many products of a code up to 255 and one down to -128 fits 32 bits.
constexpr int64_t kLongestSum = 65536 / 4;

// The same for numbers of 15 bits (common/fixed_point.h), as 32-bit products of pairs.
constexpr int64_t kLongestWideSum = 256 / 4;

// A strip of 16 columns is then 32 KB of floats or of 16-bit numbers: a usual L1 cache. A whole panel
// of bytes is 128 KB: a part of a usual L2 cache.
constexpr int64_t kFloatPiece = 512 / 4;
constexpr int64_t kIntPiece = 1024 / 4;
constexpr int64_t kPanelPiece = 2048 / 4;

// Rows of a block of work; their sums (256 bytes each) should stay in the L2 cache.
constexpr int64_t kMostRows = 1024;
constexpr int64_t kFewestRows = 96;
// So many rows are worth unpacking a weight for them alone: a thread that keeps its own rows does not
// wait for activations, and lines of results, that lie in the cache of another.
constexpr int64_t kOwnRows = 256;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

void CutSegments(const Matmul& m, Plan* plan) {
  const int64_t length = m.group == 0 ? plan->quads : m.group / 4;
  // The integer sums themselves are asked for: one sum, whose fit is checked with the codes.
  const bool limited = plan->integers && m.out_type != Element::kS32;
  const int64_t longest = plan->planes == 2 ? kLongestWideSum : kLongestSum;
  const int64_t most = limited ? std::min(length, longest) : length;
  const auto count = static_cast<size_t>(m.groups * CeilDiv(length, std::max<int64_t>(most, 1)));
  plan->segment_quads.reserve(count + 1);
  plan->segment_group.reserve(count);
  for (int64_t g = 0; g < m.groups; ++g) {
    const int64_t end = std::min((g + 1) * length, plan->quads);
    for (int64_t q = g * length; q < end; q += most) {
      plan->segment_quads.push_back(q);
      plan->segment_group.push_back(g);
    }
  }
  plan->segment_quads.push_back(m.groups == 0 ? 0 : std::min(m.groups * length, plan->quads));
}

void CutPieces(const Kernels& kernels, Plan* plan) {
  const int64_t ints = kernels.int_vectors == kVectors ? kPanelPiece : kIntPiece;
  const int64_t most = plan->integers ? ints : kFloatPiece;
  const auto& starts = plan->segment_quads;
  for (int64_t s = 0; s < plan->segments();) {
    if (starts[s + 1] - starts[s] >= most) {  // a long segment: parts of it
      for (int64_t q = starts[s]; q < starts[s + 1]; q += most) {
        const int64_t end = std::min(q + most, starts[s + 1]);
        plan->pieces.push_back({s, {q, end}, {end - q}, q > starts[s], end < starts[s + 1]});
      }
      ++s;
      continue;
    }
    Piece piece{s, {starts[s]}, {}, false, false};
    for (; s < plan->segments() && starts[s + 1] - piece.bounds[0] <= most; ++s) {
      piece.bounds.push_back(starts[s + 1]);
      piece.lengths.push_back(starts[s + 1] - starts[s]);
    }
    plan->pieces.push_back(piece);
  }
}

void CutRows(const Kernels& kernels, int64_t threads, const Matmul& m, bool own_rows, Plan* plan) {
  const int height = plan->grouped    ? kernels.group_rows
                     : plan->integers ? kernels.int_rows
                                      : kernels.float_rows;
  plan->tiles = CutTiles(m.rows, plan->stream ? 1 : height);
  const int64_t count = static_cast<int64_t>(plan->tiles.size());
  const int64_t own = own_rows && plan->integers ? std::min(threads, m.rows / kOwnRows) : 1;
  const int64_t blocks = std::max(own, RowBlocks(m.rows, plan->panels, threads));
  plan->tiles_per_block = plan->stream ? count : CeilDiv(count, std::max<int64_t>(blocks, 1));
}

}  // namespace

std::vector<Tile> CutTiles(int64_t rows, int64_t height) {
  std::vector<Tile> tiles;
  const int64_t count = CeilDiv(rows, height);
  for (int64_t t = 0, row = 0; t < count; ++t) {
    const int64_t end = rows * (t + 1) / count;
    tiles.push_back({row, static_cast<int>(end - row)});
    row = end;
  }
  return tiles;
}

int64_t RowBlocks(int64_t rows, int64_t columns_of_work, int64_t threads) {
  const int64_t blocks = CeilDiv(rows, kMostRows);
  if (columns_of_work >= 4 * threads) {
    return blocks;
  }
  const int64_t wanted = CeilDiv(4 * threads, std::max<int64_t>(columns_of_work, 1));
  return std::max(blocks, std::min(wanted, CeilDiv(rows, kFewestRows)));
}

Panel PanelOf(const Matmul& m, int64_t index) {
  static constexpr int64_t kScaleBytes[] = {4, 2, 2, 1, 1};
  const int64_t per_group = index * m.groups * kPanel;
  Panel panel{};
  panel.data = m.data + index * CeilDiv(m.k, kBlock) * m.format->bits * kPanel * 4;
  panel.scale = m.scale + per_group * kScaleBytes[m.scale_type];
  panel.zero = m.zero == nullptr ? nullptr : m.zero + per_group;
  panel.table = m.format->table;
  panel.pairs = m.format->pairs;
  panel.shared_zero = m.format->zero;
  panel.scale_type = m.scale_type;
  return panel;
}

int64_t Plan::row_blocks() const {
  return CeilDiv(static_cast<int64_t>(tiles.size()), std::max<int64_t>(tiles_per_block, 1));
}

namespace {

Plan MakePlan(const Kernels& kernels, int64_t threads, const Matmul& m, int planes, bool streams) {
  Plan plan{};
  const bool codes = m.quantize_x || m.x_type == Element::kS8;
  plan.planes = planes;
  plan.integers = plan.planes > 1 || (codes && m.format->integers());
  const int few = plan.integers ? kernels.stream_int_rows : kernels.stream_rows;
  plan.stream = streams && m.rows <= few;
  plan.folded = plan.stream && !plan.integers;
  // One group: applied to the sum at once, in the order of the XLA path.
  plan.scale_each = plan.planes == 1 && (m.x_scale_per_group || m.groups == 1);
  plan.words = plan.integers ? kernels.words[m.format->bits] : 4;
  plan.quads = CeilDiv(m.k, kBlock) * kBlockQuads;
  plan.panels = CeilDiv(m.n, kPanel);
  CutSegments(m, &plan);
  if (!plan.stream) {
    CutPieces(kernels, &plan);
  }
  const bool whole = std::none_of(plan.pieces.begin(), plan.pieces.end(), [](const Piece& piece) {
    return piece.resume || piece.unfinished;
  });
  plan.grouped = plan.integers && !plan.stream && plan.segments() > 1 && whole &&
                 kernels.group_rows > 0 && m.out_type != Element::kS32;
  CutRows(kernels, threads, m, streams, &plan);
  return plan;
}

}  // namespace

Plan MakePlan(const Kernels& kernels, int64_t threads, const Matmul& m) {
  return MakePlan(kernels, threads, m, 1, false);
}

Plan MakeStreamPlan(const Kernels& kernels, int64_t threads, const Matmul& m, int planes) {
  return MakePlan(kernels, threads, m, planes, true);
}

}  // namespace fewbit
