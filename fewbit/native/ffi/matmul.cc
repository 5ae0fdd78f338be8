// The FFI target fewbit_matmul: every shape, type and attribute is checked here, before a read.

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "ffi/exports.h"
#include "ffi/checks.h"
#include "isa/isa.h"
#include "matmul/matmul.h"
#include "matmul/transposed.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using fewbit::Absent;
using fewbit::Element;
using fewbit::ElementOf;
using fewbit::Require;
using fewbit::Show;

// What is done to a float x; int8 codes are taken as they are, with kFloat.
constexpr int64_t kFloat = 0, kDynamic = 1, kStatic = 2;

struct Attributes {
  std::string_view format, activation;
  int64_t k, n, group, act, act_tile;
  bool transposed;  // x is [rows, n] and the result [rows, k]
};

struct Operands {
  ffi::AnyBuffer x, act_scale, bias;
};

void CheckAttributes(const Attributes& at) {
  Require(at.k >= 0 && at.n >= 0 && at.k < fewbit::kLargestSize && at.n < fewbit::kLargestSize,
          "k and n must not be negative");
  Require(at.act >= kFloat && at.act <= kStatic,
          "act must be 0 (none), 1 (dynamic int8) or 2 (int8 with act_scale)");
  Require(at.act_tile == 0 || at.act_tile == at.group,
          "act_tile must be 0 (one scale per row) or equal to group=" + std::to_string(at.group) +
              ", not " + std::to_string(at.act_tile));
  Require(!at.transposed || at.act == kFloat, "a transposed product has float x: act must be 0");
}

void FillActivations(const Operands& in, const Attributes& at, fewbit::Matmul* m) {
  const char* types = at.transposed ? "float32 or bfloat16" : "float32, bfloat16 or int8";
  const auto dims = in.x.dimensions();
  m->x_type = ElementOf(in.x.element_type(), "x", types);
  Require(m->x_type == Element::kF32 || m->x_type == Element::kBf16 ||
              (m->x_type == Element::kS8 && !at.transposed),
          std::string("x must be ") + types);
  const int64_t length = at.transposed ? at.n : at.k;
  Require(dims.size() == 2 && dims[1] == length,
          std::string("x must be [rows, ") + (at.transposed ? "n=" : "k=") +
              std::to_string(length) + "] but has the shape " + Show(dims));
  m->x = in.x.untyped_data();
  m->rows = dims[0];
  const bool codes = m->x_type == Element::kS8;
  Require(!codes || at.act == kFloat, "x is int8 already: act must be 0");
  Require(codes || at.act != kFloat || at.act_tile == 0, "act_tile is for quantized activations");
  m->quantize_x = at.act != kFloat;
  m->x_scale_per_group = at.act_tile != 0;
  m->x_scale = nullptr;
  m->x_scale_rows = m->rows;
  m->x_scale_type = Element::kF32;
  if (!codes && at.act != kStatic) {
    Require(Absent(in.act_scale),
            "act_scale belongs to int8 x and to act=2; for any other x pass it as [0]");
    return;
  }
  if (Absent(in.act_scale)) {
    Require(codes && m->out_type == Element::kS32,
            "int8 x needs its act_scale, unless the result is int32, and act=2 always does");
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
  Require(codes || m->x_scale_type == m->x_type, "with act=2 act_scale must have x's type");
  m->x_scale = in.act_scale.untyped_data();
  m->x_scale_rows = scale[0];
}

void FillResult(ffi::Result<ffi::AnyBuffer>& result, const Attributes& at, int64_t rows,
                fewbit::Matmul* m) {
  const char* types = at.transposed ? "float32 or bfloat16" : "float32, bfloat16 or int32";
  const auto dims = result->dimensions();
  m->out_type = ElementOf(result->element_type(), "the result", types);
  Require(m->out_type == Element::kF32 || m->out_type == Element::kBf16 ||
              (m->out_type == Element::kS32 && !at.transposed),
          std::string("the result must be ") + types);
  const int64_t width = at.transposed ? at.k : at.n;
  Require(dims.size() == 2 && dims[0] == rows && dims[1] == width,
          "the result must be [" + std::to_string(rows) + "," + std::to_string(width) +
              "] but has the shape " + Show(dims));
  m->out = result->untyped_data();
}

// One bias for each column, padded to whole panels; then an elementwise function.
void FillFinish(const Operands& in, const Attributes& at, fewbit::Matmul* m) {
  const std::string name(at.activation);
  Require(fewbit::FindElementwise(name.data(), name.size(), &m->activation),
          "there is no activation '" + name + "'; there are " + fewbit::ElementwiseNames());
  m->bias = nullptr;
  if (!Absent(in.bias)) {
    const int64_t panels = (at.n + fewbit::kPanel - 1) / fewbit::kPanel;
    fewbit::RequireShape("bias", in.bias, {}, {panels, fewbit::kPanel});
    m->bias_type = ElementOf(in.bias.element_type(), "bias", "float32 or bfloat16");
    Require(m->bias_type == Element::kF32 || m->bias_type == Element::kBf16,
            "bias must be float32 or bfloat16");
    m->bias = in.bias.untyped_data();
  }
  Require(!m->finishes() || !(at.transposed || m->out_type == Element::kS32),
          "bias and activation belong to the float results of a product: not to a transposed one, "
          "nor to int32 sums");
}

void Run(const fewbit::Workers& workers, const fewbit::Matmul& m, bool transposed) {
  const fewbit::Kernels& kernels = *fewbit::ChosenIsa().kernels;
  if (transposed) {
    fewbit::RunTransposed(kernels, workers, m);
  } else {
    const std::string problem = fewbit::RunMatmul(kernels, workers, m);
    Require(problem.empty(), problem);
  }
}

int64_t BytesOf(Element type) {
  return type == Element::kS8 ? 1 : type == Element::kBf16 || type == Element::kF16 ? 2 : 4;
}

// Each entry of the stack has so many of the rows, one after the other. What goes beyond the rows
// there are is cut off, and rows beyond the entries' are sums of nothing, as in jax.lax.ragged_dot.
void RunEntries(const fewbit::Workers& workers, const fewbit::Matmul& whole,
                const ffi::AnyBuffer& sizes, const Attributes& at) {
  const int32_t* rows_of = sizes.typed_data<int32_t>();
  const int64_t x_bytes = (at.transposed ? at.n : at.k) * BytesOf(whole.x_type);
  const int64_t out_bytes = (at.transposed ? at.k : at.n) * BytesOf(whole.out_type);
  const int64_t scale_bytes =
      (whole.x_scale_per_group ? whole.groups : 1) * BytesOf(whole.x_scale_type);
  int64_t first = 0;
  for (int64_t entry = 0; entry < sizes.dimensions()[0]; ++entry) {
    fewbit::Matmul m = whole;
    m.rows = std::min<int64_t>(std::max(rows_of[entry], 0), whole.rows - first);
    if (m.rows == 0) {
      continue;
    }
    fewbit::MoveToEntry(entry, &m);
    m.x = static_cast<const char*>(whole.x) + first * x_bytes;
    m.out = static_cast<char*>(whole.out) + first * out_bytes;
    if (whole.x_scale != nullptr && whole.x_scale_rows != 1) {
      m.x_scale = static_cast<const char*>(whole.x_scale) + first * scale_bytes;
      m.x_scale_rows = m.rows;
    }
    Run(workers, m, at.transposed);
    first += m.rows;
  }
  fewbit::Matmul rest = whole;
  rest.rows = whole.rows - first;
  rest.out = static_cast<char*>(whole.out) + first * out_bytes;
  if (whole.finishes()) {
    rest.k = 0;
    Run(workers, rest, at.transposed);
  } else {
    std::memset(rest.out, 0, static_cast<size_t>(rest.rows * out_bytes));
  }
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer data,
                    ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer tensor_scale,
                    ffi::AnyBuffer layer, ffi::AnyBuffer act_scale, ffi::AnyBuffer bias,
                    ffi::Result<ffi::AnyBuffer> result, std::string_view format, int64_t k,
                    int64_t n, int64_t group, int64_t act, int64_t act_tile, bool transposed,
                    std::string_view activation) {
  return fewbit::Checked("fewbit matmul", [&] {
    const Attributes at{format, activation, k, n, group, act, act_tile, transposed};
    const Operands in{x, act_scale, bias};
    fewbit::Matmul m{};
    m.format = fewbit::FormatOf(format);
    m.k = k;
    m.n = n;
    CheckAttributes(at);
    fewbit::FillWeight({data, scale, zero, tensor_scale, layer}, group, &m);
    Require(x.dimensions().size() == 2, "x must have two axes but has the shape " +
                                            Show(x.dimensions()));
    FillResult(result, at, x.dimensions()[0], &m);
    FillActivations(in, at, &m);
    Require(m.out_type != Element::kS32 ||
                (m.x_type == Element::kS8 && m.format->integers() && m.groups == 1),
            "an int32 result holds sums of codes: it needs int8 x, an integer format and one "
            "group");
    FillFinish(in, at, &m);
    const fewbit::Workers workers = fewbit::WorkersOf(pool);
    if (layer.dimensions().size() == 0) {
      Run(workers, m, transposed);
    } else {
      RunEntries(workers, m, layer, at);
    }
  });
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
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("format")
                                  .Attr<int64_t>("k")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("act")
                                  .Attr<int64_t>("act_tile")
                                  .Attr<bool>("transposed")
                                  .Attr<std::string_view>("activation"));
