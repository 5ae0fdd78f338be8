// The border between the portable driver and the kernels of one instruction set: plain structs and
// a table of function pointers. Nothing inline may live here: the linker keeps one copy of an
// inline function for all units, and it could be the one compiled for a newer CPU.
//
// A panel is 64 columns of a packed weight, in blocks of 32 k. A block is `bits` rows of 64
// little-endian words, one per column; every plane of bits yields "quads", words whose four bytes
// are four consecutive k. Vectors have 16 lanes, so a panel is four of them wide.

#ifndef FEWBIT_NATIVE_MATMUL_KERNELS_H_
#define FEWBIT_NATIVE_MATMUL_KERNELS_H_

#include <cstdint>

#include "attention/attention.h"
#include "common/finish.h"

namespace fewbit {

constexpr int kPanel = 64;        // columns of a panel
constexpr int kBlock = 32;        // k of a block
constexpr int kBlockQuads = 8;    // quads of a block
constexpr int kLanes = 16;        // columns of a vector
constexpr int kVectors = 4;       // vectors of a panel
constexpr int kMaxStreamRows = 4; // most rows that a panel is streamed for at once
constexpr int kMaxTileRows = 6;

// How a code becomes a number: integers of 1 to 8 bits (code - zero), or a 4-bit table, or fp8.
enum Decoding : int32_t { kInt1 = 0, kInt8 = 7, kTable4 = 8, kE4m3 = 9, kE5m2 = 10 };
constexpr int kDecodings = 11;

// What the bits of an fp8 number, read as a float, have to be multiplied by.
constexpr float kBiasE4m3 = 0x1p120f, kBiasE5m2 = 0x1p112f;

enum ScaleType : int32_t { kScaleF32, kScaleF16, kScaleBf16, kScaleE8m0, kScaleE4m3 };

// One panel of a weight, and the segments of k over which one scale (and one exact integer sum)
// holds. A segment lies inside one group; it is a multiple of 8 quads long, or 4 quads.
struct Panel {
  const uint8_t* data;    // [k/32][bits][64][4]
  const uint8_t* scale;   // [groups][64] of scale_type
  const uint8_t* zero;    // [groups][64], or null: every zero is `shared_zero`
  const float* table;     // the 16 values of a 4-bit table, or null
  const float* pairs;     // [256][2]: the values of a byte's low and high code
  const int64_t* segment_quads;   // [segments + 1], first quad of each
  const int64_t* segment_group;   // [segments]
  int64_t segments;
  int32_t shared_zero;
  ScaleType scale_type;
};

// Integer sums: u * a is summed, and a * (u - zero) is wanted. `sums` holds the sums of -a, times
// the shared zero unless the panel has zeros of its own: a sum may start with it. All of it modulo 2^32, which is exact
// whenever the true value fits.

// Few rows: the panel is read once, decoded on the way, and multiplied with all rows.
struct StreamFloat {
  Panel panel;
  const float* x;         // [rows][x_stride]; for fp8 the result lacks the factor kBias...
  int64_t x_stride;
  float* out;             // [rows][64]
};

struct StreamInt {
  Panel panel;
  const int32_t* a;       // [rows][a_stride], words as the instruction set wants them
  int64_t a_stride;
  const int32_t* sums;    // [rows][segments], see below
  const float* a_scale;   // [rows][a_scale_stride], indexed by group if scale_each
  int64_t a_scale_stride;
  bool scale_each;        // the row's scales belong to the groups' sums; else applied later
  bool raw;               // int32 sums instead of floats; only with one segment
  void* out;              // [rows][64], float or int32
};

// Many rows: a piece of the panel is decoded into scratch once, and row tiles run over it.
struct Unpack {
  Panel panel;            // its segments are those of the piece, cut to it
  float* floats;          // [strip][k][strip columns], scales applied
  int32_t* words;         // [strip][quad][words][vectors of a strip][16], or null
  float* scales;          // with words: [segments][64]
  int32_t* zeros;         // with words, if the panel has zeros: [segments][64]
};

struct TileFloat {
  const float* a;         // [k][rows]
  const float* b;         // [k][strip columns]
  float* c;               // [rows][64]
  int64_t length;         // k
  bool first;             // c holds nothing yet
};

// A piece is either whole segments or a part of one; then `partial` carries the integer sums.
struct TileInt {
  const int32_t* a;       // [quad][words][rows], from the piece's first quad
  const int32_t* b;       // [quad][words][vectors of a strip][16]
  const int64_t* segment_quads;   // [segments]: quads of each in this piece
  const int64_t* segment_group;   // [segments]
  int64_t segments;
  const float* scales;    // [segments][64], at the strip's first column
  const int32_t* zeros;   // [segments][64], or null
  const int32_t* sums;    // [rows][sums_stride], from the first segment's
  int64_t sums_stride;
  const float* a_scale;   // [rows][a_scale_stride], indexed by group if scale_each
  int64_t a_scale_stride;
  bool scale_each;
  int32_t* partial;       // [rows][64]
  float* c;               // [rows][c_stride]
  int64_t c_stride;
  bool first;             // c holds nothing yet; else added to
  bool resume;            // the segment began in an earlier piece
  bool unfinished;        // the segment goes on in a later piece
  bool raw;               // the integer sums themselves, in `partial`
};

// The transposed product g · Wᵀ sums over columns, which lie along the lanes: a sum of one k is
// `dot_lanes` numbers until its end. Segments are those of a strip of k that starts at a block.

// Few rows: a panel is decoded on the way.
struct StreamDots {
  Panel panel;
  const float* g;         // [rows][g_stride], from the panel's first column
  int64_t g_stride;
  int64_t quads;          // of the strip
  float* sums;            // room for [rows][4 * quads][dot_lanes], added to; for `add_lanes`
};

// More rows: a strip of some panels is decoded into scratch once, and row tiles run over it.
struct UnpackDots {
  Panel panel;
  float* floats;          // [quad][64 / dot_lanes][4][dot_lanes], scales applied
  int64_t quad_stride;    // floats from one quad to the next, with those of other panels between
};

struct TileDots {
  const float* a;         // [panels * 64 / dot_lanes][rows][dot_lanes]
  const float* b;         // [panels * 64 / dot_lanes][4][dot_lanes]: one quad
  int64_t panels;
  float* c;               // [rows][c_stride], four numbers in each, added to
  int64_t c_stride;
};

// Many rows: the strip is turned on the way, so that k lies along the lanes as columns do in the
// forward product, whose tiles then run over it.
struct UnpackTurned {
  Panel panel;
  float* floats;          // [strip][length][strip columns], from the panel's first column
  int64_t length;         // columns of the piece
};

struct QuantizeRow {
  const float* x;         // [length]
  int64_t length;
  int64_t group;          // values that share a scale
  bool round_to_bf16;     // every step in bfloat16
  bool stored;            // the scales are given, and become NaN if the row holds a NaN
  int8_t* codes;          // [length]
  float* scales;          // [ceil(length / group)]; NaN where the group is not finite
};

struct ConvKernels;  // conv/kernels.h
// Some rows of a matrix whose columns have a scale each.
struct ColumnBlock {
  const float* x;         // [rows][columns]
  int64_t rows, columns;
  const float* factor;    // [rows], what each row is multiplied with first; null: nothing
};

// Lines of codes as they lie in an array: k of line l at codes + lines[l] + ks[k].
struct CodeLines {
  const int8_t* codes;
  const int64_t* lines;   // [count]
  int count;              // at most kMaxTileRows as rows of a tile, else kPanel
  const int64_t* ks;      // [length]
  int64_t length, quads;  // 4 * quads >= length; what is missing counts as zero
  bool lines_touch;       // one byte from a line to the next
  bool ks_touch;          // one byte from a k to the next
};

// Few rows times codes that are read once, where they lie.
struct FewRows {
  const int8_t* codes;
  const int64_t* columns; // [count]
  int64_t count;
  const int64_t* ks;      // [length]
  int64_t length;
  const int16_t* a;       // [rows][a_stride], see codes/direct.h
  int64_t a_stride;
  int32_t* out;           // [rows][out_stride]
  int64_t out_stride;
};

// One row of sums, scaled: as numbers, times one scale and then times the other.
struct ScaleSums {
  const int32_t* sums;    // [count]
  const float* columns;   // [count]
  int64_t count;
  float row;
  bool columns_first;
  float* out;             // [count], may be `sums`
};

struct Kernels {
  const char* name;
  int stream_rows;                  // of `stream_float`
  int stream_int_rows;              // that `stream_int` is worth, in turns of kMaxStreamRows
  int plane_rows;                   // integer rows that `stream_int` takes for rows of floats
  int float_rows, float_vectors;    // a tile of the float product; a strip has that many vectors
  int int_rows, int_vectors;
  int group_rows;                   // of `tile_groups`; 0: there are none
  int dot_rows, dot_lanes;
  int words[9];                     // by bits: words per activation quad (and weight quad)
  bool panel_is_unpacked[9];        // by bits: a panel already is what `unpack_int` would make
  void (*quantize_row)(const QuantizeRow&);
  // Of a row's codes, as the sums of the integer kernels want them.
  void (*sum_codes)(const int8_t* codes, const int64_t* segment_quads, int64_t segments,
                    uint32_t zero, int32_t* sums);
  void (*pack_codes)(const int8_t* codes, int64_t stride, int rows, int64_t quads, int words,
                     int32_t* packed);
  void (*stream_float[kDecodings][kMaxStreamRows])(const StreamFloat&);
  void (*stream_int[8][kMaxStreamRows])(const StreamInt&);
  void (*stream_planes[8])(const StreamInt&);  // of one row: out is [64]; or null
  void (*unpack_float[kDecodings])(const Unpack&);
  void (*unpack_int[8])(const Unpack&);
  void (*tile_float[kMaxTileRows])(const TileFloat&);
  void (*tile_int[8][kMaxTileRows])(const TileInt&);
  void (*tile_groups[kMaxTileRows])(const TileInt&);  // whole segments, any number of bits
  void (*stream_dots[kDecodings][kMaxStreamRows])(const StreamDots&);
  void (*add_lanes[kDecodings])(const float* sums, int64_t quads, float* out);  // added to
  void (*unpack_dots[kDecodings])(const UnpackDots&);
  void (*tile_dots[kMaxTileRows])(const TileDots&);
  void (*unpack_turned[kDecodings])(const UnpackTurned&);
  const ConvKernels* conv;
  void (*finish_row)(const FinishRow&);
  void (*attend)(const AttendBlock&);
  void (*pack_rows)(const CodeLines&, int words, int32_t* packed, int32_t* sums);
  void (*pack_touching_tiles)(const CodeLines&, const int* heights, int tiles, int words,
                              int32_t* packed, int32_t* sums);
  void (*pack_columns)(const CodeLines&, uint8_t* panel);
  void (*dot_columns[kMaxStreamRows])(const FewRows&);
  void (*add_rows[kMaxStreamRows])(const FewRows&);
  void (*scale_sums)(const ScaleSums&);
  void (*largest_of_columns)(const ColumnBlock&, int32_t* largest);
  void (*scales_of_columns)(const int32_t* largest, int64_t columns, float* scales,
                            float* per_scale);
  void (*codes_of_columns)(const ColumnBlock&, const float* per_scale, int8_t* codes);
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512VnniKernels;
#endif

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_MATMUL_KERNELS_H_
