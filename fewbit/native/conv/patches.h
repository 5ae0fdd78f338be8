// The rows of a convolution's matrix product: patches of an image, found or written down.

#ifndef FEWBIT_NATIVE_CONV_PATCHES_H_
#define FEWBIT_NATIVE_CONV_PATCHES_H_

#include "conv/images.h"
#include "matmul/plan.h"

namespace fewbit {

// What all blocks of work read.
struct ConvSource {
  Images images;
  const int32_t* words;      // of the codes, where they are not the codes themselves
  const int32_t* sums;       // [pixels][groups] of the codes
  const char* zeros;         // a tap in the padding
};

// How the rows of a convolution are read. Its values are floats, or words of codes.
struct ConvRows {
  const Kernels* kernels;
  const Matmul* product;
  const Plan* plan;
  Window window;
  bool written;              // patches are written down as rows of k values, which are one tap
  int64_t run;               // channels that lie together under a tap of the window
  int64_t tap, pixel;        // values of a tap and of a pixel
  int64_t taps;

  // Tiles of a block: of equal height, give or take one row.
  int64_t Tiles(int64_t rows) const;
  int64_t TileRow(int64_t tile, int64_t rows) const { return rows * tile / Tiles(rows); }
};

ConvRows MakeConvRows(const Kernels& kernels, const Matmul& product, const Plan& plan,
                      const Window& window, bool written, int64_t run);

// Space for the patches of a block of rows.
struct Patches {
  const void** taps;         // [tiles][taps][rows of the tile]
  char* values;              // [rows][tap], if they are written down
  int8_t* codes;             // one patch
  int32_t* zeros;            // [rows]: what the weight's shared zero point adds to a row's sums
};

void FindPatches(const ConvRows& rows, const ConvSource& source, int64_t group, int64_t first_row,
                 int64_t count, const Patches& patches);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CONV_PATCHES_H_
