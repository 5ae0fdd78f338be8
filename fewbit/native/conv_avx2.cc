// The kernels compiled for one instruction set; CMakeLists.txt gives this unit its flags.

#include "conv_tiles.h"
#include "isa_avx2.h"

namespace fewbit {

const ConvKernels kAvx2ConvKernels = MakeConvKernels<Avx2>();

}  // namespace fewbit
