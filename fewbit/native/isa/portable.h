// Sixteen lanes as four vectors of four, in the compiler's own vector types: any architecture.

#ifndef FEWBIT_NATIVE_ISA_PORTABLE_H_
#define FEWBIT_NATIVE_ISA_PORTABLE_H_

#include <cstdint>
#include <cstring>

#include "isa/portable_four.h"
#include "matmul/kernels.h"
#include "codes/quantize_codes.h"

namespace fewbit {
namespace {

struct Portable {
  typedef int32_t I4 __attribute__((vector_size(16)));
  typedef uint32_t U4 __attribute__((vector_size(16)));
  typedef float F4 __attribute__((vector_size(16)));
  typedef uint16_t U8 __attribute__((vector_size(16)));
  struct I {
    I4 a, b, c, d;
  };
  struct F {
    F4 a, b, c, d;
  };
  using D = F4;
  using Stream = Portable4;
  using Table = const float*;

  static constexpr int kFloatRows = 2, kFloatVectors = 1;
  static constexpr int kIntRows = 2, kIntVectors = 1;
  static constexpr int kGroupRows = 0;
  static constexpr int kPlaneRows = 2;
  static constexpr int kStreamRows = 1, kStreamIntRows = 1;
  static constexpr int kWidth = 16;
  static constexpr int kDotRows = 2, kDotLanes = 4;
  static constexpr bool kPanelIsUnpacked = false;
  static constexpr bool kWholePanels = false;
  static constexpr bool kOwnTable = true, kOwnTableDots = false;
  static constexpr bool kHalfSteps = false;

  static I LoadI(const void* p) { return Load<I>(p); }
  static void StoreI(int32_t* p, I v) { Store(p, v); }
  static I SetI(int32_t v) {
    const I4 w = {v, v, v, v};
    return {w, w, w, w};
  }
  static I LoadBytes(const void* p) { return Widened<uint8_t>(p); }
  static I LoadShorts(const void* p) { return Widened<uint16_t>(p); }
  static I And(I x, I y) { return {x.a & y.a, x.b & y.b, x.c & y.c, x.d & y.d}; }
  static I Or(I x, I y) { return {x.a | y.a, x.b | y.b, x.c | y.c, x.d | y.d}; }
  // Unsigned, because these wrap around on purpose.
  static I AddI(I x, I y) {
    return {I4(U4(x.a) + U4(y.a)), I4(U4(x.b) + U4(y.b)), I4(U4(x.c) + U4(y.c)),
            I4(U4(x.d) + U4(y.d))};
  }
  static I SubI(I x, I y) {
    return {I4(U4(x.a) - U4(y.a)), I4(U4(x.b) - U4(y.b)), I4(U4(x.c) - U4(y.c)),
            I4(U4(x.d) - U4(y.d))};
  }
  static I MulI(I x, I y) {
    return {I4(U4(x.a) * U4(y.a)), I4(U4(x.b) * U4(y.b)), I4(U4(x.c) * U4(y.c)),
            I4(U4(x.d) * U4(y.d))};
  }
  static I MaxI(I x, I y) {
    return {x.a > y.a ? x.a : y.a, x.b > y.b ? x.b : y.b, x.c > y.c ? x.c : y.c,
            x.d > y.d ? x.d : y.d};
  }
  static I ShiftLeft(I x, int n) {
    return {I4(U4(x.a) << n), I4(U4(x.b) << n), I4(U4(x.c) << n), I4(U4(x.d) << n)};
  }
  static I ShiftRight(I x, int n) {
    return {I4(U4(x.a) >> n), I4(U4(x.b) >> n), I4(U4(x.c) >> n), I4(U4(x.d) >> n)};
  }
  static I ShiftRightSigned(I x, int n) { return {x.a >> n, x.b >> n, x.c >> n, x.d >> n}; }

  static F LoadF(const void* p) { return Load<F>(p); }
  static void StoreF(float* p, F v) { Store(p, v); }
  static F LoadHalf(const void* p) {
    const I half = LoadShorts(p);
    const I magnitude = And(half, SetI(0x7fff));
    // Exponent bias 15 to 127 by a product, which also makes subnormal numbers right; what was
    // infinite or NaN gets its exponent filled.
    const F value = MulF(AsFloat(ShiftLeft(magnitude, 13)), SetF(0x1p112f));
    const I top = ShiftRight(AddI(magnitude, SetI(0x0400)), 15);  // 1 if the exponent is full
    const I filled = And(SubI(SetI(0), top), SetI(0x7f800000));
    const I sign = ShiftLeft(And(half, SetI(0x8000)), 16);
    return AsFloat(Or(Or(AsInt(value), filled), sign));
  }
  static F SetF(float v) {
    const F4 w = {v, v, v, v};
    return {w, w, w, w};
  }
  static F AddF(F x, F y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
  static F SubF(F x, F y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
  static F MulF(F x, F y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
  static F Fma(F x, F y, F z) {
    return {x.a * y.a + z.a, x.b * y.b + z.b, x.c * y.c + z.c, x.d * y.d + z.d};
  }
  static F ToFloat(I v) {
    return {__builtin_convertvector(v.a, F4), __builtin_convertvector(v.b, F4),
            __builtin_convertvector(v.c, F4), __builtin_convertvector(v.d, F4)};
  }
  static F AsFloat(I v) { return {F4(v.a), F4(v.b), F4(v.c), F4(v.d)}; }
  static I AsInt(F v) { return {I4(v.a), I4(v.b), I4(v.c), I4(v.d)}; }

  static void StoreCodes(int8_t* p, F units) {
    float lanes[kLanes];
    StoreF(lanes, units);
    for (int i = 0; i < kLanes; ++i) {
      p[i] = CodeOf(lanes[i]);
    }
  }

  static F ByteOverMagic(I quad, int i) {
    return AsFloat(Or(And(ShiftRight(quad, 8 * i), SetI(0xff)), SetI(0x4b000000)));
  }
  static Table LoadTable(const float* p) { return p; }
  static F LookUp(Table table, I index) {
    return {LookUp4(table, index.a), LookUp4(table, index.b), LookUp4(table, index.c),
            LookUp4(table, index.d)};
  }

  static D ZeroD() { return D{0, 0, 0, 0}; }
  static D LoadD(const float* p) { return Portable4::LoadF(p); }
  static void StoreD(float* p, D v) { Portable4::StoreF(p, v); }
  static D FmaD(D x, D y, D z) { return x * y + z; }
  static D AddDot(D sum, F x, F y) {
    return sum + x.a * y.a + x.b * y.b + (x.c * y.c + x.d * y.d);
  }
  static void StoreParts(float* p, int step, F v) {
    StoreD(p, v.a);
    StoreD(p + step, v.b);
    StoreD(p + 2 * step, v.c);
    StoreD(p + 3 * step, v.d);
  }
  static void StoreTurned(float* p, int step, const F (&w)[4]) {
    for (int n = 0; n < 4; ++n) {
      StoreD(p + n * step, D{w[0].a[n], w[1].a[n], w[2].a[n], w[3].a[n]});
      StoreD(p + (n + 4) * step, D{w[0].b[n], w[1].b[n], w[2].b[n], w[3].b[n]});
      StoreD(p + (n + 8) * step, D{w[0].c[n], w[1].c[n], w[2].c[n], w[3].c[n]});
      StoreD(p + (n + 12) * step, D{w[0].d[n], w[1].d[n], w[2].d[n], w[3].d[n]});
    }
  }
  static void AddTotals(const D (&v)[4], float* out) {
    for (int i = 0; i < 4; ++i) {
      out[i] += (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
    }
  }

  // A byte holds the codes of k and k + 4 of one column: a table of pairs looks up both at once.
  struct WideTable {
    const float* pairs;

    explicit WideTable(const Panel& panel) : pairs(panel.pairs) {}
  };
  // Lanes: two columns, each with its sums of the lower and of the upper k.
  struct TableSums {
    F4 sum[8];

    TableSums() {
      for (F4& s : sum) {
        s = F4{0, 0, 0, 0};
      }
    }
    void Add(const WideTable& table, const uint8_t* words, const float* x) {
      F4 xs[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        xs[i] = F4{x[i], x[i + 4], x[i], x[i + 4]};
      }
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c) {
        // Whole words: a load for each byte would compete with those from the table.
        uint32_t word[2];
        std::memcpy(word, words + c * 8, sizeof word);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const D2 both = {Pair(table, word[0] >> 8 * i & 255), Pair(table, word[1] >> 8 * i & 255)};
          sum[c] += F4(both) * xs[i];
        }
      }
    }
    F Total() const {
      return {Total4(sum[0], sum[1]), Total4(sum[2], sum[3]), Total4(sum[4], sum[5]),
              Total4(sum[6], sum[7])};
    }

   private:
    typedef double D2 __attribute__((vector_size(16)));
    static F4 Total4(F4 x, F4 y) {
      return F4{x[0], x[2], y[0], y[2]} + F4{x[1], x[3], y[1], y[3]};
    }
    static double Pair(const WideTable& table, size_t code) {  // two floats, moved as one
      double pair;
      std::memcpy(&pair, table.pairs + code * 2, sizeof pair);
      return pair;
    }
  };

  static constexpr int Words(int) { return 2; }
  static constexpr int Span(int) { return 0; }
  template <int kBits>
  static void Keep(int32_t* p, I quad) {
    StoreI(p, Even(quad));
    StoreI(p + 16, Odd(quad));
  }
  template <int kBits>
  static I Dot(I sum, I quad, const int32_t* a) {
    return DotWord(DotWord(sum, Even(quad), a[0]), Odd(quad), a[1]);
  }
  static I DotWord(I sum, I w, int32_t a) {
    const I4 pair = {a, a, a, a};
    return AddI(sum, {Madd(w.a, pair), Madd(w.b, pair), Madd(w.c, pair), Madd(w.d, pair)});
  }

  // Signed codes as 16-bit numbers: 32 k of one column, or pairs of k of 16 columns.
  using Wide = I;
  static Wide Widen(const int8_t* p) {
    int16_t wide[32];
    for (int i = 0; i < 32; ++i) {
      wide[i] = p[i];
    }
    return LoadI(wide);
  }
  static I DotWide(I sum, Wide w, const int16_t* a) {
    const I x = LoadI(a);
    return AddI(sum, {Madd(w.a, x.a), Madd(w.b, x.b), Madd(w.c, x.c), Madd(w.d, x.d)});
  }
  static I Pairs(const int8_t* p, const int8_t* q) {
    int16_t pairs[32];
    for (int i = 0; i < 16; ++i) {
      pairs[2 * i] = p[i];
      pairs[2 * i + 1] = q[i];
    }
    return LoadI(pairs);
  }
  static I DotPair(I sum, I pairs, int32_t a) { return DotWord(sum, pairs, a); }
  // The sum of each of 16 vectors that lie one after the other.
  static I LaneSums(const int32_t* p) {
    uint32_t sums[16];
    for (int i = 0; i < 16; ++i) {
      sums[i] = 0;
      for (int lane = 0; lane < 16; ++lane) {
        sums[i] += static_cast<uint32_t>(p[i * 16 + lane]);
      }
    }
    return LoadI(sums);
  }

 private:
  // In parts: copied as a whole, a vector would go through the stack.
  template <class V>
  static V Load(const void* p) {
    const char* at = static_cast<const char*>(p);
    return {Portable4::Load<decltype(V::a)>(at), Portable4::Load<decltype(V::a)>(at + 16),
            Portable4::Load<decltype(V::a)>(at + 32), Portable4::Load<decltype(V::a)>(at + 48)};
  }
  template <class V>
  static void Store(void* p, const V& v) {
    char* at = static_cast<char*>(p);
    std::memcpy(at, &v.a, 16);
    std::memcpy(at + 16, &v.b, 16);
    std::memcpy(at + 32, &v.c, 16);
    std::memcpy(at + 48, &v.d, 16);
  }
  template <class Narrow>
  static I Widened(const void* p) {
    Narrow narrow[16];
    int32_t wide[16];
    std::memcpy(narrow, p, sizeof narrow);
    for (int i = 0; i < 16; ++i) {
      wide[i] = narrow[i];
    }
    return Load<I>(wide);
  }
  static F4 LookUp4(Table table, I4 index) {
    return F4{table[index[0] & 15], table[index[1] & 15], table[index[2] & 15],
              table[index[3] & 15]};
  }
  static I Even(I quad) { return And(quad, SetI(0x00ff00ff)); }
  static I Odd(I quad) {
    return {I4(U8(quad.a) >> 8), I4(U8(quad.b) >> 8), I4(U8(quad.c) >> 8), I4(U8(quad.d) >> 8)};
  }
  static I4 Madd(I4 x, I4 y) { return Portable4::Madd(x, y); }
};

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_ISA_PORTABLE_H_
