// The FFI targets fewbit_conv and fewbit_channel_conv: everything is checked here, before a read.

#include <string>
#include <string_view>

#include "conv/conv.h"
#include "ffi/exports.h"
#include "ffi/checks.h"
#include "isa/isa.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using fewbit::Absent;
using fewbit::Element;
using fewbit::Require;
using fewbit::Show;
using Numbers = ffi::Span<const int64_t>;

// `numbers` are pairs along y and x: taps, strides, padding before, padding behind, dilation.
fewbit::Window WindowOf(const ffi::AnyBuffer& x, Numbers numbers, int64_t groups) {
  constexpr int64_t kMost = int64_t{1} << 24;
  const auto dims = x.dimensions();
  Require(dims.size() == 4,
          "x must be [images, height, width, channels] but has the shape " + Show(dims));
  Require(numbers.size() == 10, "window must have 10 numbers but has " +
                                    std::to_string(numbers.size()));
  fewbit::Window w{};
  w.images = dims[0], w.height = dims[1], w.width = dims[2], w.channels = dims[3];
  Require(groups >= 1 && w.channels % groups == 0,
          "groups must divide the " + std::to_string(w.channels) + " channels, not be " +
              std::to_string(groups));
  w.groups = groups;
  for (int64_t number : numbers) {
    Require(number < kMost && number > -kMost, "a number of the window is out of range: " +
                                                   std::to_string(number));
  }
  for (size_t axis = 0; axis < 2; ++axis) {
    w.taps[axis] = numbers.begin()[axis];
    w.strides[axis] = numbers.begin()[2 + axis];
    w.low[axis] = numbers.begin()[4 + axis];
    w.dilation[axis] = numbers.begin()[8 + axis];
    Require(w.taps[axis] >= 1 && w.strides[axis] >= 1 && w.dilation[axis] >= 1,
            "taps, strides and dilation must be positive");
    const int64_t size = axis == 0 ? w.height : w.width;
    const int64_t room = size + w.low[axis] + numbers.begin()[6 + axis] -
                         (w.taps[axis] - 1) * w.dilation[axis] - 1;
    w.out[axis] = room < 0 ? 0 : room / w.strides[axis] + 1;
  }
  return w;
}

Element TypeOfX(const ffi::AnyBuffer& x) {
  constexpr char kTypes[] = "float32, bfloat16 or int8";
  const Element type = fewbit::ElementOf(x.element_type(), "x", kTypes);
  Require(type == Element::kF32 || type == Element::kBf16 || type == Element::kS8,
          std::string("x must be ") + kTypes);
  return type;
}

Element TypeOfResult(ffi::Result<ffi::AnyBuffer>& result, const fewbit::Window& w, int64_t n) {
  constexpr char kTypes[] = "float32, bfloat16 or int32";
  const Element type = fewbit::ElementOf(result->element_type(), "the result", kTypes);
  Require(type != Element::kF16 && type != Element::kS8,
          std::string("the result must be ") + kTypes);
  const auto dims = result->dimensions();
  Require(dims.size() == 4 && dims[0] == w.images && dims[1] == w.out[0] && dims[2] == w.out[1] &&
              dims[3] == n,
          "the result must be [" + std::to_string(w.images) + "," + std::to_string(w.out[0]) +
              "," + std::to_string(w.out[1]) + "," + std::to_string(n) + "] but has the shape " +
              Show(dims));
  return type;
}

// The scales of int8 images, or null: without them only the sums can be asked for.
const float* ScalesOf(const ffi::AnyBuffer& scale, const fewbit::Window& w, Element x, Element out,
                      int64_t act) {
  Require(act == 0 || act == 1, "act must be 0 (none) or 1 (dynamic int8)");
  Require(scale.element_type() == ffi::F32, "act_scale must be float32");
  if (x != Element::kS8) {
    Require(Absent(scale), "act_scale belongs to int8 x; for a float x pass it as [0]");
    Require(out != Element::kS32, "an int32 result holds sums of codes: it needs int8 x");
    return nullptr;
  }
  Require(act == 0, "x is int8 already: act must be 0");
  if (out == Element::kS32) {
    return nullptr;
  }
  const auto dims = scale.dimensions();
  Require(dims.size() == 1 && (dims[0] == w.images || dims[0] == 1) && (dims[0] > 0 || w.images == 0),
          "act_scale must be [" + std::to_string(w.images) + " or 1] but has the shape " +
              Show(dims));
  return scale.typed_data<float>();
}

ffi::Error Convolve(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer data,
                    ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer tensor_scale,
                    ffi::AnyBuffer layer, ffi::AnyBuffer act_scale,
                    ffi::Result<ffi::AnyBuffer> result, std::string_view format, Numbers window,
                    int64_t groups, int64_t k, int64_t n, int64_t group, int64_t act) {
  return fewbit::Checked("fewbit conv", [&] {
    fewbit::Conv conv{};
    fewbit::Matmul& m = conv.product;
    const fewbit::Window w = conv.window = WindowOf(x, window, groups);
    m.format = fewbit::FormatOf(format);
    Require(n >= 0 && n < fewbit::kLargestSize, "n must not be negative");
    Require(groups == 1 || n % (groups * fewbit::kPanel) == 0,
            "a group's output channels must be whole panels of 64: n=" + std::to_string(n) +
                " in groups=" + std::to_string(groups));
    m.k = w.all_taps() * w.depth();
    Require(m.k == k, "the window sums over " + std::to_string(m.k) + " values but the weight has k=" +
                          std::to_string(k));
    m.n = n;
    fewbit::FillWeight({data, scale, zero, tensor_scale, layer}, group, &m);
    m.rows = w.images * w.outputs();
    m.x = x.untyped_data();
    m.x_type = TypeOfX(x);
    m.out_type = TypeOfResult(result, w, n);
    m.out = result->untyped_data();
    m.quantize_x = act == 1;
    m.x_scale = ScalesOf(act_scale, w, m.x_type, m.out_type, act);
    m.x_scale_type = Element::kF32;
    m.x_scale_rows = Absent(act_scale) ? 1 : act_scale.dimensions()[0];
    if (m.x_type == Element::kS8 || m.quantize_x) {
      Require(m.format->integers() && m.groups == 1 && m.zero == nullptr,
              "int8 images need a weight of integers with one scale per output channel and no "
              "zero points");
      Require(m.k <= 1 << 17, "sums over k=" + std::to_string(m.k) + " may not fit int32");
    }
    const std::string problem =
        fewbit::RunConv(*fewbit::ChosenIsa().kernels, fewbit::WorkersOf(pool), conv);
    Require(problem.empty(), problem);
  });
}

ffi::Error ConvolveChannels(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                            ffi::AnyBuffer scale, ffi::AnyBuffer act_scale,
                            ffi::Result<ffi::AnyBuffer> result, Numbers window, int64_t groups,
                            int64_t n, int64_t act) {
  return fewbit::Checked("fewbit channel conv", [&] {
    fewbit::ChannelConv conv{};
    const fewbit::Window w = conv.window = WindowOf(x, window, groups);
    const int64_t k = w.all_taps() * w.depth();
    Require(n >= 0 && n < fewbit::kLargestSize && n % groups == 0,
            "n=" + std::to_string(n) + " must be a multiple of groups=" + std::to_string(groups));
    Require(weight.element_type() == ffi::F32, "weight must be float32");
    fewbit::RequireShape("weight", weight, Numbers(), {k, n});
    Require(scale.element_type() == ffi::F32, "scale must be float32");
    if (!Absent(scale)) {
      fewbit::RequireShape("scale", scale, Numbers(), {n});
      conv.scale = scale.typed_data<float>();
    }
    conv.n = n;
    conv.w = weight.typed_data<float>();
    conv.x = x.untyped_data();
    conv.x_type = TypeOfX(x);
    conv.quantize_x = act == 1;
    conv.out_type = TypeOfResult(result, w, n);
    conv.out = result->untyped_data();
    conv.x_scale = ScalesOf(act_scale, w, conv.x_type, conv.out_type, act);
    conv.x_scale_rows = Absent(act_scale) ? 1 : act_scale.dimensions()[0];
    Require((conv.x_type != Element::kS8 && act == 0) || k <= fewbit::kLongestExact,
            "sums of codes over k=" + std::to_string(k) + " are exact only up to " +
                std::to_string(fewbit::kLongestExact));
    const std::string problem =
        fewbit::RunChannelConv(*fewbit::ChosenIsa().kernels, fewbit::WorkersOf(pool), conv);
    Require(problem.empty(), problem);
  });
}

}  // namespace

FEWBIT_EXPORT_HANDLER(fewbit_conv);
XLA_FFI_DEFINE_HANDLER_SYMBOL(fewbit_conv, Convolve,
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
                                  .Attr<Numbers>("window")
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("k")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("act"));

FEWBIT_EXPORT_HANDLER(fewbit_channel_conv);
XLA_FFI_DEFINE_HANDLER_SYMBOL(fewbit_channel_conv, ConvolveChannels,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Numbers>("window")
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("n")
                                  .Attr<int64_t>("act"));
