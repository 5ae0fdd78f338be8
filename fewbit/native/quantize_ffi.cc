// The FFI target fewbit_quantize_int8: floats to codes with one scale for all values along some
// neighbouring axes.

#include <exception>
#include <string>
#include <vector>

#include "exports.h"
#include "ffi_checks.h"
#include "isa.h"

namespace ffi = xla::ffi;

namespace {

using fewbit::Refused;
using fewbit::Require;
using fewbit::Show;

constexpr int64_t kWorthTaking = 32 * 1024;  // values

// x as [outer][rows][columns]: a scale for each outer and column.
struct Shape {
  int64_t outer = 1, rows = 1, columns = 1;
};

Shape ShapeOf(ffi::Span<const int64_t> dims, int64_t first, int64_t last,
              ffi::Span<const int64_t> scale) {
  const int64_t rank = static_cast<int64_t>(dims.size());
  Require(0 <= first && first < last && last <= rank,
          "first=" + std::to_string(first) + " and last=" + std::to_string(last) +
              " do not name axes of x" + Show(dims));
  Shape shape;
  std::vector<int64_t> wanted(dims.begin(), dims.end());
  for (int64_t axis = 0; axis < rank; ++axis) {
    const int64_t size = dims[static_cast<size_t>(axis)];
    if (axis < first) {
      shape.outer *= size;
    } else if (axis >= last) {
      shape.columns *= size;
    } else {
      shape.rows *= size;
      wanted[static_cast<size_t>(axis)] = 1;
    }
  }
  Require(std::equal(scale.begin(), scale.end(), wanted.begin(), wanted.end()),
          "scale must have the shape " + Show({wanted.data(), wanted.size()}) + " but has " +
              Show(scale));
  return shape;
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                    ffi::ResultBuffer<ffi::S8> codes, ffi::ResultBuffer<ffi::F32> scale,
                    int64_t first, int64_t last) {
  try {
    const auto dims = x.dimensions(), out = codes->dimensions();
    Require(std::equal(dims.begin(), dims.end(), out.begin(), out.end()),
            "the codes must have x's shape " + Show(dims) + " but have " + Show(out));
    const Shape s = ShapeOf(dims, first, last, scale->dimensions());
    const fewbit::Kernels& kernels = *fewbit::ChosenIsa().kernels;
    const float* from = x.typed_data();
    int8_t* to = codes->typed_data();
    float* scales = scale->typed_data();
    Require(s.rows > 0 || s.outer * s.columns == 0, "there is no range over an empty axis");
    fewbit::Workers team = fewbit::WorkersOf(pool);
    const int64_t all = s.outer * s.rows * s.columns;
    if (all < 2 * kWorthTaking) {
      team.threads = 1;
    }
    if (all == 0) {
      return ffi::Error::Success();
    }
    if (s.columns == 1) {
      const int64_t step = std::max<int64_t>(kWorthTaking / s.rows, 1);
      fewbit::ParallelFor(team, (s.outer + step - 1) / step, [&](int64_t block) {
        for (int64_t r = block * step; r < std::min(s.outer, (block + 1) * step); ++r) {
          kernels.quantize_row(
              {from + r * s.rows, s.rows, s.rows, false, to + r * s.rows, scales + r});
        }
      });
    } else {
      const int64_t blocks = (s.columns + fewbit::kColumnsAtOnce - 1) / fewbit::kColumnsAtOnce;
      fewbit::ParallelFor(team, s.outer * blocks, [&](int64_t unit) {
        const int64_t column = unit % blocks * fewbit::kColumnsAtOnce;
        const int64_t at = unit / blocks * s.rows * s.columns + column;
        kernels.quantize_columns({from + at, s.rows, s.columns,
                                  std::min<int64_t>(fewbit::kColumnsAtOnce, s.columns - column),
                                  to + at, scales + unit / blocks * s.columns + column});
      });
    }
  } catch (const Refused& refused) {
    return ffi::Error::InvalidArgument("fewbit quantize_int8: " + refused.why);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("fewbit quantize_int8: ") + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

FEWBIT_EXPORT_HANDLER(fewbit_quantize_int8);
XLA_FFI_DEFINE_HANDLER_SYMBOL(fewbit_quantize_int8, Quantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("last"));
