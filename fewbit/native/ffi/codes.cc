// The FFI target fewbit_codes_dot: a dot_general of int8 codes, given by its dimension numbers.

#include <exception>
#include <string>
#include <vector>

#include "codes/dot.h"
#include "ffi/exports.h"
#include "ffi/checks.h"
#include "isa/isa.h"

namespace ffi = xla::ffi;

namespace {

using fewbit::Element;
using fewbit::Refused;
using fewbit::Require;
using fewbit::Show;
using Axes = ffi::Span<const int64_t>;

// The offset of every element along some axes of a row-major array, the last axis fastest.
std::vector<int64_t> Offsets(Axes dims, const std::vector<int64_t>& axes) {
  std::vector<int64_t> offsets = {0};
  for (int64_t axis : axes) {
    int64_t stride = 1;
    for (size_t i = static_cast<size_t>(axis) + 1; i < dims.size(); ++i) {
      stride *= dims[i];
    }
    std::vector<int64_t> next;
    next.reserve(offsets.size() * static_cast<size_t>(dims[static_cast<size_t>(axis)]));
    for (int64_t offset : offsets) {
      for (int64_t i = 0; i < dims[static_cast<size_t>(axis)]; ++i) {
        next.push_back(offset + i * stride);
      }
    }
    offsets = std::move(next);
  }
  return offsets;
}

// One operand, its axes sorted out.
struct Operand {
  std::vector<int64_t> batch, summed, free;  // axes
  std::vector<int64_t> lines;                // sizes of the batch axes and of the free ones
  fewbit::CodesSide side;
};

Operand Understand(const std::string& name, const ffi::AnyBuffer& buffer, Axes batch,
                   Axes summed) {
  const auto dims = buffer.dimensions();
  Require(buffer.element_type() == ffi::S8, name + " must be int8");
  std::vector<bool> taken(dims.size(), false);
  for (Axes axes : {batch, summed}) {
    for (int64_t axis : axes) {
      const bool there = axis >= 0 && axis < static_cast<int64_t>(dims.size());
      Require(there && !taken[static_cast<size_t>(axis)],
              name + " has no axis " + std::to_string(axis) +
                  ", or it is named twice; its shape is " + Show(dims) + ", the axes are " +
                  Show(batch) + " and " + Show(summed));
      taken[static_cast<size_t>(axis)] = true;
    }
  }
  Operand operand{{batch.begin(), batch.end()}, {summed.begin(), summed.end()}, {}, {}, {}};
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    if (!taken[axis]) {
      operand.free.push_back(static_cast<int64_t>(axis));
    }
  }
  for (const auto* axes : {&operand.batch, &operand.free}) {
    for (int64_t axis : *axes) {
      operand.lines.push_back(dims[static_cast<size_t>(axis)]);
    }
  }
  operand.side.codes = buffer.typed_data<int8_t>();
  operand.side.batch = Offsets(dims, operand.batch);
  operand.side.lines = Offsets(dims, operand.free);
  operand.side.ks = Offsets(dims, operand.summed);
  return operand;
}

void RequireEqual(const char* what, const std::vector<int64_t>& lhs_axes,
                  const ffi::AnyBuffer& left, const std::vector<int64_t>& rhs_axes,
                  const ffi::AnyBuffer& right) {
  bool fits = lhs_axes.size() == rhs_axes.size();
  for (size_t i = 0; fits && i < lhs_axes.size(); ++i) {
    fits = left.dimensions()[static_cast<size_t>(lhs_axes[i])] ==
           right.dimensions()[static_cast<size_t>(rhs_axes[i])];
  }
  Require(fits, std::string(what) + " axes " + Show({lhs_axes.data(), lhs_axes.size()}) +
                    " of lhs " + Show(left.dimensions()) + " and " +
                    Show({rhs_axes.data(), rhs_axes.size()}) + " of rhs " +
                    Show(right.dimensions()) + " differ in number or length");
}

void RequireShape(const std::string& name, Axes dims, const std::vector<int64_t>& wanted) {
  Require(std::equal(dims.begin(), dims.end(), wanted.begin(), wanted.end()),
          name + " must have the shape " + Show({wanted.data(), wanted.size()}) + " but has " +
              Show(dims));
}

const float* ScaleOf(const std::string& name, const ffi::AnyBuffer& scale, const Operand& operand,
                     bool scaled) {
  const auto dims = scale.dimensions();
  Require(scale.element_type() == ffi::F32, name + " must be float32");
  if (!scaled) {
    Require(dims.size() == 1 && dims[0] == 0,
            name + " belongs to a float result; for int32 sums pass it as [0]");
    return nullptr;
  }
  RequireShape(name, dims, operand.lines);
  return scale.typed_data<float>();
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                    ffi::AnyBuffer lhs_scale, ffi::AnyBuffer rhs_scale,
                    ffi::Result<ffi::AnyBuffer> result, Axes lhs_batch, Axes rhs_batch,
                    Axes lhs_summed, Axes rhs_summed) {
  return fewbit::Checked("fewbit codes_dot", [&] {
    Operand left = Understand("lhs", lhs, lhs_batch, lhs_summed);
    Operand right = Understand("rhs", rhs, rhs_batch, rhs_summed);
    RequireEqual("batch", left.batch, lhs, right.batch, rhs);
    RequireEqual("contracting", left.summed, lhs, right.summed, rhs);
    fewbit::CodesDot dot{};
    switch (result->element_type()) {
      case ffi::S32:
        dot.out_type = Element::kS32;
        break;
      case ffi::F32:
        dot.out_type = Element::kF32;
        break;
      case ffi::BF16:
        dot.out_type = Element::kBf16;
        break;
      default:
        throw Refused{"the result must be int32, float32 or bfloat16"};
    }
    std::vector<int64_t> shape = left.lines;
    shape.insert(shape.end(), right.lines.begin() + static_cast<int64_t>(right.batch.size()),
                 right.lines.end());
    RequireShape("the result", result->dimensions(), shape);
    const bool scaled = dot.out_type != Element::kS32;
    left.side.scale = ScaleOf("lhs_scale", lhs_scale, left, scaled);
    right.side.scale = ScaleOf("rhs_scale", rhs_scale, right, scaled);
    dot.lhs = std::move(left.side);
    dot.rhs = std::move(right.side);
    dot.out = result->untyped_data();
    fewbit::RunCodesDot(*fewbit::ChosenIsa().kernels, fewbit::WorkersOf(pool), dot);
  });
}

}  // namespace

FEWBIT_EXPORT_HANDLER(fewbit_codes_dot);
XLA_FFI_DEFINE_HANDLER_SYMBOL(fewbit_codes_dot, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Axes>("lhs_batch")
                                  .Attr<Axes>("rhs_batch")
                                  .Attr<Axes>("lhs_summed")
                                  .Attr<Axes>("rhs_summed"));
