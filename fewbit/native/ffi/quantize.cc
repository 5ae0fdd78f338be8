// The FFI targets fewbit_quantize_int8, floats to codes with one scale for all values along some
// neighbouring axes, and fewbit_quantize_shifted_int8, which multiplies them with factors first.

#include <exception>
#include <string>
#include <vector>

#include "ffi/exports.h"
#include "ffi/checks.h"
#include "isa/isa.h"

namespace ffi = xla::ffi;

namespace {

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

// What the values along the shared axes are multiplied with: the same for each outer, or its own.
struct Factors {
  const float* values = nullptr;
  bool each_outer = false;
  const float* Of(int64_t outer, int64_t rows) const {
    return values == nullptr || !each_outer ? values : values + outer * rows;
  }
};

// One row; with factors their products are made in scratch.
void QuantizeLine(const fewbit::Kernels& kernels, const float* x, const float* factor, int64_t count,
                  int8_t* codes, float* scale) {
  if (factor != nullptr) {
    auto* scratch = static_cast<float*>(
        fewbit::ScratchBytes(fewbit::Scratch::kBlock, static_cast<size_t>(count) * 4));
    for (int64_t i = 0; i < count; ++i) {
      scratch[i] = x[i] * factor[i];
    }
    x = scratch;
  }
  kernels.quantize_row({x, count, count, false, false, codes, scale});
}

// Whole rows at a time, as they lie: first the ranges of some rows each, then their codes.
void QuantizeColumns(const fewbit::Kernels& kernels, const fewbit::Workers& team, const Shape& s,
                     const float* x, const Factors& factors, int8_t* codes, float* scales) {
  const int64_t worth = std::max<int64_t>(s.rows * s.columns / kWorthTaking, 1);
  const int64_t wanted = (4 * team.threads + s.outer - 1) / s.outer;
  const int64_t parts = std::min(std::min(worth, wanted), s.rows);
  const size_t columns = static_cast<size_t>(s.columns), outer = static_cast<size_t>(s.outer);
  // [outer][parts][columns] of ranges, then [outer][columns] of reciprocal scales.
  const size_t ranges = outer * static_cast<size_t>(parts) * columns;
  auto* largest = static_cast<int32_t*>(
      fewbit::ScratchBytes(fewbit::Scratch::kCall, (ranges + outer * columns) * 4));
  float* per_scale = reinterpret_cast<float*>(largest + ranges);
  const auto block = [&](int64_t unit) {
    const int64_t first = s.rows * (unit % parts) / parts;
    const int64_t end = s.rows * (unit % parts + 1) / parts;
    const float* start = x + (unit / parts * s.rows + first) * s.columns;
    const float* factor = factors.Of(unit / parts, s.rows);
    return fewbit::ColumnBlock{start, end - first, s.columns,
                               factor == nullptr ? nullptr : factor + first};
  };
  fewbit::ParallelFor(team, s.outer * parts, [&](int64_t unit) {
    kernels.largest_of_columns(block(unit), largest + unit * s.columns);
  });
  for (int64_t o = 0; o < s.outer; ++o) {
    int32_t* all = largest + o * parts * s.columns;
    for (int64_t part = 1; part < parts; ++part) {
      for (int64_t c = 0; c < s.columns; ++c) {
        all[c] = std::max(all[c], all[part * s.columns + c]);
      }
    }
    kernels.scales_of_columns(all, s.columns, scales + o * s.columns, per_scale + o * s.columns);
  }
  fewbit::ParallelFor(team, s.outer * parts, [&](int64_t unit) {
    const fewbit::ColumnBlock rows = block(unit);
    kernels.codes_of_columns(rows, per_scale + unit / parts * s.columns, codes + (rows.x - x));
  });
  fewbit::ReleaseLargeScratch(fewbit::Scratch::kCall);
}

void Run(const fewbit::Workers& workers, const Shape& s, const float* from, const Factors& factors,
         int8_t* to, float* scales) {
  const fewbit::Kernels& kernels = *fewbit::ChosenIsa().kernels;
  Require(s.rows > 0 || s.outer * s.columns == 0, "there is no range over an empty axis");
  fewbit::Workers team = workers;
  const int64_t all = s.outer * s.rows * s.columns;
  if (all < 2 * kWorthTaking) {
    team.threads = 1;
  }
  if (all == 0) {
    return;
  }
  if (s.columns == 1) {
    const int64_t step = std::max<int64_t>(kWorthTaking / s.rows, 1);
    fewbit::ParallelFor(team, (s.outer + step - 1) / step, [&](int64_t block) {
      for (int64_t r = block * step; r < std::min(s.outer, (block + 1) * step); ++r) {
        QuantizeLine(kernels, from + r * s.rows, factors.Of(r, s.rows), s.rows, to + r * s.rows,
                     scales + r);
      }
      fewbit::ReleaseLargeScratch(fewbit::Scratch::kBlock);
    });
  } else {
    QuantizeColumns(kernels, team, s, from, factors, to, scales);
  }
}

Shape CheckedShape(ffi::Buffer<ffi::F32>& x, ffi::ResultBuffer<ffi::S8>& codes,
                   ffi::ResultBuffer<ffi::F32>& scale, int64_t first, int64_t last) {
  const auto dims = x.dimensions(), out = codes->dimensions();
  Require(std::equal(dims.begin(), dims.end(), out.begin(), out.end()),
          "the codes must have x's shape " + Show(dims) + " but have " + Show(out));
  return ShapeOf(dims, first, last, scale->dimensions());
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                    ffi::ResultBuffer<ffi::S8> codes, ffi::ResultBuffer<ffi::F32> scale,
                    int64_t first, int64_t last) {
  return fewbit::Checked("fewbit quantize_int8", [&] {
    const Shape s = CheckedShape(x, codes, scale, first, last);
    Run(fewbit::WorkersOf(pool), s, x.typed_data(), {}, codes->typed_data(), scale->typed_data());
  });
}

ffi::Error QuantizeShifted(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                           ffi::Buffer<ffi::F32> factor, ffi::ResultBuffer<ffi::S8> codes,
                           ffi::ResultBuffer<ffi::F32> scale, int64_t first, int64_t last) {
  return fewbit::Checked("fewbit quantize_shifted_int8", [&] {
    const Shape s = CheckedShape(x, codes, scale, first, last);
    const int64_t count = static_cast<int64_t>(factor.element_count());
    Require(count == s.rows || count == s.outer * s.rows,
            "there must be a factor for each of " + std::to_string(s.rows) + " values, or for " +
                std::to_string(s.outer) + " times as many, but there are " + std::to_string(count));
    Run(fewbit::WorkersOf(pool), s, x.typed_data(), {factor.typed_data(), count != s.rows},
        codes->typed_data(), scale->typed_data());
  });
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

FEWBIT_EXPORT_HANDLER(fewbit_quantize_shifted_int8);
XLA_FFI_DEFINE_HANDLER_SYMBOL(fewbit_quantize_shifted_int8, QuantizeShifted,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("last"));
