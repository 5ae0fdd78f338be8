#include "conv/patches.h"

#include <cstring>

#include "conv/kernels.h"

namespace fewbit {
namespace {

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

// body(tap, pixel) for the taps of one output, the pixel counted through all images, or -1 in the
// padding.
template <class Body>
void ForTaps(const Window& w, int64_t row, const Body& body) {
  const int64_t image = row / w.outputs(), place = row % w.outputs();
  const int64_t top = place / w.out[1] * w.strides[0] - w.low[0];
  const int64_t left = place % w.out[1] * w.strides[1] - w.low[1];
  int64_t tap = 0;
  for (int64_t ty = 0, y = top; ty < w.taps[0]; ++ty, y += w.dilation[0]) {
    const bool inside = y >= 0 && y < w.height;
    const int64_t line = (image * w.height + y) * w.width;
    for (int64_t tx = 0, x = left; tx < w.taps[1]; ++tx, x += w.dilation[1]) {
      body(tap++, inside && x >= 0 && x < w.width ? line + x : -1);
    }
  }
}

void FindPixels(const ConvRows& rows, const ConvSource& source, int64_t group, int64_t first_row,
                int64_t count, const Patches& patches) {
  const bool integers = rows.plan->integers;
  const char* x = !integers ? reinterpret_cast<const char*>(source.images.floats)
                  : source.words != nullptr ? reinterpret_cast<const char*>(source.words)
                                            : reinterpret_cast<const char*>(source.images.codes);
  x += group * rows.tap * 4;
  const int32_t* sums = integers ? source.sums + group : nullptr;
  const int64_t groups = rows.window.groups;
  for (int64_t tile = 0; tile < rows.Tiles(count); ++tile) {
    const int64_t begin = rows.TileRow(tile, count), end = rows.TileRow(tile + 1, count);
    for (int64_t r = begin; r < end; ++r) {
      const void** to = patches.taps + begin * rows.taps + r - begin;
      int32_t sum = 0;
      ForTaps(rows.window, first_row + r, [&](int64_t tap, int64_t pixel) {
        to[tap * (end - begin)] = pixel < 0 ? source.zeros : x + pixel * rows.pixel * 4;
        sum += pixel < 0 || sums == nullptr ? 0 : sums[pixel * groups];
      });
      patches.zeros[r] = sum;
    }
  }
}

void WriteRows(const ConvRows& rows, const ConvSource& source, int64_t group, int64_t first_row,
               int64_t count, const Patches& patches) {
  const Window& w = rows.window;
  const Plan& plan = *rows.plan;
  const bool integers = plan.integers;
  const size_t size = integers ? 1 : 4, bytes = static_cast<size_t>(rows.run) * size;
  const size_t k = static_cast<size_t>(rows.product->k) * size;
  const size_t padded = static_cast<size_t>(plan.quads) * 4 * size;
  const char* x = integers ? reinterpret_cast<const char*>(source.images.codes)
                           : reinterpret_cast<const char*>(source.images.floats);
  x += static_cast<size_t>(group) * bytes;
  for (int64_t r = 0; r < count; ++r) {
    char* values = patches.values + r * rows.tap * 4;
    char* row = integers ? reinterpret_cast<char*>(patches.codes) : values;
    ForTaps(w, first_row + r, [&](int64_t tap, int64_t pixel) {
      char* to = row + static_cast<size_t>(tap) * bytes;
      if (pixel < 0) {
        std::memset(to, 0, bytes);
      } else {
        CopyRun(x + static_cast<size_t>(pixel * w.channels) * size, bytes, to);
      }
    });
    std::memset(row + k, 0, padded - k);
    patches.taps[r] = values;
    if (integers) {
      patches.zeros[r] = rows.kernels->conv->sum(patches.codes, rows.product->k);
      if (plan.words == 2) {
        rows.kernels->conv->widen(patches.codes, plan.quads, reinterpret_cast<int32_t*>(values));
      } else {
        std::memcpy(values, patches.codes, padded);
      }
    }
  }
}

}  // namespace

int64_t ConvRows::Tiles(int64_t rows) const {
  const int height = plan->integers ? kernels->int_rows : kernels->float_rows;
  return (rows + height - 1) / height;
}

ConvRows MakeConvRows(const Kernels& kernels, const Matmul& product, const Plan& plan,
                      const Window& window, bool written, int64_t run) {
  ConvRows rows{&kernels, &product, &plan, window, written, run, 0, 0, 0};
  const int64_t tap = written ? plan.quads * 4 : run;
  rows.tap = plan.integers ? tap / 4 * plan.words : tap;
  rows.pixel = plan.integers ? window.channels / 4 * plan.words : window.channels;
  rows.taps = written ? 1 : window.all_taps();
  return rows;
}

void FindPatches(const ConvRows& rows, const ConvSource& source, int64_t group, int64_t first_row,
                 int64_t count, const Patches& patches) {
  if (rows.written) {
    WriteRows(rows, source, group, first_row, count, patches);
  } else {
    FindPixels(rows, source, group, first_row, count, patches);
  }
  const uint32_t zero = static_cast<uint32_t>(rows.product->format->zero);
  for (int64_t r = 0; rows.plan->integers && r < count; ++r) {
    patches.zeros[r] = static_cast<int32_t>(static_cast<uint32_t>(patches.zeros[r]) * zero);
  }
}

}  // namespace fewbit
