#include "conv/conv.h"

#include <algorithm>
#include <cstring>

#include "conv/block.h"
#include "conv/kernels.h"

namespace fewbit {
namespace {

constexpr double kWorthAThread = 1e6;  // multiply-adds that pay for waking a thread
constexpr int64_t kFewestRows = 48;
constexpr int64_t kMostRows = 512;     // their sums (256 bytes each) should stay in the L2 cache
constexpr int64_t kShallow = 8;        // below it a pixel is too short for a tap of its own

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Images whose lines hold the padding along x: the taps of a line then lie together everywhere.
template <class Value>
void PadLines(const Workers& workers, const Value* x, const Window& w, int64_t width, Value* out) {
  const int64_t first = std::min(std::max<int64_t>(w.low[1], 0), width);
  const int64_t from = std::min(std::max<int64_t>(-w.low[1], 0), w.width);
  const int64_t count = std::min(w.width - from, width - first) * w.channels;
  ParallelFor(workers, w.images * w.height, [&](int64_t line) {
    Value* to = out + line * width * w.channels;
    std::fill(to, to + first * w.channels, Value{});
    std::copy_n(x + (line * w.width + from) * w.channels, count, to + first * w.channels);
    std::fill(to + first * w.channels + count, to + width * w.channels, Value{});
  });
}

}  // namespace

std::string RunConv(const Kernels& kernels, const Workers& workers, const Conv& conv) {
  const Matmul& m = conv.product;
  const Window& w = conv.window;
  if (m.rows == 0 || m.n == 0) {
    return "";
  }
  Workers team = workers;
  if (static_cast<double>(m.rows) * static_cast<double>(m.k * m.n) < kWorthAThread || !team.schedule) {
    team.threads = 1;
  }
  const Plan plan = MakePlan(kernels, team.threads, m);
  if (plan.segments() == 0) {
    std::memset(m.out, 0, static_cast<size_t>(m.rows * m.n * (m.out_type == Element::kBf16 ? 2 : 4)));
    return "";
  }
  // Shallow pixels are taken by lines of the window where these lie together.
  const bool shallow = w.depth() < kShallow || (plan.integers && w.depth() % 4 != 0);
  const bool by_lines = shallow && w.groups == 1 && w.dilation[1] == 1;
  const bool by_rows = shallow && (plan.integers || !by_lines);
  const ImageSource from{m.x, m.x_type, m.quantize_x, static_cast<const float*>(m.x_scale),
                         m.x_scale_rows};
  const int64_t pixels = w.images * w.pixels();
  const int64_t padded_width = (w.out[1] - 1) * w.strides[1] + w.taps[1];
  const int64_t padded = by_lines ? w.images * w.height * padded_width * w.channels : 0;
  const bool summed = plan.integers && !by_rows;
  const bool widened = summed && plan.words == 2;
  const auto lines = [](int64_t bytes) { return static_cast<size_t>(CeilDiv(bytes, 64) * 64); };
  size_t used = 0;
  const auto take = [&used](size_t bytes) {
    used += bytes;
    return used - bytes;
  };
  const size_t image_at = take(ImageBytes(from, w));
  const size_t padded_at = take(lines(padded * (plan.integers ? 1 : 4)));
  const size_t words_at = take(widened ? lines(pixels * w.channels * 2) : 0);
  const size_t sums_at = take(summed ? lines(pixels * w.groups * 4) : 0);
  const size_t zeros_at = take(lines(w.channels * w.taps[1] * 4));
  char* memory = static_cast<char*>(ScratchBytes(Scratch::kCall, used));
  ConvSource source{PrepareImages(kernels, team, from, w, memory + image_at), nullptr, nullptr,
                memory + zeros_at};
  std::memset(memory + zeros_at, 0, used - zeros_at);
  Window seen = w;
  int64_t run_length = w.depth();
  if (by_lines) {
    if (plan.integers) {
      int8_t* codes = reinterpret_cast<int8_t*>(memory + padded_at);
      PadLines(team, source.images.codes, w, padded_width, codes);
      source.images.codes = codes;
    } else {
      float* floats = reinterpret_cast<float*>(memory + padded_at);
      PadLines(team, source.images.floats, w, padded_width, floats);
      source.images.floats = floats;
    }
    seen.width = padded_width;
    seen.low[1] = 0;
    run_length *= w.taps[1];
    seen.taps[1] = 1;
  }
  if (summed) {
    int32_t* words = reinterpret_cast<int32_t*>(memory + words_at);
    int32_t* sums = reinterpret_cast<int32_t*>(memory + sums_at);
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
  const ConvRows rows = MakeConvRows(kernels, m, plan, seen, by_rows, run_length);
  int64_t blocks = CeilDiv(m.rows, kMostRows);
  const int64_t wanted = CeilDiv(4 * team.threads, plan.panels);
  blocks = std::max(blocks, std::min(wanted, CeilDiv(m.rows, kFewestRows)));
  ParallelFor(team, blocks * plan.panels, [&](int64_t index) {
    const int64_t block = index / plan.panels;
    const int64_t first = m.rows * block / blocks;
    const int64_t count = m.rows * (block + 1) / blocks - first;
    RunConvBlock(rows, source, index % plan.panels, first, count);
  });
  ReleaseLargeScratch(Scratch::kCall);
  return "";
}

}  // namespace fewbit
