#include "conv.h"

#include <algorithm>
#include <cstring>

#include "conv_images.h"
#include "conv_kernels.h"
#include "matmul_plan.h"

namespace fewbit {
namespace {

constexpr double kWorthSharing = 1e6;  // multiply-adds that pay for waking a thread
constexpr int64_t kFewestRows = 48;
constexpr int64_t kMostRows = 512;   // their sums (256 bytes each) should stay in the L2 cache
constexpr int64_t kTilesAtOnce = 16;  // that go over all strips of a piece together
// Below it a pixel is too short for a tap of its own: patches are written down as rows.
constexpr int64_t kShallow = 8;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Short runs, for which calling memcpy would cost more than the copy.
void CopyRun(const char* from, size_t bytes, char* to) {
  if (bytes < 16) {
    for (size_t i = 0; i < bytes; ++i) {
      to[i] = from[i];
    }
    return;
  }
  for (size_t i = 0; i + 16 < bytes; i += 16) {
    std::memcpy(to + i, from + i, 16);
  }
  std::memcpy(to + bytes - 16, from + bytes - 16, 16);
}

// What all blocks of work read.
struct Source {
  Images images;
  const int32_t* words;      // of the codes, where they are not the codes themselves
  const int32_t* sums;       // [pixels][groups] of the codes
  const char* zeros;         // a pixel of padding
};

class Run {
 public:
  Run(const Kernels& kernels, const Conv& conv, const Plan& plan, bool by_rows)
      : kernels_(kernels), m_(conv.product), w_(conv.window), plan_(plan), by_rows_(by_rows) {
    const int height = plan.integers ? kernels.int_rows : kernels.float_rows;
    tile_rows_ = height;
    // Values (floats or words) of a tap and of a pixel.
    const int64_t depth = by_rows ? plan.quads * 4 : w_.depth();
    tap_ = plan.integers ? depth / 4 * plan.words : depth;
    pixel_ = plan.integers ? w_.channels / 4 * plan.words : w_.channels;
    taps_ = by_rows ? 1 : w_.all_taps();
  }

  void Block(int64_t panel, int64_t first_row, int64_t rows, const Source& source) const {
    const Space space = TakeSpace(rows);
    const int64_t group = panel * kPanel / (m_.n / w_.groups);
    if (by_rows_) {
      WriteRows(source, group, first_row, rows, space);
    } else {
      FindPixels(source, group, first_row, rows, space);
    }
    const int64_t columns = std::min<int64_t>(kPanel, m_.n - panel * kPanel);
    bool first = true;
    for (const Piece& piece : plan_.pieces) {
      AddPiece(panel, piece, rows, columns, first, space);
      first = false;
    }
    Write(panel, first_row, rows, columns, source, space);
    ReleaseLargeScratch(Scratch::kBlock);
  }

 private:
  struct Space {
    const void** taps;    // [tiles][taps][rows of the tile]
    char* patches;        // [rows][tap], if they are written down
    char* sums;           // [rows][64]
    int32_t* zeros;       // [rows]: what the shared zero point adds to a row's sums
    float* row_scales;    // [rows]
    float* scales;        // [segments of a piece][64]
    int32_t* panel_zeros;
    int8_t* codes;        // one patch
    char* unpacked;
  };

  Space TakeSpace(int64_t rows) const {
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
    const auto count = static_cast<size_t>(rows);
    const size_t taps = take(count * static_cast<size_t>(taps_) * sizeof(void*));
    const size_t patches = take(by_rows_ ? count * static_cast<size_t>(tap_) * 4 : 0);
    const size_t sums = take(count * kPanel * 4);
    const size_t zeros = take(count * 4), row_scales = take(count * 4);
    const size_t scales = take(segments * kPanel * 4), panel_zeros = take(segments * kPanel * 4);
    const size_t codes = take(static_cast<size_t>(plan_.quads) * 4);
    const size_t unpacked = take(quads * kPanel * 4 * static_cast<size_t>(plan_.words));
    char* at = static_cast<char*>(ScratchBytes(Scratch::kBlock, used));
    return {reinterpret_cast<const void**>(at + taps),
            at + patches,
            at + sums,
            reinterpret_cast<int32_t*>(at + zeros),
            reinterpret_cast<float*>(at + row_scales),
            reinterpret_cast<float*>(at + scales),
            reinterpret_cast<int32_t*>(at + panel_zeros),
            reinterpret_cast<int8_t*>(at + codes),
            at + unpacked};
  }

  // Tiles of a block: of equal height, give or take one row.
  int64_t Tiles(int64_t rows) const { return CeilDiv(rows, tile_rows_); }
  int64_t TileRow(int64_t tile, int64_t rows) const { return rows * tile / Tiles(rows); }

  // The pixels under the taps of rows [first_row, first_row + rows): body(row, tap, pixel), the
  // pixel counted through all images, or -1 in the padding.
  template <class Body>
  void ForTaps(int64_t first_row, int64_t rows, const Body& body) const {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = first_row + r;
      const int64_t image = row / w_.outputs(), place = row % w_.outputs();
      const int64_t top = place / w_.out[1] * w_.strides[0] - w_.low[0];
      const int64_t left = place % w_.out[1] * w_.strides[1] - w_.low[1];
      int64_t tap = 0;
      for (int64_t ty = 0, y = top; ty < w_.taps[0]; ++ty, y += w_.dilation[0]) {
        const bool inside = y >= 0 && y < w_.height;
        const int64_t line = (image * w_.height + y) * w_.width;
        for (int64_t tx = 0, x = left; tx < w_.taps[1]; ++tx, x += w_.dilation[1], ++tap) {
          body(r, tap, inside && x >= 0 && x < w_.width ? line + x : -1);
        }
      }
    }
  }

  // The first value of a pixel's channels of a group.
  const char* Pixel(const Source& source, int64_t group, int64_t pixel) const {
    if (pixel < 0) {
      return source.zeros;
    }
    const int64_t at = (pixel * pixel_ + group * tap_) * 4;
    if (!plan_.integers) {
      return reinterpret_cast<const char*>(source.images.floats) + at;
    }
    return (source.words != nullptr ? reinterpret_cast<const char*>(source.words)
                                    : reinterpret_cast<const char*>(source.images.codes)) +
           at;
  }

  void FindPixels(const Source& source, int64_t group, int64_t first_row, int64_t rows,
                  const Space& space) const {
    int64_t tile = 0, begin = 0, end = TileRow(1, rows);
    int32_t sum = 0;
    ForTaps(first_row, rows, [&](int64_t r, int64_t tap, int64_t pixel) {
      if (r == end) {
        begin = end;
        end = TileRow(++tile + 1, rows);
      }
      space.taps[begin * taps_ + tap * (end - begin) + r - begin] = Pixel(source, group, pixel);
      if (plan_.integers) {
        sum = (tap == 0 ? 0 : sum) + (pixel < 0 ? 0 : source.sums[pixel * w_.groups + group]);
        space.zeros[r] = sum;
      }
    });
    ScaleSums(rows, space);
  }

  void WriteRows(const Source& source, int64_t group, int64_t first_row, int64_t rows,
                 const Space& space) const {
    for (int64_t tile = 0; tile < Tiles(rows); ++tile) {
      for (int64_t r = TileRow(tile, rows); r < TileRow(tile + 1, rows); ++r) {
        space.taps[r] = space.patches + r * tap_ * 4;
      }
    }
    const size_t size = plan_.integers ? 1 : 4;
    const char* x = plan_.integers ? reinterpret_cast<const char*>(source.images.codes)
                                   : reinterpret_cast<const char*>(source.images.floats);
    x += static_cast<size_t>(group * w_.depth()) * size;
    for (int64_t r = 0; r < rows; ++r) {
      char* row = plan_.integers ? reinterpret_cast<char*>(space.codes)
                                 : space.patches + r * tap_ * 4;
      WritePatch(x, first_row + r, size, row);
      std::memset(row + static_cast<size_t>(m_.k) * size, 0,
                  static_cast<size_t>(plan_.quads * 4 - m_.k) * size);
      if (plan_.integers) {
        int32_t* words = reinterpret_cast<int32_t*>(space.patches) + r * tap_;
        space.zeros[r] = kernels_.conv->sum(space.codes, m_.k);
        if (plan_.words == 2) {
          kernels_.conv->widen(space.codes, plan_.quads, words);
        } else {
          std::memcpy(words, space.codes, static_cast<size_t>(plan_.quads) * 4);
        }
      }
    }
    ScaleSums(rows, space);
  }

  // One row of k values, `size` bytes each: the taps of a line lie together unless dilated.
  void WritePatch(const char* x, int64_t row, size_t size, char* to) const {
    const int64_t image = row / w_.outputs(), place = row % w_.outputs();
    const int64_t top = place / w_.out[1] * w_.strides[0] - w_.low[0];
    const int64_t left = place % w_.out[1] * w_.strides[1] - w_.low[1];
    const bool together = w_.groups == 1 && w_.dilation[1] == 1;
    const int64_t runs = together ? 1 : w_.taps[1], run = together ? w_.taps[1] : 1;
    const size_t tap = static_cast<size_t>(w_.depth()) * size;
    const size_t pixel = static_cast<size_t>(w_.channels) * size;
    for (int64_t ty = 0, y = top; ty < w_.taps[0]; ++ty, y += w_.dilation[0]) {
      for (int64_t i = 0, from = left; i < runs; ++i, from += w_.dilation[1]) {
        const bool seen = y >= 0 && y < w_.height;
        const int64_t first = seen ? std::min(std::max<int64_t>(from, 0), from + run) : from + run;
        const int64_t end = std::max(std::min(from + run, w_.width), first);
        const auto zeros = [&to, tap](int64_t taps) {
          if (taps > 0) {
            std::memset(to, 0, static_cast<size_t>(taps) * tap);
            to += static_cast<size_t>(taps) * tap;
          }
        };
        zeros(first - from);
        if (end > first) {
          const int64_t at = (image * w_.height + y) * w_.width + first;
          CopyRun(x + static_cast<size_t>(at) * pixel, static_cast<size_t>(end - first) * tap, to);
          to += static_cast<size_t>(end - first) * tap;
        }
        zeros(from + run - end);
      }
    }
  }

  void ScaleSums(int64_t rows, const Space& space) const {
    for (int64_t r = 0; plan_.integers && r < rows; ++r) {
      space.zeros[r] = static_cast<int32_t>(static_cast<uint32_t>(space.zeros[r]) *
                                            static_cast<uint32_t>(m_.format->zero));
    }
  }

  Panel PanelAt(int64_t index, const Piece& piece) const {
    static constexpr int64_t kScaleBytes[] = {4, 2, 2, 1, 1};
    const int64_t per_group = index * m_.groups * kPanel;
    return {m_.data + index * (plan_.quads / kBlockQuads) * m_.format->bits * kPanel * 4,
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

  void AddPiece(int64_t index, const Piece& piece, int64_t rows, int64_t columns, bool first,
                const Space& space) const {
    const Panel panel = PanelAt(index, piece);
    const int64_t begin = piece.bounds.front(), quads = piece.bounds.back() - begin;
    // What pads k to whole blocks is not summed.
    const int64_t real = plan_.integers && !by_rows_ ? taps_ * w_.depth() / 4 : plan_.quads;
    const int bits = m_.format->bits;
    if (plan_.integers) {
      const bool as_it_is = kernels_.panel_is_unpacked[bits];
      int32_t* words = as_it_is ? nullptr : reinterpret_cast<int32_t*>(space.unpacked);
      kernels_.unpack_int[bits - 1]({panel, nullptr, words, space.scales, space.panel_zeros});
      const int32_t* b = as_it_is ? reinterpret_cast<const int32_t*>(panel.data) + begin * kPanel
                                  : words;
      const int64_t tap_quads = tap_ / plan_.words, here = std::min(quads, real - begin);
      ForTiles(rows, columns, kernels_.int_vectors, [&](int64_t r, int64_t height, int64_t column) {
        const auto taps = reinterpret_cast<const int32_t* const*>(space.taps) + r * taps_;
        kernels_.conv->tile_int[bits - 1][height - 1](
            {taps + begin / tap_quads * height, begin % tap_quads, tap_quads, here,
             b + column * quads * plan_.words,
             reinterpret_cast<int32_t*>(space.sums) + r * kPanel + column, first});
      });
      return;
    }
    float* floats = reinterpret_cast<float*>(space.unpacked);
    kernels_.unpack_float[m_.format->decoding]({panel, floats, nullptr, nullptr, nullptr});
    const int64_t from = begin * 4;
    const int64_t here = std::min(quads * 4, (by_rows_ ? plan_.quads * 4 : m_.k) - from);
    ForTiles(rows, columns, kernels_.float_vectors, [&](int64_t r, int64_t height, int64_t column) {
      const auto taps = reinterpret_cast<const float* const*>(space.taps) + r * taps_;
      kernels_.conv->tile_float[height - 1](
          {taps + from / tap_ * height, from % tap_, tap_, here, floats + column * quads * 4,
           reinterpret_cast<float*>(space.sums) + r * kPanel + column, first});
    });
  }

  // body(first row, rows, first column) of every tile, over the strips that have columns.
  template <class Body>
  void ForTiles(int64_t rows, int64_t columns, int vectors, const Body& body) const {
    const int64_t tiles = Tiles(rows);
    for (int64_t from = 0; from < tiles; from += kTilesAtOnce) {
      for (int64_t column = 0; column < columns; column += vectors * kLanes) {
        for (int64_t tile = from; tile < std::min(tiles, from + kTilesAtOnce); ++tile) {
          const int64_t r = TileRow(tile, rows);
          body(r, TileRow(tile + 1, rows) - r, column);
        }
      }
    }
  }

  void Write(int64_t panel, int64_t first_row, int64_t rows, int64_t columns,
             const Source& source, const Space& space) const {
    const int64_t at = first_row * m_.n + panel * kPanel;
    float* floats = reinterpret_cast<float*>(space.sums);
    if (m_.out_type == Element::kS32) {
      int32_t* out = static_cast<int32_t*>(m_.out) + at;
      const int32_t* sums = reinterpret_cast<const int32_t*>(space.sums);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          out[r * m_.n + c] = static_cast<int32_t>(static_cast<uint32_t>(sums[r * kPanel + c]) -
                                                   static_cast<uint32_t>(space.zeros[r]));
        }
      }
      return;
    }
    float* out = static_cast<float*>(m_.out) + at;
    const bool direct = m_.out_type == Element::kF32;
    if (plan_.integers) {
      for (int64_t r = 0; r < rows; ++r) {
        space.row_scales[r] = source.images.scales[(first_row + r) / w_.outputs()];
      }
      for (int64_t c = 0; c < kPanel; ++c) {
        space.scales[c] *= m_.tensor_scale;
      }
      const int32_t* sums = reinterpret_cast<const int32_t*>(space.sums);
      kernels_.conv->finish({sums, space.zeros, space.row_scales, space.scales, rows, columns,
                             direct ? out : floats, direct ? m_.n : kPanel});
      if (direct) {
        return;
      }
    }
    const float factor = plan_.integers ? 1.0f : m_.tensor_scale;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        const float value = floats[r * kPanel + c] * factor;
        if (direct) {
          out[r * m_.n + c] = value;
        } else {
          static_cast<uint16_t*>(m_.out)[at + r * m_.n + c] = Bf16OfFloat(value);
        }
      }
    }
  }

  const Kernels& kernels_;
  const Matmul& m_;
  const Window& w_;
  const Plan& plan_;
  const bool by_rows_;
  int64_t tile_rows_, tap_, pixel_, taps_;
};

}  // namespace

std::string RunConv(const Kernels& kernels, const Workers& workers, const Conv& conv) {
  const Matmul& m = conv.product;
  const Window& w = conv.window;
  if (m.rows == 0 || m.n == 0) {
    return "";
  }
  Workers team = workers;
  if (static_cast<double>(m.rows) * static_cast<double>(m.k * m.n) < kWorthSharing || !team.schedule) {
    team.threads = 1;
  }
  const Plan plan = MakePlan(kernels, team.threads, m);
  if (plan.segments() == 0) {
    std::memset(m.out, 0, static_cast<size_t>(m.rows * m.n * (m.out_type == Element::kBf16 ? 2 : 4)));
    return "";
  }
  const bool by_rows = w.depth() < kShallow || (plan.integers && w.depth() % 4 != 0);
  const ImageSource from{m.x, m.x_type, m.quantize_x, static_cast<const float*>(m.x_scale),
                         m.x_scale_rows};
  const int64_t pixels = w.images * w.pixels();
  const bool widened = plan.integers && !by_rows && plan.words == 2;
  const bool summed = plan.integers && !by_rows;
  const auto lines = [](int64_t bytes) { return static_cast<size_t>(CeilDiv(bytes, 64) * 64); };
  const size_t image_bytes = ImageBytes(from, w);
  const size_t word_bytes = widened ? lines(pixels * w.channels * 2) : 0;
  const size_t sum_bytes = summed ? lines(pixels * w.groups * 4) : 0;
  const size_t zero_bytes = lines(w.channels * 4);
  char* memory = static_cast<char*>(
      ScratchBytes(Scratch::kCall, image_bytes + word_bytes + sum_bytes + zero_bytes));
  Source source{PrepareImages(kernels, team, from, w, memory), nullptr, nullptr, nullptr};
  int32_t* words = reinterpret_cast<int32_t*>(memory + image_bytes);
  int32_t* sums = reinterpret_cast<int32_t*>(memory + image_bytes + word_bytes);
  char* zeros = memory + image_bytes + word_bytes + sum_bytes;
  std::memset(zeros, 0, zero_bytes);
  source.zeros = zeros;
  if (summed) {
    const int64_t step = std::max<int64_t>(16 * 1024 / w.channels, 1);
    ParallelFor(team, CeilDiv(pixels, step), [&](int64_t part) {
      const int64_t first = part * step, end = std::min(pixels, first + step);
      const int8_t* codes = source.images.codes + first * w.channels;
      if (widened) {
        kernels.conv->widen(codes, (end - first) * w.channels / 4, words + first * w.channels / 2);
      }
      for (int64_t i = first * w.groups; i < end * w.groups; ++i, codes += w.depth()) {
        sums[i] = kernels.conv->sum(codes, w.depth());
      }
    });
    source.words = widened ? words : nullptr;
    source.sums = sums;
  }
  const Run run(kernels, conv, plan, by_rows);
  int64_t blocks = CeilDiv(m.rows, kMostRows);
  const int64_t wanted = CeilDiv(4 * team.threads, plan.panels);
  blocks = std::max(blocks, std::min(wanted, CeilDiv(m.rows, kFewestRows)));
  ParallelFor(team, blocks * plan.panels, [&](int64_t index) {
    const int64_t block = index / plan.panels;
    const int64_t first = m.rows * block / blocks;
    run.Block(index % plan.panels, first, m.rows * (block + 1) / blocks - first, source);
  });
  ReleaseLargeScratch(Scratch::kCall);
  return "";
}

}  // namespace fewbit
