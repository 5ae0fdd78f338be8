// A block of work of a convolution over panels: some outputs times one panel.

#ifndef FEWBIT_NATIVE_CONV_BLOCK_H_
#define FEWBIT_NATIVE_CONV_BLOCK_H_

#include "conv/patches.h"

namespace fewbit {

void RunConvBlock(const ConvRows& rows, const ConvSource& source, int64_t panel, int64_t first_row,
                  int64_t count);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CONV_BLOCK_H_
