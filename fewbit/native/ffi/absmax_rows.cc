// max |x| over the last axis: f32[..., K] -> f32[...], any number of leading axes.

#include <cstdint>
#include <cstring>
#include <string>

#include "ffi/exports.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Without its sign bit a float orders like its bit pattern read as an integer, and every NaN lies
// above infinity: one integer maximum finds the largest magnitude and keeps NaN. It is also
// indifferent to the flush-to-zero mode in which XLA's threads run.
int32_t AbsmaxBits(const float* row, int64_t length) {
  int32_t largest = 0;
  for (int64_t i = 0; i < length; ++i) {
    int32_t bits;
    std::memcpy(&bits, row + i, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

std::string Show(ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    text += (i ? "," : "") + std::to_string(dims[i]);
  }
  return text + "]";
}

ffi::Error AbsmaxRows(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> absmax) {
  const auto in = x.dimensions();
  const auto out = absmax->dimensions();
  bool fits = in.size() >= 1 && out.size() + 1 == in.size();
  int64_t rows = 1;
  for (size_t i = 0; fits && i < out.size(); ++i) {
    fits = in[i] == out[i];
    rows *= out[i];
  }
  if (!fits) {
    return ffi::Error::InvalidArgument(
        "fewbit absmax_rows: the result must have the operand's shape without its last axis; got "
        "operand f32" + Show(in) + " and result f32" + Show(out));
  }

  const int64_t length = in[in.size() - 1];
  const float* row = x.typed_data();
  float* result = absmax->typed_data();
  for (int64_t r = 0; r < rows; ++r, row += length) {
    const int32_t bits = AbsmaxBits(row, length);
    std::memcpy(result + r, &bits, sizeof bits);
  }
  return ffi::Error::Success();
}

}  // namespace

FEWBIT_EXPORT_HANDLER(fewbit_absmax_rows);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    fewbit_absmax_rows, AbsmaxRows,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
