// Exponentials and what is made of them, in plain C++ that compilers vectorize, compiled once per
// instruction set. Internal linkage only, as in matmul/decode.h.
//
// Comparisons are written so that NaN falls through to the arithmetic and stays.

#ifndef FEWBIT_NATIVE_ELEMENTWISE_H_
#define FEWBIT_NATIVE_ELEMENTWISE_H_

#include <cstdint>
#include <cstring>

namespace fewbit {
namespace {

constexpr float kRound = 12582912.0f;        // 1.5 * 2^23: a sum's low bits are an integer
constexpr float kSmallestExponent = -87.0f;  // below, exp is a subnormal float and counts as 0

inline float Float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int32_t Bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Rounded once where the instruction set does that.
inline float MulAdd(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(FEWBIT_EMULATE_AVX512)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Of magnitudes below 2^22.
inline float Floor(float x) {
#if defined(__FMA__)
  return __builtin_floorf(x);
#else
  const float nearest = (x + kRound) - kRound;  // SSE2 has no instruction for it
  return nearest > x ? nearest - 1.0f : nearest;
#endif
}

inline float Magnitude(float x) { return Float(Bits(x) & 0x7fffffff); }

// x = n ln 2 + r with |r| <= ln 2 / 2, for x from kSmallestExponent to 0.
struct Reduced {
  float power;   // 2^n
  float small;   // e^r - 1
};

inline Reduced Reduce(float x) {
  constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;  // ln 2, the first part exact
  const float rounded = MulAdd(x, 1.44269504f, kRound);
  const float n = rounded - kRound;
  const float r = MulAdd(n, -kLow, MulAdd(n, -kHigh, x));
  // Unsigned, because the bits of NaN wrap around; what they become is NaN times `small`.
  const uint32_t exponent =
      static_cast<uint32_t>(Bits(rounded)) - static_cast<uint32_t>(Bits(kRound)) + 127;
  float p = 1.0f / 5040;
  p = MulAdd(p, r, 1.0f / 720);
  p = MulAdd(p, r, 1.0f / 120);
  p = MulAdd(p, r, 1.0f / 24);
  p = MulAdd(p, r, 1.0f / 6);
  p = MulAdd(p, r, 0.5f);
  return {Float(static_cast<int32_t>(exponent << 23)), MulAdd(p, r * r, r)};
}

// e^x for x <= 0.
inline float ExpOfNegative(float x) {
  const Reduced part = Reduce(x < kSmallestExponent ? kSmallestExponent : x);
  const float e = MulAdd(part.power, part.small, part.power);
  return x < kSmallestExponent ? 0.0f : e;
}

// The steps of XLA's CPU compiler for e^x. What is fused with a product and what is not then give
// the same bits. Versions of XLA differ in how ln 2 is split; with its optimizations a product and a
// sum are rounded once on CPUs that can, else twice. fewbit/kernels/_finish.py finds out which it is.
struct Cephes {
  static constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f, kLargest = 127.0f;
};
struct Fdlibm {
  static constexpr float kHigh = 0.693145751953125f, kLow = 1.428606765e-6f, kLargest = 128.0f;
};

template <class Split, bool kOnce>
inline float ExpOfXla(float x) {
  const auto add = [](float a, float b, float c) { return kOnce ? MulAdd(a, b, c) : a * b + c; };
  const float low = -87.8f > x ? -87.8f : x, inside = 88.8f < low ? 88.8f : low;
  const float floor = Floor(add(inside, 1.44269504f, 0.5f));
  const float n = Split::kLargest < floor ? Split::kLargest : floor;
  const float r = add(n, -Split::kLow, add(n, -Split::kHigh, inside));
  float p = 1.9875691500e-4f;
  p = add(p, r, 1.3981999507e-3f);
  p = add(p, r, 8.3334519073e-3f);
  p = add(p, r, 4.1665795894e-2f);
  p = add(p, r, 1.6666665459e-1f);
  p = add(p, r, 0.5f);
  float value = 1.0f + add(p, r * r, r);
  float last = n;
  if (Split::kLargest > 127.0f) {  // 2^128 is no float, but twice 2^127 times a half is
    value *= n > 127.0f ? 2.0f : 1.0f;
    last = 127.0f < n ? 127.0f : n;
  }
  // The last n + 127 are the low bits of this sum; -127 makes 0.
  const uint32_t exponent = static_cast<uint32_t>(Bits(last + (kRound + 127.0f)));
  return value * Float(static_cast<int32_t>(exponent << 23));
}

// Subnormal results are zeros to XLA.
inline float Flushed(float y) { return Magnitude(y) < 0x1p-126f ? y * 0.0f : y; }

template <class Split, bool kOnce>
inline float Sigmoid(float x) {
  return Flushed(1.0f / (1.0f + ExpOfXla<Split, kOnce>(-x)));
}

template <class Split, bool kOnce>
inline float Silu(float x) {
  return Flushed(x * Sigmoid<Split, kOnce>(x));
}

// Through e^y - 1, which does not cancel where y is small.
inline float Tanh(float x) {
  constexpr float kOne = -20.0f;  // tanh is 1 from there
  const float y = -2.0f * Magnitude(x);
  const Reduced part = Reduce(y < kOne ? kOne : y);
  const float less_one = MulAdd(part.power, part.small, part.power - 1.0f);
  const float magnitude = -less_one / (2.0f + less_one);
  return Float((Bits(magnitude) & 0x7fffffff) | (Bits(x) & ~0x7fffffff));
}

// With the tanh of jax.nn.gelu written as the sigmoid it is.
inline float Gelu(float x) {
  const float inner = 0.79788456f * MulAdd(0.044715f, x * x * x, x);
  return x * Sigmoid<Cephes, true>(2.0f * inner);
}

// erfc(z) = e^(-z^2) t P(t), t = 2 / (2 + z); P fitted to 2e-8 of the value for z up to 9.4.
inline float GeluExact(float x) {
  const float z = Magnitude(x) * 0.70710678f, t = 2.0f / (2.0f + z);
  float p = 0.01418333274f;
  p = MulAdd(p, t, -0.13338898219f);
  p = MulAdd(p, t, 0.45226941756f);
  p = MulAdd(p, t, -0.70040050154f);
  p = MulAdd(p, t, 0.44582622621f);
  p = MulAdd(p, t, -0.11105906561f);
  p = MulAdd(p, t, 0.22977513336f);
  p = MulAdd(p, t, 0.23777895612f);
  p = MulAdd(p, t, 0.28295573615f);
  p = MulAdd(p, t, 0.28205973032f);
  const float tail = 0.5f * t * p * ExpOfNegative(-z * z);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ELEMENTWISE_H_
