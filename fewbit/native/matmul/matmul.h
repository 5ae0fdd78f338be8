// x[rows, k] times a packed weight[k, n]: the whole product, without FFI. Shapes are checked before.

#ifndef FEWBIT_NATIVE_MATMUL_H_
#define FEWBIT_NATIVE_MATMUL_H_

#include <cstdint>
#include <string>

#include "matmul/kernels.h"
#include "common/parallel.h"

namespace fewbit {

enum class Element { kF32, kF16, kBf16, kS8, kS32 };

// What the codes of a named format mean.
struct Format {
  const char* name;
  int bits;
  Decoding decoding;
  int32_t zero;  // the code of zero, where codes are integers
  const float* table;    // of 16 values, or null
  const float* pairs;    // [256][2]: those of a byte's two codes

  bool integers() const { return decoding <= kInt8; }
};

// Null if there is no such format.
const Format* FindFormat(const char* name, size_t length);
std::string FormatNames();

struct Matmul {
  const Format* format;
  int64_t rows, k, n;
  const void* x;            // [rows][k] of x_type: kF32, kBf16 or kS8
  Element x_type;
  const uint8_t* data;      // [n/64][k/32][bits][64][4], n and k rounded up
  const uint8_t* scale;     // [n/64][groups][64] of scale_type
  ScaleType scale_type;
  const uint8_t* zero;      // [n/64][groups][64], or null
  int64_t group, groups;    // group 0: the whole column
  float tensor_scale;
  bool quantize_x;          // floats to int8 on the way
  bool x_scale_per_group;   // one activation scale per row and group, else one per row
  const void* x_scale;      // for kS8, or to quantize with: [x_scale_rows][groups or 1]; or null
  Element x_scale_type;
  int64_t x_scale_rows;     // rows, or 1
  const void* bias;         // [n/64][64] of bias_type: kF32 or kBf16; or null
  Element bias_type;
  Elementwise activation;
  void* out;                // [rows][n] of out_type: kF32, kBf16, or kS32 (the integer sums)
  Element out_type;

  bool finishes() const { return bias != nullptr || activation != Elementwise::kNone; }
};

// An empty string, or why there is no result.
std::string RunMatmul(const Kernels& kernels, const Workers& workers, const Matmul& matmul);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_H_
