// The kernels compiled for one instruction set; CMakeLists.txt gives this unit its flags.

#include "isa/avx2.h"
#include "matmul/table.h"

namespace fewbit {

const Kernels kAvx2Kernels =
    MakeKernels<Avx2>("avx2", &kAvx2ConvKernels, FinishAvx2, AttendAvx2);

}  // namespace fewbit
