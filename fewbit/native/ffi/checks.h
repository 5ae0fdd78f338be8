// What the FFI targets share: operands are checked before the first read, and a mismatch says what
// was wanted.

#ifndef FEWBIT_NATIVE_FFI_CHECKS_H_
#define FEWBIT_NATIVE_FFI_CHECKS_H_

#include <functional>
#include <initializer_list>
#include <string>

#include "matmul/matmul.h"
#include "xla/ffi/api/ffi.h"

namespace fewbit {

struct Refused {
  std::string why;
};

constexpr int64_t kLargestSize = int64_t{1} << 40;  // no product of few sizes can overflow

std::string Show(xla::ffi::Span<const int64_t> dims);
void Require(bool fits, const std::string& why);
Element ElementOf(xla::ffi::DataType type, const char* what, const char* allowed);

// The shape that an operand of a packed weight must have: the lead axes of `data` and a tail.
void RequireShape(const char* what, const xla::ffi::AnyBuffer& buffer,
                  xla::ffi::Span<const int64_t> lead, std::initializer_list<int64_t> tail);

// An operand that is not there has the shape [0].
bool Absent(const xla::ffi::AnyBuffer& buffer);

struct WeightOperands {
  xla::ffi::AnyBuffer data, scale, zero, tensor_scale, layer;
};

const Format* FormatOf(std::string_view name);

// Fills in what belongs to the weight; format, k and n are there already. `layer` is the entry of the
// stack; where it is a vector, one number of rows per entry, the weight is the first entry.
void FillWeight(const WeightOperands& in, int64_t group, Matmul* matmul);

// From the first entry of a stack to another one.
void MoveToEntry(int64_t entry, Matmul* matmul);

Workers WorkersOf(xla::ffi::ThreadPool& pool);

// Runs `body`, and turns what it throws into the target's error.
xla::ffi::Error Checked(const char* what, const std::function<void()>& body);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_FFI_CHECKS_H_
