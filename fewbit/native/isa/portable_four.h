// Four lanes in the compiler's own vector type, on any architecture. Few rows are streamed with
// these: 16 registers then hold the sums of 16 or 32 columns and what is made of one vector of
// codes, where vectors of 16 lanes, each made as a whole, would go to the stack and back.

#ifndef FEWBIT_NATIVE_ISA_PORTABLE_FOUR_H_
#define FEWBIT_NATIVE_ISA_PORTABLE_FOUR_H_

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fewbit {
namespace {

struct Portable4 {
  typedef int32_t I __attribute__((vector_size(16)));
  typedef uint32_t U __attribute__((vector_size(16)));
  typedef float F __attribute__((vector_size(16)));
  typedef uint16_t U8 __attribute__((vector_size(16)));
  typedef int16_t S8 __attribute__((vector_size(16)));
  using Table = const float*;
  using Stream = Portable4;

  static constexpr int kWidth = 4, kPieceQuads = 8;
  static constexpr int kStreamVectors = 8;
  static constexpr bool kHalfSteps = true;

  template <class V>
  static V Load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static I LoadI(const void* p) { return Load<I>(p); }
  static void StoreI(int32_t* p, I v) { std::memcpy(p, &v, sizeof v); }
  static I SetI(int32_t v) { return I{v, v, v, v}; }
  static I LoadBytes(const void* p) { return Widened<uint8_t>(p); }
  static I LoadShorts(const void* p) { return Widened<uint16_t>(p); }
  static I And(I x, I y) { return x & y; }
  static I Or(I x, I y) { return x | y; }
  // Unsigned, because these wrap around on purpose.
  static I AddI(I x, I y) { return I(U(x) + U(y)); }
  static I SubI(I x, I y) { return I(U(x) - U(y)); }
  static I MulI(I x, I y) { return I(U(x) * U(y)); }
  static I MaxI(I x, I y) { return x > y ? x : y; }
  static I ShiftLeft(I x, int n) { return I(U(x) << n); }
  static I ShiftRight(I x, int n) { return I(U(x) >> n); }
  static I ShiftRightSigned(I x, int n) { return x >> n; }

  static F LoadF(const void* p) { return Load<F>(p); }
  static void StoreF(float* p, F v) { std::memcpy(p, &v, sizeof v); }
  static F LoadHalf(const void* p) {
    const I half = LoadShorts(p);
    const I magnitude = half & 0x7fff;
    // Exponent bias 15 to 127 by a product, which also makes subnormal numbers right; what was
    // infinite or NaN gets its exponent filled.
    const F value = F(magnitude << 13) * 0x1p112f;
    const I filled = (magnitude >= 0x7c00) & 0x7f800000;
    return F(I(value) | filled | ShiftLeft(half & 0x8000, 16));
  }
  static F SetF(float v) { return F{v, v, v, v}; }
  static F AddF(F x, F y) { return x + y; }
  static F SubF(F x, F y) { return x - y; }
  static F MulF(F x, F y) { return x * y; }
  static F Fma(F x, F y, F z) { return x * y + z; }
  static F ToFloat(I v) { return __builtin_convertvector(v, F); }
  static F AsFloat(I v) { return F(v); }
  static I AsInt(F v) { return I(v); }

  // Byte i of each lane moved to its top, then `kShift` to the right with its sign, and masked. Bytes
  // i and i - 2 take the first steps together, as halves of lanes.
  template <int kShift, uint32_t kMask>
  static I MovedByte(I quad, int i) {
    const S8 top = i % 2 == 0 ? S8(U8(quad) << 8) : S8(quad);
    const I both = I(top >> kShift) & static_cast<int32_t>(kMask >> 16 | kMask);
    return i < 2 ? ShiftLeft(both, 16) : both & static_cast<int32_t>(0xffff0000u);
  }

  static F ByteOverMagic(I quad, int i) { return F((ShiftRight(quad, 8 * i) & 0xff) | 0x4b000000); }
  static Table LoadTable(const float* p) { return p; }
  static F LookUp(Table table, I index) {
    return F{table[index[0] & 15], table[index[1] & 15], table[index[2] & 15],
             table[index[3] & 15]};
  }

  static constexpr int Words(int) { return 2; }
  static constexpr int Span(int) { return 0; }
  template <int kBits>
  static I Dot(I sum, I quad, const int32_t* a) {
    return DotWord(DotWord(sum, Even(quad), a[0]), Odd(quad), a[1]);
  }
  static I DotWord(I sum, I w, int32_t a) { return AddI(sum, Madd(w, SetI(a))); }
  static I Even(I quad) { return quad & 0x00ff00ff; }
  static I Odd(I quad) { return I(U8(quad) >> 8); }
  // Products of 16-bit numbers, added in pairs.
  static I Madd(I x, I y) {
#if defined(__SSE2__)
    // Part of every x86-64; without it compilers multiply 32-bit numbers, which SSE2 cannot.
    return I(_mm_madd_epi16(__m128i(x), __m128i(y)));
#else
    return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
  }

 private:
  template <class Narrow>
  static I Widened(const void* p) {
    typedef Narrow N __attribute__((vector_size(4 * sizeof(Narrow))));
    return __builtin_convertvector(Load<N>(p), I);
  }
};

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ISA_PORTABLE_FOUR_H_
