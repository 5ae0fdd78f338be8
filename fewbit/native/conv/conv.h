// Convolutions over images [images, height, width, channels], without FFI. Shapes are checked
// before. A 1-D convolution is one over images of height 1.

#ifndef FEWBIT_NATIVE_CONV_H_
#define FEWBIT_NATIVE_CONV_H_

#include <cstdint>
#include <string>

#include "matmul/matmul.h"

namespace fewbit {

// Sizes along y and x.
struct Window {
  int64_t images, height, width, channels;
  int64_t groups;            // of channels that are convolved apart
  int64_t taps[2];
  int64_t strides[2];
  int64_t low[2];            // padding before the first pixel; may be negative
  int64_t dilation[2];
  int64_t out[2];

  int64_t pixels() const { return height * width; }             // of one image
  int64_t outputs() const { return out[0] * out[1]; }
  int64_t all_taps() const { return taps[0] * taps[1]; }
  int64_t depth() const { return channels / groups; }           // channels that an output sees
};

// The product's x is the images; its rows are the outputs, its k the taps and the channels of a
// group (k = (y, x, channel)), its n the output channels. Quantized x has a scale per image
// (x_scale_rows: images or 1), and then a weight of integers with one scale per column and no zero
// points of its own. A group's output channels are whole panels.
struct Conv {
  Matmul product;
  Window window;
};

std::string RunConv(const Kernels& kernels, const Workers& workers, const Conv& conv);

// The same with few output channels per group: a plain float weight [taps, depth, n], `scale` per
// output channel (or null). Sums of int8 codes are exact as long as k is at most kLongestExact.
struct ChannelConv {
  Window window;
  int64_t n;
  const float* w;
  const float* scale;        // [n]
  const void* x;
  Element x_type;
  bool quantize_x;
  const float* x_scale;      // [x_scale_rows], or null: 1
  int64_t x_scale_rows;
  void* out;                 // [images][outputs][n]: kF32, kBf16, or kS32 without any scale
  Element out_type;
};

constexpr int64_t kLongestExact = 1024;  // 2^24 / (128 * 128)

std::string RunChannelConv(const Kernels& kernels, const Workers& workers, const ChannelConv& conv);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CONV_H_
