// The kernels compiled for one instruction set; CMakeLists.txt gives this unit its flags.

#include "conv/tiles.h"
#include "isa/portable.h"

namespace fewbit {

const ConvKernels kPortableConvKernels = MakeConvKernels<Portable>();

}  // namespace fewbit
