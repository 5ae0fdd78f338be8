// The kernels compiled for one instruction set; CMakeLists.txt gives this unit its flags.

#include "conv/tiles.h"
#include "isa/avx512.h"

namespace fewbit {

#if defined(FEWBIT_EMULATE_AVX512)
extern const ConvKernels kEmulatedAvx512ConvKernels;
const ConvKernels kEmulatedAvx512ConvKernels = MakeConvKernels<Avx512>();
#else
const ConvKernels kAvx512VnniConvKernels = MakeConvKernels<Avx512>();
#endif

}  // namespace fewbit
