// Convolutions of every instruction set against naive loops. Fails by its exit code.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/bf16.h"
#include "conv/conv.h"
#include "pack_code.h"
#include "team.h"

namespace fewbit {
namespace {

struct Shape {
  int64_t images, height, width, channels, n, groups, taps, stride, low, high, dilation;

  Window Cut() const {
    Window w{};
    w.images = images, w.height = height, w.width = width, w.channels = channels;
    w.groups = groups;
    for (int axis = 0; axis < 2; ++axis) {
      w.taps[axis] = taps, w.strides[axis] = stride, w.low[axis] = low, w.dilation[axis] = dilation;
      const int64_t size = axis == 0 ? height : width;
      w.out[axis] = (size + low + high - (taps - 1) * dilation - 1) / stride + 1;
    }
    return w;
  }
};

// The sums of codes x [images][height][width][channels] and w [k][n].
std::vector<int32_t> Naive(const Window& w, int64_t n, const std::vector<int8_t>& x,
                           const std::vector<int>& weight) {
  std::vector<int32_t> out;
  for (int64_t row = 0; row < w.images * w.outputs(); ++row) {
    const int64_t image = row / w.outputs(), oy = row % w.outputs() / w.out[1];
    const int64_t ox = row % w.out[1];
    for (int64_t j = 0; j < n; ++j) {
      const int64_t group = j / (n / w.groups);
      int32_t sum = 0;
      for (int64_t k = 0; k < w.all_taps() * w.depth(); ++k) {
        const int64_t tap = k / w.depth();
        const int64_t y = oy * w.strides[0] - w.low[0] + tap / w.taps[1] * w.dilation[0];
        const int64_t c = ox * w.strides[1] - w.low[1] + tap % w.taps[1] * w.dilation[1];
        if (y < 0 || y >= w.height || c < 0 || c >= w.width) {
          continue;
        }
        const int64_t at = ((image * w.height + y) * w.width + c) * w.channels +
                           group * w.depth() + k % w.depth();
        sum += x[static_cast<size_t>(at)] * weight[static_cast<size_t>(k * n + j)];
      }
      out.push_back(sum);
    }
  }
  return out;
}

// How a convolution gets its images and gives its results.
struct Way {
  const char* name;
  Element x_type, out_type;
  bool quantize, scaled;
};
constexpr Way kWays[] = {
    {"codes", Element::kS8, Element::kF32, false, false},
    {"scaled codes", Element::kS8, Element::kBf16, false, true},
    {"sums of codes", Element::kS8, Element::kS32, false, false},
    {"floats", Element::kF32, Element::kF32, false, false},
    {"scaled floats", Element::kF32, Element::kBf16, false, true},
    {"bfloat16", Element::kBf16, Element::kF32, false, true},
    {"quantized floats", Element::kF32, Element::kF32, true, true},
    {"quantized bfloat16", Element::kBf16, Element::kBf16, true, false},
};

// The images of one convolution in every type: codes, which floats hold exactly. Each image has a
// -128, so that quantizing gives them all one scale.
struct Pictures {
  std::vector<int8_t> codes;
  std::vector<float> floats, scales;
  std::vector<uint16_t> narrow;

  Pictures(int64_t images, int64_t values) {
    for (int64_t i = 0; i < images * values; ++i) {
      codes.push_back(static_cast<int8_t>(i % values == 0 ? -128 : Random(-128, 127)));
      floats.push_back(codes.back());
      narrow.push_back(ToBf16(floats.back()));
    }
    for (int64_t i = 0; i < images; ++i) {
      scales.push_back(std::ldexp(1.0f, Random(-2, 2)));
    }
  }
  // Numbers as fewbit.quantize(x, 'int8') sees them; in bfloat16 each step is rounded.
  std::vector<int8_t> Quantized(bool half, float* scale) const {
    const auto rounded = [half](float v) { return half ? FromBf16(ToBf16(v)) : v; };
    *scale = rounded(128.0f * (1.0f / 127.5f));
    std::vector<int8_t> out;
    for (float v : floats) {
      const float units = half ? rounded(v / *scale) : v * (1.0f / *scale);
      out.push_back(static_cast<int8_t>(std::nearbyint(std::min(std::max(units, -128.0f), 127.0f))));
    }
    return out;
  }
  const void* As(Element type) const {
    return type == Element::kS8    ? static_cast<const void*>(codes.data())
           : type == Element::kF32 ? static_cast<const void*>(floats.data())
                                   : narrow.data();
  }
};

// Sums are below 2^24, and exact under scales that are powers of two, which those of quantized images
// are not; bfloat16 rounds at the end.
bool Same(const std::string& what, const Way& way, const std::vector<int32_t>& sums,
          const std::vector<float>& factors, const std::vector<uint8_t>& bytes) {
  for (size_t i = 0; i < sums.size(); ++i) {
    const float want = static_cast<float>(sums[i]) * factors[i];
    float got, tolerance = way.quantize ? 3e-7f * std::fabs(want) : 0.0f;
    if (way.out_type == Element::kBf16) {
      uint16_t half;
      std::memcpy(&half, &bytes[i * 2], 2);
      got = FromBf16(half);
      tolerance += std::ldexp(std::fabs(want), -8);
    } else if (way.out_type == Element::kF32) {
      std::memcpy(&got, &bytes[i * 4], 4);
    } else {
      int32_t sum;
      std::memcpy(&sum, &bytes[i * 4], 4);
      got = static_cast<float>(sum);
    }
    if (!(std::fabs(got - want) <= tolerance)) {
      std::printf("%s %s: [%zu] is %.9g, not %.9g\n", what.c_str(), way.name, i, got, want);
      return false;
    }
  }
  return true;
}

int64_t Check(const Kernels& kernels, const Shape& s, int bits, int threads, bool* good) {
  const Window w = s.Cut();
  const int64_t k = w.all_taps() * w.depth(), blocks = CeilDiv(k, kBlock);
  const std::string name = "int" + std::to_string(bits);
  const Pictures x(s.images, w.pixels() * s.channels);
  std::vector<uint8_t> data(static_cast<size_t>(CeilDiv(s.n, kPanel) * blocks * bits * kPanel * 4));
  std::vector<int> weight;
  std::vector<float> plain;
  for (int64_t i = 0; i < k * s.n; ++i) {
    const int code = Random(0, (1 << bits) - 1);
    PackCode(i / s.n, i % s.n, code, bits, blocks, data.data());
    weight.push_back(code - (1 << (bits - 1)));
    plain.push_back(static_cast<float>(weight.back()));
  }
  std::vector<float> scales(static_cast<size_t>(CeilDiv(s.n, kPanel) * kPanel), 1.0f);
  for (float& scale : scales) {
    scale = std::ldexp(1.0f, Random(-2, 2));
  }
  const std::vector<float> ones(scales.size(), 1.0f);
  const bool panels = s.groups == 1 || s.n / s.groups % kPanel == 0;
  const std::string what = std::string(kernels.name) + " " + name + (panels ? "" : " by channels");
  int64_t count = 0;
  for (const Way& way : kWays) {
    float quantized_scale = 1.0f;
    const std::vector<int8_t> seen =
        way.quantize ? x.Quantized(way.x_type == Element::kBf16, &quantized_scale) : x.codes;
    const std::vector<int32_t> sums = Naive(w, s.n, seen, weight);
    std::vector<float> factors;
    for (size_t i = 0; i < sums.size(); ++i) {
      const auto n = static_cast<size_t>(s.n), image = i / (static_cast<size_t>(w.outputs()) * n);
      const bool given = way.x_type == Element::kS8 && way.scaled;
      factors.push_back((given ? x.scales[image] : quantized_scale) *
                        (way.scaled ? scales[i % n] : 1.0f));
    }
    const float* image_scales = way.scaled ? x.scales.data() : nullptr;
    std::vector<uint8_t> out(sums.size() * (way.out_type == Element::kBf16 ? 2 : 4), 0xff);
    Team team(threads);
    if (panels) {
      Conv conv{};
      conv.window = w;
      Matmul& m = conv.product;
      m.format = FindFormat(name.c_str(), name.size());
      m.rows = w.images * w.outputs(), m.k = k, m.n = s.n;
      m.data = data.data();
      m.scale = reinterpret_cast<const uint8_t*>((way.scaled ? scales : ones).data());
      m.groups = 1;
      m.tensor_scale = 1.0f;
      m.out = out.data(), m.out_type = way.out_type;
      m.x = x.As(way.x_type), m.x_type = way.x_type, m.quantize_x = way.quantize;
      m.x_scale = image_scales, m.x_scale_rows = s.images;
      RunConv(kernels, team.workers, conv);
    } else {
      ChannelConv conv{};
      conv.window = w;
      conv.n = s.n;
      conv.w = plain.data();
      conv.scale = way.scaled ? scales.data() : nullptr;
      conv.out = out.data(), conv.out_type = way.out_type;
      conv.x = x.As(way.x_type), conv.x_type = way.x_type, conv.quantize_x = way.quantize;
      conv.x_scale = image_scales, conv.x_scale_rows = s.images;
      RunChannelConv(kernels, team.workers, conv);
    }
    *good = Same(what, way, sums, factors, out) && *good;
    ++count;
  }
  return count;
}

}  // namespace
}  // namespace fewbit

int main() {
  const fewbit::Shape shapes[] = {
      {1, 6, 7, 16, 64, 1, 3, 1, 1, 1, 1},  {2, 7, 6, 20, 70, 1, 3, 2, 1, 1, 1},
      {1, 9, 8, 3, 65, 1, 5, 2, 2, 1, 1},   {1, 8, 8, 12, 9, 1, 3, 1, 2, 2, 2},
      {1, 5, 5, 90, 64, 1, 1, 1, 0, 0, 1},  {1, 6, 6, 16, 128, 2, 3, 1, 1, 1, 1},
      {1, 7, 7, 32, 32, 32, 3, 1, 1, 1, 1}, {2, 6, 6, 10, 20, 5, 3, 2, 1, 0, 1}};
  bool good = true;
  for (const fewbit::Kernels* kernels : fewbit::SetsToTest()) {
    bool each = true;
    int64_t count = 0;
    for (const fewbit::Shape& shape : shapes) {
      for (int bits : {2, 4, 5, 6, 7, 8}) {
        count += fewbit::Check(*kernels, shape, bits, 1 + bits % 3, &each);
      }
    }
    std::printf("%-22s %ld convolutions, %s\n", kernels->name, static_cast<long>(count),
                each ? "all right" : "WRONG");
    good = good && each;
  }
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
