// Convolutions with few output channels per group, depthwise ones above all: 16 output channels at
// a time, each with its own inputs. A block of the image is laid out so that every tap is a plain
// load: [y][x][depth][16], padding and input channels that several outputs share written out.

#include <algorithm>
#include <cstring>

#include "conv/conv.h"
#include "conv/images.h"
#include "conv/kernels.h"

namespace fewbit {
namespace {

constexpr double kWorthAThread = 3e5;  // multiply-adds that pay for waking a thread
// Floats of a block's part of the image: half of a usual L2 cache.
constexpr int64_t kBlockFloats = 32 * 1024;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Outputs of a block along y and x.
struct Cut {
  int64_t size[2], count[2];
};

Cut CutOutputs(const Window& w) {
  const int64_t floats = w.depth() * kLanes;
  const auto seen = [&w](int axis, int64_t outputs) {
    return (outputs - 1) * w.strides[axis] + (w.taps[axis] - 1) * w.dilation[axis] + 1;
  };
  Cut cut{{w.out[0], w.out[1]}, {1, 1}};
  while (cut.size[0] > 1 && seen(0, cut.size[0]) * seen(1, cut.size[1]) * floats > kBlockFloats) {
    cut.size[0] = (cut.size[0] + 1) / 2;
  }
  while (cut.size[1] > 16 && seen(0, cut.size[0]) * seen(1, cut.size[1]) * floats > kBlockFloats) {
    cut.size[1] = (cut.size[1] + 1) / 2;
  }
  for (int axis = 0; axis < 2; ++axis) {
    cut.count[axis] = CeilDiv(w.out[axis], cut.size[axis]);
  }
  return cut;
}

class Run {
 public:
  Run(const Kernels& kernels, const ChannelConv& conv, const Images& images)
      : kernels_(kernels), c_(conv), w_(conv.window), images_(images) {}

  void Block(int64_t image, int64_t first_channel, const int64_t (&first)[2],
             const int64_t (&size)[2]) const {
    const int64_t lanes = std::min<int64_t>(kLanes, c_.n - first_channel);
    const int64_t depth = w_.depth(), k = w_.all_taps() * depth;
    int64_t top[2], seen[2];
    for (int axis = 0; axis < 2; ++axis) {
      top[axis] = first[axis] * w_.strides[axis] - w_.low[axis];
      seen[axis] =
          (size[axis] - 1) * w_.strides[axis] + (w_.taps[axis] - 1) * w_.dilation[axis] + 1;
    }
    const int64_t pixel = depth * kLanes, line = seen[1] * pixel;
    float* memory = static_cast<float*>(ScratchBytes(
        Scratch::kBlock, static_cast<size_t>(seen[0] * line + k * kLanes + size[1] * kLanes) * 4));
    float* weights = memory + seen[0] * line;
    float* sums = weights + k * kLanes;
    for (int64_t i = 0; i < k; ++i) {
      std::memcpy(weights + i * kLanes, c_.w + i * c_.n + first_channel,
                  static_cast<size_t>(lanes) * 4);
      std::fill(weights + i * kLanes + lanes, weights + (i + 1) * kLanes, 0.0f);
    }
    LayOut(image, first_channel, lanes, top, seen, memory);
    for (int64_t y = 0; y < size[0]; ++y) {
      const int64_t tiles = CeilDiv(size[1], kernels_.float_rows);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t from = size[1] * tile / tiles, to = size[1] * (tile + 1) / tiles;
        kernels_.conv->channel_tile[to - from - 1](
            {memory + y * w_.strides[0] * line + from * w_.strides[1] * pixel, weights, w_.taps[0],
             w_.taps[1], depth, w_.dilation[0] * line, w_.dilation[1] * pixel,
             w_.strides[1] * pixel, sums + from * kLanes});
      }
      const int64_t row = (image * w_.out[0] + first[0] + y) * w_.out[1] + first[1];
      Write(image, row, size[1], first_channel, lanes, sums);
    }
    ReleaseLargeScratch(Scratch::kBlock);
  }

 private:
  void LayOut(int64_t image, int64_t first_channel, int64_t lanes, const int64_t (&top)[2],
              const int64_t (&seen)[2], float* out) const {
    const int64_t depth = w_.depth(), per_group = c_.n / w_.groups;
    int64_t source[kLanes];  // of each output channel, its first input channel
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t channel = first_channel + std::min(lane, lanes - 1);
      source[lane] = channel / per_group * depth;
    }
    // Depthwise: an output channel's input is the channel of its own number.
    const bool straight = depth == 1 && per_group == 1 && lanes == kLanes;
    const bool one_source = source[0] == source[kLanes - 1];
    const int64_t pixel = depth * kLanes;
    const int64_t begin = std::min(std::max<int64_t>(top[1], 0), top[1] + seen[1]);
    const int64_t end = std::max(std::min(top[1] + seen[1], w_.width), begin);
    for (int64_t y = top[0]; y < top[0] + seen[0]; ++y, out += seen[1] * pixel) {
      if (y < 0 || y >= w_.height || begin == end) {
        std::fill(out, out + seen[1] * pixel, 0.0f);
        continue;
      }
      std::fill(out, out + (begin - top[1]) * pixel, 0.0f);
      std::fill(out + (end - top[1]) * pixel, out + seen[1] * pixel, 0.0f);
      float* to = out + (begin - top[1]) * pixel;
      const int64_t at = ((image * w_.height + y) * w_.width + begin) * w_.channels;
      if (straight) {
        const int64_t first = at + first_channel;
        kernels_.conv->channel_line(
            {images_.floats == nullptr ? nullptr : images_.floats + first,
             images_.codes == nullptr ? nullptr : images_.codes + first, w_.channels, end - begin,
             to});
      } else if (images_.codes != nullptr) {
        Spread(images_.codes + at, end - begin, source, one_source, to);
      } else {
        Spread(images_.floats + at, end - begin, source, one_source, to);
      }
    }
  }

  template <class Value>
  void Spread(const Value* pixel, int64_t pixels, const int64_t (&source)[kLanes], bool one_source,
              float* out) const {
    for (int64_t p = 0; p < pixels; ++p, pixel += w_.channels) {
      for (int64_t i = 0; i < w_.depth(); ++i, out += kLanes) {
        if (one_source) {
          std::fill(out, out + kLanes, static_cast<float>(pixel[source[0] + i]));
          continue;
        }
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          out[lane] = static_cast<float>(pixel[source[lane] + i]);
        }
      }
    }
  }

  void Write(int64_t image, int64_t first_row, int64_t rows, int64_t first_channel, int64_t lanes,
             const float* sums) const {
    const bool codes = images_.codes != nullptr;
    const float row_scale = codes ? images_.scales[image] : 1.0f;
    const float* scale = c_.scale == nullptr ? nullptr : c_.scale + first_channel;
    for (int64_t r = 0; r < rows; ++r, sums += kLanes) {
      const int64_t at = (first_row + r) * c_.n + first_channel;
      if (c_.out_type == Element::kS32) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          static_cast<int32_t*>(c_.out)[at + lane] = static_cast<int32_t>(sums[lane]);
        }
        continue;
      }
      float values[kLanes];
      for (int64_t lane = 0; lane < lanes; ++lane) {
        values[lane] = sums[lane] * row_scale * (scale == nullptr ? 1.0f : scale[lane]);
      }
      if (c_.out_type == Element::kF32) {
        std::memcpy(static_cast<float*>(c_.out) + at, values, static_cast<size_t>(lanes) * 4);
      } else {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          static_cast<uint16_t*>(c_.out)[at + lane] = Bf16OfFloat(values[lane]);
        }
      }
    }
  }

  const Kernels& kernels_;
  const ChannelConv& c_;
  const Window& w_;
  const Images& images_;
};

}  // namespace

std::string RunChannelConv(const Kernels& kernels, const Workers& workers,
                           const ChannelConv& conv) {
  const Window& w = conv.window;
  const int64_t rows = w.images * w.outputs();
  if (rows == 0 || conv.n == 0) {
    return "";
  }
  Workers team = workers;
  const double work = static_cast<double>(rows) *
                      static_cast<double>(conv.n * w.all_taps() * w.depth());
  if (work < kWorthAThread || !team.schedule) {
    team.threads = 1;
  }
  const ImageSource from{conv.x, conv.x_type, conv.quantize_x, conv.x_scale, conv.x_scale_rows};
  const Images images = PrepareImages(kernels, team, from, w,
                                      ScratchBytes(Scratch::kCall, ImageBytes(from, w)));
  const Run run(kernels, conv, images);
  const Cut cut = CutOutputs(w);
  const int64_t vectors = CeilDiv(conv.n, kLanes), blocks = cut.count[0] * cut.count[1];
  ParallelFor(team, w.images * blocks * vectors, [&](int64_t index) {
    const int64_t block = index / vectors % blocks;
    const int64_t place[2] = {block / cut.count[1], block % cut.count[1]};
    int64_t first[2], size[2];
    for (int axis = 0; axis < 2; ++axis) {  // of equal size, give or take one output
      first[axis] = w.out[axis] * place[axis] / cut.count[axis];
      size[axis] = w.out[axis] * (place[axis] + 1) / cut.count[axis] - first[axis];
    }
    run.Block(index / vectors / blocks, index % vectors * kLanes, first, size);
  });
  ReleaseLargeScratch(Scratch::kCall);
  return "";
}

}  // namespace fewbit
