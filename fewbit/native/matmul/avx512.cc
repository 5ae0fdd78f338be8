// The kernels compiled for one instruction set; CMakeLists.txt gives this unit its flags.

#include "isa/avx512.h"
#include "matmul/table.h"

namespace fewbit {

#if defined(FEWBIT_EMULATE_AVX512)
extern const ConvKernels kEmulatedAvx512ConvKernels;
void FinishEmulatedAvx512(const FinishRow& row);
void AttendEmulatedAvx512(const AttendBlock& block);
const Kernels kEmulatedAvx512Kernels = MakeKernels<Avx512>(
    "avx512_vnni (emulated)", &kEmulatedAvx512ConvKernels, FinishEmulatedAvx512,
    AttendEmulatedAvx512);
#else
const Kernels kAvx512VnniKernels =
    MakeKernels<Avx512>("avx512_vnni", &kAvx512VnniConvKernels, FinishAvx512, AttendAvx512);
#endif

}  // namespace fewbit
