#include "ffi/checks.h"

#include <algorithm>
#include <exception>
#include <string_view>

namespace ffi = xla::ffi;

namespace fewbit {
namespace {

ScaleType ScaleTypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return kScaleF32;
    case ffi::F16:
      return kScaleF16;
    case ffi::BF16:
      return kScaleBf16;
    case ffi::F8E8M0FNU:
      return kScaleE8m0;
    case ffi::F8E4M3FN:
      return kScaleE4m3;
    default:
      throw Refused{
          "scale must be float32, float16, bfloat16, float8_e8m0fnu or float8_e4m3fn"};
  }
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::string Show(ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    text += (i ? "," : "") + std::to_string(dims[i]);
  }
  return text + "]";
}

void Require(bool fits, const std::string& why) {
  if (!fits) {
    throw Refused{why};
  }
}

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

const Format* FormatOf(std::string_view name) {
  const Format* format = FindFormat(name.data(), name.size());
  Require(format != nullptr, "there is no format '" + std::string(name) +
                                 "' for packed panels; there are " + FormatNames());
  return format;
}

void FillWeight(const WeightOperands& in, int64_t group, Matmul* m) {
  Require(group == 0 || group == 16 || (group > 0 && group % 32 == 0),
          "group must be 0 (whole columns), 16 or a multiple of 32, not " + std::to_string(group));
  const auto dims = in.data.dimensions();
  Require(dims.size() >= 5 && in.data.element_type() == ffi::U8,
          "data must be uint8[..., n/64, k/32, bits, 64, 4] but has the shape " + Show(dims));
  const ffi::Span<const int64_t> lead(dims.begin(), dims.size() - 5);
  const int64_t panels = CeilDiv(m->n, kPanel), blocks = CeilDiv(m->k, kBlock);
  const int64_t bits = m->format->bits;
  RequireShape("data", in.data, lead, {panels, blocks, bits, kPanel, 4});
  m->group = group;
  m->groups = group == 0 ? 1 : CeilDiv(m->k, group);
  RequireShape("scale", in.scale, lead, {panels, m->groups, kPanel});
  m->scale_type = ScaleTypeOf(in.scale.element_type());
  Require(in.zero.element_type() == ffi::U8, "zero must be uint8");
  const bool has_zero = !Absent(in.zero);
  if (has_zero) {
    Require(m->format->integers() && bits > 1,
            std::string(m->format->name) + " has no zero points; pass zero as uint8[0]");
    RequireShape("zero", in.zero, lead, {panels, m->groups, kPanel});
  }
  Require(in.tensor_scale.element_type() == ffi::F32 && in.tensor_scale.dimensions().size() == 0,
          "tensor_scale must be a float32 scalar");
  m->tensor_scale = *in.tensor_scale.typed_data<float>();

  int64_t layers = 1;
  for (int64_t dim : lead) {
    layers *= dim;
  }
  const auto layer_dims = in.layer.dimensions();
  Require(in.layer.element_type() == ffi::S32 &&
              (layer_dims.size() == 0 || (layer_dims.size() == 1 && layer_dims[0] == layers)),
          "layer must be an int32 scalar, or the rows of each of the " + std::to_string(layers) +
              " entries of data");
  m->data = static_cast<const uint8_t*>(in.data.untyped_data());
  m->scale = static_cast<const uint8_t*>(in.scale.untyped_data());
  m->zero = has_zero ? static_cast<const uint8_t*>(in.zero.untyped_data()) : nullptr;
  if (layer_dims.size() == 1) {
    return;
  }
  const int64_t layer = *in.layer.typed_data<int32_t>();
  Require(layer >= 0 && layer < layers, "layer " + std::to_string(layer) +
                                            " is not one of the " + std::to_string(layers) +
                                            " that data holds, shape " + Show(dims));
  MoveToEntry(layer, m);
}

void MoveToEntry(int64_t entry, Matmul* m) {
  static constexpr int64_t kScaleBytes[] = {4, 2, 2, 1, 1};
  const int64_t panels = CeilDiv(m->n, kPanel), blocks = CeilDiv(m->k, kBlock);
  const int64_t scales = entry * panels * m->groups * kPanel;
  m->data += entry * panels * blocks * m->format->bits * kPanel * 4;
  m->scale += scales * kScaleBytes[m->scale_type];
  m->zero = m->zero == nullptr ? nullptr : m->zero + scales;
}

Workers WorkersOf(ffi::ThreadPool& pool) {
  Workers workers;
  workers.threads = std::min<int64_t>(pool.num_threads(), UsableCpus());
  workers.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
  return workers;
}

ffi::Error Checked(const char* what, const std::function<void()>& body) {
  try {
    body();
  } catch (const Refused& refused) {
    return ffi::Error::InvalidArgument(std::string(what) + ": " + refused.why);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string(what) + ": " + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace fewbit
