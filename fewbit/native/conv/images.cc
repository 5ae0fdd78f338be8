#include "conv/images.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "conv/kernels.h"
#include "codes/quantize_codes.h"

namespace fewbit {
namespace {

constexpr int64_t kPart = 16 * 1024;  // values of a block of work; their floats fit the L2 cache
constexpr size_t kLine = 64;

size_t Rounded(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

int64_t ValuesOf(const Window& w) { return w.pixels() * w.channels; }

// Values [from, from + count) of all images as floats; `room` is used where x is no float32.
const float* Floats(const ImageSource& source, int64_t from, int64_t count, float* room) {
  if (source.type == Element::kF32) {
    return static_cast<const float*>(source.x) + from;
  }
  const uint16_t* x = static_cast<const uint16_t*>(source.x) + from;
  for (int64_t i = 0; i < count; ++i) {
    room[i] = FloatOfBf16(x[i]);
  }
  return room;
}

struct Part {
  int64_t image, from, count;  // from the first value of all images
};

Part PartAt(int64_t index, int64_t parts, int64_t values) {
  const int64_t image = index / parts, start = index % parts * kPart;
  return {image, image * values + start, std::min(kPart, values - start)};
}

}  // namespace

float FloatOfBf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t Bf16OfFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) {
    return static_cast<uint16_t>(bits >> 16 | 0x40);
  }
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

size_t ImageBytes(const ImageSource& source, const Window& window) {
  const auto values = static_cast<size_t>(window.images * ValuesOf(window));
  const size_t scales = Rounded(static_cast<size_t>(window.images) * sizeof(float));
  if (source.quantize) {
    return scales + Rounded(values);
  }
  return source.type == Element::kBf16 ? scales + Rounded(values * sizeof(float)) : scales;
}

Images PrepareImages(const Kernels& kernels, const Workers& workers, const ImageSource& source,
                     const Window& window, void* memory) {
  const int64_t values = ValuesOf(window), parts = (values + kPart - 1) / kPart;
  const int64_t all_parts = window.images * parts;
  float* scales = static_cast<float*>(memory);
  char* rest = static_cast<char*>(memory) +
               Rounded(static_cast<size_t>(window.images) * sizeof(float));
  if (source.type == Element::kS8) {
    for (int64_t i = 0; i < window.images; ++i) {
      scales[i] = source.scale == nullptr ? 1.0f : source.scale[source.scale_rows == 1 ? 0 : i];
    }
    return {nullptr, static_cast<const int8_t*>(source.x), scales};
  }
  if (!source.quantize) {
    if (source.type == Element::kF32) {
      return {static_cast<const float*>(source.x), nullptr, scales};
    }
    float* floats = reinterpret_cast<float*>(rest);
    ParallelFor(workers, all_parts, [&](int64_t index) {
      const Part part = PartAt(index, parts, values);
      Floats(source, part.from, part.count, floats + part.from);
    });
    return {floats, nullptr, scales};
  }
  const bool half = source.type == Element::kBf16;
  int8_t* codes = reinterpret_cast<int8_t*>(rest);
  std::vector<int32_t> largest(static_cast<size_t>(all_parts));
  ParallelFor(workers, all_parts, [&](int64_t index) {
    const Part part = PartAt(index, parts, values);
    float room[kPart];
    largest[static_cast<size_t>(index)] =
        kernels.conv->largest(Floats(source, part.from, part.count, room), part.count);
  });
  for (int64_t i = 0; i < window.images; ++i) {
    const auto first = largest.begin() + i * parts;
    scales[i] = ScaleOfLargest(parts == 0 ? 0 : *std::max_element(first, first + parts), half);
  }
  ParallelFor(workers, all_parts, [&](int64_t index) {
    const Part part = PartAt(index, parts, values);
    float room[kPart];
    kernels.conv->quantize({Floats(source, part.from, part.count, room), part.count,
                            scales[part.image], values == 1, half, codes + part.from});
  });
  return {nullptr, codes, scales};
}

}  // namespace fewbit
