// The formats that the kernels read. Names and values as in fewbit/numerics (_formats.py, _codes.py).

#include <cstring>

#include "matmul/matmul.h"

namespace fewbit {
namespace {

constexpr float kNf4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct Pairs {
  float values[512];
};
constexpr Pairs PairsOf(const float* table) {
  Pairs pairs{};
  for (int byte = 0; byte < 256; ++byte) {
    pairs.values[byte * 2] = table[byte & 15];
    pairs.values[byte * 2 + 1] = table[byte >> 4];
  }
  return pairs;
}
constexpr Pairs kNf4Pairs = PairsOf(kNf4), kE2m1Pairs = PairsOf(kE2m1);

// A single bit is read as 0 or 2, which the zero point 1 makes -1 or 1.
constexpr Decoding Int(int bits) { return static_cast<Decoding>(kInt1 + bits - 1); }

constexpr Format kFormats[] = {
    {"int1", 1, Int(1), 1, nullptr, nullptr},
    {"int2", 2, Int(2), 2, nullptr, nullptr},
    {"int3", 3, Int(3), 4, nullptr, nullptr},
    {"int4", 4, Int(4), 8, nullptr, nullptr},
    {"int5", 5, Int(5), 16, nullptr, nullptr},
    {"int6", 6, Int(6), 32, nullptr, nullptr},
    {"int7", 7, Int(7), 64, nullptr, nullptr},
    {"int8", 8, Int(8), 128, nullptr, nullptr},
    {"uint4", 4, Int(4), 0, nullptr, nullptr},
    {"uint8", 8, Int(8), 0, nullptr, nullptr},
    {"nf4", 4, kTable4, 0, kNf4, kNf4Pairs.values},
    {"float4_e2m1fn", 4, kTable4, 0, kE2m1, kE2m1Pairs.values},
    {"float8_e4m3fn", 8, kE4m3, 0, nullptr, nullptr},
    {"float8_e5m2", 8, kE5m2, 0, nullptr, nullptr},
};

}  // namespace

const Format* FindFormat(const char* name, size_t length) {
  for (const Format& format : kFormats) {
    if (std::strlen(format.name) == length && std::memcmp(format.name, name, length) == 0) {
      return &format;
    }
  }
  return nullptr;
}

std::string FormatNames() {
  std::string names;
  for (const Format& format : kFormats) {
    names += (names.empty() ? "" : ", ") + std::string(format.name);
  }
  return names;
}

}  // namespace fewbit
