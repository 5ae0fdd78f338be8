// Codes out of plain arrays, in the order in which the tiles read them.
// Internal linkage only, as in matmul/decode.h.

#ifndef FEWBIT_NATIVE_CODES_PACK_H_
#define FEWBIT_NATIVE_CODES_PACK_H_

#include <cstdint>
#include <cstring>

#include "matmul/kernels.h"

namespace fewbit {
namespace {

constexpr int64_t kQuadsAtOnce = 16;  // of a column: a cache line

// Two codes as the 16-bit halves of a word.
inline int32_t PairOf(int8_t low, int8_t high) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(low)) |
                              static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
}

// A row's quads to [quad][words][rows]: four codes in a word, or (0, 2) and (1, 3) as pairs.
inline void PackRow(const int8_t* row, int64_t quads, int rows, int words, int32_t* out) {
  if (words == 1) {
    for (int64_t q = 0; q < quads; ++q, out += rows) {
      std::memcpy(out, row + q * 4, 4);
    }
    return;
  }
  for (int64_t q = 0; q < quads; ++q, out += rows * 2) {
    const int8_t* a = row + q * 4;
    out[0] = PairOf(a[0], a[2]);
    out[rows] = PairOf(a[1], a[3]);
  }
}

void PackCodes(const int8_t* codes, int64_t stride, int rows, int64_t quads, int words,
               int32_t* packed) {
  for (int m = 0; m < rows; ++m) {
    PackRow(codes + m * stride, quads, rows, words, packed + m);
  }
}

// Whole rows that lie in one piece; `sums` gets the sum of each.
inline void PackWholeRows(const CodeLines& c, int words, int32_t* packed, int32_t* sums) {
  const int64_t whole = c.length / 4, step = static_cast<int64_t>(words) * c.count;
  for (int m = 0; m < c.count; ++m) {
    const int8_t* row = c.codes + c.lines[m] + (c.length == 0 ? 0 : c.ks[0]);
    uint32_t sum = 0;
    for (int64_t k = 0; k < c.length; ++k) {
      sum += static_cast<uint32_t>(row[k]);
    }
    sums[m] = static_cast<int32_t>(sum);
    PackRow(row, whole, c.count, words, packed + m);
    if (whole < c.quads) {
      int8_t last[4] = {0, 0, 0, 0};
      std::memcpy(last, row + whole * 4, static_cast<size_t>(c.length - whole * 4));
      PackRow(last, 1, c.count, words, packed + m + whole * step);
    }
  }
}

// Rows side by side, of several tiles: a cache line of each k serves all of them. Tile by tile,
// lines whose distance is a power of two would drive each other out of the caches.
void PackTouchingTiles(const CodeLines& c, const int* heights, int tiles, int words,
                       int32_t* packed, int32_t* sums) {
  static constexpr int8_t kNothing[kPanel] = {};
  alignas(64) int32_t total[kPanel] = {}, word[2][kPanel];
  const int8_t* base = c.codes + c.lines[0];
  for (int64_t q = 0; q < c.quads; ++q) {
    const int8_t* at[4];
    for (int i = 0; i < 4; ++i) {
      at[i] = q * 4 + i < c.length ? base + c.ks[q * 4 + i] : kNothing;
    }
    for (int m = 0; m < c.count; ++m) {
      total[m] += at[0][m] + at[1][m] + at[2][m] + at[3][m];
    }
    if (words == 1) {
      for (int m = 0; m < c.count; ++m) {
        word[0][m] = static_cast<int32_t>(
            static_cast<uint32_t>(static_cast<uint8_t>(at[0][m])) |
            static_cast<uint32_t>(static_cast<uint8_t>(at[1][m])) << 8 |
            static_cast<uint32_t>(static_cast<uint8_t>(at[2][m])) << 16 |
            static_cast<uint32_t>(static_cast<uint8_t>(at[3][m])) << 24);
      }
    } else {
      for (int m = 0; m < c.count; ++m) {
        word[0][m] = PairOf(at[0][m], at[2][m]);
        word[1][m] = PairOf(at[1][m], at[3][m]);
      }
    }
    int64_t row = 0;
    for (int t = 0; t < tiles; row += heights[t++]) {
      const int height = heights[t];
      int32_t* to = packed + (row * c.quads + q * height) * words;
      for (int w = 0; w < words; ++w, to += height) {
        if (height == kMaxTileRows) {  // nearly all: a copy of known size needs no call
          std::memcpy(to, word[w] + row, kMaxTileRows * 4);
        } else {
          std::memcpy(to, word[w] + row, static_cast<size_t>(height) * 4);
        }
      }
    }
  }
  std::memcpy(sums, total, sizeof(int32_t) * static_cast<size_t>(c.count));
}

inline void PackScatteredRows(const CodeLines& c, int words, int32_t* packed, int32_t* sums) {
  for (int m = 0; m < c.count; ++m) {
    uint32_t sum = 0;
    for (int64_t q = 0; q * 4 < c.length; ++q) {
      int8_t quad[4] = {0, 0, 0, 0};
      for (int64_t k = q * 4; k < c.length && k < q * 4 + 4; ++k) {
        quad[k % 4] = c.codes[c.lines[m] + c.ks[k]];
        sum += static_cast<uint32_t>(quad[k % 4]);
      }
      PackRow(quad, 1, c.count, words, packed + q * words * c.count + m);
    }
    sums[m] = static_cast<int32_t>(sum);
  }
}

// Rows of a tile to [quad][words][rows], and their sums.
void PackRows(const CodeLines& c, int words, int32_t* packed, int32_t* sums) {
  const int64_t step = static_cast<int64_t>(words) * c.count, used = (c.length + 3) / 4;
  std::memset(packed + used * step, 0, static_cast<size_t>((c.quads - used) * step) * 4);
  (c.ks_touch ? PackWholeRows : PackScatteredRows)(c, words, packed, sums);
}

// Columns whose k lie in one piece: words of four codes, transposed.
inline void PackWholeColumns(const CodeLines& c, uint32_t* panel) {
  const int64_t whole = c.length / 4;
  for (int64_t from = 0; from < whole; from += kQuadsAtOnce) {
    const int64_t to = from + kQuadsAtOnce < whole ? from + kQuadsAtOnce : whole;
    for (int column = 0; column < c.count; ++column) {
      const int8_t* codes = c.codes + c.lines[column] + c.ks[0];
      for (int64_t q = from; q < to; ++q) {
        uint32_t quad;
        std::memcpy(&quad, codes + q * 4, 4);
        panel[q * kPanel + column] = quad ^ 0x80808080u;
      }
    }
  }
  if (whole * 4 < c.length) {
    for (int column = 0; column < c.count; ++column) {
      uint32_t quad = 0;
      std::memcpy(&quad, c.codes + c.lines[column] + c.ks[0] + whole * 4,
                  static_cast<size_t>(c.length - whole * 4));
      panel[whole * kPanel + column] = quad ^ 0x80808080u;
    }
  }
}

// Columns side by side: four k of all of them at a time.
inline void PackTouchingColumns(const CodeLines& c, uint32_t* panel) {
  static constexpr uint8_t kNothing[kPanel] = {};
  const uint8_t* base = reinterpret_cast<const uint8_t*>(c.codes + c.lines[0]);
  for (int64_t q = 0; q * 4 < c.length; ++q, panel += kPanel) {
    const uint8_t* at[4];
    for (int i = 0; i < 4; ++i) {
      at[i] = q * 4 + i < c.length ? base + c.ks[q * 4 + i] : kNothing;
    }
    const auto word = [&at](int column) {
      return (static_cast<uint32_t>(at[0][column]) | static_cast<uint32_t>(at[1][column]) << 8 |
              static_cast<uint32_t>(at[2][column]) << 16 |
              static_cast<uint32_t>(at[3][column]) << 24) ^ 0x80808080u;
    };
    if (c.count == kPanel) {
      for (int column = 0; column < kPanel; ++column) {
        panel[column] = word(column);
      }
    } else {
      for (int column = 0; column < c.count; ++column) {
        panel[column] = word(column);
      }
    }
  }
}

// Columns to a panel of 8-bit codes [quad][64][4]. Columns and k that are missing hold anything:
// nobody looks at the former, and the latter meet zeros.
void PackColumns(const CodeLines& c, uint8_t* panel) {
  if (c.length == 0) {
    return;
  }
  uint32_t* words = reinterpret_cast<uint32_t*>(panel);
  if (c.ks_touch) {
    PackWholeColumns(c, words);
  } else if (c.lines_touch) {
    PackTouchingColumns(c, words);
  } else {
    for (int column = 0; column < c.count; ++column) {
      for (int64_t k = 0; k < c.length; ++k) {
        const int64_t at = (k / 4 * kPanel + column) * 4 + k % 4;
        panel[at] = static_cast<uint8_t>(c.codes[c.lines[column] + c.ks[k]] ^ -128);
      }
    }
  }
}

// In the order in which XLA's program multiplies, so that the results are the same bits.
void ScaleOneRow(const ScaleSums& s) {
  if (s.columns_first) {
    for (int64_t i = 0; i < s.count; ++i) {
      s.out[i] = static_cast<float>(s.sums[i]) * s.columns[i] * s.row;
    }
  } else {
    for (int64_t i = 0; i < s.count; ++i) {
      s.out[i] = static_cast<float>(s.sums[i]) * s.row * s.columns[i];
    }
  }
}

}  // namespace
}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CODES_PACK_H_
