// The kernels compiled for one instruction set; CMakeLists.txt gives this unit its flags.

#include "isa/portable.h"
#include "matmul/table.h"

namespace fewbit {

const Kernels kPortableKernels =
    MakeKernels<Portable>("portable", &kPortableConvKernels, FinishPortable, AttendPortable);

}  // namespace fewbit
