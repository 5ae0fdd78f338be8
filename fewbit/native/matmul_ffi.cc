// The FFI target fewbit_matmul: every shape, type and attribute is checked here, before a read.

#include <exception>
#include <string>
#include <string_view>

#include "exports.h"
#include "ffi_checks.h"
#include "isa.h"
#include "matmul.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using fewbit::Element;
using fewbit::Refused;
using fewbit::Require;
using fewbit::Show;

Element ElementOf(ffi::DataType type, const char* what, const char* allowed) {
  switch (type) {
    case ffi::F32:
      return Element::kF32;
    case ffi::F16:
      return Element::kF16;
    case ffi::BF16:
      return Element::kBf16;
    case ffi::S8:
      return Element::kS8;
    case ffi::S32:
      return Element::kS32;
    default:
      throw Refused{std::string(what) + " must be " + allowed};
  }
}

fewbit::ScaleType ScaleTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return fewbit::kScaleF32;
    case ffi::F16:
      return fewbit::kScaleF16;
    case ffi::BF16:
      return fewbit::kScaleBf16;
    case ffi::F8E8M0FNU:
      return fewbit::kScaleE8m0;
    case ffi::F8E4M3FN:
      return fewbit::kScaleE4m3;
    default:
      throw Refused{
          "scale must be float32, float16, bfloat16, float8_e8m0fnu or float8_e4m3fn"};
  }
}

// The shape that an operand of a packed weight must have: the lead axes of `data` and a tail.
void RequireShape(const char* what, const ffi::AnyBuffer& buffer, ffi::Span<const int64_t> lead,
                  std::initializer_list<int64_t> tail) {
  const auto dims = buffer.dimensions();
  bool fits = dims.size() == lead.size() + tail.size();
  std::string wanted = "[";
  size_t axis = 0;
  const auto next = [&](int64_t dim) {
    fits = fits && dims[axis] == dim;
    wanted += (axis++ ? "," : "") + std::to_string(dim);
  };
  for (int64_t dim : lead) {
    next(dim);
  }
  for (int64_t dim : tail) {
    next(dim);
  }
  Require(fits, std::string(what) + " must have the shape " + wanted + "] but has " + Show(dims));
}

bool Absent(const ffi::AnyBuffer& buffer) {
  return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Attributes {
  std::string_view format;
  int64_t k, n, group, act, act_tile;
};

struct Operands {
  ffi::AnyBuffer x, data, scale, zero, tensor_scale, layer, act_scale;
};

void CheckAttributes(const Attributes& at) {
  const int64_t most = int64_t{1} << 40;  // no product of sizes below can overflow
  Require(at.k >= 0 && at.n >= 0 && at.k < most && at.n < most, "k and n must not be negative");
  Require(at.group == 0 || at.group == 16 || (at.group > 0 && at.group % 32 == 0),
          "group must be 0 (whole columns), 16 or a multiple of 32, not " +
              std::to_string(at.group));
  Require(at.act == 0 || at.act == 1, "act must be 0 (none) or 1 (dynamic int8)");
  Require(at.act_tile == 0 || at.act_tile == at.group,
          "act_tile must be 0 (one scale per row) or equal to group=" + std::to_string(at.group) +
              ", not " + std::to_string(at.act_tile));
}

void FillWeight(const Operands& in, const Attributes& at, fewbit::Matmul* m) {
  const auto dims = in.data.dimensions();
  Require(dims.size() >= 5 && in.data.element_type() == ffi::U8,
          "data must be uint8[..., n/64, k/32, bits, 64, 4] but has the shape " + Show(dims));
  const ffi::Span<const int64_t> lead(dims.begin(), dims.size() - 5);
  const int64_t panels = CeilDiv(at.n, fewbit::kPanel), blocks = CeilDiv(at.k, fewbit::kBlock);
  const int64_t bits = m->format->bits;
  RequireShape("data", in.data, lead, {panels, blocks, bits, fewbit::kPanel, 4});
  m->group = at.group;
  m->groups = at.group == 0 ? 1 : CeilDiv(at.k, at.group);
  RequireShape("scale", in.scale, lead, {panels, m->groups, fewbit::kPanel});
  m->scale_type = ScaleTypeOf(in.scale.element_type());
  Require(in.zero.element_type() == ffi::U8, "zero must be uint8");
  const bool has_zero = !Absent(in.zero);
  if (has_zero) {
    Require(m->format->integers() && bits > 1,
            std::string(m->format->name) + " has no zero points; pass zero as uint8[0]");
    RequireShape("zero", in.zero, lead, {panels, m->groups, fewbit::kPanel});
  }
  Require(in.tensor_scale.element_type() == ffi::F32 && in.tensor_scale.dimensions().size() == 0,
          "tensor_scale must be a float32 scalar");
  m->tensor_scale = *in.tensor_scale.typed_data<float>();

  Require(in.layer.element_type() == ffi::S32 && in.layer.dimensions().size() == 0,
          "layer must be an int32 scalar");
  const int64_t layer = *in.layer.typed_data<int32_t>();
  int64_t layers = 1;
  for (int64_t dim : lead) {
    layers *= dim;
  }
  Require(layer >= 0 && layer < layers, "layer " + std::to_string(layer) +
                                            " is not one of the " + std::to_string(layers) +
                                            " that data holds, shape " + Show(dims));
  const int64_t scale_bytes = static_cast<int64_t>(ffi::ByteWidth(in.scale.element_type()));
  const int64_t per_layer = panels * m->groups * fewbit::kPanel;
  m->data = static_cast<const uint8_t*>(in.data.untyped_data()) +
            layer * panels * blocks * bits * fewbit::kPanel * 4;
  m->scale = static_cast<const uint8_t*>(in.scale.untyped_data()) + layer * per_layer * scale_bytes;
  m->zero = has_zero ? static_cast<const uint8_t*>(in.zero.untyped_data()) + layer * per_layer
                     : nullptr;
}

void FillActivations(const Operands& in, const Attributes& at, fewbit::Matmul* m) {
  constexpr char kTypes[] = "float32, bfloat16 or int8";
  const auto dims = in.x.dimensions();
  m->x_type = ElementOf(in.x.element_type(), "x", kTypes);
  Require(m->x_type == Element::kF32 || m->x_type == Element::kBf16 || m->x_type == Element::kS8,
          std::string("x must be ") + kTypes);
  Require(dims.size() == 2 && dims[1] == at.k,
          "x must be [rows, k=" + std::to_string(at.k) + "] but has the shape " + Show(dims));
  m->x = in.x.untyped_data();
  m->rows = dims[0];
  const bool codes = m->x_type == Element::kS8;
  Require(!codes || at.act == 0, "x is int8 already: act must be 0");
  Require(codes || at.act == 1 || at.act_tile == 0, "act_tile is for quantized activations");
  m->quantize_x = at.act == 1;
  m->x_scale_per_group = at.act_tile != 0;
  m->x_scale = nullptr;
  m->x_scale_rows = m->rows;
  m->x_scale_type = Element::kF32;
  if (!codes) {
    Require(Absent(in.act_scale), "act_scale belongs to int8 x; for a float x pass it as [0]");
    return;
  }
  if (Absent(in.act_scale)) {
    Require(m->out_type == Element::kS32, "int8 x needs its act_scale, unless the result is int32");
    return;
  }
  const auto scale = in.act_scale.dimensions();
  const int64_t columns = m->x_scale_per_group ? m->groups : 1;
  Require(scale.size() == 2 && (scale[0] == m->rows || scale[0] == 1) && scale[1] == columns,
          "act_scale must be [" + std::to_string(m->rows) + " or 1," + std::to_string(columns) +
              "] but has the shape " + Show(scale));
  m->x_scale_type = ElementOf(in.act_scale.element_type(), "act_scale",
                              "float32, bfloat16 or float16");
  Require(m->x_scale_type != Element::kS8 && m->x_scale_type != Element::kS32,
          "act_scale must be float32, bfloat16 or float16");
  m->x_scale = in.act_scale.untyped_data();
  m->x_scale_rows = scale[0];
}

void FillResult(ffi::Result<ffi::AnyBuffer>& result, const Attributes& at, int64_t rows,
                fewbit::Matmul* m) {
  constexpr char kTypes[] = "float32, bfloat16 or int32";
  const auto dims = result->dimensions();
  m->out_type = ElementOf(result->element_type(), "the result", kTypes);
  Require(m->out_type != Element::kF16 && m->out_type != Element::kS8,
          std::string("the result must be ") + kTypes);
  Require(dims.size() == 2 && dims[0] == rows && dims[1] == at.n,
          "the result must be [" + std::to_string(rows) + "," + std::to_string(at.n) +
              "] but has the shape " + Show(dims));
  m->out = result->untyped_data();
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer data,
                    ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer tensor_scale,
                    ffi::AnyBuffer layer, ffi::AnyBuffer act_scale,
                    ffi::Result<ffi::AnyBuffer> result, std::string_view format, int64_t k,
                    int64_t n, int64_t group, int64_t act, int64_t act_tile) {
  try {
    const Attributes at{format, k, n, group, act, act_tile};
    const Operands in{x, data, scale, zero, tensor_scale, layer, act_scale};
    fewbit::Matmul m{};
    m.format = fewbit::FindFormat(format.data(), format.size());
    Require(m.format != nullptr, "there is no format '" + std::string(format) +
                                     "' for packed panels; there are " + fewbit::FormatNames());
    m.k = k;
    m.n = n;
    CheckAttributes(at);
    FillWeight(in, at, &m);
    Require(x.dimensions().size() == 2, "x must have two axes but has the shape " +
                                            Show(x.dimensions()));
    FillResult(result, at, x.dimensions()[0], &m);
    FillActivations(in, at, &m);
    Require(m.out_type != Element::kS32 ||
                (m.x_type == Element::kS8 && m.format->integers() && m.groups == 1),
            "an int32 result holds sums of codes: it needs int8 x, an integer format and one "
            "group");
    const std::string problem =
        fewbit::RunMatmul(*fewbit::ChosenIsa().kernels, fewbit::WorkersOf(pool), m);
    Require(problem.empty(), problem);
  } catch (const Refused& refused) {
    return ffi::Error::InvalidArgument("fewbit matmul: " + refused.why);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("fewbit matmul: ") + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

FEWBIT_EXPORT_HANDLER(fewbit_matmul);
XLA_FFI_DEFINE_HANDLER_SYMBOL(fewbit_matmul, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("format")
                                  .Attr<int64_t>("k")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("act")
                                  .Attr<int64_t>("act_tile"));
