// Convolutions of every instruction set against naive loops. Fails by its exit code.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "conv.h"
#include "pack_code.h"

namespace fewbit {
namespace {

std::mt19937 engine(2);
int Random(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

bool Same(const char* what, const Kernels& kernels, const std::vector<int32_t>& want,
          const std::vector<float>& got) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (static_cast<float>(want[i]) != got[i]) {  // sums below 2^24: floats are exact too
      std::printf("%s %s: [%zu] is %.9g, not %d\n", kernels.name, what, i, got[i], want[i]);
      return false;
    }
  }
  return true;
}

bool Check(const Kernels& kernels, const Shape& s, int bits, int threads) {
  const Window w = s.Cut();
  const int64_t k = w.all_taps() * w.depth(), blocks = CeilDiv(k, kBlock);
  const std::string name = "int" + std::to_string(bits);
  std::vector<int8_t> x;
  std::vector<float> floats;
  for (int64_t i = 0; i < s.images * w.pixels() * s.channels; ++i) {
    x.push_back(static_cast<int8_t>(Random(-128, 127)));
    floats.push_back(x.back());
  }
  std::vector<uint8_t> data(static_cast<size_t>(CeilDiv(s.n, kPanel) * blocks * bits * kPanel * 4));
  std::vector<int> weight;
  std::vector<float> plain;
  for (int64_t i = 0; i < k * s.n; ++i) {
    const int code = Random(0, (1 << bits) - 1);
    PackCode(i / s.n, i % s.n, code, bits, blocks, data.data());
    weight.push_back(code - (1 << (bits - 1)));
    plain.push_back(static_cast<float>(weight.back()));
  }
  const std::vector<int32_t> want = Naive(w, s.n, x, weight);
  std::vector<float> out(want.size(), -1.0f);
  std::vector<std::thread> helpers;
  Workers workers;
  workers.threads = threads;
  workers.schedule = [&](std::function<void()> task) { helpers.emplace_back(std::move(task)); };
  bool good = true;
  if (s.groups == 1 || s.n / s.groups % kPanel == 0) {
    const std::vector<float> ones(static_cast<size_t>(CeilDiv(s.n, kPanel) * kPanel), 1.0f);
    Conv conv{};
    conv.window = w;
    Matmul& m = conv.product;
    m.format = FindFormat(name.c_str(), name.size());
    m.rows = w.images * w.outputs(), m.k = k, m.n = s.n;
    m.data = data.data();
    m.scale = reinterpret_cast<const uint8_t*>(ones.data());
    m.groups = 1;
    m.tensor_scale = 1.0f;
    m.out = out.data();
    m.x = x.data(), m.x_type = Element::kS8, m.x_scale_rows = 1;
    RunConv(kernels, workers, conv);
    good = Same("codes", kernels, want, out) && good;
    m.x = floats.data(), m.x_type = Element::kF32;
    RunConv(kernels, workers, conv);
    good = Same("floats", kernels, want, out) && good;
  } else {
    ChannelConv conv{};
    conv.window = w;
    conv.n = s.n;
    conv.w = plain.data();
    conv.out = out.data();
    conv.x = x.data(), conv.x_type = Element::kS8, conv.x_scale_rows = 1;
    RunChannelConv(kernels, workers, conv);
    good = Same("channel codes", kernels, want, out) && good;
    conv.x = floats.data(), conv.x_type = Element::kF32;
    RunChannelConv(kernels, workers, conv);
    good = Same("channel floats", kernels, want, out) && good;
  }
  for (std::thread& helper : helpers) {
    helper.join();
  }
  return good;
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
    long count = 0;
    for (const fewbit::Shape& shape : shapes) {
      for (int bits : {2, 4, 5, 6, 7, 8}) {
        each = fewbit::Check(*kernels, shape, bits, 1 + bits % 3) && each;
        ++count;
      }
    }
    std::printf("%-22s %ld convolutions, %s\n", kernels->name, count, each ? "all right" : "WRONG");
    good = good && each;
  }
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
