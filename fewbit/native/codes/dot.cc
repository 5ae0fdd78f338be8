#include "codes/dot.h"

#include <algorithm>
#include <cstring>

#include "common/bf16.h"
#include "matmul/pieces.h"

namespace fewbit {
namespace {

constexpr int32_t kZero = 128;  // the code of zero within a panel
constexpr int kBits = 8;
constexpr int64_t kFewRows = 8;  // packing pays from here on
constexpr int64_t kFewestColumns = 64;
constexpr int64_t kMostColumns = 4096;   // of a block of few rows; their sums stay in the L1 cache
constexpr int64_t kPackedBytes = 16 << 20;  // rows that are packed at once
constexpr int64_t kScaledAtOnce = 256;
constexpr int64_t kTilesAtOnce = kPanel / kMaxTileRows;  // of rows that are packed together

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t Size(const std::vector<int64_t>& v) { return static_cast<int64_t>(v.size()); }

bool Touch(const std::vector<int64_t>& offsets) {
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] != offsets[0] + static_cast<int64_t>(i)) {
      return false;
    }
  }
  return true;
}

// Many small units of work in blocks that are worth taking.
void ForUnits(const Workers& team, int64_t units, int64_t work_of_one,
              const std::function<void(int64_t)>& body) {
  const int64_t fair = std::max<int64_t>(units / (team.threads * 4), 1);
  const int64_t worth = std::max<int64_t>(kWorthSharing / std::max<int64_t>(work_of_one, 1), 1);
  const int64_t step = std::min(fair, worth);
  ParallelFor(team, CeilDiv(units, step), [&](int64_t block) {
    for (int64_t u = block * step; u < std::min(units, (block + 1) * step); ++u) {
      body(u);
    }
  });
}

class CodesRun {
 public:
  CodesRun(const Kernels& kernels, const Workers& team, const CodesDot& dot)
      : kernels_(kernels),
        team_(team),
        dot_(dot),
        // One or few columns are better read as rows of the transposed product.
        turned_(Size(dot.rhs.lines) <= kFewRows && Size(dot.rhs.lines) < Size(dot.lhs.lines)),
        rows_(turned_ ? dot.rhs : dot.lhs),
        columns_(turned_ ? dot.lhs : dot.rhs),
        row_count_(Size(rows_.lines)),
        column_count_(Size(columns_.lines)),
        k_(Size(rows_.ks)),
        rows_touch_(Touch(rows_.lines)),
        row_ks_touch_(Touch(rows_.ks)),
        columns_touch_(Touch(columns_.lines)),
        column_ks_touch_(Touch(columns_.ks)) {}

  void Run() const {
    const bool in_order = columns_touch_ || column_ks_touch_;
    if (row_count_ <= kFewRows && in_order && k_ > 0) {
      FewRowsAtOnce();
    } else {
      Tiled();
    }
  }

 private:
  int64_t Batches() const { return Size(rows_.batch); }

  // `count` sums of one row of the result.
  void Write(int64_t entry, int64_t row, int64_t column, int64_t count, const int32_t* sums) const {
    const int64_t step = turned_ ? row_count_ : 1;
    const int64_t at = entry * row_count_ * column_count_ +
                       (turned_ ? column * step + row : row * column_count_ + column);
    if (dot_.out_type == Element::kS32) {
      int32_t* out = static_cast<int32_t*>(dot_.out) + at;
      if (step == 1) {
        std::memcpy(out, sums, static_cast<size_t>(count) * 4);
      } else {
        for (int64_t i = 0; i < count; ++i) {
          out[i * step] = sums[i];
        }
      }
      return;
    }
    ScaleSums scale{};
    scale.row = rows_.scale[entry * row_count_ + row];
    scale.columns_first = turned_;
    const float* columns = columns_.scale + entry * column_count_ + column;
    if (dot_.out_type == Element::kF32 && step == 1) {
      scale.sums = sums;
      scale.columns = columns;
      scale.count = count;
      scale.out = static_cast<float*>(dot_.out) + at;
      kernels_.scale_sums(scale);
      return;
    }
    float scaled[kScaledAtOnce];
    scale.out = scaled;
    for (int64_t from = 0; from < count; from += kScaledAtOnce) {
      scale.count = std::min(kScaledAtOnce, count - from);
      scale.sums = sums + from;
      scale.columns = columns + from;
      kernels_.scale_sums(scale);
      for (int64_t i = 0; i < scale.count; ++i) {
        const int64_t to = at + (from + i) * step;
        if (dot_.out_type == Element::kF32) {
          static_cast<float*>(dot_.out)[to] = scaled[i];
        } else {
          static_cast<uint16_t*>(dot_.out)[to] = ToBf16(scaled[i]);
        }
      }
    }
  }

  // --- few rows -----------------------------------------------------------------------------

  void FewRowsAtOnce() const {
    const int64_t wanted = CeilDiv(4 * team_.threads, Batches());
    const int64_t fair = std::max(CeilDiv(column_count_, wanted), kBlockBytes / 4 / k_);
    const int64_t block = CeilDiv(std::clamp(fair, kFewestColumns, kMostColumns), kLanes) * kLanes;
    const int64_t blocks = CeilDiv(column_count_, block);
    ForUnits(team_, Batches() * blocks, block * k_ * row_count_, [&](int64_t unit) {
      const int64_t first = unit % blocks * block;
      FewRowsBlock(unit / blocks, first, std::min(block, column_count_ - first));
    });
  }

  void FewRowsBlock(int64_t entry, int64_t first, int64_t count) const {
    const int64_t stride = CeilDiv(k_, 32) * 32;
    const size_t a_bytes = static_cast<size_t>(row_count_ * stride) * 2;
    char* scratch = static_cast<char*>(ScratchBytes(
        Scratch::kBlock, a_bytes + static_cast<size_t>(row_count_ * count) * 4));
    int16_t* a = reinterpret_cast<int16_t*>(scratch);
    int32_t* sums = reinterpret_cast<int32_t*>(scratch + a_bytes);
    // Sums of products leave the last k in a chunk of their own; see codes/direct.h.
    const bool by_columns = column_ks_touch_;
    const int64_t whole = k_ / 32 * 32;
    const int64_t shift = by_columns && whole > 0 && whole < k_ ? stride - k_ : 0;
    for (int64_t r = 0; r < row_count_; ++r) {
      const int8_t* row = rows_.codes + rows_.batch[static_cast<size_t>(entry)] +
                          rows_.lines[static_cast<size_t>(r)];
      int16_t* to = a + r * stride;
      std::fill(to + whole, to + stride, int16_t{0});
      for (int64_t k = 0; k < whole; ++k) {
        to[k] = row[rows_.ks[static_cast<size_t>(k)]];
      }
      for (int64_t k = whole; k < k_; ++k) {
        to[k + shift] = row[rows_.ks[static_cast<size_t>(k)]];
      }
    }
    FewRows few{columns_.codes + columns_.batch[static_cast<size_t>(entry)],
                columns_.lines.data() + first,
                count,
                columns_.ks.data(),
                k_,
                a,
                stride,
                sums,
                count};
    for (int64_t r = 0; r < row_count_; r += kMaxStreamRows) {
      const int64_t height = std::min<int64_t>(kMaxStreamRows, row_count_ - r);
      few.a = a + r * stride;
      few.out = sums + r * count;
      (by_columns ? kernels_.dot_columns : kernels_.add_rows)[height - 1](few);
    }
    for (int64_t r = 0; r < row_count_; ++r) {
      Write(entry, r, first, count, sums + r * count);
    }
  }

  // --- many rows ----------------------------------------------------------------------------

  struct Packed {
    int32_t* words;   // [entries][tiles of [quad][words][rows]]
    int32_t* sums;    // [entries][rows], as in matmul/kernels.h
  };

  void Tiled() const {
    static const Format* const format = FindFormat("int8", 4);
    Matmul like{};  // what the plan asks for
    like.format = format;
    like.rows = row_count_;
    like.k = k_;
    like.n = column_count_;
    like.groups = 1;
    like.x_type = Element::kS8;
    like.out_type = Element::kS32;
    const bool many = Batches() >= 4 * team_.threads;
    const Plan plan = MakePlan(kernels_, many ? 1 : team_.threads, like);
    const int64_t entry_words = row_count_ * plan.quads * plan.words;
    const int64_t at_once = std::clamp<int64_t>(
        kPackedBytes / std::max<int64_t>(entry_words * 4, 1), 1, Batches());
    Packed packed;
    packed.words = static_cast<int32_t*>(ScratchBytes(
        Scratch::kCall, static_cast<size_t>(at_once * (entry_words + row_count_)) * 4));
    packed.sums = packed.words + at_once * entry_words;
    const int64_t tiles = static_cast<int64_t>(plan.tiles.size());
    const int64_t row_blocks = plan.row_blocks(), blocks = plan.panels * row_blocks;
    for (int64_t first = 0; first < Batches(); first += at_once) {
      const int64_t entries = std::min(at_once, Batches() - first);
      const int64_t packs = CeilDiv(tiles, kTilesAtOnce);
      ForUnits(team_, entries * packs, kTilesAtOnce * 6 * 8 * k_, [&](int64_t unit) {
        const int64_t begin = unit % packs * kTilesAtOnce;
        PackTiles(plan, first, unit / packs, static_cast<size_t>(begin),
                  static_cast<size_t>(std::min(tiles, begin + kTilesAtOnce)), packed);
      });
      const int64_t work = row_count_ / std::max<int64_t>(row_blocks, 1) * kPanel * k_;
      ForUnits(team_, entries * blocks, work, [&](int64_t unit) {
        const int64_t block = unit % blocks;
        TileBlock(plan, first, unit / blocks, block / row_blocks, block % row_blocks, packed);
      });
    }
    ReleaseLargeScratch(Scratch::kCall);
  }

  void PackTiles(const Plan& plan, int64_t first, int64_t entry, size_t begin, size_t end,
                 const Packed& packed) const {
    const Tile last = plan.tiles[end - 1];
    const bool at_once = rows_touch_ && !row_ks_touch_;
    int heights[kTilesAtOnce];
    for (size_t t = begin; t < end; ++t) {
      heights[t - begin] = plan.tiles[t].rows;
    }
    const int64_t first_row = plan.tiles[begin].first_row;
    const int64_t rows = last.first_row + last.rows - first_row;
    for (size_t t = begin; t < end; ++t) {
      const Tile tile = plan.tiles[t];
      const CodeLines lines{
          rows_.codes + rows_.batch[static_cast<size_t>(first + entry)],
          rows_.lines.data() + tile.first_row,
          at_once ? static_cast<int>(rows) : tile.rows,
          rows_.ks.data(),
          k_,
          plan.quads,
          rows_touch_,
          row_ks_touch_};
      const int64_t row = entry * row_count_ + tile.first_row;
      int32_t* words = packed.words + row * plan.quads * plan.words;
      if (at_once) {
        kernels_.pack_touching_tiles(lines, heights, static_cast<int>(end - begin), plan.words,
                                     words, packed.sums + row);
        break;
      }
      kernels_.pack_rows(lines, plan.words, words, packed.sums + row);
    }
    int32_t* sums = packed.sums + entry * row_count_ + first_row;
    for (int64_t r = 0; r < rows; ++r) {
      sums[r] = static_cast<int32_t>(0u - static_cast<uint32_t>(sums[r]) * uint32_t{kZero});
    }
  }

  void TileBlock(const Plan& plan, int64_t first, int64_t entry, int64_t panel, int64_t row_block,
                 const Packed& packed) const {
    static const std::vector<float> ones(kPanel, 1.0f);
    static const int64_t group = 0;
    const size_t begin = static_cast<size_t>(row_block * plan.tiles_per_block);
    const size_t end =
        std::min(begin + static_cast<size_t>(plan.tiles_per_block), plan.tiles.size());
    const int64_t first_row = plan.tiles[begin].first_row;
    const int64_t rows = plan.tiles[end - 1].first_row + plan.tiles[end - 1].rows - first_row;
    int64_t quads = 0;
    for (const Piece& piece : plan.pieces) {
      quads = std::max(quads, piece.bounds.back() - piece.bounds.front());
    }
    const size_t sums = static_cast<size_t>(rows) * kPanel;
    const size_t bytes = static_cast<size_t>(quads) * 4 * kPanel;
    char* scratch = static_cast<char*>(ScratchBytes(
        Scratch::kBlock, sums * 4 + kPanel * 4 + bytes + bytes * static_cast<size_t>(plan.words)));
    int32_t* partial = reinterpret_cast<int32_t*>(scratch);
    float* scales = reinterpret_cast<float*>(partial + sums);
    uint8_t* codes = reinterpret_cast<uint8_t*>(scales + kPanel);
    const IntSpace space{nullptr, 0, partial, scales, nullptr,
                         reinterpret_cast<int32_t*>(codes + bytes)};
    const IntRows packed_rows{packed.words + entry * row_count_ * plan.quads * plan.words,
                              packed.sums + entry * row_count_, ones.data(), 0, first_row};
    if (plan.pieces.empty()) {
      std::fill(partial, partial + sums, 0);
    }
    const int64_t column = panel * kPanel;
    const int64_t count = std::min<int64_t>(kPanel, column_count_ - column);
    for (const Piece& piece : plan.pieces) {
      const int64_t from = piece.bounds.front() * 4, to = std::min(piece.bounds.back() * 4, k_);
      const int64_t span[] = {0, piece.bounds.back() - piece.bounds.front()};
      kernels_.pack_columns({columns_.codes + columns_.batch[static_cast<size_t>(first + entry)],
                             columns_.lines.data() + column, static_cast<int>(count),
                             columns_.ks.data() + from, to - from, span[1], columns_touch_,
                             column_ks_touch_},
                            codes);
      const Panel unpacked{codes, reinterpret_cast<const uint8_t*>(ones.data()), nullptr, nullptr,
                           nullptr, span, &group, 1, kZero, kScaleF32};
      MultiplyIntPiece(kernels_, plan, kBits, true, unpacked, piece, begin, end, packed_rows,
                       space, {});
    }
    for (int64_t r = 0; r < rows; ++r) {
      Write(first + entry, first_row + r, column, count, partial + r * kPanel);
    }
    ReleaseLargeScratch(Scratch::kBlock);
  }

  const Kernels& kernels_;
  const Workers& team_;
  const CodesDot& dot_;
  const bool turned_;
  const CodesSide& rows_;
  const CodesSide& columns_;
  const int64_t row_count_, column_count_, k_;
  const bool rows_touch_, row_ks_touch_, columns_touch_, column_ks_touch_;
};

}  // namespace

void RunCodesDot(const Kernels& kernels, const Workers& workers, const CodesDot& dot) {
  const int64_t results = Size(dot.lhs.batch) * Size(dot.lhs.lines) * Size(dot.rhs.lines);
  if (results == 0) {
    return;
  }
  Workers team = workers;
  if (results * std::max<int64_t>(Size(dot.lhs.ks), 1) < kWorthSharing || !team.schedule) {
    team.threads = 1;
  }
  CodesRun(kernels, team, dot).Run();
}

}  // namespace fewbit
