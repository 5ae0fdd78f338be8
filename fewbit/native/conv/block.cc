#include "conv/block.h"

#include <algorithm>

#include "conv/kernels.h"

namespace fewbit {
namespace {

constexpr int64_t kTilesAtOnce = 16;  // that go over all strips of a piece together

class Block {
 public:
  Block(const ConvRows& rows, const ConvSource& source, int64_t panel, int64_t first_row,
        int64_t count)
      : kernels_(*rows.kernels), m_(*rows.product), plan_(*rows.plan), rows_(rows), source_(source),
        panel_(panel), first_row_(first_row), count_(count),
        columns_(std::min<int64_t>(kPanel, rows.product->n - panel * kPanel)) {}

  void Run() const {
    const Space space = TakeSpace();
    const int64_t group = panel_ * kPanel / (m_.n / rows_.window.groups);
    FindPatches(rows_, source_, group, first_row_, count_, space.patches);
    for (size_t p = 0; p < plan_.pieces.size(); ++p) {
      AddPiece(p, space);
    }
    ReleaseLargeScratch(Scratch::kBlock);
  }

 private:
  struct Space {
    Patches patches;
    char* sums;           // [rows][64]
    float* row_scales;    // [rows]
    float* scales;        // [segments of a piece][64]
    int32_t* panel_zeros;
    char* unpacked;
  };

  Space TakeSpace() const {
    size_t quads = 0, segments = 0;
    for (const Piece& piece : plan_.pieces) {
      quads = std::max(quads, static_cast<size_t>(piece.bounds.back() - piece.bounds.front()));
      segments = std::max(segments, piece.lengths.size());
    }
    size_t used = 0;
    const auto take = [&used](size_t bytes) {
      const size_t at = used;
      used += (bytes + 63) / 64 * 64;
      return at;
    };
    const auto count = static_cast<size_t>(count_), tap = static_cast<size_t>(rows_.tap);
    const size_t taps = take(count * static_cast<size_t>(rows_.taps) * sizeof(void*));
    const size_t values = take(rows_.written ? count * tap * 4 : 0);
    const size_t codes = take(static_cast<size_t>(plan_.quads) * 4), zeros = take(count * 4);
    const size_t sums = take(count * kPanel * 4), row_scales = take(count * 4);
    const size_t scales = take(segments * kPanel * 4), panel_zeros = take(segments * kPanel * 4);
    const size_t unpacked = take(quads * kPanel * 4 * static_cast<size_t>(plan_.words));
    char* at = static_cast<char*>(ScratchBytes(Scratch::kBlock, used));
    const Patches patches{reinterpret_cast<const void**>(at + taps), at + values,
                          reinterpret_cast<int8_t*>(at + codes),
                          reinterpret_cast<int32_t*>(at + zeros)};
    return {patches,
            at + sums,
            reinterpret_cast<float*>(at + row_scales),
            reinterpret_cast<float*>(at + scales),
            reinterpret_cast<int32_t*>(at + panel_zeros),
            at + unpacked};
  }

  Panel PanelAt(const Piece& piece) const {
    static constexpr int64_t kScaleBytes[] = {4, 2, 2, 1, 1};
    const int64_t per_group = panel_ * m_.groups * kPanel;
    return {m_.data + panel_ * (plan_.quads / kBlockQuads) * m_.format->bits * kPanel * 4,
            m_.scale + per_group * kScaleBytes[m_.scale_type],
            m_.zero == nullptr ? nullptr : m_.zero + per_group,
            m_.format->table,
            m_.format->pairs,
            piece.bounds.data(),
            plan_.segment_group.data() + piece.first_segment,
            static_cast<int64_t>(piece.lengths.size()),
            m_.format->zero,
            m_.scale_type};
  }

  void AddPiece(size_t number, const Space& space) const {
    const Piece& piece = plan_.pieces[number];
    const bool first = number == 0, last = number + 1 == plan_.pieces.size();
    const auto write = [&](int64_t from, int64_t to) {
      if (last) {
        Write(from, to, space);
      }
    };
    const Panel panel = PanelAt(piece);
    const int64_t begin = piece.bounds.front(), quads = piece.bounds.back() - begin;
    // What pads k to whole blocks is not summed.
    const int64_t real = plan_.integers && !rows_.written ? rows_.taps * rows_.run / 4 : plan_.quads;
    const int bits = m_.format->bits;
    if (plan_.integers) {
      const bool as_it_is = kernels_.panel_is_unpacked[bits];
      int32_t* words = as_it_is ? nullptr : reinterpret_cast<int32_t*>(space.unpacked);
      kernels_.unpack_int[bits - 1]({panel, nullptr, words, space.scales, space.panel_zeros});
      const int32_t* b = as_it_is ? reinterpret_cast<const int32_t*>(panel.data) + begin * kPanel
                                  : words;
      const int64_t tap_quads = rows_.tap / plan_.words, here = std::min(quads, real - begin);
      const auto tile = [&](int64_t r, int64_t height, int64_t column) {
        const auto taps = reinterpret_cast<const int32_t* const*>(space.patches.taps) + r * rows_.taps;
        kernels_.conv->tile_int[bits - 1][height - 1](
            {taps + begin / tap_quads * height, begin % tap_quads, tap_quads, here,
             b + column * quads * plan_.words,
             reinterpret_cast<int32_t*>(space.sums) + r * kPanel + column, first});
      };
      ForTiles( kernels_.int_vectors, tile, write);
      return;
    }
    float* floats = reinterpret_cast<float*>(space.unpacked);
    kernels_.unpack_float[m_.format->decoding]({panel, floats, nullptr, nullptr, nullptr});
    const int64_t from = begin * 4;
    const int64_t here = std::min(quads * 4, (rows_.written ? plan_.quads * 4 : m_.k) - from);
    // Floats are summed where they belong, if nothing is left to be done with them; only whole
    // strips can be.
    const bool in_place = m_.out_type == Element::kF32 && m_.tensor_scale == 1.0f;
    const bool there = in_place && columns_ % (kernels_.float_vectors * kLanes) == 0;
    const int64_t stride = there ? m_.n : kPanel;
    float* sums = there ? static_cast<float*>(m_.out) + first_row_ * m_.n + panel_ * kPanel
                        : reinterpret_cast<float*>(space.sums);
    const auto tile = [&](int64_t r, int64_t height, int64_t column) {
      const auto taps = reinterpret_cast<const float* const*>(space.patches.taps) + r * rows_.taps;
      kernels_.conv->tile_float[height - 1](
          {taps + from / rows_.tap * height, from % rows_.tap, rows_.tap, here, floats + column * quads * 4,
           sums + r * stride + column, stride, first});
    };
    if (there) {
      ForTiles( kernels_.float_vectors, tile, [](int64_t, int64_t) {});
    } else {
      ForTiles( kernels_.float_vectors, tile, write);
    }
  }

  // body(first row, rows, first column) of every tile, over the strips that have columns; after
  // some tiles behind(first row, end row).
  template <class Body, class Behind>
  void ForTiles(int vectors, const Body& body, const Behind& behind) const {
    const int64_t tiles = rows_.Tiles(count_);
    for (int64_t from = 0; from < tiles; from += kTilesAtOnce) {
      const int64_t to = std::min(tiles, from + kTilesAtOnce);
      for (int64_t column = 0; column < columns_; column += vectors * kLanes) {
        for (int64_t tile = from; tile < to; ++tile) {
          const int64_t r = rows_.TileRow(tile, count_);
          body(r, rows_.TileRow(tile + 1, count_) - r, column);
        }
      }
      behind(rows_.TileRow(from, count_), rows_.TileRow(to, count_));
    }
  }

  // Rows [from, to) of the block; with scales they are done.
  void Write(int64_t from, int64_t to, const Space& space) const {
    const int64_t at = (first_row_ + from) * m_.n + panel_ * kPanel, rows = to - from;
    const int32_t* sums = reinterpret_cast<const int32_t*>(space.sums) + from * kPanel;
    float* floats = reinterpret_cast<float*>(space.sums) + from * kPanel;
    if (m_.out_type == Element::kS32) {
      int32_t* out = static_cast<int32_t*>(m_.out) + at;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns_; ++c) {
          out[r * m_.n + c] = static_cast<int32_t>(static_cast<uint32_t>(sums[r * kPanel + c]) -
                                                   static_cast<uint32_t>(space.patches.zeros[from + r]));
        }
      }
      return;
    }
    const bool direct = m_.out_type == Element::kF32;
    float factor = m_.tensor_scale;
    if (plan_.integers) {
      float scales[kPanel];
      for (int64_t c = 0; c < kPanel; ++c) {
        scales[c] = space.scales[c] * factor;
      }
      for (int64_t r = 0; r < rows; ++r) {
        space.row_scales[r] = source_.images.scales[(first_row_ + from + r) / rows_.window.outputs()];
      }
      float* out = direct ? static_cast<float*>(m_.out) + at : floats;
      kernels_.conv->finish({sums, space.patches.zeros + from, space.row_scales, scales, rows, columns_,
                             out,
                             direct ? m_.n : kPanel});
      if (direct) {
        return;
      }
      factor = 1.0f;
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns_; ++c) {
        const float value = floats[r * kPanel + c] * factor;
        const int64_t place = at + r * m_.n + c;
        if (direct) {
          static_cast<float*>(m_.out)[place] = value;
        } else {
          static_cast<uint16_t*>(m_.out)[place] = Bf16OfFloat(value);
        }
      }
    }
  }

  const Kernels& kernels_;
  const Matmul& m_;
  const Plan& plan_;
  const ConvRows& rows_;
  const ConvSource& source_;
  const int64_t panel_, first_row_, count_, columns_;
};

}  // namespace

void RunConvBlock(const ConvRows& rows, const ConvSource& source, int64_t panel, int64_t first_row,
                  int64_t count) {
  Block(rows, source, panel, first_row, count).Run();
}

}  // namespace fewbit
