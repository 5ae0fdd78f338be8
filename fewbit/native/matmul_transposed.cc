#include "matmul_transposed.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bf16.h"
#include "matmul_plan.h"

namespace fewbit {
namespace {

// Waking another thread costs about as long as this much work takes.
constexpr int64_t kWorthSharing = 400 * 1000;

// Panels that are unpacked at once: one quad of them (12 KB) and the activations of a tile of rows
// should stay in the L1 cache.
constexpr int64_t kPiecePanels = 12;

// Row tiles that go over all quads of a piece together: their activations should stay in the L2
// cache beside the unpacked piece.
constexpr size_t kTilesAtOnce = 16;

// Blocks of 32 k that few rows take from each panel before they turn to the next one: enough bytes
// in a row for the memory, few enough sums for the L1 cache.
constexpr int64_t kStreamBlocks = 4;

// Floats between the quads of an unpacked piece, so that they do not meet in one set of the cache.
constexpr int64_t kApart = 64;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Some blocks of k, cut where the scale changes.
struct Strip {
  int64_t first_quad, quads;
  std::vector<int64_t> bounds, groups;

  Strip(const Matmul& m, int64_t first_block, int64_t blocks) : first_quad(first_block * kBlockQuads) {
    const int64_t all = CeilDiv(m.k, kBlock) * kBlockQuads;
    const int64_t length = m.group == 0 ? all : m.group / 4;
    const int64_t end = std::min({first_quad + blocks * kBlockQuads, all, m.groups * length});
    for (int64_t q = first_quad; q < end;) {
      bounds.push_back(q);
      groups.push_back(q / length);
      q = std::min((groups.back() + 1) * length, end);
    }
    bounds.push_back(end);
    quads = end - first_quad;
  }

  Panel Of(const Matmul& m, int64_t index) const {
    Panel panel = PanelOf(m, index);
    panel.segment_quads = bounds.data();
    panel.segment_group = groups.data();
    panel.segments = static_cast<int64_t>(groups.size());
    return panel;
  }
};

// Rows of g as floats in tiles of [columns / lanes][rows][lanes], the missing columns zero; the
// tile of row r at out + r * columns.
void PackTile(const Matmul& m, const Tile& tile, int64_t columns, int64_t lanes, float* out) {
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t row = (tile.first_row + r) * m.n;
    float* to = out + tile.first_row * columns + r * lanes;
    for (int64_t column = 0; column < columns; column += lanes, to += tile.rows * lanes) {
      const int64_t count = std::max<int64_t>(std::min(lanes, m.n - column), 0);
      if (m.x_type == Element::kF32) {
        std::copy_n(static_cast<const float*>(m.x) + row + column, count, to);
      } else {
        const uint16_t* from = static_cast<const uint16_t*>(m.x) + row + column;
        std::transform(from, from + count, to, FromBf16);
      }
      std::fill(to + count, to + lanes, 0.0f);
    }
  }
}

class TransposedRun {
 public:
  TransposedRun(const Kernels& kernels, const Matmul& m, const std::vector<Tile>& tiles,
                const float* rows)
      : kernels_(kernels), m_(m), tiles_(tiles), g_(rows), panels_(CeilDiv(m.n, kPanel)) {}

  void StreamStrip(int64_t first_block, int64_t blocks) const {
    const Strip strip(m_, first_block, blocks);
    const int64_t each = strip.quads * 4, columns = panels_ * kPanel;
    const size_t lanes = static_cast<size_t>(m_.rows * each * kernels_.dot_lanes);
    const size_t totals = static_cast<size_t>(m_.rows * each);
    float* sums = static_cast<float*>(ScratchBytes(Scratch::kBlock, (lanes + totals) * 4));
    std::fill(sums, sums + lanes, 0.0f);
    const auto run = kernels_.stream_dots[m_.format->decoding][m_.rows - 1];
    for (int64_t p = 0; p < panels_; ++p) {
      run({strip.Of(m_, p), g_ + p * kPanel, columns, strip.quads, sums});
    }
    float* total = sums + lanes;
    kernels_.add_lanes(sums, m_.rows * strip.quads, total);
    for (int64_t r = 0; r < m_.rows; ++r) {
      Write(r, strip, total + r * each);
    }
  }

  void TileBlock(int64_t block, size_t begin, size_t end) const {
    const Strip strip(m_, block, 1);
    const int64_t pieces = CeilDiv(panels_, kPiecePanels), most = CeilDiv(panels_, pieces);
    const int64_t first_row = tiles_[begin].first_row;
    const int64_t rows = tiles_[end - 1].first_row + tiles_[end - 1].rows - first_row;
    const int64_t quad_stride = most * kPanel * 4 + kApart;
    const size_t sums = static_cast<size_t>(rows * kBlock);
    const size_t unpacked = static_cast<size_t>(quad_stride * strip.quads);
    float* c = static_cast<float*>(ScratchBytes(Scratch::kBlock, (sums + unpacked) * 4));
    float* floats = c + sums;
    std::fill(c, c + sums, 0.0f);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t from = panels_ * piece / pieces, to = panels_ * (piece + 1) / pieces;
      for (int64_t p = from; p < to; ++p) {
        kernels_.unpack_dots[m_.format->decoding](
            {strip.Of(m_, p), floats + (p - from) * kPanel * 4, quad_stride});
      }
      for (size_t at = begin; at < end; at += kTilesAtOnce) {
        for (int64_t q = 0; q < strip.quads; ++q) {
          for (size_t t = at; t < std::min(end, at + kTilesAtOnce); ++t) {
            const Tile& tile = tiles_[t];
            const float* a =
                g_ + tile.first_row * panels_ * kPanel + from * kPanel * tile.rows;
            kernels_.tile_dots[tile.rows - 1]({a, floats + q * quad_stride,
                                               (to - from) * kPanel / kernels_.dot_lanes,
                                               c + (tile.first_row - first_row) * kBlock + q * 4});
          }
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      Write(first_row + r, strip, c + r * kBlock);
    }
    ReleaseLargeScratch(Scratch::kBlock);
  }

 private:
  void Write(int64_t row, const Strip& strip, const float* sums) const {
    const int64_t k = strip.first_quad * 4, count = std::min(strip.quads * 4, m_.k - k);
    const float factor = m_.tensor_scale;
    if (m_.out_type == Element::kF32) {
      std::transform(sums, sums + count, static_cast<float*>(m_.out) + row * m_.k + k,
                     [factor](float sum) { return sum * factor; });
    } else {
      std::transform(sums, sums + count, static_cast<uint16_t*>(m_.out) + row * m_.k + k,
                     [factor](float sum) { return ToBf16(sum * factor); });
    }
  }

  const Kernels& kernels_;
  const Matmul& m_;
  const std::vector<Tile>& tiles_;
  const float* g_;
  int64_t panels_;
};

}  // namespace

void RunTransposed(const Kernels& kernels, const Workers& workers, const Matmul& m) {
  if (m.rows == 0 || m.k == 0) {
    return;
  }
  if (m.n == 0) {
    const int64_t width = m.out_type == Element::kBf16 ? 2 : 4;
    std::memset(m.out, 0, static_cast<size_t>(m.rows * m.k * width));
    return;
  }
  const int64_t columns = CeilDiv(m.n, kPanel) * kPanel, blocks = CeilDiv(m.k, kBlock);
  Workers team = workers;
  if (blocks * columns * m.format->bits * 4 * m.rows < kWorthSharing || !team.schedule) {
    team.threads = 1;
  }
  const bool stream = m.rows <= kernels.stream_rows;
  const std::vector<Tile> tiles = CutTiles(m.rows, stream ? 1 : kernels.dot_rows);
  const int64_t count = static_cast<int64_t>(tiles.size());
  float* rows = static_cast<float*>(
      ScratchBytes(Scratch::kCall, static_cast<size_t>(m.rows * columns) * 4));
  Workers packers = team;
  if (stream) {
    packers.threads = 1;
  }
  ParallelFor(packers, count, [&](int64_t t) {
    PackTile(m, tiles[static_cast<size_t>(t)], columns, kernels.dot_lanes, rows);
  });
  const TransposedRun run(kernels, m, tiles, rows);
  if (stream) {
    const int64_t fair = blocks / (4 * team.threads);
    const int64_t step = std::min(std::max<int64_t>(fair, 1), kStreamBlocks);
    ParallelFor(team, CeilDiv(blocks, step), [&](int64_t strip) {
      run.StreamStrip(strip * step, std::min(step, blocks - strip * step));
    });
  } else {
    const int64_t wanted = RowBlocks(m.rows, blocks, team.threads);
    const int64_t per_block = CeilDiv(count, wanted), row_blocks = CeilDiv(count, per_block);
    ParallelFor(team, blocks * row_blocks, [&](int64_t task) {
      const int64_t begin = task % row_blocks * per_block;
      run.TileBlock(task / row_blocks, static_cast<size_t>(begin),
                    static_cast<size_t>(std::min(count, begin + per_block)));
    });
  }
  ReleaseLargeScratch(Scratch::kCall);
}

}  // namespace fewbit
