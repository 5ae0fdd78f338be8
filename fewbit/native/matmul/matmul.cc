#include "matmul/matmul.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/activations.h"
#include "common/bf16.h"
#include "common/fixed_point.h"
#include "matmul/pieces.h"

namespace fewbit {
namespace {

// Where sums become results: the columns of one panel.
class RowWriter {
 public:
  RowWriter(const Kernels& kernels, const Matmul& m, int64_t panel)
      : kernels_(kernels), m_(m), column_(panel * kPanel),
        count_(std::min<int64_t>(kPanel, m.n - column_)) {
    if (m.bias == nullptr) {
      return;
    }
    for (int64_t i = 0; i < kPanel; ++i) {
      bias_[i] = m.bias_type == Element::kF32
                     ? static_cast<const float*>(m.bias)[column_ + i]
                     : FromBf16(static_cast<const uint16_t*>(m.bias)[column_ + i]);
    }
  }

  // `sums` are 64 floats, or int32 if those are asked for.
  void Write(int64_t row, const float* sums, float factor) const {
    const int64_t at = row * m_.n + column_;
    if (m_.out_type == Element::kS32) {
      std::memcpy(static_cast<int32_t*>(m_.out) + at, sums, static_cast<size_t>(count_) * 4);
      return;
    }
    alignas(64) float finished[kPanel];
    if (m_.finishes()) {
      const float* bias = m_.bias == nullptr ? nullptr : bias_;
      kernels_.finish_row({sums, factor, bias, m_.activation, finished});
      sums = finished;
      factor = 1.0f;
    }
    if (m_.out_type == Element::kF32) {
      float* out = static_cast<float*>(m_.out) + at;
      for (int64_t i = 0; i < count_; ++i) {
        out[i] = sums[i] * factor;
      }
    } else {
      uint16_t* out = static_cast<uint16_t*>(m_.out) + at;
      for (int64_t i = 0; i < count_; ++i) {
        out[i] = ToBf16(sums[i] * factor);
      }
    }
  }

 private:
  const Kernels& kernels_;
  const Matmul& m_;
  const int64_t column_, count_;
  alignas(64) float bias_[kPanel];
};

// Sums over nothing.
void WriteEmptySums(const Kernels& kernels, const Matmul& m) {
  alignas(64) const float zeros[kPanel] = {};
  for (int64_t panel = 0; panel * kPanel < m.n; ++panel) {
    const RowWriter writer(kernels, m, panel);
    for (int64_t row = 0; row < m.rows; ++row) {
      writer.Write(row, zeros, 1.0f);
    }
  }
}

class Run {
 public:
  Run(const Kernels& kernels, const Matmul& m, const Plan& plan, const Activations& a)
      : kernels_(kernels), m_(m), plan_(plan), a_(a) {}

  void StreamPanel(int64_t index) const {
    // More rows than a kernel takes come in turns; the panel is in the cache from the first one on.
    for (int64_t row = 0; row < m_.rows; row += kMaxStreamRows) {
      StreamRows(index, row, std::min<int64_t>(kMaxStreamRows, m_.rows - row));
    }
  }

  void TilePanel(int64_t index, int64_t row_block) const {
    const size_t begin = static_cast<size_t>(row_block * plan_.tiles_per_block);
    const size_t end =
        std::min(begin + static_cast<size_t>(plan_.tiles_per_block), plan_.tiles.size());
    const int64_t first_row = plan_.tiles[begin].first_row;
    const int64_t rows = plan_.tiles[end - 1].first_row + plan_.tiles[end - 1].rows - first_row;
    const bool in_place = SumsAreResults(index);
    Space space = TakeSpace(rows, in_place);
    if (in_place) {
      space.c = static_cast<float*>(m_.out) + first_row * m_.n + index * kPanel;
    }
    for (size_t p = 0; p < plan_.pieces.size(); ++p) {
      if (plan_.integers) {
        IntPiece(index, p, begin, end, first_row, space);
      } else {
        FloatPiece(index, plan_.pieces[p], begin, end, first_row, p == 0, space);
      }
    }
    if (!in_place) {
      Write(index, first_row, rows, Raw() ? reinterpret_cast<float*>(space.partial) : space.c);
    }
    ReleaseLargeScratch(Scratch::kBlock);
  }

 private:
  void StreamRows(int64_t index, int64_t first, int64_t rows) const {
    alignas(64) float sums[kMaxStreamRows * kPanel];
    const size_t height = static_cast<size_t>(rows * plan_.planes - 1);
    const int64_t words = plan_.quads * plan_.words, padded = plan_.quads * 4;
    const auto joined = kernels_.stream_planes[m_.format->bits - 1];
    if (plan_.integers) {
      const StreamInt stream{PanelAt(index), a_.words + first * words, words,
                             a_.sums + first * plan_.segments(),
                             a_.scales + first * a_.scale_columns, a_.scale_columns,
                             plan_.scale_each, Raw(), sums};
      if (plan_.planes > 1 && joined != nullptr) {
        joined(stream);
      } else {
        kernels_.stream_int[m_.format->bits - 1][height](stream);
        JoinPlanes(sums);
      }
    } else {
      kernels_.stream_float[m_.format->decoding][height]({PanelAt(index), a_.floats, padded, sums});
    }
    Write(index, first, rows, sums);
  }

  // The sums of a row's planes become the row's sum, in the place of its first plane.
  void JoinPlanes(float* sums) const {
    for (int64_t r = 0; plan_.planes > 1 && r < m_.rows; ++r) {
      const float* factors = a_.scales + r * plan_.planes;
      const float* from = sums + r * plan_.planes * kPanel;
      float* to = sums + r * kPanel;
      for (int i = 0; i < kPanel; ++i) {
        float total = 0.0f;
        for (int p = 0; p < plan_.planes; ++p) {
          total += from[p * kPanel + i] * factors[p];
        }
        to[i] = total;
      }
    }
  }

  // Whether sums of integers are the results, in a whole panel, and are written once.
  bool SumsAreResults(int64_t index) const {
    return plan_.integers && plan_.scale_each && plan_.pieces.size() == 1 &&
           m_.out_type == Element::kF32 && !m_.finishes() && m_.tensor_scale == 1.0f &&
           (index + 1) * kPanel <= m_.n;
  }

  struct Space {
    float* c;           // [rows][c_stride]
    int64_t c_stride;
    int32_t* partial;   // [rows][64]
    float* scales;      // [segments of a piece][64]
    int32_t* zeros;
    char* unpacked;
  };

  bool Raw() const { return m_.out_type == Element::kS32; }

  Panel PanelAt(int64_t index) const {
    Panel panel = PanelOf(m_, index);
    panel.segment_quads = plan_.segment_quads.data();
    panel.segment_group = plan_.segment_group.data();
    panel.segments = plan_.segments();
    return panel;
  }

  // `in_place`: without sums.
  Space TakeSpace(int64_t rows, bool in_place) const {
    size_t quads = 0, segments = 0;
    for (const Piece& piece : plan_.pieces) {
      quads = std::max(quads, static_cast<size_t>(piece.bounds.back() - piece.bounds.front()));
      segments = std::max(segments, piece.lengths.size());
    }
    const size_t partial = static_cast<size_t>(rows) * kPanel * 4, sums = in_place ? 0 : partial;
    const size_t per_segment = segments * kPanel * 4;
    const size_t unpacked = quads * kPanel * 4 * static_cast<size_t>(plan_.words);
    char* at = static_cast<char*>(
        ScratchBytes(Scratch::kBlock, sums + partial + 2 * per_segment + unpacked));
    char* rest = at + sums + partial;
    return {reinterpret_cast<float*>(at),  in_place ? m_.n : kPanel,
            reinterpret_cast<int32_t*>(at + sums), reinterpret_cast<float*>(rest),
            reinterpret_cast<int32_t*>(rest + per_segment), rest + 2 * per_segment};
  }

  Panel PanelOfPiece(int64_t index, const Piece& piece) const {
    Panel panel = PanelAt(index);
    panel.segment_quads = piece.bounds.data();
    panel.segment_group += piece.first_segment;
    panel.segments = static_cast<int64_t>(piece.lengths.size());
    return panel;
  }

  void FloatPiece(int64_t index, const Piece& piece, size_t begin, size_t end, int64_t first_row,
                  bool first, const Space& space) const {
    float* floats = reinterpret_cast<float*>(space.unpacked);
    kernels_.unpack_float[m_.format->decoding](
        {PanelOfPiece(index, piece), floats, nullptr, nullptr, nullptr});
    const int64_t length = (piece.bounds.back() - piece.bounds.front()) * 4;
    const int64_t columns = kernels_.float_vectors * kLanes;
    ForTiles(plan_, begin, end, columns, [&](const Tile& tile, int64_t column) {
      const float* a =
          a_.floats + tile.first_row * plan_.quads * 4 + piece.bounds.front() * 4 * tile.rows;
      float* c = space.c + (tile.first_row - first_row) * kPanel + column;
      kernels_.tile_float[tile.rows - 1]({a, floats + column * length, c, length, first});
    });
  }

  // The codes of a piece, or of the next panel's first behind the last.
  Ahead CodesOfPiece(int64_t index, size_t p) const {
    if (p == plan_.pieces.size()) {
      ++index, p = 0;
    }
    if (index >= plan_.panels) {
      return {nullptr, 0};
    }
    const int64_t block_bytes = m_.format->bits * kPanel * 4;
    const Piece& piece = plan_.pieces[p];
    const int64_t from = piece.bounds.front() / kBlockQuads * block_bytes;
    const int64_t to = (piece.bounds.back() + kBlockQuads - 1) / kBlockQuads * block_bytes;
    return {PanelAt(index).data + from, to - from};
  }

  void IntPiece(int64_t index, size_t p, size_t begin, size_t end, int64_t first_row,
                const Space& space) const {
    const Piece& piece = plan_.pieces[p];
    const IntRows rows{a_.words, a_.sums, a_.scales, a_.scale_columns, first_row};
    const IntSpace ints{space.c, space.c_stride, space.partial, space.scales, space.zeros,
                        reinterpret_cast<int32_t*>(space.unpacked)};
    MultiplyIntPiece(kernels_, plan_, m_.format->bits, Raw(), PanelOfPiece(index, piece), piece,
                     begin, end, rows, ints, CodesOfPiece(index, p + 1));
  }

  void Write(int64_t index, int64_t first_row, int64_t rows, const float* sums) const {
    const RowWriter writer(kernels_, m_, index);
    for (int64_t r = 0; r < rows; ++r, sums += kPanel) {
      float factor = m_.tensor_scale;
      if (plan_.integers && !plan_.scale_each && plan_.planes == 1) {
        factor *= a_.scales[(first_row + r) * a_.scale_columns];
      }
      if (plan_.folded) {
        factor *= a_.factors[first_row + r];
      }
      writer.Write(first_row + r, sums, factor);
    }
  }

  const Kernels& kernels_;
  const Matmul& m_;
  const Plan& plan_;
  const Activations& a_;
};

// The activations of each block of rows, made by whoever needs them first: a thread that comes late
// keeps nobody from the rows that are there.
class Preparation {
 public:
  Preparation(const Kernels& kernels, const Matmul& m, const Plan& plan, const Activations& a)
      : kernels_(kernels), m_(m), plan_(plan), a_(a),
        blocks_(static_cast<size_t>(plan.row_blocks())) {}

  // Returns when the rows of a block are there; threads that come meanwhile help.
  void Finish(int64_t row_block) {
    Block& block = blocks_[static_cast<size_t>(row_block)];
    const int64_t first = row_block * plan_.tiles_per_block;
    const int64_t all = static_cast<int64_t>(plan_.tiles.size());
    const int64_t count = std::min(plan_.tiles_per_block, all - first);
    for (int64_t t = block.next.fetch_add(1); t < count; t = block.next.fetch_add(1)) {
      PrepareTile(kernels_, plan_, m_, first + t, a_);
      block.done.fetch_add(1, std::memory_order_release);
    }
    WaitFor(block.done, count);
  }

  void FinishAll() {
    for (size_t block = 0; block < blocks_.size(); ++block) {
      Finish(static_cast<int64_t>(block));
    }
  }

 private:
  struct Block {
    std::atomic<int64_t> next{0}, done{0};
  };
  const Kernels& kernels_;
  const Matmul& m_;
  const Plan& plan_;
  const Activations& a_;
  std::vector<Block> blocks_;
};

// Sums of more than 2^16 products may not fit 32 bits; whether they can is up to the activations.
std::string CheckSums(const Plan& plan, const Matmul& m, const Activations& a) {
  const int64_t code = m.zero != nullptr || m.format->zero == 0 ? (1 << m.format->bits) - 1
                                                                : m.format->zero;
  const int64_t most = std::numeric_limits<int32_t>::max();
  if (m.k * 128 * code <= most) {
    return "";
  }
  for (int64_t r = 0; r < m.rows; ++r) {
    const int8_t* row = a.codes + r * plan.quads * 4;
    int64_t magnitude = 0;
    for (int64_t k = 0; k < m.k; ++k) {
      magnitude += std::abs(static_cast<int>(row[k]));
    }
    if (magnitude * code > most) {
      return "the sums of row " + std::to_string(r) + " over k=" + std::to_string(m.k) +
             " may not fit int32; ask for float32 results";
    }
  }
  return "";
}

}  // namespace

std::string RunMatmul(const Kernels& kernels, const Workers& workers, const Matmul& m) {
  if (m.rows == 0 || m.n == 0) {
    return "";
  }
  const int64_t k_blocks = (m.k + kBlock - 1) / kBlock;
  const int64_t panel_bytes = std::max<int64_t>(k_blocks * m.format->bits * kPanel * 4, 1);
  const int64_t all_bytes = panel_bytes * ((m.n + kPanel - 1) / kPanel);
  Workers team = workers;
  if (all_bytes * m.rows < kWorthSharing || !team.schedule) {
    team.threads = 1;
  }
  const Plan plan = MakeStreamPlan(kernels, team.threads, m, PlanesOf(kernels, m));
  if (plan.segments() == 0) {
    WriteEmptySums(kernels, m);
    return "";
  }
  const Activations activations = TakeActivations(plan, m);
  Preparation preparation(kernels, m, plan, activations);
  const bool checked = m.out_type == Element::kS32;
  if (plan.stream || checked) {
    const Workers packers = plan.stream ? Workers{} : team;
    ParallelFor(packers, packers.threads, [&](int64_t) { preparation.FinishAll(); });
  }
  std::string problem = checked ? CheckSums(plan, m, activations) : "";
  if (problem.empty()) {
    const Run run(kernels, m, plan, activations);
    if (plan.stream) {
      // Blocks of work large enough to be worth taking, small enough to even out.
      const int64_t fair = std::max<int64_t>(plan.panels / (team.threads * 16), 1);
      const int64_t step = std::max(fair, std::max<int64_t>(kBlockBytes / panel_bytes, 1));
      ParallelFor(team, (plan.panels + step - 1) / step, [&](int64_t block) {
        const int64_t end = std::min(plan.panels, (block + 1) * step);
        for (int64_t p = block * step; p < end; ++p) {
          run.StreamPanel(p);
        }
      });
    } else {
      ParallelLanes(team, plan.row_blocks(), plan.panels, [&](int64_t block, int64_t panel) {
        preparation.Finish(block);
        run.TilePanel(panel, block);
      });
    }
  }
  ReleaseLargeScratch(Scratch::kCall);
  return problem;
}

}  // namespace fewbit
