// Images as the kernels want them: floats, or int8 codes with a scale per image.

#ifndef FEWBIT_NATIVE_CONV_IMAGES_H_
#define FEWBIT_NATIVE_CONV_IMAGES_H_

#include "conv/conv.h"

namespace fewbit {

struct ImageSource {
  const void* x;           // [images][pixels][channels]
  Element type;            // kF32, kBf16 or kS8
  bool quantize;           // floats to int8, one scale per image
  const float* scale;      // for kS8: [scale_rows], or null: 1
  int64_t scale_rows;      // images, or 1
};

// One of floats and codes; where nothing has to be done it is x itself.
struct Images {
  const float* floats;
  const int8_t* codes;
  const float* scales;     // [images]
};

size_t ImageBytes(const ImageSource& source, const Window& window);

// `memory` has ImageBytes, aligned to cache lines, and holds what the result points to.
Images PrepareImages(const Kernels& kernels, const Workers& workers, const ImageSource& source,
                     const Window& window, void* memory);

float FloatOfBf16(uint16_t half);
uint16_t Bf16OfFloat(float value);

}  // namespace fewbit

#endif  // FEWBIT_NATIVE_CONV_IMAGES_H_
