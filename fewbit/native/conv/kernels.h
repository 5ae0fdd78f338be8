// The border between the driver of convolutions and the kernels of one instruction set: plain
// structs and function pointers, nothing inline (matmul/kernels.h tells why).
//
// A convolution over panels is a matrix product whose rows are patches of an image. The patches are
// never written down: a tile of rows is told, per tap of the window, where each row's pixel lies.

#ifndef FEWBIT_NATIVE_CONV_KERNELS_H_
#define FEWBIT_NATIVE_CONV_KERNELS_H_

#include <cstdint>

#include "matmul/kernels.h"

namespace fewbit {

struct ConvTileInt {
  const int32_t* const* taps;  // [taps][rows]: the words of each row's pixel
  int64_t skip;                // quads of the first tap that an earlier piece has summed
  int64_t tap_quads;
  int64_t quads;               // to be summed here
  const int32_t* b;            // [quad][words][vectors of a strip][16]
  int32_t* sums;               // [rows][64]
  bool first;                  // sums holds nothing yet
};

struct ConvTileFloat {
  const float* const* taps;    // [taps][rows]: the channels of each row's pixel
  int64_t skip;
  int64_t tap_length;
  int64_t length;
  const float* b;              // [k][strip columns]
  float* sums;                 // [rows][stride]
  int64_t stride;
  bool first;
};

// Integer sums to numbers: (sum - zero) * row_scale * scale.
struct ConvFinish {
  const int32_t* sums;         // [rows][64]
  const int32_t* zeros;        // [rows]
  const float* row_scales;     // [rows]
  const float* scales;         // [64]
  int64_t rows, columns;
  float* out;                  // [rows][stride], `columns` of them written
  int64_t stride;
};

// Outputs side by side of one output row, for 16 output channels that each see `depth` inputs.
struct ChannelTile {
  const float* x;              // [y][x][depth][16], at the first output's window
  const float* w;              // [taps][depth][16]
  int64_t taps_y, taps_x, depth;
  int64_t step_y, step_x;      // floats from tap to tap
  int64_t step_out;            // floats from output to output
  float* out;                  // [outputs][16]
};

// Sixteen neighbouring channels of the pixels of a line, as floats [pixels][16].
struct ChannelLine {
  const float* floats;         // one of the two
  const int8_t* codes;
  int64_t stride;              // from pixel to pixel
  int64_t pixels;
  float* out;
};

// Part of an image that shares one scale.
struct QuantizePart {
  const float* x;
  int64_t count;
  float scale;                 // NaN: codes of 0
  bool divide;                 // else the reciprocal is multiplied with
  bool round_to_bf16;
  int8_t* codes;
};

struct ConvKernels {
  void (*tile_int[8][kMaxTileRows])(const ConvTileInt&);
  void (*tile_float[kMaxTileRows])(const ConvTileFloat&);
  void (*channel_tile[kMaxTileRows])(const ChannelTile&);
  void (*channel_line)(const ChannelLine&);
  void (*finish)(const ConvFinish&);
  void (*widen)(const int8_t* codes, int64_t quads, int32_t* words);  // two words per quad
  int32_t (*sum)(const int8_t* codes, int64_t count);
  int32_t (*largest)(const float* x, int64_t count);  // the bits of the largest magnitude
  void (*quantize)(const QuantizePart&);
};

extern const ConvKernels kPortableConvKernels;
#if defined(__x86_64__)
extern const ConvKernels kAvx2ConvKernels;
extern const ConvKernels kAvx512VnniConvKernels;
#endif

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CONV_KERNELS_H_
