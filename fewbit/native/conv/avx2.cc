// The kernels compiled for one instruction set; CMakeLists.txt gives this unit its flags.

#include "conv/tiles.h"
#include "isa/avx2.h"

namespace fewbit {

const ConvKernels kAvx2ConvKernels = MakeConvKernels<Avx2>();

}  // namespace fewbit
