#include "matmul/transposed.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/bf16.h"
#include "matmul/transposed_rows.h"

namespace fewbit {
namespace {

// From so many rows on it pays to turn the weight while it is unpacked, so that k lies along the
// lanes and the tiles of the forward product run over it: they have no sums to add up at the end.
constexpr int64_t kManyRows = 64;

// Panels that are unpacked at once, and quads of them that a tile of rows goes over at once: these
// (16 KB) and the rows of the tile should stay in the L1 cache.
constexpr int64_t kPiecePanels = 8;
constexpr int64_t kQuadsAtOnce = 2;

// Row tiles that go over all quads of a piece together: their activations should stay in the L2
// cache beside the unpacked piece.
constexpr size_t kTilesAtOnce = 16;

// Blocks of 32 k that few rows take from a panel before they turn to the next one: enough bytes in
// a row for the memory, few enough sums for the L1 cache.
constexpr int64_t kStreamBlocks = 4;

// Floats between the quads of an unpacked piece, so that they do not meet in one set of the cache.
constexpr int64_t kApart = 64;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Some blocks of k, cut where the scale changes.
struct Strip {
  int64_t first_quad, quads;
  std::vector<int64_t> bounds, groups;

  Strip(const Matmul& m, int64_t first_block, int64_t blocks)
      : first_quad(first_block * kBlockQuads) {
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

  // A strip jumps from panel to panel, which the CPU does not foresee: the bytes of the next one
  // are asked for while this one is used.
  Panel Of(const Matmul& m, int64_t index) const {
    Panel panel = PanelOf(m, index);
    const int64_t block = m.format->bits * kPanel * 4, step = CeilDiv(m.k, kBlock) * block;
    if ((index + 1) * kPanel < m.n) {
      const uint8_t* next = panel.data + step + first_quad / kBlockQuads * block;
      for (int64_t at = 0; at < quads * block / kBlockQuads; at += 64) {
        __builtin_prefetch(next + at);
      }
    }
    panel.segment_quads = bounds.data();
    panel.segment_group = groups.data();
    panel.segments = static_cast<int64_t>(groups.size());
    return panel;
  }
};

class TransposedRun {
 public:
  TransposedRun(const Kernels& kernels, const Matmul& m, const std::vector<Tile>& tiles,
                const std::vector<Columns>& pieces, const float* g)
      : kernels_(kernels), m_(m), tiles_(tiles), pieces_(pieces), g_(g) {}

  void StreamStrip(int64_t first_block, int64_t blocks) const {
    const Strip strip(m_, first_block, blocks);
    const int64_t each = strip.quads * 4, columns = pieces_.back().end;
    const size_t lanes = static_cast<size_t>(m_.rows * each * kernels_.dot_lanes);
    const size_t totals = static_cast<size_t>(m_.rows * each);
    float* sums = static_cast<float*>(ScratchBytes(Scratch::kBlock, (lanes + totals) * 4));
    std::fill(sums, sums + lanes + totals, 0.0f);
    const auto run = kernels_.stream_dots[m_.format->decoding][m_.rows - 1];
    for (int64_t column = 0; column < columns; column += kPanel) {
      run({strip.Of(m_, column / kPanel), g_ + column, columns, strip.quads, sums});
    }
    float* total = sums + lanes;
    kernels_.add_lanes[m_.format->decoding](sums, m_.rows * strip.quads, total);
    for (int64_t r = 0; r < m_.rows; ++r) {
      Write(r, strip, total + r * each);
    }
  }

  // A strip of one block.
  void DotTiles(int64_t block, size_t begin, size_t end) const {
    const Strip strip(m_, block, 1);
    const int64_t width = strip.quads * 4;
    const int64_t first_row = tiles_[begin].first_row, rows = RowsOf(begin, end);
    const int64_t quad_stride = kPiecePanels * kPanel * 4 + kApart;
    const size_t sums = static_cast<size_t>(rows * width);
    const size_t unpacked = static_cast<size_t>(quad_stride * strip.quads);
    float* c = static_cast<float*>(ScratchBytes(Scratch::kBlock, (sums + unpacked) * 4));
    float* floats = c + sums;
    std::fill(c, c + sums, 0.0f);
    for (const Columns& piece : pieces_) {
      const int64_t panels = (piece.end - piece.first) / kPanel;
      for (int64_t column = piece.first; column < piece.end; column += kPanel) {
        kernels_.unpack_dots[m_.format->decoding](
            {strip.Of(m_, column / kPanel), floats + (column - piece.first) * 4, quad_stride});
      }
      for (size_t at = begin; at < end; at += kTilesAtOnce) {
        for (int64_t quad = 0; quad < strip.quads; quad += kQuadsAtOnce) {
          for (size_t t = at; t < std::min(end, at + kTilesAtOnce); ++t) {
            const Tile& tile = tiles_[t];
            const float* a = g_ + piece.Place(m_.rows, tile);
            float* to_c = c + (tile.first_row - first_row) * width;
            for (int64_t q = quad; q < std::min(strip.quads, quad + kQuadsAtOnce); ++q) {
              kernels_.tile_dots[tile.rows - 1](
                  {a, floats + q * quad_stride, panels, to_c + q * 4, width});
            }
          }
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      Write(first_row + r, strip, c + r * width);
    }
    ReleaseLargeScratch(Scratch::kBlock);
  }

  // A strip of two blocks, which is as wide as a panel.
  void TurnedTiles(int64_t pair, size_t begin, size_t end) const {
    const Strip strip(m_, pair * 2, 2);
    const int64_t first_row = tiles_[begin].first_row, rows = RowsOf(begin, end);
    const int64_t width = kernels_.float_vectors * kLanes;
    const int64_t most = std::min(kPiecePanels * kPanel, pieces_.back().end);
    const size_t sums = static_cast<size_t>(rows * kPanel);
    const size_t unpacked = static_cast<size_t>(most * kPanel);
    float* c = static_cast<float*>(ScratchBytes(Scratch::kBlock, (sums + unpacked) * 4));
    float* floats = c + sums;
    if (strip.quads * 4 < kPanel) {  // the columns of c beyond k are computed all the same
      std::fill(floats, floats + unpacked, 0.0f);
    }
    for (const Columns& piece : pieces_) {
      const int64_t length = piece.end - piece.first;
      for (int64_t column = 0; column < length; column += kPanel) {
        kernels_.unpack_turned[m_.format->decoding](
            {strip.Of(m_, (piece.first + column) / kPanel), floats + column * width, length});
      }
      for (size_t at = begin; at < end; at += kTilesAtOnce) {
        for (int64_t k = 0; k < strip.quads * 4; k += width) {
          for (size_t t = at; t < std::min(end, at + kTilesAtOnce); ++t) {
            const Tile& tile = tiles_[t];
            float* to_c = c + (tile.first_row - first_row) * kPanel + k;
            kernels_.tile_float[tile.rows - 1]({g_ + piece.Place(m_.rows, tile),
                                                floats + k * length, to_c, length,
                                                piece.first == 0});
          }
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      Write(first_row + r, strip, c + r * kPanel);
    }
    ReleaseLargeScratch(Scratch::kBlock);
  }

 private:
  int64_t RowsOf(size_t begin, size_t end) const {
    return tiles_[end - 1].first_row + tiles_[end - 1].rows - tiles_[begin].first_row;
  }

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
  const std::vector<Columns>& pieces_;
  const float* g_;
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
  const int64_t panels = CeilDiv(m.n, kPanel), blocks = CeilDiv(m.k, kBlock);
  Workers team = workers;
  if (blocks * panels * kPanel * m.format->bits * 4 * m.rows < kWorthSharing || !team.schedule) {
    team.threads = 1;
  }
  const bool stream = m.rows <= kernels.stream_rows;
  const bool turned = !stream && m.rows >= kManyRows;
  const std::vector<Tile> tiles =
      CutTiles(m.rows, stream ? 1 : turned ? kernels.float_rows : kernels.dot_rows);
  const int64_t count = static_cast<int64_t>(tiles.size());
  const std::vector<Columns> pieces = CutColumns(panels, stream ? panels : kPiecePanels);
  float* g = static_cast<float*>(
      ScratchBytes(Scratch::kCall, static_cast<size_t>(m.rows * panels * kPanel) * 4));
  Workers packers = team;
  if (stream) {
    packers.threads = 1;
  }
  ParallelFor(packers, count, [&](int64_t t) {
    const Tile& tile = tiles[static_cast<size_t>(t)];
    for (const Columns& piece : pieces) {
      PackTile(m, tile, piece, turned ? 1 : kernels.dot_lanes, g + piece.Place(m.rows, tile));
    }
  });
  const TransposedRun run(kernels, m, tiles, pieces, g);
  if (stream) {
    const int64_t fair = std::max<int64_t>(blocks / (4 * team.threads), 1);
    const int64_t step = std::min(fair, kStreamBlocks);
    ParallelFor(team, CeilDiv(blocks, step), [&](int64_t strip) {
      run.StreamStrip(strip * step, std::min(step, blocks - strip * step));
    });
  } else {
    const int64_t strips = turned ? CeilDiv(blocks, 2) : blocks;
    const int64_t wanted = RowBlocks(m.rows, strips, team.threads);
    const int64_t per_block = CeilDiv(count, wanted), row_blocks = CeilDiv(count, per_block);
    ParallelFor(team, strips * row_blocks, [&](int64_t task) {
      const size_t begin = static_cast<size_t>(task % row_blocks * per_block);
      const size_t end = std::min(begin + static_cast<size_t>(per_block), tiles.size());
      if (turned) {
        run.TurnedTiles(task / row_blocks, begin, end);
      } else {
        run.DotTiles(task / row_blocks, begin, end);
      }
    });
  }
  ReleaseLargeScratch(Scratch::kCall);
}

}  // namespace fewbit
